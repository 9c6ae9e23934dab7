"""Processes that a part starts: their whole output in a file, an end after their time, and the stacks of what hung."""

import faulthandler
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

ROOT = Path(__file__).parents[2]
LAST_WORDS_S = 5
"""Seconds in which a process that is ended may write its stacks and end its own children."""


def environment(device: str) -> dict[str, str]:
    """The environment of a process that imports this package, the tests and these benchmarks, for one type of device.

    On a GPU no kernel is interpreted, whatever the caller's environment says.
    """
    paths = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    found = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "TEST_DEVICE": device,
    }
    return found if device == "cpu" else found | {"TRITON_INTERPRET": "0"}


def ran(
    command: Sequence[str], env: Mapping[str, str], log: Path, most_s: float, shown: bool = False
) -> int | None:
    """Runs a process in a group of its own; its stdout and stderr go to the file `log`.

    Args:
        shown: Whether the output is printed here, too.

    Returns:
        The exit code, or None where the process was ended after `most_s` seconds.
    """
    with log.open("wb") as file:
        where = subprocess.PIPE if shown else file
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=dict(env),
            stdout=where,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        reader = Thread(target=_copy, args=(process.stdout, file), daemon=True)
        if shown:
            reader.start()
        try:
            return process.wait(most_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end(process)
            if shown:
                reader.join(LAST_WORDS_S)


def end(process: "subprocess.Popen[Any]") -> None:
    """Ends a process and what is left of its group: first in a way that lets it write its stacks."""
    if process.poll() is None:
        _signal(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(LAST_WORDS_S)
    _signal(process.pid, signal.SIGKILL)
    process.wait()


def how_it_ended(code: int | None, most_s: float) -> str:
    """The end of a process in words."""
    if code is None:
        return f"was ended after {most_s:.0f} s without an end of its own"
    name = f" ({signal.Signals(-code).name})" if code < 0 else ""
    return f"ended with exit code {code}{name}"


def stacks_at_the_end(ends: bool = True) -> None:
    """A crash, and SIGTERM, write the stacks of all threads to stderr as it is now.

    Args:
        ends: Whether SIGTERM then ends Python as an exception does, so that children are ended, too.
    """
    stderr = os.dup(2)  # pytest puts another one in its place
    faulthandler.enable(stderr)
    if ends:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    faulthandler.register(signal.SIGTERM, stderr, chain=True)


def _signal(group: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def _copy(source: Any, file: Any) -> None:
    with source:
        for line in source:
            file.write(line)
            file.flush()
            print(line.decode(errors="replace"), end="", flush=True)
