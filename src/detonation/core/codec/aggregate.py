"""Aggregations: how the coefficients that several replicas sent become one update."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch

from detonation.core.codec.indices import PackedIndices, narrow
from detonation.core.compute.scatter_sum import (
    SumOfSquares,
    added,
    beside_each_other,
    most_summed,
    scatter_sum,
    square_root,
)

if TYPE_CHECKING:
    from torch import Tensor


class Aggregation(Protocol):
    """Combines the coefficients of all replicas to one update. An aggregation is a pure function
    whose results are bitwise equal on every replica.

    Indices within a row of a message are unique, so one replica never writes twice to the same
    coordinate. The values of the replicas are added in replica order.
    """

    @property
    def rowwise(self) -> bool:
        """True if row i of the update depends only on row i of each message."""

    def __call__(self, values: Tensor, indices: Tensor | None, chunk: int) -> Tensor:
        """Aggregates one message per replica.

        Args:
            values: The coefficients of all replicas, in replica order.
            indices: Indices of the coefficients; None if `values` are whole rows.
            chunk: Coefficients per row.

        Shapes: values `[replicas, rows, k]` fp32, indices `[replicas, rows, k]` integer -> `[rows,
        chunk]` fp32.
        """


class _Rowwise:
    rowwise: ClassVar[bool] = True


@dataclass(frozen=True)
class Mean(_Rowwise):
    """Mean over all replicas. A coefficient that a replica does not send counts as 0."""

    def __call__(self, values: Tensor, indices: Tensor | None, chunk: int) -> Tensor:
        total = scatter_sum(values, indices, chunk)
        if len(values) == 1:  # `total` may be a part of the message: do not change it in place
            return total
        return total.div_(len(values))


@dataclass(frozen=True)
class MeanNonzero(_Rowwise):
    """Mean of each coefficient over the replicas that sent a nonzero value for it, as in the
    published code of DeMo."""

    def __call__(self, values: Tensor, indices: Tensor | None, chunk: int) -> Tensor:
        senders = scatter_sum((values != 0).to(values.dtype), indices, chunk)
        return scatter_sum(values, indices, chunk) / senders.clamp_(min=1)


@dataclass(frozen=True)
class MajorityVote(_Rowwise):
    """For each coefficient: the sign that most replicas sent, times the mean magnitude over all
    replicas; 0 if equally many replicas sent plus and minus."""

    def __call__(self, values: Tensor, indices: Tensor | None, chunk: int) -> Tensor:
        signs = scatter_sum(values.sign(), indices, chunk).sign()
        return signs * scatter_sum(values.abs(), indices, chunk) / len(values)


@dataclass(frozen=True)
class RescaledMean(_Rowwise):
    """Mean over all replicas. Each row of the mean is then rescaled: its new norm is the mean of
    the norms that this row has in the messages.

    The norm of the mean is smaller than the mean of the norms if messages point in different
    directions. If the messages are orthogonal and have equal norms, their mean has this norm
    divided by the square root of the number of replicas. No row is multiplied by more than this
    square root.
    """

    def __call__(self, values: Tensor, indices: Tensor | None, chunk: int) -> Tensor:
        replicas = len(values)
        lengths = square_root(added(values.square())).unsqueeze(-1)
        mean_length = scatter_sum(lengths, None, 1).squeeze(-1) / replicas
        mean = Mean()(values, indices, chunk)
        longer = mean_length / square_root(added(mean.square()))
        scale = longer.nan_to_num(1.0, posinf=1.0).clamp_(max=replicas**0.5)
        return mean * scale.unsqueeze(-1)


class NormWeighing(Aggregation, Protocol):
    """An aggregation that weighs each message by its norm. All messages are read once to compute
    the norms, before they are aggregated.
    """

    def weights(self, norms: Tensor) -> Tensor:
        """The weight of each replica's message, computed from the norms of all messages.

        Shapes: `[replicas]` fp32 -> `[replicas]` fp32.
        """


@dataclass(frozen=True)
class ClippedMean:
    """Mean over all replicas. A message whose norm exceeds the median norm is first scaled down to
    the median norm (SparseLoCo, arXiv 2508.15706). Messages of zeros do not count for the median:
    otherwise, if half of the replicas sent nothing, nothing of the others would arrive.

    So one faulty or hostile replica that sends far too large values cannot dominate the update.
    """

    rowwise: ClassVar[bool] = False

    def __call__(self, values: Tensor, indices: Tensor | None, chunk: int) -> Tensor:
        norms = message_norms([values], values.shape[1])
        return WeightedMean(self.weights(norms))(values, indices, chunk)

    def weights(self, norms: Tensor) -> Tensor:  # shapes: [replicas] fp32 -> [replicas] fp32
        # the median comes from a sort: in some torch versions torch.nanmedian waits for the device
        empty = norms <= 0
        rising = norms.masked_fill(empty, torch.inf).sort().values
        last = empty.logical_not().sum(0, keepdim=True).sub_(1).clamp_(min=0)
        median = rising.gather(0, last // 2)
        return (median / norms).nan_to_num(1.0, posinf=1.0).clamp_(max=1.0)


@dataclass(frozen=True)
class WeightedMean:
    """Mean of the messages of all replicas. Each message is first multiplied by a weight.

    of_replicas: the weight of each replica's message, `[replicas]` fp32.
    """

    of_replicas: Tensor
    rowwise: ClassVar[bool] = True

    def __call__(self, values: Tensor, indices: Tensor | None, chunk: int) -> Tensor:
        return Mean()(values * self.of_replicas.view(-1, 1, 1), indices, chunk)


def message_norms(blocks: Iterable[Tensor], rows: int) -> Tensor:
    """The norm of each message. The norms do not depend on how the messages are cut into blocks.

    Args:
        blocks: Consecutive blocks of rows of all messages.
        rows: Rows of a whole message.

    Shapes: `[replicas, rows, k]` fp32 each -> `[replicas]` fp32.
    """
    sums = None
    for block in blocks:
        sums = sums or SumOfSquares(len(block), rows * block.shape[-1], block.device)
        sums.add(block.flatten(1))
        del block  # frees this block of rows before the next block is read
    assert sums is not None
    return square_root(sums.total())


AGGREGATIONS: dict[str, Aggregation] = {
    "mean": Mean(),
    "mean_nonzero": MeanNonzero(),
    "majority_vote": MajorityVote(),
    "clipped_mean": ClippedMean(),
    "rescaled_mean": RescaledMean(),
}
"""The built-in aggregations, by the name that the argument `aggregate` of a scheme takes."""


@dataclass(frozen=True)
class Divided:
    """Mean of messages that an all-reduce has already added: divides their sum by the number of
    replicas."""

    replicas: int
    rowwise: ClassVar[bool] = True

    def __call__(self, values: Tensor, indices: Tensor | None, chunk: int) -> Tensor:
        # shapes: [1, rows, k] -> [rows, k]
        return values[0] / self.replicas


@dataclass(frozen=True)
class Coefficients:
    """The coefficients that all replicas sent for a range of rows.

    Args:
        values: `[replicas, rows, k]` fp32.
        indices: `[replicas, rows, k]` integer; `[rows, k]` if all replicas sent the same indices;
            None if `values` are whole rows.
    """

    values: Tensor
    indices: Tensor | PackedIndices | None

    def part(self, first: int, end: int) -> Coefficients:
        """The coefficients of rows `first` to `end`, `end` excluded."""
        values = self.values[:, first:end]
        if self.indices is None:
            return Coefficients(values, None)
        return Coefficients(values, narrow(self.indices)[..., first:end, :])

    @property
    def shared(self) -> bool:
        """True if all replicas sent coefficients at the same indices, or whole rows."""
        return self.indices is None or (
            isinstance(self.indices, torch.Tensor) and self.indices.dim() == 2
        )

    def is_sparse(self, chunk: int) -> bool:
        """True if the inverse transform is computed as a sum of basis vectors: each replica chose
        its own coefficients, and all replicas together sent at most `most_summed` coefficients per
        row.
        """
        replicas, _, k = self.values.shape
        return not self.shared and replicas * k <= most_summed(chunk)

    def joined(self) -> tuple[Tensor, Tensor]:
        """Divides the coefficients of all replicas by the number of replicas, and concatenates them
        in each row, in replica order. Also returns the indices of these coefficients.

        An index that several replicas sent occurs several times in a row.

        Shapes: -> values `[rows, replicas * k]` fp32, indices `[rows, replicas * k]` integer.
        """
        assert self.indices is not None
        replicas = len(self.values)
        if replicas == 1:
            return self.values[0], narrow(self.indices)[0]
        values, indices = beside_each_other(list(self.values), list(narrow(self.indices)))
        return values.mul_(1 / replicas), indices


def aggregate(coefficients: Coefficients, aggregation: Aggregation, chunk: int) -> Tensor:
    """Aggregates the coefficients of all replicas to the coefficients of the update.

    Shapes: -> `[rows, chunk]` fp32.
    """
    values = coefficients.values
    indices = coefficients.indices
    if indices is not None and (not isinstance(indices, torch.Tensor) or indices.dim() == 3):
        return aggregation(values, narrow(indices), chunk)
    # all messages have equal indices: aggregate their values first, then scatter the aggregate
    together = aggregation(values, None, chunk)
    if indices is None:
        return together
    return scatter_sum([together], [narrow(indices)], chunk)
