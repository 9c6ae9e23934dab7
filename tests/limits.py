"""The limit of tests that wait for something, and a clock for those that need not."""

import time
from collections.abc import Callable

LIMIT_S = 600
"""Whatever has not come by now hangs: a slow and busy machine takes a tenth of it.

It is shorter than pytest's own (pyproject.toml), which tells nothing of other processes.
"""


def until(holds: Callable[[], object], otherwise: str = "it did not happen") -> None:
    """Waits until `holds()` is true; fails with `otherwise` after `LIMIT_S`."""
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline, f"{otherwise} within {LIMIT_S} s"
        time.sleep(0.01)


class Clock:
    """A clock that advances by sleeping alone."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
