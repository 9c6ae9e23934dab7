"""Engines: the arithmetic of one replica's step, plain, in blocks or compiled, under the same laws."""

from collections.abc import Sequence

import torch
from torch import Tensor

from detonation.core.codec.aggregate import Agreed
from detonation.core.codec.basis import DCT
from detonation.core.codec.codec import Codec, Selected
from detonation.core.codec.indices import Packed
from detonation.core.codec.selection import TopK
from detonation.core.compute.topk_cpu import CHUNKS
from detonation.core.engine.blocked import Blocked, told_as_selected
from detonation.core.engine.reference import Plain
from detonation.core.flat.layout import Layout, copy
from detonation.core.integrity import readback
from detonation.core.memory import Memory
from detonation.kernels import native

_MEANS = ("replicas", "senders")


class Native(Plain):
    """DCT x top-k with memory, on the CPU: one pass over the memory to encode, one over the update to decode."""

    def __init__(
        self, library: native.Library, codec: Codec, layout: Layout, memory: Memory, device: torch.device, seed: int
    ) -> None:
        super().__init__(codec, layout, memory, device, seed)
        self.name = library.name
        self._library, self._memory = library, memory
        self._numel = [slot.numel for slot in layout.slots]
        self._width = 0 if codec.columns.bitmap else codec.columns.width
        self._released_at_once = memory.feedback.alpha if told_as_selected(codec, memory) else 0.0

    def select(self, signals: Sequence[Tensor | None], step: int) -> Selected:
        gradients = [None if s is None or not s.numel() else s.to(torch.float32).contiguous() for s in signals]
        values, columns = self._library.encode(
            self._memory.residual,
            gradients,
            self._numel,
            self._memory.feedback.decay,
            self._released_at_once,
            self.codec.selection.kept,
            self._width,
            self.codec.columns.nbytes(self.layout.rows),
        )
        return Selected(values, Packed(self.codec.columns, columns, self.layout.rows), owned=True)

    def release(self, selected: Selected, read: Tensor) -> None:
        if not self._released_at_once and selected.columns is not None:
            alpha, columns = self._memory.feedback.alpha, self.codec.columns.encode(selected.columns)
            self._library.release(self._memory.residual, self._numel, alpha, read.contiguous(), columns, self._width)

    def update(self, agreed: Agreed) -> Tensor:
        flat = self.layout.zeros(self._device)
        self.write(agreed, self.layout.views(flat))
        return flat

    def write(self, agreed: Agreed, targets: Sequence[Tensor]) -> None:
        if agreed.combine not in _MEANS:
            copy(targets, self.layout.views(super().update(agreed)))
            return
        # by way of a copy where one must be converted: so no parameter's bits depend on what others are like
        odd = [i for i, t in enumerate(targets) if t.dtype != torch.float32 or not t.is_contiguous()]
        decoded = list(targets)
        for i in odd:
            decoded[i] = torch.empty(targets[i].shape)
        self._decode(agreed, decoded)
        copy([targets[i] for i in odd], [decoded[i] for i in odd])

    def can_follow(self, agreed: Agreed, weights: Sequence[Tensor]) -> bool:
        return agreed.combine in _MEANS and all(w.dtype == torch.float32 and w.is_contiguous() for w in weights)

    def follow(self, agreed: Agreed, weights: Sequence[Tensor], paces: Sequence[native.Pace]) -> None:
        self._decode(agreed, weights, paces)

    def _decode(self, agreed: Agreed, tensors: Sequence[Tensor], paces: Sequence[native.Pace] | None = None) -> None:
        columns = [self.codec.columns.encode(c).contiguous() for c in agreed.columns if c is not None]
        values = [v.contiguous() for v in agreed.values]
        chunk, senders = self.codec.selection.chunk, agreed.combine == "senders"
        self._library.decode(tensors, chunk, values, columns, self._width, senders, paces)


def engine_for(
    codec: Codec, layout: Layout, memory: Memory | None, device: torch.device, seed: int, kernels: bool
) -> Plain:
    """The fastest engine that can do it; the plain one where `kernels` are not wanted or cannot be built."""
    fits = isinstance(codec.basis, DCT) and isinstance(codec.selection, TopK)
    if memory is None or not fits or readback.late(device):
        return Plain(codec, layout, memory, device, seed)
    library = native.load() if kernels and codec.selection.chunk in native.CHUNKS else None
    if library is not None:
        return Native(library, codec, layout, memory, device, seed)
    if codec.selection.chunk in CHUNKS:
        return Blocked(codec, layout, memory, device, seed)
    return Plain(codec, layout, memory, device, seed)
