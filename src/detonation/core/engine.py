"""Engines: the arithmetic of one replica's step, plain or compiled, under the same laws."""

from collections.abc import Sequence

import torch
from torch import Tensor

from detonation.core.basis import DCT
from detonation.core.codec import Codec, Selected
from detonation.core.columns import Packed
from detonation.core.combine import Agreed, combined
from detonation.core.flat import Layout, copy
from detonation.core.memory import Memory
from detonation.core.precision import Float
from detonation.core.selection import TopK
from detonation.kernels import native


class Plain:
    """Ordinary torch, on any device: the reference."""

    name = "torch"

    def __init__(self, codec: Codec, layout: Layout, memory: Memory | None, device: torch.device, seed: int) -> None:
        self.codec, self.layout, self.memory = codec, layout, memory
        self._device, self._seed = device, seed

    def select(self, signals: Sequence[Tensor | None], step: int) -> Selected:
        """Takes in a signal and selects what to tell of it."""
        flat = self.memory.absorb(signals) if self.memory else self.layout.flatten(signals, self._device)
        return self.codec.select(flat, step, self._seed)

    def silence(self, step: int) -> Selected:
        """What is selected where there is nothing to tell: zeros, and the memory stays as it is."""
        return self.codec.silence(self.layout.rows, step, self._seed, self._device)

    def release(self, selected: Selected, read: Tensor) -> None:
        """Takes out of memory what was told: what everyone reads, or the selected coefficients themselves."""
        if self.memory:
            out = selected.values if self.memory.feedback.error == "drop" else read
            self.memory.release(self.update(Agreed.one(out, selected.columns)))

    def update(self, agreed: Agreed) -> Tensor:
        """What was agreed on, in the coordinates of the parameters; the padding means nothing."""  # [rows, chunk]
        chunk = self.codec.selection.chunk
        if isinstance(self.codec.basis, DCT) and agreed.sparse(chunk):
            values, columns = agreed.together()
            return self.codec.basis.spread(values, columns, chunk)
        return self.codec.basis.inverse(combined(agreed, chunk))

    def write(self, agreed: Agreed, targets: Sequence[Tensor]) -> None:
        """Makes `targets`, one tensor a parameter in its local shape, what was agreed on."""
        copy(targets, self.layout.parts(self.update(agreed)))


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
        # where the others read the coefficients as they are, what was told can go in the same pass
        exact = codec.precision == Float(torch.float32) or memory.feedback.error == "drop"
        self._released_at_once = memory.feedback.alpha if exact else 0.0

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
        return Selected(values, Packed(self.codec.columns, columns, self.layout.rows))

    def release(self, selected: Selected, read: Tensor) -> None:
        if not self._released_at_once and selected.columns is not None:
            alpha, columns = self._memory.feedback.alpha, self.codec.columns.encode(selected.columns)
            self._library.release(self._memory.residual, self._numel, alpha, read.contiguous(), columns, self._width)

    def update(self, agreed: Agreed) -> Tensor:
        flat = self.layout.zeros(self._device)
        self.write(agreed, self.layout.views(flat))
        return flat

    def write(self, agreed: Agreed, targets: Sequence[Tensor]) -> None:
        if agreed.combine not in ("replicas", "senders"):
            copy(targets, self.layout.views(super().update(agreed)))
            return
        columns = [self.codec.columns.encode(c).contiguous() for c in agreed.columns if c is not None]
        values = [v.contiguous() for v in agreed.values]
        # by way of a copy where one must be converted: so no parameter's bits depend on what others are like
        odd = [i for i, t in enumerate(targets) if t.dtype != torch.float32 or not t.is_contiguous()]
        decoded = list(targets)
        for i in odd:
            decoded[i] = torch.empty(targets[i].shape)
        chunk, senders = self.codec.selection.chunk, agreed.combine == "senders"
        self._library.decode(decoded, chunk, values, columns, self._width, senders)
        copy([targets[i] for i in odd], [decoded[i] for i in odd])


def engine_for(
    codec: Codec, layout: Layout, memory: Memory | None, device: torch.device, seed: int, kernels: bool
) -> Plain:
    """The fastest engine that can do it; the plain one where `kernels` are not wanted or cannot be built."""
    fits = isinstance(codec.basis, DCT) and isinstance(codec.selection, TopK) and codec.selection.chunk in native.CHUNKS
    if kernels and fits and memory is not None and device.type == "cpu":
        library = native.load()
        if library is not None:
            return Native(library, codec, layout, memory, device, seed)
    return Plain(codec, layout, memory, device, seed)
