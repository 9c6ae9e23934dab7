"""Optimizers on an elastic axis: how far each has come, and which of them remain."""

import math
import weakref
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from detonation.cluster.survive.agreement import Agreement, GuestEntry, RankReport

if TYPE_CHECKING:
    from detonation.cluster.survive.users import AxisUser


@dataclass
class Turns:
    """How far one optimizer on the axis has come.

    A *turn* is a step that an optimizer begins, or its part in the departure of a replica. Turns
    count from 0 and never fall, whereas steps do where training goes back to an earlier state. All
    ranks count them alike, so an agreement dates by turns what happens to an optimizer.

    begun: the turns that it began. entered: those before which it asked who leaves and who comes.
    first: the first one. steps: the steps that it began, for texts. over: a later optimizer trains
    one of its parameters, or some rank has dropped it; a step of its own ends that. trained: the
    parameters that it trains, by their ids.
    """

    begun: int = 0
    entered: int = 0
    first: float = math.inf
    steps: int = 0
    over: bool = False
    trained: dict[int, "weakref.ref[Tensor]"] = field(default_factory=dict)

    def begin(self, turn: int, step: int) -> None:
        """Begins `turn`, which is `step` of the optimizer, or is in it still."""
        self.begun = max(self.begun, turn + 1)
        self.first = min(self.first, turn)
        self.steps = step + 1
        self.over = False

    def trains(self, tensors: Iterable[Tensor]) -> bool:
        """True if the optimizer trains one of `tensors`."""
        found = ((tensor, self.trained.get(id(tensor))) for tensor in tensors)
        return any(ref is not None and ref() is tensor for tensor, ref in found)


class AxisUsers:
    """Optimizers on an axis, numbered in the order in which all ranks make them.

    Ranks drop an optimizer at the same line of their program, and notice that at different moments,
    because a cycle of references may keep it. So what all ranks must do alike follows from
    agreements and from the order of their calls.

    turns: of all optimizers that were made, by number.
    """

    def __init__(self, entry: GuestEntry | None, reports: Collection[RankReport]) -> None:
        made = max((len(report.users) for report in reports), default=0)
        self.turns = [Turns(over=True) for _ in range(made)]
        self._entry = entry  # of a newcomer, whose first optimizer is the one that lets it in
        self._users: dict[int, weakref.ref[AxisUser]] = {}
        self._held: list[object] = []  # optimizers that must not vanish before a replica has left

    def next_number(self) -> int:
        """Number of the optimizer that is made now; it has its `turns` from here on."""
        entry = self._entry
        self._entry = None
        if entry is None:
            self.turns.append(Turns())
            return len(self.turns) - 1
        self.turns[entry.user] = Turns(entry.turn, entry.turn, steps=entry.step)
        return entry.user

    def add(self, user: "AxisUser", holds: bool) -> None:
        """Adds an optimizer, and keeps it alive where the axis `holds` its optimizers."""
        self._users[user.number] = weakref.ref(user)
        if holds:
            self._held.append(user.optimizer)

    @property
    def present(self) -> list["AxisUser"]:
        """Optimizers that exist on this rank, by number."""
        found = [user for ref in list(self._users.values()) if (user := ref()) is not None]
        return [user for user in found if user.exists]

    @property
    def several(self) -> bool:
        """True if several optimizers use the axis; the same on all ranks between two steps."""
        return sum(not turns.over for turns in self.turns) > 1

    def hold(self) -> list[int]:
        """Keeps the optimizers alive until `let_go`, and returns their numbers."""
        present = self.present
        self._held = [user.optimizer for user in present]
        return [user.number for user in present]

    def let_go(self) -> None:
        """Keeps no optimizer alive any longer."""
        self._held = []

    def company(self, of: "AxisUser", gone: Collection[int]) -> list["AxisUser"]:
        """Optimizers that take part in a departure with `of`; the same on all ranks."""
        return [
            user
            for user in self.present
            if user is not of and user.number not in gone and not user.turns.over
        ]

    def end_others(self, gone: Collection[int]) -> None:
        """Counts the optimizers `gone` as over, which some rank has dropped."""
        for number in gone:
            self.turns[number].over = True

    def note_trained(self, number: int, tensors: Collection[Tensor]) -> None:
        """Notes what optimizer `number` trains; others that trained one of these are over."""
        for other, turns in enumerate(self.turns):
            turns.over |= other != number and turns.trains(tensors)
        self.turns[number].trained = {id(tensor): weakref.ref(tensor) for tensor in tensors}


@dataclass(frozen=True)
class Departure:
    """When a replica leaves: before which turn of each optimizer.

    gone: the optimizers that some rank had dropped when all agreed on it.
    """

    turns: list[int]
    gone: list[int]

    @classmethod
    def by(cls, agreement: Agreement) -> "Departure":
        """Departure on which an agreement settles."""
        return cls(agreement.next_changes, sorted(agreement.gone))


def told_departures(departing: Mapping[int, Departure]) -> list[tuple[int, list[int], list[int]]]:
    """Departures by replica, for a report."""
    return [(member, each.turns, each.gone) for member, each in departing.items()]
