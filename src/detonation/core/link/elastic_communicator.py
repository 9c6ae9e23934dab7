"""The contract of a communicator whose replicas may be lost while it is used."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Protocol

import torch
from torch import Tensor

from detonation.core.base_error import DetonationError
from detonation.core.link.communicator import Communicator


class PeerLost(DetonationError, ConnectionError):
    """A replica was lost before all had its text; raised on all ranks that are left."""


class TextExchange(Protocol):
    """Texts between ranks. Its methods are collective."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def gather(self, text: str) -> list[str]:
        """The texts of all ranks, by rank."""
        ...

    def broadcast(self, text: str) -> str:
        """The text of the first rank."""
        ...


class RenumberedCommunicator(ABC):
    """A `Communicator` whose replicas may be others from a step on.

    Those that stay take the numbers 0, 1, ... in their old order; those that come follow them.

    replica: the number of this replica. absent: the replicas without a part in the collective that was waited for last.
    """

    replica: int
    absent: Collection[int] = ()

    @property
    def shared(self) -> bool:
        """True where several optimizers use the axis: each starts its collectives in `step` alone, in their order."""
        return False

    def for_one(self) -> "RenumberedCommunicator":
        """The end of the axis for one more optimizer, which adopts before its own steps."""
        return self

    @abstractmethod
    def size(self) -> int:
        """The number of replicas, with those that are absent."""

    @abstractmethod
    def all_reduce(self, values: Tensor) -> Callable[[], Tensor]:
        """See `Communicator`."""

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

    def leaving(self, step: int) -> list[int]:
        """The numbers of the replicas that leave before `step`, all ranks having agreed; they still take part."""
        return []

    @abstractmethod
    def adopt(self, step: int) -> list[int]:
        """Renumbers the replicas, on all of them before the same step, and begins it; returns the old numbers of those
        that stay.

        Nothing is in flight then.
        """


class ElasticCommunicator(RenumberedCommunicator):
    """A communicator that completes its collectives with the replicas that are left.

    A replica that is lost in the middle of a step keeps its number until the next step that all agree on. Until then it
    is *absent*: its row of an all-gather or all-to-all is zeros, and a sum goes without it.
    """

    @abstractmethod
    def expects(self, step: int) -> bool:
        """True where a replica may come in before `step`; the same on all ranks that have come to it."""

    @abstractmethod
    def texts(self) -> TextExchange:
        """Texts between the ranks that have a number now, beside the collectives; from any thread.

        All ranks ask for them in the same order, between the same steps.
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
