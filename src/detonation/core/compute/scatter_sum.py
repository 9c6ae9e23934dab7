"""Sums in a fixed order, so that they are bitwise equal on every processor and with every
library."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from detonation.core.compute import kernel_library

if TYPE_CHECKING:
    from torch import Tensor

ONE_PASS_CHUNK = 256
"""Longest row whose coefficients an accelerator adds in one pass, as weighted sums of unit vectors.
"""


LANES = 4096
"""Number of squares that one program on an accelerator adds in parallel; see `SumOfSquares`."""
SUM_PARTS = 128
"""Largest number of programs that add squares on an accelerator; see `SumOfSquares`."""


@lru_cache
def most_summed(chunk: int) -> int:
    """Largest count of coefficients per row, of all replicas together, that are decoded as a
    weighted sum of basis vectors.

    If a row has more coefficients, the coefficients are aggregated first and then multiplied by the
    basis (`product_in_order`). The two methods round differently, so all engines must switch from
    one to the other at this count.
    """
    return min(chunk // 2, 64)


class SumOfSquares:
    """Sums of the squares of fp32 numbers that arrive in blocks of any size.

    The number with index n belongs to lane n % `LANES` of part n // `LANES` % `SUM_PARTS`. Each
    lane adds its squares in order. Then `added` adds the lanes of each part, and after that the
    parts. Each product and each sum is rounded separately, so the sums do not depend on the sizes
    of the blocks.
    """

    def __init__(self, sums: int, numbers: int, device: torch.device) -> None:
        parts = max(1, min(SUM_PARTS, -(-numbers // LANES)))
        self._lanes = torch.zeros(sums, parts * LANES, dtype=torch.float32, device=device)
        self._at = 0

    def add(self, numbers: Tensor) -> None:
        """Adds the squares of the numbers in row i of `numbers` to sum i, for every row.

        Shapes: `[sums, n]` fp32.
        """
        width = self._lanes.shape[1]
        while numbers.shape[1]:
            count = min(width - self._at, numbers.shape[1])
            self._lanes[:, self._at : self._at + count] += numbers[:, :count].square()
            numbers = numbers[:, count:]
            self._at = (self._at + count) % width

    def total(self) -> Tensor:
        """The sums of the squares of all numbers so far.

        Shapes: -> `[sums]` fp32.
        """
        return added(added(self._lanes.view(len(self._lanes), -1, LANES)))


def added(numbers: Tensor) -> Tensor:
    """The sum over the last dimension, of length n: adds elements i and i + n / 2, and repeats this
    with the n / 2 sums until one sum is left.

    The last dimension is first padded with zeros to a power of two.

    Shapes: `[..., n]` -> `[...]`.
    """
    count = numbers.shape[-1]
    half = 1 << max(0, count - 1).bit_length()
    if half != count:
        numbers = torch.nn.functional.pad(numbers, (0, half - count))
    while half := half // 2:
        numbers = numbers[..., :half] + numbers[..., half:]
    return numbers.squeeze(-1)


def square_root(numbers: Tensor) -> Tensor:
    """The correctly rounded square root of each number. torch's own square root in fp32 differs
    between AVX2 and AVX-512.

    Shapes: any, fp32.
    """
    return numbers.double().sqrt_().float()


def scatter_sum(
    values: Tensor | Sequence[Tensor], indices: Tensor | Sequence[Tensor | None] | None, chunk: int
) -> Tensor:
    """Adds the values of all replicas in replica order, each value at its index in its row. The
    returned tensor may share memory with `values`.

    Shapes: values `[replicas, rows, k]`, indices `[replicas, rows, k]` integer, or None for whole
    rows; or sequences of `[rows, k]`, one for each replica -> `[rows, chunk]`.
    """
    first = values[0]
    if indices is None or indices[0] is None:
        return _added(values)
    if len(values) > 1 and first.device.type != "cpu" and chunk <= ONE_PASS_CHUNK:
        # adds in one pass in replica order, because atomic additions have no fixed order
        sent, where = beside_each_other(list(values), [i for i in indices if i is not None])
        return weighted_sum(_units(chunk, first.device), sent, where)
    total = torch.zeros(len(first), chunk, dtype=first.dtype, device=first.device)
    for value, where in zip(values, indices, strict=True):
        assert where is not None
        total.scatter_add_(1, where.to(torch.int64), value)
    return total


def beside_each_other(values: list[Tensor], indices: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Concatenates the values of all messages in each row, in replica order; the indices likewise.

    Shapes: per replica `[rows, k]` fp32 and `[rows, k]` integer -> `[rows, replicas * k]` fp32, and
    int32.
    """
    if values[0].device.type == "cpu":  # torch.cat copies all values of a row at once
        return torch.cat(values, 1), torch.cat(indices, 1).to(torch.int32)
    shape = len(values[0]), len(values), values[0].shape[1]
    sent = torch.empty(shape, dtype=torch.float32, device=values[0].device)
    where = torch.empty(shape, dtype=torch.int32, device=values[0].device)
    torch._foreach_copy_([*sent.unbind(1), *where.unbind(1)], [*values, *indices])
    return sent.flatten(1), where.flatten(1)


def weighted_sum(vectors: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    """For each row, the sum of the `vectors` at the row's `indices`, each times its weight. An
    index may occur several times in a row.

    Each sum begins at zero and adds the weighted vectors in the order of the row, each by one fused
    multiply-add in fp32. torch's embedding bag computes the sums in this way on x86-64 and CUDA.
    Every engine must compute the same bits.

    Shapes: vectors `[chunk, n]`, weights `[rows, sent]` fp32, indices `[rows, sent]` integer ->
    `[rows, n]`.
    """
    if indices.dtype not in (torch.int32, torch.int64):
        indices = indices.to(torch.int32)
    begins = _begins(*indices.shape, indices.dtype, indices.device)
    return torch.embedding_bag(
        vectors, indices.reshape(-1), begins, per_sample_weights=weights.reshape(-1)
    )[0]


def product_in_order(weights: Tensor, vectors: Tensor) -> Tensor:
    """The matrix product `weights @ vectors` in a fixed order: each element begins at zero and is a
    chain of fused multiply-adds.

    Shapes: weights `[rows, n]`, vectors `[n, m]` fp32 -> `[rows, m]`.
    """
    if (
        weights.device.type == "cpu"
        and vectors.shape[0] == vectors.shape[1] in kernel_library.KERNEL_CHUNKS
    ):
        # the compiled kernel is exact, so replicas with and without kernels get equal bits
        library = kernel_library.load_library()
        if library:
            return library.product(weights.contiguous(), vectors.contiguous())
    every = torch.arange(weights.shape[1], dtype=torch.int32, device=weights.device)
    return weighted_sum(vectors, weights, every.expand(weights.shape))


def _added(values: Tensor | Sequence[Tensor]) -> Tensor:
    """The sum of the whole rows of all replicas."""  # shapes: per replica [rows, k] -> [rows, k]
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
    """Offset of each row in the flattened indices, cached. torch could take the indices as a
    matrix, but then it would compute these offsets again at every call.
    """
    return torch.arange(0, rows * sent, sent, dtype=dtype, device=device)  # [rows]
