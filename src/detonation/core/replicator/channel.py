"""The channel: takes a signal (gradients or movements), exchanges it as a message with the other
replicas, and returns the agreed update.
"""

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
    """A bucket of rows, the engine that encodes this bucket into a message, and the exchange that
    sends this message.

    releases_early: True if the sent values of the bucket are subtracted from the memory of unsent
    values before the message is sent.
    """

    bucket: Bucket
    engine: ReferenceEngine
    exchange: Exchange
    releases_early: bool


@dataclass
class Transfer:
    """One message of one replica at one step, from its encoding to the received update.

    The message has one header, even if several collectives send it, so each replica decides only
    once whether to use the message.

    Args:
        pipeline: The pipeline of the bucket that the message contains, or of all rows.
        own: For schemes that need it, the update of each bucket that would result if all replicas
            had sent this message.
        verdict: Whether the signals are finite, for a message that one collective sends.
        unreleased: Selected coefficients that are not yet subtracted from the memory of unsent
            values. If receivers decode other values, the decoded values are included.
    """

    pipeline: BucketPipeline
    message: Message
    own: "list[Update]" = field(default_factory=list)
    verdict: Verdict = FINE
    forwarded: bool = False
    unreleased: list[tuple[ReferenceEngine, Selected, Tensor | None]] = field(default_factory=list)

    def forward(self) -> None:
        """Starts the second collective of the exchange, if the exchange has a second collective and
        has not started it yet."""
        if not self.forwarded:
            self.pipeline.exchange.forward(self.message)
        self.forwarded = True

    def receive(self) -> "Update":
        """Waits for the messages of all replicas, and returns the agreed update."""
        exchange = self.pipeline.exchange
        if exchange.secluded:
            self.forward()
        return Update(self.pipeline.engine, exchange.receive(self.message), self.message.missing)


