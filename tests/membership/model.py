"""The protocol of membership as a model, of which a search tries every order of events.

    .venv/bin/python tests/membership/model.py

prints states, seconds and what was found, for each set of faults. `docs/membership.md` describes
the protocol. Three replicas of one rank train with two optimizers on one axis, and up to two faults
happen at any moment. The decisions are those of `detonation.cluster.survive`, called on states of
the model (`states`, `moves`); the model itself only says in which order things may happen.
"""

import json
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import chain, combinations, combinations_with_replacement, pairwise, product

from moves import (
    adopts,
    arrived,
    can_end,
    concluded,
    enters,
    exchange,
    expects,
    launched,
    makes,
    run_on,
    starts,
    uses,
    work_of,
)
from states import (
    FIRST,
    GONE,
    Broken,
    Histories,
    Rank,
    User,
    World,
    agreed,
    departures,
    frozen,
    present,
    rank_with,
    report_of,
    turns_of,
    user_with,
)

from detonation.cluster.survive import agreement as records
from detonation.cluster.survive import groups
from detonation.cluster.survive import turns as decisions
from detonation.cluster.survive.agreement import GuestEntry, RankReport, turn_of

ANY_TIME = ("kill", "departure", "join", "store lost")
IN_PROGRAM = ("return", "second optimizer", "changed parameters")
ALL = 2**62
NO_DOOR = 99


@dataclass(frozen=True)
class Case:
    """What the replicas run, and what may happen at any moment.

    program: operations, the same on all. parts: collectives of a step. faults: of `ANY_TIME`.
    users: the names of the optimizers. least: the smallest number of replicas that may continue.
    """

    program: tuple[tuple[str, object], ...]
    faults: tuple[str, ...] = ()
    parts: int = 1
    users: str = "ab"
    least: int = 1
    histories: Histories = field(default_factory=Histories, compare=False)


def program_of(steps, users="ab", events=()):
    """Operations of `steps` steps of each of `users`.

    events: what the program does before a step: (step, one of `IN_PROGRAM`).
    """
    operations = []
    for step in range(steps):
        happens = [event for at, event in events if at == step]
        name = "step"
        for event in happens:
            if event == "return":
                operations.append(("back", 0))
            elif event == "second optimizer":
                operations.append(("make", users[0]))
            else:
                name = "changed"
        operations += [(name, user) for user in users]
    return tuple(operations)


def first_world(case):
    everyone = tuple(range(FIRST))
    users = tuple(User(slot, trains=slot, layout=everyone) for slot in case.users)
    world = World((), faults=case.faults)
    ranks = [
        Rank(number, users=users, layout=everyone, members=everyone) for number in range(FIRST)
    ]
    world = world._replace(ranks=(*ranks, Rank(FIRST, state="out")))
    for number in range(FIRST):
        world = run_on(case, world, world.ranks[number])
    return world


def successors(case, world):
    """Every next state, each with the event in words."""
    for rank in world.ranks:
        # A record never changes, and to read it alters what this rank alone knows. Whoever dies
        # before it reads can do no more to the others than whoever dies after. So do this first.
        if rank.busy == "reported" and rank.epoch + 1 < len(world.records):
            return [reads(case, world, rank)]
        # Where nobody can be lost, a group forms, and nobody but its rank sees when.
        if rank.busy == "forms" and can_lose_nobody(world, rank):
            return forms(case, world, rank)[:1]
    if is_quiet(world):
        # Nobody will agree again: ranks only exchange, and each result is the same in every order.
        for rank in world.ranks:
            if rank.state == "trains" and (following := main_moves(case, world, rank)):
                return following
    found = []
    for rank in world.ranks:
        if rank.state == "trains":
            found += main_moves(case, world, rank)
            found += recovery_moves(case, world, rank)
        elif rank.state == "done":
            found += recovery_moves(case, world, rank)
        elif rank.number == FIRST:
            found += guest_moves(case, world, rank)
    return [*found, *faults(case, world)]


