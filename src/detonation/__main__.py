"""The entry of the command line: `detonation`, or `python -m detonation`."""

import os
import sys

INTERRUPTED = 130


def main() -> int:
    """Runs the command line; names the missing extra where the library was installed alone."""
    try:
        code = _run()
    except KeyboardInterrupt:  # while modules are imported
        print("error: interrupted", file=sys.stderr)
        code = INTERRUPTED
    if (
        code == INTERRUPTED
    ):  # perhaps in the middle of an import of torch, which an ordinary end may not survive
        print(end="", flush=True)
        os._exit(code)
    return code


def _run() -> int:
    try:
        from detonation.cli.command import run_command
    except ModuleNotFoundError as error:
        if error.name not in ("tyro", "rich"):
            raise
        print(
            f"error: the command line needs {error.name}: pip install 'detonation-torch[train]'",
            file=sys.stderr,
        )
        return 2
    return run_command()


if __name__ == "__main__":
    sys.exit(main())
