"""The entry point of the command line: `detonation`, or `python -m detonation`."""

import os
import sys
from pathlib import Path

from detonation.interrupts import end_at_once, let_kernel_end

ENDED_BY_SIGNAL = 128
"""If signal n has ended a command, its exit code is 128 + n."""
INTERRUPTED = 130


def main() -> int:
    """Runs the command line. If an optional package is missing, prints the name of the extra to
    install.
    """
    end_at_once()
    try:
        code = _run_somewhere()
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        code = INTERRUPTED
    finally:
        let_kernel_end()
    if code > ENDED_BY_SIGNAL:
        # skip the shutdown of the interpreter, which takes a second and may hang
        print(end="", flush=True)
        os._exit(code)
    return code


def _run_somewhere() -> int:
    """Runs the command line. If the working directory was removed, prints an error instead, because
    libraries abort in such a directory.
    """
    try:
        Path.cwd()
    except FileNotFoundError:
        print(
            "error: the working directory was removed: change to one that exists", file=sys.stderr
        )
        return 2
    return _run()


def _run() -> int:
    try:
        from detonation.cli.command import run_command
    except ModuleNotFoundError as error:
        if error.name not in ("tyro", "rich"):
            raise
        print(
            f"error: the command line needs {error.name}: pip install '.[train]' in a clone",
            file=sys.stderr,
        )
        return 2
    return run_command()


if __name__ == "__main__":
    sys.exit(main())
