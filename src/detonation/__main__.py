"""The entry of the command line: `detonation`, or `python -m detonation`."""

import sys


def main() -> int:
    """Runs the command line; names the missing extra where the library was installed alone."""
    try:
        from detonation.cli.command import run_command
    except ModuleNotFoundError as error:
        if error.name not in ("tyro", "rich"):
            raise
        print(f"error: the command line needs {error.name}: pip install 'detonation-torch[train]'", file=sys.stderr)
        return 2
    return run_command()


if __name__ == "__main__":
    sys.exit(main())
