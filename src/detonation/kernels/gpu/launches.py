"""Launches: the host's side of the Triton kernels. Nothing here reads from a device, or waits for it."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from detonation.kernels.gpu.choosing import rotation_kernel
from detonation.kernels.gpu.decode import decode_kernel, weigh_kernel
from detonation.kernels.gpu.encode import encode_kernel
from detonation.kernels.gpu.inspection import (
    OCTETS,
    PARTS,
    SCANNING,
    Inspector,
    Limits,
    RowRun,
    Scanner,
    is_aligned,
    power,
    settled,
)
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
    "SCANNING",
    "Addresses",
    "Arrivals",
    "Coder",
    "Coding",
    "Inspector",
    "Limits",
    "Places",
    "Rotations",
    "RowRun",
    "Scanner",
    "Slots",
    "clipped_weights",
    "is_aligned",
    "launch_counts",
    "rotations_of",
    "settled",
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
        step: Of which they are.
    """

    table: Tensor
    turn: Tensor
    step: int | None = None

    @classmethod
    def room(cls, coding: Coding, device: torch.device) -> "Rotations":
        """Room for the rotations of `coding`."""
        permutations = PERMUTATIONS if coding.selection == "random" else 1
        table = torch.empty(permutations, coding.chunk, dtype=torch.int32, device=device)
        return cls(table, torch.empty(1, dtype=torch.int64, device=device))

    def rotate(self, coding: Coding, words: int, choices: int, phase: int) -> None:
        """Writes the rotation of one step; see `rotation_kernel`.

        Args:
            words, choices: Where the random words of permutations and of rows start, as int64.
        """
        each = len(self.table) if INTERPRETED else 1
        bits = (coding.chunk - 1).bit_length()
        launch(
            rotation_kernel, len(self.table) // each, self.table, self.turn, words, choices, phase, CHUNK=coding.chunk,
            COLUMNS=1 << bits, K=coding.k, BITS=bits, KIND=coding.selection, EACH=each, SOME=min(16, 1 << bits),
        )  # fmt: skip


