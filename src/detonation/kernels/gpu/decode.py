"""Decode: the messages of all replicas become an update, in one pass over the rows."""

import triton
import triton.language as tl

from detonation.kernels.gpu.addressing import (
    load_coordinates,
    message_of_row,
    rounded_as,
    slot_of,
    span_of,
    store_coordinates,
    wide,
)
from detonation.kernels.gpu.choosing import places_of_row
from detonation.kernels.gpu.numbers import load_packed, load_value


@triton.jit
def coefficients_of(
    values, statistics, indices, local, present, at, column,
    CHUNK: tl.constexpr, K: tl.constexpr, SELECTION: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, BITMAP: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """The coefficients of some rows of a message, zeros where none was sent.

    Args:
        values, statistics, indices: Where they begin, for each row.
        local: The number of each row in its message.
        at: The place of each coefficient among those of its row, -1 for one that is not sent; for a shared selection.

    Shapes: `[rows, 1]` pointers and int64 -> `[rows, columns]` fp32.
    """
    inside = present & (column < CHUNK)[None, :]
    if SELECTION == "topk":
        if BITMAP:
            bit = local * CHUNK + column[None, :]
            marked = load_packed(indices, bit, inside, 1)
            at = tl.cumsum(marked, axis=1) - 1
            real = inside & (marked == 1) & (at < K)
            return tl.where(real, load_value(values, statistics, local * K + at, real, PRECISION, BLOCK, ALIGNED), 0.0)
        found = tl.zeros_like(local * K + column[None, :]).to(tl.float32)
        for number in range(K):
            value = load_value(values, statistics, local * K + number, present, PRECISION, BLOCK, ALIGNED)
            index = tl.zeros_like(local).to(tl.int32)
            if WIDTH > 0:
                index = load_packed(indices, local * K + number, present, WIDTH)
            found += tl.where(inside & (column[None, :] == index), value, 0.0)
        return found
    real = inside & (at >= 0)
    return tl.where(real, load_value(values, statistics, local * K + at, real, PRECISION, BLOCK, ALIGNED), 0.0)


@triton.jit
def aggregated(
    values, stride, statistics_at, indices_at, replicas, local, present, at, column,
    CHUNK: tl.constexpr, K: tl.constexpr, SELECTION: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, BITMAP: tl.constexpr, ALIGNED: tl.constexpr, AGGREGATION: tl.constexpr,
):  # fmt: skip
    """The coefficients of some rows, aggregated over `replicas` messages in replica order.

    Args:
        values: Where the values of the first message begin, for each row; those of the next are `stride` bytes further.

    Shapes: values `[rows, 1]` pointers, and as in `coefficients_of` -> `[rows, columns]` fp32.
    """
    total = tl.zeros(at.shape, dtype=tl.float32)
    votes = tl.zeros(at.shape, dtype=tl.int32)
    for replica in range(replicas):
        begin = values + replica * stride
        sent = coefficients_of(begin, begin + statistics_at, begin + indices_at, local, present, at, column,
                               CHUNK, K, SELECTION, PRECISION, BLOCK, WIDTH, BITMAP, ALIGNED)  # fmt: skip
        if AGGREGATION == "majority":
            votes += (sent > 0).to(tl.int32) - (sent < 0).to(tl.int32)
            total += tl.abs(sent)
        else:
            votes += (sent != 0).to(tl.int32)
            total += sent
    if AGGREGATION == "nonzero":
        return tl.div_rn(total, tl.maximum(votes, 1).to(tl.float32))
    update = tl.div_rn(total, tl.zeros_like(total) + replicas)
    if AGGREGATION == "majority":
        update = tl.where(votes > 0, update, tl.where(votes < 0, -update, 0.0))
    return update


@triton.jit
def decode_kernel(
    message, stride, statistics_at, indices_at, replicas, count, turns, run, owned,
    inverse, table, turn, first_row,
    flat, targets, starts, numels, slots, rows, rates,
    CHUNK: tl.constexpr, COLUMNS: tl.constexpr, K: tl.constexpr, BASIS: tl.constexpr, SELECTION: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, BITMAP: tl.constexpr,
    ALIGNED: tl.constexpr, AGGREGATION: tl.constexpr, INTO: tl.constexpr, KINDS: tl.constexpr, SEARCH: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Decodes and aggregates the messages of `replicas`, in replica order, and does with the update what `INTO` says.

    Args:
        message: The first byte of the values of the first message; `stride` bytes further those of the next one.
        replicas: Whose messages hold all rows; with `count` above 1 it is one, in as many messages of `owned` rows.
        flat: `[rows, CHUNK]` fp32, for the `INTO` "flat" (the update is stored).
        targets: A table as in `encode_kernel`, for the `INTO` "tensors" (the update is stored) and "signs" (weights
            move by its signs).
        rates: `[slots, 2]` fp32, shrink and lr of each weight.
    """
    column = tl.arange(0, COLUMNS)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = row < rows
    row = tl.where(present, row, 0)
    slot = slot_of(starts, row, slots, SEARCH)
    start, left = span_of(starts, numels, slot, row, CHUNK)
    inside = present[:, None] & (column[None, :] < left[:, None])
    holder, local = message_of_row(row, count, turns, run, owned)
    at = tl.zeros([ROWS, COLUMNS], dtype=tl.int32)
    if SELECTION != "topk":
        at = places_of_row(table, turn, first_row, row, rows, column, CHUNK, K, SELECTION)
    values = (message + holder * stride)[:, None]
    update = aggregated(values, wide(stride), statistics_at, indices_at, replicas, local[:, None], present[:, None], at,
                        column, CHUNK, K, SELECTION, PRECISION, BLOCK, WIDTH, BITMAP, ALIGNED, AGGREGATION)  # fmt: skip
    if BASIS == "dct":
        update = tl.dot(update, tl.load(inverse + column[:, None] * COLUMNS + column[None, :]), input_precision="ieee")
    place = (flat + row * CHUNK)[:, None] + column[None, :]
    if INTO == "flat":
        tl.store(place, update, mask=inside)
    elif INTO == "tensors":
        store_coordinates(targets, slot, slots, start, column, inside, update, KINDS)
    else:
        kind = tl.load(targets + slots + slot)[:, None]
        shrink = tl.load(rates + 2 * slot)[:, None]
        lr = tl.load(rates + 2 * slot + 1)[:, None]
        weight = load_coordinates(targets, slot, slots, start, column, inside, KINDS)
        weight = rounded_as(weight * shrink, kind, KINDS)
        step = tl.where(update > 0, lr, tl.where(update < 0, -lr, 0.0))
        store_coordinates(targets, slot, slots, start, column, inside, weight - step, KINDS)
