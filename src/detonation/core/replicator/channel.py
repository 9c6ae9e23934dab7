"""Channel: memory, codec and link joined. A signal goes in, what all replicas agreed on comes out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from detonation.core.codec.aggregate import Agreed
from detonation.core.codec.codec import Selected
from detonation.core.engine.native import engine_for
from detonation.core.engine.reference import Plain
from detonation.core.flat.layout import Layout, copy
from detonation.core.integrity import readback
from detonation.core.integrity.fault_counts import Ledger
from detonation.core.integrity.guard import Guard
from detonation.core.link.exchange import Exchange, Relay, exchange_for
from detonation.core.link.link import Link
from detonation.core.memory import Memory
from detonation.core.replicator.local_state import Private
from detonation.core.schemes.buckets import Bucket, codec_of, cut
from detonation.core.schemes.scheme import Scheme
from detonation.kernels.native import Pace


@dataclass(frozen=True)
class Carrier:
    """A bucket, or the whole, with what encodes and sends it, and what stands between it and the network."""

    bucket: Bucket
    engine: Plain
    exchange: Exchange
    guard: Guard


class Flight:
    """What one replica tells at one step, on its way in one message or in several, and what all agree on.

    silent: whether any of it is zeros in the place of what is not finite; `[]` bool where the host does not know.
    told: what the update would be if all had told what this replica did; only for a scheme that needs it.
    """

    def __init__(self, scheme: Scheme, layout: Layout, step: int) -> None:
        self.told: Tensor | None = None
        self.silent: bool | Tensor = False
        self._layout, self._step = layout, step
        self._tells = scheme.lookahead or scheme.follow != "anchor"
        self._drops = scheme.feedback is None or scheme.feedback.error == "drop"  # then what others read is not needed
        self._relays: list[tuple[Carrier, Relay]] = []

    def send(self, carrier: Carrier, signals: Sequence[Tensor | None]) -> None:
        """Takes in the carrier's part of a signal (one tensor a parameter), sends what the codec makes of it, and takes
        it out of memory.

        A part that is not finite stays out of the memory, which keeps what it had; zeros are sent, and why.
        """
        pieces = carrier.bucket.cut(signals)
        status = carrier.guard.status(pieces)
        self.silent |= status > 0
        selected = self._selected(carrier, pieces, status)
        prepared = carrier.exchange.prepare(selected, self._step, status)
        if self._tells:
            # a copy: what is read of an uncompressed message is the buffer that the link is about to add into
            told = carrier.engine.update(Agreed.one(prepared.read().clone(), selected.columns))
            self.told = self._placed(self.told, carrier.bucket, told)
        if isinstance(status, Tensor) or not status:
            carrier.engine.release(selected, selected.values if self._drops else prepared.read())
        self._relays.append((carrier, prepared.start()))

    def _selected(self, carrier: Carrier, pieces: Sequence[Tensor | None], status: int | Tensor) -> Selected:
        if isinstance(status, Tensor):
            return carrier.engine.select_where(status == 0, pieces, self._step)
        return carrier.engine.silence(self._step) if status else carrier.engine.select(pieces, self._step)

    def update(self) -> Tensor:
        """Waits for what all replicas agree on, the same bits on each."""  # [rows, chunk]
        flat = None
        for carrier, wait in [(carrier, relay()) for carrier, relay in self._relays]:
            flat = self._placed(flat, carrier.bucket, carrier.engine.update(wait()))
        assert flat is not None
        return flat

    def land(self) -> "Landed":
        """The same as messages, to be decoded to where it is needed."""
        return Landed([(carrier, wait()) for carrier, wait in [(carrier, relay()) for carrier, relay in self._relays]])

    def _placed(self, flat: Tensor | None, bucket: Bucket, part: Tensor) -> Tensor:
        """`flat` (made where there is none) with `part` in its place."""
        if bucket.layout is self._layout:
            return part
        flat = self._layout.zeros(part.device) if flat is None else flat
        flat[bucket.first : bucket.first + bucket.layout.rows] = part
        return flat


class Landed:
    """What all replicas agree on, bucket by bucket, before it is decoded."""

    def __init__(self, agreed: Sequence[tuple[Carrier, Agreed]]) -> None:
        self._agreed = agreed

    def write(self, targets: Sequence[Tensor]) -> None:
        """Decodes it into one tensor a parameter."""
        whole = list(targets) if len(self._agreed) == 1 else [target.contiguous() for target in targets]
        for carrier, agreed in self._agreed:
            carrier.engine.write(agreed, carrier.bucket.cut(whole))
        odd = [i for i, target in enumerate(targets) if whole[i] is not target]
        copy([targets[i] for i in odd], [whole[i] for i in odd])
        self._spend()

    def can_follow(self, weights: Sequence[Tensor]) -> bool:
        """Whether `follow` can be called with these: not where it came in several buckets."""
        return len(self._agreed) == 1 and all(each.engine.can_follow(agreed, weights) for each, agreed in self._agreed)

    def follow(self, weights: Sequence[Tensor], paces: Sequence[Pace]) -> None:
        """Moves `weights`, one a parameter, by its signs."""
        for carrier, agreed in self._agreed:
            carrier.engine.follow(agreed, weights, paces)
        self._spend()

    def _spend(self) -> None:
        for _, agreed in self._agreed:
            if agreed.spent:
                agreed.spent()


class Channel:
    """What one replica tells the others, all of it in one message or bucket by bucket: the same bits either way."""

    def __init__(
        self,
        scheme: Scheme,
        layout: Layout,
        link: Link,
        device: torch.device,
        seed: int,
        kernels: bool = True,
        ledger: Ledger | None = None,
        place: int = 0,
    ) -> None:
        self.scheme, self.layout, self.link, self.device = scheme, layout, link, device
        self.memory = Memory(layout, scheme.feedback, device) if scheme.feedback else None
        self.engine = engine_for(scheme.codec, layout, self.memory, device, seed, kernels)
        self.ledger = ledger or Ledger([slot.name for slot in layout.slots], link.replica)
        self._seed, self._kernels, self.place = seed, kernels, place
        guard = self._guard(layout, 0)
        self.exchange = exchange_for(scheme, link, layout.rows, device, guard)
        self._whole = Carrier(Bucket.whole(layout), self.engine, self.exchange, guard)

    @cached_property
    def carriers(self) -> list[Carrier]:
        """One for each bucket, in the order in which all replicas send them: backward makes the last rows first."""
        buckets = cut(self.layout, self.scheme, self.link.replicas * self.link.lanes)
        if len(buckets) == 1:
            return [self._whole]
        return [self._carrier(bucket, number) for number, bucket in enumerate(reversed(buckets), 1)]

    def flight(self, step: int) -> Flight:
        """The message of `step`, with nothing in it yet: to be sent by one carrier after another."""
        self.ledger.expect(step + self.scheme.round.delay)
        return Flight(self.scheme, self.layout, step)

    def send(self, signals: Sequence[Tensor | None], step: int) -> Flight:
        """Sends a signal (one tensor a parameter) in one message."""
        flight = self.flight(step)
        flight.send(self._whole, signals)
        return flight

    def private(self, flats: Mapping[str, Tensor], others: Mapping[str, Tensor] | None = None) -> Private:
        """What memory and exchange must keep to go on, with a replicator's own `flats` and `others`."""
        memory = {"residual": self.memory.residual} if self.memory else {}
        return Private(self.layout, memory | dict(flats), self.exchange.state() | dict(others or {}))

    def _guard(self, layout: Layout, number: int) -> Guard:
        """The guard of carrier `number`, 0 for the whole."""
        scheme, replicas = self.scheme, self.link.replicas
        schema = (scheme.name, dict(scheme.arguments), layout.slots, self._seed, self.engine.name, replicas)
        names, place = [slot.name for slot in layout.slots], self.place << 10 | number
        late = readback.late(self.device)
        return Guard(scheme.codec, names, repr(schema), place, self.link.replica, scheme.round.delay, self.ledger, late)

    def _carrier(self, bucket: Bucket, number: int) -> Carrier:
        codec = codec_of(bucket, self.scheme.codec, self.layout.rows)
        memory = self.memory.part(bucket.layout, bucket.first) if self.memory else None
        engine = engine_for(codec, bucket.layout, memory, self.device, self._seed, self._kernels)
        guard = self._guard(bucket.layout, number)
        return Carrier(bucket, engine, self.exchange.part(bucket.first, bucket.layout.rows, guard), guard)
