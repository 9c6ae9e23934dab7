"""Checks of values: signals before they enter a memory, and sums that the network has added up."""

import triton
import triton.language as tl

from detonation.kernels.gpu.messages import is_last
from detonation.kernels.gpu.parts.addressing import load_coordinates, slot_of, span_of, status_of, wide
from detonation.kernels.gpu.parts.numbers import LARGEST, load_value


@triton.jit
def scan_kernel(
    signals, starts, numels, numbers, slots, rows, limit, found,
    ROW: tl.constexpr, ROWS: tl.constexpr, KINDS: tl.constexpr, SEARCH: tl.constexpr
):  # fmt: skip
    """Writes for each program 1 + the number of the first tensor with a value that is not finite or above `limit`; 0
    where none has.

    numbers: Of the tensors, rising, `[slots]` int64.
    """
    column = tl.arange(0, ROW)
    first = tl.zeros([ROWS], dtype=tl.int64) + slots
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = wide(tile) * ROWS + tl.arange(0, ROWS)
        present = row < rows
        row = tl.where(present, row, 0)
        slot = slot_of(starts, row, slots, SEARCH)
        start, left = span_of(starts, numels, slot, row, ROW)
        inside = present[:, None] & (column[None, :] < left[:, None])
        value = tl.abs(load_coordinates(signals, slot, slots, start, column, inside, KINDS))
        beyond = tl.max(tl.where(value <= limit, 0, 1), axis=1)
        first = tl.minimum(first, tl.where(beyond > 0, slot, slots))
    slot = tl.min(first, axis=0)
    number = tl.load(numbers + tl.minimum(slot, slots - 1))
    tl.store(found + tl.program_id(0), tl.where(slot < slots, number + 1, 0))


@triton.jit
def seal_sum_kernel(status, statuses, digits, count, first, mark, EACH: tl.constexpr, STATUSES: tl.constexpr,
                    SOME: tl.constexpr):  # fmt: skip
    """Writes a status and a mark after the values of an all-reduce: `EACH` numbers below 256 from number `first` on,
    and zeros in the places of the other replicas.

    Shapes: digits `[count]` fp32 or bf16, which holds such numbers exactly.
    """
    found = status_of(status, statuses, STATUSES) + mark
    item = tl.arange(0, SOME)
    own = (item >= first) & (item < first + EACH)
    digit = (found >> (8 * tl.where(own, item - first, 0))) & 255
    tl.store(digits + item, tl.where(own, digit, 0).to(tl.float32), mask=item < count)


@triton.jit(do_not_specialize=["address0", "address1", "address2", "address3"])
def inspect_sum_kernel(
    address0, count0, address1, count1, address2, count2, address3, count3, digits, report, count, faults, parts,
    arrivals,
    RUNS: tl.constexpr, PRECISION: tl.constexpr, SOME: tl.constexpr, PARTS: tl.constexpr, DIGITS: tl.constexpr,
):  # fmt: skip
    """Reads the sum of an all-reduce, which lies in up to four runs; the last of `parts` programs writes the report.

    Args:
        address0: Where the first run begins, of `count0` values.
        digits: `[count]` fp32 or bf16; see `seal_sum_kernel`.
        report: `[1 + count]` fp32: 1 where all values are finite, else 0; then the digits.
        faults, arrivals: `[parts]` and `[1]` int32, see `is_last`.
    """
    item = tl.arange(0, SOME)
    fault = tl.zeros([SOME], dtype=tl.int32)
    for run in tl.static_range(RUNS):
        address, values = wide(address0), count0
        if run == 1:
            address, values = wide(address1), count1
        elif run == 2:
            address, values = wide(address2), count2
        elif run == 3:
            address, values = wide(address3), count3
        octets = address.to(tl.pointer_type(tl.uint8))
        for first in range(tl.program_id(0), tl.cdiv(values, SOME), parts):
            number = wide(first) * SOME + item
            value = load_value(octets, octets, number, number < values, PRECISION, 1, True)
            fault |= tl.where(tl.abs(value) <= LARGEST, 0, 1)
    tl.store(faults + tl.program_id(0), tl.max(fault, axis=0))
    if is_last(arrivals, parts):
        program = tl.arange(0, PARTS)
        any_fault = tl.max(tl.load(faults + program, mask=program < parts, other=0), axis=0)
        tl.store(report, 1.0 - any_fault.to(tl.float32))
        digit = tl.arange(0, DIGITS)
        told = tl.load(digits + digit, mask=digit < count, other=0.0).to(tl.float32)
        tl.store(report + 1 + digit, told, mask=digit < count)
