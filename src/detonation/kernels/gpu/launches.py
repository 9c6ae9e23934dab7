"""Launches: the host's side of the Triton kernels. Nothing here reads from a device, or waits for it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from detonation.kernels.gpu.choosing import rotation_kernel
from detonation.kernels.gpu.decode import decode_kernel
from detonation.kernels.gpu.encode import encode_kernel
from detonation.kernels.gpu.inspection import Inspector, Limits, Scanner, align
from detonation.kernels.gpu.launching import (
    INTERPRETED,
    KIND_OF,
    Addresses,
    Coding,
    Places,
    Slots,
    launch,
    launch_counts,
    uploaded,
)

__all__ = [
    "KIND_OF",
    "Addresses",
    "Coder",
    "Coding",
    "Inspector",
    "Limits",
    "Places",
    "Rotations",
    "Scanner",
    "Slots",
    "align",
    "launch_counts",
    "uploaded",
]

PROGRAMS = 1024
"""The most programs of a launch whose programs work on one piece after the other: a few for each multiprocessor."""
TILE = 65536 if INTERPRETED else 1024
"""About the coordinates that a program holds in registers at once: with more of them, they spill. The interpreter takes
as long for few as for many."""
PERMUTATIONS = 64
"""The permutations of a random selection, as in `selection.Random`."""


def padded_matrix(matrix: Tensor, columns: int) -> Tensor:
    """`matrix` with zeros to `columns` rows and columns.

    Shapes: `[n, n]` -> `[columns, columns]`.
    """
    found = matrix.new_zeros(columns, columns)
    found[: matrix.shape[0], : matrix.shape[1]] = matrix
    return found


@dataclass
class Rotations:
    """The places of the coefficients that all replicas send at a step, in device memory: one table for all rows, or 64.

    Args:
        table: `[permutations, chunk]` int32.
        turn: `[1]` int64, from which each row draws its permutation.
    """

    table: Tensor
    turn: Tensor

    @classmethod
    def room(cls, coding: Coding, device: torch.device) -> "Rotations":
        """Room for the rotations of `coding`."""
        permutations = PERMUTATIONS if coding.selection == "random" else 1
        table = torch.empty(permutations, coding.chunk, dtype=torch.int32, device=device)
        return cls(table, torch.empty(1, dtype=torch.int64, device=device))

    def rotate(self, coding: Coding, words: int, choices: int, phase: int) -> None:
        """Writes the rotation of one step.

        Args:
            words, choices: Where the random words of permutations and of rows start, as int64.
        """
        each = len(self.table) if INTERPRETED else 1
        bits = (coding.chunk - 1).bit_length()
        launch(
            rotation_kernel, len(self.table) // each, self.table, self.turn, words, choices, phase, CHUNK=coding.chunk,
            COLUMNS=1 << bits, K=coding.k, BITS=bits, KIND=coding.selection, EACH=each, SOME=min(16, 1 << bits),
        )  # fmt: skip


class Coder:
    """Launches encode and decode for the rows of one flat.

    Args:
        forward, inverse: The matrices of the basis, `[chunk, chunk]` fp32; `forward` is multiplied from the right.
    """

    def __init__(self, coding: Coding, slots: Slots, forward: Tensor, inverse: Tensor, first_row: int = 0) -> None:
        self.coding, self.slots, self.first_row = coding, slots, first_row
        side = coding.columns if coding.basis == "dct" else 1
        self._forward, self._inverse = (padded_matrix(each, side) for each in (forward, inverse))
        self.rotations = Rotations.room(coding, slots.device)
        self._rows = max(16, TILE // coding.columns)
        self._unit = max(self._rows, coding.block // _common(coding.block, coding.k))
        self._programs = max(1, min(PROGRAMS, -(-slots.rows // self._unit)))
        coded = coding.block > 1
        room = self._programs * self._unit
        self._scratch = torch.empty(room * coding.k if coded else 1, dtype=torch.float32, device=slots.device)
        indexed = coding.width > 0 or coding.bitmap
        each = coding.chunk if coding.bitmap else coding.k
        self._numbers = torch.empty(room * each if indexed else 1, dtype=torch.uint8, device=slots.device)

    def encode(
        self,
        signals: Addresses,
        status: Tensor,
        message: Tensor,
        places: Places,
        residual: Tensor | None,
        decay: float,
        alpha: float,
        release: bool,
        round_first: bool,
        negative_zeros: bool,
    ) -> None:
        """Writes the messages of a signal; see `encode_kernel`.

        Shapes: message `[count, nbytes]` uint8, from the first value on; residual `[rows, chunk]` fp32.
        """
        units = places.count * -(-places.owned // self._unit)
        if not units:
            return
        slots, coding = self.slots, self.coding
        launch(
            encode_kernel, min(units, self._programs),
            self._scratch if residual is None else residual, signals.table, slots.starts, slots.numels, slots.count,
            slots.rows, status, decay, alpha, self._forward, self._inverse,
            message, message.stride(0), places.statistics_at, places.indices_at,
            places.count, places.turns, places.run, places.owned,
            self.rotations.table, self.rotations.turn, self.first_row, int(negative_zeros),
            self._scratch, self._numbers, units,
            **coding.constants, RELEASE=release, ROUND=round_first, MEMORY=residual is not None, KINDS=signals.kinds,
            SEARCH=slots.search, UNIT=self._unit, ROWS=self._rows, BYTES=65536 if INTERPRETED else 256,
        )  # fmt: skip

    def decode(
        self,
        message: Tensor,
        places: Places,
        replicas: int,
        aggregation: str,
        into: str,
        targets: Addresses,
        flat: Tensor | None = None,
        alpha: float = 1.0,
        rates: Tensor | None = None,
        basis: bool = True,
    ) -> None:
        """Decodes messages and does with the update what `into` says; see `decode_kernel`.

        Args:
            aggregation: "mean", "nonzero" or "majority".
            basis: False to leave the update in coefficients.

        Shapes: message `[messages, nbytes]` uint8, flat `[rows, chunk]` and rates `[slots, 2]` fp32.
        """
        slots, constants = self.slots, self.coding.constants
        if not slots.rows:
            return
        if not basis:
            constants["BASIS"] = "none"
        launch(
            decode_kernel, -(-slots.rows // self._rows),
            message, message.stride(0), places.statistics_at, places.indices_at, replicas,
            places.count, places.turns, places.run, places.owned,
            self._inverse, self.rotations.table, self.rotations.turn, self.first_row,
            self._inverse if flat is None else flat, targets.table, slots.starts, slots.numels, slots.count, slots.rows,
            alpha, self._inverse if rates is None else rates,
            **constants, AGGREGATION=aggregation, INTO=into, KINDS=targets.kinds, SEARCH=slots.search,
            ROWS=self._rows,
        )  # fmt: skip


def _common(one: int, other: int) -> int:
    while other:
        one, other = other, one % other
    return one
