"""States of the model of membership, and the decisions of `cluster.survive` on such states.

A `World` is one state of all: what each rank knows, and what the store holds. States are immutable,
so that a search can compare them. Each decision is a call of the product's own function: the
functions here only turn a part of a state into its arguments, and back.
"""

import json
import math
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

import torch

from detonation.cluster.survive.agreement import Agreement, RankReport, parse_agreement
from detonation.cluster.survive.turns import AxisUsers, Departure, Turns, told_departures

FIRST = 3
"""Number of replicas with which all begins; the next number is that of a guest."""
GONE = ("dead", "left", "ended")
"""Of ranks that the others will miss: killed, left by request, over."""
GUEST = ("asks", "ready", "arrived", "late")
"""Of a replica that is no member yet."""
ALL = 2**62
"""Number of a guest's report: it lacks no collective."""
_PARAMETERS = {slot: torch.zeros(1) for slot in "ab"}


class Message(NamedTuple):
    """A numbered collective on one rank, as in `NumberedCollective`.

    what: its purpose, which must be the same on all ranks. absent: as part of its result; None
    before that.
    """

    number: int
    what: tuple
    layout: tuple[int, ...]
    floor: int
    members: tuple[int, ...]
    flying: bool
    absent: tuple[int, ...] | None

    @property
    def finished(self):
        return self.absent is not None


class User(NamedTuple):
    """An optimizer on one rank: `Turns`, `AxisUser`, and what it holds.

    exists: `yes`; `dropped` by the program, but a reference keeps it alive; or `no`. slot: names
    the parameters that it was made for, trains: those that it has trained. pending: epochs.
    memory: it has momentum that it has not sent.
    """

    slot: str
    exists: str = "yes"
    begun: int = 0
    entered: int = 0
    ahead: int = 0
    over: bool = False
    trains: str = ""
    steps: int = 0
    layout: tuple[int, ...] = ()
    pending: tuple[int, ...] = ()
    built: bool = True
    memory: bool = True


class Rank(NamedTuple):
    """A replica of one rank.

    state: `out` (no replica yet), `asks`, `ready`, `arrived`, `late` (a guest), `trains`, `done`, or
    one of `GONE`. at: position in the program. queue: what its main thread does next. busy: what its
    recovery does: "", `reported`, `forms`, `copies`. sent: the operations in its present group.
    chain: number of the history of all results that it has used. let_in: epochs, while a guest forms
    its first group. begins, enters: positions up to which it has begun, or entered, its program.
    agreed: epochs of the present
    recovery. ahead: members of the group that it has formed for the step of the guest.
    """

    number: int
    state: str = "trains"
    at: int = 0
    queue: tuple[tuple, ...] = ()
    users: tuple[User, ...] = ()
    layout: tuple[int, ...] = ()
    pending: tuple[int, ...] = ()
    epoch: int = 0
    members: tuple[int, ...] = ()
    before: tuple[int, ...] = ()
    busy: str = ""
    kept: tuple[Message, ...] = ()
    untaken: tuple[int, ...] = ()
    copying: tuple[tuple[int, int], ...] = ()
    started: int = 0
    floor: int = 0
    sent: tuple[tuple, ...] = ()
    departing: tuple[tuple, ...] = ()
    guest: tuple[int, int] | None = None
    awaits: int = -1
    leaves: bool = False
    held: tuple[int, ...] = ()
    acting: int = -1
    chain: int = 0
    let_in: tuple[int, ...] = ()
    begins: int = 0
    enters: int = 0
    ahead: tuple[int, ...] = ()
    agreed: tuple[int, ...] = ()

    @property
    def settled(self):
        """True if its main thread may go on."""
        return not self.busy


class Report(NamedTuple):
    """A `RankReport`. absent: pairs of a number and those absent from it."""

    floor: int = 0
    beyond: tuple[int, ...] = ()
    absent: tuple[tuple[int, tuple[int, ...]], ...] = ()
    guest: int = -1
    users: tuple[int, ...] = ()
    leaves: bool = False
    entered: tuple[int, ...] = ()
    departing: tuple[tuple, ...] = ()
    coming: tuple[int, int] | None = None
    alive: tuple[int, ...] = ()
    ahead: tuple[int, ...] = ()
    step: int = 0


class Record(NamedTuple):
    """An `Agreement`, and what the properties need of it.

    reach: positions up to which ranks had begun, and entered, the program when they agreed.
    removed: replicas that are no members any more. postponed: as of `Agreement`.
    """

    members: tuple[int, ...]
    guest: int
    reports: tuple[tuple[int, Report], ...]
    reach: tuple[int, int]
    removed: tuple[int, ...]
    postponed: bool = False


class World(NamedTuple):
    """All ranks, and the store.

    reports: of the next epoch, by rank. records: of the agreements, by epoch; None for those that
    nobody needs. called: the last epoch to which all
    were called. door: optimizer that lets the guest in; -1 for none yet. entry: as
    told to the guest. faults: those that may still happen. giver: the replica that the guest follows;
    -1 for none. copied: turns ahead of the state that it has last sent. visited: the states that it
    has sent: step, turns ahead, and history. overlooked: a record was made while the guest was
    ready.
    """

    ranks: tuple[Rank, ...]
    reports: tuple[tuple[int, Report], ...] = ()
    records: tuple[Record | None, ...] = (None,)
    called: int = 0
    door: int = -1
    admitted: bool = False
    entry: tuple | None = None
    faults: tuple[str, ...] = ()
    visited: tuple[tuple[int, int, int], ...] = ()
    giver: int = -1
    copied: int = 0
    overlooked: bool = False


