"""Seals messages (writes header and checksum) before they are sent, and inspects received messages,
with a few launches for all messages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from detonation.kernels.gpu.decode import weigh_kernel
from detonation.kernels.gpu.launching import (
    INTERPRETED,
    KIND_OF,
    Addresses,
    Coding,
    Places,
    Slots,
    launch,
    uploaded,
)
from detonation.kernels.gpu.messages import (
    inspect_kernel,
    inspect_sum_kernel,
    scan_kernel,
    seal_kernel,
    seal_sum_kernel,
)

_LINE_BYTES = 4096
_HEADER_BYTES = 64
CHECKSUM_WORD = 14
PARTS = 128
"""Number of GPU programs that together read one message."""
if INTERPRETED:
    PARTS = 2
NORM_LANES = 4096
"""Number of squares that are added in parallel for the norm by which a message is weighed, as in
`scatter_sum.SumOfSquares`.
"""
NORM_PARTS = 128
"""Number of parts into which the squares for this norm are divided."""
OCTETS = 4096
"""Number of values of a message that a GPU program inspects in one operation."""
SCANNED_ROW = 1024
"""Number of coordinates that a program scans in one operation."""
SCANNING = 512
"""Largest number of programs in a scan; each of them scans one row after the other."""
RUNS = 4
"""Largest number of runs of rows in a message."""


@dataclass(frozen=True)
class Limits:
    """The constants of `guard.decide_usable`: the largest valid norm of a message, by what factor a
    norm may exceed the reference norm, and how fast the reference norm shrinks.
    """

    limit: float
    louder: float
    forget: float


class RunShape(NamedTuple):
    """The layout of a run. A run is a range of rows of a message, not a training run.

    A run begins with `room` free bytes for the header of its message; `room` is 0 unless the run is
    the first of the message. Then `rows` rows follow, in three sections: values, statistics and
    indices. `lengths` holds the size of each section in bytes.
    """

    room: int
    rows: int
    lengths: tuple[int, int, int]


class Inspector:
    """Seals and inspects `count` messages per launch. The buffers are allocated once."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._count = count
        self._columns = torch.empty(
            count, PARTS, _LINE_BYTES // 4, dtype=torch.int32, device=device
        )
        self._sums = torch.empty(count, PARTS, dtype=torch.int64, device=device)
        self._firsts = torch.empty(count, dtype=torch.int32, device=device)
        self._squares = torch.empty(
            count, max(PARTS, NORM_PARTS), dtype=torch.float32, device=device
        )
        self._faults = torch.empty(count, PARTS, dtype=torch.int32, device=device)
        self._table = torch.empty(count, 13, dtype=torch.int64, device=device)
        # counts finished programs; each launch resets the counters to zero
        self._arrivals = torch.zeros(count + 1, dtype=torch.int32, device=device)
        # cache the positions of runs (ranges of rows) in a message, so that later steps reuse them
        self._positions = cache(partial(_positions, device))

    def seal(
        self, runs: Sequence[Tensor], shapes: Sequence[RunShape], nbytes: int, identity: int,
        schema: int, step: int, origin: int, status: Tensor, received: int,
    ) -> None:  # fmt: skip
        """Writes the header of each message into the free bytes of the message's first run. The
        runs are in the order of their rows.

        Shapes: runs `[messages, bytes]` uint8, each message at any address, see `RunShape`; status
        `[n]` int64, see `status_of`.
        """
        addresses: list[int] = []
        for run, shape in zip(runs, shapes, strict=True):
            addresses += (run.data_ptr(), run.stride(0))
            if shape.room:
                head = run
        addresses += addresses[:2] * (RUNS - len(runs))
        launch(
            seal_kernel, self._count * PARTS, *addresses, *self._positions(*shapes), self._columns,
            self._sums, self._firsts, PARTS, self._arrivals, head, head.stride(0), identity, schema,
            step, origin, nbytes, status, status.numel(), received,
            RUNS=len(runs), STATUSES=power(status.numel()),
        )  # fmt: skip

    def inspect(
        self, runs: Sequence[Tensor], shapes: Sequence[RunShape], whole: Tensor, nbytes: int,
        coding: Coding, places: Places, identity: int, schema: int, step: int, place: int,
        parameters: int, usual: Tensor, signals: bool, limits: Limits,
    ) -> Tensor:  # fmt: skip
        """Joins the runs of each message (its ranges of rows) to one whole message, and replaces
        invalid messages by zeros. Returns the table for `explain_faults` (see `decide_usable`).

        Args:
            runs, shapes: As in `seal`.
            whole: Output for the joined messages. If there is only one run, and its bytes are
                already whole and aligned, `whole` is these bytes.

        Shapes: whole `[count, 64 + nbytes + padding]` uint8 -> `[count, 13]` int64.
        """
        values = places.owned * coding.k
        scale = 1.0
        if coding.block > 1:
            scale = min(coding.block, values) ** 0.5
        constants = dict(coding.constants)
        del constants["BASIS"], constants["SELECTION"]
        addresses: list[int] = []
        aligned = True
        for run, shape in zip(runs, shapes, strict=True):
            at = run.data_ptr()
            stride = run.stride(0)
            addresses += (at, stride)
            aligned = aligned and is_aligned(at + shape.room, self._count, stride, 4)
        addresses += addresses[:2] * (RUNS - len(runs))
        launch(
            inspect_kernel, self._count * PARTS, *addresses, *self._positions(*shapes), whole,
            whole.stride(0),
            self._columns, self._sums, self._firsts, self._squares, self._faults, PARTS,
            self._arrivals, scale,
            identity, schema, step, place, nbytes, parameters,
            usual, limits.limit, limits.louder, limits.forget, self._table, self._count,
            RUNS=len(runs), SKIPPED=CHECKSUM_WORD,
            JOIN=whole.data_ptr() != addresses[0], ALIGNED=aligned, **constants,
            SOME=OCTETS,
            REPLICAS=power(self._count), SIGNALS=signals,
        )  # fmt: skip
        # on a CPU, return a copy of `_table`, because the next launch overwrites `_table`
        if whole.device.type == "cpu":
            return self._table.clone()
        return self._table

    def weigh(self, message: Tensor, places: Places, coding: Coding, weights: Tensor) -> None:
        """Writes to `weights` the weight that `aggregate.ClippedMean` gives to each message."""
        # shapes: message [count, nbytes] uint8 from the first value on; weights [count] fp32
        stride = message.stride(0)
        launch(
            weigh_kernel, self._count * PARTS, message, stride, places.statistics_at,
            places.owned * coding.k, self._squares, PARTS, self._arrivals, weights, self._count,
            PRECISION=coding.precision, BLOCK=coding.block,
            ALIGNED=is_aligned(message.data_ptr(), self._count, stride, 4),
            LANES=NORM_LANES, PARTS=NORM_PARTS, REPLICAS=power(self._count),
        )  # fmt: skip


