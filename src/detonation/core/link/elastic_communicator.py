"""The contract of a communicator whose replicas may be lost while it is used."""

from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from detonation.core.base_error import DetonationError
from detonation.core.link.communicator import Communicator

HandOver: TypeAlias = Callable[[], None]
"""Gives what an optimizer of replicas that leave has not sent to another replica. Collective."""


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

    def broadcast(self, text: str) -> str:
        """The text of the first rank."""


class RenumberedCommunicator(Communicator):
    """A `Communicator` whose replicas may be others from a step on.

    Those that stay take the numbers 0, 1, ... in their old order; those that come follow them.

    `size` counts the replicas that are `absent`, too.
    """

    def for_one(self, hand_over: HandOver | None = None) -> "RenumberedCommunicator":
        """The end of the axis for one more optimizer, which adopts before its own steps.

        `hand_over` is a method of the optimizer, called in a step of another one on the axis.
        """
        return self

    def trains(self, tensors: Collection[Tensor]) -> None:
        """Notes the parameters that the optimizer of this end trains from now on."""
        return

    def resume_at(self, step: int) -> None:
        """Notes that `step` is the next one of this optimizer, which went back, or forth."""
        return

    @abstractmethod
    def enter_step(self, step: int) -> bool:
        """Notes that this rank begins `step`, or is still in it.

        True, and nothing noted, where `adopt` comes first.
        """

    def leaving(self, step: int) -> list[int]:
        """The numbers of the replicas that leave before `step`, all ranks having agreed; they still
        take part."""
        return []

    def handing_over(self) -> list[int]:
        """The numbers of the replicas that leave in a step of another optimizer."""
        return []

    @abstractmethod
    def adopt(self, step: int) -> list[int]:
        """Renumbers the replicas, on all of them before the same step, and begins it; returns the
        old numbers of those that stay.

        Nothing is in flight then.
        """


class ElasticCommunicator(RenumberedCommunicator):
    """A communicator that completes its collectives with the replicas that are left.

    A replica that is lost in the middle of a step keeps its number until the next step that all
    agree on. Until then it is *absent*: its row of an all-gather or all-to-all is zeros, and a sum
    goes without it.
    """

    @abstractmethod
    def expects(self, step: int) -> bool:
        """True where a replica may come in before `step`; the same on all ranks that have come to
        it."""

    @abstractmethod
    def texts(self) -> TextExchange:
        """Texts between the ranks that have a number now, beside the collectives; from any thread.

        All ranks ask for them in the same order, between the same steps.
        """


class AgreedCommunicator(Communicator):
    """An axis of replicas, seen by one of the ranks of a replica that must stay equal. They join
    replicas alike.

    A replica may be lost after its message has reached some of these ranks, and before it has
    reached all: then it is absent on all of them, and a sum starts once more, without it.

    Args:
        beside: The axes that join these ranks.
    """

    def __init__(self, between: RenumberedCommunicator, beside: Sequence[Communicator]) -> None:
        self._between = between
        self._beside = beside

    @property
    def replica(self) -> int:  # type: ignore[override]  # as it is now
        return self._between.replica

    @property
    def absent(self) -> Collection[int]:  # type: ignore[override]  # as they are now
        return self._between.absent

    def size(self) -> int:
        return self._between.size()

    def all_gather(self, mine: Tensor) -> Callable[[], Tensor]:
        return self._rows(self._between.all_gather, mine)

    def all_to_all(self, mine: Tensor) -> Callable[[], Tensor]:
        # of which others may have received more, or less
        return self._rows(self._between.all_to_all, mine)

    def all_reduce(self, values: Tensor) -> Callable[[], Tensor]:
        arriving = self._between.all_reduce(values)

        def wait() -> Tensor:
            total = arriving()
            while not self._alike(total.device):
                total = self._between.all_reduce(values)()
            return total

        return wait

    def _rows(
        self, collective: Callable[[Tensor], Callable[[], Tensor]], mine: Tensor
    ) -> Callable[[], Tensor]:
        arriving = collective(mine)

        def wait() -> Tensor:
            rows = arriving()
            if self._alike(rows.device):
                return rows
            absent = torch.tensor(sorted(self.absent), dtype=torch.int64, device=rows.device)
            # of a copy: another replica may still need the rows
            return rows.index_fill(0, absent, 0)

        return wait

    def _alike(self, device: torch.device) -> bool:
        """Makes a replica absent on all ranks that is absent on any; returns whether it was on all."""
        absent = [each in self.absent for each in range(self.size())]
        found = torch.tensor(
            [absent, [not each for each in absent]], dtype=torch.uint8, device=device
        ).view(-1)
        for axis in self._beside:
            found = axis.all_gather(found)().amax(0)
        anywhere, elsewhere = found.view(2, -1).tolist()
        self._between.absent = frozenset(replica for replica, gone in enumerate(anywhere) if gone)
        return not any(elsewhere[replica] for replica in self.absent)


def present_rows(communicator: Communicator, rows: Tensor) -> Tensor:
    """`rows` of an all-gather, where the first present replica stands in for each absent one.

    For values of which only differences between replicas count.

    Shapes: `[replicas, n]` -> the same.
    """
    absent = sorted(communicator.absent)
    if not absent:
        return rows
    present = next(row for row in range(len(rows)) if row not in absent)
    where = torch.tensor(absent, dtype=torch.int64, device=rows.device)
    return rows.index_copy(0, where, rows[present].expand(len(absent), -1))
