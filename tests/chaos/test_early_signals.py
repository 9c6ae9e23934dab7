"""Ctrl-C and SIGTERM before a command trains: it ends at once, with one line, and leaves no process."""

import contextlib
import re
import select
import signal
import socket
import time

import pytest
from early_signals import Started, cases

from limits import LIMIT_S


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Starts the case of that name; its silent address is `listener`. Ends what still runs."""
    folder, running = tmp_path_factory.mktemp("early"), []
    with cases(folder) as found:
        named = {case.name: case for case in found.commands}

        def start(name):
            pattern = rf"(^|\s){re.escape(name)}(\s|$)"
            (case,) = [each for words, each in named.items() if re.search(pattern, words)]
            running.append(Started(case, folder / f"try{len(running)}"))
            return running[-1]

        start.listener = found.listener
        yield start
        for command in running:
            command.close()


def wait_for(command, condition):
    """Returns once `condition` holds; fails where the command ends before."""
    limit = time.monotonic() + LIMIT_S
    while not condition(command):
        assert not command.ended_within(0.01), command.stderr
        assert time.monotonic() < limit


def begun(command):
    return command.has_begun


def imports_torch(command):
    return command.maps("libtorch_cpu")


def prints(command):
    return command.stdout != ""


def has_children(command):
    return command.runs("sleep")


@pytest.mark.long_cases("train tiny.toml --out OUT (alone)-begun-2", "meet-prints-2")
@pytest.mark.parametrize(
    ("name", "moment", "number"),
    [
        ("train tiny.toml --out OUT (alone)", begun, signal.SIGINT),
        ("train tiny.toml --out OUT (alone)", imports_torch, signal.SIGTERM),
        ("compare", imports_torch, signal.SIGINT),
        ("plan short.toml", imports_torch, signal.SIGUSR1),
        ("report", begun, signal.SIGTERM),
        ("simulate", prints, signal.SIGINT),
        ("meet", prints, signal.SIGINT),
        ("fetch", has_children, signal.SIGTERM),
    ],
)
def test_a_command_ends_at_once(started, name, moment, number):
    command = started(name)
    wait_for(command, moment)
    outcome = command.end_by(number)
    assert (outcome.how, outcome.problem) == ("at once", "")


@pytest.mark.long_cases("--join-15", "--meet-2", "follow HOST:PORT-15")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("name", ["--join", "--meet", "follow HOST:PORT"])
def test_it_ends_at_once_while_it_waits_for_somebody_who_never_answers(started, name, number):
    while select.select([started.listener], [], [], 0)[0]:  # of the commands before
        started.listener.accept()[0].close()
    command = started(name)
    wait_for(command, lambda _: select.select([started.listener], [], [], 0)[0])
    with started.listener.accept()[0]:
        outcome = command.end_by(number)
    assert (outcome.how, outcome.problem) == ("at once", "")


def test_a_rank_ends_at_once_while_it_waits_for_the_ranks_of_its_launcher(started):
    command = started("(launched)")
    port = int(command.env["MASTER_PORT"])

    def listens(_):
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port)).close()
            return True

    wait_for(command, listens)
    assert command.end_by(signal.SIGTERM).problem == ""
