"""Results and failures of ranks as JSON files, and the root cause among several failures."""

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
"""After a rank lost its connection, seconds to wait for the root cause: another rank's failure."""


@dataclass(frozen=True)
class Failure:
    """The failure of one rank.

    kind: the class of the exception, or the name of the signal. text: the message. when:
    `time.time()` of the failure. network: True if the end of another rank can cause this failure.
    bad_input: True if the user can fix the cause. complete: True if the text already says who
    failed, so that it gets no prefix "rank N:".
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
    """An error whose message is clear without the class of the error and without the number of the
    rank.
    """


class StopRequested(RunError):
    """Raised when a signal asked this process to stop and all work is saved.

    code: the exit code, which is 128 + the number of the signal.
    """

    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)
        self.code = 128 + number


class SecondaryFailure(RunError):
    """Raised on a rank that stops because another rank failed. That other rank reports the
    cause.
    """


class WorldError(DetonationError, RuntimeError):
    """Raised when a rank failed. The message names the root cause, not its effects on other ranks.

    reported: True if another process of the same launcher has already reported the failure.
    """

    def __init__(self, failure: Failure, world_size: int, reported: bool = False) -> None:
        self.failure = failure
        self.reported = reported
        where = ""
        if world_size > 1 and not failure.complete:
            where = f"rank {failure.rank}: "
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
    """Describes the failure of `rank`, which ended with exit code `code` and left no message.

    If a signal with number n ended the rank, `code` is -n. If this signal was a request to stop,
    `code` may also be 128 + n; see `interrupts.end`.
    """
    if code - 128 in REQUESTS:
        code = -(code - 128)
    if code > 0:
        return Failure(rank, time.time(), "SystemExit", f"ended with code {code} and no message")
    names = (each.name for each in signal.Signals if each == -code)
    name = next(names, f"signal {-code}")  # real-time signals have no name
    hint = ""
    if -code == signal.SIGKILL:
        hint = " (out of memory?)"
    # gloo may abort a process when its peer ends, so SIGABRT can be a consequence of that end
    return Failure(
        rank, time.time(), name, f"ended by {name}{hint}", network=-code == signal.SIGABRT
    )


def root_cause(failures: Sequence[Failure]) -> Failure | None:
    """Returns the earliest failure that the end of another rank cannot cause. If there is none,
    returns the earliest failure.
    """
    return min(failures, key=lambda failure: (failure.network, failure.when), default=None)


def describe(error: BaseException) -> str:
    """Describes an error in one line, by its message. If the message alone is unclear, the class of
    the error precedes it.
    """
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    if isinstance(error, ValueError | RunError | WorldError) or type(error) is RuntimeError:
        return lines[0]
    if isinstance(error, OSError) and error.strerror:
        if error.filename:
            return f"{error.strerror}: {error.filename}"
        return error.strerror
    return f"{type(error).__name__}: {lines[0]}"


def is_network_error(error: BaseException) -> bool:
    """True if the end of another rank can be the cause of `error`."""
    if isinstance(error, WorldError):
        return error.failure.network
    if isinstance(error, dist.DistError | ConnectionError | SecondaryFailure):
        return True
    return isinstance(error, RuntimeError) and any(
        word in str(error).lower() for word in _NETWORK_WORDS
    )


def write_result(path: Path, value: Any) -> None:
    """Writes JSON values to a file atomically, so a file that exists is complete."""
    write_whole(path, json.dumps(value).encode())
