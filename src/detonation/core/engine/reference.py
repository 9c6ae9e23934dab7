"""Plain: the arithmetic of one replica's step in ordinary torch, the reference that other engines are held to."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from detonation.core.codec.aggregate import Agreed, combined
from detonation.core.codec.basis import DCT
from detonation.core.codec.codec import Codec, Selected
from detonation.core.codec.indices import numbers
from detonation.core.flat.layout import BLOCK, Layout, copy
from detonation.core.memory import Memory
from detonation.kernels.native import Pace


class Plain:
    """Ordinary torch, on any device."""

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

    def select_where(self, fine: Tensor, signals: Sequence[Tensor | None], step: int) -> Selected:
        """The same where `fine` (`[]` bool) says so; else zeros, and the memory stays as it is. Nobody waits for it."""
        flat = self.memory.absorb_where(fine, signals) if self.memory else self.layout.flatten(signals, self._device)
        selected = self.codec.select(flat, step, self._seed)
        return Selected(selected.values.masked_fill(fine.logical_not(), 0.0), selected.columns, owned=True)

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

    def follow(self, agreed: Agreed, weights: Sequence[Tensor], paces: Sequence[Pace]) -> None:
        """Moves `weights`, one a parameter, by the signs of what was agreed on, which is itself not written down."""
        raise NotImplementedError