def can_lose_nobody(world, rank):
    others = [world.ranks[member] for member in rank.members]
    return not {"kill", "store lost"} & {*world.faults} and all(
        each.state not in GONE and each.epoch >= rank.epoch for each in others
    )


def is_quiet(world):
    """True if nothing is left over which ranks would have to agree."""
    here = [rank for rank in world.ranks if rank.state in ("trains", "done")]
    guest = world.ranks[FIRST]
    return (
        not world.faults
        and (guest.state in ("out", "trains", "done", *GONE))
        and all(
            rank.settled and not called(world, rank) and not rank.departing and not rank.guest
            for rank in here
        )
    )


# What the main thread does


def main_moves(case, world, rank):
    if not rank.queue:  # a guest that forms its first group
        return []
    name, *rest = rank.queue[0]
    who = f"replica {rank.number}"
    if name == "part":
        return parts_with(case, world, rank, *rest)
    if name == "make":
        return [(f"{who} makes an optimizer", run_on(case, world, makes(rank, *rest)))]
    if not rank.settled:
        return []
    if name == "enter":
        text = f"{who} enters operation {rank.at + 1}"
        return [(text, run_on(case, world, enters(world, rank, *rest)))]
    if name == "start":
        text = f"{who} sends {rest[0]} of optimizer {rest[1]} (number {rank.started + 1})"
        return [(text, run_on(case, world, starts(rank, *rest)))]
    if name == "wait":
        return takes(case, world, rank)
    if name == "guest" and "join" in case.faults:
        return awaits_guest(case, world, rank, *rest)
    if name == "guest":  # there is none, ever
        rank = rank._replace(queue=rank.queue[1:])
        _, *rest = rank.queue[0]
    adopted = adopts(world, rank, *rest)
    text = f"{who} adopts {adopted.users[rest[0]].layout} for optimizer {rest[0]}"
    return [(text, run_on(case, world, adopted))]


def takes(case, world, rank):
    """The result for which the main thread waits, if there is one."""
    message = next(each for each in rank.kept if each.number == rank.untaken[0])
    if not message.finished:
        if not can_end(world, rank, message):
            return []
        rank = arrived(rank, message)
        message = message._replace(absent=tuple(groups.lost_of(message.layout, message.members)))
    text = f"replica {rank.number} has the result of number {message.number}"
    after = uses(case, world, rank, message)
    after = offers(case, after, after.ranks[rank.number])
    require_one_history(case, after, rank.number)
    return [(text, after)]


def require_one_history(case, world, number):
    mine = world.ranks[number]
    for other in world.ranks:
        if other.state in ("trains", "done", "left", "ended") and not case.histories.agree(
            mine.chain, other.chain
        ):
            raise Broken(
                f"replicas {number} and {other.number} have used different results:"
                f" {case.histories.last(mine.chain)}"
            )


def parts_with(case, world, rank, user, leave):
    """As `_await_departure`: the rank leaves, or waits for the others that do."""
    if rank.number in leave:
        for number, each in enumerate(rank.users):
            if each.exists == "yes" and each.memory:
                raise Broken(f"replica {rank.number} leaves with the memory of optimizer {number}")
        left = dead(rank)._replace(state="left")
        return [(f"replica {rank.number} leaves", rank_with(world, left))]
    if any(member in rank.members for member in leave):
        return []
    text = f"replica {rank.number} goes on without {leave}"
    return [(text, run_on(case, world, rank._replace(queue=rank.queue[1:])))]


