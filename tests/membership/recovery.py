"""Moves of a rank's recovery, as `Membership` and `SurvivingCommunicator` make them."""

from itertools import chain, combinations, product

from moves import can_end, concluded, exchange, launched, work_of
from states import (
    FIRST,
    GONE,
    Broken,
    Record,
    Report,
    User,
    agreed,
    agreements,
    departures,
    frozen,
    present,
    rank_with,
    report_of,
    told,
    turns_of,
    user_with,
)

from detonation.cluster.survive import agreement as records
from detonation.cluster.survive import groups
from detonation.cluster.survive import turns as decisions
from detonation.cluster.survive.agreement import turn_of


def recovery_moves(case, world, rank):
    if not rank.busy:
        why = called(world, rank)
        return notices(world, rank, why) if why else []
    if rank.busy == "reported" and rank.epoch + 1 < len(world.records):
        return [reads(case, world, rank)]
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
    if guest_is_ready(world, rank.members) and rank.number == rank.members[0]:
        return "the guest is ready"
    return ""


def guest_is_ready(world, members):
    """As `_is_ready`, if no guest is expected."""
    ready = world.ranks[FIRST].state == "ready" and not world.admitted
    return ready and records.has_giver([str(world.giver)], members)


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


def reported(world, rank, report=None):
    kept = tuple(each._replace(flying=False) for each in rank.kept)
    if not rank.busy:
        rank = rank._replace(before=rank.members, agreed=())
    rank = rank._replace(kept=kept, held=tuple(present(rank)), busy="reported")
    if rank.epoch + 1 != len(world.records):
        raise Broken(f"replica {rank.number} reports to epoch {rank.epoch + 1}, which is over")
    mine = (rank.number, report or report_of(rank))
    reports = tuple(each for each in world.reports if each[0] != rank.number)
    world = world._replace(
        reports=tuple(sorted((*reports, mine))), called=max(world.called, rank.epoch + 1)
    )
    return rank_with(world, rank)


def proposes(case, world, rank):
    """As `_propose_if_all_came`; several outcomes, as a guest may not be noted."""
    epoch = rank.epoch + 1
    if epoch < len(world.records):
        return []
    mine = dict(world.reports)
    missing = [member for member in rank.members if member not in mine]
    if any(world.ranks[member].state not in GONE for member in missing):
        return []
    members = [member for member in rank.members if member in mine]
    awaited = {rank.awaits}
    if rank.awaits >= 0 and rank.awaits not in mine:
        if world.ranks[FIRST].state not in GONE:
            return []  # the guest, which lives, reports in time
        awaited = set()
    reports = {member: told(mine[member]) for member in members}
    expected = records.expected_by_all(awaited, reports)
    nexts = [-1]
    if not expected and guest_is_ready(world, members):
        # a rank looks for a guest at each beat, so it is overlooked at most once
        nexts = [FIRST] if world.overlooked else [-1, FIRST]
        world = world._replace(overlooked=True)
    of_guest = {guest: told(mine[guest]) for guest in expected}
    postponed = records.is_postponed(of_guest)
    entrants = [*members]
    if not postponed:
        entrants += expected
        reports |= of_guest
    found = []
    for following in nexts:
        record = records.agreement_record(entrants, 1, reports, following, postponed)
        kept = Record(
            tuple(record["members"]),
            record["guest"],
            tuple((number, mine[number]) for number in record["reports"]),
            reach(world, members),
            tuple(each for each in rank.members if each not in record["members"]),
            postponed,
        )
        after = world._replace(records=(*world.records, kept), reports=())
        text = f"replica {rank.number} proposes {record['members']}, epoch {epoch}"
        if following >= 0:
            text += ", and a guest next"
        if postponed:
            text += ", and the guest later"
            after = after._replace(admitted=False, entry=None)
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
        epoch=agreement.epoch,
        members=tuple(agreement.members),
        busy="forms",
        sent=(),
        agreed=(*rank.agreed, agreement.epoch),
    )
    if agreement.awaited >= 0:
        rank = rank._replace(guest=None, awaits=-1, ahead=())
    world, rank = notes(case, world, rank, agreement)
    return f"{who} reads that {agreement.members} go on", rank_with(world, rank)


def forms(case, world, rank):
    """A group forms if all its members come to form it; else they agree again. One that was formed
    ahead is there, whoever has died since."""
    agreement = agreed(world, rank.epoch)
    if agreement.formed:
        if agreement.reports[rank.number].ahead != agreement.members:
            raise Broken(f"replica {rank.number} has not formed the group that others use")
        return [(f"replica {rank.number} has a group", formed(case, world, rank))]
    others = [world.ranks[member] for member in rank.members]
    found = []
    if all(each.epoch >= rank.epoch for each in others):
        found.append((f"replica {rank.number} forms a group", formed(case, world, rank)))
    if any(each.state in GONE or moved_on(each, rank) for each in others):
        text = f"replica {rank.number} forms no group, and reports again"
        mine = None
        if rank.let_in:
            mine = Report(rank.floor, step=world.entry[0].step)
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
    return rank_with(world, recovered(world, rank))


def recovered(world, rank):
    """As the end of `_recover`: every end of the axis has the agreements that changed members."""
    changes = decisions.changes_of(rank.before, agreements(world, rank.agreed))
    epochs = tuple(each.epoch for each in changes)
    rank = rank._replace(pending=(*rank.pending, *epochs))
    for number in present(rank):
        pending = (*rank.users[number].pending, *epochs)
        rank = user_with(rank, number, pending=pending)
    return rank._replace(busy="", agreed=())


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


def notes(case, world, rank, agreement):
    """As `_note`."""
    if rank.number in agreement.asked(1):
        rank = rank._replace(leaves=False)
    departing = departures(rank)
    departing |= decisions.new_departures(agreement, departing, 1, case.least)
    rank = rank._replace(departing=frozen(departing))
    if agreement.guest >= 0 and agreement.guest != (rank.guest or (0, -1))[1]:
        rank = rank._replace(
            guest=decisions.new_entry(agreement, world.door),
            ahead=(*agreement.members, agreement.guest),
        )
        world = world._replace(admitted=True)
    if not departing:
        rank = rank._replace(held=())
    return world, rank


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
    pending = tuple(each.epoch for each in decisions.changes_of(layout, let_in))
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
