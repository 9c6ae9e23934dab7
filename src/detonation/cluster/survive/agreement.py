"""Records with which ranks agree on the member replicas: reports of ranks, and agreements. The
module also has the store keys of these records.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Literal

from torch.distributed.distributed_c10d import PrefixStore, Store

from detonation.cluster.processes.rendezvous import name_of_first
from detonation.cluster.processes.waiting import Awaited, Standing
from detonation.core.base_error import DetonationError

SIZE = "size"
"""Key of the store for the counts of replicas and shards at the start of the run."""
EPOCH = "epoch"
"""Key of the store for the number of the latest agreement."""
GONE = b"gone"
"""Value that a rank's heartbeat has in the store after the rank has ended."""


def beat_of(count: int, pace_s: float, started: int = 0, standing: Standing | None = None) -> str:
    """Returns the text of heartbeat number `count` of a rank that sends a heartbeat every `pace_s`
    seconds.

    started: number of the last exchange that the rank has started. standing: the rank's progress in
    its training loop.
    """
    return f"{count} {pace_s:.3f} {started} {standing or Standing(0)}"


def pace_of(beat: bytes) -> float:
    """Returns the seconds between two heartbeats of the rank that sent `beat`; 0 if `beat` is empty
    or says that the rank has ended.

    >>> pace_of(beat_of(12, 0.25).encode()), pace_of(GONE)
    (0.25, 0.0)
    """
    return float((beat.split()[1:2] or [b"0"])[0])


def progress_of(beat: bytes) -> tuple[int, Standing]:
    """Returns the number of the last exchange that a rank has started, and the rank's progress in
    its training loop. Both are part of the rank's heartbeat `beat`.

    >>> progress_of(beat_of(12, 0.25, 40, Standing(21, "inside")).encode())
    (40, Standing(steps=21, where='inside'))
    """
    words = beat.decode().split()[2:]
    if not words:
        return 0, Standing(0)
    return int(words[0]), Standing.parse(" ".join(words[1:]))


class ReplicaLost(DetonationError, RuntimeError):
    """This replica cannot continue: it is no longer a member of the run, the store is lost, or too
    few replicas remain.
    """


class ReplicaLeft(ReplicaLost):
    """This replica was asked to leave, and has handed over its unsent state."""


@dataclass(frozen=True)
class RankReport:
    """What one rank tells all other ranks before they agree which replicas are members.

    floor: the rank has finished all collectives up to this number. beyond: later collectives that
    the rank has finished. absent: for each finished collective that the rank still holds, the
    replicas that took no part in it. begun: number of steps that the rank has begun, used only in
    texts for users. guest: the joining replica for which the rank waits; -1 for none. A rank of the
    joining replica reports its own replica here if it has the training state of the step. users:
    for each optimizer on the axis, the number of turns (see `Turns`) that it has begun. entered:
    for each optimizer, the number of turns whose members the rank has already determined. leaves:
    True if the rank's replica was asked to leave. departing: a tuple for each leaving replica: its
    number, then `Departure.turns` and `Departure.gone` of its departure. coming: the turn before
    which a replica joins, and the number of the joining replica. alive: numbers of the optimizers
    that exist on the rank. apart: replicas that this rank cannot reach. late: replicas that have
    not begun the exchange in which this rank waits. ahead: members of the process group that this
    rank has formed in advance for a joining replica.
    """

    floor: int
    beyond: list[int]
    absent: dict[str, list[int]]
    begun: int
    guest: int = -1
    users: list[int] = field(default_factory=list)
    leaves: bool = False
    entered: list[int] = field(default_factory=list)
    departing: list[tuple[int, list[int], list[int]]] = field(default_factory=list)
    coming: tuple[int, int] | None = None
    alive: list[int] = field(default_factory=list)
    apart: list[int] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)

    def has(self, number: int) -> bool:
        """True if the rank has finished the collective with this `number`."""
        return number <= self.floor or number in self.beyond