@dataclass(frozen=True)
class Update:
    """The received messages of all replicas. The messages are decoded only when a value is needed.
    Every replica decodes them to the same bits.
    """

    engine: ReferenceEngine
    received: Received
    missing: Missing | None = None

    def flat(self) -> Tensor:
        """Decodes the update of all rows of the message.

        Shapes: -> `[rows, chunk]` fp32; its padding is undefined.
        """
        # the decoded update may share memory with the messages
        return self.engine.decode(self.received)

    def rows_of(self, pipeline: BucketPipeline, first: int) -> Tensor:
        """Decodes the update for the rows of one bucket. `first` is the index of the message's
        first row in the flat.

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
        """Makes the next step of the base optimizer apply this update.

        SignSGD moves the weights while it decodes the messages, because storing the decoded update
        and reading it back costs more time than decoding. For all other optimizers the update
        replaces the gradients.

        Args:
            unused: The numbers of the parameters that no replica used, which the step leaves alone.
            signs: The base optimizer, if it is a `SignSGD` that may move the weights itself.
            weights: The local part of each parameter; needed with `signs` only.
        """
        received = self.received
        # Hooks around a step may read `p.grad`. With hooks, the update must be written to `p.grad`.
        may_move = signs is not None and not (
            signs._optimizer_step_pre_hooks
            or len(signs._optimizer_step_post_hooks) > 1  # this library registers one such hook
            or ((_global_optimizer_pre_hooks or _global_optimizer_post_hooks) and hooks_of(signs))
        )
        if signs is not None and may_move:
            moved = list(weights)
            for number in unused:
                # the step changes a temporary tensor instead of the weights of an unused parameter
                moved[number] = torch.empty_like(moved[number])
            adds_up = any(map(_MOMENTUM, signs.param_groups))
            move = None
            if not adds_up:
                move = self.engine.sign_mover(received, moved)
            if move is not None:
                each = list(parameters.values())
                signs.deferred[id(each[0])] = Deferred(each, move, received.release)
                return
        self.engine.write(received, gradients_to_fill(parameters, unused))
        if received.release:  # the messages are decoded, so their buffers can be reused
            received.release()


class Channel:
    """Sends the signals (gradients or movements) of one replica, and receives the agreed updates. A
    signal is encoded bucket by bucket, and sent in one collective or in one collective per bucket.
    Both ways give the same update.

    Args:
        scheme: The codec, the memory, the round and the collective.
        runtime: The device, the seed, and the use of kernels.
        counts: The fault counts of the level; new counts if None.
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
        # all buckets share this reference norm (see `decide_usable`): their norms are similar
        self._usual = torch.zeros(1, dtype=torch.float32, device=runtime.device)
        # True if messages omit indices because all replicas can compute the indices themselves.
        # A scheme that sends whole rows needs no indices, but compiled kernels read them.
        self._knows = scheme.codec.selection.shared and (
            not scheme.codec.dense or self.engine.guard.on_kernels
        )
        guard = self._guard(layout, 0)
        self.exchange = exchange_for(scheme, link, layout, self.engine, guard, self._room)
        self.unused = Unused(link, layout, self.memory, guard)
        if runtime.decides_on_device:
            # stores the basis on the device now, because later steps copy nothing to the device
            row = torch.zeros(
                1, scheme.codec.selection.chunk, dtype=torch.float32, device=runtime.device
            )
            scheme.codec.basis.inverse(scheme.codec.basis.forward(row))
        self._message = partial(Message, codec=scheme.codec, recycle=self.exchange.recycle)
        self._whole = self._pipeline_of(Bucket.whole(layout), self.engine, self.exchange)

    @cached_property
    def pipelines(self) -> list[BucketPipeline]:
        """One pipeline per bucket, in the order in which all replicas send the buckets."""
        buckets = buckets_of(
            self.scheme,
            self.layout,
            self.link.replicas,
            self.link.local_ranks,
            self.engine.reads_status,
            self.late if self.scheme.signal == "gradients" else (),
        )
        if len(buckets) == 1:
            return [self._whole]
        return [
            self._pipeline(bucket, number)
            for number, bucket in enumerate(sending_order(buckets), start=1)
        ]

    @cached_property
    def _inspector(self) -> SignalInspector:
        """Checks that the values of a signal are finite, if the signal is sent bucket by bucket."""
        return self.engine.inspector(len(self.pipelines))

    def start(self, step: int, pipeline: BucketPipeline | None = None) -> Transfer:
        """Creates a transfer for `step` that holds no data yet. Its message contains all rows or,
        if `pipeline` is given, one bucket.
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
        """Sends a signal (gradients or a movement) in one collective. If the signal has a nonfinite
        value, an empty message that reports the reason is sent instead.

        Args:
            pipeline: The pipeline of a bucket that is a message of its own; `signals` are its
                pieces. Either all buckets of a step are separate messages, in the same order on
                all replicas, or none is.
            lost: True to count this replica as one without gradients, whatever the signals are.
                The step is undone if all replicas count as replicas without gradients.

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
        whole = transfer.pipeline
        transfer.verdict = whole.engine.found_later or whole.engine.inspect(signals, self.runtime)
        bad = transfer.verdict.bad
        run = whole.exchange.run(transfer.message, 0, whole.bucket.layout.rows)
        # True to encode all rows in one call.
        # CPU engines cut the rows into blocks themselves, and kernels need no temporary tensors.
        at_once = pipeline or self.runtime.device.type == "cpu" or self.engine.reads_status
        if at_once:
            self._encode(transfer, whole, run, signals, bad)
            if whole.releases_early:
                self._release(transfer)
        else:
            self._encode_in_buckets(transfer, run, signals, bad)
        del run  # frees the encoded rows here, in case the exchange sends a copy of them
        whole.exchange.send(transfer.message, transfer.verdict.status)
        if transfer.unreleased:
            self._release(transfer)
        return transfer

    def send_bucket(
        self, transfer: Transfer, pipeline: BucketPipeline, pieces: Sequence[Tensor | None]
    ) -> bool | Tensor:
        """Encodes the part of a signal that lies in one bucket, sends this part, and subtracts the
        sent values from the memory of unsent values.

        A part with nonfinite values is not added to the memory; zeros are sent instead, and the
        message reports the reason with its last bucket. Returns whether this part has nonfinite
        values; see `Verdict.bad`.

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
        del run  # frees the encoded rows here, in case the exchange sends a copy of them
        status: int | Tensor | None = None
        if is_last:
            status = self._inspector.status()
        self.exchange.send(transfer.message, status)
        self._release(transfer)
        return bad

    def announce(self, step: int, name: str, in_buckets: bool) -> list[Transfer]:
        """Sends zeros in place of all messages of `step`. The messages report the reason: this rank
        began or stopped training the parameter `name`.

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
        """Receives the messages of all replicas without using them. Called for a step at which this
        rank announced a change of its trained parameters.
        """
        kept = {name: tensor.clone() for name, tensor in self.exchange.state().items()}
        for transfer in transfers:
            transfer.forward()
        for transfer in transfers:
            transfer.receive()
        for name, tensor in self.exchange.state().items():
            tensor.copy_(kept[name])

    def send_zeros(self, transfer: Transfer, pipelines: Collection[BucketPipeline]) -> None:
        """Sends zeros in place of the remaining buckets `pipelines` of a message, one collective
        for each.
        """
        if pipelines:
            self._send_zeros(transfer, [[each] for each in pipelines], 0)

    def abandon(self, transfer: Transfer) -> None:
        """Receives the messages of all replicas without using them, at a step that no replica
        completes. Observers do not receive these messages.
        """
        observer = self.link.observer
        self.link.observe(None)
        try:
            self.discard([transfer])
        finally:
            self.link.observe(observer)

    def local_state(
        self, flats: Mapping[str, Tensor], others: Mapping[str, Tensor] | None = None
    ) -> LocalState:
        """Returns the state of the memory of unsent values and of the exchange, together with the
        replicator's own state `flats` and `others`.

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
        """Reads the messages of all replicas from a recorded run instead of running collectives. If
        a message has several buckets, the call for the last bucket (`is_last`) reads the whole
        messages.
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
        """Sends zeros instead of a message, in the same collectives that the other replicas use for
        this message."""
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
        """Encodes a signal into the buffer `run` bucket by bucket, so that temporary tensors are
        only as large as a bucket.
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
        """Encodes the part of a signal in one bucket into the buffer `run`, or zeros if `bad` is
        True. Stores in `transfer` the data that are needed after sending.
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
            if own is not None:
                # only `own`, the rounded values, will be subtracted from the memory
                kept = replace(selected, values=own)
            transfer.unreleased.append((engine, kept, own))
        if self._needs_own_update:
            transfer.own.append(
                Update(engine, engine.own_message(run.copy() if run.is_summed else run, selected))
            )

    def _know(self, transfer: Transfer, pipeline: BucketPipeline, selected: Selected) -> None:
        """Stores the selected indices. The message omits them, because all replicas can compute
        them.
        """
        transfer.message.know(
            pipeline.bucket.first - transfer.pipeline.bucket.first, selected.indices
        )

    def _release(self, transfer: Transfer) -> None:
        """Subtracts the sent values from the memory of unsent values, while the collective runs."""
        while transfer.unreleased:
            engine, selected, own = transfer.unreleased.pop(0)
            engine.release(selected, own)

    def _guard(self, layout: Layout, number: int) -> Guard:
        """Creates the guard that seals and validates the messages of bucket number `number`. Number
        0 stands for messages that contain all rows.
        """
        arguments = (self.scheme.name, self.scheme.identity)
        schema = repr((*arguments, layout.slots, self.runtime.seed, self.link.replicas))
        forget = self.memory.clear if self.memory else lambda: None
        at = schema, self.place << 10 | number, self.link.replica, self.scheme.round.delay
        names = [*(slot.name for slot in layout.slots), *map(Changed, self.counts.names)]
        return self.engine.guard(
            names, *at, self.counts, self.runtime.decides_on_device, self._usual, forget
        )

    def _pipeline(self, bucket: Bucket, number: int) -> BucketPipeline:
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
        """Creates the pipeline of `bucket`. If the bucket's selected values need many bytes, the
        pipeline subtracts them from the memory of unsent values before it sends the message.
        """
        on_device = self._needs_own_update and self.runtime.decides_on_device
        return BucketPipeline(bucket, engine, exchange, engine.is_heavy or on_device)


def _after_slots(transfer: Transfer, number: int) -> int:
    """Returns the status that announces a change of the parameter with index `number` in the list
    of all parameter names.

    Statuses from 1 on stand for the message's own parameters (slots). The statuses for all names
    follow.
    """
    return 1 + len(transfer.pipeline.bucket.layout.slots) + number
