"""The words in which ranks agree on who is left: reports, agreements, and the keys of the store."""

import json
from dataclasses import dataclass, field
from typing import Any, Literal

from torch.distributed.distributed_c10d import PrefixStore, Store

from detonation.cluster.processes.rendezvous import name_of_first
from detonation.core.base_error import DetonationError

SIZE, EPOCH = "size", "epoch"
"""Keys: the numbers of replicas and shards at the start, and of the latest agreement."""
GONE = b"gone"
"""The beat of a rank that is known to have ended."""


def beat_of(count: int, pace_s: float) -> str:
    """The beat number `count` of a rank that takes `pace_s` seconds from one to the next."""
    return f"{count} {pace_s:.3f}"


def pace_of(beat: bytes) -> float:
    """The seconds between the beats of the rank that sent `beat`; 0 where it has sent none.

    >>> pace_of(beat_of(12, 0.25).encode()), pace_of(GONE)
    (0.25, 0.0)
    """
    return float(beat.partition(b" ")[2] or 0)


class ReplicaLost(DetonationError, RuntimeError):
    """The others go on without this replica, or too few are left to go on."""


class ReplicaLeft(ReplicaLost):
    """This replica has left, as it was asked to: what it had not sent is with the others."""


@dataclass(frozen=True)
class RankReport:
    """How far a rank has come.

    floor: it finished all collectives up to this number. beyond: those that it finished besides.
    absent: of finished collectives that it still holds, the numbers of the replicas without a part
    in them. begun: the steps that it began. users: the same for each optimizer on the axis. leaves:
    its replica was asked to leave. entered: the steps before which it knows who leaves and who
    comes. departing: replicas that leave, each with the step before which it does; coming: such a
    step, and the replica that comes.
    """

    floor: int
    beyond: list[int]
    absent: dict[str, list[int]]
    begun: int
    guest: int = -1
    users: list[int] = field(default_factory=list)
    leaves: bool = False
    entered: int = 0
    departing: list[tuple[int, int]] = field(default_factory=list)
    coming: tuple[int, int] | None = None

    def has(self, number: int) -> bool:
        """True if the rank finished the collective `number`."""
        return number <= self.floor or number in self.beyond


@dataclass(frozen=True)
class Agreement:
    """The members of an epoch, by the numbers with which they began, and how far each of their
    ranks had come.

    guest: A replica that may come in before the next step; -1 for none.
    """

    epoch: int
    members: list[int]
    reports: dict[int, RankReport] = field(default_factory=dict)
    guest: int = -1

    @property
    def next_step(self) -> int:
        """The first step that no rank has begun."""
        return max((report.begun for report in self.reports.values()), default=0)

    @property
    def next_change(self) -> int:
        """The first step before which no rank has looked who leaves and who comes."""
        return max([self.next_step, *(report.entered for report in self.reports.values())])

    def first_step(self, user: int) -> int:
        """The first step of an optimizer on the axis that no rank has begun."""
        return max(
            (report.users[user] for report in self.reports.values() if user < len(report.users)),
            default=0,
        )

    @property
    def awaited(self) -> int:
        """The replica for which all waited, and which is a member now or not at all; -1 for none."""
        guests = {report.guest for report in self.reports.values()}
        return guests.pop() if len(guests) == 1 else -1

    def leaves_out(self, replica: int) -> str:
        """Why `replica`, which is no member, ends."""
        others, step = ", ".join(map(str, self.members)), self.next_step
        why = f"replica {replica} was not heard of, or lost a shard"
        return f"{why}, and replicas {others} go on without it from step {step}"


def parse_agreement(epoch: int, text: bytes) -> Agreement:
    """The agreement of an epoch, as the store has it."""
    record: dict[str, Any] = json.loads(text)
    reports = {int(rank): RankReport(**report) for rank, report in record["reports"].items()}
    return Agreement(epoch, record["members"], reports, record["guest"])


_AXES = "detonation/elastic"


def axis_store(base: Store, number: int) -> Store:
    """The part of a store where the ranks of its elastic axis `number` agree."""
    return PrefixStore(f"{_AXES}/{number}", base)


def serve_one_axis(base: Store) -> None:
    """Leaves `base` to one axis, so that its ranks need not agree on a part: any of them may end
    before they meet."""
    base.set(f"{_AXES}/latest", "0")


def next_axis_store(base: Store, rank: int, world_size: int) -> Store:
    """The part for a new axis of all ranks. Collective; raises `TimeoutError` where not all come.

    The store may have those of earlier starts, in which not all came.
    """
    if base.check([f"{_AXES}/latest"]) and not base.check([f"{_AXES}/made"]):  # by `serve_one_axis`
        return axis_store(base, 0)
    mine = str(base.add(f"{_AXES}/made", 1) - 1) if rank == 0 else ""
    if rank == 0:
        axis_store(base, int(mine)).set(
            axis_key("beat", 0), beat_of(0, 1.0)
        )  # the others look who has come
    timeout_s = base.timeout.total_seconds()  # type: ignore[attr-defined]
    number = name_of_first(PrefixStore(f"{_AXES}/meet", base), rank, world_size, mine, timeout_s)
    if rank == 0:
        base.set(f"{_AXES}/latest", number)
    return axis_store(base, int(number))


def latest_axis_store(base: Store) -> Store:
    """The part for the axis that was made last. Waits for one."""
    return axis_store(base, int(base.get(f"{_AXES}/latest")))


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
        "coming",
        "copy",
        "ready",
        "admit",
        "at",
    ],
    *numbers: int,
) -> str:
    """A key of the store, by the numbers of a rank, of a guest, or of a guest and one of its shards
    or another rank.

    Of a rank: its beat; its port; which loopback interface it has; that it has left together with
    the others, or because it was asked. Of a guest: that it asks to come in; the step after which
    it gets its copy, and before which it comes in (admit). Of its shard: the address of its feed;
    that it waits for a copy (coming), and has it (ready). at: that a rank, second, has come to the
    step of a guest, first.
    """
    return "/".join((kind, *map(str, numbers)))
