"""What every data set is: two sets of examples, and what a model must agree with."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

Kind = Literal["text", "images", "translation"]


class Examples(Protocol):
    """Examples that can be asked for in any order: `examples[indices]` is the batch for `model(**batch)`."""

    def __len__(self) -> int: ...

    def __getitem__(self, indices: Tensor) -> dict[str, Tensor]:
        """The examples at `indices`, int64 [B]; every tensor of the answer has B rows and owns its memory."""
        ...


@runtime_checkable
class Augmented(Examples, Protocol):
    """Examples that training varies at random."""

    def augment(self, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """A varied copy of `batch`; draws from `generator` alone."""
        ...


@dataclass(frozen=True)
class Data:
    """One task's data.

    `source` is the argument as it was given and `name` a short label for figures. `model` holds the arguments that a
    model has to agree with, such as `{"vocab": 256}`.
    """

    name: str
    source: str
    kind: Kind
    train: Examples
    validation: Examples
    model: Mapping[str, int] = field(default_factory=dict)
