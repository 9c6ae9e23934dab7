"""The reference engine: the arithmetic of one replica's step in ordinary torch, the standard for all other engines."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from detonation.core.codec.aggregate import Received, aggregate
from detonation.core.codec.basis import DCT
from detonation.core.codec.codec import Codec, Selected
from detonation.core.codec.indices import as_int64
from detonation.core.codec.precision import Float
from detonation.core.compute.kernel_library import SignRate
from detonation.core.flat.layout import CACHE_BLOCK, Layout, copy
from detonation.core.memory import Memory
from detonation.core.runtime import Runtime


class ReferenceEngine:
    """Encodes signals, releases memory and decodes messages in ordinary torch, on any device."""

    name = "torch"

    def __init__(self, codec: Codec, layout: Layout, memory: Memory | None, runtime: Runtime) -> None:
        self.codec, self.layout, self.memory = codec, layout, memory
        self.device, self._seed = runtime.device, runtime.seed
        self._some = max(8, CACHE_BLOCK // codec.selection.chunk // 8 * 8)  # rows
        # whether the part that leaves memory is known at selection: the others read it exactly, or all of it leaves
        self._exact = codec.precision == Float(torch.float32) or not (memory and memory.feedback.error_feedback)
        self.needs_own_values = not self._exact
        """True if `release` needs the sent values as every receiver decodes them."""
        self.releases_at_once = memory is None
        """True if `encode` already removes the sent values from memory, so that `release` has nothing to do."""

    def encode(self, signals: Sequence[Tensor | None], step: int, finite: Tensor | None = None) -> Selected:
        """Adds a signal to the memory and selects the coefficients to send.

        Args:
            finite: On a device that decides by itself, `[]` bool: where it is False zeros are selected, and the memory
                does not change.

        Shapes: one local shape per parameter -> values `[rows, k]`.
        """
        flat = self.memory.absorb(signals, finite) if self.memory else self.layout.flatten(signals, self.device)
        if finite is not None:
            selected = self.codec.select(flat, step, self._seed)
            return Selected(selected.values.masked_fill(finite.logical_not(), 0.0), selected.indices, owned=True)
        if self.codec.selection.shared or self.device.type != "cpu" or not len(flat):
            return self.codec.select(flat, step, self._seed)
        blocks = [self.codec.select(block, step, self._seed) for block in torch.split(flat, self._some)]
        indices = torch.cat(as_int64([block.indices for block in blocks if block.indices is not None]))
        return Selected(torch.cat([block.values for block in blocks]), indices, owned=True)

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
            out = selected.values if self._exact or own is None else own
            self.memory.release(self._decoded_parts(Received([out], [selected.indices])))

    def decode(self, received: Received) -> Tensor:
        """The update in the coordinates of the parameters; its padding is undefined.

        Shapes: -> `[rows, chunk]` fp32.
        """
        parts = list(self._decoded_parts(received))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def write(self, received: Received, targets: Sequence[Tensor]) -> None:
        """Decodes the update into `targets`.

        Shapes: one local shape per parameter.
        """
        if self.layout.tiled or not all(target.is_contiguous() for target in targets):
            copy(targets, self.layout.parts(self.decode(received)))
        else:
            self.layout.scatter(self._decoded_parts(received), targets)

    def can_apply_signs(self, received: Received, weights: Sequence[Tensor]) -> bool:
        """True if `apply_signs` supports these messages and weights.

        Shapes: one local shape per parameter.
        """
        return False

    def apply_signs(self, received: Received, weights: Sequence[Tensor], rates: Sequence[SignRate]) -> None:
        """Moves `weights` by the signs of the update, which is never stored.

        Shapes: one local shape per parameter.
        """
        raise NotImplementedError

    def _decoded_parts(self, received: Received) -> Iterable[Tensor]:
        """The update in blocks of rows: on a CPU, memory access costs more than arithmetic."""
        own_indices = not self.codec.selection.shared and received.aggregation.rowwise
        if own_indices and self.device.type == "cpu" and self.layout.rows:
            return map(self._decoded, received.split(self._some))
        return [self._decoded(received)]

    def _decoded(self, received: Received) -> Tensor:
        chunk = self.codec.selection.chunk
        if isinstance(self.codec.basis, DCT) and received.is_sparse_mean(chunk):
            values, indices = received.concatenated()
            return self.codec.basis.inverse_sparse(values, indices, chunk)
        return self.codec.basis.inverse(aggregate(received, chunk))
