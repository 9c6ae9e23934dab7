"""Engines: the arithmetic of one replica's step, plain or compiled, under the same laws."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from detonation.core.basis import DCT
from detonation.core.codec import Codec, Selected
from detonation.core.columns import Packed, numbers
from detonation.core.combine import Agreed, combined
from detonation.core.flat import BLOCK, Layout, copy
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
        self._some = max(8, BLOCK // codec.selection.chunk // 8 * 8)  # rows

    def select(self, signals: Sequence[Tensor | None], step: int) -> Selected:
        """Takes in a signal and selects what to tell of it."""
        flat = self.memory.absorb(signals) if self.memory else self.layout.flatten(signals, self._device)
        if self.codec.selection.shared or self._device.type != "cpu" or not len(flat):
            return self.codec.select(flat, step, self._seed)
        blocks = [self.codec.select(block, step, self._seed) for block in torch.split(flat, self._some)]
        columns = torch.cat([numbers(block.columns) for block in blocks if block.columns is not None])
        return Selected(torch.cat([block.values for block in blocks]), columns, owned=True)

    def silence(self, step: int) -> Selected:
        """What is selected where there is nothing to tell: zeros, and the memory stays as it is."""
        return self.codec.silence(self.layout.rows, step, self._seed, self._device)

    def release(self, selected: Selected, read: Tensor) -> None:
        """Takes out of memory what was told: what everyone reads, or the selected coefficients themselves."""
        if self.memory:
            out = selected.values if self.memory.feedback.error == "drop" else read
            self.memory.release(self._parts(Agreed.one(out, selected.columns)))

    def update(self, agreed: Agreed) -> Tensor:
        """What was agreed on, in the coordinates of the parameters; the padding means nothing."""  # [rows, chunk]
        parts = list(self._parts(agreed))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _parts(self, agreed: Agreed) -> Iterator[Tensor]:
        """The same, some rows at a time: on a CPU it costs more to reach for memory than to compute."""
        own = not self.codec.selection.shared and agreed.combine != "clipped"  # whose norms are of all rows
        if own and self._device.type == "cpu" and self.layout.rows:
            return map(self._decoded, agreed.split(self._some))
        return iter([self._decoded(agreed)])

    def _decoded(self, agreed: Agreed) -> Tensor:
        chunk = self.codec.selection.chunk
        if isinstance(self.codec.basis, DCT) and agreed.sparse(chunk):
            values, columns = agreed.together()
            return self.codec.basis.spread(values, columns, chunk)
        return self.codec.basis.inverse(combined(agreed, chunk))

    def write(self, agreed: Agreed, targets: Sequence[Tensor]) -> None:
        """Makes `targets`, one tensor a parameter in its local shape, what was agreed on."""
        if self.layout.tiled or not all(target.is_contiguous() for target in targets):
            copy(targets, self.layout.parts(self.update(agreed)))
        else:
            self.layout.spread(self._parts(agreed), targets)

    def can_follow(self, agreed: Agreed, weights: Sequence[Tensor]) -> bool:
        """Whether `follow` can be called with these."""
        return False

    def follow(self, agreed: Agreed, weights: Sequence[Tensor], paces: Sequence[native.Pace]) -> None:
        """Moves `weights`, one a parameter, by the signs of what was agreed on, which is itself not written down."""
        raise NotImplementedError


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
    fits = isinstance(codec.basis, DCT) and isinstance(codec.selection, TopK) and codec.selection.chunk in native.CHUNKS
    if kernels and fits and memory is not None and device.type == "cpu":
        library = native.load()
        if library is not None:
            return Native(library, codec, layout, memory, device, seed)
    return Plain(codec, layout, memory, device, seed)
