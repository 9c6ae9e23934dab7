"""The blocked engine: DCT x top-k with memory in ordinary torch on a CPU, block by block within a cache."""

from collections.abc import Sequence
from functools import cache, partial

import torch
from torch import Tensor

from detonation.core.codec.aggregate import Received
from detonation.core.codec.basis import DCT
from detonation.core.codec.codec import Codec, Selected
from detonation.core.codec.indices import PackedIndices
from detonation.core.codec.selection import TopK
from detonation.core.compute.topk_cpu import TOPK_CHUNKS, TopKFinder
from detonation.core.engine.reference import ReferenceEngine
from detonation.core.flat.layout import Layout, copy
from detonation.core.memory import Memory
from detonation.core.runtime import Runtime


class BlockedEngine(ReferenceEngine):
    """The operations of `ReferenceEngine` block by block: a CPU computes faster than it accesses memory."""

    def __init__(self, codec: Codec, layout: Layout, memory: Memory, runtime: Runtime, block_rows: int = 0) -> None:
        super().__init__(codec, layout, memory, runtime)
        assert isinstance(codec.basis, DCT)
        self._basis, self.releases_at_once = codec.basis, self._exact
        firsts = range(0, layout.rows, self._some)
        self._blocks = [self._block(first, min(first + self._some, layout.rows)) for first in firsts]
        self._memories = [memory.of_rows(block.layout, block.first) for block in self._blocks]

    def encode(
        self, signals: Sequence[Tensor | None], step: int, bad: Tensor | None = None, out: Tensor | None = None
    ) -> Selected:
        k, coding = self.codec.selection.k, self.codec.index_coding
        values = torch.empty(self.layout.rows, k, dtype=torch.float32, device="cpu") if out is None else out
        indices = torch.empty(values.shape, dtype=torch.uint8, device="cpu")
        finder = cache(partial(TopKFinder, self.codec.selection.chunk, k))  # made anew each step: megabytes
        for block, memory in zip(self._blocks, self._memories, strict=True):
            residual, some = memory.absorb(block.cut(signals)), values[block.rows]
            lines = self._basis.forward_lines(residual)
            found, places = finder(block.layout.rows).find(lines)
            torch.index_select(lines.view(-1), 0, places.view(-1), out=some.view(-1))
            indices[block.rows].copy_(found)
            if self._exact:
                memory.release([self._basis.inverse_sparse(some, found, residual.shape[1])])
        encoded = torch.cat([coding.encode(some) for some in torch.split(indices, 8 * self._some)])
        return Selected(values, PackedIndices(coding, encoded, self.layout.rows))

    def write(self, received: Received, targets: Sequence[Tensor]) -> None:
        if not all(target.is_contiguous() for target in targets):
            super().write(received, targets)
            return
        for block, part in self._decoded_blocks(received):
            copy(block.cut(targets), block.layout.views(part))


def blocked_engine(codec: Codec, layout: Layout, memory: Memory | None, runtime: Runtime) -> BlockedEngine | None:
    """The engine for DCT x top-k with memory on a CPU; None for all else."""
    fits = memory is not None and isinstance(codec.basis, DCT) and type(codec.selection) is TopK
    if memory is None or not fits or runtime.decides_on_device or codec.selection.chunk not in TOPK_CHUNKS:
        return None
    return BlockedEngine(codec, layout, memory, runtime)