def awaits_guest(case, world, rank, user):
    """As `_await_guest`."""
    mine = rank.users[user]
    turn = turns_of(mine).of(mine.steps)
    if not expects(world, rank, user, turn):
        passed = rank._replace(awaits=-1, queue=rank.queue[1:])
        return [(f"replica {rank.number} waits for no guest", run_on(case, world, passed))]
    if rank.awaits >= 0:
        return []
    guest_turn, guest = rank.guest
    entry = (GuestEntry(user, guest_turn, mine.steps), rank.at)
    if world.entry not in (None, entry):
        raise Broken(f"the guest is told {entry} after {world.entry}")
    world = rank_with(world._replace(entry=entry), rank._replace(awaits=guest))
    return [(f"replica {rank.number} waits for the guest", world)]


def offers(case, world, rank):
    """As `Admission.after_step` of the first replica, if a guest asks."""
    guest = world.ranks[FIRST]
    if guest.state not in ("asks", "ready") or rank.state != "trains":
        return world
    user = next((n for n in present(rank) if rank.users[n].exists == "yes"), -1)
    mine = rank.users[user]
    visit = (mine.steps, mine.ahead, rank.chain)
    if visit not in world.visited and world.door >= 0 and user == world.door:
        world = world._replace(visited=(*world.visited, visit))
    stay = [each for each in rank.layout if each not in departures(rank)]
    if guest.state == "asks" and world.door < 0 and stay[:1] == [rank.number] and not rank.leaves:
        # an optimizer that was dropped is freed first
        several = sum(each.exists == "yes" or n in rank.held for n, each in enumerate(rank.users))
        door = NO_DOOR if several > 1 else user
        world = world._replace(door=door, visited=(visit,))
    return world


# What its recovery does


def recovery_moves(case, world, rank):
    if not rank.busy:
        why = called(world, rank)
        return notices(world, rank, why) if why else []
    if rank.busy == "reported":
        return proposes(case, world, rank)
    if rank.busy == "forms":
        return forms(case, world, rank)
    return copies(case, world, rank)


def called(world, rank):
    """Why a rank comes to agree, in words; "" if there is no reason."""
    others = [world.ranks[member] for member in rank.members]
    if world.called > rank.epoch:
        return "it is called"
    for other in others:
        if other.state in GONE:
            return f"it notices that replica {other.number} is gone"
    if rank.leaves:
        return "it was asked to leave"
    if rank.awaits >= 0 and all(each.awaits == rank.awaits for each in others):
        return "all have come to the step of the guest"
    ready = world.ranks[FIRST].state == "ready" and not world.admitted
    if ready and rank.number == rank.members[0]:
        return "the guest is ready"
    return ""


def notices(world, rank, why):
    """A rank reports: with each set of messages that may have ended by then, and each set of
    dropped optimizers that the interpreter may have freed."""
    open_ = [each for each in rank.kept if not each.finished and can_end(world, rank, each)]
    dropped = [
        number
        for number, user in enumerate(rank.users)
        if user.exists == "dropped" and number not in rank.held
    ]
    found = []
    for ended, freed in product(subsets(open_), subsets(dropped)):
        mine = rank
        for message in ended:
            mine = concluded(mine, message, groups.lost_of(message.layout, message.members))
        for number in freed:
            mine = user_with(mine, number, exists="no")
        text = f"replica {rank.number} reports, because {why}"
        if open_:
            text += f"; it has the results of numbers {[each.number for each in ended]}"
        if dropped:
            text += f"; it has freed optimizers {[*freed]}"
        found.append((text, reported(world, mine)))
    return found


def subsets(items):
    return chain.from_iterable(combinations(items, n) for n in range(len(items) + 1))


def reported(world, rank, text=""):
    kept = tuple(each._replace(flying=False) for each in rank.kept)
    if not rank.busy:
        rank = rank._replace(before=rank.members)
    rank = rank._replace(kept=kept, held=tuple(present(rank)), busy="reported")
    key = (rank.epoch + 1, rank.number)
    mine = (key, text or report_of(rank))
    reports = tuple(each for each in world.reports if each[0] != key)
    world = world._replace(
        reports=tuple(sorted((*reports, mine))), called=max(world.called, rank.epoch + 1)
    )
    return rank_with(world, rank)


