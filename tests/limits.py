"""The limit of tests that wait for something, and a clock for those that need not."""

LIMIT_S = 600
"""Whatever has not come by now hangs: a slow and busy machine takes a tenth of it.

It is shorter than pytest's own (pyproject.toml), which tells nothing of other processes.
"""


class Clock:
    """A clock that advances by sleeping alone."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
