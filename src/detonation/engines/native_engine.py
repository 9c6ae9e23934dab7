"""The native engine, whose kernels are compiled for the CPU."""

import ctypes
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from detonation.core.codec import (
    DCT,
    FP32,
    Arrived,
    Codec,
    Mean,
    MeanNonzero,
    MessageRows,
    PackedIndices,
    Received,
    Selected,
    Sign,
    TopK,
    dct_waves,
)
from detonation.core.compute.kernel_library import KERNEL_CHUNKS, Library, SignRate, load_library
from detonation.core.compute.scatter_sum import most_summed
from detonation.core.engine import ReferenceEngine, Room
from detonation.core.flat.layout import Layout, copy
from detonation.core.memory import Memory
from detonation.core.runtime import Runtime


class NativeEngine(ReferenceEngine):
    """The engine on a CPU for DCT and top-k selection with a memory of unsent values. Encoding
    passes over this memory once, and decoding passes over the update once.
    """

    def __init__(
        self, library: Library, codec: Codec, layout: Layout, memory: Memory, runtime: Runtime
    ) -> None:
        super().__init__(codec, layout, memory, runtime)
        self.name = library.name
        self._library = library
        self._memory = memory
        self._numel = (ctypes.c_int64 * len(layout.slots))(*[slot.numel for slot in layout.slots])
        self._coding = codec.index_coding
        self._width = 0
        if not self._coding.bitmap:
            self._width = self._coding.width
        self._index_bytes = self._coding.nbytes(layout.rows)
        self.releases_at_once = self._exact
        self._released_share = 0.0
        if self._exact:
            self._released_share = memory.feedback.alpha
        self._waves = dct_waves(codec.selection.chunk, self.device)
        self._most_summed = most_summed(codec.selection.chunk)

    def encode(
        self,
        signals: Sequence[Tensor | None],
        step: int,
        bad: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Selected:
        return self._encoded(signals, None)

    def encode_into(
        self,
        run: MessageRows,
        signals: Sequence[Tensor | None],
        step: int,
        bad: Tensor | None = None,
    ) -> Selected:
        precision = self.codec.precision
        if run.owners is None and (precision == FP32 or isinstance(precision, Sign)):
            return self._encoded(signals, run)
        selected = self._encoded(signals, None)
        self.codec.write(selected, run)
        return selected

    def _encoded(self, signals: Sequence[Tensor | None], run: MessageRows | None) -> Selected:
        """Adds gradients to the memory of unsent values, and writes the selected coefficients to
        the message rows `run`. If `run` is None, writes them to new tensors.
        """
        k = self.codec.selection.k
        rows = self.layout.rows
        statistics: Tensor | None = None
        negative_zeros = False
        if run is None:
            values = torch.empty(rows, k, dtype=torch.float32, device="cpu")
            indices = torch.empty(self._index_bytes, dtype=torch.uint8, device="cpu")
        else:
            values, *others, indices = (part[0] for part in run.parts)
            negative_zeros = run.negative_zeros
            if others:
                (statistics,) = others
            else:
                values = values.view(torch.float32).view(run.rows, k)
        read: list[Tensor | None] = []
        for signal in signals:
            if signal is None or not signal.numel():
                read.append(None)
            else:
                read.append(signal.to(torch.float32).contiguous())
        self._library.encode(
            self._memory.residual,
            read,
            self._numel,
            self._memory.feedback.decay,
            self._released_share,
            self._width,
            self._waves,
            k,
            values,
            statistics,
            negative_zeros,
            indices,
        )
        # a message with statistics of blocks has codes, so there are no values to return
        if statistics is not None:
            values = torch.empty(rows, 0, dtype=torch.float32, device="cpu")
        return Selected(values, PackedIndices(self._coding, indices, rows))

    def release(self, selected: Selected, own: Tensor | None) -> None:
        if own is not None and selected.indices is not None:
            alpha = self._memory.feedback.alpha
            indices = self._coding.encode(selected.indices)
            few = own.shape[1] <= self._most_summed
            self._library.release(
                self._memory.residual,
                self._numel,
                alpha,
                own.contiguous(),
                indices,
                self._width,
                few,
                self._waves,
            )

    def decode(self, received: Received) -> Tensor:
        flat = self.layout.zeros(self.device)
        self.write(received, self.layout.views(flat))
        return flat

    def write(self, received: Received, targets: Sequence[Tensor]) -> None:
        if not isinstance(received.aggregation, Mean | MeanNonzero):
            super().write(received, targets)
            return
        # targets that are not contiguous fp32 tensors are written through a copy
        odd = [
            i for i, t in enumerate(targets) if t.dtype != torch.float32 or not t.is_contiguous()
        ]
        decoded = list(targets)
        for i in odd:
            decoded[i] = torch.empty(targets[i].shape, dtype=torch.float32, device="cpu")
        self._decode(received, decoded)
        copy([targets[i] for i in odd], [decoded[i] for i in odd])

    def sign_mover(
        self, received: Received, weights: Sequence[Tensor]
    ) -> Callable[[Sequence[SignRate]], object] | None:
        plain = all(w.dtype == torch.float32 and w.is_contiguous() for w in weights)
        if plain and isinstance(received.aggregation, Mean | MeanNonzero):
            return partial(self._decode, received, weights)
        return None

    def _decode(
        self,
        received: Received,
        weights: Sequence[Tensor],
        rates: Sequence[SignRate] | None = None,
    ) -> None:
        """Moves `weights` by the signs of the update. Without `rates`, writes the update itself to
        `weights`.
        """
        rows = received.rows
        nonzero = isinstance(received.aggregation, MeanNonzero)
        magnitudes: list[Tensor] | None = None
        if isinstance(received, Arrived) and isinstance(received.codec.precision, Sign):
            sent = received.indices(0, rows)
            k = received.codec.selection.k
            values = [*received.parts[0]]
            magnitudes = [each[:, 0].contiguous() for each in received.levels]
        else:
            whole = received.read(0, rows)
            sent = whole.indices
            k = whole.values.shape[2]
            values = [each.contiguous() for each in whole.values]
        few = sent is not None and len(values) * k <= self._most_summed and not nonzero
        if sent is None:  # owners of rows answer with whole rows, which have no indices
            all_indices = torch.arange(self._coding.chunk, dtype=torch.int64, device="cpu")
            sent = all_indices.expand(len(values), rows, k)
        if isinstance(sent, PackedIndices):
            encoded = sent.encoded
        else:
            encoded = self._coding.encode(sent)
        indices = [each.contiguous() for each in encoded]
        shape = rows, self._coding.chunk, k
        self._library.decode(
            weights,
            shape,
            values,
            magnitudes,
            indices,
            self._width,
            few,
            nonzero,
            self._waves,
            rates,
        )
        # autograd does not see the writes of kernels, so the tensors need a new version
        torch.autograd.graph.increment_version(weights)


def native_engine(
    codec: Codec, layout: Layout, memory: Memory | None, runtime: Runtime, room: Room | None
) -> NativeEngine | None:
    """Returns the engine for DCT and top-k selection with a memory of unsent values on a CPU.
    Returns None for other codecs, without such a memory, if kernels are turned off, or if g++ is
    missing.
    """
    if memory is None or runtime.decides_on_device or not runtime.kernels:
        return None
    if not isinstance(codec.basis, DCT) or type(codec.selection) is not TopK:
        return None
    if codec.selection.chunk not in KERNEL_CHUNKS:
        return None
    library = load_library()
    if library is None:
        return None
    return NativeEngine(library, codec, layout, memory, runtime)
