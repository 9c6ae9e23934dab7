"""Arrived: the messages of all replicas as bytes, to check and to decode block of rows by block of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from detonation.core.codec.aggregate import Aggregation, Coefficients, Received
from detonation.core.codec.indices import PackedIndices, narrow
from detonation.core.codec.message_rows import SharedIndices, numbers
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
        lawful, norms = self.codec.precision.check(self._encoded, self.rows, self.codec.selection.k)
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
        for known in ("_levels", "_encoded"):  # the second may be a copy
            vars(self).pop(known, None)
        if self._packed is not None:
            self._packed.blank(skipped)

    def received(self, unit: int, release: Callable[[], None] | None = None) -> Received:
        """The messages as engines decode them; they can be cut after each `unit` rows."""
        width = len(self.body) * self.codec.selection.k
        found = Received(self.rows, self.read, self.aggregation, unit, width, release, self)
        return found if self.aggregation.rowwise else found.weighed()

    def read(self, first: int, end: int) -> Coefficients:
        """The coefficients of the rows from `first`, where messages can be cut, to below `end`."""
        return Coefficients(self.values(first, end), self.indices(first, end))

    def values(self, first: int, end: int) -> Tensor:
        """The values of these rows.

        Shapes: -> `[replicas, end - first, k]` fp32.
        """
        precision, shape = self.codec.precision, (end - first, self.codec.selection.k)
        if isinstance(precision, BlockCodebook):
            packed, begin = self.codec.cut(self._parts, first, end)[0], first * shape[1] // precision.block
            return decoded(packed, self._levels, begin, shape, precision.width, precision.block)
        if isinstance(precision, Float):
            return self._encoded[:, first:end].to(torch.float32)
        return self.codec.values(self.codec.cut(self._parts, first, end), end - first)

    def indices(self, first: int, end: int) -> Tensor | PackedIndices | None:
        """Their indices; see `Coefficients`.

        Shapes: -> `[..., end - first, k]` integer.
        """
        if self._packed is not None:
            return self._packed if end - first == self.rows else self._packed.part(first, end)
        return None if self.shared is None else narrow(self.shared)[..., first:end, :]

    @cached_property
    def _parts(self) -> tuple[Tensor, ...]:
        """The parts of each message; see `Codec.lengths`."""  # [replicas, length] uint8 each
        return torch.split(self.body, list(self.codec.lengths[self.rows]), 1)

    @cached_property
    def _encoded(self) -> Tensor:
        """The values as they travelled."""  # [replicas, rows, k] of a floating-point type, or [replicas, nbytes] uint8
        precision = self.codec.precision
        if isinstance(precision, Float):
            values = self.body[:, : self.codec.lengths[self.rows][0]]
            return numbers(values, precision.dtype).view(len(self.body), self.rows, self.codec.selection.k)
        return self.body[:, : precision.nbytes(self.rows, self.codec.selection.k)]

    @cached_property
    def _levels(self) -> Tensor:
        """The levels of all blocks, where values are codes."""
        assert isinstance(self.codec.precision, BlockCodebook)
        return self.codec.precision.all_levels(self._parts[1])

    @cached_property
    def _packed(self) -> PackedIndices | None:
        if self.codec.selection.shared:
            return None
        packed = self.body[:, self.body.shape[1] - self.codec.lengths[self.rows][-1] :]
        return PackedIndices(self.codec.index_coding, packed, self.rows)
