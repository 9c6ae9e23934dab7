"""Moments of faults: at any moment, or only where another move shows that they have happened.

Nobody sees a kill, a request to leave or a guest's wish to join before a certain move: that of a
rank that notices the kill or misses the report of the killed one, the report of the replica that
leaves, the answer to the guest. All that others do between the fault and that move they can do
before the fault as well, with the same result: a killed rank is one that does nothing any more.
So a search needs the fault only directly before such a move.
"""

from itertools import combinations

from guests import guest_moves, has_copy
from recovery import called, forms, moved_on, notices, proposes, recovery_moves
from states import FIRST, GONE, dead, departures, rank_with

LIVES = ("trains", "done")


def at_any_moment(world):
    """Each fault that may still happen, in this state."""
    found = []
    for fault in sorted({*world.faults}):
        after = without(world, fault)
        if fault == "store lost":
            found.append(("the store is lost: all end", all_end(after)))
        if fault == "join":
            found.append(("a guest asks to join", asking(after)))
        for rank in after.ranks:
            if fault == "kill" and rank.state not in ("out", *GONE):
                found.append(killed(after, rank.number))
            if fault == "departure" and may_be_asked(rank) and rank.state == "trains":
                found.append(asked(after, rank))
    return found


def without(world, fault):
    left = [*world.faults]
    left.remove(fault)
    return world._replace(faults=tuple(left))


def asking(world):
    return rank_with(world, world.ranks[FIRST]._replace(state="asks"))


def killed(world, number):
    after = rank_with(world, dead(world.ranks[number]))
    return f"replica {number} is killed", after


def may_be_asked(rank):
    return not rank.leaves and not rank.let_in


def asked(world, rank):
    after = rank_with(world, rank._replace(leaves=True))
    return f"replica {rank.number} is asked to leave", after


def all_end(world):
    """Each rank ends by its own clock, and takes no result of another after the loss."""
    ranks = [dead(rank) if rank.state not in GONE else rank for rank in world.ranks]
    return world._replace(ranks=tuple(ranks))


def where_they_show(case, world, moves):
    """Each fault together with a move that shows it. moves: of each rank, without faults."""
    found = []
    if "kill" in world.faults:
        found += kills(case, world, moves)
    if "departure" in world.faults:
        found += requests(case, world)
    return found


def kills(case, world, moves):
    guest = world.ranks[FIRST]
    found = []
    if guest.state not in ("out", *LIVES, *GONE):
        # Others look for the guest without telling: they see at once that it is gone.
        found.append(killed(without(world, "kill"), FIRST))
    mortal = [rank.number for rank in world.ranks if rank.state in LIVES]
    before = {(): world}
    shows = {(): showing(case, world)}
    for count in range(1, world.faults.count("kill") + 1):
        for dying in combinations(mortal, count):
            _, after = killed(without(before[dying[:-1]], "kill"), dying[-1])
            before[dying] = after
            shows[dying] = showing(case, after)
            seen = set().union(*[shows[fewer] for fewer in combinations(dying, count - 1)])
            new = shows[dying] - seen
            for number in sorted(new):
                found += [
                    (f"{names(dying)}; {event}", next_)
                    for event, next_ in moves_showing(case, after, after.ranks[number])
                ]
            if not new and not any(moves[n] for n in moves if n not in dying):
                found.append((names(dying), after))
    return found


def names(dying):
    return " and ".join(f"replica {number} is killed" for number in dying)


def showing(case, world):
    """Numbers of the ranks that may do what they may only do as another is gone."""
    found = set()
    for rank in world.ranks:
        if rank.number == FIRST and rank.state in ("asks", "ready"):
            ended = all(each.state in (*GONE, "done") for each in world.ranks[:FIRST])
            if ended or (world.giver >= 0 and not has_copy(world)):
                found.add(FIRST)
        elif rank.state in LIVES and shows(case, world, rank):
            found.add(rank.number)
    return found


def shows(case, world, rank):
    if rank.busy == "reported":
        return bool(proposes(case, world, rank))
    if rank.busy == "forms":
        others = [world.ranks[member] for member in rank.members]
        return any(each.state in GONE or moved_on(each, rank) for each in others)
    return bool(called(world, rank))


def moves_showing(case, world, rank):
    if rank.state not in LIVES:
        return guest_moves(case, world, rank)
    if not rank.busy:
        return notices(world, rank, called(world, rank))
    if rank.busy == "reported":
        return proposes(case, world, rank)
    found = reporting(recovery_moves(case, world, rank), rank)
    if rank.busy == "forms" and "departure" in world.faults and may_be_asked(rank):
        leaving = rank._replace(leaves=True)
        after = rank_with(without(world, "departure"), leaving)
        found += reporting(forms(case, after, leaving), rank)
    return found


def reporting(moves, rank):
    """Of `moves`, those after which the rank has reported."""
    return [(event, after) for event, after in moves if after.ranks[rank.number].busy == "reported"]


def requests(case, world):
    """Each replica asked to leave before it reports; and before it can answer a guest, at once."""
    guest = world.ranks[FIRST]
    answers = guest.state == "asks" or (guest.state == "out" and "join" in world.faults)
    found = []
    for rank in world.ranks:
        if rank.state not in LIVES or not may_be_asked(rank):
            continue
        event, after = asked(without(world, "departure"), rank)
        stay = [each for each in rank.layout if each not in departures(rank)]
        if answers and stay[:1] == [rank.number] and rank.state == "trains":
            found.append((event, after))
        elif rank.busy != "reported":
            shown = reporting(recovery_moves(case, after, after.ranks[rank.number]), rank)
            found += [(f"{event}; {text}", next_) for text, next_ in shown]
    return found
