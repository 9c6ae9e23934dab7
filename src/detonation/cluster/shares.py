"""Divides the examples of a step among any number of ranks."""

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple


class MicroBatch(NamedTuple):
    """Examples of a step that a rank computes in one forward and backward pass.

    examples: the indices of these examples among all examples of the step. weight: factor by which
    the mean loss of these examples is multiplied. With this factor, the mean of all ranks'
    gradients is the mean over all examples of the step.
    """

    examples: range
    weight: float


def share_bounds(examples: int, number: int, of: int) -> range:
    """Returns the indices of the examples in part `number`, if the `examples` of a step are divided
    into `of` parts.

    >>> share_bounds(7, 0, 2), share_bounds(7, 1, 2)
    (range(0, 4), range(4, 7))
    """
    return range(-(-number * examples // of), -(-(number + 1) * examples // of))


@lru_cache
def micro_batches(
    examples: int, largest: int, rank: int, ranks: int, together: int = 1
) -> tuple[MicroBatch, ...]:
    """Returns the share of `rank` in the `examples` of a step, divided into micro-batches.

    Each example is in the share of exactly one rank, and the shares differ by at most one example.
    A replica has `together` ranks. Under FSDP2 these ranks wait for each other in each pass, so
    they all get the same number of micro-batches, at least one. A rank with fewer examples repeats
    its last example with weight 0.

    Args:
        largest: Largest number of examples in a micro-batch. A micro-batch never crosses a multiple
            of `largest`, so its examples come from the same `largest` examples for any number of
            ranks.

    >>> micro_batches(7, 4, rank=1, ranks=2)
    (MicroBatch(examples=range(4, 7), weight=0.8571428571428571),)
    """
    if examples < 1 or largest < 1:
        raise ValueError(
            f"a step of {examples} examples cannot be divided into micro-batches of {largest}:"
            " pass at least 1 for both"
        )
    first = rank // together * together
    shares = [_cut(examples, largest, first + each, ranks) for each in range(together)]
    found = [MicroBatch(part, len(part) * ranks / examples) for part in shares[rank - first]]
    passes = max(1, *map(len, shares))
    end = share_bounds(examples, rank, ranks).stop
    found += [MicroBatch(range(end - 1, end), 0.0)] * (passes - len(found))
    return tuple(found)


def _cut(examples: int, largest: int, rank: int, ranks: int) -> list[range]:
    share = share_bounds(examples, rank, ranks)
    first_cut = (share.start // largest + 1) * largest
    ends = [share.start, *range(first_cut, share.stop, largest), share.stop]
    return [range(start, stop) for start, stop in pairwise(ends) if start < stop]