class Broken(Exception):
    """A property does not hold."""


class Histories:
    """All sequences of results, each with a number: two ranks agree if one continues the other."""

    def __init__(self):
        self._known = {}
        self._of = [(0, 0, None)]

    def after(self, chain, result):
        key = chain, result
        if key not in self._known:
            self._known[key] = len(self._of)
            self._of.append((chain, self._of[chain][1] + 1, result))
        return self._known[key]

    def agree(self, one, other):
        """True if one of two sequences begins with the other."""
        while self._of[one][1] > self._of[other][1]:
            one = self._of[one][0]
        while self._of[other][1] > self._of[one][1]:
            other = self._of[other][0]
        return one == other

    def begins(self, one, other):
        """True if the sequence `other` begins with `one`."""
        while self._of[other][1] > self._of[one][1]:
            other = self._of[other][0]
        return one == other

    def from_common(self, chains):
        """Each of `chains` without the results with which all of them begin."""
        ends = {*chains}
        while len(ends) > 1:
            longest = max(ends, key=lambda each: self._of[each][1])
            ends.remove(longest)
            ends.add(self._of[longest][0])
        common = ends.pop()
        found = {}
        for chain in chains:
            results = []
            end = chain
            while end != common:
                results.append(self._of[end][2])
                end = self._of[end][0]
            found[chain] = 0
            for result in reversed(results):
                found[chain] = self.after(found[chain], result)
        return found

    def same_steps(self, one, other):
        """True if two sequences have the same results of steps."""
        return self._steps(one) == self._steps(other)

    def _steps(self, chain):
        found = []
        while chain:
            chain, _, result = self._of[chain]
            (_, purpose, _), *_ = result
            if isinstance(purpose, str) and purpose.startswith("step"):
                found.append(result)
        return found

    def last(self, chain):
        return self._of[chain][2]


def rank_with(world, rank, **changes):
    """`world`, in which `rank` is replaced, with `changes`."""
    ranks = list(world.ranks)
    ranks[rank.number] = rank._replace(**changes)
    return world._replace(ranks=tuple(ranks))


def user_with(rank, number, **changes):
    users = list(rank.users)
    users[number] = users[number]._replace(**changes)
    return rank._replace(users=tuple(users))


def turns_of(user):
    """The product's `Turns` of an optimizer."""
    trained = {}
    if user.trains:
        trained = AxisUsers(None, [])
        trained.turns = [Turns()]
        trained.note_trained(0, [_PARAMETERS[user.trains]])
        trained = trained.turns[0].trained
    return Turns(user.begun, user.entered, math.inf, 0, user.ahead, user.over, trained)


def with_turns(user, turns):
    return user._replace(
        begun=turns.begun, entered=turns.entered, ahead=turns.ahead, over=turns.over
    )


def users_of(rank):
    """The product's `AxisUsers` of a rank, without the optimizers themselves."""
    users = AxisUsers(None, [])
    users.turns = [turns_of(user) for user in rank.users]
    return users


def with_users(rank, users):
    pairs = zip(rank.users, users.turns, strict=True)
    return rank._replace(users=tuple(with_turns(user, turns) for user, turns in pairs))


def trains_from_now(rank, number):
    """`rank` after its optimizer `number` was laid out for its parameters."""
    users = users_of(rank)
    users.note_trained(number, [_PARAMETERS[rank.users[number].slot]])
    rank = with_users(rank, users)
    return user_with(rank, number, trains=rank.users[number].slot)


def present(rank):
    return [number for number, user in enumerate(rank.users) if user.exists in ("yes", "dropped")]


def departures(rank):
    return {member: Departure([*turns], [*gone]) for member, turns, gone in rank.departing}


def frozen(departing):
    told = told_departures(departing)
    return tuple((member, tuple(turns), tuple(gone)) for member, turns, gone in told)


def report_of(rank):
    """The report of a rank."""
    done = [each for each in rank.kept if each.finished]
    return Report(
        rank.floor,
        tuple(each.number for each in done if each.number > rank.floor),
        tuple((each.number, each.absent) for each in done),
        rank.awaits,
        tuple(user.begun for user in rank.users),
        rank.leaves,
        tuple(user.entered for user in rank.users),
        rank.departing,
        rank.guest,
        tuple(present(rank)),
        rank.ahead,
    )


@cache
def told(report):
    """The fields of the product's report, as the store has them."""
    mine = RankReport(
        report.floor,
        [*report.beyond],
        {str(number): [*absent] for number, absent in report.absent},
        report.step,
        report.guest,
        [*report.users],
        report.leaves,
        [*report.entered],
        [(member, [*turns], [*gone]) for member, turns, gone in report.departing],
        report.coming,
        [*report.alive],
        ahead=[*report.ahead],
    )
    return vars(mine)


@cache
def agreement_of(epoch: int, record: Record) -> Agreement:
    """The record as a rank reads it from the store."""
    reports = {number: told(report) for number, report in record.reports}
    text = {
        "members": record.members,
        "guest": record.guest,
        "reports": reports,
        "postponed": record.postponed,
    }
    return parse_agreement(epoch, json.dumps(text).encode())


def agreed(world, epoch):
    return agreement_of(epoch, world.records[epoch])


def agreements(world, epochs: Iterable[int]):
    return [agreed(world, epoch) for epoch in epochs]


def dead(rank):
    """A rank that was killed; of what it knew only what others may have received is left."""
    return Rank(
        rank.number,
        state="dead",
        epoch=rank.epoch,
        sent=rank.sent,
        begins=rank.begins,
        enters=rank.enters,
        chain=rank.chain,
    )
