"""Each aggregation: the messages of all replicas as one update, in sums of a stated order."""

import torch
from torch import Tensor


def aggregated(lines: Tensor, values: Tensor, how: str) -> Tensor:
    """One update of all messages.

    Args:
        lines: `[replicas, rows, n]`, where a coefficient that a replica did not send is 0.
        values: `[replicas, rows, k]`, those that were sent.
    """
    replicas = len(lines)
    if how == "mean":
        return in_order(lines) / replicas
    if how == "mean_nonzero":
        return in_order(lines) / in_order((lines != 0).float()).clamp(min=1)
    if how == "majority_vote":
        return in_order(lines.sign()).sign() * in_order(lines.abs()) / replicas
    if how == "rescaled_mean":
        mean = in_order(lines) / replicas
        lengths = in_order(root(by_halves(values.square())).unsqueeze(-1)) / replicas
        longer = lengths / root(by_halves(mean.square())).unsqueeze(-1)
        return mean * longer.nan_to_num(1.0, posinf=1.0).clamp(max=replicas**0.5)
    assert how == "clipped_mean"
    norms = torch.stack([norm(each) for each in values])
    lengths = norms[norms > 0].sort().values  # an empty message says nothing about lengths
    weights = torch.ones(replicas)
    if len(lengths):
        median = lengths[(len(lengths) - 1) // 2]
        weights = torch.where(norms > median, median / norms, weights)
    return in_order(lines * weights.view(-1, 1, 1)) / replicas


def in_order(numbers: Tensor) -> Tensor:
    """The sum over the first dimension, replica after replica."""
    total = numbers[0]
    for each in numbers[1:]:
        total = total + each
    return total


def by_halves(numbers: Tensor) -> Tensor:
    """The sum over the last dimension: element i and element i + n / 2, until one is left."""
    count = numbers.shape[-1]
    half = 1 << (count - 1).bit_length()
    numbers = torch.nn.functional.pad(numbers, (0, half - count))
    while half > 1:
        half //= 2
        numbers = numbers[..., :half] + numbers[..., half:]
    return numbers[..., 0]


def norm(values: Tensor) -> Tensor:
    """The norm of a whole message: 4,096 lanes of at most 128 parts add squares in order, then
    the lanes of a part are added by halves, and the parts."""
    squares = values.flatten().square()
    width = 4096 * max(1, min(128, -(-len(squares) // 4096)))
    lanes = torch.nn.functional.pad(squares, (0, -len(squares) % width)).view(-1, width)
    return root(by_halves(by_halves(in_order(lanes).view(-1, 4096))))


def root(numbers: Tensor) -> Tensor:
    """The square root, rounded once."""
    return numbers.double().sqrt().float()
