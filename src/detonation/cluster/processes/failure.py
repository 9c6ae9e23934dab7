"""Why a rank ended, in one line, and whether that is a cause or only the echo of another rank's end."""

import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

_NETWORK_WORDS = ("connection closed by peer", "connection reset", "broken pipe", "timed out", "gloo", "nccl", "socket")
ECHO_S = 2.0
"""How long the cause may take to be known when a rank only lost its connection."""


@dataclass(frozen=True)
class Failure:
    """Why a rank ended: the exception's class and text, or the signal; `network` marks what a peer's end can cause.

    complete: the text says what it is about, so that the rank that it happened on adds nothing.
    """

    rank: int
    when: float
    kind: str
    text: str
    trace: str = ""
    network: bool = False
    bad_input: bool = False
    complete: bool = False


class RunError(RuntimeError):
    """A failure whose message says all that a person needs to know."""


class Echo(RunError):
    """This rank stops because another one failed, which tells why."""


class WorldError(RuntimeError):
    """A rank failed; carries the first real cause, not what its end did to its peers.

    told: another process of the same launcher shows it already.
    """

    def __init__(self, failure: Failure, world_size: int, told: bool = False) -> None:
        self.failure, self.told = failure, told
        where = "" if failure.complete or world_size == 1 else f"rank {failure.rank}: "
        super().__init__(where + failure.text)


def by_exception(rank: int, error: BaseException) -> Failure:
    """The failure of a rank that raised `error`."""
    return Failure(
        rank,
        time.time(),
        type(error).__name__,
        describe(error),
        "".join(traceback.format_exception(error)),
        network=is_network(error),
        bad_input=isinstance(error, ValueError),
        complete=isinstance(error, ValueError | RunError),
    )


def by_exit(rank: int, code: int) -> Failure:
    """The failure of a rank that ended with `code` and said nothing; below 0 it is a signal."""
    if code > 0:
        return Failure(rank, time.time(), "SystemExit", f"ended with code {code} and no message")
    name = signal.Signals(-code).name
    hint = " (out of memory?)" if -code == signal.SIGKILL else ""
    # gloo aborts the process when a peer is gone at the wrong moment, so SIGABRT may be an echo.
    return Failure(rank, time.time(), name, f"ended by {name}{hint}", network=-code == signal.SIGABRT)


def first_cause(failures: Sequence[Failure]) -> Failure | None:
    """The earliest failure, one that no peer's end explains before one that it does."""
    return min(failures, key=lambda failure: (failure.network, failure.when), default=None)


def describe(error: BaseException) -> str:
    """One line for a person: the message, and before it the class where the message alone would not tell."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    if isinstance(error, ValueError | RunError | WorldError) or type(error) is RuntimeError:
        return lines[0]
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"{type(error).__name__}: {lines[0]}"


def is_network(error: BaseException) -> bool:
    """Could this be only the echo of another rank's end?"""
    if isinstance(error, dist.DistError | ConnectionError | Echo):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _NETWORK_WORDS)