def _positions(device: torch.device, *shapes: RunShape) -> tuple[Tensor, int]:
    """Returns the positions of all runs (ranges of rows) in the whole message, in the form that
    `read_message` reads. Also returns the number of lines (4,096 bytes each) in the checksum.

    Shapes: -> `[runs, 16]` int64.
    """
    assert len(shapes) <= RUNS
    table = []
    for shape in shapes:
        header_end = 0
        if shape.room:
            header_end = _HEADER_BYTES
        table.append([0, header_end, 0])
    begin = _HEADER_BYTES
    for part in range(3):
        for line, shape in zip(table, shapes, strict=True):
            end = begin + shape.lengths[part]
            line += [begin, end, shape.room + sum(shape.lengths[:part])]
            begin = end
    numbers: list[int] = []
    for line, shape in zip(table, shapes, strict=True):
        numbers += [*line, shape.rows, 0, 0, 0]
    return uploaded(numbers, torch.int64, device), -(-begin // _LINE_BYTES)


class SumInspector:
    """Seals and inspects the sums of an all-reduce. The buffers are allocated once."""

    def __init__(self, device: torch.device) -> None:
        self._faults = torch.empty(SCANNING, dtype=torch.int32, device=device)
        # counts finished programs; each launch resets the counter to zero
        self._arrivals = torch.zeros(1, dtype=torch.int32, device=device)

    def seal(self, status: Tensor, digits: Tensor, first: int, each: int, added: int) -> None:
        """Adds `added` to a status, and writes the sum to `digits` in base 256, lowest digit first.
        The sum takes `each` digits, from index `first` on. All other digits become zero.

        Shapes: status `[n]` int64, see `status_of`; digits `[digits]` fp32 or bf16.
        """
        launch(
            seal_sum_kernel, 1, status, status.numel(), digits, len(digits), first, added,
            EACH=each, STATUSES=power(status.numel()), SOME=power(len(digits)),
        )  # fmt: skip

    def inspect(self, runs: Sequence[Tensor], digits: Tensor, report: Tensor) -> None:
        """Writes to `report` 1 if the values of all `runs` (at most `RUNS` runs) are finite,
        otherwise 0. The digits (see `seal`) are written after this number.

        Shapes: runs any, fp32 or bf16; digits `[digits]` of the same type; report `[1 + digits]`
        fp32.
        """
        given = [*runs, *[runs[0]] * (RUNS - len(runs))]
        programs = max(1, min(SCANNING, -(-sum(run.numel() for run in runs) // OCTETS)))
        if INTERPRETED:
            programs = 2
        precision = "fp32"
        if runs[0].dtype == torch.bfloat16:
            precision = "bf16"
        launch(
            inspect_sum_kernel, programs, *(number for run in given for number in (run.data_ptr(),
            run.numel())),
            digits, report, len(digits), self._faults, programs, self._arrivals,
            RUNS=len(runs), PRECISION=precision,
            SOME=OCTETS,
            PARTS=power(programs), DIGITS=power(len(digits)),
        )  # fmt: skip


class Scanner:
    """Looks for values that are nonfinite or too large, in tensors of fixed sizes, at each step.

    numbers: the indices of the tensors, in rising order. addresses: the table of the tensors, which
    an encoder may read, too.
    """

    def __init__(
        self,
        numels: Sequence[int],
        numbers: Sequence[int],
        device: torch.device,
        addresses: Addresses | None = None,
    ) -> None:
        starts = []
        row = 0
        for numel in numels:
            starts.append(row)
            row += -(-numel // SCANNED_ROW)
        self._slots = Slots(starts, numels, row, device)
        self._addresses = addresses or Addresses(device)
        self._numbers = uploaded(numbers, torch.int64, device)
        self._rows = 4
        if INTERPRETED:
            self._rows = 64
        self._programs = max(1, min(SCANNING, -(-row // self._rows)))
        self._found = torch.zeros(SCANNING, dtype=torch.int64, device=device)

    def scan(
        self, signals: Sequence[Tensor | None], limit: float, found: Tensor | None = None
    ) -> Tensor:
        """Returns a status of the signals (gradients). If a signal has a value that is nonfinite or
        above `limit` in magnitude, the smallest nonzero entry of the status is 1 + the index of the
        first such signal. If no signal has such a value, the status is all zeros.

        Args:
            found: Memory for the status, with zeros; by default memory of the scanner.

        Shapes: any -> `[SCANNING]` int64.
        """
        slots = self._slots
        if found is None:
            found = self._found
        read: list[Tensor | None] = []  # keeps copies of signals alive until the launch
        for signal in signals:
            if signal is not None:
                if signal.dtype not in KIND_OF:
                    signal = signal.float()
                signal = signal.contiguous()
            read.append(signal)
        table = self._addresses.update(read)
        launch(
            scan_kernel, self._programs, table.table, slots.starts, slots.numels, self._numbers,
            slots.count,
            slots.rows, limit, found, ROW=SCANNED_ROW, ROWS=self._rows, KINDS=table.kinds,
            SEARCH=slots.search,
        )  # fmt: skip
        return found


@lru_cache(4096)
def is_aligned(address: int, count: int, stride: int, unit: int) -> bool:
    """True if each of `count` messages begins at a multiple of `unit`. The first message begins at
    `address`, and each next message begins `stride` bytes further.
    """
    return not (address % unit or (count > 1 and stride % unit))


@lru_cache(64)
def power(number: int) -> int:
    """Returns the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()
