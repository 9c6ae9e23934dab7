"""Echo: a wire on which every replica says what this one says, so that a step's own work can be timed alone."""

from collections.abc import Callable

import torch
from torch import Tensor

from detonation.core.integrity.header import resent


class Echo:
    """A wire among `replicas` that all send the same, each in its own name; nothing leaves this rank."""

    def __init__(self, replicas: int) -> None:
        self._replicas, self.replica = replicas, 0

    def size(self) -> int:
        return self._replicas

    def reduce(self, values: Tensor) -> Callable[[], Tensor]:
        return lambda: values.mul_(self._replicas)

    def gather(self, mine: Tensor) -> Callable[[], Tensor]:
        return lambda: torch.stack([resent(mine, replica) for replica in range(self._replicas)])

    def swap(self, mine: Tensor) -> Callable[[], Tensor]:
        return self.gather(mine.view(self._replicas, -1)[0])
