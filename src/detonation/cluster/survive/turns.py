"""Counts the steps of the optimizers on an elastic axis, and tracks which of these optimizers still
exist.
"""

import math
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from detonation.cluster.survive.agreement import Agreement, GuestEntry, RankReport, turn_of

if TYPE_CHECKING:
    from detonation.cluster.survive.users import AxisUser


@dataclass
class Turns:
    """Progress of one optimizer on the axis, counted in turns.

    A *turn* is a step that the optimizer begins. If a replica leaves during a step of another
    optimizer, this optimizer hands over the unsent values of that replica. This hand-over counts as
    a turn, too. Turns count from 0 and only grow, while step numbers fall if training returns to an
    earlier state. All ranks count turns alike, so agreements refer to turns instead of steps.

    begun: number of turns that the optimizer has begun. entered: number of turns whose members this
    rank has already determined. first: the first turn of the optimizer on this rank. steps: number
    of steps that the optimizer has begun, used only in texts for users. ahead: the number of a turn
    minus the number of its step. over: True if a rank does not have the optimizer any more, or if
    another optimizer has begun to train one of its parameters; the next step of the optimizer sets
    `over` to False. trained: references to the parameters that the optimizer trains, by their id.
    """

    begun: int = 0
    entered: int = 0
    first: float = math.inf
    steps: int = 0
    ahead: int = 0
    over: bool = False
    trained: dict[int, "weakref.ref[Tensor]"] = field(default_factory=dict)

    def of(self, step: int) -> int:
        """Returns the turn (a step number that never falls) in which the optimizer takes `step`."""
        return step + self.ahead

    def resume_at(self, step: int) -> None:
        """Makes `step` the step of the optimizer's next turn, because training goes back or forward
        to another state.
        """
        self.ahead = self.begun - step

    def begin(self, step: int) -> None:
        """Records that the optimizer begins the turn (see `Turns`) of `step`, even if the optimizer
        has begun this turn before.
        """
        turn = self.of(step)
        self.begun = max(self.begun, turn + 1)
        self.first = min(self.first, turn)
        self.steps = step + 1
        self.over = False

    def trains(self, tensors: Iterable[Tensor]) -> bool:
        """True if the optimizer trains at least one of `tensors`."""
        found = ((tensor, self.trained.get(id(tensor))) for tensor in tensors)
        return any(ref is not None and ref() is tensor for tensor, ref in found)


class AxisUsers:
    """The optimizers on an axis, numbered in the order in which all ranks create them.

    All ranks drop an optimizer at the same line of their program. But they notice the drop at
    different times, because a reference cycle may keep the optimizer alive. So decisions that must
    be equal on all ranks depend only on agreements and on the order of calls.

    turns: the `Turns` of all optimizers by number, including the optimizers that were dropped.
    """

    def __init__(self, entry: GuestEntry | None, reports: Collection[RankReport]) -> None:
        made = max((len(report.users) for report in reports), default=0)
        self.turns = [Turns(over=True) for _ in range(made)]
        # turn at which the first optimizer of a joining replica starts; None in other replicas
        self.entry = entry
        self._users: dict[int, weakref.ref[AxisUser]] = {}
        # references that keep optimizers alive until a replica has left
        self._held: list[object] = []

    def next_number(self) -> int:
        """Returns the number of a new optimizer, and creates the `Turns` that count its steps."""
        entry = self.entry
        self.entry = None
        if entry is None:
            self.turns.append(Turns())
            return len(self.turns) - 1
        mine = Turns(entry.turn, entry.turn, steps=entry.step)
        mine.resume_at(entry.step)
        self.turns[entry.user] = mine
        return entry.user

    def add(self, user: "AxisUser", holds: bool) -> None:
        """Adds the optimizer `user` to the axis.

        holds: True if the axis keeps its optimizers alive at present; the axis then keeps `user`
        alive, too.
        """
        self._users[user.number] = weakref.ref(user)
        if holds:
            self._held.append(user.optimizer)

    @property
    def present(self) -> list["AxisUser"]:
        """The optimizers that exist on this rank, ordered by number."""
        found = [user for ref in list(self._users.values()) if (user := ref()) is not None]
        return [user for user in found if user.exists]

    @property
    def several(self) -> bool:
        """True if more than one optimizer uses the axis. Between two steps the value is equal on
        all ranks.
        """
        return sum(not turns.over for turns in self.turns) > 1

    def hold(self) -> list[int]:
        """Keeps all existing optimizers alive until `let_go` is called. Returns the numbers of
        these optimizers.
        """
        present = self.present
        self._held = [user.optimizer for user in present]
        return [user.number for user in present]

    def let_go(self) -> None:
        """Drops the references by which `hold` and `add` keep optimizers alive."""
        self._held = []

    def company(self, of: "AxisUser", gone: Collection[int]) -> list["AxisUser"]:
        """Returns the other optimizers that hand over their unsent state when a replica leaves in a
        step of the optimizer `of`. The result is the same on all ranks.

        gone: numbers of the optimizers that at least one rank had already dropped when all ranks
        agreed on the departure.
        """
        present = self.present
        numbers = company(self.turns, [user.number for user in present], of.number, gone)
        return [user for user in present if user.number in numbers]

    def end_others(self, gone: Collection[int]) -> None:
        """Marks the optimizers `gone` as over (no longer in use), because a rank does not have
        them.
        """
        for number in gone:
            self.turns[number].over = True

    def note_trained(self, number: int, tensors: Collection[Tensor]) -> None:
        """Records that optimizer `number` trains the parameters `tensors`. Every other optimizer
        that trained one of these parameters is then over (no longer in use).
        """
        for other, turns in enumerate(self.turns):
            turns.over |= other != number and turns.trains(tensors)
        self.turns[number].trained = {id(tensor): weakref.ref(tensor) for tensor in tensors}


