"""Records with which ranks agree on the members: reports, agreements and keys of the store."""

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
"""Key of the numbers of replicas and shards at the start of the run."""
EPOCH = "epoch"
"""Key of the number of the latest agreement."""
GONE = b"gone"
"""Beat of a rank that has ended."""


def beat_of(count: int, pace_s: float, started: int = 0, standing: Standing | None = None) -> str:
    """Heartbeat number `count` of a rank that beats every `pace_s` seconds.

    started: number of the last exchange that the rank has started. standing: the rank's progress.
    """
    return f"{count} {pace_s:.3f} {started} {standing or Standing(0)}"


def pace_of(beat: bytes) -> float:
    """Seconds between the beats of the rank that sent `beat`; 0 if it has sent none.

    >>> pace_of(beat_of(12, 0.25).encode()), pace_of(GONE)
    (0.25, 0.0)
    """
    return float((beat.split()[1:2] or [b"0"])[0])


def progress_of(beat: bytes) -> tuple[int, Standing]:
    """The number of the last exchange that a rank has started, and the rank's progress, from its
    `beat`.

    >>> progress_of(beat_of(12, 0.25, 40, Standing(21, "inside")).encode())
    (40, Standing(steps=21, where='inside'))
    """
    words = beat.decode().split()[2:]
    if not words:
        return 0, Standing(0)
    return int(words[0]), Standing.parse(" ".join(words[1:]))


class ReplicaLost(DetonationError, RuntimeError):
    """This replica is no longer a member, or too few replicas remain to continue."""


class ReplicaLeft(ReplicaLost):
    """This replica was asked to leave, and has handed over its unsent state."""


