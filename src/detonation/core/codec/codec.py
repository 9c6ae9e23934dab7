"""Codec: basis x selection x precision. Pure functions between a flat matrix and the message that is sent."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from detonation.core.codec.aggregate import Agreed, Combine
from detonation.core.codec.basis import Basis
from detonation.core.codec.indices import Columns, Packed, numbers
from detonation.core.codec.precision import Float, Precision
from detonation.core.codec.selection import Selection
from detonation.core.flat.layout import Layout


@dataclass(frozen=True)
class Message:
    """What one replica tells: encoded values, and their encoded columns where the others cannot know them.

    It owns its memory: nothing that happens to the residual later changes it.
    """

    values: Tensor
    columns: Tensor | None = None

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return (self.values,) if self.columns is None else (self.values, self.columns)


@dataclass(frozen=True)
class Selected:
    """The coefficients that a message tells of, as they were: `values` before encoding, `columns` None for all."""

    values: Tensor  # [rows, kept] fp32
    columns: Tensor | Packed | None  # [rows, kept] int64
    owned: bool = False  # whether `values` are nobody else's and stay as they are


@dataclass(frozen=True)
class Codec:
    """How a signal becomes a message and messages become an update."""

    basis: Basis
    selection: Selection
    precision: Precision

    @property
    def summable(self) -> bool:
        """Whether the network may add messages up: all tell the same coordinates, in a type that can be added."""
        return self.selection.shared and self.precision.summable

    def layout(self, shapes: Mapping[str, Sequence[int]]) -> Layout:
        """How local shards of these `shapes`, by parameter name, lie in the flat that this codec reads."""
        return Layout.of(shapes, self.selection.chunk, self.basis.tile)

    @property
    def columns(self) -> Columns:
        """How columns are written down where they are sent."""
        return Columns(self.selection.chunk, self.selection.kept)

    def nbytes(self, rows: int) -> int:
        """Bytes of the message of `rows` rows, whatever is in them."""
        columns = 0 if self.selection.shared else self.columns.nbytes(rows)
        return self.precision.nbytes(rows, self.selection.kept) + columns

    def select(self, flat: Tensor, step: int, seed: int) -> Selected:
        """The coefficients of `flat` to tell of at `step`; `flat` is left as it is."""  # [rows, chunk]
        coefficients = self.basis.forward(flat)
        known = self.selection.shared and not self._whole
        shared = self.selection.columns(coefficients, step, seed) if known else None
        return self.take(coefficients, shared)

    def take(self, coefficients: Tensor, shared: Tensor | Packed | None) -> Selected:
        """Those of `coefficients` that are told: at the columns that all know, or the largest."""
        if self._whole:
            return Selected(coefficients, None)
        columns = self.selection.columns(coefficients, 0, 0) if shared is None else numbers(shared)
        return Selected(coefficients.gather(1, columns), columns, owned=True)

    def silence(self, rows: int, step: int, seed: int, device: torch.device) -> Selected:
        """What a replica selects that has nothing to say: zeros, at places that any message may tell of."""
        if self._whole:
            return Selected(torch.zeros(rows, self.selection.chunk, device=device), None)
        if self.selection.shared:
            like = torch.empty(rows, self.selection.chunk, device=device)
            columns = self.selection.columns(like, step, seed)
        else:
            columns = torch.arange(self.selection.kept, device=device).expand(rows, -1)
        return Selected(torch.zeros(rows, self.selection.kept, device=device), columns)

    def encode(self, selected: Selected) -> Message:
        exact = selected.owned and self.precision == Float(torch.float32)
        values = selected.values if exact else self.precision.encode(selected.values)
        if self.selection.shared or selected.columns is None:
            return Message(values)
        return Message(values, self.columns.encode(selected.columns))

    def read(self, message: Message, rows: int) -> Tensor:
        """The values of `message` as everyone reads them."""  # [rows, kept]
        return self.precision.decode(message.values, rows, self.selection.kept)

    def agreed(
        self, messages: Sequence[Message], rows: int, shared: Tensor | Packed | None, combine: Combine
    ) -> Agreed:
        """What `messages` say, read; `shared` are the columns of a shared selection."""
        values = [self.read(message, rows) for message in messages]
        return Agreed(values, [self._columns_of(message, rows, shared) for message in messages], combine)

    @property
    def _whole(self) -> bool:
        return self.selection.shared and self.selection.kept == self.selection.chunk

    def _columns_of(self, message: Message, rows: int, shared: Tensor | Packed | None) -> Tensor | Packed | None:
        return shared if message.columns is None else Packed(self.columns, message.columns, rows)
