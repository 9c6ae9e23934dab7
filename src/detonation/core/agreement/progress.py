"""The progress of this process through its steps, for a thread that watches it.

Nothing here waits or communicates: a step writes two numbers, and the watch of `cluster.processes` reads them.
"""

from collections.abc import Callable


class Progress:
    """The steps of this process.

    steps: the steps that have begun, of all optimizers. inside: a step is under way. explain: called with an error that
    ends a step, to say in its text who did not come.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.inside = False
        self.explain: Callable[[BaseException], None] = lambda error: None


PROGRESS = Progress()
"""Of this process. (Simulated replicas are threads that share it; nobody watches them.)"""
