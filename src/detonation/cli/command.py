"""The command `detonation`: parses the command line, calls the function of the verb, and prints its
result.
"""

import contextlib
import io
import json
import os
import select
import signal
import sys
from inspect import cleandoc
from itertools import pairwise
from pathlib import Path
from typing import Any

import tyro
from tyro.conf import FlagCreatePairsOff

from detonation.choices import unknown
from detonation.cli.arguments import KINDS, Probe, Train, verbs
from detonation.cli.verbs import VERBS, explain, fail
from detonation.interrupts import REQUESTS, ended_by, open_closed_streams
from detonation.report.words import printable
from detonation.version import __version__
from detonation.whole_files import json_text

_INTERFACE: dict[str, Any] = {
    "prog": "detonation",
    "description": (
        "Train PyTorch models over slow links: sharded inside a node, compressed between"
        " nodes.\n\n--version prints all versions; with --compare FILE, the differences from"
        " another --version --json."
    ),
    "config": (FlagCreatePairsOff,),
}
"""Options of tyro that all verbs share."""

_MEANT = {"replay": "follow"}
"""Functions of the library whose names users may try as verbs, each with the verb that does the
same.
"""


def run_command(arguments: list[str] | None = None) -> int:
    """Runs one command line; returns the exit code.

    0 means success or a stop on request, 1 a failure, 2 bad input, 130 Ctrl-C, and 141 that the
    reader of stdout has closed the pipe. Characters that the encoding of stdout lacks are escaped.
    A rank under a launcher does not return: see `end_now`.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            return _command(arguments)
        finally:  # `finally` also runs after --help, which raises SystemExit
            print(end="", flush=True)
    except OSError as error:
        if not _is_of_stdout(error):
            raise
        return _without_stdout(error)


def _command(arguments: list[str]) -> int:
    name = "--help"
    if arguments:
        name = arguments[0]
    if name == "--version":
        return _print_versions(arguments)
    if name in ("-h", "--help"):
        arguments = ["--help"]
    elif not name.startswith("-") and name not in KINDS:
        error = unknown("verb", name, KINDS, _MEANT.get(name, name))
        return fail(str(error), 2, "--json" in arguments)
    try:
        verb = _parsed(arguments)
    except SystemExit as end:
        if end.code and KINDS.get(name) in (Train, Probe):
            _refuse(arguments)
        raise
    # set these variables before the import of torch, because torch reads them only then
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    level = "ERROR"
    if verb.debug:
        level = "WARNING"
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", level)
    # search the current directory last: it may hold the module of "package.module:function"
    if "" not in sys.path:
        sys.path.append("")
    code = _run(verb)
    if isinstance(verb, Train | Probe) and _under_launcher():
        from detonation.cluster.processes.signals import end_now

        end_now(code)
    return code


def _parsed(arguments: list[str]) -> Any:
    """Parses the verb and its flags. An error names only the flags of this verb."""
    kind = KINDS.get(arguments[0])
    if kind is None:
        return tyro.cli(verbs(brief=arguments == ["--help"]), args=arguments, **_INTERFACE)
    own = {
        "prog": f"{_INTERFACE['prog']} {arguments[0]}",
        "description": cleandoc(str(kind.__doc__)),
    }
    return tyro.cli(kind, args=arguments[1:], **(_INTERFACE | own))


def _print_versions(arguments: list[str]) -> int:
    """Prints the version of this package first, and then the versions of other packages, because
    their imports take longer.

    With --compare, prints how this machine differs from the machine that wrote the given file.
    """
    as_json = "--json" in arguments
    compares = "--compare" in arguments
    if not as_json and not compares:
        print(f"detonation {__version__}", flush=True)
    from detonation.train.output.directory import (
        bits_of_steps,
        compare_machines,
        environment,
        environment_lines,
    )

    found = environment()
    lines = environment_lines(found)
    if as_json or compares:
        found["steps"] = bits_of_steps()
    if compares:
        name = next(iter(arguments[arguments.index("--compare") + 1 :]), "")
        try:
            lines = compare_machines(found, json.loads(Path(name).read_text()))
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return fail(
                f"--compare is {name!r}, must be a file that detonation --version --json printed",
                2,
                as_json,
            )
    if as_json:
        lines = [json_text(found)]
    print("\n".join(map(printable, lines)))
    return 0


def _run(verb: Any) -> int:
    try:
        result = VERBS[type(verb)](verb)
        if verb.json and result is not None:
            print(json_text(result))
        print(end="", flush=True)
    except KeyboardInterrupt:
        line = ended_by(signal.SIGINT) + _how_to_continue(verb)
        return fail(line, 128 + signal.SIGINT, verb.json)
    # after a stop request, a verb exits here when its child processes and folders are removed
    except SystemExit as ended:
        if not isinstance(ended.code, int) or ended.code - 128 not in REQUESTS:
            raise
        return fail(ended_by(ended.code - 128), ended.code, verb.json)
    except Exception as error:
        if isinstance(error, OSError) and _is_of_stdout(error):
            return _without_stdout(error)
        return explain(verb, error)
    if result is not None and result.get("good") is False:
        return 1
    return 0


def _how_to_continue(verb: Any) -> str:
    if not isinstance(verb, Train) or verb.out is None:
        return ""
    ways = []
    if verb.join or verb.replica is not None:
        ways.append(f"with --join {verb.join or verb.meet or 'HOST:PORT'} while others train")
    if any((verb.out / "checkpoints").glob("step-*")):
        ways.append(f"with --out {verb.out} --resume")
    if not ways:
        return ""
    return f"; continue {', else '.join(ways)}"


def _is_of_stdout(error: OSError) -> bool:
    """True if the reader of stdout has closed the pipe (for example `| head`), or if the disk of
    stdout is full.
    """
    if isinstance(error, BrokenPipeError):
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    try:
        print(end="", flush=True)  # print raises a second error if the buffer of stdout holds text
    except OSError:
        return True
    return False


def _without_stdout(error: OSError) -> int:
    """Discards the buffered text of stdout. Reports a full disk. Returns the exit code."""
    from detonation.report.terminal import discard

    discard(sys.stdout)
    if isinstance(error, BrokenPipeError):
        return 128 + signal.SIGPIPE
    return fail(f"cannot write to stdout: {error.strerror}", 1, False)


def _refuse(arguments: list[str]) -> None:
    """Tells the other ranks of a launcher and the other replicas that this command line is invalid.
    Otherwise ranks with a valid command line would wait for this rank.
    """
    meet = _last_value("--meet", arguments)
    replica = _last_value("--replica", arguments)
    elastic = meet and replica.isdecimal()
    if not elastic and not _under_launcher():
        return
    from detonation.cluster.position import launch_position
    from detonation.cluster.processes.refusal import refuse_world
    from detonation.cluster.quorum.store import refuse_replica

    reason = f"invalid command line: {' '.join(['detonation', *arguments])}"
    position = launch_position(os.environ)
    if position is not None:
        refuse_world(position, ValueError(reason))
    if elastic:
        refuse_replica(meet, int(replica), reason)


def _last_value(flag: str, arguments: list[str]) -> str:
    """Returns the value of `flag` in a command line that cannot be parsed; "" if the flag has no
    value.
    """
    words = [word for each in arguments for word in each.split("=", 1)]
    found = [value for name, value in pairwise(words) if name == flag]
    return next(reversed(found), "")


def _under_launcher() -> bool:
    from detonation.cluster.position import launch_position  # this import does not load torch

    # the verb has already reported environment variables that are not valid
    with contextlib.suppress(ValueError):
        return launch_position(os.environ) is not None
    return False