def proposes(case, world, rank):
    """As `_propose_if_all_came`; several outcomes, as a guest may be late or not noted."""
    epoch = rank.epoch + 1
    told = {number: json.loads(text) for (at, number), text in world.reports if at == epoch}
    missing = [member for member in rank.members if member not in told]
    if any(world.ranks[member].state not in GONE for member in missing):
        return []
    members = [member for member in rank.members if member in told]
    awaited = rank.awaits
    late = [{awaited}]
    if awaited >= 0 and awaited not in told:
        late = [set()]  # lost, or too late
    found = []
    for guests in late:
        reports = {member: told[member] for member in members}
        expected = records.expected_by_all(guests, reports)
        reports |= {guest: told[guest] for guest in expected}
        nexts = [-1]
        if world.ranks[FIRST].state == "ready" and not expected and not world.admitted:
            nexts = [-1, FIRST]
        for following in nexts:
            record = records.agreement_record([*members, *expected], 1, reports, following)
            after = world._replace(
                records=(*world.records, json.dumps(record)),
                reach=(*world.reach, reach(world, members)),
            )
            text = f"replica {rank.number} proposes {record['members']}, epoch {epoch}"
            if following >= 0:
                text += ", and a guest next"
            found.append((text, after))
    return found


def reach(world, members):
    """Positions up to which ranks had begun, and entered, the program."""
    ranks = [world.ranks[member] for member in members]
    return max(each.begins for each in ranks), max(each.enters for each in ranks)


def reads(case, world, rank):
    """As the end of `Membership.agree`, and `_note`."""
    agreement = agreed(world, rank.epoch + 1)
    who = f"replica {rank.number}"
    if rank.number not in agreement.members:
        raise Broken(f"{who} was left out, although it is alive")
    if rank.let_in:
        return joins_again(world, rank, agreement)
    rank = rank._replace(
        epoch=agreement.epoch, members=tuple(agreement.members), busy="forms", sent=()
    )
    if agreement.awaited >= 0:
        rank = rank._replace(guest=None, awaits=-1)
    world, rank = notes(case, world, rank, agreement)
    return f"{who} reads that {agreement.members} go on", rank_with(world, rank)


def notes(case, world, rank, agreement):
    """As `_note`."""
    if rank.number in agreement.asked(1):
        rank = rank._replace(leaves=False)
    departing = departures(rank)
    departing |= decisions.new_departures(agreement, departing, 1, case.least)
    rank = rank._replace(departing=frozen(departing))
    if agreement.guest >= 0 and agreement.guest != (rank.guest or (0, -1))[1]:
        rank = rank._replace(guest=decisions.new_entry(agreement, world.door))
        world = world._replace(admitted=True)
    if not departing:
        rank = rank._replace(held=())
    return world, rank


def forms(case, world, rank):
    """A group forms if all its members come to form it; else they agree again."""
    others = [world.ranks[member] for member in rank.members]
    found = []
    if all(each.epoch >= rank.epoch for each in others):
        found.append((f"replica {rank.number} forms a group", formed(case, world, rank)))
    if any(each.state in GONE or moved_on(each, rank) for each in others):
        text = f"replica {rank.number} forms no group, and reports again"
        mine = ""
        if rank.let_in:
            entry = world.entry[0]
            mine = json.dumps(vars(RankReport(rank.floor, [], {}, entry.step)))
        found.append((text, reported(world, rank, mine)))
    return found


def moved_on(other, rank):
    return (other.epoch == rank.epoch and other.busy == "reported") or other.epoch > rank.epoch


def formed(case, world, rank):
    if rank.let_in:
        world, rank = settled_in(case, world, rank)
    agreement = agreed(world, rank.epoch)
    reports = [agreement.reports[member] for member in agreement.members]
    copying = []
    for message in rank.kept:
        holder = groups.holder_of(message.number, "all_gather", reports)
        if holder != groups.ALL:
            copying.append((message.number, holder))
    return copied_on(case, world, rank._replace(busy="copies", copying=tuple(copying)))


