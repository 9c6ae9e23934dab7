"""Aggregations: how the coefficients that several replicas sent become one update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch

from detonation.core.codec.form import WHOLE, Dealt
from detonation.core.codec.indices import PackedIndices, narrow

if TYPE_CHECKING:
    from torch import Tensor

ONE_PASS_CHUNK = 256
"""The longest row whose coefficients an accelerator adds up in one pass, as weighted sums of unit vectors."""


class Aggregation(Protocol):
    """A pure function from the coefficients of all replicas to one update, with the same bits on every replica.

    Indices within a row are unique, so no two writes of one replica collide, and replicas are added in their order.
    """

    @property
    def rowwise(self) -> bool:
        """True if each row of the result depends only on the same row of the messages, so that blocks of rows can be
        aggregated one after another."""
        ...

    def __call__(self, values: Tensor, indices: Tensor | None, chunk: int) -> Tensor:
        """Aggregates one message per replica.

        Args:
            values: Of all replicas, in replica order.
            indices: Of all replicas, or None where `values` are whole rows.
            chunk: Coefficients per row.

        Shapes: values `[replicas, rows, k]` fp32, indices `[replicas, rows, k]` integer -> `[rows, chunk]` fp32.
        """
        ...


@dataclass(frozen=True)
class Mean:
    """The mean over all replicas; a replica that does not send a coefficient counts as 0."""

    rowwise: ClassVar[bool] = True

    def __call__(self, values: Tensor, indices: Tensor | None, chunk: int) -> Tensor:
        # values [replicas, rows, k] fp32, indices [replicas, rows, k] or None -> [rows, chunk] fp32
        total = scatter_sum(values, indices, chunk)
        return total.div_(len(values)) if len(values) > 1 else total  # of one message it may be that message


@dataclass(frozen=True)
class MeanNonzero:
    """The mean over the replicas that sent a coefficient other than 0, as in the code published with DeMo."""

    rowwise: ClassVar[bool] = True

    def __call__(self, values: Tensor, indices: Tensor | None, chunk: int) -> Tensor:
        # values [replicas, rows, k] fp32, indices [replicas, rows, k] or None -> [rows, chunk] fp32
        senders = scatter_sum((values != 0).to(values.dtype), indices, chunk)
        return scatter_sum(values, indices, chunk) / senders.clamp_(min=1)


@dataclass(frozen=True)
class MajorityVote:
    """The sign that most replicas sent, times the mean magnitude; 0 where the vote is tied."""

    rowwise: ClassVar[bool] = True

    def __call__(self, values: Tensor, indices: Tensor | None, chunk: int) -> Tensor:
        # values [replicas, rows, k] fp32, indices [replicas, rows, k] or None -> [rows, chunk] fp32
        signs = scatter_sum(values.sign(), indices, chunk).sign()
        return signs * scatter_sum(values.abs(), indices, chunk) / len(values)


@dataclass(frozen=True)
class ClippedMean:
    """The mean over replicas, each scaled down to the median of their norms (SparseLoCo, arXiv 2508.15706).

    A replica whose values are far too large, or an attacker, does not dominate the others.
    """

    rowwise: ClassVar[bool] = False

    def __call__(self, values: Tensor, indices: Tensor | None, chunk: int) -> Tensor:
        # values [replicas, rows, k] fp32, indices [replicas, rows, k] or None -> [rows, chunk] fp32
        norms = torch.stack([v.norm() for v in values])
        empty = norms <= 0  # torch.nanmedian waits for a device to count them, in some versions
        rising = norms.masked_fill(empty, torch.inf).sort().values
        middle = rising.gather(0, empty.logical_not().sum(0, keepdim=True).sub_(1).clamp_(min=0) // 2)
        scales = (middle / norms).nan_to_num(1.0, posinf=1.0).clamp_(max=1.0)
        return Mean()(values * scales.view(-1, 1, 1), indices, chunk)


AGGREGATIONS: dict[str, Aggregation] = {
    "mean": Mean(),
    "mean_nonzero": MeanNonzero(),
    "majority_vote": MajorityVote(),
    "clipped_mean": ClippedMean(),
}
"""Every aggregation by name."""


def scatter_sum(
    values: Tensor | Sequence[Tensor], indices: Tensor | Sequence[Tensor | None] | None, chunk: int
) -> Tensor:
    """The sum of all messages, added in replica order; it may share memory with `values`.

    Shapes: values `[replicas, rows, k]`, indices `[replicas, rows, k]` integer, or None for whole rows; or one
    `[rows, k]` each per replica -> `[rows, chunk]`.
    """
    first = values[0]
    if indices is None or indices[0] is None:
        return _added(values)
    if len(values) > 1 and first.device.type != "cpu" and chunk <= ONE_PASS_CHUNK:
        # in one pass and in replica order: atomic additions, on which writes could collide, come in any order
        sent = torch.stack(list(values), 1)
        where = torch.stack([i for i in indices if i is not None], 1)
        return weighted_sum(_units(chunk, first.device), sent.view(len(first), -1), where.view(len(first), -1))
    total = torch.zeros(len(first), chunk, dtype=first.dtype, device=first.device)
    for value, where in zip(values, indices, strict=True):
        assert where is not None
        total.scatter_add_(1, where.to(torch.int64), value)
    return total


def weighted_sum(vectors: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    """For each row the sum of `vectors`, weighted, in the order of the row; an index may occur several times.

    Shapes: vectors `[chunk, n]`, weights `[rows, sent]` fp32, indices `[rows, sent]` integer -> `[rows, n]`.
    """
    where = indices if indices.dtype in (torch.int32, torch.int64) else indices.to(torch.int32)
    begins = _begins(*where.shape, where.dtype, where.device)
    return torch.embedding_bag(vectors, where.reshape(-1), begins, per_sample_weights=weights.reshape(-1))[0]


def _added(values: Tensor | Sequence[Tensor]) -> Tensor:
    """The sum of whole rows."""  # per replica [rows, k] -> [rows, k]
    if len(values) == 1:
        return values[0]
    if isinstance(values, torch.Tensor) and values.device.type != "cpu":
        return values.sum(0)
    total = values[0] + values[1]
    for value in values[2:]:
        total += value
    return total


@lru_cache(maxsize=16)
def _units(chunk: int, device: torch.device) -> Tensor:
    return torch.eye(chunk, dtype=torch.float32, device=device)  # [chunk, chunk]


@lru_cache(maxsize=64)
def _begins(rows: int, sent: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The offset of each row in the flattened indices; torch computes it at every call for a matrix."""
    return torch.arange(0, rows * sent, sent, dtype=dtype, device=device)  # [rows]


