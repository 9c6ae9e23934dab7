"""Decode: turns the messages of all replicas into an update in one pass over the rows."""

import triton
import triton.language as tl

from detonation.kernels.gpu.addressing import (
    load_coordinates,
    message_of_row,
    places_of_row,
    rounded_as,
    rows_of_tile,
    slot_of,
    store_coordinates,
    wide,
)
from detonation.kernels.gpu.messages import is_last
from detonation.kernels.gpu.numbers import (
    load_packed,
    load_value,
    product_of,
    ranks_of,
    sum_of_halves,
)


@triton.jit
def coefficients_of(
    values, statistics, indices, local, present, at, column,
    CHUNK: tl.constexpr, K: tl.constexpr, SELECTION: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, BITMAP: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Returns the coefficients of rows of a message, with zeros for coefficients that were not
    sent.

    Args:
        values, statistics, indices: Addresses of values, statistics and indices, for each row.
        local: The index of each row in its message.
        at: For a shared selection, the position of each coefficient among the sent coefficients of
            its row; -1 for a coefficient that is not sent.

    Shapes: `[rows, 1]` pointers and int64 -> `[rows, columns]` fp32.
    """
    inside = present & (column < CHUNK)[None, :]
    if SELECTION == "topk":
        if BITMAP:
            bit = local * CHUNK + column[None, :]
            marked = load_packed(indices, bit, inside, 1)
            at = tl.cumsum(marked, axis=1) - 1
            real = inside & (marked == 1) & (at < K)
            return tl.where(
                real,
                load_value(values, statistics, local * K + at, real, PRECISION, BLOCK, ALIGNED),
                0.0,
            )
        found = tl.zeros_like(local * K + column[None, :]).to(tl.float32)
        for number in range(K):
            value = load_value(
                values, statistics, local * K + number, present, PRECISION, BLOCK, ALIGNED
            )
            index = tl.zeros_like(local).to(tl.int32)
            if WIDTH > 0:
                index = load_packed(indices, local * K + number, present, WIDTH)
            found += tl.where(inside & (column[None, :] == index), value, 0.0)
        return found
    real = inside & (at >= 0)
    return tl.where(
        real, load_value(values, statistics, local * K + at, real, PRECISION, BLOCK, ALIGNED), 0.0
    )


@triton.jit
def aggregated(
    values, stride, statistics_at, indices_at, replicas, local, present, at, column, weights,
    CHUNK: tl.constexpr, K: tl.constexpr, SELECTION: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, BITMAP: tl.constexpr, ALIGNED: tl.constexpr,
    AGGREGATION: tl.constexpr,
):  # fmt: skip
    """Returns the coefficients of rows, aggregated over `replicas` messages in replica order.

    Args:
        weights: `[replicas]` fp32, for the `AGGREGATION` "weighted".
        values: Address of the values of the first message, for each row. The next message is
            `stride` bytes further.

    Shapes: values `[rows, 1]` pointers, and as in `coefficients_of` -> `[rows, columns]` fp32.
    """
    total = tl.zeros(at.shape, dtype=tl.float32)
    votes = tl.zeros(at.shape, dtype=tl.int32)
    for replica in range(replicas):
        begin = values + replica * stride
        sent = coefficients_of(
            begin, begin + statistics_at, begin + indices_at, local, present, at, column, CHUNK, K,
            SELECTION, PRECISION, BLOCK, WIDTH, BITMAP, ALIGNED,
        )  # fmt: skip
        if AGGREGATION == "majority":
            votes += (sent > 0).to(tl.int32) - (sent < 0).to(tl.int32)
            total += tl.abs(sent)
        else:
            votes += (sent != 0).to(tl.int32)
            if AGGREGATION == "weighted":
                sent *= tl.load(weights + replica)
            total += sent
    if AGGREGATION == "nonzero":
        return tl.div_rn(total, tl.maximum(votes, 1).to(tl.float32))
    update = tl.div_rn(total, tl.zeros_like(total) + replicas)
    if AGGREGATION == "majority":
        update = tl.where(votes > 0, update, tl.where(votes < 0, -update, 0.0))
    return update


@triton.jit
def sum_of_vectors(
    values, stride, statistics_at, indices_at, replicas, share, local, present, column, vectors,
    CHUNK: tl.constexpr, COLUMNS: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, BITMAP: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Computes the inverse transform of the mean of messages as a chain of fused multiply-adds.
    Each multiply-add adds the product of a basis vector, its coefficient and `share`. The chain
    adds replica after replica, and the coefficients of each replica in order.

    Args:
        vectors: `[COLUMNS, COLUMNS]` fp32.

    Shapes: as in `aggregated`.
    """
    total = tl.zeros_like(local * K + column[None, :]).to(tl.float32)
    at = tl.zeros_like(total).to(tl.int32) - 1
    for replica in range(replicas):
        begin = values + replica * stride
        if BITMAP:
            inside = present & (column < CHUNK)[None, :]
            marked = load_packed(begin + indices_at, local * CHUNK + column[None, :], inside, 1)
            at = tl.where(marked == 1, tl.cumsum(marked, axis=1) - 1, -1)
        for number in range(K):
            value = load_value(
                begin, begin + statistics_at, local * K + number, present, PRECISION, BLOCK, ALIGNED
            )
            index = tl.zeros_like(local).to(tl.int32)
            if BITMAP:
                index = tl.sum(tl.where(at == number, column[None, :], 0), axis=1)[:, None]
            elif WIDTH > 0:
                index = load_packed(begin + indices_at, local * K + number, present, WIDTH)
            vector = tl.load(vectors + index * COLUMNS + column[None, :])
            total = tl.fma(tl.broadcast_to(value * share, total.shape), vector, total)
    return total


@triton.jit
def run_of_rows(address0, address1, row1, address2, row2, address3, row3, row, RUNS: tl.constexpr):
    """Returns for each row the address of the run (a range of rows) that contains the row, and the
    index of the row in this run. The runs together hold the sum of an all-reduce.
    """
    # shapes: row [rows] int64 -> address of the run [rows], and index of the row in the run [rows]
    address, local = tl.zeros_like(row) + wide(address0), row
    addresses, begins = (address0, address1, address2, address3), (0, row1, row2, row3)
    for run in tl.static_range(1, RUNS):
        address = tl.where(row >= begins[run], wide(addresses[run]), address)
        local = tl.where(row >= begins[run], row - begins[run], local)
    return address, local


@triton.jit(do_not_specialize=["address0", "address1", "address2", "address3"])
def decode_kernel(
    message, stride, statistics_at, indices_at, replicas, count, turns, run, owned, address0,
    address1, row1, address2, row2, address3, row3, report, inverse, table, turn, first_row, flat,
    targets, starts, numels, slots, rows, rates, weights, share,
    CHUNK: tl.constexpr, COLUMNS: tl.constexpr, K: tl.constexpr, BASIS: tl.constexpr,
    SELECTION: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    BITMAP: tl.constexpr, ALIGNED: tl.constexpr, AGGREGATION: tl.constexpr, INTO: tl.constexpr,
    KINDS: tl.constexpr, SEARCH: tl.constexpr, ROWS: tl.constexpr, RUNS: tl.constexpr,
    SUMMED: tl.constexpr,
):  # fmt: skip
    """Decodes the messages of `replicas`, and aggregates them in replica order. `INTO` says whether
    the kernel stores the update, or moves weights by its signs.

    Args:
        message: The first byte of the values of the first message. The next message is `stride`
            bytes further.
        replicas: Number of messages that hold all rows, one from each replica. If `count` is above
            1, `replicas` is 1, and each of `count` messages holds `owned` rows.
        address0: For the `AGGREGATION` "sum", which reads no messages: address of the first of
            `RUNS` runs of the sum of all replicas. The run from row `row1` on is at `address1`, and
            so on.
        report: The output of `inspect_sum_kernel`; a sum that is not finite counts as zeros.
        flat: `[rows, CHUNK]` fp32, for the `INTO` "flat" (the update is stored).
        targets: A table as in `encode_kernel`, for the `INTO` "tensors" (the update is stored) and
            "signs" (weights move by its signs).
        rates: `[slots, 2]` fp32, shrink and lr of each weight.
        weights: See `aggregated`.
        share: See `sum_of_vectors`, which computes the update if `SUMMED` is True.
    """
    column = tl.arange(0, COLUMNS)
    first = tl.program_id(0).to(tl.int64) * ROWS
    last, item = first + ROWS - 1, first + tl.arange(0, ROWS)
    tensor, whole = slot_of(starts, numels, slots, first, last, CHUNK, SEARCH)
    for WHOLE in tl.static_range(2):
        if whole == (WHOLE == 1):
            row, slot, start, present, inside = rows_of_tile(
                starts,
                numels,
                slots,
                tensor,
                first,
                last,
                item,
                item < rows,
                column,
                CHUNK,
                SEARCH,
                WHOLE,
            )
            at = tl.zeros([ROWS, COLUMNS], dtype=tl.int32)
            if SELECTION != "topk":
                at = places_of_row(table, turn, first_row, row, rows, column, CHUNK, K, SELECTION)
            if AGGREGATION == "sum":
                address, local = run_of_rows(
                    address0, address1, row1, address2, row2, address3, row3, row, RUNS
                )
                octets = address.to(tl.pointer_type(tl.uint8))[:, None]
                total = coefficients_of(
                    octets, octets, octets, local[:, None], present[:, None], at, column, CHUNK, K,
                    SELECTION, PRECISION, BLOCK, WIDTH, BITMAP, ALIGNED,
                )  # fmt: skip
                total = tl.where(tl.load(report) > 0, total, 0.0)
                update = tl.div_rn(total, tl.zeros_like(total) + replicas)
            else:
                values, local = message + tl.zeros_like(row), row
                if count > 1:
                    holder, local = message_of_row(
                        first, tl.arange(0, ROWS), count, turns, run, owned
                    )
                    values += holder * stride
                values, local = values[:, None], local[:, None]
                if SUMMED:
                    update = sum_of_vectors(
                        values, wide(stride), statistics_at, indices_at, replicas, share, local,
                        present[:, None], column, inverse, CHUNK, COLUMNS, K, PRECISION, BLOCK,
                        WIDTH, BITMAP, ALIGNED,
                    )  # fmt: skip
                else:
                    update = aggregated(
                        values, wide(stride), statistics_at, indices_at, replicas, local,
                        present[:, None], at, column, weights, CHUNK, K, SELECTION, PRECISION,
                        BLOCK, WIDTH, BITMAP, ALIGNED, AGGREGATION,
                    )  # fmt: skip
            if BASIS == "dct" and not SUMMED:
                update = product_of(update, inverse, COLUMNS)
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


@triton.jit
def weigh_kernel(
    message, stride, statistics_at, numbers, squares, programs, arrivals, weights, replicas,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr, LANES: tl.constexpr,
    PARTS: tl.constexpr, REPLICAS: tl.constexpr,
):  # fmt: skip
    """Writes the weights of messages for `aggregate.ClippedMean`. `programs` programs read each
    message, and the last of all programs computes the weights.

    Args:
        numbers: The values of each message, whose squares are added in the order of
            `scatter_sum.SumOfSquares`.
        squares, arrivals: `[replicas, parts]` fp32 and `[1]` int32, see `is_last`.
        weights: `[replicas]` fp32.
    """
    which = (tl.program_id(0) // programs).to(tl.int64)
    values = message + which * stride
    for part in range(tl.program_id(0) % programs, PARTS, programs):
        square = tl.zeros([LANES], dtype=tl.float32)
        for first in range(part, tl.cdiv(numbers, LANES), PARTS):
            number = wide(first) * LANES + tl.arange(0, LANES)
            value = load_value(
                values, values + statistics_at, number, number < numbers, PRECISION, BLOCK, ALIGNED
            )
            square += value * value
        of_part = sum_of_halves(tl.reshape(square, [1, LANES]))
        tl.store(squares + which * PARTS + part + tl.arange(0, 1), of_part)
    if is_last(arrivals, replicas * programs):
        number = tl.arange(0, REPLICAS)
        place = number[:, None] * PARTS + tl.arange(0, PARTS)[None, :]
        of_parts = tl.load(squares + place, mask=number[:, None] < replicas, other=0.0)
        norms = tl.sqrt_rn(sum_of_halves(of_parts))
        size = tl.where(norms > 0, norms, float("inf"))
        rank = ranks_of(size, number)
        heard = tl.sum((norms > 0).to(tl.int32), axis=0)
        # `middle` is the median of the norms of all messages that are not zero
        middle = tl.min(tl.where(rank == tl.maximum(heard - 1, 0) // 2, size, float("inf")), axis=0)
        louder = norms > middle
        weight = tl.where(
            louder, tl.div_rn(tl.zeros_like(norms) + middle, tl.where(louder, norms, 1.0)), 1.0
        )
        tl.store(weights + number, weight, mask=number < replicas)
