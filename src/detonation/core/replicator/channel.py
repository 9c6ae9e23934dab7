"""The channel: passes a signal through memory, codec, guard and link, and returns an update."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from operator import itemgetter

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from detonation.core.codec import MessageRows, Received, Selected
from detonation.core.compute.nonfinite import FINE, Verdict
from detonation.core.engine import ReferenceEngine, SignalInspector, engine_for
from detonation.core.exchange import Exchange, Unused, exchange_for, room_of
from detonation.core.flat.layout import Layout
from detonation.core.flat.rows import Bucket
from detonation.core.flat.tensors import gradients_to_fill
from detonation.core.integrity.fault_counts import Changed, FaultCounts
from detonation.core.integrity.guard import Guard
from detonation.core.integrity.message import Message, Missing
from detonation.core.link import Link
from detonation.core.memory import LocalState, Memory
from detonation.core.optim import Deferred, SignSGD, hooks_of
from detonation.core.runtime import Runtime
from detonation.core.schemes import Scheme, buckets_of, codec_of, sending_order

_MOMENTUM = itemgetter("momentum")


@dataclass(frozen=True)
class BucketPipeline:
    """A bucket, the engine that encodes it into its rows of a message, and the exchange that sends
    this message.

    releases_early: True if the bucket is subtracted from memory before the message is sent.
    """

    bucket: Bucket
    engine: ReferenceEngine
    exchange: Exchange
    releases_early: bool


@dataclass
class Transfer:
    """The message of one replica at one step: encoded bucket by bucket, sent, and finally an
    update.

    It is one message with one header for any number of collectives: all replicas decide once
    whether to use it. pipeline: pipeline of the bucket that is the message, or of the whole flat.
    own: for schemes that need it, the update of each bucket that would result if all replicas had
    sent this message. verdict: verdict on the signals of a message that is sent whole. unreleased:
    selections that are not yet subtracted from memory, with their values as receivers decode them,
    if these differ.
    """

    pipeline: BucketPipeline
    message: Message
    own: "list[Update]" = field(default_factory=list)
    verdict: Verdict = FINE
    forwarded: bool = False
    unreleased: list[tuple[ReferenceEngine, Selected, Tensor | None]] = field(default_factory=list)

    def forward(self) -> None:
        """Starts the second collective, if the exchange has one and has not started it."""
        if not self.forwarded:
            self.pipeline.exchange.forward(self.message)
        self.forwarded = True

    def receive(self) -> "Update":
        """Waits for the agreed update."""
        exchange = self.pipeline.exchange
        if exchange.secluded:
            self.forward()
        return Update(self.pipeline.engine, exchange.receive(self.message), self.message.missing)


@dataclass(frozen=True)
class Update:
    """The received messages of all replicas, decoded on demand to the same bits on every
    replica.
    """

    engine: ReferenceEngine
    received: Received
    missing: Missing | None = None

    def flat(self) -> Tensor:
        """Decodes the update.

        Shapes: -> `[rows, chunk]` fp32; its padding is undefined.
        """
        # the decoded update may share memory with the messages
        return self.engine.decode(self.received)

    def rows_of(self, pipeline: BucketPipeline, first: int) -> Tensor:
        """Decodes the rows of a bucket; `first` is the first row of the message.

        Shapes: -> `[rows of the bucket, chunk]` fp32.
        """
        bucket = pipeline.bucket
        received = self.received
        if bucket.layout.rows != received.rows:
            received = received.rows_of(bucket.first - first, bucket.layout.rows)
        return pipeline.engine.decode(received)

    def apply(
        self,
        parameters: Mapping[str, Tensor],
        unused: Collection[int] = (),
        signs: SignSGD | None = None,
        weights: Sequence[Tensor] = (),
    ) -> None:
        """Lets the next step of the base optimizer apply this update of gradients.

        SignSGD moves the weights during decoding, because storing the update and reading it back
        costs more than decoding. For all other optimizers the update replaces the gradients.

        Args:
            unused: The numbers of the parameters that no replica used, which the step leaves alone.
            signs: The base optimizer, where it may move weights by signs.
            weights: Then the local part of each parameter.
        """
        received = self.received
        may_move = signs is not None and not (  # hooks may read gradients
            signs._optimizer_step_pre_hooks
            or len(signs._optimizer_step_post_hooks) > 1  # the first hook belongs to this library
            or ((_global_optimizer_pre_hooks or _global_optimizer_post_hooks) and hooks_of(signs))
        )
        if signs is not None and may_move:
            moved = list(weights)
            for number in unused:
                # this tensor is moved in place of the update
                moved[number] = torch.empty_like(moved[number])
            adds_up = any(map(_MOMENTUM, signs.param_groups))
            if not adds_up and self.engine.can_apply_signs(received, moved):
                each = list(parameters.values())
                move = partial(self.engine.apply_signs, received, moved)
                signs.deferred[id(each[0])] = Deferred(each, move, received.release)
                return
        self.engine.write(received, gradients_to_fill(parameters, unused))
        if received.release:  # free the messages, which have no further use
            received.release()


class Channel:
    """Sends one replica's signals, encoded bucket by bucket, in one collective or in one per
    bucket, with equal results.

    Args:
        scheme: The codec, the memory, the round and the collective.
        runtime: The device, the seed, and the use of kernels.
        counts: Of the faults of the level; a new one when left out.
        place: The number of the channel among all channels of the optimizer.
        late: The parameters whose gradients arrive only at the end of backward, by name.
    """

    def __init__(
        self,
        scheme: Scheme,
        layout: Layout,
        link: Link,
        runtime: Runtime,
        counts: FaultCounts | None = None,
        place: int = 0,
        late: Collection[str] = (),
    ) -> None:
        if runtime.decides_on_device:
            scheme = scheme.aligned(link.local_ranks)
        self.scheme = scheme
        self.layout = layout
        self.link = link
        self.runtime = runtime
        self.place = place
        self.late = late
        self._needs_own_update = scheme.needs_own_update
        self.memory: Memory | None = None
        if scheme.feedback:
            self.memory = Memory(layout, scheme.feedback, runtime.device)
        self._room = room_of(scheme, layout, link.replicas, link.local_ranks)
        self.engine = engine_for(scheme.codec, layout, self.memory, runtime, self._room)
        self.counts = counts or FaultCounts([slot.name for slot in layout.slots], link.replica)
        # all guards share one reference norm, because their messages have similar norms
        self._usual = torch.zeros(1, dtype=torch.float32, device=runtime.device)
        # True if messages omit indices, because all replicas can compute them.
        # Schemes that send whole rows need indices only for kernels.
        self._knows = scheme.codec.selection.shared and (
            not scheme.codec.dense or self.engine.guard.on_kernels
        )
        guard = self._guard(layout, 0)
        self.exchange = exchange_for(scheme, link, layout, self.engine, guard, self._room)
        self.unused = Unused(link, layout, self.memory, guard, scheme.round.delay > 0)
        if runtime.decides_on_device:
            # copies the basis to the device now instead of at the end of the first round
            row = torch.zeros(
                1, scheme.codec.selection.chunk, dtype=torch.float32, device=runtime.device
            )
            scheme.codec.basis.inverse(scheme.codec.basis.forward(row))
        self._message = partial(Message, codec=scheme.codec, recycle=self.exchange.recycle)
        self._whole = self._pipeline_of(Bucket.whole(layout), self.engine, self.exchange)

    @cached_property
    def pipelines(self) -> list[BucketPipeline]:
        """One pipeline per bucket, in the order in which all replicas send them."""
        buckets = buckets_of(
            self.scheme,
            self.layout,
            self.link.replicas,
            self.link.local_ranks,
            self.engine.reads_status,
            self.late if self.scheme.worth_overlapping else (),
        )
        if len(buckets) == 1:
            return [self._whole]
        return [
            self._pipeline(bucket, number)
            for number, bucket in enumerate(sending_order(buckets), start=1)
        ]

    @cached_property
    def _inspector(self) -> SignalInspector:
        """The inspector for messages that are encoded bucket by bucket."""
        return self.engine.inspector(len(self.pipelines))

    def start(self, step: int, pipeline: BucketPipeline | None = None) -> Transfer:
        """An empty transfer for `step`, either of the whole flat or of a bucket that is a message
        of its own.
        """
        self.counts.due.add(step + self.scheme.round.delay)
        return Transfer(pipeline or self._whole, self._message(step))

    def send(
        self,
        signals: Sequence[Tensor | None],
        step: int,
        pipeline: BucketPipeline | None = None,
        lost: bool = False,
    ) -> Transfer:
        """Sends a signal in one collective. If the signal has a nonfinite value, an empty message
        is sent that reports the reason.

        Args:
            pipeline: Of a bucket that is a message of its own, one in memory at a time: `signals`
                are its pieces. All buckets of a step are sent like this, in one order on all
                replicas, or none.
            lost: Whether this replica counts as one without gradients, whatever the signals are:
                the step is undone if all replicas do.

        Shapes: one local shape per parameter, or one per piece of the bucket.
        """
        self.counts.due.add(step + self.scheme.round.delay)
        transfer = Transfer(pipeline or self._whole, self._message(step))
        if self.link.playback:
            self._play(transfer, [transfer.pipeline])
            return transfer
        missing = [number for number, signal in enumerate(signals) if signal is None or lost]
        if missing:
            self.unused.miss(transfer.message, missing)
        transfer.verdict = transfer.pipeline.engine.inspect(signals, self.runtime)
        bad = transfer.verdict.bad
        whole = transfer.pipeline
        run = whole.exchange.run(transfer.message, 0, whole.bucket.layout.rows)
        # CPU engines use their own cache-sized blocks; kernels need no temporaries
        at_once = pipeline or self.runtime.device.type == "cpu" or self.engine.reads_status
        if at_once:
            self._encode(transfer, whole, run, signals, bad)
            if whole.releases_early:
                self._release(transfer)
        else:
            self._encode_in_buckets(transfer, run, signals, bad)
        del run  # free the encoded rows, because the exchange may send a copy
        whole.exchange.send(transfer.message, transfer.verdict.status)
        if transfer.unreleased:
            self._release(transfer)
        if missing:
            self.unused.sent(transfer.message)
        return transfer

    def send_bucket(
        self, transfer: Transfer, pipeline: BucketPipeline, pieces: Sequence[Tensor | None]
    ) -> bool | Tensor:
        """Encodes the part of a signal in a bucket, sends it and subtracts it from memory.

        A nonfinite part is not added to the memory, and zeros are sent; the last bucket reports the
        reason. Returns whether this part is bad; see `Verdict.bad`.

        Shapes: one per piece of the bucket.
        """
        bucket = pipeline.bucket
        is_last = pipeline is self.pipelines[-1]
        if self.link.playback:
            self._play(transfer, [pipeline], is_last)
            return False
        if pipeline is self.pipelines[0]:
            self._inspector.begin()
        numbers = [piece.index for piece in bucket.pieces]
        bad = self._inspector.look(pieces, numbers, pipeline.engine)
        run = self.exchange.run(transfer.message, bucket.first, bucket.layout.rows)
        self._encode(transfer, pipeline, run, pieces, bad)
        del run  # free the encoded rows, because the exchange may send a copy
        status: int | Tensor | None = None
        if is_last:
            status = self._inspector.status()
        self.exchange.send(transfer.message, status)
        self._release(transfer)
        if is_last and transfer.message.missing:
            self.unused.sent(transfer.message)
        return bad

    def announce(self, step: int, name: str, in_buckets: bool) -> list[Transfer]:
        """Sends zeros instead of all messages of `step`, because this rank began or stopped
        training `name`.

        Args:
            in_buckets: Whether the other replicas send gradients of this step in one collective per
                bucket.
        """
        self.counts.changing = self.link.replicas
        number = self.counts.names.index(name)
        if self.scheme.divides_messages:
            transfers = [self.start(step, pipeline) for pipeline in self.pipelines]
            for pipeline, transfer in zip(self.pipelines, transfers, strict=True):
                self._send_zeros(transfer, [[pipeline]], _after_slots(transfer, number))
            return transfers
        transfer = self.start(step)
        collectives = [self.pipelines]
        if in_buckets or self.scheme.signal == "parameters":
            collectives = [[each] for each in self.pipelines]
        self._send_zeros(transfer, collectives, _after_slots(transfer, number))
        return [transfer]

    def discard(self, transfers: Sequence[Transfer]) -> None:
        """Waits for the messages of an announcement, without using them."""
        kept = {name: tensor.clone() for name, tensor in self.exchange.state().items()}
        for transfer in transfers:
            transfer.forward()
        for transfer in transfers:
            transfer.receive()
        for name, tensor in self.exchange.state().items():
            tensor.copy_(kept[name])

    def local_state(
        self, flats: Mapping[str, Tensor], others: Mapping[str, Tensor] | None = None
    ) -> LocalState:
        """The state of memory and exchange, together with the replicator's `flats` and `others`.

        Shapes: flats `[rows, chunk]`.
        """
        if self.memory:
            memory = {"residual": self.memory.residual}
        else:
            memory = {}
        of_exchange = self.exchange.state() | dict(others or {})
        return LocalState(self.layout, memory | dict(flats), of_exchange, self.unused.forget)

    def _play(
        self, transfer: Transfer, pipelines: Sequence[BucketPipeline], is_last: bool = True
    ) -> None:
        """Reads the message from the playback instead of all collectives, once its last bucket is
        due.
        """
        for pipeline in pipelines if self._knows else ():
            self._know(transfer, pipeline, pipeline.engine.empty(transfer.message.step))
        if is_last:
            assert self.link.playback is not None
            transfer.pipeline.exchange.play(transfer.message, self.link.playback)
            transfer.forwarded = True

    def _send_zeros(
        self, transfer: Transfer, collectives: Sequence[Sequence[BucketPipeline]], status: int
    ) -> None:
        """Sends zeros instead of a message, in as many collectives as the other replicas use."""
        for pipelines in collectives:
            begin = transfer.pipeline.bucket.first
            buckets = [each.bucket for each in pipelines]
            first = min(each.first for each in buckets)
            run = transfer.pipeline.exchange.run(
                transfer.message, first - begin, sum(each.layout.rows for each in buckets)
            )
            for pipeline, bucket in zip(pipelines, buckets, strict=True):
                self._encode(
                    transfer,
                    pipeline,
                    run.of_rows(bucket.first - first, bucket.layout.rows),
                    (),
                    True,
                )
            transfer.pipeline.exchange.send(
                transfer.message, status if pipelines is collectives[-1] else None
            )

    def _encode_in_buckets(
        self,
        transfer: Transfer,
        run: MessageRows,
        signals: Sequence[Tensor | None],
        bad: bool | Tensor,
    ) -> None:
        """Encodes a signal into `run` bucket by bucket, so that temporaries have the size of a
        bucket.
        """
        for pipeline in self.pipelines:
            bucket = pipeline.bucket
            part = run.of_rows(bucket.first, bucket.layout.rows)
            self._encode(transfer, pipeline, part, bucket.cut(signals), bad)
            if pipeline.releases_early:
                self._release(transfer)

    def _encode(
        self,
        transfer: Transfer,
        pipeline: BucketPipeline,
        run: MessageRows,
        pieces: Sequence[Tensor | None],
        bad: bool | Tensor,
    ) -> None:
        """Encodes a signal into `run`, or zeros if `bad` is True, and stores the data that later
        phases need.
        """
        engine = pipeline.engine
        step = transfer.message.step
        sent = bad is not True
        if sent:
            selected = engine.encode_into(
                run, pieces, step, bad if isinstance(bad, Tensor) else None
            )
        else:
            selected = engine.empty(step)
            engine.codec.write(selected, run)
        if self._knows:
            self._know(transfer, pipeline, selected)
        if sent and not engine.releases_at_once and not selected.released:
            if engine.needs_own_values:
                own = engine.codec.written(run)
            else:
                own = None
            kept = selected
            if own is not None:  # `own` becomes the values before rounding
                kept = replace(selected, values=own)
            transfer.unreleased.append((engine, kept, own))
        if self._needs_own_update:
            transfer.own.append(
                Update(engine, engine.own_message(run.copy() if run.is_summed else run, selected))
            )

    def _know(self, transfer: Transfer, pipeline: BucketPipeline, selected: Selected) -> None:
        """Stores the indices that all replicas can compute."""
        transfer.message.know(
            pipeline.bucket.first - transfer.pipeline.bucket.first, selected.indices
        )

    def _release(self, transfer: Transfer) -> None:
        """Subtracts the sent values from memory, while the collective runs."""
        while transfer.unreleased:
            engine, selected, own = transfer.unreleased.pop(0)
            engine.release(selected, own)

    def _guard(self, layout: Layout, number: int) -> Guard:
        """The guard of bucket number `number`; 0 for the whole flat."""
        arguments = (self.scheme.name, dict(self.scheme.arguments))
        schema = repr((*arguments, layout.slots, self.runtime.seed, self.link.replicas))
        forget = self.memory.clear if self.memory else lambda: None
        at = schema, self.place << 10 | number, self.link.replica, self.scheme.round.delay
        names = [*(slot.name for slot in layout.slots), *map(Changed, self.counts.names)]
        return self.engine.guard(
            names, *at, self.counts, self.runtime.decides_on_device, self._usual, forget
        )

    def _pipeline(self, bucket: Bucket, number: int) -> BucketPipeline:
        """The pipeline of bucket `number`, with an engine of its own."""
        codec = codec_of(bucket, self.scheme.codec, self.layout.rows)
        exchange = self.exchange
        if self.memory:
            memory = self.memory.of_rows(bucket.layout, bucket.first)
        else:
            memory = None
        if self.scheme.divides_messages:
            exchange = exchange.for_rows(
                bucket.first, bucket.layout.rows, self._guard(bucket.layout, number)
            )
        engine = engine_for(codec, bucket.layout, memory, self.runtime, self._room)
        return self._pipeline_of(bucket, engine, exchange)

    def _pipeline_of(
        self, bucket: Bucket, engine: ReferenceEngine, exchange: Exchange
    ) -> BucketPipeline:
        """The pipeline of `bucket`. It subtracts large selections from memory early."""
        on_device = self._needs_own_update and self.runtime.decides_on_device
        return BucketPipeline(bucket, engine, exchange, engine.is_heavy or on_device)


def _after_slots(transfer: Transfer, number: int) -> int:
    """The status for reason `number` among the reasons that concern no single parameter."""
    return 1 + len(transfer.pipeline.bucket.layout.slots) + number
