"""Moves of one rank's main thread, as `AxisUser` and `SurvivingCommunicator` make them.

The queue of a rank holds what its main thread does next. A move takes the first item. Items of
`LOCAL` are done at once: they change only what no other thread or rank can see.
"""

from states import (
    Broken,
    Message,
    User,
    agreed,
    agreements,
    departures,
    frozen,
    present,
    rank_with,
    trains_from_now,
    turns_of,
    user_with,
    users_of,
    with_turns,
    with_users,
)

from detonation.cluster.survive import groups
from detonation.cluster.survive import turns as decisions
from detonation.core.integrity.fault_counts import FaultCounts

LOCAL = ("next", "back", "company", "laid", "counts", "acted")


def work_of(program, rank, parts):
    """Queue of a rank for the operation of the program at which it is; None at its end."""
    if rank.at == len(program):
        return None
    name, what = program[rank.at]
    if name == "step" or name == "changed":
        return (*step_of(rank, user_of(rank, what), name, parts), ("next",))
    if name == "back":
        users = [n for n in present(rank) if rank.users[n].exists == "yes"]
        compared = [each for n in users for each in exchange("compare", n)]
        return (("back", what), *compared, ("next",))
    return (("make", what), ("next",))


def user_of(rank, slot):
    """Optimizer of `slot` in the program: the last one that was made for it."""
    return max(n for n, user in enumerate(rank.users) if user.slot == slot and n in present(rank))


def exchange(purpose, user):
    return (("start", purpose, user), ("wait",))


def hand_over(leaving, user):
    """As `hand_over_memory`: the second exchange ends only after all have the memory."""
    return (*exchange(("hands", leaving), user), *exchange("handed", user))


def step_of(rank, user, name, parts):
    """Items of a step of `user`; with a change of what it trains if `name` is `changed`."""
    setup = () if rank.users[user].built else (("laid", user), *exchange("compare", user))
    change = ()
    if name == "changed":
        change = (*exchange("announce", user), ("laid", user), *exchange("compare", user))
    sends = tuple(("start", f"step {part}", user) for part in range(parts))
    return (*setup, ("enter", user), *change, *sends, *[("wait",)] * parts)


def run_on(case, world, rank):
    """Does local items, until the next one concerns others; returns the state of all."""
    while True:
        if not rank.queue:
            work = work_of(case.program, rank, case.parts)
            if work is None:
                return rank_with(world, rank._replace(state="done"))
            rank = rank._replace(queue=work)
        name, *rest = rank.queue[0]
        if name not in LOCAL:
            return rank_with(world, rank)
        rank = _LOCAL[name](rank._replace(queue=rank.queue[1:]), *rest)


def _next(rank):
    return rank._replace(at=rank.at + 1)


def _back(rank, step):
    for number in present(rank):
        user = rank.users[number]
        if user.exists == "yes":
            turns = turns_of(user)
            turns.resume_at(step)
            rank = user_with(rank, number, **with_turns(user, turns)._asdict() | {"steps": step})
    return rank


def _company(rank, of, leaving):
    """As `AxisUser._let_all_hand_over`."""
    gone = {user for member in leaving for user in departures(rank)[member].gone}
    users = users_of(rank)
    others = decisions.company(users.turns, present(rank), of, gone)
    items = []
    for user in others:
        if rank.users[user].built:
            items += [("enter", user), *hand_over(leaving, user)]
        items.append(("counts", user))
    return rank._replace(acting=of, queue=(*items, ("acted",), *rank.queue))


def _laid(rank, user):
    return user_with(trains_from_now(rank, user), user, built=True)


def _counts(rank, user):
    return user_with(rank, user, ahead=rank.users[user].ahead + 1)


def _acted(rank):
    return rank._replace(acting=-1)


_LOCAL = {
    "next": _next,
    "back": _back,
    "company": _company,
    "laid": _laid,
    "counts": _counts,
    "acted": _acted,
}