def copied_on(case, world, rank):
    """Repeats messages until one has to be copied, or the recovery is over."""
    while rank.copying:
        number, holder = rank.copying[0]
        message = next(each for each in rank.kept if each.number == number)
        if holder != groups.NOBODY:
            sent = (*rank.sent, (number, "copy", holder))
            return rank_with(world, rank._replace(sent=sent))
        flying, rank = launched(message, rank)
        kept = tuple(flying if each.number == number else each for each in rank.kept)
        rank = rank._replace(kept=kept, copying=rank.copying[1:])
    return rank_with(world, recovered(rank))


def recovered(rank):
    """As the end of `_recover`: every end of the axis has the agreement, if members changed."""
    if rank.before != rank.members:
        rank = rank._replace(pending=(*rank.pending, rank.epoch))
        for number in present(rank):
            pending = (*rank.users[number].pending, rank.epoch)
            rank = user_with(rank, number, pending=pending)
    return rank._replace(busy="")


def copies(case, world, rank):
    """As `_copied`."""
    number, holder = rank.copying[0]
    source = world.ranks[rank.members[holder]]
    found = []
    if source.epoch == rank.epoch and len(source.sent) >= len(rank.sent):
        if source.sent[len(rank.sent) - 1] != rank.sent[-1]:
            raise Broken(
                f"replicas {rank.number} and {source.number} meet in different collectives"
            )
        absent = agreed(world, rank.epoch).reports[source.number].absent.get(str(number))
        if absent is None:
            raise Broken(f"replica {source.number} has dropped number {number}, which others need")
        message = next(each for each in rank.kept if each.number == number)
        if not message.finished:
            rank_ = concluded(rank, message, absent)
        else:
            rank_ = rank
        rank_ = rank_._replace(copying=rank_.copying[1:])
        text = f"replica {rank.number} copies number {number} from replica {source.number}"
        found.append((text, copied_on(case, world, rank_)))
    if called(world, rank):
        text = f"replica {rank.number} copies nothing, and reports again"
        found.append((text, reported(world, rank)))
    return found


# Guests


def guest_moves(case, world, guest):
    if guest.state == "asks" and world.door >= 0:
        return [
            ("the guest has a copy of the state", rank_with(world, guest._replace(state="ready")))
        ]
    if guest.state == "ready" and world.entry is not None:
        return follows(world, guest)
    if guest.state == "arrived":
        return comes_in(case, world, guest)
    if guest.state in ("asks", "ready") and all(
        each.state in (*GONE, "done") for each in world.ranks[:FIRST]
    ):
        return [("the guest gives up: training ended", rank_with(world, dead(guest)))]
    return []


def follows(world, guest):
    """As `admitted`: the guest has followed to the step at which it joins."""
    entry, _ = world.entry
    found = []
    for step, ahead, history in world.visited:
        if entry.is_at(step, ahead):
            mine = guest._replace(state="arrived", chain=history)
            found.append(("the guest has the state of its step", rank_with(world, mine)))
    return found


def comes_in(case, world, guest):
    """As `Guest.let_in`: it reports to the next epoch until an agreement names it."""
    latest = len(world.records) - 1
    entry, at = world.entry
    for epoch in range(max(0, latest - 1), latest + 1):
        if not world.records[epoch]:
            continue
        agreement = agreed(world, epoch)
        if guest.number in agreement.members:
            return [joins(case, world, guest, agreement, at)]
        if agreement.awaited == guest.number:
            return [("the guest ends: the others did not wait", rank_with(world, dead(guest)))]
    key = (latest + 1, guest.number)
    if key in dict(world.reports):
        return []
    report = RankReport(ALL, [], {}, entry.step, guest.number)
    mine = (key, json.dumps(vars(report)))
    world = world._replace(reports=tuple(sorted((*world.reports, mine))))
    return [(f"the guest reports for epoch {latest + 1}", world)]