@lru_cache(maxsize=16)
def scratch_of(values: int, numbers: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory in which the programs of one launch work; all buckets share it, because no two launches run side by side.

    Shapes: -> `[values]` fp32, `[numbers]` uint8.
    """
    return torch.empty(values, dtype=torch.float32, device=device), torch.empty(
        numbers, dtype=torch.uint8, device=device
    )


@lru_cache(maxsize=64)
def rotations_of(coding: Coding, seed: int, device: torch.device) -> Rotations:
    """The rotations of a selection, which the buckets and owners of a step share."""
    return Rotations.room(coding, device)


@dataclass(frozen=True)
class Arrivals:
    """Messages whose aggregate is the signal of a message: those that the owner of rows received.

    Args:
        message: `[replicas, nbytes]` uint8, from the first value on.
        aggregation: "mean", "nonzero" or "majority"; "" where there are none.
    """

    message: Tensor
    places: Places
    coding: Coding
    replicas: int
    aggregation: str

    @property
    def constants(self) -> dict[str, Any]:
        """The constants of `encode_kernel` that describe them."""
        names = ("K", "SELECTION", "PRECISION", "BLOCK", "WIDTH", "BITMAP")
        return {f"ARRIVED_{name}": self.coding.constants[name] for name in names}


class Coder:
    """Launches encode and decode for the rows of one flat.

    Args:
        rotations: Of a selection that all replicas share.
        of_owner: Whose rows these are: the arguments `owner` to `flat_rows` of `encode_kernel`; all rows when left
            out.
        forward, inverse: The matrices of the basis, `[chunk, chunk]` fp32; `forward` is multiplied from the right.
    """

    def __init__(
        self,
        coding: Coding,
        slots: Slots,
        forward: Tensor,
        inverse: Tensor,
        rotations: Rotations,
        first_row: int = 0,
        of_owner: tuple[int, int, int, int, int, int] | None = None,
    ) -> None:
        self.coding, self.slots, self.rotations, self.first_row = coding, slots, rotations, first_row
        self._of_owner = of_owner or (0, 1, 0, 1, slots.rows, slots.rows)
        side = coding.columns if coding.basis == "dct" else 1
        self._forward, self._inverse = (padded_matrix(each, side) for each in (forward, inverse))
        self._rows = max(16, TILE // coding.columns)
        if INTERPRETED:  # which takes its time for rows that do not exist, too
            self._rows = min(self._rows, max(16, power(slots.rows)))
        self._unit = max(self._rows, coding.block // math.gcd(coding.block, coding.k))
        self._programs = max(1, min(PROGRAMS, -(-slots.rows // self._unit)))
        room = self._programs * self._unit
        each = coding.chunk if coding.bitmap else coding.k if coding.width else 0
        values = room * coding.k if coding.block > 1 else 0
        self._scratch, self._numbers = scratch_of(max(1, values), max(1, room * each), slots.device)

    def encode(
        self,
        signals: Addresses,
        status: Tensor,
        message: Tensor,
        places: Places,
        residual: Tensor | None,
        decay: float,
        alpha: float,
        release: str,
        negative_zeros: bool,
        arrived: Arrivals | None = None,
    ) -> None:
        """Writes the messages of a signal; see `encode_kernel`.

        Args:
            arrived: Messages that make the signal, in the place of `signals`.

        Shapes: message `[count, nbytes]` uint8, from the first value on; residual `[rows, chunk]` fp32.
        """
        units = places.count * -(-places.owned // self._unit)
        if not units:
            return
        slots, coding, given = self.slots, self.coding, arrived or Arrivals(message, places, self.coding, 0, "")
        launch(
            encode_kernel, min(units, self._programs),
            self._scratch if residual is None else residual, signals.table, slots.starts, slots.numels, slots.count,
            slots.rows, status, status.numel(), decay, alpha, self._forward, self._inverse,
            message, message.stride(0), places.statistics_at, places.indices_at,
            places.count, places.turns, places.run, places.owned,
            self.rotations.table, self.rotations.turn, self.first_row, *self._of_owner, int(negative_zeros),
            given.message, given.message.stride(0), given.places.statistics_at, given.places.indices_at, given.replicas,
            self._scratch, self._numbers, units,
            **coding.constants, ALIGNED=is_aligned(message, 4), AGGREGATION=given.aggregation,
            **given.constants, RELEASE=release, MEMORY=residual is not None, KINDS=signals.kinds, SEARCH=slots.search,
            STATUSES=power(status.numel()), UNIT=self._unit, ROWS=self._rows, BYTES=65536 if INTERPRETED else 256,
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
        rates: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> None:
        """Decodes messages and does with the update what `into` says; see `decode_kernel`.

        Args:
            aggregation: "mean", "nonzero", "majority" or "weighted".

        Shapes: message `[messages, nbytes]` uint8, flat `[rows, chunk]`, rates `[slots, 2]` and weights `[messages]`
        fp32.
        """
        slots = self.slots
        if not slots.rows:
            return
        launch(
            decode_kernel, -(-slots.rows // self._rows),
            message, message.stride(0), places.statistics_at, places.indices_at, replicas,
            places.count, places.turns, places.run, places.owned,
            self._inverse, self.rotations.table, self.rotations.turn, self.first_row,
            self._inverse if flat is None else flat, targets.table, slots.starts, slots.numels, slots.count, slots.rows,
            self._inverse if rates is None else rates, self._inverse if weights is None else weights,
            **self.coding.constants, ALIGNED=is_aligned(message, 4),
            AGGREGATION=aggregation, INTO=into, KINDS=targets.kinds, SEARCH=slots.search,
            ROWS=self._rows, warps=16 if self.coding.basis == "dct" and self.coding.columns > 64 else 8,
        )  # fmt: skip


def clipped_weights(message: Tensor, places: Places, coding: Coding) -> Tensor:
    """The weights of `aggregate.ClippedMean`, of the messages of all replicas.

    Shapes: message `[replicas, nbytes]` uint8, from the first value on -> `[replicas]` fp32.
    """
    replicas, device = len(message), message.device
    weights = torch.empty(replicas, dtype=torch.float32, device=device)  # which waits with its messages
    squares, arrivals = _weighing(replicas, device)
    launch(
        weigh_kernel, replicas * PARTS, message, message.stride(0), places.statistics_at, places.owned * coding.k,
        squares, PARTS, arrivals, weights, replicas,
        PRECISION=coding.precision, BLOCK=coding.block, ALIGNED=is_aligned(message, 4), SOME=OCTETS,
        REPLICAS=power(replicas),
    )  # fmt: skip
    return weights


@lru_cache(maxsize=16)
def _weighing(replicas: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The squares and the counter of `weigh_kernel`."""  # [replicas, PARTS] fp32, [1] int32
    squares = torch.empty(replicas, PARTS, dtype=torch.float32, device=device)
    return squares, torch.zeros(1, dtype=torch.int32, device=device)
