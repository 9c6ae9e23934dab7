"""The answers of a command to people: lines, errors in one line, and exit codes."""

import json
import sys
import traceback

from detonation.cli.common import Common
from detonation.report.words import printable


def say(verb: Common, line: str) -> None:
    """Prints a line for people: to stderr where stdout is for a program."""
    print(printable(line), file=sys.stderr if verb.json else sys.stdout)


def explain(verb: Common, error: Exception) -> int:
    """Prints an error in one line, unless another rank has; returns the exit code: 2 for bad input, else 1."""
    from detonation.cluster.processes.failure import WorldError, describe

    world = error if isinstance(error, WorldError) else None
    if verb.debug:
        trace = world.failure.trace if world else ""
        print(trace or "".join(traceback.format_exception(error)), file=sys.stderr, end="")
    if world and world.reported:
        return 2 if world.failure.bad_input else 1
    bad_input = world.failure.bad_input if world else isinstance(error, ValueError)
    return fail(describe(error), 2 if bad_input else 1, verb.json)


def fail(line: str, code: int, as_json: bool) -> int:
    """Prints the line of an error, for a program too; returns `code`."""
    if as_json:  # first: a program may read stdout alone
        print(json.dumps({"error": line, "code": code}), flush=True)
    try:
        print(f"error: {printable(line)}", file=sys.stderr)
    except BrokenPipeError:
        from detonation.report.console import discard

        discard(sys.stderr)
    return code
