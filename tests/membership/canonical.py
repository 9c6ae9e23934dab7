"""One state for all those that differ only in what nothing that follows can tell.

Each function removes one kind of history, and says why no later decision reads it. Numbers of
collectives and of epochs count from what all living ranks have left behind: decisions and
properties compare them, and never read them as such. Histories of results are compared, so the
beginning that all have in common is removed.

Replicas are not permuted: the first of the living ones gives results, and lets a guest in.
`test_reductions` compares the ends with those of the plain search, and `test_model` requires that
the reduced search finds each fault of the past.
"""

from states import ALL, GONE, GUEST, Message, Rank, Report

LIVES = ("trains", "done")
UNTIL_NOW = (0, 0)


def canonical(case, world):
    """The state that stands for `world` in the search."""
    alive = [rank for rank in world.ranks if rank.state in LIVES]
    if not alive:
        return nobody(world)
    at = min(rank.at for rank in alive)
    base = min(rank.floor for rank in alive)
    makes = any(name == "make" for name, _ in case.program)
    comes = any(rank.state in GUEST or rank.guest for rank in world.ranks)
    joins = comes or "join" in world.faults
    ranks = [living(rank, at, base, makes, joins) for rank in alive]
    world = _with(world, ranks)
    world = without_visits(world, ranks)
    world = without_sent(world)
    world = without_epochs(world, at)
    world = from_number(world, base)
    return without_chains(case, world)


def nobody(world):
    """Nobody will read what ranks that are gone knew; a guest can only give up."""
    ranks = tuple(
        Rank(rank.number, state=rank.state if rank.state in ("out", *GUEST) else "dead")
        for rank in world.ranks
    )
    return world._replace(
        ranks=ranks,
        reports=(),
        records=(None,),
        called=0,
        door=-1,
        visited=(),
        giver=-1,
        copied=0,
        overlooked=False,
        entry=None,
        faults=(),
    )


def living(rank, at, base, makes, joins):
    """A rank without what it will not read any more itself."""
    changes = {"kept": kept_of(rank, base)}
    if rank.begins < at or rank.enters < at:
        # Positions are compared with those at which ranks begin operations, from `at` on.
        changes |= {"begins": max(rank.begins, at), "enters": max(rank.enters, at)}
    if not rank.busy and rank.before:
        changes["before"] = ()
    if rank.state == "done":
        changes["queue"] = ()
    if not makes:  # only dropped optimizers are freed
        changes["held"] = ()
    if not joins and any(user.steps for user in rank.users):
        # only a guest is told a step; turns alone decide between members
        changes["users"] = tuple(
            user._replace(steps=0, ahead=user.steps + user.ahead) for user in rank.users
        )
    return rank._replace(**changes)


def kept_of(rank, base):
    """Its messages. All that live have finished those up to `base`, so they have no use but to be
    taken; a rank that recovers may still have to copy them in the order of the others."""
    found = []
    for message in rank.kept:
        taken = message.number not in rank.untaken
        if taken and message.number <= base and not rank.busy:
            continue
        floor = max(message.floor, base)
        if message.finished and taken:
            message = Message(message.number, (), (), 0, (), False, message.absent)
        elif message.members and (message.finished or not message.flying):
            message = message._replace(members=(), flying=False, floor=floor)
        elif message.floor != floor:
            message = message._replace(floor=floor)
        found.append(message)
    return tuple(found)


def without_visits(world, ranks):
    """Only a guest reads what it was told, and only ranks that expect one remember it."""
    guest = world.ranks[-1]
    lowest = min(rank.epoch for rank in ranks)
    unread = any(record and record.guest >= 0 for record in world.records[lowest + 1 :])
    if guest.state in GUEST or guest.let_in or unread or any(r.guest for r in ranks):
        if guest.state not in ("asks", "ready"):
            return world._replace(visited=(), giver=-1, copied=0)
        begun = [rank.users[world.door].begun for rank in ranks if world.door < len(rank.users)]
        visited = world.visited
        if begun and world.door >= 0:  # it enters before a turn that no rank has begun
            least = min(begun)
            entry = world.entry and world.entry[0]  # which all may have passed without it
            visited = tuple(
                sorted(
                    (step, ahead, chain)
                    for step, ahead, chain in {*visited}
                    if step + ahead >= least or (entry and entry.is_at(step, ahead))
                )
            )
        return world._replace(visited=visited)
    return world._replace(
        visited=(),
        door=-1,
        giver=-1,
        copied=0,
        entry=None,
        admitted=False,
        overlooked=False,
    )


