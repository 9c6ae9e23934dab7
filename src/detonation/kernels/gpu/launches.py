"""Launches: the host's side of the Triton kernels.

Nothing here reads from a device, or waits for it.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from detonation.kernels.gpu.addressing import rotation_kernel
from detonation.kernels.gpu.decode import decode_kernel
from detonation.kernels.gpu.encode import encode_kernel
from detonation.kernels.gpu.inspection import RUNS, is_aligned, power
from detonation.kernels.gpu.launching import INTERPRETED, Addresses, Coding, Places, Slots, launch

PROGRAMS = 1024
"""The most programs of a launch whose programs work on one piece after the other: a few for each
multiprocessor."""
TILE = 65536 if INTERPRETED else 1024
"""About the coordinates that a program holds in registers at once: with more of them, they spill.
The interpreter takes as long for few as for many."""
WORKED_ON = 2**24
"""The most values that programs work on at once, beyond their registers: 64 MiB, about what a cache
holds."""
PERMUTATIONS = 64
"""The permutations of a random selection, as in `selection.Random`."""


def padded_matrix(matrix: Tensor, columns: int) -> Tensor:
    """`matrix` with zeros to `columns` rows and columns."""  # [n, n] -> [columns, columns]
    found = matrix.new_zeros(columns, columns)
    found[: matrix.shape[0], : matrix.shape[1]] = matrix
    return found


@dataclass
class Rotations:
    """The places of the coefficients that all replicas send at a step, in device memory: one table
    for all rows, or 64.

    Args:
        table: `[permutations, chunk]` int32.
        turn: `[1]` int64, from which each row draws its permutation.
        place: `Rotation.place` of the step that they are for.
    """

    table: Tensor
    turn: Tensor
    place: tuple[int, int, int] | None = None

    @classmethod
    def room(cls, coding: Coding, device: torch.device) -> "Rotations":
        """Room for the rotations of `coding`."""
        permutations = PERMUTATIONS if coding.selection == "random" else 1
        table = torch.empty(permutations, coding.chunk, dtype=torch.int32, device=device)
        return cls(table, torch.empty(1, dtype=torch.int64, device=device))

    def rotate(self, coding: Coding, words: int, choices: int, share: int, deal: int) -> None:
        """Writes the rotation of one step; see `rotation_kernel`, and `Rotation.place` for `share`
        and `deal`.

        words, choices: Where the random words of permutations and of rows start, as int64.
        """
        each = len(self.table) if INTERPRETED else 1
        bits = (coding.chunk - 1).bit_length()
        launch(
            rotation_kernel, len(self.table) // each, self.table, self.turn, words, choices, share,
            deal,
            CHUNK=coding.chunk, COLUMNS=1 << bits, K=coding.k, BITS=bits, KIND=coding.selection,
            EACH=each,
            SOME=min(16, 1 << bits),
        )  # fmt: skip


@dataclass(frozen=True)
class Arrivals:
    """Messages whose aggregate is the signal of a message: those that the owner of rows received.

    message: `[replicas, nbytes]` uint8, from the first value on. aggregation: "mean", "nonzero",
    "majority", "" for none.
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
        shared: Keeps the memory in which programs work, for all launches that never run side by
            side (`Runtime.shared`).
        of_owner: Whose rows these are: the arguments `owner` to `flat_rows` of `encode_kernel`; all
            rows when left out.
        forward, inverse: The matrices of the basis, `[chunk, chunk]` fp32; `forward` is multiplied
            from the right.
    """

    def __init__(
        self,
        coding: Coding,
        slots: Slots,
        forward: Tensor,
        inverse: Tensor,
        rotations: Rotations,
        shared: Callable[[Hashable, Callable[[], tuple[Tensor, Tensor]]], tuple[Tensor, Tensor]],
        first_row: int = 0,
        of_owner: tuple[int, int, int, int, int, int] | None = None,
    ) -> None:
        self.coding, self.slots, self.rotations, self.first_row = (
            coding,
            slots,
            rotations,
            first_row,
        )
        self._of_owner = of_owner or (0, 1, 0, 1, slots.rows, slots.rows)
        side = coding.columns if coding.basis == "dct" else 1
        self._forward, self._inverse = (padded_matrix(each, side) for each in (forward, inverse))
        # the rows of a matrix product, or of whole bytes of a bitmap
        least = 16 if coding.basis == "dct" else 8 if coding.bitmap else 1
        self._rows = max(least, TILE // coding.columns)
        if INTERPRETED:  # which takes its time for rows that do not exist, too
            self._rows = min(self._rows, max(16, power(slots.rows)))
        # rows share what a product reads of its matrix: encode takes four times as many, in twice
        # as many warps
        self._together = self._rows * (
            4 if coding.basis == "dct" and coding.columns <= 64 and not INTERPRETED else 1
        )
        self._unit = max(self._together, coding.block // math.gcd(coding.block, coding.k))
        # of a program; 256 int64 are bins
        values = self._unit * coding.k + 512 * (coding.precision == "int8")
        most = min(PROGRAMS, max(1, WORKED_ON // values)) if coding.block > 1 else PROGRAMS
        self._programs = max(1, min(most, -(-slots.rows // self._unit)))
        room = self._programs * self._unit
        each = coding.chunk if coding.bitmap else coding.k if coding.width else 0
        values = self._programs * values if coding.block > 1 else 0
        sizes = max(1, values), max(1, room * each)
        self._scratch, self._numbers = shared(
            ("scratch", *sizes), partial(_scratch, *sizes, slots.device)
        )

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
        """Writes the messages of a signal, or of that which the messages `arrived` make; see
        `encode_kernel`.

        Shapes: message `[count, nbytes]` uint8, from the first value on; residual `[rows, chunk]`
        fp32.
        """
        units = places.count * -(-places.owned // self._unit)
        if not units:
            return
        slots, coding, given = (
            self.slots,
            self.coding,
            arrived or Arrivals(message, places, self.coding, 0, ""),
        )
        launch(
            encode_kernel, min(units, self._programs),
            self._scratch if residual is None else residual, signals.table, slots.starts,
            slots.numels, slots.count,
            slots.rows, status, status.numel(), decay, alpha, self._forward, self._inverse,
            message, message.stride(0), places.statistics_at, places.indices_at,
            places.count, places.turns, places.run, places.owned,
            self.rotations.table, self.rotations.turn, self.first_row, *self._of_owner,
            int(negative_zeros),
            given.message, given.message.stride(0), given.places.statistics_at,
            given.places.indices_at, given.replicas,
            self._scratch, self._numbers, units,
            **coding.constants, ALIGNED=is_aligned(message, 4), AGGREGATION=given.aggregation,
            **given.constants, RELEASE=release, MEMORY=residual is not None, KINDS=signals.kinds,
            SEARCH=slots.search,
            STATUSES=power(status.numel()), UNIT=self._unit, ROWS=self._together,
            BYTES=65536 if INTERPRETED else 256,
            warps=8 if self._together == self._rows else 16,
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
        runs: Sequence[tuple[int, Tensor]] = (),
        report: Tensor | None = None,
        summed: bool = False,
    ) -> None:
        """Decodes messages and does with the update what `into` says; see `decode_kernel`.

        Args:
            aggregation: "mean", "nonzero", "majority" or "weighted"; "sum" for the sum of all
                messages.
            runs: Of the sum: the first row of each run, and its values from there on; at most
                `RUNS`.
            report: Of the sum, see `SumInspector.inspect`.
            summed: For the mean in the basis "dct": whether its inverse is a sum of basis vectors.

        Shapes: message `[messages, nbytes]` uint8, flat `[rows, chunk]`, rates `[slots, 2]`,
        weights `[messages]` fp32.
        """
        slots = self.slots
        if not slots.rows:
            return
        placed = [*runs, *[(0, message)] * (RUNS - len(runs))]
        launch(
            decode_kernel, -(-slots.rows // self._rows),
            message, message.stride(0), places.statistics_at, places.indices_at, replicas,
            places.count, places.turns, places.run, places.owned,
            placed[0][1].data_ptr(), *(number for row,
            run in placed[1:] for number in (run.data_ptr(), row)),
            self._inverse if report is None else report,
            self._inverse, self.rotations.table, self.rotations.turn, self.first_row,
            self._inverse if flat is None else flat, targets.table, slots.starts, slots.numels,
            slots.count, slots.rows,
            self._inverse if rates is None else rates,
            self._inverse if weights is None else weights,
            1 / replicas, **self.coding.constants, ALIGNED=is_aligned(message, 4),
            AGGREGATION=aggregation, INTO=into, KINDS=targets.kinds, SEARCH=slots.search,
            ROWS=self._rows, RUNS=len(runs), SUMMED=summed,
            warps=16 if self.coding.basis == "dct" and self.coding.columns > 64 else 8,
        )  # fmt: skip


def _scratch(values: int, numbers: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory in which programs work."""  # [values] fp32, [numbers] uint8
    octets = torch.empty(numbers, dtype=torch.uint8, device=device)
    return torch.empty(values, dtype=torch.float32, device=device), octets
