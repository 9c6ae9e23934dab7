"""The words in which ranks agree on who is left: reports, agreements, and the keys of the store."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Literal

from torch.distributed.distributed_c10d import PrefixStore, Store

from detonation.cluster.processes.rendezvous import name_of_first
from detonation.cluster.processes.waiting import Awaited, Standing
from detonation.core.base_error import DetonationError

SIZE, EPOCH = "size", "epoch"
"""Keys: the numbers of replicas and shards at the start, and of the latest agreement."""
GONE = b"gone"
"""The beat of a rank that is known to have ended."""


def beat_of(count: int, pace_s: float, started: int = 0, standing: Standing | None = None) -> str:
    """The beat number `count` of a rank that takes `pace_s` seconds from one to the next.

    started: The number of the last exchange that it has started. standing: In its loop.
    """
    return f"{count} {pace_s:.3f} {started} {standing or Standing(0)}"


def pace_of(beat: bytes) -> float:
    """The seconds between the beats of the rank that sent `beat`; 0 where it has sent none.

    >>> pace_of(beat_of(12, 0.25).encode()), pace_of(GONE)
    (0.25, 0.0)
    """
    return float((beat.split()[1:2] or [b"0"])[0])


def progress_of(beat: bytes) -> tuple[int, Standing]:
    """The last exchange that the rank has started that sent `beat`, and its standing.

    >>> progress_of(beat_of(12, 0.25, 40, Standing(21, "inside")).encode())
    (40, Standing(steps=21, where='inside'))
    """
    words = beat.decode().split()[2:]
    if not words:
        return 0, Standing(0)
    return int(words[0]), Standing.parse(" ".join(words[1:]))


class ReplicaLost(DetonationError, RuntimeError):
    """The others go on without this replica, or too few are left to go on."""


class ReplicaLeft(ReplicaLost):
    """This replica has left, as it was asked to: what it had not sent is with the others."""


@dataclass(frozen=True)
class RankReport:
    """How far a rank has come.

    floor: it finished all collectives up to this number. beyond: those that it finished besides.
    absent: of finished collectives that it still holds, the numbers of the replicas without a part
    in them. begun: the steps that it began, for texts. users: the turns (see `Turns`) that each
    optimizer on the axis began; entered: those before which it knows who leaves and who comes.
    alive: the optimizers that exist. leaves: its replica was asked to leave. departing: replicas
    that leave, each with the turn of each optimizer before which it does, and the optimizers that
    were `gone` then; coming: the turn of the optimizer that lets a replica in, and this replica.
    apart: replicas that this rank cannot reach. late: replicas that have not come to its exchange
    for as long as it waits.
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

    def has(self, number: int) -> bool:
        """True if the rank finished the collective `number`."""
        return number <= self.floor or number in self.beyond


@dataclass(frozen=True)
class Agreement:
    """The members of an epoch, by the numbers with which they began, and how far each of their
    ranks had come.

    guest: A replica that may come in before the next step; -1 for none.
    apart: The pairs of replicas that could not reach each other. late: The replicas that did not
    come.
    """

    epoch: int
    members: list[int]
    reports: dict[int, RankReport] = field(default_factory=dict)
    guest: int = -1
    apart: list[list[int]] = field(default_factory=list)
    late: list[int] = field(default_factory=list)

    @property
    def next_step(self) -> int:
        """The first step that no rank has begun, for texts: training may go back."""
        return max((report.begun for report in self.reports.values()), default=0)

    @property
    def next_turns(self) -> list[int]:
        """The first turn of each optimizer on the axis that no rank has begun."""
        return _largest(report.users for report in self.reports.values())

    @property
    def next_changes(self) -> list[int]:
        """The first turn of each optimizer before which no rank has asked who leaves or comes."""
        return _largest(
            turns for report in self.reports.values() for turns in (report.users, report.entered)
        )

    @property
    def gone(self) -> set[int]:
        """The optimizers on the axis that exist no longer on some rank."""
        return {
            user
            for report in self.reports.values()
            for user in range(len(report.users))
            if user not in report.alive
        }

    @property
    def awaited(self) -> int:
        """The replica for which all waited, which is a member now or not at all; -1 for none."""
        guests = {report.guest for report in self.reports.values()}
        return guests.pop() if len(guests) == 1 else -1

    def leaves_out(self, replica: int) -> str:
        """Why `replica`, which is no member, ends."""
        verb = "go" if len(self.members) > 1 else "goes"
        go_on = f"{in_words(self.members)} {verb} on without it from step {self.next_step}"
        beyond = {each for pair in self.apart if replica in pair for each in pair} - {replica}
        if replica in self.late:
            return f"replica {replica} did not come to an exchange for which all waited; {go_on}"
        if beyond:
            others = in_words(sorted(beyond))
            return f"replica {replica} and {others} cannot reach each other; {go_on}"
        return f"replica {replica} was not heard of, or lost a shard; {go_on}"


