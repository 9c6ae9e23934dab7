"""The reference engine: the step of one replica in plain torch.

All other engines must compute the same bits as this engine.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Protocol

import torch
from torch import Tensor

from detonation.core.codec import (
    E3M0,
    FP32,
    Aggregation,
    Codec,
    DecodedMessages,
    Float,
    Identity,
    Mean,
    MessageRows,
    Received,
    Selected,
    narrow,
)
from detonation.core.compute.kernel_library import SignRate
from detonation.core.compute.nonfinite import Verdict, inspected
from detonation.core.engine.inspector import SignalInspector, inspector_of
from detonation.core.engine.rows_at_once import (
    Room,
    decoded_at_once,
    is_heavy,
    released_at_once,
    selected_at_once,
)
from detonation.core.engine.rule import Rule
from detonation.core.flat.layout import CACHE_BLOCK, Layout, copy
from detonation.core.flat.rows import Bucket, RowOwners
from detonation.core.integrity.guard import Guard
from detonation.core.memory import Feedback, Memory
from detonation.core.runtime import Runtime
from detonation.plugins import plugins

READS = 2
"""Number of parts in which the replies of owners are decoded, if few kernel launches matter more
than memory.
"""


class Replier(Protocol):
    """Encodes the reply of an owner (a replica that aggregates some rows for all replicas). The
    owner adds the aggregate to its residual, and replies with coefficients of the sum. `reads` is
    True for messages that this replier can decode.
    """

    def reads(self, received: Received) -> bool: ...

    def reply(self, received: Received, run: MessageRows, step: int) -> None: ...


class ReferenceEngine(Rule):
    """Encodes signals, subtracts the sent values from the memory of unsent values, and decodes
    messages. Computes in plain torch, on any device, in blocks of rows.
    """

    name = "torch"
    reads_status = False
    """True if the argument `bad` of `encode` may be the status of the message as a tensor (see
    `Header`), which saves a conversion. All signals of a message are then encoded together.
    """
    guard: type[Guard] = Guard
    """Class of the guard, which seals and validates the messages of this engine."""
    inspect = staticmethod(inspected)
    """Checks the signals of a whole message for bad values."""
    found_later: Verdict | None = None
    """The verdict on each message, if `encode_into` itself finds bad values: `inspect` then has
    nothing to do."""

    def __init__(
        self,
        codec: Codec,
        layout: Layout,
        memory: Memory | None,
        runtime: Runtime,
        room: Room | None = None,
    ) -> None:
        super().__init__(codec, layout, memory, runtime.seed, runtime.device)
        self._runtime = runtime
        self._on_cpu = runtime.device.type == "cpu"
        self._room = room or Room(max(1, layout.rows))
        self._encodes_codes = self._on_cpu and _sends_codes(codec, layout)
        # Rows are processed in multiples of `unit`, so that no codebook block is divided.
        unit = codec.unit if self._encodes_codes else 8
        # number of rows that one operation processes: so few that they fit into the cache
        self._cached_rows = max(unit, CACHE_BLOCK // codec.selection.chunk // unit * unit)
        self._released_rows = self._cached_rows
        self._absorbed_rows = self._cached_rows
        self._selected_rows = self._cached_rows
        if not self._on_cpu:
            sizes = codec, layout.rows, self._room
            self._released_rows = released_at_once(*sizes)
            self._absorbed_rows, self._selected_rows = selected_at_once(*sizes)
        self._encoded_at_once = self._selected_rows
        if codec.dense or (self._on_cpu and codec.selection.shared):
            self._encoded_at_once = layout.rows
        # `Bucket` objects are cached, because every step has the same blocks of rows
        self._block = cache(partial(Bucket.of, layout))
        self._memories: dict[int, Memory] = {}
        self.is_heavy = not self._on_cpu and is_heavy(codec)
        """True if the result of `encode` is so large that its memory should be freed before the
        message is sent."""
        # signals that are sent as whole floating-point rows are written directly into the message
        sends_signals = memory is None and codec.dense and isinstance(codec.basis, Identity)
        self._as_it_is = sends_signals and isinstance(codec.precision, Float) and not layout.tiled
        # True if no rounding error is kept, so that `release` can subtract the selected values
        self._exact = codec.precision == FP32 or not (memory and memory.feedback.error_feedback)
        self.needs_own_values = not self._exact
        """True if `release` needs the sent values as receivers decode them."""
        self._rest = _subtracting(codec, memory)
        # True if the sent values of a block are subtracted while this block is still in the cache
        self._by_block = (
            self._on_cpu and self._exact and not (layout.tiled or codec.selection.shared)
        )
        self.releases_at_once = memory is None or self._by_block
        """True if `encode` already subtracts the sent values from the memory, so that `release`
        has nothing to do.
        """

    def encode(
        self,
        signals: Sequence[Tensor | None],
        step: int,
        bad: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Selected:
        """Adds signals to the memory of unsent values, and selects the coefficients to send.

        Args:
            bad: `[]` bool, on a device that decides by itself. If it is True, zeros are selected,
                and the memory does not change.
            out: Memory for the values; by default new memory.

        Shapes: one local shape per parameter -> values `[rows, k]`.
        """
        if self.layout.rows > self._encoded_at_once:
            return self._encode_blocks(signals, step, bad, out)
        selected = self.select(signals, step, bad, out)
        if bad is not None or selected.indices is not None:
            selected = self._narrow(selected, bad)
        if self._by_block:
            self.subtract([self.of_one(selected.values, selected).whole()])
        return selected

    def _encode_blocks(
        self,
        signals: Sequence[Tensor | None],
        step: int,
        bad: Tensor | None,
        out: Tensor | None,
    ) -> Selected:
        """Runs `encode` for one block of rows at a time, so that temporary tensors are smaller."""
        codec = self.codec
        rows = self.layout.rows
        shared = codec.shared_indices(rows, step, self._seed, self.device)
        values = out
        if values is None:
            shape = rows, codec.selection.k
            values = torch.empty(shape, dtype=torch.float32, device=self.device)
        indices = torch.empty(values.shape, dtype=codec.index_coding.dtype, device=self.device)
        for first, flat, memory in self._absorbed_parts(signals, bad):
            for start in range(0, len(flat), self._selected_rows):
                block = flat[start : start + self._selected_rows]
                target = slice(first + start, first + start + len(block))
                known = shared
                if known is not None:
                    known = known[target]
                picked = codec.pick(codec.basis.forward(block), known, out=values[target])
                assert picked.indices is not None
                indices[target] = narrow(picked.indices)
                if self._by_block and memory:
                    sent = self.of_one(picked.values, picked).whole()
                    memory.release([self.update(sent, Mean())])
                del block, picked  # frees these tensors before the next block is computed
            del flat
        if bad is not None:
            values.masked_fill_(bad, 0.0)
        return Selected(values, indices)

    def _absorbed_parts(
        self, signals: Sequence[Tensor | None], bad: Tensor | None
    ) -> Iterator[tuple[int, Tensor, Memory | None]]:
        """Adds signals to the memory of unsent values, in parts of consecutive rows. Yields for
        each part its first row, the new values of its rows, and the memory of these rows. If the
        scheme has no memory, the values are the signals themselves.
        """
        rows = self.layout.rows
        memory = self.memory
        at_once = self._selected_rows
        if memory:
            at_once = self._absorbed_rows
        is_whole = rows <= at_once or self.layout.tiled
        if is_whole:
            at_once = max(1, rows)
        for first in range(0, max(1, rows), at_once):
            if is_whole:
                block = Bucket.whole(self.layout)
            else:
                block = self._block(first, min(first + at_once, rows))
            pieces = block.cut(signals)
            if self.memory is None:
                yield first, block.layout.flatten(pieces, self.device), None
                continue
            if not is_whole:
                memory = self._memory_of(block)
            assert memory
            yield first, memory.absorb(pieces, bad), memory

    def _memory_of(self, block: Bucket) -> Memory:
        """The memory of unsent values of one block of rows. The `Memory` object is cached, so that
        its views and its padding are computed only once."""
        assert self.memory
        known = self._memories.get(block.first)
        if known is None:
            known = self.memory.of_rows(block.layout, block.first)
            self._memories[block.first] = known
        return known

    def encode_into(
        self,
        run: MessageRows,
        signals: Sequence[Tensor | None],
        step: int,
        bad: Tensor | None = None,
    ) -> Selected:
        """Encodes like `encode`, and writes the coefficients into the message buffer `run`."""
        as_it_is = self._as_it_is and not run.owners
        # not for fp64 signals: other engines round them to fp32 first, and then to the sent dtype
        if as_it_is and not any(s is not None and s.dtype == torch.float64 for s in signals):
            values = run.numbers
            assert values is not None
            self.layout.fill(values, signals)
            if bad is not None:
                values.masked_fill_(bad, 0.0)
            return Selected(values, None)
        if self._encodes_codes and not run.owners:
            return self._encode_codes(run, signals)
        out = None
        # an all-reduce overwrites its buffer, so values that `release` needs are not written there
        if self.codec.precision == FP32 and not (run.is_summed or self.codec.dense):
            out = run.numbers
        selected = self.encode(signals, step, bad, out)
        self.codec.write(selected, run)
        return selected

    def _encode_codes(self, run: MessageRows, signals: Sequence[Tensor | None]) -> Selected:
        """Writes whole rows as codes into `run`, and subtracts the sent values from the memory of
        unsent values, block by block. Each block stays in the cache, and no temporary tensor has
        the size of the model.
        """
        for first, flat, memory in self._absorbed_parts(signals, None):
            part = run.of_rows(first, len(flat))
            sent = []
            if not (self._rest and self._rest.encode_rest(flat, part.parts)):
                self.codec.write(Selected(flat, None), part)
                if self._exact:
                    sent.append(flat)
                else:
                    sent.append(self.codec.written(part))
            if memory:
                memory.release(sent)
            del flat, sent  # frees this block of rows before the next block is computed
        nobody_needs_them = torch.empty(self.layout.rows, 0, dtype=torch.float32, device="cpu")
        return Selected(nobody_needs_them, None, released=True)

    def inspector(self, buckets: int) -> SignalInspector:
        """An inspector that checks the signals of messages that are sent in `buckets` buckets."""
        return inspector_of(self._runtime)

    def own_message(self, run: MessageRows, selected: Selected) -> Received:
        """Decodes this replica's message as every receiver decodes it, as if no other message had
        been received. `run` is the buffer of this message, and the decoded values may share memory
        with this buffer."""
        return self.of_one(self.codec.written(run), selected)

    def replier(
        self,
        answer: Codec,
        aggregation: Aggregation,
        residual: Tensor,
        owners: RowOwners,
        owner: int,
    ) -> Replier | None:
        """An object that encodes the replies of `owner`, and keeps the unsent part of the replies
        in `residual`; None if plain torch computes the replies.

        Shapes: residual `[owned, chunk]` fp32.
        """
        return None

    def _narrow(self, selected: Selected, bad: Tensor | None) -> Selected:
        """Sets the selected values to zero if the signals are `bad`, and casts the indices to the
        smallest dtype."""
        values = selected.values
        indices = selected.indices
        if bad is not None:
            values = values.masked_fill(bad, 0.0)
        if isinstance(indices, Tensor):
            indices = indices.to(self.codec.index_coding.dtype)
        return Selected(values, indices)

    def empty(self, step: int) -> Selected:
        """The content of an empty message: zeros. The memory of unsent values does not change.

        Shapes: -> values `[rows, k]`.
        """
        return self.codec.empty(self.layout.rows, step, self._seed, self.device)

    def release(self, selected: Selected, own: Tensor | None) -> None:
        """Subtracts the sent values from the memory of unsent values. `own` holds the sent values
        as every receiver decodes them. Without `own`, the selected coefficients are subtracted.

        Shapes: own `[rows, k]` fp32.
        """
        if self.memory:
            if own is None or self._exact:
                own = selected.values
            sent = self.of_one(own, selected)
            self.subtract(sent.blocks(self._released_rows))

    def of_one(self, values: Tensor, selected: Selected) -> Received:
        """A single received message with `values` at the indices of `selected`.

        Shapes: `[rows, k]` fp32.
        """
        values = values.unsqueeze(0)
        if selected.indices is None:
            return DecodedMessages(values, None)
        return DecodedMessages(values, narrow(selected.indices).unsqueeze(0))

    def decode(self, received: Received) -> Tensor:
        """The update in the coordinates of the parameters. The values of the update's padding are
        undefined.

        Shapes: -> `[rows, chunk]` fp32.
        """
        at_once = self._cached_rows
        if not self._on_cpu:
            at_once = decoded_at_once(self.codec, received, self._room, into_flat=True)
        if received.rows <= at_once:
            return self.update(received.read(0, received.rows), received.aggregation)
        shape = self.layout.rows, self.layout.chunk
        flat = torch.empty(shape, device=self.device, dtype=torch.float32)
        first = 0
        for part in self._decoded_parts(received):
            flat[first : first + len(part)] = part
            first += len(part)
            del part  # frees this part of the update before the next part is computed
        return flat

    def write(self, received: Received, targets: Sequence[Tensor]) -> None:
        """Decodes the update, and writes it into `targets`, one tensor per parameter."""
        at_once = self._cached_rows
        if not self._on_cpu:
            at_once = self._decoded_at_once(received)
        if self.layout.tiled:
            if not all(target.is_contiguous() for target in targets):
                at_once = self.layout.rows
            for strip, part in self._decoded_tiles(received, at_once):
                copy(strip.cut(targets), strip.layout.parts(part))
                del part  # frees this part of the update before the next part is computed
        elif received.rows <= at_once:
            update = self.update(received.read(0, received.rows), received.aggregation)
            copy(targets, self.layout.views(update))
        elif not all(target.is_contiguous() for target in targets):
            copy(targets, self.layout.parts(self.decode(received)))
        else:
            self.layout.scatter(self._decoded_parts(received), targets)

    def sign_mover(
        self, received: Received, weights: Sequence[Tensor]
    ) -> Callable[[Sequence[SignRate]], object] | None:
        """Returns a function that moves `weights` by the signs of the update, each parameter at its
        own learning rate, and never stores the whole update. Returns None if the engine has no such
        function for these messages and weights."""
        if all(w.dtype == torch.float32 and w.is_contiguous() for w in weights):
            return partial(self._move_by_signs, received, weights)
        return None

    def _move_by_signs(
        self, received: Received, weights: Sequence[Tensor], rates: Sequence[SignRate]
    ) -> None:
        if self.layout.tiled:
            at_once = self._decoded_at_once(received)
            for strip, part in self._decoded_tiles(received, at_once):
                index = strip.pieces[0].index
                _move(strip.cut(weights), strip.layout.parts(part.sign_()), [rates[index]])
                del part  # frees this part of the update before the next part is computed
            return
        # a message of whole rows must not change in place, but `part` may be a view of the message
        may_be_message = isinstance(self.codec.basis, Identity) and isinstance(
            received.aggregation, Mean
        )
        may_be_message &= self.codec.selection.k == self.layout.chunk >= received.width
        first = 0
        for part in self._decoded_parts(received):
            block = self._block(first, first + len(part))
            first += len(part)
            if may_be_message:
                part = part.sign()
            else:
                part.sign_()
            signs = block.layout.views(part)
            _move(block.cut(weights), signs, [rates[piece.index] for piece in block.pieces])
            del block, part, signs  # frees this part before the next part is computed

    def _decoded_tiles(self, received: Received, at_once: int) -> Iterator[tuple[Bucket, Tensor]]:
        """Yields the update in strips of about `at_once` tiles, one parameter after the other. A
        strip may begin and end at any row, also where messages cannot be cut.
        """
        for strip in Bucket.strips(self.layout, at_once):
            sent = received.part(strip.rows.start, strip.rows.stop)
            yield strip, self.update(sent, received.aggregation)

    def _decoded_parts(self, received: Received) -> Iterator[Tensor]:
        at_once = self._decoded_at_once(received)
        read = at_once
        if self._room.few_launches and received.owners:
            # each read of the owners' replies launches kernels, so more rows are read at once
            read = received.rows
            if not self.codec.selection.shared:
                read = -(-received.rows // READS)
        for block in received.blocks(at_once, read):
            decoded = self.update(block, received.aggregation)
            del block  # frees this block of rows before the next block is read
            yield decoded
            del decoded

    def _decoded_at_once(self, received: Received) -> int:
        if self._on_cpu:
            return self._cached_rows
        return decoded_at_once(self.codec, received, self._room)


def _sends_codes(codec: Codec, layout: Layout) -> bool:
    """True if messages hold whole rows, without a transform, as codes of a codebook."""
    is_plain = isinstance(codec.basis, Identity) and not layout.tiled
    return codec.dense and is_plain and not isinstance(codec.precision, Float)


def _subtracting(codec: Codec, memory: Memory | None) -> E3M0 | None:
    """The precision of `codec`, if a kernel both encodes values in this precision and subtracts the
    sent values from the memory; else None.
    """
    precision = codec.precision
    takes_all = memory and memory.feedback == Feedback(memory.feedback.decay)
    if takes_all and isinstance(precision, E3M0):
        return precision
    return None


def _move(weights: Sequence[Tensor], signs: Sequence[Tensor], rates: Sequence[SignRate]) -> None:
    """Moves `weights` against `signs`, in one or two operations for all weights with the same
    learning rate and weight decay.
    """
    for shrink, lr in dict.fromkeys(rates):
        same = [i for i, rate in enumerate(rates) if rate == (shrink, lr)]
        moved = [weights[i] for i in same]
        if shrink != 1:
            torch._foreach_mul_(moved, shrink)
        torch._foreach_add_(moved, [signs[i] for i in same], alpha=-lr)


def engine_for(
    codec: Codec, layout: Layout, memory: Memory | None, runtime: Runtime, room: Room | None = None
) -> ReferenceEngine:
    """Creates the first engine that supports `codec`, or the engine in plain torch if there is no
    such engine. `room` limits the memory of temporary tensors.

    Engines of installed packages are tried first, then built-in engines from the fastest to the
    slowest.
    """
    for make in plugins("engines"):  # plugins are imported only now, because the import is slow
        engine: ReferenceEngine | None = make(codec, layout, memory, runtime, room)
        if engine:
            return engine
    return ReferenceEngine(codec, layout, memory, runtime, room)
