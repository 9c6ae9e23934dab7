"""Aggregations: how the coefficients that several replicas sent become one update."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from detonation.core.codec.indices import PackedIndices, as_int64, narrow


class Aggregation(Protocol):
    """A pure function from the coefficients of all replicas to one update, with the same bits on every replica.

    Indices within a row are unique, so no two writes of one replica collide, and replicas are added in their order.
    """

    @property
    def rowwise(self) -> bool:
        """True if each row of the result depends only on the same row of the messages, so that blocks of rows can be
        aggregated one after another."""
        ...

    def __call__(self, values: Sequence[Tensor], indices: Sequence[Tensor | None], chunk: int) -> Tensor:
        """Aggregates one message per replica.

        Args:
            values: One tensor per replica, in replica order.
            indices: One tensor per replica, or None where `values` are whole rows.
            chunk: Coefficients per row.

        Shapes: per replica values `[rows, k]` fp32 and indices `[rows, k]` int64 -> `[rows, chunk]` fp32.
        """
        ...


@dataclass(frozen=True)
class Mean:
    """The mean over all replicas; a replica that does not send a coefficient counts as 0."""

    rowwise: ClassVar[bool] = True

    def __call__(self, values: Sequence[Tensor], indices: Sequence[Tensor | None], chunk: int) -> Tensor:
        # per replica values [rows, k] fp32, indices [rows, k] int64 or None -> [rows, chunk] fp32
        total = scatter_sum(values, indices, chunk)
        return total.div_(len(values)) if len(values) > 1 else total  # one may be the receive buffer itself


@dataclass(frozen=True)
class MeanNonzero:
    """The mean over the replicas that sent a coefficient other than 0, as in the code published with DeMo."""

    rowwise: ClassVar[bool] = True

    def __call__(self, values: Sequence[Tensor], indices: Sequence[Tensor | None], chunk: int) -> Tensor:
        # per replica values [rows, k] fp32, indices [rows, k] int64 or None -> [rows, chunk] fp32
        senders = scatter_sum([(v != 0).to(v.dtype) for v in values], indices, chunk)
        return scatter_sum(values, indices, chunk) / senders.clamp_(min=1)


@dataclass(frozen=True)
class MajorityVote:
    """The sign that most replicas sent, times the mean magnitude; 0 where the vote is tied."""

    rowwise: ClassVar[bool] = True

    def __call__(self, values: Sequence[Tensor], indices: Sequence[Tensor | None], chunk: int) -> Tensor:
        # per replica values [rows, k] fp32, indices [rows, k] int64 or None -> [rows, chunk] fp32
        signs = scatter_sum([v.sign() for v in values], indices, chunk).sign()
        return signs * scatter_sum([v.abs() for v in values], indices, chunk) / len(values)


@dataclass(frozen=True)
class ClippedMean:
    """The mean over replicas, each scaled down to the median of their norms (SparseLoCo, arXiv 2508.15706).

    A replica whose values are far too large, or an attacker, does not dominate the others.
    """

    rowwise: ClassVar[bool] = False

    def __call__(self, values: Sequence[Tensor], indices: Sequence[Tensor | None], chunk: int) -> Tensor:
        # per replica values [rows, k] fp32, indices [rows, k] int64 or None -> [rows, chunk] fp32
        norms = torch.stack([v.norm() for v in values])
        empty = norms <= 0  # torch.nanmedian waits for a device to count them, in some versions
        rising = norms.masked_fill(empty, torch.inf).sort().values
        middle = rising.gather(0, empty.logical_not().sum(0, keepdim=True).sub_(1).clamp_(min=0) // 2)
        scales = (middle / norms).nan_to_num(1.0, posinf=1.0).clamp_(max=1.0)
        return Mean()([v * scale for v, scale in zip(values, scales, strict=True)], indices, chunk)


AGGREGATIONS: dict[str, Aggregation] = {
    "mean": Mean(),
    "mean_nonzero": MeanNonzero(),
    "majority_vote": MajorityVote(),
    "clipped_mean": ClippedMean(),
}
"""Every aggregation by name."""


def scatter_sum(values: Sequence[Tensor], indices: Sequence[Tensor | None], chunk: int) -> Tensor:
    """The sum of all messages.

    Shapes: per replica values `[rows, k]` and indices `[rows, k]` int64, or None for whole rows -> `[rows, chunk]`.
    """
    total: Tensor | None = None
    for sent, where in zip(values, indices, strict=True):
        if where is None:
            total = sent if total is None else total + sent
        else:
            total = torch.zeros(len(sent), chunk, dtype=sent.dtype, device=sent.device) if total is None else total
            total.scatter_add_(1, where, sent)
    assert total is not None
    return total


@dataclass(frozen=True)
class Received:
    """The messages that all replicas received, the same on each, and the aggregation that makes them one update.

    Args:
        values: One `[rows, k]` fp32 per replica, in replica order.
        indices: The indices of each replica's values, or None where each replica sends whole rows.
        aggregation: Makes one update of them.
        release: Returns the receive buffer; called once all of it is decoded.
    """

    values: Sequence[Tensor]
    indices: Sequence[Tensor | PackedIndices | None]
    aggregation: Aggregation = Mean()
    release: Callable[[], None] | None = None

    def is_sparse_mean(self, chunk: int) -> bool:
        """True for a mean of few coefficients of each row."""
        sent = sum(values.shape[1] for values in self.values)
        return isinstance(self.aggregation, Mean) and all(i is not None for i in self.indices) and sent <= chunk // 4

    def split(self, rows: int) -> Iterator["Received"]:
        """Yields blocks of `rows` rows of the messages, of a selection that differs between replicas."""
        for first in range(0, len(self.values[0]), rows):
            values = [v[first : first + rows] for v in self.values]
            yield Received(
                values, [narrow(i)[first : first + rows] for i in self.indices if i is not None], self.aggregation
            )

    def concatenated(self) -> tuple[Tensor, Tensor]:
        """All coefficients of a sparse mean, divided by the number of replicas, and their indices.

        An index that several replicas sent occurs several times.

        Shapes: -> values `[rows, replicas * k]` fp32, indices `[rows, replicas * k]` int32.
        """
        (rows, k), count = self.values[0].shape, len(self.values)
        values = self.values[0].new_empty(rows, count, k)
        indices = torch.empty(values.shape, dtype=torch.int32, device=values.device)
        sent = [narrow(where) for where in self.indices if where is not None]
        for i in range(count):  # torch.cat takes longer with rows so narrow
            values[:, i], indices[:, i] = self.values[i], sent[i]
        return values.flatten(1).div_(count), indices.flatten(1)


def aggregate(received: Received, chunk: int) -> Tensor:
    """Aggregates the received messages to the coefficients of the update.

    Shapes: -> `[rows, chunk]` fp32.
    """
    first, combine = received.indices[0], received.aggregation
    if all(indices is first for indices in received.indices):  # a shared selection: combined first, scattered once
        together = combine(received.values, [None] * len(received.values), chunk)
        return together if first is None else scatter_sum([together], as_int64([first]), chunk)
    return combine(received.values, as_int64([i for i in received.indices if i is not None]), chunk)