def in_words(replicas: Sequence[int]) -> str:
    """Replicas in words.

    >>> in_words([1]), in_words([0, 2])
    ('replica 1', 'replicas 0, 2')
    """
    return f"replica{'s' * (len(replicas) > 1)} {', '.join(map(str, replicas))}"


@dataclass(frozen=True)
class GuestEntry:
    """Where a replica comes in: before which turn, and step, of the optimizer `user`."""

    user: int
    turn: int
    step: int


def turn_of(turns: Sequence[int], user: int) -> int:
    """The turn of an optimizer among those of all; 0 for one that was made later.

    >>> turn_of([3, 5], 1), turn_of([3, 5], 2)
    (5, 0)
    """
    return turns[user] if user < len(turns) else 0


def _largest(lists: Iterable[Sequence[int]]) -> list[int]:
    """The largest number at each index of lists of different lengths."""
    return [max(column) for column in zip_longest(*lists, fillvalue=0)]


def parse_agreement(epoch: int, text: bytes) -> Agreement:
    """The agreement of an epoch, as the store has it."""
    record: dict[str, Any] = json.loads(text)
    reports = {int(rank): RankReport(**report) for rank, report in record["reports"].items()}
    doubts = {key: record[key] for key in ("apart", "late") if key in record}
    return Agreement(epoch, record["members"], reports, record["guest"], **doubts)


def ranks_of_replicas(replicas: Iterable[int], shards: int) -> list[int]:
    """The ranks of `replicas` with `shards` ranks each.

    >>> ranks_of_replicas([0, 2], 2)
    [0, 1, 4, 5]
    """
    return [replica * shards + shard for replica in replicas for shard in range(shards)]


