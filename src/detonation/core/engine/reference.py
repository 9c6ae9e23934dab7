"""The reference engine: the arithmetic of one replica's step in ordinary torch, the standard for all other engines."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial

import torch
from torch import Tensor

from detonation.core.codec.aggregate import Aggregation, Coefficients, Mean, Received, aggregate
from detonation.core.codec.basis import DCT, Identity
from detonation.core.codec.codec import Codec, Selected
from detonation.core.codec.form import MessageForm
from detonation.core.codec.indices import narrow
from detonation.core.codec.precision import FP32
from detonation.core.compute.kernel_library import SignRate
from detonation.core.flat.layout import CACHE_BLOCK, Layout, copy
from detonation.core.flat.rows import Bucket
from detonation.core.memory import Memory
from detonation.core.runtime import Runtime


class ReferenceEngine:
    """Encodes signals, releases memory and decodes messages in ordinary torch, on any device."""

    name = "torch"
    reads_status = False
    """True if `bad` may be a status (see `Header`), because no operation then makes one of the other."""

    def __init__(
        self, codec: Codec, layout: Layout, memory: Memory | None, runtime: Runtime, block_rows: int = 0
    ) -> None:
        self.codec, self.layout, self.memory = codec, layout, memory
        self.device, self._seed = runtime.device, runtime.seed
        on_cpu = runtime.device.type == "cpu"
        cached = max(8, CACHE_BLOCK // codec.selection.chunk // 8 * 8)
        self._some = cached if on_cpu else block_rows or max(1, layout.rows)  # rows that are worked on at once
        if layout.tiled and not on_cpu:  # the two products of a tile hold four times as much
            self._some = -(-self._some // 4)
        self._block = cache(partial(Bucket.of, layout))  # messages cannot be cut everywhere
        self._few = 0 if on_cpu else codec.selection.chunk // 4  # coefficients of a row that are read at once
        # whether the part that leaves memory is known at selection: the others read it exactly, or all of it leaves
        self._exact = codec.precision == FP32 or not (memory and memory.feedback.error_feedback)
        self.needs_own_values = not self._exact
        """True if `release` needs the sent values as every receiver decodes them."""
        self.releases_at_once = memory is None
        """True if `encode` already removes the sent values from memory, so that `release` has nothing to do."""

    def encode(self, signals: Sequence[Tensor | None], step: int, bad: Tensor | None = None) -> Selected:
        """Adds a signal to the memory and selects the coefficients to send.

        Args:
            bad: On a device that decides by itself, `[]` bool: where it is True zeros are selected, and the memory does
                not change.

        Shapes: one local shape per parameter -> values `[rows, k]`.
        """
        flat = self.memory.absorb(signals, bad) if self.memory else self.layout.flatten(signals, self.device)
        blocks = [flat] if self.codec.selection.shared or not len(flat) else torch.split(flat, self._some)
        selected = [self._narrow(self.codec.select(block, step, self._seed), bad) for block in blocks]
        if len(selected) == 1:
            return selected[0]
        indices = torch.cat([narrow(each.indices) for each in selected if each.indices is not None])
        return Selected(torch.cat([each.values for each in selected]), indices, owned=True)

    def encode_into(
        self,
        form: Callable[[], MessageForm | None],
        signals: Sequence[Tensor | None],
        step: int,
        bad: Tensor | None = None,
    ) -> Selected:
        """`encode`, for an engine that writes the message itself: in the form that `form` makes, unless that is None.

        Shapes: one local shape per parameter.
        """
        return self.encode(signals, step, bad)

    def scan(self, signals: Sequence[Tensor | None], numbers: Sequence[int], found: Tensor | None = None) -> Tensor:
        """For an engine that reads a status: the status of signals with these rising `numbers`; see `Scanner.scan`.

        Shapes: one local shape per parameter -> `[n]` int64.
        """
        raise NotImplementedError

    def own_message(self, selected: Selected, own: Tensor | None) -> Received:
        """This replica's message as the only one that was received: `own` are its values as receivers decode them.

        Shapes: own `[rows, k]` fp32; None for a message that this engine wrote.
        """
        assert own is not None
        return self.of_one(own, selected)

    def _narrow(self, selected: Selected, bad: Tensor | None) -> Selected:
        """A selection without values that must not count, and with indices in the smallest type that holds them."""
        values, indices, owned = selected.values, selected.indices, selected.owned
        if bad is not None:
            values, owned = values.masked_fill(bad, 0.0), True
        if isinstance(indices, Tensor):
            indices = indices.to(self.codec.index_coding.dtype)
        return Selected(values, indices, owned)

    def empty(self, step: int) -> Selected:
        """The content of an empty message: zeros; the memory does not change.

        Shapes: -> values `[rows, k]`.
        """
        return self.codec.empty(self.layout.rows, step, self._seed, self.device)

    def release(self, selected: Selected, own: Tensor | None) -> None:
        """Removes the sent values from memory: `own`, as every receiver decodes them, or the selected coefficients.

        Shapes: own `[rows, k]` fp32.
        """
        if self.memory:
            sent = self.of_one(selected.values if self._exact or own is None else own, selected)
            self.memory.release(self._decoded_parts(sent))

    def of_one(self, values: Tensor, selected: Selected) -> Received:
        """A message with these values at the indices of `selected`, as the only one that was received.

        Shapes: `[rows, k]` fp32.
        """
        indices = selected.indices
        return Received.of(values.unsqueeze(0), None if indices is None else narrow(indices).unsqueeze(0))

    def decode(self, received: Received) -> Tensor:
        """The update in the coordinates of the parameters; its padding is undefined.

        Shapes: -> `[rows, chunk]` fp32.
        """
        if received.rows <= self._some:
            return self._decoded(received.whole(), received.aggregation)
        flat, first = torch.empty(self.layout.rows, self.layout.chunk, device=self.device, dtype=torch.float32), 0
        for part in self._decoded_parts(received):
            flat[first : first + len(part)] = part
            first += len(part)
            del part  # before the next one is made
        return flat

    def write(self, received: Received, targets: Sequence[Tensor]) -> None:
        """Decodes the update into `targets`.

        Shapes: one local shape per parameter.
        """
        if self.layout.tiled:
            for slot, target, part in zip(self.layout.slots, targets, self._decoded_tiles(received), strict=True):
                copy([target], self.layout.only(slot).parts(part))
                del part  # before the next one is made
        elif not all(target.is_contiguous() for target in targets):
            copy(targets, self.layout.parts(self.decode(received)))
        else:
            self.layout.scatter(self._decoded_parts(received), targets)

    def can_apply_signs(self, received: Received, weights: Sequence[Tensor]) -> bool:
        """True if `apply_signs` supports these messages and weights.

        Shapes: one local shape per parameter.
        """
        return all(w.dtype == torch.float32 and w.is_contiguous() for w in weights)

    def apply_signs(self, received: Received, weights: Sequence[Tensor], rates: Sequence[SignRate]) -> None:
        """Moves `weights` by the signs of the update, which is never stored.

        Shapes: one local shape per parameter.
        """
        if self.layout.tiled:
            for slot, weight, rate, part in zip(
                self.layout.slots, weights, rates, self._decoded_tiles(received), strict=True
            ):
                _move([weight], self.layout.only(slot).parts(part.sign_()), [rate])
                del part  # before the next one is made
            return
        for block, part in self._decoded_blocks(received):
            may_be_message = isinstance(self.codec.basis, Identity) and self.codec.selection.k == self.layout.chunk
            moved, signs = block.cut(weights), block.layout.views(part.sign() if may_be_message else part.sign_())
            _move(moved, signs, [rates[piece.index] for piece in block.pieces])
            del block, part, signs  # before the next one is made

    def _decoded_blocks(self, received: Received) -> Iterator[tuple[Bucket, Tensor]]:
        """The update in blocks of rows, each with the pieces of parameters that lie in it."""
        first = 0
        for part in self._decoded_parts(received):
            yield self._block(first, first + len(part)), part
            first += len(part)
            del part  # before the next one is made

    def _decoded_tiles(self, received: Received) -> Iterator[Tensor]:
        """The update parameter by parameter: a line of tiles ends anywhere in a block of rows."""
        read = received.whole().part if 0 < received.width <= self._few else received.part
        for slot in self.layout.slots:
            yield self._decoded(read(slot.row, slot.row + slot.rows), received.aggregation)

    def _decoded_parts(self, received: Received) -> Iterable[Tensor]:
        """The update in blocks of rows."""
        blocks = received.blocks(self._some, self._few)
        return (self._decoded(block, received.aggregation) for block in blocks)

    def _decoded(self, sent: Coefficients, aggregation: Aggregation) -> Tensor:
        chunk = self.codec.selection.chunk
        if isinstance(self.codec.basis, DCT) and isinstance(aggregation, Mean) and sent.is_sparse(chunk):
            return self.codec.basis.inverse_sparse(*sent.joined(), chunk)
        return self.codec.basis.inverse(aggregate(sent, aggregation, chunk))


def _move(weights: Sequence[Tensor], signs: Sequence[Tensor], rates: Sequence[SignRate]) -> None:
    """Moves `weights` against `signs`, in an operation or two for all with the same rate."""
    for shrink, lr in dict.fromkeys(rates):
        same = [i for i, rate in enumerate(rates) if rate == (shrink, lr)]
        if shrink != 1:
            torch._foreach_mul_([weights[i] for i in same], shrink)
        torch._foreach_add_([weights[i] for i in same], [signs[i] for i in same], alpha=-lr)