@dataclass(frozen=True)
class Departure:
    """When one replica leaves the run. All ranks have agreed on this departure.

    turns: for each optimizer, the turn (step of this optimizer) before which the replica leaves.
    gone: numbers of the optimizers that at least one rank had already dropped when all ranks agreed
    on the departure.
    """

    turns: list[int]
    gone: list[int]

    @classmethod
    def by(cls, agreement: Agreement) -> "Departure":
        """Returns the departure of a replica that leaves because of `agreement`."""
        return cls(agreement.next_changes, sorted(agreement.gone))


def told_departures(departing: Mapping[int, Departure]) -> list[tuple[int, list[int], list[int]]]:
    """Returns the departures in `departing` as a list for `RankReport.departing`. Each tuple has
    the number of a leaving replica, and the `turns` and `gone` of its `Departure`.
    """
    return [(member, each.turns, each.gone) for member, each in departing.items()]


def company(
    turns: Sequence[Turns], present: Collection[int], of: int, gone: Collection[int]
) -> list[int]:
    """Returns the numbers of the other optimizers in `present` that hand over their unsent state
    when a replica leaves in a step of the optimizer `of`.

    gone: numbers of the optimizers that at least one rank had already dropped when all ranks agreed
    on the departure.
    """
    return [each for each in present if each not in {of, *gone} and not turns[each].over]


def due_before(pending: Sequence[Agreement], user: int, turn: int) -> list[Agreement]:
    """Returns the agreements in `pending` that take effect before `turn` (a step) of the optimizer
    `user`.

    An agreement takes effect before `turn` if no remaining rank had begun `turn` when the ranks
    made the agreement. Then all earlier agreements take effect, too: a rank that had begun `turn`
    before one of them was lost later.
    """
    due = [n for n, each in enumerate(pending, 1) if turn >= turn_of(each.next_turns, user)]
    return [*pending[: max(due, default=0)]]


def changes_of(members: Sequence[int], agreements: Iterable[Agreement]) -> list[Agreement]:
    """Returns those of the successive `agreements` that change the members. At first the members
    are `members`.

    A rank may agree several times in one recovery. The rank uses each of these agreements, because
    other ranks may have begun a turn (a step of an optimizer) after an earlier agreement.
    """
    found = []
    for each in agreements:
        if each.members != [*members]:
            found.append(each)
        members = each.members
    return found


def leaving_before(departing: Mapping[int, Departure], user: int, turn: int) -> list[int]:
    """Returns the replicas in `departing` that must leave before `turn`, a step of the optimizer
    `user`. The result includes replicas that had to leave before an earlier turn.
    """
    return [
        member for member, departure in departing.items() if turn_of(departure.turns, user) <= turn
    ]


def new_departures(
    agreement: Agreement, departing: Mapping[int, Departure], shards: int, least: int
) -> dict[int, Departure]:
    """Returns the departures of members that were asked to leave according to `agreement`. Returns
    none if fewer than `least` members would stay.

    departing: departures on which all ranks agreed before, and which this agreement does not
    change.
    """
    stay = {*agreement.members} - departing.keys()
    leave = sorted(stay & agreement.asked(shards))
    if len(stay) - len(leave) < max(1, least):
        return {}
    return dict.fromkeys(leave, Departure.by(agreement))


def new_entry(agreement: Agreement, door: int) -> tuple[int, int]:
    """Returns the turn before which the joining replica `agreement.guest` joins, and the number of
    this joining replica. The turn is a step of the optimizer `door`, which lets the replica in.
    """
    return turn_of(agreement.next_changes, door), agreement.guest
