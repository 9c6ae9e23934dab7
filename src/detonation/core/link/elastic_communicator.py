"""The contract of a communicator whose replicas may be lost while it is used."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from detonation.core.link.communicator import Communicator


class ElasticCommunicator(ABC):
    """A `Communicator` that completes its collectives with the replicas that are left.

    A replica that is lost in the middle of a step keeps its number until the next step that all agree on. Until then it
    is *absent*: its row of an all-gather or all-to-all is zeros, and a sum goes without it. Then the replicas that are
    left take the numbers 0, 1, ... in their old order.

    replica: the number of this replica. absent: the replicas without a part in the collective that was waited for last.
    """

    replica: int
    absent: Collection[int] = ()

    @abstractmethod
    def size(self) -> int:
        """The number of replicas, with those that are absent."""

    @abstractmethod
    def all_reduce(self, values: Tensor) -> Callable[[], Tensor]:
        """See `Communicator`.

        Shapes: any -> the same.
        """

    @abstractmethod
    def all_gather(self, mine: Tensor) -> Callable[[], Tensor]:
        """See `Communicator`.

        Shapes: `[bytes]` -> `[replicas, bytes]` uint8.
        """

    @abstractmethod
    def all_to_all(self, mine: Tensor) -> Callable[[], Tensor]:
        """See `Communicator`.

        Shapes: `[replicas * bytes]` -> `[replicas, bytes]` uint8.
        """

    @abstractmethod
    def enter_step(self, step: int) -> bool:
        """Notes that this rank begins `step`, or is still in it. True, and nothing noted, where `adopt` comes first."""

    @abstractmethod
    def adopt(self, step: int) -> list[int]:
        """Renumbers the replicas, on all that are left before the same step, and begins it; returns their old numbers.

        Nothing is in flight then.
        """


def present_rows(communicator: Communicator, rows: Tensor) -> Tensor:
    """`rows` of an all-gather, where the first present replica stands in for each absent one.

    For values of which only differences between replicas count.

    Shapes: `[replicas, n]` -> the same.
    """
    if not isinstance(communicator, ElasticCommunicator) or not communicator.absent:
        return rows
    absent = sorted(communicator.absent)
    present = next(row for row in range(len(rows)) if row not in communicator.absent)
    where = torch.tensor(absent, dtype=torch.int64, device=rows.device)
    return rows.index_copy(0, where, rows[present].expand(len(absent), -1))