def without_sent(world):
    """Of each epoch, the operations that all have sent, and for which no living rank waits."""
    ranks = [*world.ranks]
    living_ = [rank for rank in ranks if rank.state in LIVES]
    lowest = min(rank.epoch for rank in living_)
    told = dict(world.reports)
    for number, rank in enumerate(ranks):
        if rank.state not in GONE:
            continue
        changes = {}
        if rank.epoch < lowest:
            changes = {"epoch": -1, "sent": ()}
        if number not in told:
            changes |= {"begins": 0, "enters": 0}
        if any(getattr(rank, name) != value for name, value in changes.items()):
            ranks[number] = rank._replace(**changes)
    for epoch in {rank.epoch for rank in living_}:
        here = [rank for rank in ranks if rank.epoch == epoch and rank.state in (*LIVES, *GONE)]
        come = all(rank.epoch >= epoch for rank in living_) and not any(
            rank.state in ("arrived", "late") for rank in ranks
        )
        if not come:
            continue
        if all(rank.busy == "reported" for rank in here if rank.state in LIVES):
            drop = max(len(rank.sent) for rank in here)
        else:
            drop = min(needed(rank) for rank in here)
        if drop:
            for rank in here:
                ranks[rank.number] = rank._replace(sent=rank.sent[drop:])
    return world._replace(ranks=tuple(ranks))


def needed(rank):
    """Index of the first operation in its group of which a rank may still await the end."""
    if rank.state in GONE:
        return len(rank.sent)
    first = len(rank.sent)
    if rank.copying:
        first -= 1
    waits = {each.number for each in rank.kept if each.flying and not each.finished}
    if not waits:
        return max(first, 0)
    for index, sent in enumerate(rank.sent[:first]):
        if sent[0] in waits:
            return index
    return max(first, 0)


def without_epochs(world, at):
    """Agreements that all living ranks have read, and that are not referred to; and of the others
    what is not read."""
    if world.records == (None,):
        return world
    alive = [rank for rank in world.ranks if rank.state in LIVES]
    lowest = min(rank.epoch for rank in alive)
    whole = read_whole(world, alive)
    pending = {
        epoch
        for rank in alive
        for epochs in (rank.pending, rank.agreed, *[user.pending for user in rank.users])
        for epoch in epochs
    }
    layouts = layouts_of(alive)
    for epoch in pending | whole:  # with whom a rank would step if it adopted what it still may
        if world.records[epoch]:
            layouts |= {*world.records[epoch].members}
    departing = {each[0] for rank in alive for each in rank.departing}
    found = []
    numbers = {}
    for epoch, record in enumerate(world.records):
        if epoch > lowest or epoch in whole:
            kept = record and record._replace(reach=clamped(record.reach, at))
        else:
            kept = record and summary(record, at, epoch in pending, layouts, departing)
        if kept is not None or epoch >= lowest:
            numbers[epoch] = len(found)
            found.append(kept)
    ranks = []
    for rank in world.ranks:
        if rank.state in LIVES:
            ranks.append(renumbered(rank, numbers))
        elif rank.state in GUEST:
            ranks.append(rank._replace(epoch=0))
        else:
            epoch = numbers.get(rank.epoch, -1)
            ranks.append(rank if rank.epoch == epoch else rank._replace(epoch=epoch))
    called = numbers[lowest] + max(world.called - lowest, 0)
    return world._replace(ranks=tuple(ranks), records=tuple(found), called=called)


def read_whole(world, alive):
    """Epochs whose record a rank or the guest will still read, with all reports."""
    whole = {epoch for rank in alive for epoch in rank.let_in}
    whole |= {rank.epoch for rank in alive if rank.busy in ("forms", "copies")}
    guest = world.ranks[-1]
    if guest.state in ("arrived", "late") or (guest.state in GUEST and world.admitted):
        latest = len(world.records) - 1
        whole |= {max(latest - 1, 0), latest}
        coming = (e for e, record in enumerate(world.records) if record and record.guest >= 0)
        whole |= {*[*coming][:1]}
    return whole


def layouts_of(alive):
    """All with whom a rank steps."""
    layouts = set()
    for rank in alive:
        layouts.update(rank.layout, *[user.layout for user in rank.users])
    return layouts


