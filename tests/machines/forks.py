"""Programs as forks of this process, which has imported torch: `detonation`, `torchrun`, and Python files.

torchrun is torch's own; only its ranks are forks, where it would start interpreters.
"""

import contextlib
import importlib
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from torch.distributed import run as torchs_run
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from detonation.cli.command import run_command

for _name in (
    "_dynamo",
    "distributed.fsdp",
    "distributed.pipelining",
    "distributed.tensor.parallel",
):
    importlib.import_module(f"torch.{_name}")  # once, for all forks


class Fork(subprocess.Popen[bytes]):
    """A process that runs the command line `args` in a fork, with the methods of `subprocess.Popen`."""

    def _execute_child(self, args: Sequence[str], *others: Any) -> None:
        env = next(each for each in others if isinstance(each, Mapping))
        self.pid = os.fork()
        if self.pid == 0:
            _run([*args], env)
        self._child_created = True


def start(args: Sequence[str], env: Mapping[str, str]) -> Fork:
    """Starts the command line `args` with the environment `env`."""
    sys.stdout.flush()
    sys.stderr.flush()
    return Fork(args, env=dict(env))


def _run(args: list[str], env: Mapping[str, str]) -> NoReturn:
    code = 70
    try:
        os.setsid()
        os.environ.clear()
        os.environ.update(env)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = _program(args)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _program(args: list[str]) -> int:
    """Runs a command line, and returns its exit code."""
    name, *words = args
    if name == "detonation":
        return run_command(words)
    if name == "torchrun":
        subprocess_handler.Popen = _rank  # type: ignore[misc,assignment]
        torchs_run.main(words)
        return 0
    words = [word for word in words if word != "-u"]
    if words[0] == "-m":
        if words[1] == "detonation":
            return run_command(words[2:])
        raise ValueError(f"{words[1]} is no module that runs here")
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
    return 0


def _rank(args: Sequence[str], env: Mapping[str, str], **_: Any) -> Fork:
    """A rank of torchrun, which starts `python -u ...`."""
    return start(["python", *args[1:]], env)
