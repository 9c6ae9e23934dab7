"""Exchanges: the ways in which what one replica selected becomes what all agree on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from detonation.core.codec.aggregate import Agreed, Combine, combined
from detonation.core.codec.codec import Codec, Message, Selected
from detonation.core.codec.indices import Packed, numbers
from detonation.core.integrity.guard import Guard, Opened
from detonation.core.link.link import Arrived, Link
from detonation.core.link.owners import Owners
from detonation.core.schemes.buckets import run
from detonation.core.schemes.scheme import Scheme
from detonation.core.schemes.traffic import kind

Waiter = Callable[[], Agreed]
"""Waits for what was agreed on, the same bits on every replica."""

Relay = Callable[[], Waiter]
"""Waits for what others need this replica to pass on, and starts to; all relays run before the first waiter."""


@dataclass(frozen=True)
class Prepared:
    """A message that is ready to leave.

    read: its values as everyone will read them, `[rows, kept]`; to be called before `start` and good until then.
    start: sends it.
    """

    read: Callable[[], Tensor]
    start: Callable[[], Relay]


class Exchange(Protocol):
    @property
    def secluded(self) -> bool:
        """Whether a replica is told what the others do not see."""
        ...

    def prepare(self, selected: Selected, step: int, status: int | Tensor) -> Prepared:
        """The message of `step`; status: see `Stamp`."""
        ...

    def part(self, first: int, rows: int, guard: Guard) -> "Exchange":
        """The same for a bucket: `rows` rows from row `first` on, sharing what it keeps."""
        ...

    def state(self) -> dict[str, Tensor]:
        """What it must keep to go on."""
        ...


class Reduced:
    """The network adds the messages up: all tell the same coordinates, in a type that can be added."""

    secluded = False

    def __init__(self, codec: Codec, link: Link, guard: Guard) -> None:
        self._codec, self._link, self._guard = codec, link, guard

    def prepare(self, selected: Selected, step: int, status: int | Tensor) -> Prepared:
        buffer = self._guard.seal_sum(selected.values, self._link.replicas, status)
        rows, count = len(selected.values), selected.values.numel()

        def start() -> Relay:
            total = self._link.reduce(buffer)
            return lambda: lambda: Agreed.one(mean(total()), selected.columns)

        def mean(total: Tensor) -> Tensor:
            values = self._guard.open_sum(total, count, step).view_as(selected.values)
            return values.to(torch.float32) / self._link.replicas

        return Prepared(lambda: self._codec.read(Message(buffer[:count].view_as(selected.values)), rows), start)

    def part(self, first: int, rows: int, guard: Guard) -> "Reduced":
        return Reduced(self._codec, self._link, guard)

    def state(self) -> dict[str, Tensor]:
        return {}


class Gathered:
    """Everyone receives everyone's message and combines them."""

    secluded = False

    def __init__(self, codec: Codec, link: Link, combine: Combine, guard: Guard) -> None:
        self._codec, self._link, self._combine, self._guard = codec, link, combine, guard

    def prepare(self, selected: Selected, step: int, status: int | Tensor) -> Prepared:
        message, rows = self._codec.encode(selected), len(selected.values)
        shared = selected.columns if self._codec.selection.shared else None

        def start() -> Relay:
            everyone = self._link.gather(self._guard.seal(message, step, status))
            return lambda: lambda: agreed(everyone())

        def agreed(arrived: Arrived) -> Agreed:
            opened = self._guard.open(arrived.parts, rows, [shared] * self._link.replicas, step)
            return Agreed(opened.values, opened.columns, self._combine, arrived.spent)

        return Prepared(lambda: self._codec.read(message, rows), start)

    def part(self, first: int, rows: int, guard: Guard) -> "Gathered":
        return Gathered(self._codec, self._link, self._combine, guard)

    def state(self) -> dict[str, Tensor]:
        return {}


class Owned:
    """Each replica owns some of the rows: it receives theirs from all, combines them, and tells all the result.

    What a replica sends does not grow with their number. The result is selected and encoded again; what that leaves
    out stays in a memory of the owner's and is told later, so that nothing is lost (law 1) between the two.
    """

    secluded = True

    def __init__(
        self, codec: Codec, link: Link, combine: Combine, owners: Owners, residual: Tensor, guard: Guard
    ) -> None:
        self._codec, self._link, self._combine, self._guard = codec, link, combine, guard
        self.owners, self.residual = owners, residual  # [owned, chunk]

    def prepare(self, selected: Selected, step: int, status: int | Tensor) -> Prepared:
        dealt = self._deal(selected)
        messages = [self._codec.encode(part) for part in dealt]
        shared = [part.columns if self._codec.selection.shared else None for part in dealt]

        def start() -> Relay:
            told_to_me = self._link.swap([self._guard.seal(m, step, status, phase=1) for m in messages])
            return lambda: self._tell(told_to_me(), shared, step)

        def read() -> Tensor:
            return self.owners.collect([self._codec.read(message, self.owners.owned) for message in messages])

        return Prepared(read, start)

    def part(self, first: int, rows: int, guard: Guard) -> "Owned":
        owners = Owners(rows, self.owners.replicas, self.owners.run)
        start = first // owners.replicas
        residual = self.residual[start : start + owners.owned]
        return Owned(self._codec, self._link, self._combine, owners, residual, guard)

    def state(self) -> dict[str, Tensor]:
        return {"owned": self.residual}

    def _deal(self, selected: Selected) -> list[Selected]:
        """What is selected of the rows of each owner. Filling is zeros, at columns that differ as in any row."""
        values = self.owners.deal(selected.values, selected.values.new_zeros(self._codec.selection.kept))
        if selected.columns is None:
            return [Selected(v, None) for v in values]
        told = numbers(selected.columns)
        columns = self.owners.deal(told, torch.arange(self._codec.selection.kept, device=told.device))
        return [Selected(v, c) for v, c in zip(values, columns, strict=True)]

    def _tell(self, arrived: list[list[Tensor]], shared: list[Tensor | Packed | None], step: int) -> Waiter:
        """Combines what this replica owns, and starts to tell all of it."""
        owned, chunk, here = self.owners.owned, self._codec.selection.chunk, shared[self._link.replica]
        mine = self._guard.open(arrived, owned, [here] * self._link.replicas, step, phase=1)
        self.residual += combined(Agreed(mine.values, mine.columns, self._combine), chunk)
        selected = self._codec.take(self.residual, here)
        message = self._codec.encode(selected)
        self.residual -= combined(Agreed.one(self._codec.read(message, owned), selected.columns), chunk)
        everyone = self._link.gather(self._guard.seal(message, step, 0))
        return lambda: self._agreed(self._guard.open(everyone().parts, owned, shared, step, signals=False))

    def _agreed(self, told: Opened) -> Agreed:
        values = self.owners.collect(told.values)
        columns = [numbers(c) for c in told.columns if c is not None]
        return Agreed.one(values, self.owners.collect(columns) if columns else None)


def exchange_for(scheme: Scheme, link: Link, rows: int, device: torch.device, guard: Guard) -> Exchange:
    """The exchange that the arithmetic of traffic chooses, or the scheme says."""
    chosen = kind(scheme, rows, link.replicas, link.lanes)
    if chosen == "all-reduce":
        return Reduced(scheme.codec, link, guard)
    if chosen == "all-gather":
        return Gathered(scheme.codec, link, scheme.combine, guard)
    owners = Owners(rows, link.replicas, run(scheme.codec))
    residual = torch.zeros(owners.owned, scheme.codec.selection.chunk, device=device)
    return Owned(scheme.codec, link, scheme.combine, owners, residual, guard)
