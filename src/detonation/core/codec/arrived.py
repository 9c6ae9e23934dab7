"""Arrived: the messages of all replicas as bytes, to check and to decode block of rows by block of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from detonation.core.codec.aggregate import Aggregation, Coefficients, Received
from detonation.core.codec.form import SharedIndices
from detonation.core.codec.indices import PackedIndices, narrow
from detonation.core.codec.precision import BlockCodebook, Float
from detonation.core.compute.value_blocks import decoded

if TYPE_CHECKING:
    from torch import Tensor

    from detonation.core.codec.codec import Codec


@dataclass(frozen=True)
class Arrived:
    """The messages of all replicas, as bytes: decoded block of rows by block of rows, so that no copy is larger."""

    codec: Codec
    body: Tensor  # [replicas, nbytes] uint8
    rows: int
    shared: Tensor | SharedIndices | None  # [rows, k], or [replicas, rows, k] where each replica has rows of its own
    aggregation: Aggregation

    def facts(self) -> tuple[Tensor, Tensor]:
        """The facts that decide whether a message may be used, computed on the device.

        Shapes: -> faults `[replicas]` int64: those of `IndexCoding.faults`, or 3 for statistics that no encoder
        produces; and the norm `[replicas]` fp32.
        """
        precision, k = self.codec.precision, self.codec.selection.k
        lawful, norms = precision.check(self._values(0, self.rows), self.rows, k)
        if self._packed is None:
            faults = torch.zeros(len(norms), dtype=torch.int64, device=norms.device)
        else:
            faults = self.codec.index_coding.faults(self._packed)
        return faults if lawful is None else faults.masked_fill_(lawful.logical_not(), 3), norms

    def blank(self, skipped: Tensor) -> None:
        """Replaces each of the messages `skipped` by zeros.

        Shapes: `[replicas]` bool.
        """
        self.body.masked_fill_(skipped.unsqueeze(1), 0)
        vars(self).pop("_levels", None)
        if self._packed is not None:
            self._packed.blank(skipped)

    def received(self, unit: int, release: Callable[[], None] | None = None) -> Received:
        """The messages as engines decode them; they can be cut after each `unit` rows."""
        width = len(self.body) * self.codec.selection.k
        return Received(self.rows, self.read, self.aggregation, unit, width, release, self)

    def read(self, first: int, end: int) -> Coefficients:
        """The coefficients of the rows from `first`, where messages can be cut, to below `end`."""
        return Coefficients(self.values(first, end), self.indices(first, end))

    def values(self, first: int, end: int) -> Tensor:
        """The values of these rows.

        Shapes: -> `[replicas, end - first, k]` fp32.
        """
        precision, shape = self.codec.precision, (end - first, self.codec.selection.k)
        if isinstance(precision, BlockCodebook):
            packed, begin = self._parts(first, end)[0], first * shape[1] // precision.block
            return decoded(packed, self._levels, begin, shape, precision.width, precision.block)
        return precision.decode(self._values(first, end), *shape)

    def indices(self, first: int, end: int) -> Tensor | PackedIndices | None:
        """Their indices; see `Coefficients`.

        Shapes: -> `[..., end - first, k]` integer.
        """
        if self._packed is not None:
            return self._packed.part(first, end)
        return None if self.shared is None else narrow(self.shared)[..., first:end, :]

    @cached_property
    def _levels(self) -> Tensor:
        """The levels of all blocks, where values are codes."""
        assert isinstance(self.codec.precision, BlockCodebook)
        return self.codec.precision.all_levels(self._parts(0, self.rows)[1])

    @cached_property
    def _packed(self) -> PackedIndices | None:
        coding = self.codec.index_coding
        if self.codec.selection.shared:
            return None
        return PackedIndices(coding, self.body[:, self.body.shape[1] - coding.nbytes(self.rows) :], self.rows)

    def _values(self, first: int, end: int) -> Tensor:
        """The encoded values of some rows."""
        precision, parts = self.codec.precision, self._parts(first, end)
        if isinstance(precision, Float):
            size, values = precision.size, parts[0]
            if first == end:  # of no rows the strides say nothing
                return values.new_empty(len(self.body), 0, self.codec.selection.k, dtype=precision.dtype)
            if values.storage_offset() % size or values.stride(0) % size:
                values = values.contiguous()
            return values.view(precision.dtype).view(len(self.body), end - first, self.codec.selection.k)
        length = sum(part.shape[1] for part in parts)
        return self.body[:, :length] if (first, end) == (0, self.rows) else torch.cat(parts, 1)

    def _parts(self, first: int, end: int) -> list[Tensor]:
        """The encoded values of some rows, part by part as in `Precision.lengths`."""
        precision, k = self.codec.precision, self.codec.selection.k
        lengths, begins, ends = (precision.lengths(rows, k) for rows in (self.rows, first, end))
        starts = [0, *accumulate(lengths)]
        return [self.body[:, at + a : at + b] for at, a, b in zip(starts, begins, ends, strict=False)]
