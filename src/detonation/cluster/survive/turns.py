"""Progress of the optimizers on an elastic axis, and which of them still exist."""

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
    """Progress of one optimizer on the axis.

    A *turn* is a step that an optimizer begins, or its part in the departure of a replica. Turns
    count from 0 and only grow, while step numbers fall if training returns to an earlier state. All
    ranks count turns alike, so agreements refer to turns.

    begun: number of turns begun. entered: number of turns for which it knows the leaving and
    joining replicas. first: the first turn. steps: number of steps begun, used in messages. ahead:
    offset between the turn and the step of the optimizer. over: True if a rank has dropped the
    optimizer, or a later optimizer trains one of its parameters; the optimizer's next step sets it
    to False. trained: ids of the parameters that it trains.
    """

    begun: int = 0
    entered: int = 0
    first: float = math.inf
    steps: int = 0
    ahead: int = 0
    over: bool = False
    trained: dict[int, "weakref.ref[Tensor]"] = field(default_factory=dict)

    def of(self, step: int) -> int:
        """Turn that begins with `step` of the optimizer."""
        return step + self.ahead

    def resume_at(self, step: int) -> None:
        """Lets `step` be the next step, because training goes back or forward."""
        self.ahead = self.begun - step

    def begin(self, step: int) -> None:
        """Begins the turn of `step`. The turn may have begun already."""
        turn = self.of(step)
        self.begun = max(self.begun, turn + 1)
        self.first = min(self.first, turn)
        self.steps = step + 1
        self.over = False

    def trains(self, tensors: Iterable[Tensor]) -> bool:
        """True if the optimizer trains one of `tensors`."""
        found = ((tensor, self.trained.get(id(tensor))) for tensor in tensors)
        return any(ref is not None and ref() is tensor for tensor, ref in found)


class AxisUsers:
    """Optimizers on an axis, numbered in the order in which all ranks create them.

    Ranks drop an optimizer at the same line of their program, but notice this at different times,
    because a reference cycle may keep it alive. So common decisions depend only on agreements and
    on the order of calls.

    turns: turns of all optimizers by number, including dropped optimizers.
    """

    def __init__(self, entry: GuestEntry | None, reports: Collection[RankReport]) -> None:
        made = max((len(report.users) for report in reports), default=0)
        self.turns = [Turns(over=True) for _ in range(made)]
        self.entry = entry  # in a new replica: the entry of its first optimizer
        self._users: dict[int, weakref.ref[AxisUser]] = {}
        self._held: list[object] = []  # optimizers kept alive until a replica has left

    def next_number(self) -> int:
        """Returns the number of a new optimizer, and creates its `turns`."""
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
        """Adds an optimizer, and keeps it alive if the axis `holds` its optimizers."""
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
        """True if several optimizers use the axis; equal on all ranks between two steps."""
        return sum(not turns.over for turns in self.turns) > 1

    def hold(self) -> list[int]:
        """Keeps the optimizers alive until `let_go`, and returns their numbers."""
        present = self.present
        self._held = [user.optimizer for user in present]
        return [user.number for user in present]

    def let_go(self) -> None:
        """Releases the optimizers that `hold` and `add` keep alive."""
        self._held = []

    def company(self, of: "AxisUser", gone: Collection[int]) -> list["AxisUser"]:
        """The optimizers that leave together with `of`; the same on all ranks."""
        present = self.present
        numbers = company(self.turns, [user.number for user in present], of.number, gone)
        return [user for user in present if user.number in numbers]

    def end_others(self, gone: Collection[int]) -> None:
        """Marks the optimizers `gone` as over, because a rank has dropped them."""
        for number in gone:
            self.turns[number].over = True

    def note_trained(self, number: int, tensors: Collection[Tensor]) -> None:
        """Records the parameters that optimizer `number` trains. Other optimizers that trained one
        of `tensors` are over.
        """
        for other, turns in enumerate(self.turns):
            turns.over |= other != number and turns.trains(tensors)
        self.turns[number].trained = {id(tensor): weakref.ref(tensor) for tensor in tensors}


@dataclass(frozen=True)
class Departure:
    """A replica leaves before these turns of the optimizers.

    gone: the optimizers that a rank had dropped when all agreed on the departure.
    """

    turns: list[int]
    gone: list[int]

    @classmethod
    def by(cls, agreement: Agreement) -> "Departure":
        """The departure that follows from `agreement`."""
        return cls(agreement.next_changes, sorted(agreement.gone))


def told_departures(departing: Mapping[int, Departure]) -> list[tuple[int, list[int], list[int]]]:
    """Departures by replica, in the format of a report."""
    return [(member, each.turns, each.gone) for member, each in departing.items()]


def company(
    turns: Sequence[Turns], present: Collection[int], of: int, gone: Collection[int]
) -> list[int]:
    """The optimizers among `present` that leave together with the optimizer `of`.

    gone: optimizers that some rank had dropped when all agreed on the departure.
    """
    return [each for each in present if each not in {of, *gone} and not turns[each].over]


def due_before(pending: Sequence[Agreement], user: int, turn: int) -> list[Agreement]:
    """Agreements that the optimizer `user` adopts before `turn`: the last agreement at which no
    remaining rank had begun that turn, and all earlier agreements, which it replaces.

    A rank that had begun the turn at an earlier agreement may be lost at a later agreement.
    """
    due = [n for n, each in enumerate(pending, 1) if turn >= turn_of(each.next_turns, user)]
    return [*pending[: max(due, default=0)]]


def changes_of(members: Sequence[int], agreements: Iterable[Agreement]) -> list[Agreement]:
    """The successive `agreements` that change the `members`.

    A rank that agreed several times in one recovery adopts each agreement, because other ranks may
    have begun a turn after an earlier agreement.
    """
    found = []
    for each in agreements:
        if each.members != [*members]:
            found.append(each)
        members = each.members
    return found


def leaving_before(departing: Mapping[int, Departure], user: int, turn: int) -> list[int]:
    """Replicas that leave before `turn` of the optimizer `user`."""
    return [
        member for member, departure in departing.items() if turn_of(departure.turns, user) <= turn
    ]


def new_departures(
    agreement: Agreement, departing: Mapping[int, Departure], shards: int, least: int
) -> dict[int, Departure]:
    """Departures of members that asked to leave, if at least `least` stay.

    departing: departures on which all agreed before. Their replicas keep their turns.
    """
    stay = {*agreement.members} - departing.keys()
    leave = sorted(stay & agreement.asked(shards))
    if len(stay) - len(leave) < max(1, least):
        return {}
    return dict.fromkeys(leave, Departure.by(agreement))


def new_entry(agreement: Agreement, door: int) -> tuple[int, int]:
    """Turn of optimizer `door` before which a replica joins according to `agreement`, and the
    number of that replica.
    """
    return turn_of(agreement.next_changes, door), agreement.guest