def joins(case, world, guest, agreement, at):
    """As `Membership.join`; the group forms next."""
    floor = max(each.floor for each in agreement.reports.values() if each.floor < ALL)
    guest = guest._replace(
        state="trains",
        at=at,
        epoch=agreement.epoch,
        members=tuple(agreement.members),
        before=tuple(agreement.members),
        busy="forms",
        floor=floor,
        started=floor,
        let_in=(agreement.epoch,),
    )
    return f"the guest reads that {agreement.members} go on", rank_with(world, guest)


def joins_again(world, guest, agreement):
    """As the retry in `Guest.come_in`."""
    entry = world.entry[0]
    let_in = guest.let_in
    if turn_of(agreement.next_turns, entry.user) <= entry.turn:
        let_in = ()
    guest = guest._replace(
        epoch=agreement.epoch,
        members=tuple(agreement.members),
        busy="forms",
        sent=(),
        let_in=(*let_in, agreement.epoch),
    )
    return f"the guest reads that {agreement.members} go on", rank_with(world, guest)


def settled_in(case, world, rank):
    """As the constructor of `SurvivingCommunicator` for a guest."""
    entry, _at = world.entry
    let_in = [agreed(world, epoch) for epoch in rank.let_in]
    reports = [report for each in let_in for report in each.reports.values()]
    layout = tuple(let_in[0].members)
    pairs = pairwise(let_in)
    pending = tuple(after.epoch for one, after in pairs if after.members != one.members)
    users = [
        User(case.users[0], exists="no", over=True, built=False, memory=False)
        for _ in range(max(len(each.users) for each in reports))
    ]
    mine = User(case.users[0], begun=entry.turn, entered=entry.turn, steps=entry.step)
    turns = turns_of(mine)
    turns.resume_at(entry.step)
    users[entry.user] = mine._replace(
        ahead=turns.ahead, layout=layout, pending=pending, memory=False, trains=mine.slot
    )
    rank = rank._replace(users=tuple(users), layout=layout, pending=pending, let_in=())
    for agreement in let_in:
        departing = departures(rank)
        for report in agreement.reports.values():
            told = {m: decisions.Departure(turns, gone) for m, turns, gone in report.departing}
            departing |= told
        rank = rank._replace(departing=frozen(departing))
        world, rank = notes(case, world, rank, agreement)
    work = work_of(case.program, rank, case.parts)
    welcome = (*exchange("welcome", entry.user), *exchange("verify", entry.user))
    return world, rank._replace(queue=(*welcome, *work))


# Faults, and the end


def faults(case, world):
    found = []
    for fault in sorted({*world.faults}):
        left = [*world.faults]
        left.remove(fault)
        after = world._replace(faults=tuple(left))
        if fault == "store lost":
            found.append(("the store is lost: all end", all_end(after)))
        if fault == "join":
            guest = after.ranks[FIRST]._replace(state="asks")
            found.append(("a guest asks to join", rank_with(after, guest)))
        for rank in after.ranks:
            trains = rank.state == "trains"
            if fault == "kill" and (trains or rank.state in ("asks", "ready", "arrived")):
                killed = rank_with(after, dead(rank))
                found.append((f"replica {rank.number} is killed", killed))
            if fault == "departure" and trains and not rank.let_in:
                asked = rank_with(after, rank._replace(leaves=True))
                found.append((f"replica {rank.number} is asked to leave", asked))
    return found


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


def all_end(world):
    """Each rank ends by its own clock, and takes no result of another after the loss."""
    ranks = [dead(rank) if rank.state not in GONE else rank for rank in world.ranks]
    return world._replace(ranks=tuple(ranks), store=False)


def is_over(world):
    """True if all are gone, or have come to their end and have nothing to agree on."""
    return all(
        each.state in ("out", *GONE) or (each.state == "done" and each.settled)
        for each in world.ranks
    )