def makes(rank, slot):
    """The program drops the optimizer of `slot` and makes another one, as `for_one`."""
    old = user_of(rank, slot)
    rank = user_with(rank, old, exists="dropped", memory=False)
    new = User(slot, layout=rank.layout, pending=rank.pending, built=False)
    held = rank.held
    if rank.busy or rank.departing:
        held = (*held, len(rank.users))
    return rank._replace(users=(*rank.users, new), held=held, queue=rank.queue[1:])


def due(world, rank, user, turn):
    pending = agreements(world, rank.users[user].pending)
    return decisions.due_before(pending, user, turn)


def leaving(rank, user, turn):
    """As `AxisUser.leaving`, by the numbers at the start."""
    if rank.acting not in (-1, user):
        return ()
    leave = decisions.leaving_before(departures(rank), user, turn)
    return tuple(member for member in leave if member in rank.users[user].layout)


def expects(world, rank, user, turn):
    return rank.guest is not None and user == world.door and turn >= rank.guest[0]


def enters(world, rank, user):
    """As `enter_step`, and the beginning of `renumber`."""
    turns = turns_of(rank.users[user])
    turn = turns.of(rank.users[user].steps)
    turns.entered = max(turns.entered, turn + 1)
    rank = user_with(rank, user, entered=turns.entered)
    rest = rank.queue[1:]
    if rank.acting < 0:
        rank = rank._replace(enters=rank.at + 1)
    leave = leaving(rank, user, turn)
    if not (leave or due(world, rank, user, turn) or expects(world, rank, user, turn)):
        return begins(world, rank._replace(queue=rest), user)
    first = ()
    if leave:
        first = (*hand_over(leave, user), ("company", user, leave), ("part", user, leave))
    return rank._replace(queue=(*first, ("guest", user), ("adopt", user, leave), *rest))


def begins(world, rank, user):
    turns = turns_of(rank.users[user])
    turns.begin(rank.users[user].steps)
    rank = user_with(rank, user, begun=turns.begun, over=turns.over)
    if rank.acting < 0:
        require_prompt(world, rank, user)
        rank = rank._replace(begins=rank.at + 1)
    return rank


def require_prompt(world, rank, user):
    """What all agreed before any rank had come to this operation holds in it."""
    layout = {*rank.users[user].layout}
    for epoch, record in enumerate(world.records[: rank.epoch + 1]):
        if record is None:
            continue
        begun, entered = record.reach
        agreement = agreed(world, epoch)
        absent = sorted(layout.intersection(record.removed))
        if begun <= rank.at and absent:
            raise Broken(
                f"replica {rank.number} begins {operation(rank.at)} with replica {absent[0]}, which"
                " was lost before any rank had begun it"
            )
        asked = sorted(layout & agreement.asked(1) & departures(rank).keys())
        if entered <= rank.at and asked:
            raise Broken(
                f"replica {rank.number} begins {operation(rank.at)} with replica {asked[0]}, which"
                " had to leave before"
            )


def operation(at):
    return f"operation {at + 1}"


def adopts(world, rank, user, leave):
    """As the last block of `AxisUser.adopt`, and the exchanges after it."""
    mine = rank.users[user]
    turn = turns_of(mine).of(mine.steps)
    rank = forgets_departed(rank, leave)
    found = due(world, rank, user, turn)
    members = [*mine.layout]
    if found:
        members = found[-1].members
    epochs = {each.epoch for each in found}
    if not found or found[-1].epoch in rank.pending:
        pending = tuple(each for each in rank.pending if each not in epochs)
        rank = rank._replace(layout=tuple(members), pending=pending)
    grown = any(each not in mine.layout for each in members)
    pending = tuple(each for each in mine.pending if each not in epochs)
    rank = user_with(rank, user, layout=tuple(members), pending=pending)
    users = users_of(rank)
    for agreement in found:
        users.end_others(agreement.gone)
    if grown:
        users.end_others([each for each in range(len(users.turns)) if each != user])
    rank = with_users(rank, users)
    rank = begins(world, rank._replace(queue=rank.queue[1:]), user)
    after = exchange("welcome", user) * grown + exchange("verify", user)
    return trains_from_now(rank, user)._replace(queue=(*after, *rank.queue))