def renumbered(rank, numbers):
    if numbers[rank.epoch] == rank.epoch and all(old == new for old, new in numbers.items()):
        return rank

    def of(epochs):
        return tuple([numbers[epoch] for epoch in epochs])

    users = tuple(user._replace(pending=of(user.pending)) for user in rank.users)
    return rank._replace(
        epoch=numbers[rank.epoch],
        pending=of(rank.pending),
        agreed=of(rank.agreed),
        let_in=of(rank.let_in),
        users=users,
    )


def clamped(reach, at):
    return max(reach[0], at), max(reach[1], at)


def summary(record, at, pending, layouts, departing):
    """What all that have read a record may still need: whom it removed, or let go, of those with
    whom they step; when it is due, and which optimizers were gone."""
    removed = tuple(each for each in record.removed if each in layouts)
    asked = {number for number, report in record.reports if report.leaves}
    asked &= departing & layouts
    if not (removed or asked or pending):
        return None
    reach = UNTIL_NOW
    if removed or asked:
        reach = clamped(record.reach, at)
    reports = []
    for number, report in record.reports:
        mine = Report(ALL, leaves=number in asked)
        if pending:
            mine = mine._replace(users=report.users, alive=report.alive)
        reports.append((number, mine))
    return record._replace(guest=-1, reports=merged(reports), reach=reach, removed=removed)


def merged(reports):
    """The same for all: only the largest turns, and what anybody has dropped, are read."""
    most = max(len(report.users) for _, report in reports)
    users = tuple(
        max(report.users[n] for _, report in reports if n < len(report.users)) for n in range(most)
    )
    gone = {n for _, report in reports for n in range(len(report.users)) if n not in report.alive}
    alive = tuple(n for n in range(most) if n not in gone)
    return tuple((number, report._replace(users=users, alive=alive)) for number, report in reports)


def from_number(world, base):
    """Numbers of collectives, from the last one that all living ranks have finished."""
    if not base:
        return world
    ranks = []
    for rank in world.ranks:
        sent = tuple((each[0] - base, *each[1:]) for each in rank.sent)
        if rank.state not in LIVES:
            ranks.append(rank._replace(sent=sent))
            continue
        kept = tuple(
            each._replace(number=each.number - base, floor=max(each.floor - base, 0))
            for each in rank.kept
        )
        ranks.append(
            rank._replace(
                sent=sent,
                kept=kept,
                untaken=tuple(number - base for number in rank.untaken),
                copying=tuple((number - base, holder) for number, holder in rank.copying),
                started=rank.started - base,
                floor=rank.floor - base,
            )
        )
    reports = tuple((number, report_from(report, base)) for number, report in world.reports)
    records = tuple(
        record
        and record._replace(
            reports=tuple((number, report_from(each, base)) for number, each in record.reports)
        )
        for record in world.records
    )
    return world._replace(ranks=tuple(ranks), reports=reports, records=records)


def report_from(report, base):
    if report.floor == ALL:  # of a guest, or without numbers
        return report
    return report._replace(
        floor=report.floor - base,
        beyond=tuple(number - base for number in report.beyond),
        absent=tuple((number - base, absent) for number, absent in report.absent),
    )


def without_chains(case, world):
    """Results that all have used alike, and those of ranks whose results are not compared again."""
    ranks = [*world.ranks]
    alive = [rank.chain for rank in ranks if rank.state in LIVES]
    for number, rank in enumerate(ranks):
        if rank.state == "left" and all(case.histories.begins(rank.chain, each) for each in alive):
            ranks[number] = rank._replace(state="dead", chain=0)
        elif rank.state in ("dead", "out") and rank.chain:
            ranks[number] = rank._replace(chain=0)
    compared = [rank for rank in ranks if rank.state in (*LIVES, "arrived", "left")]
    chains = {rank.chain for rank in compared} | {each[2] for each in world.visited}
    if chains == {0}:
        return world._replace(ranks=tuple(ranks))
    shortened = case.histories.from_common(chains)
    for rank in compared:
        ranks[rank.number] = rank._replace(chain=shortened[rank.chain])
    visited = tuple((step, ahead, shortened[chain]) for step, ahead, chain in world.visited)
    return world._replace(ranks=tuple(ranks), visited=visited)


def _with(world, ranks):
    every = [*world.ranks]
    for rank in ranks:
        every[rank.number] = rank
    return world._replace(ranks=tuple(every))
