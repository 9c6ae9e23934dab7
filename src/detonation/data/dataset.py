"""The interface of data sets, and the drawing of batches. Seed and step determine a batch, so a
resumed run draws the same batches. A stream also saves its position, so that a resumed run need not
read the data before this position.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

DataKind = Literal["text", "images", "translation", "labels"]


class Examples(Protocol):
    """Examples with random access: `examples[indices]` returns a batch for `model(**batch)`."""

    def __len__(self) -> int: ...

    def __getitem__(self, indices: Tensor) -> dict[str, Tensor]:
        """Returns a batch of the examples at `indices`. The tensors of the batch share no storage
        with the examples.

        Shapes: `[B]` int64 -> tensors of `[B, ...]`.
        """
        ...


@runtime_checkable
class Augmented(Examples, Protocol):
    """Examples that are changed at random (augmented) in training."""

    def augment(self, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """Returns an augmented copy of `batch`; `generator` is the only source of randomness."""
        ...


@runtime_checkable
class Streamed(Protocol):
    """Training examples that are read in order. A step has one part for each rank that the run had
    at its start. Each part reads different examples.
    """

    def draw(self, step: int, part: int, parts: int, size: int) -> dict[str, Tensor]:
        """Returns the batch of one part of a step. The batch depends only on the arguments. Calls
        are fast if their steps are in order.
        """
        ...

    def position(self, part: int, parts: int) -> dict[str, Any]:
        """Returns the position of a part as JSON values, for a checkpoint."""
        ...

    def go_to(self, part: int, parts: int, position: dict[str, Any]) -> None:
        """Continues a part at a saved position, without reading all data before this position."""
        ...


@dataclass(frozen=True)
class Data:
    """The data of one task: training examples and validation examples.

    Args:
        name: Short label for figures.
        source: Source in the recipe.
        model: Arguments that a model must match, such as `{"vocab": 256}`.
        exported: What an exported model says about the data: `labels`, the names of the classes by
            their indices, and `preprocessor`, which becomes preprocessor_config.json.
        files: Names and sizes of the files of a stream, in the order in which they are read. A
            resumed run warns if names or sizes have changed.

    Raises:
        ValueError: The examples lack a method.
    """

    name: str
    source: str
    kind: DataKind
    train: Examples | Streamed
    validation: Examples
    model: Mapping[str, int] = field(default_factory=dict)
    exported: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        methods: Sequence[str] = _OF_EXAMPLES
        if hasattr(self.train, "draw") and not hasattr(self.train, "__getitem__"):
            methods = _OF_STREAM
        _require_methods("training", self.train, methods)
        _require_methods("validation", self.validation, _OF_EXAMPLES)


_OF_EXAMPLES = ("__len__", "__getitem__")
_OF_STREAM = ("draw", "position", "go_to")


def _require_methods(what: str, examples: object, names: Sequence[str]) -> None:
    """Raises `ValueError` if `examples` lacks one of the methods `names`."""
    lacking = [name for name in names if not hasattr(examples, name)]
    if lacking:
        raise ValueError(
            f"{type(examples).__name__}, the {what} data, lack {', '.join(lacking)}: a stream needs"
            " draw, position and go_to; all other data need __len__ and __getitem__"
        )


def batch(
    examples: Examples | Streamed, *, seed: int, step: int, part: int, parts: int, size: int
) -> dict[str, Tensor]:
    """Draws the batch of one part of a step. A step has `parts` parts of `size` examples each.

    Each epoch is a permutation of all examples, which depends only on `seed` and the index of the
    epoch. The parts of a step use consecutive sections of this permutation, so no two parts see the
    same example in one epoch. A batch may span two epochs. Augmentation depends only on `seed`,
    `step` and `part`. A stream ignores the seed and keeps its own order.

    Shapes: tensors of `[size, ...]`.

    Raises:
        ValueError: One step needs more examples than there are, or an argument is out of range.
    """
    if isinstance(examples, Streamed):
        return examples.draw(step, part, parts, size)
    _check(len(examples), step, part, parts, size)
    start = (step * parts + part) * size
    drawn = examples[_positions(len(examples), seed, start, size)]
    if isinstance(examples, Augmented):
        generator = torch.Generator().manual_seed(_mix("augment", seed, step, part))
        return examples.augment(drawn, generator)
    return drawn


def batches(examples: Examples, size: int, limit: int | None = None) -> Iterator[dict[str, Tensor]]:
    """Yields batches of examples for validation, in a fixed order.

    The last batch may have fewer examples than the other batches, and batches may have different
    numbers of predictions. To average over batches, weight the loss of each batch by its
    `predictions`.

    Args:
        limit: Largest number of examples to use, at even distances; None uses all examples.
    """
    if size < 1 or (limit is not None and limit < 1):
        raise ValueError(
            f"size and limit of validation batches must be at least 1, not {size} and {limit}"
        )
    count = len(examples)
    if limit is not None:
        count = min(limit, count)
    chosen = torch.arange(count) * len(examples) // count
    for start in range(0, count, size):
        yield examples[chosen[start : start + size]]


def predictions(kind: DataKind, batch: dict[str, Tensor]) -> int:
    """Returns the number of predictions in `batch`: its labels, except those that the model does
    not predict. The loss of a batch is the mean over its predictions.

    If a batch has no `labels`, returns the number of rows of the batch.

    Shapes: `labels` `[B]` or `[B, T]` int64.
    """
    if "labels" not in batch:
        return len(next(iter(batch.values())))
    labels = batch["labels"]
    if kind == "text":
        labels = labels[:, 1:]  # a causal model does not predict the first token of a row
    return int((labels != -100).sum())


def _check(count: int, step: int, part: int, parts: int, size: int) -> None:
    if size < 1 or parts < 1 or step < 0:
        raise ValueError(
            f"a batch needs size >= 1, parts >= 1, step >= 0; not size {size}, parts {parts}, step"
            f" {step}"
        )
    if not 0 <= part < parts:
        raise ValueError(f"part is {part}, but must be at least 0 and less than parts, {parts}")
    if size * parts > count:
        raise ValueError(
            f"a step of {parts} parts x {size} examples needs {parts * size}, but there are"
            f" {count}: use a batch size of at most {count // parts}"
        )


def _positions(count: int, seed: int, start: int, size: int) -> Tensor:
    """Returns the indices of `size` examples, [size] int64. They are consecutive in the endless
    sequence of shuffled epochs, and begin at its position `start`.
    """
    epoch, offset = divmod(start, count)
    head = _permutation(count, seed, epoch)[offset : offset + size]
    if len(head) == size:
        return head
    tail = _permutation(count, seed, epoch + 1)[: size - len(head)]
    return torch.cat([head, tail])


@lru_cache(maxsize=4)
def _permutation(count: int, seed: int, epoch: int) -> Tensor:
    # A batch may span two epochs, so the cache must hold at least two permutations.
    # Callers must not change the permutation, because the cache holds the same tensor.
    generator = torch.Generator().manual_seed(_mix("epoch", seed, epoch))
    return torch.randperm(count, generator=generator)


def _mix(*parts: int | str) -> int:
    """Hashes `parts` to 63 bits, so that consecutive seeds give unrelated random numbers."""
    digest = hashlib.blake2b(":".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
