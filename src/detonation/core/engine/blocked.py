"""Blocked: DCT x top-k with memory by ordinary torch on a CPU, all done to some rows while they are in a cache."""

from collections.abc import Sequence
from functools import cache, partial

import torch
from torch import Tensor

from detonation.core.codec.aggregate import Agreed
from detonation.core.codec.basis import DCT
from detonation.core.codec.codec import Codec, Selected
from detonation.core.codec.indices import Packed
from detonation.core.codec.precision import Float
from detonation.core.compute.topk_cpu import Largest
from detonation.core.engine.reference import Plain
from detonation.core.flat.layout import Layout, copy
from detonation.core.memory import Memory
from detonation.core.schemes.buckets import Bucket
from detonation.kernels.native import Pace


class Blocked(Plain):
    """The steps of `Plain` in another order: it costs a CPU more to reach for memory than to compute."""

    def __init__(self, codec: Codec, layout: Layout, memory: Memory, device: torch.device, seed: int) -> None:
        super().__init__(codec, layout, memory, device, seed)
        assert isinstance(codec.basis, DCT)
        self._basis = codec.basis
        self._released_at_once = told_as_selected(codec, memory)
        firsts = range(0, layout.rows, self._some)
        self._blocks = [Bucket.of(layout, first, min(first + self._some, layout.rows)) for first in firsts]
        self._memories = [memory.part(block.layout, block.first) for block in self._blocks]

    def select(self, signals: Sequence[Tensor | None], step: int) -> Selected:
        values = torch.empty(self.layout.rows, self.codec.selection.kept)
        columns = torch.empty(values.shape, dtype=torch.uint8)
        finder = cache(partial(Largest, self.codec.selection.chunk, self.codec.selection.kept))  # not kept: megabytes
        for block, memory in zip(self._blocks, self._memories, strict=True):
            rows = slice(block.first, block.first + block.layout.rows)
            residual = memory.absorb(block.cut(signals))
            self._select(memory, residual, finder(block.layout.rows), values[rows], columns[rows])
        encoded = [self.codec.columns.encode(some) for some in torch.split(columns, 8 * self._some)]
        return Selected(values, Packed(self.codec.columns, torch.cat(encoded), self.layout.rows), owned=True)

    def _select(self, memory: Memory, residual: Tensor, finder: Largest, values: Tensor, columns: Tensor) -> None:
        """Fills in values and columns of what is told of some rows, and lets go of it."""
        lines = self._basis.lines(residual)
        found, places = finder.find(lines)
        torch.index_select(lines.view(-1), 0, places.view(-1), out=values.view(-1))
        columns.copy_(found)
        if self._released_at_once:
            memory.release([self._basis.spread(values, found, residual.shape[1])])

    def release(self, selected: Selected, read: Tensor) -> None:
        if not self._released_at_once:
            super().release(selected, read)

    def write(self, agreed: Agreed, targets: Sequence[Tensor]) -> None:
        if agreed.combine == "clipped" or not all(target.is_contiguous() for target in targets):
            super().write(agreed, targets)
            return
        for block, part in zip(self._blocks, self._parts(agreed), strict=False):
            copy(block.cut(targets), block.layout.views(part))

    def can_follow(self, agreed: Agreed, weights: Sequence[Tensor]) -> bool:
        return agreed.combine != "clipped" and all(w.dtype == torch.float32 and w.is_contiguous() for w in weights)

    def follow(self, agreed: Agreed, weights: Sequence[Tensor], paces: Sequence[Pace]) -> None:
        for block, part in zip(self._blocks, self._parts(agreed), strict=False):
            mine = [paces[piece.index] for piece in block.pieces]
            moved, signs = block.cut(weights), block.layout.views(part.sign_())
            for shrink, lr in dict.fromkeys(mine):
                same = [i for i, pace in enumerate(mine) if pace == (shrink, lr)]
                if shrink != 1:
                    torch._foreach_mul_([moved[i] for i in same], shrink)
                torch._foreach_add_([moved[i] for i in same], [signs[i] for i in same], alpha=-lr)


def told_as_selected(codec: Codec, memory: Memory) -> bool:
    """Whether what goes out of memory is known when it is selected: the others read it as it is, or all of it goes."""
    return codec.precision == Float(torch.float32) or memory.feedback.error == "drop"
