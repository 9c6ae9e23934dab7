"""Exchanges: the collectives through which all replicas receive the same messages.

An exchange seals a message, starts a collective and opens the messages that arrive; a two-stage exchange does so twice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from detonation.core.codec.aggregate import MajorityVote, Mean, Received, aggregate, scatter_sum
from detonation.core.codec.codec import Codec, Message, Selected
from detonation.core.codec.indices import PackedIndices, as_int64
from detonation.core.codec.precision import Float
from detonation.core.codec.zeros import zeros_are_negative
from detonation.core.flat.layout import Layout
from detonation.core.integrity.guard import Guard
from detonation.core.link.link import Arriving, Link
from detonation.core.link.owners import RowOwners
from detonation.core.schemes.buckets import rows_of_a_turn
from detonation.core.schemes.scheme import Scheme
from detonation.core.schemes.traffic import collective_for

Indices = Tensor | PackedIndices | None


@dataclass
class InFlight:
    """One message in flight.

    Args:
        arriving: The collective that was started last.
        shared: The indices of each replica's values where all replicas know them, `[rows, k]`, or None.
        shape: Of the selected values.
        own: This replica's values as every receiver will decode them, `[rows, k]` fp32, where `start` was to read them.
    """

    arriving: Arriving | Callable[[], Tensor]
    shared: Sequence[Indices]
    shape: torch.Size
    step: int
    own: Tensor | None = None


class Exchange(Protocol):
    """Sends messages through one or two collectives. All replicas call its methods in the same order."""

    secluded: bool
    """True if a replica receives messages that the others do not see."""

    def start(self, selected: Selected, step: int, status: int | Tensor, read_own: bool) -> InFlight:
        """Encodes and sends a selection.

        Args:
            status: See `Header`.
            read_own: Whether `InFlight.own` is needed.

        Shapes: selected values `[rows, k]` fp32, status an int or `[]` int64 -> own `[rows, k]` fp32.
        """
        ...

    def forward(self, flight: InFlight) -> None:
        """Starts the second collective, if there is one; called for all flights before the first `receive`."""
        ...

    def receive(self, flight: InFlight) -> Received:
        """Waits for the messages that all replicas receive."""
        ...

    def for_rows(self, first: int, rows: int, guard: Guard) -> "Exchange":
        """The exchange of a bucket, `rows` rows from row `first` on, which shares the state."""
        ...

    def state(self) -> dict[str, Tensor]:
        """The tensors that stay between steps, by name.

        Shapes: `[owned, chunk]` each.
        """
        ...


class AllReduce:
    """The network adds the messages: all carry the same coordinates, in a type that can be added."""

    secluded = False

    def __init__(self, codec: Codec, link: Link, guard: Guard) -> None:
        assert isinstance(codec.precision, Float)
        self._codec, self._link, self._guard, self._dtype = codec, link, guard, codec.precision.dtype

    def start(self, selected: Selected, step: int, status: int | Tensor, read_own: bool) -> InFlight:
        # selected values [rows, k] fp32, status [] int64 -> own [rows, k] fp32
        values = selected.values
        buffer = self._guard.seal_sum(values, self._dtype, self._link.replicas, status)
        own = None
        if read_own:  # a copy: the network is about to add into the buffer
            own = buffer[: values.numel()].view_as(values).to(torch.float32, copy=True)
        return InFlight(self._link.all_reduce(buffer), [selected.indices], values.shape, step, own)

    def forward(self, flight: InFlight) -> None:
        pass

    def receive(self, flight: InFlight) -> Received:
        assert not isinstance(flight.arriving, Arriving)
        total = self._guard.open_sum(flight.arriving(), flight.shape.numel(), flight.step)
        return Received([total.view(flight.shape).to(torch.float32) / self._link.replicas], flight.shared)

    def for_rows(self, first: int, rows: int, guard: Guard) -> "AllReduce":
        return AllReduce(self._codec, self._link, guard)

    def state(self) -> dict[str, Tensor]:  # none: only `TwoStage` has a residual, [owned, chunk]
        return {}


class AllGather:
    """Every replica receives every message."""

    secluded = False

    def __init__(self, scheme: Scheme, codec: Codec, link: Link, guard: Guard) -> None:
        self._scheme, self._codec, self._link, self._guard = scheme, codec, link, guard

    def start(self, selected: Selected, step: int, status: int | Tensor, read_own: bool) -> InFlight:
        # selected values [rows, k] fp32, status [] int64 -> own [rows, k] fp32
        zeros = negative_zeros(self._scheme, step, self._link.replica, self._link.replicas)
        (message,) = self._codec.encode(selected, negative_zeros=zeros)
        own = self._codec.read(message, len(selected.values)) if read_own else None
        shared = selected.indices if self._codec.selection.shared else None
        (sealed,) = self._guard.seal([message.parts], step, status)
        arriving = self._link.all_gather(sealed)
        return InFlight(arriving, [shared] * self._link.replicas, selected.values.shape, step, own)

    def forward(self, flight: InFlight) -> None:
        pass

    def receive(self, flight: InFlight) -> Received:
        assert isinstance(flight.arriving, Arriving)
        received = opened(self._codec, self._guard, flight, flight.shape[0])
        return replace(received, aggregation=self._scheme.aggregation, release=flight.arriving.release)

    def for_rows(self, first: int, rows: int, guard: Guard) -> "AllGather":
        return AllGather(self._scheme, self._codec, self._link, guard)

    def state(self) -> dict[str, Tensor]:  # none: only `TwoStage` has a residual, [owned, chunk]
        return {}


class TwoStage:
    """A two-stage all-reduce: each replica owns some of the rows, receives them from all, aggregates them, and sends
    the result to all.

    The bytes that a replica sends do not grow with the number of replicas. The result is selected and encoded again by
    the codec of the reply; the rest stays in the server residual of the owner and is sent later, so that nothing is
    lost (law 1) between the two stages.
    """

    secluded = True

    def __init__(
        self, scheme: Scheme, codec: Codec, link: Link, owners: RowOwners, residual: Tensor, guard: Guard
    ) -> None:
        self._scheme, self._codec, self._link, self._guard = scheme, codec, link, guard
        self._reply = scheme.reply_codec(link.replicas)
        self.owners, self.residual = owners, residual  # [owned, chunk]

    def start(self, selected: Selected, step: int, status: int | Tensor, read_own: bool) -> InFlight:
        # selected values [rows, k] fp32, status [] int64 -> own [rows, k] fp32
        dealt = self._deal(selected)
        zeros = negative_zeros(self._scheme, step, self._link.replica, self._link.replicas)
        messages = self._codec.encode(*dealt, negative_zeros=zeros)
        own = None
        if read_own:
            own = self.owners.collect([self._codec.read(message, self.owners.owned) for message in messages])
        shared = [part.indices if self._codec.selection.shared else None for part in dealt]
        slices = self._guard.seal([message.parts for message in messages], step, status, phase=1)
        return InFlight(self._link.all_to_all(slices), shared, selected.values.shape, step, own)

    def forward(self, flight: InFlight) -> None:
        owned, chunk, own = self.owners.owned, self._codec.selection.chunk, flight.shared[self._link.replica]
        dealt = replace(flight, shared=[own] * self._link.replicas)
        received = replace(
            opened(self._codec, self._guard, dealt, owned, phase=1), aggregation=self._scheme.aggregation
        )
        self.residual += aggregate(received, chunk)
        selected = self._reply.pick(self.residual, own)
        (message,) = self._reply.encode(selected, negative_zeros=negative_zeros(self._scheme, flight.step))
        sent, indices = self._reply.read(message, owned), selected.indices
        self.residual -= scatter_sum([sent], [indices], chunk) if isinstance(indices, Tensor) else sent
        (sealed,) = self._guard.seal([message.parts], flight.step, 0)
        flight.arriving = self._link.all_gather(sealed)

    def receive(self, flight: InFlight) -> Received:
        received = opened(self._reply, self._guard, flight, self.owners.owned, signals=False)
        values, indices = self.owners.collect(received.values), None
        if sent := as_int64([i for i in received.indices if i is not None]):
            indices = self.owners.collect(sent)
        elif not self._codec.selection.shared:  # whole rows, where engines expect the indices of some coefficients
            places = torch.arange(values.shape[1], dtype=torch.int64, device=values.device)
            indices = places.expand(values.shape)
        return Received([values], [indices], Mean())

    def for_rows(self, first: int, rows: int, guard: Guard) -> "TwoStage":
        owners = RowOwners(rows, self.owners.replicas, self.owners.run)
        start = first // owners.replicas
        residual = self.residual[start : start + owners.owned]
        return TwoStage(self._scheme, self._codec, self._link, owners, residual, guard)

    def state(self) -> dict[str, Tensor]:  # [owned, chunk] fp32
        return {"server_residual": self.residual}

    def _deal(self, selected: Selected) -> list[Selected]:
        """Splits a selection by the owners of its rows. Padding is zeros, at valid indices."""
        k, indices = self._codec.selection.k, list[Tensor | None]([None] * self._link.replicas)
        if selected.indices is not None:
            (sent,) = as_int64([selected.indices])
            indices = list(self.owners.deal(sent, torch.arange(k, dtype=torch.int64, device=sent.device)))
        values = self.owners.deal(selected.values, selected.values.new_zeros(k))
        return [Selected(v, i, owned=True) for v, i in zip(values, indices, strict=True)]


def opened(codec: Codec, guard: Guard, flight: InFlight, rows: int, phase: int = 0, signals: bool = True) -> Received:
    """Waits for one sealed message per replica, and validates, counts and decodes them; zeros replace unusable ones.

    Args:
        phase, signals: See `Guard.seal` and `Expected`.
    """
    assert isinstance(flight.arriving, Arriving)
    sealed = flight.arriving()
    messages = [Message(*parts[1:]) for parts in sealed]
    received, facts = codec.open(messages, rows, flight.shared)
    use = guard.admit(sealed, facts, flight.step, phase, signals)
    return received if use is None else codec.blank(received, use)


def negative_zeros(scheme: Scheme, step: int, replica: int = 0, replicas: int = 1) -> bool:
    """`zeros_are_negative` for the message that a replica, or the owner of a row, sends at `step`."""
    sending = step // (scheme.round.every * max(1, scheme.codec.selection.period))
    proportional = scheme.signal == "parameters"  # an outer SGD; of gradients the base optimizer may use the sign
    return zeros_are_negative(sending, replica, replicas, proportional or isinstance(scheme.aggregation, MajorityVote))


def exchange_for(scheme: Scheme, link: Link, layout: Layout, device: torch.device, guard: Guard) -> Exchange:
    """The exchange for the collective that `collective_for` chooses."""
    chosen = collective_for(scheme, layout, link.replicas, link.local_ranks)
    if chosen == "all-reduce":
        return AllReduce(scheme.codec, link, guard)
    if chosen == "all-gather":
        return AllGather(scheme, scheme.codec, link, guard)
    owners = RowOwners(layout.rows, link.replicas, rows_of_a_turn(scheme, link.replicas))
    residual = torch.zeros(owners.owned, scheme.codec.selection.chunk, dtype=torch.float32, device=device)
    return TwoStage(scheme, scheme.codec, link, owners, residual, guard)