@dataclass(frozen=True)
class RankReport:
    """Progress of a rank.

    floor: the rank has finished all collectives up to this number. beyond: later collectives that
    it has finished. absent: replicas absent from finished collectives that the rank still holds.
    begun: number of steps begun, used in messages. guest: the replica for which the rank waits; -1
    for none. A guest that has the state of the step waits for itself. users: the turns (see
    `Turns`) that each optimizer on the axis has begun.
    entered: turns for which the rank knows the leaving and joining replicas. leaves: True if its
    replica was asked to leave. departing: leaving replicas, each with the turns of all optimizers
    before which it leaves, and the optimizers that were `gone` at that agreement. coming: the turn
    before which a replica joins, and the number of this replica. alive: the existing optimizers.
    apart: replicas that this rank cannot reach. late: replicas that have not begun the exchange in
    which this rank waits. ahead: members of the group that this rank has already formed for a
    guest's step.
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
        """True if the rank finished the collective `number`."""
        return number <= self.floor or number in self.beyond


@dataclass(frozen=True)
class Agreement:
    """Members of an epoch, by their numbers at the start, and the progress of each rank.

    guest: a replica that may join before the next step; -1 for none. apart: pairs of replicas that
    could not reach each other. late: replicas that did not begin an exchange in time. postponed:
    True if the replica for which all waited lacked the state, so that it joins later.
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
        """First step that no rank has begun; used only in messages, because training may return to
        an earlier step.
        """
        return max((report.begun for report in self.reports.values()), default=0)

    @property
    def next_turns(self) -> list[int]:
        """First turn of each optimizer on the axis that no rank has begun."""
        return _largest(report.users for report in self.reports.values())

    @property
    def next_changes(self) -> list[int]:
        """First turn of each optimizer before which no rank has settled who leaves or joins."""
        return _largest(
            turns for report in self.reports.values() for turns in (report.users, report.entered)
        )

    @property
    def gone(self) -> set[int]:
        """Optimizers on the axis that at least one rank has dropped."""
        return {
            user
            for report in self.reports.values()
            for user in range(len(report.users))
            if user not in report.alive
        }

    @property
    def awaited(self) -> int:
        """The replica for which all ranks waited; -1 for none. Unless it is a member now, or was
        postponed, it never joins.
        """
        guests = {report.guest for report in self.reports.values()}
        if len(guests) == 1:
            return guests.pop()
        return -1

    @property
    def formed(self) -> bool:
        """True if all ranks had formed the members' group before they agreed on the members."""
        return all(report.ahead == self.members for report in self.reports.values())

    def asked(self, shards: int) -> set[int]:
        """Replicas that were asked to leave."""
        return {rank // shards for rank, report in self.reports.items() if report.leaves}

    def leaves_out(self, replica: int) -> str:
        """The reason why `replica` is no member and must end, as text."""
        verb = "goes"
        if len(self.members) > 1:
            verb = "go"
        go_on = f"{in_words(self.members)} {verb} on without it after step {self.next_step}"
        beyond = {each for pair in self.apart if replica in pair for each in pair} - {replica}
        if replica in self.late:
            return f"replica {replica} did not come to an exchange for which all waited; {go_on}"
        if beyond:
            others = in_words(sorted(beyond))
            return f"replica {replica} and {others} cannot reach each other; {go_on}"
        return f"replica {replica} was not heard of, or lost a shard; {go_on}"


def in_words(replicas: Sequence[int]) -> str:
    """The names of `replicas` as text.

    >>> in_words([1]), in_words([0, 2])
    ('replica 1', 'replicas 0, 2')
    """
    return f"replica{'s' * (len(replicas) > 1)} {', '.join(map(str, replicas))}"


@dataclass(frozen=True)
class GuestEntry:
    """The turn and step of the optimizer `user` before which a replica joins."""

    user: int
    turn: int
    step: int

    @property
    def turn_in_words(self) -> str:
        """The turn of its optimizer as text; no two entries of one guest have the same."""
        return f"{self.user} {self.turn}"

    def is_at(self, step: int, ahead: int) -> bool:
        """True if this turn follows `step` steps. `ahead` is the number of the turn minus `step`:
        training may go back, and repeat the step in a later turn.
        """
        return step == self.step and ahead == self.turn - step


def turn_of(turns: Sequence[int], user: int) -> int:
    """The turn of the optimizer `user` in a list of all turns; 0 for an optimizer that was created
    later.

    >>> turn_of([3, 5], 1), turn_of([3, 5], 2)
    (5, 0)
    """
    if user < len(turns):
        return turns[user]
    return 0


def _largest(lists: Iterable[Sequence[int]]) -> list[int]:
    """The largest number at each index of lists of different lengths."""
    return [max(column) for column in zip_longest(*lists, fillvalue=0)]


def parse_agreement(epoch: int, text: bytes) -> Agreement:
    """Parses the record of an agreement in the store."""
    record: dict[str, Any] = json.loads(text)
    reports = {int(rank): RankReport(**report) for rank, report in record["reports"].items()}
    others = {key: record[key] for key in ("apart", "late", "postponed") if key in record}
    return Agreement(epoch, record["members"], reports, record["guest"], **others)


def ranks_of_replicas(replicas: Iterable[int], shards: int) -> list[int]:
    """Ranks of `replicas` with `shards` ranks each.

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
    """The record of an agreement between the `replicas` that can continue together.

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
    """The `guests` for which all ranks that have reported wait."""
    return [
        guest
        for guest in guests
        if all(report["guest"] == guest >= 0 for report in reports.values())
    ]


def is_postponed(reports: Mapping[int, Mapping[str, Any]]) -> bool:
    """True if one of a guest's ranks, which made `reports`, lacks the state of its step."""
    return any(report["guest"] < 0 for report in reports.values())


def has_giver(told: Collection[str], members: Collection[int]) -> bool:
    """True if a guest may join: a member gives it the state.

    told: by each of its ranks, the number of the replica that gives the state; "" for no state.

    >>> has_giver(["0", "0"], [0, 1]), has_giver(["0", ""], [0, 1]), has_giver(["0"], [1, 2])
    (True, False, False)
    """
    givers = {*told}
    return len(givers) == 1 and givers <= {str(member) for member in members}


def pairs_apart(reports: Iterable[tuple[int, Collection[int]]]) -> list[list[int]]:
    """Pairs of replicas in which one replica reports that it cannot reach the other.

    >>> pairs_apart([(0, [1]), (1, [0, 2]), (2, [])])
    [[0, 1], [1, 2]]
    """
    pairs = {(min(a, b), max(a, b)) for a, others in reports for b in others if a != b}
    return [[*pair] for pair in sorted(pairs)]


def those_that_go_on(
    members: Sequence[int], pairs: Sequence[Sequence[int]], late: Collection[int]
) -> list[int]:
    """The members that continue if some `pairs` cannot reach each other and some replicas are
    `late`.

    Late replicas are removed first. Then, as long as a pair remains, the replica in most pairs is
    removed. If several replicas are in equally many pairs, the replica with the highest number is
    removed. So a replica that few others can reach is removed, and the larger of two partitions
    continues.

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
    """The part of a store in which the ranks of elastic axis `number` agree."""
    return PrefixStore(f"{_AXES}/{number}", base)


def serve_one_axis(base: Store) -> None:
    """Reserves `base` for one axis. Its ranks then need not agree on a part of the store, so any
    rank may end earlier.
    """
    base.set(f"{_AXES}/latest", "0")


def next_axis_store(
    base: Store,
    rank: int,
    world_size: int,
    look: Callable[[], object] = lambda: None,
    offer: Callable[[Store], object] = lambda axis: None,
) -> Store:
    """The part of `base` for a new axis of all ranks. Collective.

    look: see `Awaited`. offer: called on rank 0 with the new part, before other ranks know this
    part. The store may also contain parts of earlier starts. Raises `TimeoutError` if a rank is
    missing.
    """
    # `serve_one_axis` has reserved this store
    if base.check([f"{_AXES}/latest"]) and not base.check([f"{_AXES}/made"]):
        return axis_store(base, 0)
    mine = ""
    if rank == 0:
        mine = str(base.add(f"{_AXES}/made", 1) - 1)
        own = axis_store(base, int(mine))
        offer(own)
        # the other ranks wait for a heartbeat of rank 0
        own.set(axis_key("beat", 0), beat_of(0, 1.0))
    timeout_s = base.timeout.total_seconds()  # type: ignore[attr-defined]
    meeting = PrefixStore(f"{_AXES}/meet", base)
    number = name_of_first(meeting, rank, world_size, mine, timeout_s, look)
    if rank == 0:
        base.set(f"{_AXES}/latest", number)
    return axis_store(base, int(number))


def latest_axis(base: Store) -> Store | None:
    """The part of `base` for the newest axis; None if there is none."""
    if not base.check([f"{_AXES}/latest"]):
        return None
    return axis_store(base, int(base.get(f"{_AXES}/latest")))


def latest_axis_store(base: Store) -> Store:
    """The part of `base` for the newest axis. Waits for an axis; raises `ReplicaLost` if none is
    created.
    """
    timeout_s = base.timeout.total_seconds()  # type: ignore[attr-defined]
    awaited = Awaited("this replica", timeout_s)
    try:
        while (axis := latest_axis(base)) is None:
            awaited.wait(lambda: "the first replicas")
    except TimeoutError as error:
        text = f"no replicas have met within {timeout_s:g} s: start the run first"
        raise ReplicaLost(text) from error
    return axis


def latest_members(store: Store, replicas: int) -> list[int]:
    """Members of the latest epoch; before the first epoch, all `replicas` of the start."""
    epoch = 0
    if store.check([EPOCH]):
        epoch = int(store.get(EPOCH))
    if not epoch:
        return [*range(replicas)]
    return parse_agreement(epoch, store.get(f"{epoch}/record")).members


def note_gone(store: Store, rank: int) -> None:
    """Announces that `rank` has ended. Called by its launcher."""
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
    """A key of the store, built from the numbers of a rank, of a guest, or of a guest and one of
    its shards or another rank.

    Keys of a rank: `beat`; `port`; `loopback`, the identity of that interface; `end`, set after its
    last step; `left`, set after it left together with the others; `asked`, set if it was asked to
    leave. Keys of a guest: `ask`, its request to join; `refused`, the reason why it cannot; `door`,
    the optimizer that lets it in; `copy`, the turn after which it gets each copy of the state;
    `entry`, the optimizer, turn and step before which it joins, once all come to wait for it. Keys
    of a guest's shard: `feed`, the replica that gives the state, and the address of its feed;
    `coming`, set while it waits for each copy; `ready`, the replica whose state it follows, or "";
    `pace`, what it has received since each copy.
    Key of a guest and a rank: `at`, the last turn of the guest that the rank has reached.
    """
    return "/".join((kind, *map(str, numbers)))
