"""The answers of a command to people: lines, errors in one line, and exit codes."""

import errno
import json
import os
import sys
import traceback

from detonation.cli.flags import Common
from detonation.report.words import printable


def say(verb: Common, line: str) -> None:
    """Prints lines for people: to stderr where stdout is for a program."""
    line = "\n".join(map(printable, line.splitlines()))
    if verb.json:
        _to_stderr(line)
    else:
        print(line)


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
    out, name = getattr(verb, "out", None), str(getattr(error, "filename", None) or "")
    unwritable = out and name and (str(out).startswith(name) or name.startswith(str(out.with_suffix(""))))
    full = out and os.strerror(errno.ENOSPC) in str(error)
    remedy = ": free some space, or choose another --out" if full else ": choose another --out" * bool(unwritable)
    return fail(describe(error) + remedy, 2 if bad_input else 1, verb.json)


def fail(line: str, code: int, as_json: bool) -> int:
    """Prints the line of an error, for a program too; returns `code`."""
    try:
        if as_json:
            print(json.dumps({"error": line, "code": code}), flush=True)
    finally:  # also where nobody reads stdout
        _to_stderr(f"error: {printable(line)}")
    return code


def _to_stderr(line: str) -> None:
    """Prints a line to stderr, whose reader may be gone: the program that reads stdout still gets its object."""
    try:
        print(line, file=sys.stderr)
    except BrokenPipeError:
        from detonation.report.terminal import discard

        discard(sys.stderr)
