"""The interface of a communicator whose replicas may be lost during use."""

from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from detonation.core.base_error import DetonationError
from detonation.core.link.communicator import Communicator

HandOver: TypeAlias = Callable[[], None]
"""Sends the unsent momentum of leaving replicas to another replica. Collective."""


class PeerLost(DetonationError, ConnectionError):
    """A replica was lost before all ranks had received its text. Raised on all remaining ranks."""


class TextExchange(Protocol):
    """Exchanges texts between ranks. Its methods are collective."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def gather(self, text: str) -> list[str]:
        """The texts of all ranks, by rank."""

    def broadcast(self, text: str) -> str:
        """The text of the first rank, on all ranks."""


class RenumberedCommunicator(Communicator):
    """A `Communicator` whose replicas may change between steps.

    Remaining replicas are numbered 0, 1, ... in their old order. New replicas get the next numbers.

    `size` includes the `absent` replicas.
    """

    def for_one(self, hand_over: HandOver | None = None) -> "RenumberedCommunicator":
        """Returns a communicator on this axis for another optimizer, which calls `adopt` before its
        steps.

        `hand_over` is a method of this optimizer. It is called if a replica leaves in a step of
        another optimizer on the axis.
        """
        return self

    def trains(self, tensors: Collection[Tensor]) -> None:
        """Records the parameters that this optimizer trains from now on."""
        return

    def resume_at(self, step: int) -> None:
        """Records that `step` is the next step of this optimizer, because a state was loaded."""
        return

    @abstractmethod
    def enter_step(self, step: int) -> bool:
        """Records that this rank begins `step` or is still in it. If `adopt` must be called first,
        records nothing and returns True.
        """

    def leaving(self, step: int) -> list[int]:
        """Numbers of the replicas that leave before `step`, as all ranks agreed. These replicas
        still participate in collectives.
        """
        return []

    def handing_over(self) -> list[int]:
        """Numbers of the replicas that leave in a step of another optimizer."""
        return []

    @abstractmethod
    def adopt(self, step: int) -> list[int]:
        """Renumbers the replicas, on all of them before the same step, and begins the step. Returns
        the old numbers of the remaining replicas.

        No message may be in flight.
        """


class ElasticCommunicator(RenumberedCommunicator):
    """A communicator that completes its collectives with the remaining replicas.

    A replica that is lost during a step keeps its number until the next agreed step. Until then it
    is *absent*: an all-gather or all-to-all returns zeros for it, and a sum omits it.
    """

    @abstractmethod
    def expects(self, step: int) -> bool:
        """True if a replica may join before `step`; equal on all ranks that have reached `step`."""

    @abstractmethod
    def texts(self) -> TextExchange:
        """Exchanges texts between the present ranks, independent of other collectives and from any
        thread.

        All ranks must call it in the same order, between the same steps.
        """


class AgreedCommunicator(Communicator):
    """An axis of replicas for ranks of one replica that must stay equal: they agree on which
    replicas are absent.

    A lost replica's message may have reached only a part of these ranks. The replica then becomes
    absent on all of them, and a sum is repeated without it.

    Args:
        between: The axis of replicas.
        equal_ranks: The axes that connect these ranks.
    """

    def __init__(
        self, between: RenumberedCommunicator, equal_ranks: Sequence[Communicator]
    ) -> None:
        self._between = between
        self._equal_ranks = equal_ranks

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
        # ranks of this replica may have received different rows
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
            # copied, because simulated replicas share the rows
            return rows.index_fill(0, absent, 0)

        return wait

    def _alike(self, device: torch.device) -> bool:
        """Makes a replica that is absent on any of the ranks absent on all ranks. Returns True if
        all ranks had the same absent replicas.
        """
        absent = [each in self.absent for each in range(self.size())]
        present = [not each for each in absent]
        found = torch.tensor([absent, present], dtype=torch.uint8, device=device).view(-1)
        for axis in self._equal_ranks:
            found = axis.all_gather(found)().amax(0)
        absent_anywhere, present_anywhere = found.view(2, -1).tolist()
        self._between.absent = frozenset(
            replica for replica, gone in enumerate(absent_anywhere) if gone
        )
        return not any(present_anywhere[replica] for replica in self.absent)


def present_rows(communicator: Communicator, rows: Tensor) -> Tensor:
    """The `rows` of an all-gather, in which the row of the first present replica replaces the row
    of each absent replica.

    Only used for values that replicas compare.

    Shapes: `[replicas, n]` -> the same.
    """
    absent = sorted(communicator.absent)
    if not absent:
        return rows
    present = next(row for row in range(len(rows)) if row not in absent)
    where = torch.tensor(absent, dtype=torch.int64, device=rows.device)
    return rows.index_copy(0, where, rows[present].expand(len(absent), -1))