@dataclass(frozen=True)
class Coefficients:
    """The coefficients that the replicas sent of some rows.

    Args:
        values: `[replicas, rows, k]` fp32.
        indices: `[replicas, rows, k]` integer; `[rows, k]` where all replicas sent the same ones; None where the values
            are whole rows.
    """

    values: Tensor
    indices: Tensor | PackedIndices | None

    def part(self, first: int, end: int) -> Coefficients:
        """The coefficients of the rows from `first` to below `end`."""
        indices = None if self.indices is None else narrow(self.indices)[..., first:end, :]
        return Coefficients(self.values[:, first:end], indices)

    @property
    def shared(self) -> bool:
        """True if all replicas sent the same coefficients."""
        return self.indices is None or (isinstance(self.indices, torch.Tensor) and self.indices.dim() == 2)

    def is_sparse(self, chunk: int) -> bool:
        """True for few coefficients of each row, of which each replica chose its own."""
        replicas, _, k = self.values.shape
        return not self.shared and replicas * k <= chunk // 4

    def joined(self) -> tuple[Tensor, Tensor]:
        """All coefficients, divided by the number of replicas, and their indices.

        An index that several replicas sent occurs several times.

        Shapes: -> values `[rows, replicas * k]` fp32, indices `[rows, replicas * k]` integer.
        """
        assert self.indices is not None
        replicas, rows, k = self.values.shape
        if replicas == 1:
            return self.values[0], narrow(self.indices)[0]
        values = self.values.new_empty(rows, replicas, k)
        indices = torch.empty(values.shape, dtype=torch.int32, device=values.device)
        sent = narrow(self.indices)
        if values.device.type == "cpu":
            for i in range(replicas):  # all at once takes longer with rows so narrow
                values[:, i], indices[:, i] = self.values[i], sent[i]
        else:
            values.copy_(self.values.transpose(0, 1))
            indices.copy_(sent.transpose(0, 1))
        return values.flatten(1).div_(replicas), indices.flatten(1)


@dataclass(frozen=True)
class Received:
    """The messages that all replicas received, the same on each, read block of rows by block of rows.

    Args:
        rows: Of each message.
        read: The coefficients of the rows from one up to another, both multiples of `unit`, or up to the last row.
        aggregation: Makes one update of them.
        unit: The rows after which messages can be cut.
        width: The coefficients of a row, of all replicas together; 0 if that is not known.
        release: Returns the receive buffer; called once all of it is decoded.
        source: The messages as they arrived (`Arrived`), for an engine that decodes their bytes itself.
        dealt: How the rows are dealt to several messages.
    """

    rows: int
    read: Callable[[int, int], Coefficients]
    aggregation: Aggregation = Mean()
    unit: int = 1
    width: int = 0
    release: Callable[[], None] | None = None
    source: object = None
    dealt: Dealt = WHOLE

    @classmethod
    def of(cls, values: Tensor, indices: Tensor | None, aggregation: Aggregation = Mean()) -> Received:
        """Messages that are decoded already.

        Shapes: as in `Coefficients`.
        """
        return cls(values.shape[1], Coefficients(values, indices).part, aggregation)

    def whole(self) -> Coefficients:
        """The coefficients of all rows."""
        return self.read(0, self.rows)

    def part(self, first: int, end: int) -> Coefficients:
        """The coefficients of the rows from `first` to below `end`, wherever these are."""
        start = first // self.unit * self.unit
        stop = min(self.rows, -(-end // self.unit) * self.unit)
        return self.read(start, stop).part(first - start, end - start)

    def blocks(self, rows: int, most: int = 0) -> Iterator[Coefficients]:
        """Yields `rows` rows or a few more at a time, or all at once for an aggregation of whole messages.

        Args:
            most: The `width` up to which all messages are read at once, to be cut afterwards: few coefficients of all
                rows take less memory than all coefficients of a block, and a call for each block.
        """
        unit, read = self.unit, self.read
        if 0 < self.width <= most and self.rows > rows:
            unit, read = 1, self.whole().part
        step = max(1, -(-rows // unit)) * unit if self.aggregation.rowwise else max(1, self.rows)
        for first in range(0, max(1, self.rows), step):
            yield read(first, min(first + step, self.rows))


def aggregate(coefficients: Coefficients, aggregation: Aggregation, chunk: int) -> Tensor:
    """Aggregates the coefficients of all replicas to those of the update.

    Shapes: -> `[rows, chunk]` fp32.
    """
    values, indices = coefficients.values, coefficients.indices
    if not coefficients.shared:
        assert indices is not None
        return aggregation(values, narrow(indices), chunk)
    together = aggregation(values, None, chunk)  # combined first, scattered once
    return together if indices is None else scatter_sum([together], [narrow(indices)], chunk)
