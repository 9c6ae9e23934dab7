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
    if guest.number in dict(world.reports):
        return []
    # Whether a group was formed in time matters only if it was on all ranks: so only the guest's
    # report differs.
    found = []
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
