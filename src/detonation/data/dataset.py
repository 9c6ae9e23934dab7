"""The interface of data sets: examples for training and validation, and the sizes that a model must match."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

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
    train: Examples
    validation: Examples
    model: Mapping[str, int] = field(default_factory=dict)
