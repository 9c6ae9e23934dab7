"""Defines what Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 do to a process that runs a command. Uses only
the standard library, and imports no other module of the package.

A process is in one of three states:

- at once (`end_at_once`): a signal with number n ends the process with one line of output and exit
  code 128 + n. This is the first state of a process.
- raising (`raising`): the main thread must end child processes or remove folders, so a signal
  raises an exception in this thread.
- watched (`watched`): training saves its state and ends; see `stoppable` in
  cluster/processes/signals.py.

In the first state an exception would not suffice: imports and libraries catch exceptions, and a
main thread that waits in C code does not raise them.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

REQUESTS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that ask a process to end. The sender is a scheduler that preempts the job, a terminal
that closes, or a user. Training saves its state before it ends.
"""

SIGNALS = (signal.SIGINT, *REQUESTS)


def nothing(*_: object) -> None:
    """Does nothing."""


_before_end: Callable[[], None] = nothing
_ending = threading.RLock()
"""The one thread that ends this process acquires this lock and never releases it."""

_receivers: list[Callable[[int], object]] = []
_watch: "_Watch | None" = None
_speaks = False


def end_at_once() -> None:
    """Makes each signal end this process at once, with one line and code 128 + n; see `end`.

    If a signal was already ignored, as under nohup, it stays ignored. Forked children have the
    signal handlers from before this call.
    """
    global _speaks
    open_closed_streams()
    _speaks = True
    _receivers.append(end)
    _begin()


def open_closed_streams() -> None:
    """Opens the null device for each standard stream that was closed, for example by `>&-`.

    If a standard stream stayed closed, the next pipe or socket could get its descriptor. Libraries
    would then write their output into this pipe or socket.
    """
    for number in range(3):
        with suppress(OSError):
            os.fstat(number)
            continue
        os.open(os.devnull, os.O_RDWR)  # open returns the lowest free descriptor, which is `number`
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115


def let_kernel_end() -> None:
    """Restores the default actions of signals before the interpreter shuts down.

    Does not return if another thread is already ending the process.
    """
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    begin_end()


def begin_end() -> None:
    """Makes the calling thread the only thread that may end this process. Any other thread that
    calls this function blocks forever.
    """
    _ending.acquire()


def call_before_end(act: Callable[[], None]) -> None:
    """Registers a function that `end` calls first, for example to clear a progress bar. Any thread
    may call `end`.
    """
    global _before_end
    _before_end = act


def end(number: int) -> NoReturn:
    """Ends this process now, from any thread, with code 128 + `number`.

    A process that runs a command prints one line. If a launcher started several ranks on this
    machine, only the first of these ranks prints the line. If another thread already ends the
    process, this call blocks until the process has ended.
    """
    begin_end()
    _before_end()
    if _speaks and os.environ.get("LOCAL_RANK", "0") == "0":
        line = ended_by(number)
        if "--json" in sys.argv:
            _write(1, f'{{"error": "{line}", "code": {128 + number}}}\n')
        _write(2, f"error: {line}\n")
    os._exit(128 + number)


def ended_by(number: int) -> str:
    """Describes in words which signal ended the process.

    >>> ended_by(signal.SIGINT), ended_by(signal.SIGTERM)
    ('interrupted', 'ended by SIGTERM')
    """
    if number == signal.SIGINT:
        return "interrupted"
    return f"ended by {signal.Signals(number).name}"


@contextmanager
def watched(receive: Callable[[int], object]) -> Iterator[None]:
    """Context manager in which each signal calls `receive(number)` in another thread. Only the main
    thread may use it.

    Python runs signal handlers only between two instructions of the main thread, and this thread
    may wait long inside the network library. So Python's C handler writes to a pipe, and another
    thread reads this pipe.
    """
    _receivers.append(receive)
    begun = _watch is None
    if begun:
        _begin()
    try:
        yield
    finally:
        if receive in _receivers:  # a forked child process has no receivers
            _receivers.remove(receive)
        if begun and _watch is not None:
            _watch.close()


@contextmanager
def raising(handlers: Mapping[int, Any] | None = None) -> Iterator[None]:
    """Context manager in which a signal raises an exception in the main thread: KeyboardInterrupt
    or SystemExit(128 + n).

    `handlers` replaces or extends the default handlers, by signal number. Outside the main thread
    the context manager has no effect.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    chosen: dict[int, Any] = {signal.SIGINT: signal.default_int_handler}
    chosen |= dict.fromkeys(REQUESTS, _raise_exit)
    chosen |= handlers or {}
    # a signal that is already ignored, such as SIGHUP under nohup, stays ignored
    for each in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(each) == signal.SIG_IGN:
            del chosen[each]
    descriptor = signal.set_wakeup_fd(-1)
    before = {number: signal.signal(number, each) for number, each in chosen.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(descriptor)


def _raise_exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _begin() -> None:
    global _watch
    _watch = _Watch()


class _Watch:
    """The signal handlers, the pipe to which they write, and the thread that reads this pipe."""

    def __init__(self) -> None:
        self._receiver, self._sender = os.pipe()
        os.set_blocking(self._sender, False)
        numbers = [each for each in SIGNALS if signal.getsignal(each) != signal.SIG_IGN]
        self._descriptor = signal.set_wakeup_fd(self._sender, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, nothing) for number in numbers}
        self._thread = threading.Thread(target=self._read, name="signals", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while data := os.read(self._receiver, 1):
            # other signals, such as SIGCHLD, also arrive in the pipe
            if data[0] in SIGNALS and _receivers:
                _receivers[-1](data[0])

    def undo(self) -> None:
        global _watch
        _watch = None
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._descriptor)
        os.close(self._sender)

    def close(self) -> None:
        self.undo()
        self._thread.join()  # `_thread` ends after it has read all signals in the pipe
        os.close(self._receiver)

    def forget(self) -> None:
        """Removes this watch in a forked child process. The child process lacks the thread that
        reads the pipe, and shares the pipe with its parent.
        """
        self.undo()
        os.close(self._receiver)


def _forget() -> None:
    global _speaks, _before_end, _ending
    _speaks = False
    _before_end = nothing
    _ending = threading.RLock()
    _receivers.clear()
    if _watch is not None:
        _watch.forget()


# A signal to a forked child, such as a worker of a pool, must not stop the parent process.
os.register_at_fork(after_in_child=_forget)


def _write(descriptor: int, text: str) -> None:
    """Writes `text` without Python's streams, because another thread may hold the locks of these
    streams.
    """
    with suppress(OSError):
        os.write(descriptor, text.encode())
