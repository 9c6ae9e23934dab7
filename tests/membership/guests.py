"""Moves of a replica that joins, and of those that let it in."""

from moves import expects, run_on
from states import (
    ALL,
    FIRST,
    GONE,
    Broken,
    Report,
    agreed,
    dead,
    departures,
    present,
    rank_with,
    turns_of,
)

from detonation.cluster.survive.agreement import GuestEntry

NO_DOOR = 99
NOBODY = -1


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


def offers(world, rank):
    """As `Admission.after_step`, if a guest asks: the first replica opens a feed, and the one that the
    guest follows sends its state.

    Returns the states that may follow: a guest whose giver is gone may have turned to the new feed,
    or not yet.
    """
    guest = world.ranks[FIRST]
    if guest.state not in ("asks", "ready") or rank.state != "trains":
        return [world]
    user = next((n for n in present(rank) if rank.users[n].exists == "yes"), -1)
    mine = rank.users[user]
    visit = (mine.steps, mine.ahead, rank.chain)
    if world.giver == rank.number and user == world.door:
        return [sends(world, guest, visit)]
    stay = [each for each in rank.layout if each not in departures(rank)]
    if stay[:1] != [rank.number] or rank.leaves or has_copy(world):
        return [world]
    # an optimizer that was dropped is freed first
    several = sum(each.exists == "yes" or n in rank.held for n, each in enumerate(rank.users))
    door = NO_DOOR if several > 1 else user
    mine = guest._replace(state="asks")
    turned = rank_with(
        world._replace(door=door, giver=rank.number, copied=visit[1], visited=(visit,)), mine
    )
    if world.giver == NOBODY:
        return [turned]
    return [turned, world]


def sends(world, guest, visit):
    """The feed sends a step; where training has gone back, it ends, and the guest needs a copy."""
    if world.copied != visit[1]:
        return loses_copy(world, guest)
    if visit in world.visited:
        return world
    return world._replace(visited=(*world.visited, visit))


def has_copy(world):
    """As `_has_copy`: the giver is a member, as far as the guest knows, and its process lives."""
    return world.giver >= 0 and world.ranks[world.giver].state not in GONE


def loses_copy(world, guest):
    lost = world._replace(giver=NOBODY, visited=())
    return rank_with(lost, guest._replace(state="asks"))


def guest_moves(case, world, guest):
    if guest.state == "arrived" or guest.state == "late":
        return comes_in(case, world, guest)
    if guest.state not in ("asks", "ready"):
        return []
    if all(each.state in (*GONE, "done") for each in world.ranks[:FIRST]):
        return [("the guest gives up: training ended", rank_with(world, dead(guest)))]
    found = []
    if world.entry is not None:
        found = follows(world, guest)
    if guest.state == "asks" and 0 <= world.door < NO_DOOR and has_copy(world):
        ready = guest._replace(state="ready")
        found.append(("the guest has a copy of the state", rank_with(world, ready)))
    if world.giver >= 0 and not has_copy(world):
        found.append(("the guest needs a new copy", loses_copy(world, guest)))
    return found


def follows(world, guest):
    """As `_Arrival.reaches`: the guest has followed to the step at which it joins; or that state
    cannot come, so that it asks the others to go on."""
    entry, _ = world.entry
    found = []
    for step, ahead, history in world.visited:
        if entry.is_at(step, ahead):
            mine = guest._replace(state="arrived", chain=history)
            found.append(("the guest has the state of its step", rank_with(world, mine)))
    if not has_copy(world) or not entry.is_at(entry.step, world.copied):
        mine = guest._replace(state="late")
        after = rank_with(world._replace(giver=NOBODY, visited=()), mine)
        found.append(("the guest lacks the state of its step", after))
    return found


def comes_in(case, world, guest):
    """As `Guest.let_in`: it reports to the next epoch until an agreement names it."""
    latest = len(world.records) - 1
    if world.entry is None:
        asks = guest._replace(state="asks")
        return [("the guest reads that it was postponed", rank_with(world, asks))]
    entry, at = world.entry
    for epoch in range(max(0, latest - 1), latest + 1):
        if not world.records[epoch]:
            continue
        agreement = agreed(world, epoch)
        if guest.number in agreement.members:
            return [joins(case, world, guest, agreement, at)]
        if agreement.awaited == guest.number and not agreement.postponed:
            raise Broken("the others did not wait for the guest, which lives")
    if guest.number in dict(world.reports):
        return []
    # Whether a group was formed in time matters only if it was on all ranks: so only the guest's
    # report differs.
    found = []
    if guest.state == "late":
        mine = (guest.number, Report(ALL, step=entry.step))
        after = world._replace(reports=tuple(sorted((*world.reports, mine))))
        return [(f"the guest reports that it is late, for epoch {latest + 1}", after)]
    for ahead in ((), members_ahead(world)):
        mine = (guest.number, Report(ALL, guest=guest.number, ahead=ahead, step=entry.step))
        text = f"the guest reports for epoch {latest + 1}, with a group of {ahead}"
        after = world._replace(reports=tuple(sorted((*world.reports, mine))))
        found.append((text, after))
    return found


def members_ahead(world):
    """Of the group that the guest forms before its step: of those that agreed on its coming."""
    members = next(each.members for each in world.records if each and each.guest == FIRST)
    return (*members, FIRST)


def joins(case, world, guest, agreement, at):
    """As `Membership.join`; the group forms next.

    It has used the results of the same steps as the others, though not what they have exchanged since
    the last step: unsent memory of a replica that leaves, and comparisons.
    """
    others = [world.ranks[each] for each in agreement.members if each != guest.number]
    for other in others:
        if other.state in GONE:
            continue
        if guest.state == "late" or not case.histories.same_steps(guest.chain, other.chain):
            raise Broken(f"replicas {guest.number} and {other.number} have used different results")
        guest = guest._replace(chain=other.chain)
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
