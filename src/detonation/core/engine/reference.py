"""The reference engine: the arithmetic of one replica's step in ordinary torch, the standard for
all other engines."""

from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Protocol

import torch
from torch import Tensor

from detonation.core.codec.aggregate import Aggregation, Mean
from detonation.core.codec.basis import Identity
from detonation.core.codec.codec import Codec, Selected
from detonation.core.codec.indices import narrow
from detonation.core.codec.message_rows import MessageRows
from detonation.core.codec.precision import FP32, Float
from detonation.core.codec.received import DecodedMessages, Received
from detonation.core.compute.kernel_library import SignRate
from detonation.core.compute.nonfinite import inspected
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
from detonation.core.flat.owners import RowOwners
from detonation.core.flat.rows import Bucket
from detonation.core.integrity.guard import Guard
from detonation.core.memory import Memory
from detonation.core.runtime import Runtime

READS = 2
"""The parts in which the replies of owners are read where launches count."""


class Replier(Protocol):
    """Answers as an owner of rows, if it `reads` what it received: with what its memory and the
    update hold."""

    def reads(self, received: Received) -> bool: ...

    def reply(self, received: Received, run: MessageRows, step: int) -> None: ...


class ReferenceEngine(Rule):
    """Encodes signals, releases memory and decodes messages in ordinary torch, on any device, block
    by block."""

    name = "torch"
    reads_status = False
    """True if `bad` may be a status (see `Header`), because no operation then makes one of the
    other. Signals are then encoded as a whole."""
    guard: type[Guard] = Guard
    """Of the messages that this engine encodes."""
    inspect = staticmethod(inspected)
    """Makes the verdict on the signals of a whole message."""

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
        self._on_cpu, self._room = runtime.device.type == "cpu", room or Room(max(1, layout.rows))
        cached = max(8, CACHE_BLOCK // codec.selection.chunk // 8 * 8)
        sizes = codec, layout.rows, self._room
        at_once = (
            (cached,) * 3 if self._on_cpu else (released_at_once(*sizes), *selected_at_once(*sizes))
        )
        self._some, self._absorbed_rows, self._selected_rows = at_once  # rows of one operation
        self._encoded_at_once = self._selected_rows
        if codec.dense or (self._on_cpu and codec.selection.shared):
            self._encoded_at_once = layout.rows
        self._block = cache(partial(Bucket.of, layout))  # messages cannot be cut everywhere
        self.is_heavy = not self._on_cpu and is_heavy(codec)
        """True if what `encode` returns is so large that it is to be released before the message is
        sent."""
        # signals that travel whole, in a floating-point type (fp64 by way of fp32), are written
        # where they leave
        self._as_it_is = memory is None and codec.dense and isinstance(codec.basis, Identity)
        self._as_it_is = self._as_it_is and isinstance(codec.precision, Float) and not layout.tiled
        # whether the part that leaves memory is known at selection: the others read it exactly, or
        # all of it leaves
        self._exact = codec.precision == FP32 or not (memory and memory.feedback.error_feedback)
        self.needs_own_values = not self._exact
        """True if `release` needs the sent values as every receiver decodes them."""
        # within the cache that holds the block
        self._by_block = (
            self._on_cpu and self._exact and not (layout.tiled or codec.selection.shared)
        )
        self.releases_at_once = memory is None or self._by_block
        """True if `encode` already removes the sent values from memory, so that `release` has
        nothing to do."""

    def encode(
        self,
        signals: Sequence[Tensor | None],
        step: int,
        bad: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Selected:
        """Adds a signal to the memory and selects the coefficients to send.

        Args:
            bad: On a device that decides by itself, `[]` bool: where it is True zeros are selected,
                and the memory does not change.
            out: Where the values may go; new memory when left out.

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
        """`encode`, one block of rows after the other, which takes less memory."""
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
                known = None if shared is None else shared[target]
                picked = codec.pick(codec.basis.forward(block), known, out=values[target])
                assert picked.indices is not None
                indices[target] = narrow(picked.indices)
                if self._by_block and memory:
                    sent = self.of_one(picked.values, picked).whole()
                    memory.release([self.update(sent, Mean())])
                del block, picked  # before the next one is made
            del flat
        if bad is not None:
            values.masked_fill_(bad, 0.0)
        return Selected(values, indices)

    def _absorbed_parts(
        self, signals: Sequence[Tensor | None], bad: Tensor | None
    ) -> Iterator[tuple[int, Tensor, Memory | None]]:
        """The memory with a signal, or the signal alone, in parts of rows, each with its first row
        and its memory."""
        rows, at_once = (
            self.layout.rows,
            self._absorbed_rows if self.memory else self._selected_rows,
        )
        blocks = [Bucket.whole(self.layout)] if rows <= at_once or self.layout.tiled else None
        for block in blocks or (
            self._block(first, min(first + at_once, rows)) for first in range(0, rows, at_once)
        ):
            pieces = block.cut(signals)
            if self.memory is None:
                yield block.first, block.layout.flatten(pieces, self.device), None
            else:
                memory = self.memory if blocks else self.memory.of_rows(block.layout, block.first)
                yield block.first, memory.absorb(pieces, bad), memory

    def encode_into(
        self,
        run: MessageRows,
        signals: Sequence[Tensor | None],
        step: int,
        bad: Tensor | None = None,
    ) -> Selected:
        """`encode`, and writes the coefficients into `run`."""
        if (
            self._as_it_is
            and not run.owners
            and not any(s is not None and s.dtype == torch.float64 for s in signals)
        ):
            values = run.numbers
            assert values is not None
            self.layout.fill(values, signals)
            return Selected(values if bad is None else values.masked_fill_(bad, 0.0), None)
        # what the network adds up is still needed as it was, to release it
        fits = self.codec.precision == FP32 and not (run.is_summed or self.codec.dense)
        selected = self.encode(signals, step, bad, run.numbers if fits else None)
        self.codec.write(selected, run)
        return selected

    def inspector(self, buckets: int) -> SignalInspector:
        """An inspector of messages that leave in so many buckets."""
        return inspector_of(self._runtime)

    def own_message(self, run: MessageRows, selected: Selected) -> Received:
        """This replica's message as the only one that was received, as every receiver decodes it.

        It shares memory with `run`.
        """
        return self.of_one(self.codec.written(run), selected)

    def replier(
        self,
        answer: Codec,
        aggregation: Aggregation,
        residual: Tensor,
        owners: RowOwners,
        owner: int,
    ) -> Replier | None:
        """The engine of an owner, whose memory of coefficients is `residual`; None where ordinary
        torch answers.

        Shapes: residual `[owned, chunk]` fp32.
        """
        return None

    def _narrow(self, selected: Selected, bad: Tensor | None) -> Selected:
        """A selection without values that must not count, and with indices in the smallest type
        that holds them."""
        values, indices = selected.values, selected.indices
        if bad is not None:
            values = values.masked_fill(bad, 0.0)
        if isinstance(indices, Tensor):
            indices = indices.to(self.codec.index_coding.dtype)
        return Selected(values, indices)

    def empty(self, step: int) -> Selected:
        """The content of an empty message: zeros; the memory does not change.

        Shapes: -> values `[rows, k]`.
        """
        return self.codec.empty(self.layout.rows, step, self._seed, self.device)

    def release(self, selected: Selected, own: Tensor | None) -> None:
        """Removes the sent values from memory: `own`, as every receiver decodes them, or the
        selected coefficients.

        Shapes: own `[rows, k]` fp32.
        """
        if self.memory:
            sent = self.of_one(selected.values if self._exact or own is None else own, selected)
            self.subtract(sent.blocks(self._some))

    def of_one(self, values: Tensor, selected: Selected) -> Received:
        """A message with these values at the indices of `selected`, as the only one that was
        received.

        Shapes: `[rows, k]` fp32.
        """
        indices = selected.indices
        return DecodedMessages(
            values.unsqueeze(0), None if indices is None else narrow(indices).unsqueeze(0)
        )

    def decode(self, received: Received) -> Tensor:
        """The update in the coordinates of the parameters; its padding is undefined.

        Shapes: -> `[rows, chunk]` fp32.
        """
        if received.rows <= (
            self._some if self._on_cpu else self._decoded_at_once(received, into_flat=True)
        ):
            return self.update(received.read(0, received.rows), received.aggregation)
        flat, first = (
            torch.empty(
                self.layout.rows, self.layout.chunk, device=self.device, dtype=torch.float32
            ),
            0,
        )
        for part in self._decoded_parts(received):
            flat[first : first + len(part)] = part
            first += len(part)
            del part  # before the next one is made
        return flat

    def write(self, received: Received, targets: Sequence[Tensor]) -> None:
        """Decodes the update into `targets`."""
        at_once = self._some if self._on_cpu else self._decoded_at_once(received)
        if received.rows <= at_once and not self.layout.tiled:
            copy(
                targets,
                self.layout.views(
                    self.update(received.read(0, received.rows), received.aggregation)
                ),
            )
        elif self.layout.tiled:
            few = None if all(target.is_contiguous() for target in targets) else self.layout.rows
            for strip, part in self._decoded_tiles(received, few):
                copy(strip.cut(targets), strip.layout.parts(part))
                del part  # before the next one is made
        elif not all(target.is_contiguous() for target in targets):
            copy(targets, self.layout.parts(self.decode(received)))
        else:
            self.layout.scatter(self._decoded_parts(received), targets)

    def can_apply_signs(self, received: Received, weights: Sequence[Tensor]) -> bool:
        """True if `apply_signs` supports these messages and weights."""
        return all(w.dtype == torch.float32 and w.is_contiguous() for w in weights)

    def apply_signs(
        self, received: Received, weights: Sequence[Tensor], rates: Sequence[SignRate]
    ) -> None:
        """Moves `weights` by the signs of the update, which is never stored."""
        if self.layout.tiled:
            for strip, part in self._decoded_tiles(received):
                index = strip.pieces[0].index
                _move(strip.cut(weights), strip.layout.parts(part.sign_()), [rates[index]])
                del part  # before the next one is made
            return
        first = 0
        for part in self._decoded_parts(received):
            block, first = self._block(first, first + len(part)), first + len(part)
            may_be_message = isinstance(self.codec.basis, Identity) and isinstance(
                received.aggregation, Mean
            )
            # of one replica
            may_be_message &= self.codec.selection.k == self.layout.chunk >= received.width
            moved, signs = (
                block.cut(weights),
                block.layout.views(part.sign() if may_be_message else part.sign_()),
            )
            _move(moved, signs, [rates[piece.index] for piece in block.pieces])
            del block, part, signs  # before the next one is made

    def _decoded_tiles(
        self, received: Received, at_once: int | None = None
    ) -> Iterator[tuple[Bucket, Tensor]]:
        """The update in lines of tiles, parameter by parameter: a line ends anywhere in a block of
        rows."""
        for strip in Bucket.strips(self.layout, at_once or self._decoded_at_once(received)):
            yield (
                strip,
                self.update(received.part(strip.rows.start, strip.rows.stop), received.aggregation),
            )

    def _decoded_parts(self, received: Received) -> Iterator[Tensor]:
        """The update in blocks of rows."""
        some = self._decoded_at_once(received)
        # what owners sent costs launches to read, and is read in few parts
        read = some
        if self._room.few_launches and received.owners:
            read = received.rows if self.codec.selection.shared else -(-received.rows // READS)
        for block in received.blocks(some, read):
            decoded = self.update(block, received.aggregation)
            del block  # before the next one is read
            yield decoded
            del decoded

    def _decoded_at_once(self, received: Received, into_flat: bool = False) -> int:
        return (
            self._some
            if self._on_cpu
            else decoded_at_once(self.codec, received, self._room, into_flat)
        )


def _move(weights: Sequence[Tensor], signs: Sequence[Tensor], rates: Sequence[SignRate]) -> None:
    """Moves `weights` against `signs`, in an operation or two for all with the same rate."""
    for shrink, lr in dict.fromkeys(rates):
        same = [i for i, rate in enumerate(rates) if rate == (shrink, lr)]
        if shrink != 1:
            torch._foreach_mul_([weights[i] for i in same], shrink)
        torch._foreach_add_([weights[i] for i in same], [signs[i] for i in same], alpha=-lr)
