"""Which examples a step sees, as a pure function: a resumed run needs no loader state, only the number of its step."""

import hashlib
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from detonation.data.base import Augmented, Examples, Kind


def batch(examples: Examples, *, seed: int, step: int, part: int, parts: int, size: int) -> dict[str, Tensor]:
    """The batch of `part` (of `parts`) at `step`: `size` examples, the same whenever and wherever it is asked for.

    Each epoch is a permutation of all examples that depends on `seed` and the epoch alone. The parts of a step take
    neighbouring stretches of it, so no example is seen twice in an epoch, by whichever part. A batch may straddle two
    epochs. Augmentation, where there is some, depends on `seed`, `step` and `part` alone.

    Raises `ValueError` when one step needs more examples than there are.
    """
    _check(len(examples), step, part, parts, size)
    start = (step * parts + part) * size
    taken = examples[_positions(len(examples), seed, start, size)]
    if isinstance(examples, Augmented):
        generator = torch.Generator().manual_seed(_mix("augment", seed, step, part))
        return examples.augment(taken, generator)
    return taken


def batches(examples: Examples, size: int, limit: int | None = None) -> Iterator[dict[str, Tensor]]:
    """Batches of `size` in a fixed order, for validation: the same ones for everybody.

    With `limit`, only that many examples, spread evenly over all. The last batch may be short, and rows may hold
    different numbers of predictions, so a mean over batches must weight each one's loss by its `predictions`.
    """
    if size < 1 or (limit is not None and limit < 1):
        raise ValueError(f"size and limit of validation batches must be at least 1, not {size} and {limit}")
    count = len(examples) if limit is None else min(limit, len(examples))
    chosen = torch.arange(count) * len(examples) // count
    for start in range(0, count, size):
        yield examples[chosen[start : start + size]]


def predictions(kind: Kind, batch: dict[str, Tensor]) -> int:
    """How many predictions the mean loss of `batch` is a mean of: images, bytes of text, or bytes of translations."""
    labels = batch["labels"]
    # A causal model shifts its labels: the first byte of each row is predicted by nothing.
    counted = labels[:, 1:] if kind == "text" else labels
    return int((counted != -100).sum())


def _check(count: int, step: int, part: int, parts: int, size: int) -> None:
    if size < 1 or parts < 1 or step < 0:
        raise ValueError(f"a batch needs size >= 1, parts >= 1, step >= 0; not size {size}, parts {parts}, step {step}")
    if not 0 <= part < parts:
        raise ValueError(f"part {part} is not among the {parts} parts, which count from 0")
    if size * parts > count:
        raise ValueError(
            f"a step of {parts} parts x {size} examples needs {parts * size}, but there are {count}: "
            f"use a batch size of at most {count // parts}"
        )


def _positions(count: int, seed: int, start: int, size: int) -> Tensor:
    """The examples at `start` to `start + size` of the endless row of shuffled epochs; int64 [size]."""
    epoch, offset = divmod(start, count)
    here = _permutation(count, seed, epoch)[offset : offset + size]
    if len(here) == size:
        return here
    return torch.cat([here, _permutation(count, seed, epoch + 1)[: size - len(here)]])


@lru_cache(maxsize=4)
def _permutation(count: int, seed: int, epoch: int) -> Tensor:
    # Cached for the steps of one epoch, and for two sets and the seam between two epochs. Nobody writes to it.
    return torch.randperm(count, generator=torch.Generator().manual_seed(_mix("epoch", seed, epoch)))


def _mix(*parts: int | str) -> int:
    """63 bits that differ wherever any of `parts` does: neighbouring seeds must not share generators."""
    digest = hashlib.blake2b(":".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