@dataclass(frozen=True)
class Agreement:
    """What all ranks have agreed on for one epoch: the members, by their numbers at the start of
    the run, and the report of each rank.

    guest: the replica that may join next; -1 for none. The ranks will wait for this replica at a
    turn (see `Turns`) that follows from this agreement. apart: pairs of replicas that could not
    reach each other. late: replicas that did not begin an exchange in time. postponed: True if the
    joining replica for which all ranks waited lacked the training state, so that it joins later.
    """

    epoch: int
    members: list[int]
    reports: dict[int, RankReport] = field(default_factory=dict)
    guest: int = -1
    apart: list[list[int]] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    postponed: bool = False

    @property
    def next_step(self) -> int:
        """First step that no rank has begun. Use this number only in texts for users: training may
        return to an earlier step.
        """
        return max((report.begun for report in self.reports.values()), default=0)

    @property
    def next_turns(self) -> list[int]:
        """For each optimizer on the axis, its first turn (step of this optimizer) that no rank has
        begun.
        """
        return _largest(report.users for report in self.reports.values())

    @property
    def next_changes(self) -> list[int]:
        """For each optimizer on the axis, the first turn (step of this optimizer) whose members no
        rank has determined yet. Replicas can still leave or join before this turn.
        """
        return _largest(
            turns for report in self.reports.values() for turns in (report.users, report.entered)
        )

    @property
    def gone(self) -> set[int]:
        """The numbers of the optimizers on this axis that at least one rank has dropped."""
        return {
            user
            for report in self.reports.values()
            for user in range(len(report.users))
            if user not in report.alive
        }

    @property
    def awaited(self) -> int:
        """The joining replica for which all ranks waited; -1 for none. If this agreement neither
        makes the replica a member nor postpones it, the replica never joins.
        """
        guests = {report.guest for report in self.reports.values()}
        if len(guests) == 1:
            return guests.pop()
        return -1

    @property
    def formed(self) -> bool:
        """True if all ranks had formed the process group of these members before they made this
        agreement.
        """
        return all(report.ahead == self.members for report in self.reports.values())

    def asked(self, shards: int) -> set[int]:
        """Returns the replicas that were asked to leave, according to the reports of their
        ranks.
        """
        return {rank // shards for rank, report in self.reports.items() if report.leaves}

    def leaves_out(self, replica: int) -> str:
        """Returns the reason, as text, why `replica` is not a member any more and must end."""
        verb = "goes"
        if len(self.members) > 1:
            verb = "go"
        go_on = f"{in_words(self.members)} {verb} on without it after step {self.next_step}"
        beyond = {each for pair in self.apart if replica in pair for each in pair} - {replica}
        if replica in self.late:
            return (
                f"replica {replica} did not come to an exchange for which all replicas waited;"
                f" {go_on}"
            )
        if beyond:
            others = in_words(sorted(beyond))
            return f"replica {replica} and {others} cannot reach each other; {go_on}"
        return f"replica {replica} did not answer, or lost one of its ranks; {go_on}"


def in_words(replicas: Sequence[int]) -> str:
    """Returns the names of `replicas` as text.

    >>> in_words([1]), in_words([0, 2])
    ('replica 1', 'replicas 0, 2')
    """
    return f"replica{'s' * (len(replicas) > 1)} {', '.join(map(str, replicas))}"


@dataclass(frozen=True)
class GuestEntry:
    """The point of training at which a replica joins: before one step of the optimizer with number
    `user`.

    step: the number of this step. turn: the number of this step as a turn, see `Turns`. If training
    goes back, step numbers repeat, and turn numbers do not.
    """

    user: int
    turn: int
    step: int

    @property
    def turn_in_words(self) -> str:
        """The numbers of the optimizer and of its turn, as text. A replica that is postponed joins
        at a later turn, so its next entry has another text.
        """
        return f"{self.user} {self.turn}"

    def is_at(self, step: int, ahead: int) -> bool:
        """True if training is at the point at which the replica joins.

        step: the number of the next step of training. ahead: the number of the turn (see `Turns`)
        of this next step, minus `step`. The step number alone does not suffice, because training
        may go back, and repeat the step in a later turn.
        """
        return step == self.step and ahead == self.turn - step


def turn_of(turns: Sequence[int], user: int) -> int:
    """Returns the turn (step) of the optimizer with number `user` from a list of the turns of all
    optimizers; 0 for an optimizer that was created after the list.

    >>> turn_of([3, 5], 1), turn_of([3, 5], 2)
    (5, 0)
    """
    if user < len(turns):
        return turns[user]
    return 0


def _largest(lists: Iterable[Sequence[int]]) -> list[int]:
    """Returns the largest number at each index of `lists`, which may have different lengths."""
    return [max(column) for column in zip_longest(*lists, fillvalue=0)]


def parse_agreement(epoch: int, text: bytes) -> Agreement:
    """Parses the text of an agreement, as the store holds it, into the `Agreement` of `epoch`."""
    record: dict[str, Any] = json.loads(text)
    reports = {int(rank): RankReport(**report) for rank, report in record["reports"].items()}
    others = {key: record[key] for key in ("apart", "late", "postponed") if key in record}
    return Agreement(epoch, record["members"], reports, record["guest"], **others)


def ranks_of_replicas(replicas: Iterable[int], shards: int) -> list[int]:
    """Returns the ranks of `replicas`, each of which has `shards` ranks.

    >>> ranks_of_replicas([0, 2], 2)
    [0, 1, 4, 5]
    """
    return [replica * shards + shard for replica in replicas for shard in range(shards)]


def agreement_record(
    replicas: Sequence[int],
    shards: int,
    reports: Mapping[int, Mapping[str, Any]],
    guest: int,
    postponed: bool,
) -> dict[str, Any]:
    """Returns the record of an agreement. Its members are those of the `replicas` that can continue
    together.

    reports: the reports of all ranks of `replicas`, by rank. guest, postponed: see `Agreement`.
    """
    pairs = pairs_apart((rank // shards, report["apart"]) for rank, report in reports.items())
    late = sorted({each for report in reports.values() for each in report["late"]})
    kept = those_that_go_on(replicas, pairs, late)
    of_kept = {rank: report for rank, report in reports.items() if rank // shards in kept}
    return {
        "members": kept,
        "reports": of_kept,
        "guest": guest,
        "apart": pairs,
        "late": late,
        "postponed": postponed,
    }


def expected_by_all(guests: Iterable[int], reports: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """Returns the joining replicas among `guests` for which all ranks wait. The `reports` of the
    ranks say for which replica each rank waits.
    """
    return [
        guest
        for guest in guests
        if all(report["guest"] == guest >= 0 for report in reports.values())
    ]


def is_postponed(reports: Mapping[int, Mapping[str, Any]]) -> bool:
    """True if a joining replica must join later, because one of its ranks lacks the training state
    of the step.

    reports: the reports of the ranks of the joining replica.
    """
    return any(report["guest"] < 0 for report in reports.values())


def has_giver(told: Collection[str], members: Collection[int]) -> bool:
    """True if a replica may join, because one of the `members` gives it the training state.

    told: for each rank of the joining replica, the number of the replica that gives it the state;
    "" for no state.

    >>> has_giver(["0", "0"], [0, 1]), has_giver(["0", ""], [0, 1]), has_giver(["0"], [1, 2])
    (True, False, False)
    """
    givers = {*told}
    return len(givers) == 1 and givers <= {str(member) for member in members}


def pairs_apart(reports: Iterable[tuple[int, Collection[int]]]) -> list[list[int]]:
    """Returns the pairs of replicas in which one replica reports that it cannot reach the other
    replica.

    reports: each replica with the replicas that it cannot reach.

    >>> pairs_apart([(0, [1]), (1, [0, 2]), (2, [])])
    [[0, 1], [1, 2]]
    """
    pairs = {(min(a, b), max(a, b)) for a, others in reports for b in others if a != b}
    return [[*pair] for pair in sorted(pairs)]


def those_that_go_on(
    members: Sequence[int], pairs: Sequence[Sequence[int]], late: Collection[int]
) -> list[int]:
    """Returns the members that continue. The two replicas of each of the `pairs` cannot reach each
    other, and the replicas in `late` have not begun an exchange in time.

    The function removes late replicas first. As long as both replicas of a pair remain, it then
    removes the replica that is in the most such pairs. If several replicas are in equally many
    pairs, it removes the replica with the highest number. So a replica that only few replicas can
    reach is removed, and the larger of two partitions continues.

    >>> those_that_go_on([0, 1, 2], [[0, 1], [1, 2]], [])  # one against the rest
    [0, 2]
    >>> those_that_go_on([0, 1, 2, 3], [[0, 2], [0, 3], [1, 2], [1, 3]], [])  # halves
    [0, 1]
    """
    left = [member for member in members if member not in late]
    while True:
        broken = [pair for pair in pairs if all(each in left for each in pair)]
        if not broken:
            return left
        left.remove(max(left, key=lambda each: (sum(each in pair for pair in broken), each)))


_AXES = "detonation/elastic"


def axis_store(base: Store, number: int) -> Store:
    """Returns the part of the store `base` in which the ranks of the elastic axis `number` write
    their keys.
    """
    return PrefixStore(f"{_AXES}/{number}", base)


def serve_one_axis(base: Store) -> None:
    """Gives the only elastic axis in the store `base` the number 0. `axis_store` uses this number
    in the names of keys. Because this number is fixed, the ranks need not meet to agree on it. So a
    rank may be lost before all ranks have met.
    """
    base.set(f"{_AXES}/latest", "0")


def next_axis_store(
    base: Store,
    rank: int,
    world_size: int,
    look: Callable[[], object] = lambda: None,
    offer: Callable[[Store], object] = lambda axis: None,
) -> Store:
    """Returns the part of the store `base` for a new elastic axis of all ranks. Collective.

    look: called while the rank waits, see `Awaited`. offer: called on rank 0 with the new part,
    before other ranks know this part. `base` may also contain parts of earlier starts. Raises
    `TimeoutError` if a rank is missing.
    """
    # `serve_one_axis` has fixed the number of the axis, so the ranks need not meet to agree on it
    if base.check([f"{_AXES}/latest"]) and not base.check([f"{_AXES}/made"]):
        return axis_store(base, 0)
    mine = ""
    if rank == 0:
        mine = str(base.add(f"{_AXES}/made", 1) - 1)
        own = axis_store(base, int(mine))
        offer(own)
        # all other ranks wait for this first heartbeat of rank 0
        own.set(axis_key("beat", 0), beat_of(0, 1.0))
    timeout_s = base.timeout.total_seconds()  # type: ignore[attr-defined]
    meeting = PrefixStore(f"{_AXES}/meet", base)
    number = name_of_first(meeting, rank, world_size, mine, timeout_s, look)
    if rank == 0:
        base.set(f"{_AXES}/latest", number)
    return axis_store(base, int(number))


def latest_axis(base: Store) -> Store | None:
    """Returns the part of the store `base` for the newest elastic axis; None if there is no
    axis.
    """
    if not base.check([f"{_AXES}/latest"]):
        return None
    return axis_store(base, int(base.get(f"{_AXES}/latest")))


def latest_axis_store(base: Store) -> Store:
    """Returns the part of the store `base` for the newest elastic axis. Waits until an axis is
    created; raises `ReplicaLost` if none is created before the timeout of the store.
    """
    timeout_s = base.timeout.total_seconds()  # type: ignore[attr-defined]
    awaited = Awaited("this replica", timeout_s)
    try:
        while (axis := latest_axis(base)) is None:
            awaited.wait(lambda: "the first replicas")
    except TimeoutError as error:
        text = f"no run has started at this store within {timeout_s:g} s: start the run first"
        raise ReplicaLost(text) from error
    return axis


def latest_members(store: Store, replicas: int) -> list[int]:
    """Returns the members of the latest epoch; before the first agreement, all `replicas` of the
    start.
    """
    epoch = 0
    if store.check([EPOCH]):
        epoch = int(store.get(EPOCH))
    if not epoch:
        return [*range(replicas)]
    return parse_agreement(epoch, store.get(f"{epoch}/record")).members


def note_gone(store: Store, rank: int) -> None:
    """Writes to the store that `rank` has ended. The launcher of this rank calls this function."""
    store.set(axis_key("beat", rank), GONE.decode())


def axis_key(
    kind: Literal[
        "beat",
        "port",
        "loopback",
        "end",
        "left",
        "asked",
        "ask",
        "refused",
        "feed",
        "door",
        "coming",
        "copy",
        "ready",
        "pace",
        "entry",
        "at",
    ],
    *numbers: int,
) -> str:
    """Returns a key of the store, for these `numbers`:

    - A rank: `beat` (its latest heartbeat), `port` (its open port shows that its process exists),
      `loopback` (the identity of its loopback interface), `end` (set after its last step), `left`
      (set when the rank has left in order), `asked` (set when its replica was asked to leave).
    - A joining replica (guest): `ask` (its request), `refused` (the reason why it cannot join),
      `door` (the optimizer that it joins first), `copy` (the turn after which it gets a copy of the
      training state), `entry` (the optimizer, turn and step before which it joins; set once the
      members begin to wait for it).
    - A guest and its shard: `feed` (the replica that sends the state, and the address of its feed),
      `coming` (set while the shard waits for a copy), `ready` (the replica from which the shard
      receives the state, or ""), `pace` (what the shard has received since a copy).
    - A guest and a rank: `at` (the last turn of this guest that the rank has reached).
    """
    return "/".join((kind, *map(str, numbers)))
