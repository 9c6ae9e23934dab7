"""The protocol of membership as a model, of which a search tries every order of events.

    .venv/bin/python tests/membership/model.py [STEPS] [STATES] [FILE]

prints states, seconds and what was found, for each set of faults; with a file of JSON lines, a
search that was ended goes on: `benchmarks/results/2026-11-29-membership.jsonl` is such a file.
`docs/membership.md` describes the protocol. Three replicas of one rank train with two optimizers on
one axis, and up to two faults happen at any moment. The decisions are those of
`detonation.cluster.survive`, called on states of the model (`states`, `moves`); the model itself
only says in which order things may happen.
"""

import sys
from dataclasses import dataclass, field
from itertools import chain, combinations_with_replacement

from canonical import canonical
from fault_moments import asking, at_any_moment, where_they_show, without
from guests import awaits_guest, guest_moves, offers
from moves import adopts, arrived, can_end, enters, makes, run_on, starts, uses
from recovery import called, forms, proposes, reads, recovery_moves
from search import Results, explored
from states import FIRST, GONE, GUEST, Broken, Histories, Rank, User, World, dead, rank_with

from detonation.cluster.survive import groups

ANY_TIME = ("kill", "departure", "join", "store lost")
ONWARD = 8
IN_PROGRAM = ("return", "second optimizer", "changed parameters")


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
    plain: bool = False
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
    # Whenever the store is lost, all end: that is one more end of each state, and no way to another
    faults_ = tuple(each for each in case.faults if case.plain or each != "store lost")
    world = World((), faults=faults_)
    ranks = [
        Rank(number, users=users, layout=everyone, members=everyone) for number in range(FIRST)
    ]
    world = world._replace(ranks=(*ranks, Rank(FIRST, state="out")))
    for number in range(FIRST):
        world = run_on(case, world, world.ranks[number])
    return world


def successors(case, world):
    """Every next state, each with the event in words."""
    if sure := sure_move(case, world):
        return sure
    moves = {}
    for rank in world.ranks:
        moves[rank.number] = []
        if rank.state == "trains":
            moves[rank.number] += main_moves(case, world, rank)
        if rank.state in ("trains", "done"):
            moves[rank.number] += recovery_moves(case, world, rank)
        elif rank.number == FIRST:
            moves[rank.number] += guest_moves(case, world, rank)
    found = [move for each in moves.values() for move in each]
    if case.plain:
        return [*found, *at_any_moment(world)]
    return [*found, *where_they_show(case, world, moves)]


def sure_move(case, world):
    """A move that can be made first, as it is of use whatever the others do; none if there is no
    such move."""
    for rank in world.ranks:
        # A record never changes, and to read it alters what this rank alone knows. Whoever dies
        # before it reads can do no more to the others than whoever dies after. So do this first.
        if rank.busy == "reported" and rank.epoch + 1 < len(world.records) and not making(rank):
            return [reads(case, world, rank)]
        # Where nobody can be lost, a group forms, and nobody but its rank sees when.
        if rank.busy == "forms" and can_lose_nobody(world, rank):
            return forms(case, world, rank)[:1]
    # All have told all, and no guest can come between: there is one record, whoever is lost now.
    guest = world.ranks[FIRST]
    comes = guest.state in GUEST and not world.admitted
    if not case.plain and not comes and not any(making(rank) for rank in world.ranks):
        told = dict(world.reports)
        for rank in world.ranks:
            if rank.busy == "reported" and all(
                each in told and told[each].guest < 0 for each in rank.members
            ):
                return proposes(case, world, rank)
    if not case.plain and (following := before_leaving(case, world)):
        return following
    if is_quiet(world):
        # Nobody will agree again: ranks only exchange, and each result is the same in every order.
        for rank in world.ranks:
            if rank.state == "trains" and (following := main_moves(case, world, rank)):
                return following
    return []


def making(rank):
    """True if the program makes an optimizer next, which it may while the rank recovers."""
    return bool(rank.queue) and rank.queue[0][0] == "make"


def before_leaving(case, world):
    """A move that comes before any replica has left, in each order.

    No fault is left, and nobody is called before a replica leaves. Each that leaves waits for a
    message of the rank that moves, or is that rank. So the move comes first, and no other move
    alters it, or is altered by it.
    """
    if world.faults:
        return []
    here = [rank for rank in world.ranks if rank.state in ("trains", "done")]
    guest = world.ranks[FIRST]
    leavers = {each[0] for rank in here for each in rank.departing}
    if not leavers or guest.state in GUEST:
        return []
    if any(not rank.settled or rank.guest or called(world, rank) for rank in here):
        return []
    waits = [rank for rank in here if rank.number in leavers]
    for rank in here:
        leaves = rank.number in leavers and rank.queue and rank.queue[0][0] == "part"
        if rank.state != "trains" or leaves:
            continue
        if not all(other is rank or waits_for(other, rank) for other in waits):
            continue
        if following := main_moves(case, world, rank):
            return following
    return []


