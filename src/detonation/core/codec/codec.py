"""A codec is basis x selection x precision: pure functions between a flat matrix and the message that is sent."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from detonation.core.codec.aggregate import Aggregation, Mean, Received
from detonation.core.codec.basis import Basis
from detonation.core.codec.indices import IndexCoding, PackedIndices, as_int64
from detonation.core.codec.precision import Float, Precision
from detonation.core.codec.selection import Selection
from detonation.core.flat.layout import Layout


@dataclass(frozen=True)
class Selected:
    """The coefficients that a message carries, before they are encoded.

    Args:
        values: `[rows, k]` fp32.
        indices: `[rows, k]`, or None where `values` are whole rows.
        owned: Whether nothing else refers to `values`, so that a message can use them without a copy.
    """

    values: Tensor
    indices: Tensor | PackedIndices | None
    owned: bool = False


@dataclass(frozen=True)
class Message:
    """One replica's encoded values, and their encoded indices where the receivers cannot compute them.

    It owns its memory: later changes of the residual do not change it.
    """

    values: Tensor
    indices: Tensor | None = None
    parts: tuple[Tensor, ...] = field(init=False)  # the tensors to send, in order

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", (self.values,) if self.indices is None else (self.values, self.indices))


@dataclass(frozen=True)
class Codec:
    """Turns a signal into a message, and messages into an update."""

    basis: Basis
    selection: Selection
    precision: Precision

    @property
    def summable(self) -> bool:
        """True if an all-reduce can add messages: all carry the same coordinates, in a type that can be added."""
        return self.selection.shared and self.precision.summable

    def layout(self, shapes: Mapping[str, Sequence[int]]) -> Layout:
        """The layout of the flat that this codec reads, for local shards of these `shapes` by parameter name."""
        return Layout.of(shapes, self.selection.chunk, self.basis.tile)

    @cached_property
    def index_coding(self) -> IndexCoding:
        """The encoding of indices that are sent."""
        return IndexCoding(self.selection.chunk, self.selection.k)

    def nbytes(self, rows: int) -> int:
        """Bytes of a message of `rows` rows, independent of its values."""
        indices = 0 if self.selection.shared else self.index_coding.nbytes(rows)
        return self.precision.nbytes(rows, self.selection.k) + indices

    def select(self, flat: Tensor, step: int, seed: int) -> Selected:
        """The coefficients of `flat` to send at `step`; `flat` does not change.

        Shapes: `[rows, chunk]` fp32 -> values `[rows, k]`.
        """
        coefficients = self.basis.forward(flat)
        shared = None
        if self.selection.shared and not self._dense:
            shared = self.selection.indices(coefficients, step, seed)
        return self.pick(coefficients, shared)

    def pick(self, coefficients: Tensor, shared: Tensor | PackedIndices | None) -> Selected:
        """The coefficients at the indices that all replicas share or, without them, at the indices of the selection.

        Shapes: `[rows, chunk]` fp32, shared `[rows, k]` integer -> values `[rows, k]`.
        """
        if self._dense:
            return Selected(coefficients, None)
        indices = self.selection.indices(coefficients, 0, 0) if shared is None else as_int64([shared])[0]
        return Selected(coefficients.gather(1, indices), indices, owned=True)

    def empty(self, rows: int, step: int, seed: int, device: torch.device) -> Selected:
        """The content of an empty message: zeros, at valid indices.

        Shapes: -> values `[rows, k]`.
        """
        if self._dense:
            return Selected(torch.zeros(rows, self.selection.chunk, dtype=torch.float32, device=device), None)
        if self.selection.shared:
            like = torch.empty(rows, self.selection.chunk, dtype=torch.float32, device=device)
            indices = self.selection.indices(like, step, seed)
        else:
            indices = torch.arange(self.selection.k, dtype=torch.int64, device=device).expand(rows, -1)
        return Selected(torch.zeros(rows, self.selection.k, dtype=torch.float32, device=device), indices)

    def encode(self, *selected: Selected, negative_zeros: bool = False) -> list[Message]:
        """Encodes each selection as one message; `negative_zeros` as in `Precision.encode`."""
        exact = self.precision == Float(torch.float32)
        values = [
            each.values if each.owned and exact else self.precision.encode(each.values, negative_zeros)
            for each in selected
        ]
        indices = [each.indices for each in selected if each.indices is not None]
        if self.selection.shared or not indices:
            return [Message(each) for each in values]
        return [Message(v, i) for v, i in zip(values, self.index_coding.encode(indices), strict=True)]

    def read(self, message: Message, rows: int) -> Tensor:
        """The values of `message` as every receiver decodes them.

        Shapes: -> `[rows, k]` fp32.
        """
        return self.precision.decode(message.values, rows, self.selection.k)

    def received(
        self,
        messages: Sequence[Message],
        rows: int,
        shared: Sequence[Tensor | PackedIndices | None],
        aggregation: Aggregation,
    ) -> Received:
        """Decodes `messages`, one per replica.

        Args:
            shared: The indices of each message where all replicas know them, else None.

        Shapes: shared `[rows, k]` integer each -> values `[rows, k]` fp32 each.
        """
        values = [self.precision.decode(message.values, rows, self.selection.k) for message in messages]
        indices = [
            known if message.indices is None else PackedIndices(self.index_coding, message.indices, rows)
            for message, known in zip(messages, shared, strict=True)
        ]
        return Received(values, indices, aggregation)

    def open(
        self, messages: Sequence[Message], rows: int, shared: Sequence[Tensor | PackedIndices | None]
    ) -> tuple[Received, Tensor]:
        """Decodes like `received`, and computes on the device the facts that decide whether a message may be used.

        Shapes: shared `[rows, k]` integer each -> facts `[replicas, 3]` int64: faults of the indices, whether the
        statistics are lawful, and the bits of the norm in float64.
        """
        values, facts, k = [], [], self.selection.k
        for message in messages:
            values.append(self.precision.decode(message.values, rows, k))
            lawful = self.precision.lawful(message.values, rows, k)
            norm = torch.linalg.vector_norm(values[-1]).double().view(torch.int64)
            facts.append(torch.stack([torch.zeros_like(norm), lawful.long(), norm]))
        table, indices = torch.stack(facts), list(shared)
        if messages[0].indices is not None:
            packed = [PackedIndices(self.index_coding, m.indices, rows) for m in messages if m.indices is not None]
            table[:, 0], indices = self.index_coding.faults(packed), list(packed)
        return Received(values, indices, Mean()), table

    def blank(self, received: Received, use: Tensor) -> Received:
        """`received` with zeros in place of each message that must not be used.

        Shapes: use `[replicas]` bool.
        """
        values, indices = list(received.values), list(received.indices)
        for replica, skipped in enumerate(use.logical_not().unbind()):
            values[replica] = values[replica].masked_fill(skipped, 0.0)
            packed = indices[replica]
            if isinstance(packed, PackedIndices):  # bytes of zeros are indices, too
                indices[replica] = replace(packed, encoded=packed.encoded.masked_fill(skipped, 0))
        return replace(received, values=values, indices=indices)

    @cached_property
    def _dense(self) -> bool:
        return self.selection.shared and self.selection.k == self.selection.chunk
