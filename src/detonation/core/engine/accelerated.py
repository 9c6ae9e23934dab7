"""The Triton engine: a replica's encode and decode on an accelerator, each in one launch over all rows."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from detonation.core.codec.aggregate import Aggregation, MajorityVote, Mean, MeanNonzero, Received
from detonation.core.codec.basis import DCT, Identity, dct_matrix
from detonation.core.codec.codec import Arrived, Codec, Message, Selected
from detonation.core.codec.form import Dealt, MessageForm, SharedIndices
from detonation.core.codec.indices import PackedIndices
from detonation.core.codec.precision import FP32, PRECISIONS, Float
from detonation.core.codec.selection import Everything, Random, Slicing, Striding, TopK, random_start
from detonation.core.compute.kernel_library import SignRate
from detonation.core.engine.reference import ReferenceEngine
from detonation.core.flat.layout import Layout, copy
from detonation.core.memory import Feedback, Memory
from detonation.core.runtime import Runtime

LONGEST_TRANSFORM, LONGEST_ROW = 128, 256
"""The longest rows whose matrix of a basis, and whose coordinates, the registers of a program hold."""
_AGGREGATIONS: dict[type[Aggregation], str] = {Mean: "mean", MeanNonzero: "nonzero", MajorityVote: "majority"}
_PRECISIONS = {precision: name for name, precision in PRECISIONS.items()}
_ROTATIONS: dict[type, str] = {Random: "random", Striding: "striding", Slicing: "slicing", Everything: "slicing"}


def why_not_triton(codec: Codec) -> str:
    """The reason why no kernel encodes for `codec`; "" where one does."""
    basis, selection = type(codec.basis), codec.selection
    if basis not in (DCT, Identity):
        return f"no kernel transforms by {basis.__name__}"
    if type(selection) not in (TopK, *_ROTATIONS) or (isinstance(selection, Everything) and selection.chunk == 1):
        return f"no kernel selects by {type(selection).__name__}"
    longest = LONGEST_TRANSFORM if basis is DCT else LONGEST_ROW
    if selection.chunk > longest:
        return f"a row of {selection.chunk} is longer than the {longest} that a kernel holds"
    name = _PRECISIONS.get(codec.precision, repr(codec.precision))
    return "" if name in ("fp32", "bf16", "sign", "2bit", "4bit") else f"no kernel encodes in {name}"


def coding_of(kernels: Any, codec: Codec) -> Any:
    """The part of `codec` that is compiled into a kernel (`Coding`)."""
    selection, coding, sends = codec.selection, codec.index_coding, not codec.selection.shared
    return kernels.Coding(
        selection.chunk,
        selection.k,
        "dct" if isinstance(codec.basis, DCT) else "none",
        "topk" if isinstance(selection, TopK) else _ROTATIONS[type(selection)],
        _PRECISIONS[codec.precision],
        codec.precision.block,
        coding.width if sends and not coding.bitmap else 0,
        coding.bitmap and sends,
    )


def places_of(kernels: Any, codec: Codec, owned: int, dealt: Dealt) -> Any:
    """The bytes of a message of `owned` rows, as kernels read them (`Places`)."""
    lengths = codec.precision.lengths(owned, codec.selection.k)
    return kernels.Places(lengths[0], sum(lengths), dealt.count, dealt.turns, dealt.run, owned)


class TritonEngine(ReferenceEngine):
    """The operations of `ReferenceEngine`, each in one launch; ordinary torch does what no kernel does.

    Args:
        kernels: The module `detonation.kernels.gpu.launches`.
    """

    name, reads_status = "triton", True

    def __init__(
        self,
        kernels: Any,
        codec: Codec,
        layout: Layout,
        memory: Memory | None,
        runtime: Runtime,
        block_rows: int = 0,
    ) -> None:
        super().__init__(codec, layout, memory, runtime, block_rows)
        self._kernels, self.needs_own_values = kernels, False
        # bf16 rounds each value by itself, so that it can leave the memory as it will be read
        self._rounds = codec.precision == PRECISIONS["bf16"] and not self._exact
        self.releases_at_once = memory is None or self._exact or self._rounds
        slots = layout.slots
        self._slots = kernels.Slots([s.row for s in slots], [s.numel for s in slots], layout.rows, self.device)
        self._signals, self._targets = kernels.Addresses(self.device), kernels.Addresses(self.device)
        self._fine = torch.zeros((), dtype=torch.int64, device=self.device)
        self._rates: tuple[tuple[SignRate, ...], Tensor] = ((), self._fine)
        self._coders: dict[Codec, Any] = {}
        self._rotated: dict[Codec, int] = {}  # the step of the rotation that each coder holds

    def encode(self, signals: Sequence[Tensor | None], step: int, bad: Tensor | None = None) -> Selected:
        plain, rows = replace(self.codec, precision=FP32), self.layout.rows
        width = -(-plain.nbytes(rows) // 8) * 8
        form = MessageForm(torch.empty(1, width, dtype=torch.uint8, device=self.device), 0, rows)
        message = self._encoded(plain, signals, step, bad, form)
        return Selected(message.values[0], self._indices(message, step), owned=True)

    def encode_into(
        self,
        form: Callable[[], MessageForm | None],
        signals: Sequence[Tensor | None],
        step: int,
        bad: Tensor | None = None,
    ) -> Selected:
        place = form()
        if place is None:
            return self.encode(signals, step, bad)
        message = self._encoded(self.codec, signals, step, bad, place)
        indices = self._indices(message, step) if self.codec.selection.shared else None
        nothing = torch.empty(self.layout.rows, 0, dtype=torch.float32, device=self.device)
        return Selected(nothing, indices, owned=True, message=message)

    def release(self, selected: Selected, own: Tensor | None) -> None:
        memory, message = self.memory, selected.message
        if message is None or memory is None:
            super().release(selected, own)
        elif not self.releases_at_once:
            self._decode_message(message, "release", memory.residual, memory.feedback.alpha)

    def own_message(self, selected: Selected, own: Tensor | None) -> Received:
        message, mean = selected.message, Mean()
        if message is None or message.form is None:
            return super().own_message(selected, own)
        form, rows = message.form, self.layout.rows
        body = form.buffer[:, form.room : form.room + self.codec.nbytes(form.owned)]
        shared = selected.indices if isinstance(selected.indices, SharedIndices) else None
        source = Arrived(self.codec, body, form.owned, shared, mean)
        return Received(rows, source.read, mean, source=source, dealt=form.dealt)  # a kernel reads it wherever it lies

    def decode(self, received: Received) -> Tensor:
        if not self.reads(received):
            return super().decode(received)
        flat = torch.empty(self.layout.rows, self.layout.chunk, dtype=torch.float32, device=self.device)
        self._decode(received, "flat", flat=flat)
        return flat

    def write(self, received: Received, targets: Sequence[Tensor]) -> None:
        if not self.reads(received):
            super().write(received, targets)
            return
        # by way of a copy where no kernel writes
        odd = [i for i, target in enumerate(targets) if not self._is_writable(target)]
        decoded = list(targets)
        for i in odd:
            decoded[i] = torch.empty(targets[i].shape, dtype=torch.float32, device=self.device)
        self._decode(received, "tensors", decoded)
        copy([targets[i] for i in odd], [decoded[i] for i in odd])

    def can_apply_signs(self, received: Received, weights: Sequence[Tensor]) -> bool:
        return self.reads(received) and all(self._is_writable(weight) for weight in weights)

    def apply_signs(self, received: Received, weights: Sequence[Tensor], rates: Sequence[SignRate]) -> None:
        if self._rates[0] != tuple(rates):
            numbers = [number for rate in rates for number in rate]
            self._rates = tuple(rates), self._kernels.uploaded(numbers, torch.float32, self.device)
        self._decode(received, "signs", weights, rates=self._rates[1])

    def _is_writable(self, tensor: Tensor) -> bool:
        return tensor.dtype in self._kernels.KIND_OF and tensor.is_contiguous()

    def reads(self, received: Received) -> bool:
        """True if a kernel decodes these messages."""
        source = received.source
        if not isinstance(source, Arrived) or type(received.aggregation) not in _AGGREGATIONS:
            return False
        of_each = type(source.codec.selection) in (TopK, Everything)  # needs no step, which shared indices tell
        return source.codec.precision in _PRECISIONS and (of_each or isinstance(source.shared, SharedIndices))

    def add(self, received: Received) -> None:
        """Adds the coefficients of an update, which stay coefficients, to the memory."""
        assert self.memory is not None
        self._decode(received, "add", flat=self.memory.residual)

    def _encoded(
        self, codec: Codec, signals: Sequence[Tensor | None], step: int, bad: Tensor | None, form: MessageForm
    ) -> Message:
        """Encodes a signal in one launch."""
        coder, memory = self._coder(codec), self.memory
        lengths = codec.lengths(form.owned)
        self._rotate(codec, step)
        coder.encode(
            self._signals.update([None if s is None else self._readable(s) for s in signals]),
            self._fine if bad is None else bad,
            form.buffer[:, form.room :],
            places_of(self._kernels, codec, form.owned, form.dealt),
            memory.residual if memory else None,
            memory.feedback.decay if memory else 0.0,
            memory.feedback.alpha if memory else 0.0,
            release=self.releases_at_once,
            round_first=self._rounds,
            negative_zeros=form.negative_zeros,
        )
        body = form.buffer[:, form.room : form.room + sum(lengths)]
        split = 0 if codec.selection.shared else lengths[-1]
        values, indices = torch.split(body, [body.shape[1] - split, split], 1)
        if isinstance(codec.precision, Float):
            values = values.view(codec.precision.dtype).view(len(body), form.owned, codec.selection.k)
        return Message(values, None if codec.selection.shared else indices, form)

    def _indices(self, message: Message, step: int) -> SharedIndices | PackedIndices:
        rows, codec = self.layout.rows, self.codec
        if message.indices is None:
            return SharedIndices(codec.selection, rows, step, self._seed, self.device)
        return PackedIndices(codec.index_coding, message.indices[0], rows)

    def _decode_message(self, message: Message, into: str, flat: Tensor, alpha: float = 1.0) -> None:
        """Decodes this replica's own message as every receiver does."""
        form = message.form
        assert form is not None
        body, places = form.buffer[:, form.room :], places_of(self._kernels, self.codec, form.owned, form.dealt)
        self._coder(self.codec).decode(body, places, 1, "mean", into, self._targets, flat, alpha)

    def _decode(
        self,
        received: Received,
        into: str,
        targets: Sequence[Tensor] = (),
        flat: Tensor | None = None,
        rates: Tensor | None = None,
    ) -> None:
        source = received.source
        assert isinstance(source, Arrived)
        self._rotate(source.codec, source.shared.step if isinstance(source.shared, SharedIndices) else 0)
        addresses = self._targets.update(targets) if targets else self._targets
        replicas = 1 if received.dealt.count > 1 else len(source.body)
        places = places_of(self._kernels, source.codec, source.rows, received.dealt)
        name = _AGGREGATIONS[type(received.aggregation)]
        self._coder(source.codec).decode(
            source.body, places, replicas, name, into, addresses, flat, 1.0, rates, into != "add"
        )

    def _readable(self, tensor: Tensor) -> Tensor:
        return tensor.contiguous() if tensor.dtype in self._kernels.KIND_OF else tensor.float().contiguous()

    def _rotate(self, codec: Codec, step: int) -> None:
        """Makes the coder's rotation that of `step`."""
        selection = codec.selection
        if not selection.shared or self._rotated.get(codec) == step:
            return
        self._rotated[codec] = step
        cycle, phase = divmod(step, selection.period)
        words, choices = (random_start(self._seed, cycle, which) for which in (0, 1))
        coder = self._coder(codec)
        coder.rotations.rotate(coder.coding, words, choices, phase)

    def _coder(self, codec: Codec) -> Any:
        """The launches for `codec`, whose rows are those of this engine."""
        if codec not in self._coders:
            compiled = coding_of(self._kernels, codec)
            side = codec.selection.chunk if isinstance(codec.basis, DCT) else 1
            matrix = dct_matrix(side, self.device)
            first = self.codec.selection.first if isinstance(self.codec.selection, Random) else 0
            self._coders[codec] = self._kernels.Coder(compiled, self._slots, matrix, matrix.T.contiguous(), first)
        return self._coders[codec]


def replying_engine(kernels: Any, answer: Codec, residual: Tensor) -> TritonEngine:
    """The engine of an owner, whose memory of coefficients is `residual`, and whose messages are in the codec `answer`.

    Shapes: residual `[owned, chunk]` fp32.
    """
    codec = replace(answer, basis=Identity())
    layout = codec.layout({"the rows of an owner": residual.shape})
    memory = Memory(layout, Feedback(decay=1.0), residual.device, residual)
    return TritonEngine(kernels, codec, layout, memory, Runtime(residual.device))
