"""Local state: the tensors that are private to a replica between steps, in the coordinates of its parameters."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from detonation.core.flat.layout import Layout


def require_same_keys(what: str, current: Iterable[str], saved: Iterable[str]) -> None:
    """Raises `ValueError` where a saved state, `what`, has other keys than the current one."""
    if odd := sorted({*current} ^ {*saved}):
        raise ValueError(f"{what} is of another model or scheme: {odd[0]} and {len(odd) - 1} more differ")


@dataclass(frozen=True)
class LocalState:
    """Tensors that share memory with the objects whose state they are.

    Args:
        layout: Of the flats.
        flats: By kind (`residual`, `anchor`, ...), `[rows, chunk]` each.
        others: By name, the tensors that are not in the coordinates of a parameter.
    """

    layout: Layout
    flats: Mapping[str, Tensor]
    others: Mapping[str, Tensor]

    def named(self) -> dict[str, Tensor]:
        """All tensors, to read: `kind.parameter` in the local shape of the parameter, then the others.

        Shapes: -> one local shape per kind and parameter.
        """
        parts = {
            f"{kind}.{slot.name}": part
            for kind, flat in self.flats.items()
            for slot, part in zip(self.layout.slots, self.layout.parts(flat), strict=True)
        }
        return parts | dict(self.others)

    @torch.no_grad()
    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Restores what `named` returned earlier.

        Shapes: as `named`.
        """
        for kind, flat in self.flats.items():
            self.layout.write(flat, [saved[f"{kind}.{slot.name}"] for slot in self.layout.slots])
        for name, tensor in self.others.items():
            tensor.copy_(saved[name])
