"""The interfaces of communicators whose replicas may be lost, leave or join during training."""

from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from detonation.core.base_error import DetonationError
from detonation.core.link.communicator import Communicator

HandOver: TypeAlias = Callable[[], None]
"""A function that sends the unsent momentum of leaving replicas to a remaining replica. Collective.
"""


class PeerLost(DetonationError, ConnectionError):
    """Raised on all remaining ranks if a replica was lost before all ranks had received its text,
    while ranks exchanged texts.
    """


class TextExchange(Protocol):
    """Exchanges texts between ranks. Its methods are collective."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def gather(self, text: str) -> list[str]:
        """Sends `text` to all ranks, and returns the texts of all ranks, in rank order."""

    def broadcast(self, text: str) -> str:
        """Returns the `text` of the first rank, on all ranks."""


class RenumberedCommunicator(Communicator):
    """A `Communicator` whose replicas may change between steps.

    After a change, the remaining replicas get the numbers 0, 1, ... in their old order, and new
    replicas get the next numbers. `size` also counts the `absent` replicas, which were lost since
    the last change of numbers.
    """

    def for_one(self, hand_over: HandOver | None = None) -> "RenumberedCommunicator":
        """Returns a communicator for one of several optimizers that share this axis. Only this
        optimizer uses the returned communicator, and calls its method `adopt`.

        `hand_over` is a method of this optimizer. The communicator calls `hand_over` if a replica
        leaves while another optimizer on the axis makes a step.
        """
        return self

    def trains(self, tensors: Collection[Tensor]) -> None:
        """Records the parameters that this optimizer trains from now on."""
        return

    def resume_at(self, step: int) -> None:
        """Records that `step` is this optimizer's next step, after a saved state was loaded."""
        return

    @abstractmethod
    def enter_step(self, step: int) -> bool:
        """Records that this rank begins `step`, or is still in `step`. If replicas have changed,
        records nothing and returns True: the caller must first call `adopt`.
        """

    def leaving(self, step: int) -> list[int]:
        """Returns the numbers of the replicas that leave before `step`. The result is equal on all
        ranks. These replicas still take part in collectives.
        """
        return []

    def handing_over(self) -> list[int]:
        """Returns the numbers of the replicas that leave while another optimizer on this axis makes
        a step.
        """
        return []

    @abstractmethod
    def adopt(self, step: int) -> list[int]:
        """Gives the remaining and joining replicas new numbers, and begins `step`. All replicas
        must call this method before the same step, and no message may be in flight. Returns the old
        numbers of the remaining replicas.
        """


class ElasticCommunicator(RenumberedCommunicator):
    """A communicator that completes its collectives with the remaining replicas if a replica is
    lost.

    A replica that is lost during a step keeps its number until the ranks call `adopt`. Until then
    this replica is *absent*: an all-gather or all-to-all returns zeros for the replica, and an
    all-reduce leaves the replica out.
    """

    lets_in = True
    """False while a replica that wants to join must wait for a later call of `enter_step`."""

    @abstractmethod
    def expects(self, step: int) -> bool:
        """True if a replica may join before `step`; all ranks that have reached `step` get the same
        answer.
        """

    @abstractmethod
    def texts(self) -> TextExchange:
        """Returns an object that exchanges texts between the present ranks. The messages of this
        object do not mix with other collectives, so any thread may use the object.

        All ranks must call `texts` between the same two steps. Several calls must have the same
        order on all ranks.
        """


class AgreedCommunicator(Communicator):
    """A communicator between replicas, for those ranks of this replica that hold equal weights. It
    makes these ranks agree on which replicas are absent.

    The last message of a lost replica may have reached only some of these ranks. Then all these
    ranks treat the lost replica as absent, and repeat an all-reduce without the lost replica.

    Args:
        between: The axis of replicas.
        equal_ranks: The axes that connect the ranks with equal weights.
    """

    def __init__(
        self, between: RenumberedCommunicator, equal_ranks: Sequence[Communicator]
    ) -> None:
        self._between = between
        self._equal_ranks = equal_ranks

    @property
    def replica(self) -> int:  # type: ignore[override]  # the number may change
        return self._between.replica

    @property
    def absent(self) -> Collection[int]:  # type: ignore[override]  # changes with each loss
        return self._between.absent

    def size(self) -> int:
        return self._between.size()

    def all_gather(self, mine: Tensor) -> Callable[[], Tensor]:
        return self._rows(self._between.all_gather, mine)

    def all_to_all(self, mine: Tensor) -> Callable[[], Tensor]:
        # if a replica was lost, its rows may have reached only some ranks of this replica
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
            # `index_fill` writes to a copy, because simulated replicas share the tensor `rows`
            return rows.index_fill(0, absent, 0)

        return wait

    def _alike(self, device: torch.device) -> bool:
        """Compares which replicas are absent on each of the ranks that must stay equal. A replica
        that is absent on one of these ranks becomes absent on all of them. Returns True if all
        ranks already had the same absent replicas.
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
    """Returns the `rows` of an all-gather, in which the first present replica's row replaces the
    row of each absent replica.

    Use this function only for values that replicas compare: an absent replica then counts as equal
    to the first present replica.

    Shapes: `[replicas, n]` -> the same.
    """
    absent = sorted(communicator.absent)
    if not absent:
        return rows
    present = next(row for row in range(len(rows)) if row not in absent)
    where = torch.tensor(absent, dtype=torch.int64, device=rows.device)
    return rows.index_copy(0, where, rows[present].expand(len(absent), -1))
