"""The channel: takes a signal through memory, codec, guard and link to an update."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from detonation.core.codec.aggregate import Received
from detonation.core.compute.kernel_library import SignRate
from detonation.core.compute.nonfinite import first_nonfinite
from detonation.core.engine.compiled import engine_for
from detonation.core.engine.reference import ReferenceEngine
from detonation.core.flat.layout import Layout, copy
from detonation.core.flat.rows import Bucket
from detonation.core.integrity.fault_counts import Changed, FaultCounts
from detonation.core.integrity.guard import Guard
from detonation.core.link.exchange import Exchange, InFlight, exchange_for
from detonation.core.link.link import Link
from detonation.core.memory import Memory
from detonation.core.replicator.local_state import LocalState
from detonation.core.runtime import Runtime
from detonation.core.schemes.buckets import codec_of
from detonation.core.schemes.scheme import Scheme
from detonation.core.schemes.traffic import buckets_of


@dataclass(frozen=True)
class BucketPipeline:
    """A bucket, or the whole flat, with the engine that encodes it and the exchange that sends it."""

    bucket: Bucket
    engine: ReferenceEngine
    exchange: Exchange


@dataclass
class Part:
    """The message of one bucket, in flight.

    is_empty, own_update: as in `Transfer`, of this bucket alone.
    """

    pipeline: BucketPipeline
    flight: InFlight
    is_empty: bool | Tensor
    own_update: Tensor | None
    forwarded: bool = False

    def forward(self) -> None:
        """Starts the second collective, if there is one, unless it was started."""
        if not self.forwarded:
            self.pipeline.exchange.forward(self.flight)
        self.forwarded = True

    def decode(self) -> Tensor:
        """Waits for the update of the bucket and decodes it, into memory that may be changed.

        Shapes: -> `[rows of the bucket, chunk]` fp32.
        """
        self.forward()
        return self.pipeline.engine.decode(self.pipeline.exchange.receive(self.flight))


@dataclass
class Transfer:
    """The message of one replica at one step, in flight in one piece or in buckets, until it becomes an update.

    own_update: the update if all replicas had sent this replica's message; only for a scheme that needs it. is_empty:
    True if a part of it is an empty message because of values that are not finite; `[]` bool where only the device
    knows.
    """

    layout: Layout
    step: int
    own_update: Tensor | None = None
    is_empty: bool | Tensor = False
    flights: list[tuple[BucketPipeline, InFlight]] = field(default_factory=list)

    def receive(self) -> "Update":
        """Waits for the update that all replicas agree on."""
        for pipeline, flight in self.flights:
            pipeline.exchange.forward(flight)
        return Update(self.layout, [(each, each.exchange.receive(flight)) for each, flight in self.flights])

    def decode(self) -> Tensor:
        """Waits for the update and decodes it: the same bits on every replica.

        Shapes: -> `[rows, chunk]` fp32.
        """
        return self.receive().decode()


@dataclass(frozen=True)
class Update:
    """The messages that all replicas received, bucket by bucket, decoded where the update is needed."""

    layout: Layout
    received: Sequence[tuple[BucketPipeline, Received]]

    def decode(self) -> Tensor:
        """The update as a flat.

        Shapes: -> `[rows, chunk]` fp32.
        """
        # the result may share memory with the receive buffer, which is therefore not returned
        if len(self.received) == 1:
            pipeline, received = self.received[0]
            return pipeline.engine.decode(received)
        flat = self.layout.zeros(self.received[0][0].engine.device)
        for pipeline, received in self.received:
            flat[pipeline.bucket.rows] = pipeline.engine.decode(received)
        return flat

    def write(self, targets: Sequence[Tensor]) -> None:
        """Decodes the update into `targets`.

        Shapes: one local shape per parameter.
        """
        whole = list(targets) if len(self.received) == 1 else [target.contiguous() for target in targets]
        for pipeline, received in self.received:
            bucket = pipeline.bucket
            pipeline.engine.write(received, whole if bucket.is_whole else bucket.cut(whole))
            if received.release:  # nobody looks at the messages again
                received.release()
        if len(self.received) > 1:
            copied = [i for i, target in enumerate(targets) if whole[i] is not target]
            copy([targets[i] for i in copied], [whole[i] for i in copied])

    def can_apply_signs(self, weights: Sequence[Tensor]) -> bool:
        """True if `apply_signs` supports these weights; never for an update in several buckets.

        Shapes: one local shape per parameter.
        """
        if len(self.received) > 1:
            return False
        pipeline, received = self.received[0]
        return pipeline.engine.can_apply_signs(received, weights)

    def apply_signs(self, weights: Sequence[Tensor], rates: Sequence[SignRate]) -> None:
        """Moves `weights` by the signs of the update while it is decoded.

        Shapes: one local shape per parameter.
        """
        for pipeline, received in self.received:
            pipeline.engine.apply_signs(received, weights, rates)
            if received.release:  # nobody looks at the messages again
                received.release()


class Channel:
    """Sends one replica's signals in one message or bucket by bucket: the same bits either way.

    Args:
        scheme: The codec, the memory, the round and the collective.
        layout: Of the parameters.
        link: To the other replicas.
        runtime: The device, the seed, and the use of kernels.
        counts: Of the faults of the level; a new one when left out.
        place: The number of the channel among all channels of the optimizer.
    """

    def __init__(
        self,
        scheme: Scheme,
        layout: Layout,
        link: Link,
        runtime: Runtime,
        counts: FaultCounts | None = None,
        place: int = 0,
    ) -> None:
        self.scheme, self.layout, self.link, self.runtime, self.place = scheme, layout, link, runtime, place
        self._needs_own_update = scheme.needs_own_update
        self.memory = Memory(layout, scheme.feedback, runtime.device) if scheme.feedback else None
        self.engine = engine_for(scheme.codec, layout, self.memory, runtime)
        self.counts = counts or FaultCounts([slot.name for slot in layout.slots], link.replica)
        self.exchange = exchange_for(scheme, link, layout, runtime.device, self._guard(layout, 0))
        self._whole = BucketPipeline(Bucket.whole(layout), self.engine, self.exchange)

    @cached_property
    def pipelines(self) -> list[BucketPipeline]:
        """One per bucket, in the order in which all replicas send them: backward computes the last rows first."""
        buckets = buckets_of(self.scheme, self.layout, self.link.replicas, self.link.local_ranks)
        if len(buckets) == 1:
            return [self._whole]
        return [self._pipeline(bucket, number) for number, bucket in enumerate(reversed(buckets), 1)]

    def start(self, step: int) -> Transfer:
        """The transfer of `step`, with nothing in it yet: `send_bucket` fills it."""
        self.counts.due.add(step + self.scheme.round.delay)
        return Transfer(self.layout, step)

    def send(self, signals: Sequence[Tensor | None], step: int) -> Transfer:
        """Sends a signal in one message.

        Shapes: one local shape per parameter.
        """
        transfer = self.start(step)
        self.send_bucket(transfer, self._whole, signals)
        return transfer

    def send_bucket(self, transfer: Transfer, pipeline: BucketPipeline, signals: Sequence[Tensor | None]) -> None:
        """Sends the bucket's part of a signal; see `send_part`.

        Shapes: one local shape per parameter.
        """
        part = self.send_part(pipeline, pipeline.bucket.cut(signals), transfer.step)
        if part.own_update is not None:
            if pipeline.bucket.is_whole:
                transfer.own_update = part.own_update
            else:
                if transfer.own_update is None:
                    transfer.own_update = self.layout.zeros(part.own_update.device)
                transfer.own_update[pipeline.bucket.rows] = part.own_update
        transfer.is_empty |= part.is_empty
        transfer.flights.append((pipeline, part.flight))

    def send_part(self, pipeline: BucketPipeline, pieces: Sequence[Tensor | None], step: int) -> Part:
        """Encodes the pieces of a signal that lie in a bucket, sends them and removes them from memory.

        A part that is not finite does not enter the memory; an empty message is sent, with the reason.

        Shapes: one per piece of the bucket.
        """
        engine = pipeline.engine
        status = first_nonfinite(pieces, self.runtime)
        if isinstance(status, Tensor):
            selected = engine.encode(pieces, step, finite=status == 0)
        else:
            selected = engine.empty(step) if status else engine.encode(pieces, step)
        read_own = self._needs_own_update or engine.needs_own_values
        flight = pipeline.exchange.start(selected, step, status, read_own)
        own_update = None
        if self._needs_own_update:
            assert flight.own is not None
            own_update = engine.decode(Received([flight.own], [selected.indices]))
        if not engine.releases_at_once and (isinstance(status, Tensor) or not status):
            engine.release(selected, flight.own)
        flight.own = None
        return Part(pipeline, flight, status > 0, own_update)

    def announce(self, step: int, name: str, in_buckets: bool) -> Transfer:
        """Sends an empty message in the place of the one of `step`: this rank began or ceased to train `name`.

        Args:
            in_buckets: Whether the other replicas send the message of this step in buckets.
        """
        transfer = self.start(step)
        self.counts.changing = self.link.replicas
        for pipeline in self.pipelines if in_buckets else [self._whole]:
            status = 1 + len(pipeline.bucket.layout.slots) + self.counts.names.index(name)
            flight = pipeline.exchange.start(pipeline.engine.empty(step), step, status, read_own=False)
            transfer.flights.append((pipeline, flight))
        return transfer

    def discard(self, transfer: Transfer) -> None:
        """Waits for the messages of an announcement, and uses none."""
        kept = {name: tensor.clone() for name, tensor in self.exchange.state().items()}
        transfer.receive()
        for name, tensor in self.exchange.state().items():
            tensor.copy_(kept[name])

    def local_state(self, flats: Mapping[str, Tensor], others: Mapping[str, Tensor] | None = None) -> LocalState:
        """The state of memory and exchange, with a replicator's own `flats` and `others`.

        Shapes: flats `[rows, chunk]`.
        """
        memory = {"residual": self.memory.residual} if self.memory else {}
        return LocalState(self.layout, memory | dict(flats), self.exchange.state() | dict(others or {}))

    def _guard(self, layout: Layout, number: int) -> Guard:
        """The guard of pipeline `number`, 0 for the whole."""
        scheme, runtime = self.scheme, self.runtime
        arguments = (scheme.name, dict(scheme.arguments))
        schema = repr((*arguments, layout.slots, runtime.seed, self.engine.name, self.link.replicas))
        names = [*(slot.name for slot in layout.slots), *map(Changed, self.counts.names)]
        place = self.place << 10 | number
        delay, on_device = scheme.round.delay, runtime.decides_on_device
        return Guard(names, schema, place, self.link.replica, delay, self.counts, on_device)

    def _pipeline(self, bucket: Bucket, number: int) -> BucketPipeline:
        codec = codec_of(bucket, self.scheme.codec, self.layout.rows)
        memory = self.memory.of_rows(bucket.layout, bucket.first) if self.memory else None
        engine = engine_for(codec, bucket.layout, memory, self.runtime)
        guard = self._guard(bucket.layout, number)
        return BucketPipeline(bucket, engine, self.exchange.for_rows(bucket.first, bucket.layout.rows, guard))
