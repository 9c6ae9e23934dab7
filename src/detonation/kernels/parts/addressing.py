"""Addressing: rows of a flat found in the tensors of many parameters, and rows of the flat in dealt messages."""

import triton
import triton.language as tl

FP32, BF16, FP16 = 1, 2, 4
"""The kinds of numbers of a tensor; sums of them say which kinds occur."""


@triton.jit
def wide(number):
    """A number as int64, `[1]`: products of it do not overflow, and the interpreter's loops count in plain integers."""
    return tl.zeros([1], dtype=tl.int64) + number


@triton.jit
def bf16_bits(numbers):
    """The bits of fp32 numbers as bf16, rounded to nearest, ties to even: integers round alike everywhere."""
    bits = numbers.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    return tl.where(numbers == numbers, rounded, 0x7FC0)  # a NaN would overflow to a zero


@triton.jit
def as_bf16(numbers):
    """fp32 numbers rounded to bf16, as fp32."""
    return (bf16_bits(numbers) << 16).to(tl.float32, bitcast=True)


@triton.jit
def status_of(status, statuses, STATUSES: tl.constexpr):
    """The smallest of `[statuses]` int64 that is not 0, or 0."""
    item = tl.arange(0, STATUSES)
    found = tl.load(status + item, mask=item < statuses, other=0)
    least = tl.min(tl.where(found > 0, found, 1 << 62), axis=0)
    return tl.where(least == (1 << 62), 0, least)


@triton.jit
def slot_of(starts, rows, slots, SEARCH: tl.constexpr):
    """The number of the last slot that begins at or before each row; slots of no rows come before the one they share
    their start with."""
    low = tl.zeros_like(rows)
    high = low + slots
    for _ in tl.static_range(SEARCH):
        middle = (low + high) // 2
        ahead = tl.load(starts + middle) <= rows
        low = tl.where(ahead, middle, low)
        high = tl.where(ahead, high, middle)
    return low


@triton.jit
def span_of(starts, numels, slot, rows, CHUNK: tl.constexpr):
    """Where each row begins in the flattened tensor of its slot, and how many coordinates are left there."""
    # [rows] each -> [rows] int64 and int32
    begin = (rows - tl.load(starts + slot)) * CHUNK
    return begin, tl.minimum(tl.load(numels + slot) - begin, CHUNK).to(tl.int32)


@triton.jit
def load_coordinates(table, slot, slots, begin, column, inside, KINDS: tl.constexpr):
    """The numbers of some rows, from `begin` on in the tensors of `table`, as fp32; 0 outside, and of absent ones."""
    address = tl.load(table + slot)
    kind = tl.load(table + slots + slot)
    there = inside & (address != 0)[:, None]
    found = tl.zeros(inside.shape, dtype=tl.float32)
    if KINDS & 1:
        place = (address.to(tl.pointer_type(tl.float32)) + begin)[:, None] + column[None, :]
        found += tl.load(place, mask=there & (kind == 1)[:, None], other=0.0)
    if KINDS & 2:
        place = (address.to(tl.pointer_type(tl.bfloat16)) + begin)[:, None] + column[None, :]
        found += tl.load(place, mask=there & (kind == 2)[:, None], other=0.0).to(tl.float32)
    if KINDS & 4:
        place = (address.to(tl.pointer_type(tl.float16)) + begin)[:, None] + column[None, :]
        found += tl.load(place, mask=there & (kind == 4)[:, None], other=0.0).to(tl.float32)
    return found


@triton.jit
def store_coordinates(table, slot, slots, begin, column, inside, numbers, KINDS: tl.constexpr):
    """Writes fp32 numbers to some rows of the tensors of `table`, in the type of each."""
    address = tl.load(table + slot)
    kind = tl.load(table + slots + slot)
    there = inside & (address != 0)[:, None]
    if KINDS & 1:
        place = (address.to(tl.pointer_type(tl.float32)) + begin)[:, None] + column[None, :]
        tl.store(place, numbers, mask=there & (kind == 1)[:, None])
    if KINDS & 2:
        place = (address.to(tl.pointer_type(tl.int16)) + begin)[:, None] + column[None, :]
        tl.store(place, bf16_bits(numbers).to(tl.int16), mask=there & (kind == 2)[:, None])
    if KINDS & 4:
        place = (address.to(tl.pointer_type(tl.float16)) + begin)[:, None] + column[None, :]
        tl.store(place, numbers.to(tl.float16), mask=there & (kind == 4)[:, None])


@triton.jit
def rounded_as(numbers, kind, KINDS: tl.constexpr):
    """`numbers` rounded to the type of each row and back, as torch rounds after every operation."""
    found = numbers
    if KINDS & 2:
        found = tl.where(kind == 2, as_bf16(numbers), found)
    if KINDS & 4:
        found = tl.where(kind == 4, numbers.to(tl.float16).to(tl.float32), found)
    return found


@triton.jit
def dealt_row(message, local, messages, turns, run, owned):
    """The row of the flat that is row `local` of message number `message`: see `RowOwners.deal`.

    turns: The rows of each message that are dealt in turns of `run` rows; the remainder is split into equal parts.
    """
    in_turns = (local // run * messages + message) * run + local % run
    after = wide(turns) * messages + message * (owned - turns) + (local - turns)
    return tl.where(local < turns, in_turns, after)


@triton.jit
def message_of_row(row, messages, turns, run, owned):
    """The message that a row of the flat was dealt to, and its row there; the inverse of `dealt_row`."""
    block = row // run
    rest = row - wide(turns) * messages
    left = tl.maximum(owned - turns, 1)
    dealt = row < wide(turns) * messages
    message = tl.where(dealt, block % messages, rest // left)
    return message, tl.where(dealt, block // messages * run + row % run, turns + rest % left)
