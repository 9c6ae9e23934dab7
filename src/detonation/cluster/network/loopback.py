"""Loopback: a communicator without a network. It returns this replica's own message in the place of
the messages of all other replicas.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from detonation.core.integrity.message import resent
from detonation.core.link import RenumberedCommunicator


class LoopbackCommunicator(RenumberedCommunicator):
    """A communicator in which every other replica seems to send a copy of this rank's message. Each
    copy names the replica that seems to send it.

    next_size: number of replicas from the next step on.
    """

    def __init__(self, replicas: int = 1) -> None:
        self._replicas = replicas
        self.replica = 0
        self.next_size = replicas

    def size(self) -> int:
        return self._replicas

    def all_reduce(self, values: Tensor) -> Callable[[], Tensor]:
        return lambda: values.mul_(self._replicas)

    def all_gather(self, mine: Tensor) -> Callable[[], Tensor]:
        return lambda: torch.stack(
            [mine, *(resent(mine, other) for other in range(1, self._replicas))]
        )

    def all_to_all(self, mine: Tensor) -> Callable[[], Tensor]:
        return self.all_gather(mine.view(self._replicas, -1)[0])

    def enter_step(self, step: int) -> bool:
        return self.next_size != self._replicas

    def adopt(self, step: int) -> list[int]:
        kept = list(range(min(self._replicas, self.next_size)))
        self._replicas = self.next_size
        return kept
