"""Handles signals that ask a run to stop, and ends a process that a network library may block."""

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
"""A second signal within this number of seconds counts as the same request to stop, because
launchers forward signals that all processes have already received.
"""


class Stop:
    """A request to stop: holds the number of the signal that asked this process to stop. The number
    is 0 while no signal has asked.

    has_launcher: True if a launcher started the process. A signal may then arrive twice: directly,
    and later from the launcher. The second arrival may be late, because the launcher was busy.
    """

    def __init__(self, has_launcher: bool = False) -> None:
        self.number = 0
        self._since = 0.0
        self._at_once = False
        self._awaits_copy = has_launcher

    def __bool__(self) -> bool:
        return self.number != 0

    def receive(self, number: int) -> None:
        """Records the first request to stop. Ends the process immediately on a second request or on
        Ctrl-C.
        """
        if number not in SIGNALS:
            return
        if number == signal.SIGINT or self._at_once:
            end(number)
        now = time.monotonic()
        if not self:
            self._since = now
            self.number = number
            return
        if now - self._since > SAME_REQUEST_S and not self._awaits_copy:
            end(number)
        self._awaits_copy = False

    def repeats(self, number: int) -> bool:
        """True if this signal only repeats the first request to stop. For example, the program
        `timeout` sends a signal to a command, and then again to the command's whole process group.
        """
        return number == self.number and time.monotonic() - self._since <= SAME_REQUEST_S

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Context manager in which the first request to stop ends the process immediately, because
        there is nothing to save.
        """
        if self:
            end(self.number)
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False


_stop: Stop | None = None
_has_launcher = False


@contextmanager
def stoppable() -> Iterator[Stop]:
    """Context manager that yields a `Stop`, in which it records the first request to stop. A second
    request ends the process with exit code 128 + the number of its signal.

    Ctrl-C ends the process at once, also as the first request. If the process ignored Ctrl-C before
    this context, it still ignores Ctrl-C. Only the main thread may enter this context. A nested
    call yields the outer `Stop`.
    """
    global _stop
    if _stop is not None:
        yield _stop
        return
    _stop = Stop(_has_launcher)
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
    """Makes the kernel end this process as soon as its launcher, the process `parent`, ends.

    Linux only.
    """
    global _has_launcher
    _has_launcher = True
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG
        if os.getppid() != parent:  # the parent ended before the call of `prctl`
            os._exit(1)


def die_with_agent(env: Mapping[str, str]) -> None:
    """Applies `die_with_parent` to a rank of torchrun: otherwise the rank would go on after the
    agent of torchrun was killed.

    Does nothing under srun. After `die_with_parent`, Linux ends the rank as soon as the thread that
    started the rank ends. Only torchrun certainly starts ranks from its main thread.
    """
    if "TORCHELASTIC_RUN_ID" in env:
        die_with_parent(os.getppid())


def end_now(code: int) -> NoReturn:
    """Flushes the output and ends this process with exit code `code` immediately, from any thread.

    The network libraries have threads of their own, which may hold Python objects or wait for a
    lost peer. If the interpreter shuts down while these threads run, the process may hang or abort.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    begin_end()
    os._exit(code)


def end_if_asked() -> None:
    """Ends this process like `end` if a signal has asked the process to stop. Call this function
    only while there is nothing to save.
    """
    if _stop:
        end(_stop.number)
