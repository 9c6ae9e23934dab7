"""A rank's end in a file: its cause in one line, or its result, as JSON."""

import json
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from detonation.core.base_error import DetonationError
from detonation.interrupts import REQUESTS
from detonation.whole_files import write_whole

_NETWORK_WORDS = (
    "connection closed by peer",
    "connection reset",
    "broken pipe",
    "timed out",
    "gloo",
    "nccl",
    "socket",
)
ROOT_CAUSE_WAIT_S = 2.0
"""How long to wait for the root cause when a rank only lost its connection."""


@dataclass(frozen=True)
class Failure:
    """The end of one rank.

    kind: the class of the exception, or the name of the signal. text: the message. when:
    `time.time()`. network: the end of a peer can cause this failure. bad_input: the user can mend
    it. complete: the text names its subject, so that the rank need not be added.
    """

    rank: int
    when: float
    kind: str
    text: str
    trace: str = ""
    network: bool = False
    bad_input: bool = False
    complete: bool = False


class RunError(DetonationError, RuntimeError):
    """A failure whose message is complete: it needs no class name and no rank beside it."""


class StopRequested(RunError):
    """A signal asked for the end, and all that was done is saved. code: 128 + its number."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)
        self.code = 128 + number


class SecondaryFailure(RunError):
    """This rank stops because another rank failed and reports the cause."""


class WorldError(DetonationError, RuntimeError):
    """A rank failed: the root cause, not the effects of that rank's end on its peers.

    reported: another process of the same launcher has reported it already.
    """

    def __init__(self, failure: Failure, world_size: int, reported: bool = False) -> None:
        self.failure, self.reported = failure, reported
        where = "" if failure.complete or world_size == 1 else f"rank {failure.rank}: "
        super().__init__(where + failure.text)


def failure_from_exception(rank: int, error: BaseException) -> Failure:
    return Failure(
        rank,
        time.time(),
        type(error).__name__,
        describe(error),
        "".join(traceback.format_exception(error)),
        network=is_network_error(error),
        bad_input=isinstance(error, ValueError),
        complete=isinstance(error, ValueError | RunError),
    )


def failure_from_exit_code(rank: int, code: int) -> Failure:
    """The failure of a rank that ended with `code` and left no message; below 0 it is a signal.

    A rank that a request ended at once has 128 + its number; see `interrupts.end`.
    """
    code = -(code - 128) if code - 128 in REQUESTS else code
    if code > 0:
        return Failure(rank, time.time(), "SystemExit", f"ended with code {code} and no message")
    name = next(
        (each.name for each in signal.Signals if each == -code), f"signal {-code}"
    )  # real-time: no name
    hint = " (out of memory?)" if -code == signal.SIGKILL else ""
    # gloo aborts the process when a peer is gone at the wrong moment, so SIGABRT may follow from
    # another rank's end.
    return Failure(
        rank, time.time(), name, f"ended by {name}{hint}", network=-code == signal.SIGABRT
    )


def root_cause(failures: Sequence[Failure]) -> Failure | None:
    """The earliest failure that no peer's end explains; where there is none, the earliest of all."""
    return min(failures, key=lambda failure: (failure.network, failure.when), default=None)


def describe(error: BaseException) -> str:
    """One line for a person: the message, after the class of the error where the message alone is
    not clear."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    if isinstance(error, ValueError | RunError | WorldError) or type(error) is RuntimeError:
        return lines[0]
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"{type(error).__name__}: {lines[0]}"


def is_network_error(error: BaseException) -> bool:
    """True where the end of another rank may be the only cause of `error`."""
    if isinstance(error, dist.DistError | ConnectionError | SecondaryFailure):
        return True
    return isinstance(error, RuntimeError) and any(
        word in str(error).lower() for word in _NETWORK_WORDS
    )


def write_result(path: Path, value: Any) -> None:
    """Writes JSON values to a file that appears whole: its presence means that the result is
    complete."""
    write_whole(path, json.dumps(value).encode())
