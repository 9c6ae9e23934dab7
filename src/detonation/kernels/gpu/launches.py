"""Launches the Triton kernels: the part of the kernels' code that runs on the host.

No function here reads from a device or waits for it.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from detonation.kernels.gpu.addressing import rotation_kernel
from detonation.kernels.gpu.decode import decode_kernel
from detonation.kernels.gpu.encode import encode_kernel
from detonation.kernels.gpu.inspection import RUNS, is_aligned, power
from detonation.kernels.gpu.launching import INTERPRETED, Addresses, Coding, Places, Slots, launch

PROGRAMS = 1024
"""Largest number of programs in a launch in which each program processes several parts."""
TILE = 1024
"""Approximate number of coordinates in a program's registers; more coordinates would not fit.
Triton's interpreter gets more, because it needs the same time for few coordinates as for many.
"""
if INTERPRETED:
    TILE = 65536
WORKED_ON = 2**24
"""Largest number of values that all programs together hold outside of registers: 64 MiB, about the
size of a cache.
"""
PERMUTATIONS = 64
"""Number of permutations of a random selection, as in `selection.Random`."""


def padded_matrix(matrix: Tensor, columns: int) -> Tensor:
    """Returns `matrix`, padded with zeros to `columns` rows and columns.

    Shapes: `[n, n]` -> `[columns, columns]`.
    """
    found = matrix.new_zeros(columns, columns)
    found[: matrix.shape[0], : matrix.shape[1]] = matrix
    return found


@dataclass
class Rotations:
    """The positions of the shared selected coefficients at one step, in device memory: one table
    for all rows, or 64 tables for a random selection.

    Args:
        table: `[permutations, chunk]` int32.
        turn: `[1]` int64, from which each row draws its permutation.
        place: `Rotation.phase` of the step of these positions.
    """

    table: Tensor
    turn: Tensor
    place: tuple[int, int, int] | None = None

    @classmethod
    def room(cls, coding: Coding, device: torch.device) -> "Rotations":
        """Allocates the tables for the positions of the selected coefficients of `coding`."""
        permutations = 1
        if coding.selection == "random":
            permutations = PERMUTATIONS
        table = torch.empty(permutations, coding.chunk, dtype=torch.int32, device=device)
        return cls(table, torch.empty(1, dtype=torch.int64, device=device))

    def rotate(self, coding: Coding, words: int, choices: int, share: int, deal: int) -> None:
        """Writes the positions of the coefficients that are sent at one step. `Rotation.phase`
        returns `share` and `deal`; see also `rotation_kernel`.

        Args:
            words: The int64 that starts the random words of permutations.
            choices: The int64 that starts the random words of rows, which choose a permutation.
        """
        each = 1
        if INTERPRETED:
            each = len(self.table)
        bits = (coding.chunk - 1).bit_length()
        launch(
            rotation_kernel, len(self.table) // each, self.table, self.turn, words, choices, share,
            deal,
            CHUNK=coding.chunk, COLUMNS=1 << bits, K=coding.k, BITS=bits, KIND=coding.selection,
            EACH=each, SOME=min(16, 1 << bits),
        )  # fmt: skip


@dataclass(frozen=True)
class Arrivals:
    """Messages that an owner (the replica that aggregates some rows) received. The owner encodes
    their aggregate as its answer.

    message: `[replicas, nbytes]` uint8, from the first value on. aggregation: "mean", "nonzero",
    "majority", "" for none.
    """

    message: Tensor
    places: Places
    coding: Coding
    replicas: int
    aggregation: str


class Coder:
    """Launches the kernels that encode and decode the rows of one flat (matrix of all rows).

    Args:
        rotations: For a selection that all replicas share.
        shared: Keeps scratch memory of programs, shared by all launches that never run at the same
            time (`Runtime.shared`).
        of_owner: For the rows of one owner: the arguments `owner` to `flat_rows` of
            `encode_kernel`. By default the coder handles all rows.
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
        self.coding = coding
        self.slots = slots
        self.rotations = rotations
        self.first_row = first_row
        self._of_owner = of_owner or (0, 1, 0, 1, slots.rows, slots.rows)
        is_dct = coding.basis == "dct"
        side = 1
        least = 1
        if is_dct:
            side = coding.columns
            least = 16  # smallest number of rows that a matrix product supports
        elif coding.bitmap:
            least = 8  # smallest number of rows whose bitmaps fill whole bytes
        self._forward = padded_matrix(forward, side)
        self._inverse = padded_matrix(inverse, side)
        self._rows = max(least, TILE // coding.columns)
        if INTERPRETED:  # the interpreter needs as much time for masked rows as for others
            self._rows = min(self._rows, max(16, power(slots.rows)))
        self._together = self._rows
        if is_dct and coding.columns <= 64 and not INTERPRETED:
            # encode four times the rows with twice the warps, so that the basis is read less often
            self._together *= 4
        self._unit = max(self._together, coding.block // math.gcd(coding.block, coding.k))
        most = PROGRAMS
        values = 0  # number of values in the scratch memory of a program
        if coding.block > 1:
            values = self._unit * coding.k
            if coding.precision == "int8":
                values += 512  # 256 bins of int64
            most = min(PROGRAMS, max(1, WORKED_ON // values))
        self._programs = max(1, min(most, -(-slots.rows // self._unit)))
        of_row = 0
        if coding.bitmap:
            of_row = coding.chunk
        elif coding.width:
            of_row = coding.k
        sizes = max(1, self._programs * values), max(1, self._programs * self._unit * of_row)
        make = partial(_scratch, *sizes, slots.device)
        self._scratch, self._numbers = shared(("scratch", *sizes), make)
        # placeholder for received messages if there are none; kernels do not read the placeholder
        self._alone = Arrivals(self._numbers, Places(0, 0), coding, 0, "")
        self._warps = 8
        if self._together > self._rows:
            self._warps = 16
        self._decode_warps = 8
        if is_dct and coding.columns > 64:
            self._decode_warps = 16
        self._bytes = 256
        if INTERPRETED:
            self._bytes = 65536

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
        scanned: tuple[Tensor, float, Tensor] | None = None,
    ) -> None:
        """Encodes gradients, or the aggregate of the messages `arrived`, and writes the messages;
        see `encode_kernel`. `scanned` holds the kernel's arguments `rising`, `limit` and `found`.

        Shapes: message `[count, nbytes]` uint8, from the first value on; residual `[rows, chunk]`
        fp32.
        """
        units = places.count * -(-places.owned // self._unit)
        if not units:
            return
        slots = self.slots
        coding = self.coding
        stride = message.stride(0)
        aligned = is_aligned(message.data_ptr(), message.shape[0], stride, 4)
        given = arrived or self._alone
        memory = residual
        if memory is None:
            memory = self._scratch
        launch(
            encode_kernel, min(units, self._programs),
            memory, signals.table, slots.starts,
            slots.numels, slots.count,
            slots.rows, status, status.numel(), decay, alpha, self._forward, self._inverse,
            message, stride, places.statistics_at, places.indices_at,
            places.count, places.turns, places.run, places.owned,
            self.rotations.table, self.rotations.turn, self.first_row, *self._of_owner,
            int(negative_zeros),
            given.message, given.message.stride(0), given.places.statistics_at,
            given.places.indices_at, given.replicas,
            self._scratch, self._numbers, units, *(scanned or (status, 0.0, status)),
            **coding.constants, ALIGNED=aligned, AGGREGATION=given.aggregation,
            **given.coding.arrived_constants,
            RELEASE=release, MEMORY=residual is not None, KINDS=signals.kinds, SEARCH=slots.search,
            STATUSES=power(status.numel()), UNIT=self._unit, ROWS=self._together,
            BYTES=self._bytes, SCANNED=scanned is not None,
            warps=self._warps,
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
        """Decodes messages, and uses the resulting update as `into` says; see `decode_kernel`.

        Args:
            aggregation: "mean", "nonzero", "majority" or "weighted"; "sum" for the sum of all
                messages.
            runs: For the sum: the first row and the values of each run; at most `RUNS` runs.
            report: For the sum: see `SumInspector.inspect`.
            summed: For the mean in the basis "dct": True if its inverse is computed as a sum of
                basis vectors.

        Shapes: message `[messages, nbytes]` uint8, flat `[rows, chunk]`, rates `[slots, 2]`,
        weights `[messages]` fp32.
        """
        slots = self.slots
        if not slots.rows:
            return
        (_, first), *others = [*runs, *[(0, message)] * (RUNS - len(runs))]
        at = [first.data_ptr()]
        for row, run in others:
            at += [run.data_ptr(), row]
        stride = message.stride(0)
        aligned = is_aligned(message.data_ptr(), message.shape[0], stride, 4)
        unused = self._inverse  # placeholder for absent tensors; the kernel does not read it
        if report is None:
            report = unused
        if flat is None:
            flat = unused
        if rates is None:
            rates = unused
        if weights is None:
            weights = unused
        launch(
            decode_kernel, -(-slots.rows // self._rows),
            message, stride, places.statistics_at, places.indices_at, replicas,
            places.count, places.turns, places.run, places.owned,
            *at, report, self._inverse, self.rotations.table, self.rotations.turn, self.first_row,
            flat, targets.table, slots.starts, slots.numels, slots.count, slots.rows,
            rates, weights, 1 / replicas, **self.coding.constants, ALIGNED=aligned,
            AGGREGATION=aggregation, INTO=into, KINDS=targets.kinds, SEARCH=slots.search,
            ROWS=self._rows, RUNS=len(runs), SUMMED=summed,
            warps=self._decode_warps,
        )  # fmt: skip


def _scratch(values: int, numbers: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Allocates the scratch memory of a launch's programs.

    Shapes: -> `[values]` fp32, `[numbers]` uint8.
    """
    octets = torch.empty(numbers, dtype=torch.uint8, device=device)
    return torch.empty(values, dtype=torch.float32, device=device), octets
