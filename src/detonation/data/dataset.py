"""The interface of data sets: examples for training and validation, and the sizes that a model must match."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

DataKind = Literal["text", "images", "translation"]


class Examples(Protocol):
    """Examples with random access: `examples[indices]` is a batch for `model(**batch)`."""

    def __len__(self) -> int: ...

    def __getitem__(self, indices: Tensor) -> dict[str, Tensor]:
        """The examples at `indices`. Every tensor of the batch owns its memory.

        Shapes: `[B]` int64 -> tensors of `[B, ...]`.
        """
        ...


@runtime_checkable
class Augmented(Examples, Protocol):
    """Examples with random augmentation for training."""

    def augment(self, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """Returns an augmented copy of `batch`; `generator` is the only source of randomness."""
        ...


@runtime_checkable
class Streamed(Protocol):
    """Examples for training that are read in order. Each part of the ranks reads its own."""

    def draw(self, step: int, part: int, parts: int, size: int) -> dict[str, Tensor]:
        """The batch of one part of a step: a pure function of its arguments, fast for the step after the last one."""
        ...

    def position(self, part: int, parts: int) -> dict[str, Any]:
        """The position of a part as JSON values, for a checkpoint."""
        ...

    def go_to(self, part: int, parts: int, position: dict[str, Any]) -> None:
        """Continues at a saved position, without reading all that lies before it."""
        ...


@dataclass(frozen=True)
class Data:
    """The data of one task.

    Args:
        name: A short label for figures.
        source: The source as the recipe gives it.
        model: Arguments that a model must match, such as `{"vocab": 256}`.
    """

    name: str
    source: str
    kind: DataKind
    train: Examples | Streamed
    validation: Examples
    model: Mapping[str, int] = field(default_factory=dict)
