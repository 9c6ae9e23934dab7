"""A codec is basis x selection x precision: pure functions between a flat matrix and the message that is sent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from detonation.core.codec.aggregate import Aggregation, Received
from detonation.core.codec.arrived import Arrived
from detonation.core.codec.basis import Basis, Identity
from detonation.core.codec.form import MessageForm, SharedIndices, indices_by_rule
from detonation.core.codec.indices import IndexCoding, PackedIndices, Unpackable, narrow
from detonation.core.codec.precision import FP32, Precision, Sign, TwoBit
from detonation.core.codec.selection import Selection
from detonation.core.flat.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Selected:
    """The coefficients that a message carries, before they are encoded.

    Args:
        values: `[rows, k]` fp32; `[messages, rows, k]` for several messages.
        indices: Of the values, as many, or None where `values` are whole rows.
        owned: Whether nothing else refers to `values`, so that a message can use them without a copy.
        message: The coefficients as an engine has encoded them already; `values` are then `[rows, 0]`.
    """

    values: Tensor
    indices: Tensor | Unpackable | None
    owned: bool = False
    message: Message | None = None


@dataclass(frozen=True)
class Message:
    """One replica's encoded values, and their encoded indices where the receivers cannot compute them.

    It owns its memory: later changes of the residual do not change it.

    Args:
        values: The output of the precision.
        indices: `[nbytes]` uint8.
        form: The form of a message that an engine wrote; values and indices lie in its buffer.
    """

    values: Tensor
    indices: Tensor | None = None
    form: MessageForm | None = None
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

    @property
    def keeps_zeros(self) -> bool:
        """True if the update of a coordinate that was zero on all replicas is zero, whatever stands beside it."""
        return isinstance(self.basis, Identity) and not isinstance(self.precision, Sign | TwoBit)

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
        return self.pick(coefficients, self.shared_indices(len(flat), step, seed, flat.device))

    def shared_indices(self, rows: int, step: int, seed: int, device: torch.device) -> Tensor | None:
        """The indices that a shared selection sends at `step`; None where the data decide, or whole rows are sent.

        Shapes: -> `[rows, k]` int64.
        """
        if not self.selection.shared or self.dense:
            return None
        return indices_by_rule(self.selection, rows, step, seed, device)

    def pick(self, coefficients: Tensor, shared: Tensor | Unpackable | None, out: Tensor | None = None) -> Selected:
        """The coefficients at the indices that all replicas share or, without them, at the indices of the selection.

        Args:
            out: Where the values go; new memory when left out, and unused where whole rows are sent.

        Shapes: `[rows, chunk]` fp32, shared `[rows, k]` integer -> values `[rows, k]`.
        """
        if self.dense:
            return Selected(coefficients, None)
        indices = self.selection.indices(coefficients, 0, 0) if shared is None else narrow(shared).to(torch.int64)
        return Selected(torch.gather(coefficients, 1, indices, out=out), indices, owned=True)

    def empty(self, rows: int, step: int, seed: int, device: torch.device) -> Selected:
        """The content of an empty message: zeros, at valid indices.

        Shapes: -> values `[rows, k]`.
        """
        if self.dense:
            return Selected(torch.zeros(rows, self.selection.chunk, dtype=torch.float32, device=device), None)
        indices = self.shared_indices(rows, step, seed, device)
        if indices is None:
            indices = torch.arange(self.selection.k, dtype=torch.int64, device=device).expand(rows, -1)
        return Selected(torch.zeros(rows, self.selection.k, dtype=torch.float32, device=device), indices)

    def encode(self, *selected: Selected, negative_zeros: bool = False) -> list[Message]:
        """Encodes each selection as one message, or as several of the same size where its values have such a dim.

        Args:
            negative_zeros: See `Precision.encode`.
        """
        return [each.message or self._encoded(each, negative_zeros) for each in selected]

    def read(self, message: Message, rows: int) -> Tensor:
        """The values of `message` as every receiver decodes them.

        Shapes: -> `[..., rows, k]` fp32.
        """
        return self.precision.decode(message.values, rows, self.selection.k)

    @cached_property
    def unit(self) -> int:
        """The number of rows after which a message can be cut: whole blocks of the precision, and whole bytes."""
        block = self.precision.block
        return math.lcm(block // math.gcd(block, self.selection.k), 8)

    def lengths(self, rows: int) -> tuple[int, ...]:
        """The bytes of each part of a message of `rows` rows; between two aligned rows every part can be cut."""
        indices = () if self.selection.shared else (self.index_coding.nbytes(rows),)
        return (*self.precision.lengths(rows, self.selection.k), *indices)

    def parts(self, message: Message, rows: int, count: int) -> list[Tensor]:
        """The bytes of `count` messages, encoded together, part by part as in `lengths`.

        Shapes: -> `[count, length]` uint8 each.
        """
        octets = [part.reshape(count, part.numel() // count).view(torch.uint8) for part in message.parts]
        return [*torch.split(octets[0], list(self.precision.lengths(rows, self.selection.k)), 1), *octets[1:]]

    def received(
        self,
        messages: Sequence[Message],
        rows: int,
        shared: Tensor | Unpackable | None,
        aggregation: Aggregation,
    ) -> Received:
        """`messages`, one per replica, as if they had arrived.

        Args:
            shared: The indices of every message where all replicas know them, else None.

        Shapes: shared `[rows, k]` integer.
        """
        nbytes = self.nbytes(rows)  # of each; the next one begins at an address for any type
        lines = torch.zeros(len(messages), nbytes + 8 - nbytes % 8, dtype=torch.uint8, device=messages[0].values.device)
        for line, message in zip(lines, messages, strict=True):
            torch.cat([part.reshape(-1).view(torch.uint8) for part in message.parts], out=line[:nbytes])
        known = None if shared is None else narrow(shared)
        return self.arrived(lines[:, :nbytes], rows, known, aggregation).received(self.unit)

    def arrived(
        self, body: Tensor, rows: int, shared: Tensor | SharedIndices | None, aggregation: Aggregation
    ) -> Arrived:
        """The messages of all replicas, to check and to read.

        Args:
            body: The bytes of each message.
            shared: The indices of every message where all replicas know them.

        Shapes: body `[replicas, nbytes]` uint8, shared `[rows, k]` integer.
        """
        return Arrived(self, body, rows, shared, aggregation)

    def _encoded(self, selected: Selected, negative_zeros: bool) -> Message:
        exact = selected.owned and self.precision == FP32
        values = selected.values if exact else self.precision.encode(selected.values, negative_zeros)
        if self.selection.shared or selected.indices is None:
            return Message(values)
        indices = selected.indices
        return Message(
            values, self.index_coding.encode(indices if isinstance(indices, PackedIndices) else narrow(indices))
        )

    @cached_property
    def dense(self) -> bool:
        """True if whole rows are sent, without indices."""
        return self.selection.shared and self.selection.k == self.selection.chunk
