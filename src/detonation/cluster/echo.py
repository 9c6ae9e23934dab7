"""Echo: a wire on which every replica says what this one says, so that a step's own work can be timed alone."""

from collections.abc import Callable

from torch import Tensor


class Echo:
    """A wire among `replicas` that all send the same; nothing leaves this rank."""

    def __init__(self, replicas: int) -> None:
        self._replicas, self.replica = replicas, 0

    def size(self) -> int:
        return self._replicas

    def reduce(self, values: Tensor) -> Callable[[], Tensor]:
        return lambda: values.mul_(self._replicas)

    def gather(self, mine: Tensor) -> Callable[[], Tensor]:
        return lambda: mine.expand(self._replicas, -1)

    def swap(self, mine: Tensor) -> Callable[[], Tensor]:
        return lambda: mine.view(self._replicas, -1)[:1].expand(self._replicas, -1)
