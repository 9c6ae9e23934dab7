"""Signals that ask a run to stop, and the end of a rank without waiting for the network library."""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn

from detonation.interrupts import SIGNALS, begin_end, end, watched

SAME_REQUEST_S = 1.0
"""A further signal within this time is the same request: a signal to all processes also comes from
the launcher."""


class Stop:
    """Number of the signal that has asked this process to stop; 0 before there was a signal."""

    def __init__(self) -> None:
        self.number = 0
        self._since = 0.0
        self._at_once = False

    def __bool__(self) -> bool:
        return self.number != 0

    def receive(self, number: int) -> None:
        """Records the first request. Ends the process at once on a second request or on Ctrl-C."""
        if number not in SIGNALS:
            return
        now = time.monotonic()
        again = self and now - self._since > SAME_REQUEST_S
        if number == signal.SIGINT or again or self._at_once:
            end(number)
        if not self:
            self._since = now
            self.number = number

    def repeats(self, number: int) -> bool:
        """True if this signal repeats the first request: `timeout` sends it to the command, and
        then to the process group that the command is in."""
        return number == self.number and time.monotonic() - self._since <= SAME_REQUEST_S

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside the block the first request ends the process, too: nothing is there to save."""
        if self:
            end(self.number)
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False


_stop: Stop | None = None


@contextmanager
def stoppable() -> Iterator[Stop]:
    """Records SIGTERM and SIGUSR1 in the `Stop` that it yields; a second signal ends the process
    with 128 + its number.

    Ctrl-C ends the process too, unless it was ignored. Only the main thread may enter. Nested, it
    is the outer `Stop`.
    """
    global _stop
    if _stop is not None:
        yield _stop
        return
    _stop = Stop()
    try:
        with watched(_stop.receive):
            yield _stop
    finally:
        _stop = None


def _forget() -> None:
    global _stop
    _stop = None


os.register_at_fork(after_in_child=_forget)


def die_with_parent(parent: int) -> None:
    """Makes the kernel end this process as soon as its parent, process `parent`, ends.

    Linux only.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # the parent ended before the call above
            os._exit(1)


def die_with_agent(env: Mapping[str, str]) -> None:
    """Applies `die_with_parent` to a rank of torchrun, whose agent leaves its ranks behind when it
    is killed.

    Not for srun: Linux watches the thread that started a process, and only torchrun is known to
    start ranks from its main thread.
    """
    if "TORCHELASTIC_RUN_ID" in env:
        die_with_parent(os.getppid())


def end_now(code: int) -> NoReturn:
    """Flushes the output and ends this process with `code` at once, from any thread.

    The network libraries have threads of their own, which may hold Python objects or wait for a
    peer that is gone. An interpreter that shuts down around them may hang or abort.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    begin_end()
    os._exit(code)


def end_if_asked() -> None:
    """Ends this process, as `end`, if a signal has asked it to stop and there is nothing to save
    yet."""
    if _stop:
        end(_stop.number)