# The search


@dataclass(frozen=True)
class Found:
    """What a search found. broken: the property that does not hold, after the `events`. whole: it
    has visited all states."""

    states: int
    seconds: float
    broken: str = ""
    events: tuple[str, ...] = ()
    whole: bool = True

    def __str__(self):
        lines = [f"{number:3} {event}" for number, event in enumerate(self.events, 1)]
        return "\n".join([f"broken: {self.broken}", *lines])


def search(case, most=10_000_000, deep=False):
    """Visits all states, and then requires that each has a way to an end.

    Nearest states come first, so events are as few as possible; with `deep` the farthest, which
    finds what is broken sooner.

    A visited state is known by its hash of 64 bits: with ten million states one is taken for
    another with a probability of about 1 in 400,000.
    """
    began = time.process_time()
    first = first_world(case)
    graph = Graph()
    graph.reach(first, 0, "")
    todo = deque([first])
    over = []

    def found(broken="", number=0):
        seconds = time.process_time() - began
        return Found(len(graph.first), seconds, broken, graph.events(number), not todo)

    while todo and len(graph.first) < most:
        world = todo.pop() if deep else todo.popleft()
        number = graph.numbers[hash(world)]
        try:
            following = successors(case, world)
        except Broken as error:
            return found(str(error), number)
        if is_over(world):
            over.append(number)
        elif not following:
            return found("a rank waits for what will never come", number)
        todo.extend(after for event, after in following if graph.reach(after, number, event))
    stuck = [] if todo else graph.without_a_way_to(over)
    if stuck:
        return found("no order of events leads to an end from here", stuck[0])
    return found()


class Graph:
    """Visited states by number, with the event that led to each first, and all that lead to it."""

    def __init__(self):
        self.numbers = {}
        self.first = []
        self._before = []

    def reach(self, world, number, event):
        """Notes that `event` leads from state `number` to `world`; True if that is new."""
        key = hash(world)
        known = self.numbers.get(key)
        if known is not None:
            self._before[known].append(number)
            return False
        self.numbers[key] = len(self.first)
        self.first.append((number, sys.intern(event)))
        self._before.append([number])
        return True

    def events(self, number):
        """Shortest sequence of events that leads to state `number`."""
        events = []
        while number:
            number, event = self.first[number]
            events.append(event)
        return tuple(reversed(events))

    def without_a_way_to(self, ends):
        """Numbers of the states from which no sequence of events leads to one of `ends`."""
        reached = {*ends}
        todo = [*ends]
        while todo:
            for number in self._before[todo.pop()]:
                if number not in reached:
                    reached.add(number)
                    todo.append(number)
        return [number for number in range(len(self.first)) if number not in reached]


def main():
    for case, name in cases(int(sys.argv[1]) if len(sys.argv) > 1 else 4):
        result = search(case)
        print(f"{name:60} {result.states:9,} states {result.seconds:7.1f} s", flush=True)
        if result.broken:
            print(result)


def cases(steps):
    """All sets of up to two faults, each event of the program before each step."""
    kinds = (*ANY_TIME, *IN_PROGRAM)
    for faults_ in chain([()], [(k,) for k in kinds], combinations_with_replacement(kinds, 2)):
        yield from cases_of(steps, faults_)


def cases_of(steps, faults_):
    timed = tuple(each for each in faults_ if each in ANY_TIME)
    events = [each for each in faults_ if each in IN_PROGRAM]
    users = "a" if "join" in timed else "ab"
    for moments in combinations_with_replacement(range(1, steps), len(events)):
        happens = tuple(zip(moments, events, strict=True))
        name = ", ".join([*timed, *[f"{event} before step {at}" for at, event in happens]])
        yield Case(program_of(steps, users, happens), timed, users=users), name or "no fault"


if __name__ == "__main__":
    main()