def waits_for(rank, other):
    """True if `rank` cannot go on before `other` has sent its message."""
    if rank.state != "trains" or rank.queue[0][0] != "wait":
        return False
    message = next(each for each in rank.kept if each.number == rank.untaken[0])
    if message.finished or other.number not in message.members or other.epoch != rank.epoch:
        return False
    return len(other.sent) <= [each[0] for each in rank.sent].index(message.number)


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
        return takes(case, world, rank) + takes_with_guest(case, world, rank)
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
    rank, ends = uses(case, rank, message)
    after = rank_with(world, rank)
    require_one_history(case, after, rank.number)
    following = offers(after, rank) if ends else [after]
    return [(text, run_on(case, each, each.ranks[rank.number])) for each in following]


def takes_with_guest(case, world, rank):
    """A guest asks, and this rank is the first that sees it."""
    if case.plain or "join" not in world.faults or world.ranks[FIRST].state != "out":
        return []
    moves = takes(case, asking(without(world, "join")), rank)
    return [(f"a guest asks; {event}", after) for event, after in moves if after.door >= 0]


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


def is_over(world):
    """True if all are gone, or have come to their end and have nothing to agree on."""
    return all(
        each.state in ("out", *GONE) or (each.state == "done" and each.settled)
        for each in world.ranks
    )


def onward(case, event, world):
    """The state after some sure moves: only states in which there is a choice have to be known.

    Not after all of them: where many orders have led to the same state, they are made once.
    """
    events = [event]
    for _ in range(ONWARD):
        moves = sure_move(case, world)
        if len(moves) != 1:
            break
        text, world = moves[0]
        events.append(text)
    return "; ".join(events), canonical(case, world)


def search(case, most=10_000_000, deep=False):
    """As `explored`, for a case of this model."""
    same = None if case.plain else onward
    return explored(case, first_world(case), successors, is_over, most, deep, same)


PROPERTIES = (
    "all survivors use the same results, from the same replicas",
    "ranks that meet in a collective send the same one, in the same group",
    "nobody misses a result that others dropped",
    "what was agreed before any rank began a step holds in that step",
    "a replica that leaves keeps no memory of any optimizer",
    "a guest has used the results that the others have used",
    "a guest that lives is let in, unless training ends before",
    "a rank that lives is never left out",
    "each state has a way to an end",
)


def main():
    steps = 4
    most = 200_000
    if len(sys.argv) > 1:
        steps = int(sys.argv[1])
    if len(sys.argv) > 2:
        most = int(sys.argv[2])
    results = Results(search, sys.argv[3:], most)
    found = [searched(faults_, steps, results) for faults_ in sets_of_faults(steps)]
    broken = sum(any(each["broken"] for each in lines) for lines, _ in found)
    whole = [least for _, least in found]
    print("\n".join(PROPERTIES))
    print(
        f"{len(found)} sets of faults: {broken} break a property;"
        f" {sum(each['states'] for each in results.lines.values()):,} states,"
        f" {sum(each['seconds'] for each in results.lines.values()):,.0f} s"
    )
    for count in range(steps, -1, -1):
        print(f"  whole for {count} steps: {whole.count(count)} sets")
    sys.exit(broken > 0)


def searched(faults_, steps, results):
    """Searches programs of more and more steps, while all states can be visited.

    Returns what was found, and the number of steps of the longest program that was searched whole.
    A store that may be lost adds one more end to each state, so the search is the one without it.
    """
    timed, happens = faults_
    timed = tuple(each for each in timed if each != "store lost")
    name = ", ".join([*timed, *[f"{event} before step {at}" for at, event in happens]])
    lines = []
    whole = 0
    for count in range(1 + max([0, *[at for at, _ in happens]]), steps + 1):
        line = results.of(name or "no fault", case_of(count, timed, happens), count)
        lines.append(line)
        if line["broken"] or not line["whole"]:
            break
        whole = count
    return lines, whole


def sets_of_faults(steps):
    """All sets of up to two faults, as those at any time, and (step, event of the program).

    The model has one guest, so there are no two joins.
    """
    kinds = (*ANY_TIME, *IN_PROGRAM)
    for faults_ in chain([()], [(k,) for k in kinds], combinations_with_replacement(kinds, 2)):
        timed = tuple(each for each in faults_ if each in ANY_TIME)
        events = [each for each in faults_ if each in IN_PROGRAM]
        if timed.count("join") > 1:
            continue
        for moments in combinations_with_replacement(range(1, steps), len(events)):
            yield timed, tuple(zip(moments, events, strict=True))


def case_of(steps, timed, happens):
    users = "ab"
    if "join" in timed:
        users = "a"
    return Case(program_of(steps, users, happens), timed, users=users)


if __name__ == "__main__":
    main()
