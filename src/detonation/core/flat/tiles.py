"""Tiles: a matrix cut into squares, each of which is a row of the flat."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Tiles:
    """The squares of `side` x `side` coordinates that cover a matrix, zero-padded at its lower and right edge.

    Tile [i, j] is row i * across + j, in row-major order.
    """

    height: int
    width: int
    side: int

    @classmethod
    def of(cls, shape: Sequence[int], side: int) -> Tiles | None:
        """The tiles of a parameter, folded to [first, rest]; None for one that does not fill a single tile.

        >>> Tiles.of((65, 64), 64).rows, Tiles.of((128, 3, 5, 5), 64).rows, Tiles.of((63, 999), 64)
        (2, 4, None)
        """
        height, width = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (0, 0)
        return cls(height, width, side) if side and min(height, width) >= side else None

    @property
    def down(self) -> int:
        return -(-self.height // self.side)

    @property
    def across(self) -> int:
        return -(-self.width // self.side)

    @property
    def rows(self) -> int:
        return self.down * self.across

    def cut(self, tensor: Tensor) -> Tensor:
        """The tiles of `tensor`, in memory of their own.

        Shapes: any of height * width elements -> `[rows, side * side]`.
        """
        side = self.side
        missing = (0, self.across * side - self.width, 0, self.down * side - self.height)
        padded = torch.nn.functional.pad(tensor.reshape(self.height, self.width), missing)
        return padded.view(self.down, side, self.across, side).transpose(1, 2).reshape(self.rows, side * side)

    def join(self, tiles: Tensor) -> Tensor:
        """The inverse of `cut`, in memory of its own.

        Shapes: `[rows, side * side]` -> `[height, width]`.
        """
        side = self.side
        squares = tiles.view(self.down, self.across, side, side).transpose(1, 2)
        return squares.reshape(self.down * side, self.across * side)[: self.height, : self.width]