def agreement_record(
    replicas: Sequence[int], shards: int, reports: Mapping[int, Mapping[str, Any]], guest: int
) -> dict[str, Any]:
    """The record of an agreement among those of `replicas` that can go on together.

    reports: Of all their ranks, by rank. guest: As of `Agreement`.
    """
    pairs = pairs_apart((rank // shards, report["apart"]) for rank, report in reports.items())
    late = sorted({each for report in reports.values() for each in report["late"]})
    kept = those_that_go_on(replicas, pairs, late)
    of_kept = {rank: report for rank, report in reports.items() if rank // shards in kept}
    return {"members": kept, "reports": of_kept, "guest": guest, "apart": pairs, "late": late}


def pairs_apart(reports: Iterable[tuple[int, Collection[int]]]) -> list[list[int]]:
    """The pairs of replicas of which one reports that it cannot reach the other.

    >>> pairs_apart([(0, [1]), (1, [0, 2]), (2, [])])
    [[0, 1], [1, 2]]
    """
    pairs = {(min(a, b), max(a, b)) for a, others in reports for b in others if a != b}
    return [[*pair] for pair in sorted(pairs)]


def those_that_go_on(
    members: Sequence[int], pairs: Sequence[Sequence[int]], late: Collection[int]
) -> list[int]:
    """The members that go on where `pairs` of them cannot reach each other, and others are `late`.

    A replica that is late is left out. Then, while two that are left cannot reach each other, the
    one that is in most such pairs is left out; of several, the one with the highest number. So a
    replica that few can reach is left out, and of two halves the larger one goes on.

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
    """The part of a store where the ranks of its elastic axis `number` agree."""
    return PrefixStore(f"{_AXES}/{number}", base)


def serve_one_axis(base: Store) -> None:
    """Leaves `base` to one axis, so that its ranks need not agree on a part: any of them may end
    before they meet."""
    base.set(f"{_AXES}/latest", "0")


def next_axis_store(
    base: Store, rank: int, world_size: int, look: Callable[[], object] = lambda: None
) -> Store:
    """The part for a new axis of all ranks. Collective; raises `TimeoutError` where not all come.

    look: As of `Awaited`. The store may have those of earlier starts, in which not all came.
    """
    if base.check([f"{_AXES}/latest"]) and not base.check([f"{_AXES}/made"]):  # by `serve_one_axis`
        return axis_store(base, 0)
    mine = str(base.add(f"{_AXES}/made", 1) - 1) if rank == 0 else ""
    if rank == 0:
        axis_store(base, int(mine)).set(
            axis_key("beat", 0), beat_of(0, 1.0)
        )  # the others look who has come
    timeout_s = base.timeout.total_seconds()  # type: ignore[attr-defined]
    meeting = PrefixStore(f"{_AXES}/meet", base)
    number = name_of_first(meeting, rank, world_size, mine, timeout_s, look)
    if rank == 0:
        base.set(f"{_AXES}/latest", number)
    return axis_store(base, int(number))


def latest_axis_store(base: Store) -> Store:
    """The part for the axis that was made last. Waits for one, and raises `ReplicaLost` where none
    comes."""
    timeout_s = base.timeout.total_seconds()  # type: ignore[attr-defined]
    awaited = Awaited("this replica", timeout_s)
    try:
        while not base.check([f"{_AXES}/latest"]):
            awaited.wait(lambda: "the first replicas")
    except TimeoutError as error:
        text = f"no replicas have met within {timeout_s:g} s: start the run first"
        raise ReplicaLost(text) from error
    return axis_store(base, int(base.get(f"{_AXES}/latest")))


def latest_members(store: Store, replicas: int) -> list[int]:
    """The members of the latest epoch; those of the start, `replicas`, before there is one."""
    epoch = int(store.get(EPOCH)) if store.check([EPOCH]) else 0
    if not epoch:
        return [*range(replicas)]
    return parse_agreement(epoch, store.get(f"{epoch}/record")).members


def note_gone(store: Store, rank: int) -> None:
    """Lets the others know at once that `rank` has ended: its launcher has seen it."""
    store.set(axis_key("beat", rank), GONE.decode())


def axis_key(
    kind: Literal[
        "beat",
        "port",
        "loopback",
        "left",
        "asked",
        "ask",
        "feed",
        "door",
        "coming",
        "copy",
        "ready",
        "admit",
        "entry",
        "at",
    ],
    *numbers: int,
) -> str:
    """A key of the store, by the numbers of a rank, of a guest, or of a guest and one of its shards
    or another rank.

    Of a rank: its beat; its port; which loopback interface it has; that it has left together with
    the others, or because it was asked. Of a guest: that it asks to come in; the optimizer that
    lets it in (door); the turn of it after which the guest gets its copy, and before which it comes
    in (admit); the step of that turn, once the others have come to it (entry). Of its shard: the
    address of its feed; that it waits for a copy (coming), and has it (ready). at: that a rank,
    second, has come to the turn of a guest, first.
    """
    return "/".join((kind, *map(str, numbers)))
