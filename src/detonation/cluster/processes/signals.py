"""Signals that ask a run to stop: noted at once, whatever code the process is in, and obeyed where a step ends."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STOPPING = (signal.SIGTERM, signal.SIGUSR1)
"""What asks for a checkpoint and an end: a scheduler that preempts, or a person."""

SAME_REQUEST_S = 1.0
"""Within this time a further signal is the same request: one sent to all processes also comes from the launcher."""


class Stop:
    """The signal that has asked this process to stop, as its number; 0 before there was one."""

    def __init__(self) -> None:
        self.number = 0
        self.last_act: Callable[[], None] = lambda: None  # of a process that ends at once
        self._since = 0.0

    def __bool__(self) -> bool:
        return self.number != 0

    def take(self, number: int) -> None:
        """Takes in a signal: notes the first request, ends the process at once on a second one or on Ctrl-C."""
        now = time.monotonic()
        if number == signal.SIGINT or (self and now - self._since > SAME_REQUEST_S):
            self.last_act()
            os._exit(128 + number)
        if not self and number in STOPPING:
            self._since, self.number = now, number


_stop: Stop | None = None


@contextmanager
def stoppable() -> Iterator[Stop]:
    """Within it SIGTERM and SIGUSR1 are noted in what it yields; a second one ends the process with 128 + its number.

    So does Ctrl-C, unless it was ignored before. Only the main thread may enter; within another one it is that one.
    """
    global _stop
    if _stop is not None:
        yield _stop
        return
    _stop = stop = Stop()
    receiver, sender = os.pipe()
    os.set_blocking(sender, False)
    # Python runs handlers between two of its own instructions, and a rank may wait inside the network library for
    # long. What C has written into the pipe by then, another thread reads at once.
    watcher = threading.Thread(target=_watch, args=(receiver, stop), name="signals", daemon=True)
    ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    numbers = STOPPING if ignored else (*STOPPING, signal.SIGINT)
    descriptor = signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    watcher.start()
    try:
        yield stop
    finally:
        _stop = None
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(descriptor)
        os.close(sender)
        watcher.join()
        os.close(receiver)


def _watch(receiver: int, stop: Stop) -> None:
    while data := os.read(receiver, 1):
        stop.take(data[0])
