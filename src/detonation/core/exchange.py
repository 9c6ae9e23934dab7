"""Exchanges: the ways in which what one replica selected becomes what all agree on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from detonation.core.codec import Codec, Message, Selected
from detonation.core.combine import Agreed, Combine, combined
from detonation.core.link import Link
from detonation.core.scheme import Scheme
from detonation.core.traffic import kind

Waiter = Callable[[], Agreed]


@dataclass(frozen=True)
class Prepared:
    """A message that is ready to leave.

    read: its values as everyone will read them, `[rows, kept]`; to be called before `start` and good until then.
    start: sends it; the waiter that it returns waits for what was agreed on, the same bits on every replica.
    """

    read: Callable[[], Tensor]
    start: Callable[[], Waiter]


class Exchange(Protocol):
    def prepare(self, selected: Selected) -> Prepared: ...

    def state(self) -> dict[str, Tensor]:
        """What it must keep to go on."""
        ...


class Reduced:
    """The network adds the messages up: all tell the same coordinates, in a type that can be added."""

    def __init__(self, codec: Codec, link: Link) -> None:
        self._codec, self._link = codec, link

    def prepare(self, selected: Selected) -> Prepared:
        message = self._codec.encode(selected)

        def start() -> Waiter:
            total = self._link.reduce(message.values)
            return lambda: Agreed.one(total().to(torch.float32) / self._link.replicas, selected.columns)

        return Prepared(lambda: self._codec.read(message, len(selected.values)), start)

    def state(self) -> dict[str, Tensor]:
        return {}


class Gathered:
    """Everyone receives everyone's message and combines them."""

    def __init__(self, codec: Codec, link: Link, combine: Combine) -> None:
        self._codec, self._link, self._combine = codec, link, combine

    def prepare(self, selected: Selected) -> Prepared:
        message, rows = self._codec.encode(selected), len(selected.values)
        shared = selected.columns if self._codec.selection.shared else None

        def start() -> Waiter:
            everyone = self._link.gather(message.parts)
            return lambda: self._codec.agreed([Message(*m) for m in everyone()], rows, shared, self._combine)

        return Prepared(lambda: self._codec.read(message, rows), start)

    def state(self) -> dict[str, Tensor]:
        return {}


class Owned:
    """Each replica owns a run of rows: it receives theirs from all, combines them, and tells all the result.

    What a replica sends does not grow with their number. The result is selected and encoded again; what that leaves
    out stays in a memory of the owner's and is told later, so that nothing is lost (law 1) between the two.
    """

    def __init__(self, codec: Codec, link: Link, combine: Combine, rows: int, device: torch.device) -> None:
        self._codec, self._link, self._combine, self._rows = codec, link, combine, rows
        self.residual = torch.zeros(-(-rows // link.replicas), codec.selection.chunk, device=device)  # [owned, chunk]

    def prepare(self, selected: Selected) -> Prepared:
        slices = self._codec.slices(selected, self._link.replicas)
        messages = [self._codec.encode(part) for part in slices]
        shared = [part.columns if self._codec.selection.shared else None for part in slices]

        def start() -> Waiter:
            told_to_me = self._link.swap([message.parts for message in messages])
            return lambda: self._tell([Message(*parts) for parts in told_to_me()], shared)

        def read() -> Tensor:
            return torch.cat([self._codec.read(message, len(self.residual)) for message in messages])[: self._rows]

        return Prepared(read, start)

    def _tell(self, messages: list[Message], shared: list[Tensor | None]) -> Agreed:
        owned, chunk, here = len(self.residual), self._codec.selection.chunk, shared[self._link.replica]
        self.residual += combined(self._codec.agreed(messages, owned, here, self._combine), chunk)
        selected = self._codec.take(self.residual, here)
        message = self._codec.encode(selected)
        self.residual -= combined(Agreed.one(self._codec.read(message, owned), selected.columns), chunk)
        everyone = [Message(*parts) for parts in self._link.gather(message.parts)()]
        told = [self._codec.agreed([m], owned, where, "replicas") for m, where in zip(everyone, shared, strict=True)]
        values = torch.cat([a.values[0] for a in told])[: self._rows]
        columns = [c for a in told for c in a.columns if c is not None]
        return Agreed.one(values, torch.cat(columns)[: self._rows] if columns else None)

    def state(self) -> dict[str, Tensor]:
        return {"owned": self.residual}


def exchange_for(scheme: Scheme, link: Link, rows: int, device: torch.device) -> Exchange:
    """The exchange that the arithmetic of traffic chooses, or the scheme says."""
    chosen = kind(scheme, rows, link.replicas)
    if chosen == "all-reduce":
        return Reduced(scheme.codec, link)
    if chosen == "all-gather":
        return Gathered(scheme.codec, link, scheme.combine)
    return Owned(scheme.codec, link, scheme.combine, rows, device)