def forgets_departed(rank, members):
    departing = {m: each for m, each in departures(rank).items() if m not in members}
    rank = rank._replace(departing=frozen(departing))
    if not departing:
        rank = rank._replace(held=())
    return rank


def starts(rank, purpose, user):
    """As `_start`."""
    layout = rank.users[user].layout
    number = rank.started + 1
    message = Message(number, (rank.at, purpose, user), layout, rank.floor, (), False, None)
    message, rank = launched(message, rank)
    return rank._replace(
        started=number,
        kept=(*rank.kept, message),
        untaken=(*rank.untaken, number),
        queue=rank.queue[1:],
    )


def launched(message, rank):
    """As `_launch`: the message among the present members, and the rank that sends it."""
    members = tuple(member for member in rank.members if member in message.layout)
    if members != rank.members:
        raise Broken(
            f"replica {rank.number} sends a message for {message.layout} in a group of"
            f" {rank.members}"
        )
    sent = (*rank.sent, (message.number, message.what, members))
    return message._replace(members=members, flying=True), rank._replace(sent=sent)


def can_end(world, rank, message):
    """True if the network may have ended the message: all members of its group have sent theirs."""
    if not message.flying:
        return False
    number = [each[0] for each in rank.sent].index(message.number)
    for member in message.members:
        other = world.ranks[member]
        if other.epoch != rank.epoch or len(other.sent) <= number:
            return False
        if other.sent[number] != rank.sent[number]:
            raise Broken(
                f"replicas {rank.number} and {member} meet in different collectives:"
                f" {rank.sent[number]} and {other.sent[number]}"
            )
    return True


def concluded(rank, message, absent):
    """As `_conclude`."""
    kept = tuple(
        each._replace(absent=tuple(absent)) if each.number == message.number else each
        for each in rank.kept
    )
    floor = groups.floor_after(rank.floor, {each.number: each for each in kept})
    return rank._replace(kept=kept, floor=floor)


def arrived(rank, message):
    """As `_take` in the main thread."""
    rank = concluded(rank, message, groups.lost_of(message.layout, message.members))
    return rank._replace(kept=tuple(each for each in rank.kept if each.number > message.floor))


def uses(case, rank, message):
    """The main thread uses the result of `message`; returns the rank, and whether a step has ended."""
    absent = frozenset(message.absent)
    _, purpose, user = message.what
    rank = rank._replace(untaken=rank.untaken[1:], queue=rank.queue[1:])
    if purpose != "handed":  # an exchange of nothing
        result = (message.what, message.layout, message.absent)
        rank = rank._replace(chain=case.histories.after(rank.chain, result))
    if purpose == "announce":
        require_together(rank, message, absent)
    if isinstance(purpose, tuple) and rank.number in purpose[1]:
        rank = user_with(rank, user, memory=False)
    ends = is_step(purpose) and not rank.untaken
    if ends:
        rank = user_with(rank, user, steps=rank.users[user].steps + 1)
        rank = user_with(rank, user, memory=True)
    return rank, ends


def is_step(purpose):
    return isinstance(purpose, str) and purpose.startswith("step")


def require_together(rank, message, absent):
    """All replicas that are there have announced their change."""
    counts = FaultCounts(["a parameter"], rank.number)
    counts.changing = len(message.layout)
    counts.miss(absent)
    for sender in range(len(message.layout)):
        if sender not in absent:
            counts.announced(sender, "a parameter")
    if counts.changed_apart:
        raise Broken(f"replica {rank.number} stops: others did not change what they train")
