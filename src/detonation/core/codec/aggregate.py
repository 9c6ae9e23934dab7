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
    """A pure function from the coefficients of all replicas to one update, with the same bits on
    every replica.

    Indices within a row are unique, so no two writes of one replica collide, and replicas are added
    in their order.
    """

    @property
    def rowwise(self) -> bool:
        """True if each row of the result depends only on the same row of the messages; False for a
        `NormWeighing`."""

    def __call__(self, values: Tensor, indices: Tensor | None, chunk: int) -> Tensor:
        """Aggregates one message per replica.

        Args:
            values: Of all replicas, in replica order.
            indices: Of all replicas, or None where `values` are whole rows.
            chunk: Coefficients per row.

        Shapes: values `[replicas, rows, k]` fp32, indices `[replicas, rows, k]` integer -> `[rows,
        chunk]` fp32.
        """


class _Rowwise:
    rowwise: ClassVar[bool] = True


@dataclass(frozen=True)
class Mean(_Rowwise):
    """The mean over all replicas; a replica that does not send a coefficient counts as 0."""

    def __call__(self, values: Tensor, indices: Tensor | None, chunk: int) -> Tensor:
        total = scatter_sum(values, indices, chunk)
        return (
            total.div_(len(values)) if len(values) > 1 else total
        )  # of one message it may be that message


@dataclass(frozen=True)
class MeanNonzero(_Rowwise):
    """The mean over the replicas that sent a coefficient other than 0, as in the code published
    with DeMo."""

    def __call__(self, values: Tensor, indices: Tensor | None, chunk: int) -> Tensor:
        senders = scatter_sum((values != 0).to(values.dtype), indices, chunk)
        return scatter_sum(values, indices, chunk) / senders.clamp_(min=1)


@dataclass(frozen=True)
class MajorityVote(_Rowwise):
    """The sign that most replicas sent, times the mean magnitude; 0 where the vote is tied."""

    def __call__(self, values: Tensor, indices: Tensor | None, chunk: int) -> Tensor:
        signs = scatter_sum(values.sign(), indices, chunk).sign()
        return signs * scatter_sum(values.abs(), indices, chunk) / len(values)


@dataclass(frozen=True)
class RescaledMean(_Rowwise):
    """The mean over all replicas, each row as long as those of the replicas are on average.

    Messages that point in different directions have a mean shorter than each: by the square root of
    their number where they have nothing in common. A row gets no longer than by that factor.
    """

    def __call__(self, values: Tensor, indices: Tensor | None, chunk: int) -> Tensor:
        lengths = scatter_sum(square_root(added(values.square())).unsqueeze(-1), None, 1).squeeze(
            -1
        ) / len(values)
        mean = Mean()(values, indices, chunk)
        longer = lengths / square_root(added(mean.square()))
        return mean * longer.nan_to_num(1.0, posinf=1.0).clamp_(max=len(values) ** 0.5).unsqueeze(
            -1
        )


class NormWeighing(Aggregation, Protocol):
    """An aggregation that weighs each message by the norms of all: one pass over the messages comes
    before it."""

    def weights(self, norms: Tensor) -> Tensor:
        """The weight of each replica.

        Shapes: `[replicas]` fp32 -> `[replicas]` fp32.
        """


@dataclass(frozen=True)
class ClippedMean:
    """The mean over replicas, each scaled down to the median of their norms (SparseLoCo, arXiv
    2508.15706).

    A replica whose values are far too large, or an attacker, does not dominate the others.
    """

    rowwise: ClassVar[bool] = False

    def __call__(self, values: Tensor, indices: Tensor | None, chunk: int) -> Tensor:
        return WeightedMean(self.weights(message_norms([values], values.shape[1])))(
            values, indices, chunk
        )

    def weights(self, norms: Tensor) -> Tensor:  # [replicas] fp32 -> the same
        empty = norms <= 0  # torch.nanmedian waits for a device to count them, in some versions
        rising = norms.masked_fill(empty, torch.inf).sort().values
        middle = rising.gather(
            0, empty.logical_not().sum(0, keepdim=True).sub_(1).clamp_(min=0) // 2
        )
        return (middle / norms).nan_to_num(1.0, posinf=1.0).clamp_(max=1.0)


@dataclass(frozen=True)
class WeightedMean:
    """The mean over all replicas of messages with a weight for each replica, `[replicas]` fp32."""

    of_replicas: Tensor
    rowwise: ClassVar[bool] = True

    def __call__(self, values: Tensor, indices: Tensor | None, chunk: int) -> Tensor:
        return Mean()(values * self.of_replicas.view(-1, 1, 1), indices, chunk)


def message_norms(blocks: Iterable[Tensor], rows: int) -> Tensor:
    """The norm of each message, whatever the blocks of rows in which they are read.

    Args:
        rows: Of a message.

    Shapes: `[replicas, rows, k]` fp32 each -> `[replicas]` fp32.
    """
    sums = None
    for block in blocks:
        sums = sums or SumOfSquares(len(block), rows * block.shape[-1], block.device)
        sums.add(block.flatten(1))
        del block  # before the next one is read
    assert sums is not None
    return square_root(sums.total())


AGGREGATIONS: dict[str, Aggregation] = {
    "mean": Mean(),
    "mean_nonzero": MeanNonzero(),
    "majority_vote": MajorityVote(),
    "clipped_mean": ClippedMean(),
    "rescaled_mean": RescaledMean(),
}
"""Every aggregation by name."""


@dataclass(frozen=True)
class Divided:
    """The mean of messages that the network has added up already."""

    replicas: int
    rowwise: ClassVar[bool] = True

    def __call__(
        self, values: Tensor, indices: Tensor | None, chunk: int
    ) -> Tensor:  # [1, rows, k] -> [rows, k]
        return values[0] / self.replicas


@dataclass(frozen=True)
class Coefficients:
    """The coefficients that the replicas sent of some rows.

    Args:
        values: `[replicas, rows, k]` fp32.
        indices: `[replicas, rows, k]` integer; `[rows, k]` where all replicas sent the same ones;
            None where the values are whole rows.
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
        return self.indices is None or (
            isinstance(self.indices, torch.Tensor) and self.indices.dim() == 2
        )

    def is_sparse(self, chunk: int) -> bool:
        """True if the inverse of a basis is a sum over coefficients: of few, of which each replica
        chose its own."""
        replicas, _, k = self.values.shape
        return not self.shared and replicas * k <= most_summed(chunk)

    def joined(self) -> tuple[Tensor, Tensor]:
        """All coefficients, times one over the number of replicas, and their indices, in replica
        order.

        An index that several replicas sent occurs several times.

        Shapes: -> values `[rows, replicas * k]` fp32, indices `[rows, replicas * k]` integer.
        """
        assert self.indices is not None
        replicas = len(self.values)
        if replicas == 1:
            return self.values[0], narrow(self.indices)[0]
        values, indices = beside_each_other(list(self.values), list(narrow(self.indices)))
        return values.mul_(1 / replicas), indices


def aggregate(coefficients: Coefficients, aggregation: Aggregation, chunk: int) -> Tensor:
    """Aggregates the coefficients of all replicas to those of the update.

    Shapes: -> `[rows, chunk]` fp32.
    """
    values, indices = coefficients.values, coefficients.indices
    if indices is not None and (not isinstance(indices, torch.Tensor) or indices.dim() == 3):
        return aggregation(values, narrow(indices), chunk)
    together = aggregation(values, None, chunk)  # combined first, scattered once
    return together if indices is None else scatter_sum([together], [narrow(indices)], chunk)
