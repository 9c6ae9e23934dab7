"""Encode: adds gradients to the memory of unsent values, and writes the selected coefficients as a
message, in one pass over the rows.
"""

import triton
import triton.language as tl

from detonation.kernels.gpu.addressing import (
    as_bf16,
    bf16_bits,
    dealt_row,
    largest_of,
    load_coordinates,
    places_of_row,
    rows_of_tile,
    slot_of,
    status_of,
    wide,
)
from detonation.kernels.gpu.decode import aggregated, coefficients_of, sum_of_vectors
from detonation.kernels.gpu.numbers import (
    product_of,
    quantised,
    store_bf16,
    store_fp32,
    store_packed,
    write_int8,
)


@triton.jit
def rows_of_message(
    reach, part, flat, dealing, shared, column,
    CHUNK: tl.constexpr, COLUMNS: tl.constexpr, K: tl.constexpr, SELECTION: tl.constexpr,
    SEARCH: tl.constexpr, ROWS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Locates up to `ROWS` rows of a unit (the rows that one program encodes together), from row
    `part` of the unit on. Returns a mask of the rows in the message, the results of `rows_of_tile`,
    and the positions of shared selected coefficients.

    reach: the index of the message, the message's row at which the unit begins, the unit's first
    and last row in the flat, and the slot of the first row. flat, dealing, shared: the arguments of
    `encode_kernel` from `starts`, `count` and `table` on.
    """
    which, begin, first, last, slot = reach
    starts, numels, slots, rows = flat
    count, turns, run, owned = dealing
    within = part + tl.arange(0, ROWS)
    row = dealt_row(which, begin, within, count, turns, run, owned)
    written = begin + within < owned
    row, slot, start, present, inside = rows_of_tile(
        starts,
        numels,
        slots,
        slot,
        first,
        last,
        row,
        written & (row < rows),
        column,
        CHUNK,
        SEARCH,
        WHOLE,
    )
    at = tl.zeros([ROWS, COLUMNS], dtype=tl.int32)
    if SELECTION != "topk":
        table, turn, first_row, owner, owners, owner_turns, owner_run, owner_owned, flat_rows = (
            shared
        )
        after = tl.maximum(row - first, 0).to(tl.int32)
        of_flat = dealt_row(owner, first, after, owners, owner_turns, owner_run, owner_owned)
        at = places_of_row(table, turn, first_row, of_flat, flat_rows, column, CHUNK, K, SELECTION)
    return present if WHOLE else written, row, slot, start, present, inside, at


@triton.jit(do_not_specialize=["negative_zeros"])
def encode_kernel(
    residual, signals, starts, numels, slots, rows, status, statuses, decay, alpha, forward,
    inverse, message, stride, statistics_at, indices_at, count, turns, run, owned, table, turn,
    first_row, owner, owners, owner_turns, owner_run, owner_owned, flat_rows, negative_zeros,
    arrived, arrived_stride, arrived_statistics_at, arrived_indices_at, replicas, scratch, numbers,
    units, rising, limit, found,
    CHUNK: tl.constexpr, COLUMNS: tl.constexpr, K: tl.constexpr, BASIS: tl.constexpr,
    SELECTION: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    BITMAP: tl.constexpr, ALIGNED: tl.constexpr, AGGREGATION: tl.constexpr, ARRIVED_K: tl.constexpr,
    ARRIVED_SELECTION: tl.constexpr, ARRIVED_PRECISION: tl.constexpr, ARRIVED_BLOCK: tl.constexpr,
    ARRIVED_WIDTH: tl.constexpr, ARRIVED_BITMAP: tl.constexpr, RELEASE: tl.constexpr,
    MEMORY: tl.constexpr, KINDS: tl.constexpr, SEARCH: tl.constexpr, STATUSES: tl.constexpr,
    UNIT: tl.constexpr, ROWS: tl.constexpr, BYTES: tl.constexpr, SCANNED: tl.constexpr,
):  # fmt: skip
    """Encodes rows in units of `UNIT` rows, so that no two programs write the same byte or the same
    block of values.

    A program that needs all values of a block keeps them in its part of `scratch`, which fits into
    a cache.

    Args:
        residual: `[rows, CHUNK]` fp32: it decays, and the signal is added to it. Without `MEMORY`
            the signal alone is encoded.
        signals: A table of addresses and kinds, `[2, slots]` int64; see
            `addressing.load_coordinates`.
        status: `[statuses]` int64; if any number is above 0, the residual does not change, and
            zeros are sent.
        message: The first byte of the values of the first message. The next message is `stride`
            bytes further.
        statistics_at, indices_at: Offsets in bytes from the values to the statistics and the
            indices.
        count, turns, run, owned: Number of messages, and the assignment of rows to messages: see
            `addressing.dealt_row`.
        table, turn: The output of `rotation_kernel`, for a selection that all replicas share.
        first_row: The number of the first row in the whole flat. For the rows of one owner, the
            arguments `owner` to `owner_owned` say which of the `flat_rows` they are, as in
            `dealt_row`.
        arrived: With an `AGGREGATION` the signal is the aggregate of the messages of `replicas`, in
            coefficients. The arguments `arrived...` describe these messages, like the arguments
            above for the written message.
        scratch: `[programs, UNIT * K]` fp32; for int8 each program also has 256 int64.
        numbers: `[programs, UNIT * max(K, CHUNK)]` uint8.
        rising, limit, found: With `SCANNED` the kernel also looks for bad values, as `scan_kernel`
            does with its arguments `numbers`, `limit` and `found`. Zeros are sent for the `ROWS`
            rows around a bad value, and the residual of these rows does not change.
        RELEASE: How the sent part is subtracted from the residual: "exact", "rounded" to bf16, or
            "read" from the message, as every receiver reads it; "" if it is not subtracted.
    """
    # True if the kernel computes the sent part as a sum of `K` basis vectors.
    # With bf16 coefficients, `RELEASE` must be "rounded": the message stores rounded values.
    SPARSE: tl.constexpr = (BASIS == "dct" and SELECTION == "topk" and WIDTH > 0 and not BITMAP
                            and (PRECISION != "bf16" or RELEASE == "rounded"))  # fmt: skip
    EACH: tl.constexpr = CHUNK if BITMAP else K
    column = tl.arange(0, COLUMNS)
    in_row = column < CHUNK
    silent = status_of(status, statuses, STATUSES) != 0
    bad_slot = tl.max(tl.zeros([1], dtype=tl.int32) + slots, axis=0)
    scratch += tl.program_id(0).to(tl.int64) * (UNIT * K + (512 if PRECISION == "int8" else 0))
    numbers += tl.program_id(0).to(tl.int64) * UNIT * EACH
    flat, dealing = (starts, numels, slots, rows), (count, turns, run, owned)
    shared = table, turn, first_row, owner, owners, owner_turns, owner_run, owner_owned, flat_rows
    units_each = tl.cdiv(owned, UNIT)
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        which = (unit // units_each).to(tl.int64)
        begin = (unit % units_each).to(tl.int64) * UNIT
        values_out = message + which * stride
        here = tl.minimum(owned - begin, UNIT).to(tl.int32)
        first = tl.max(dealt_row(which, begin, 0, count, turns, run, owned), axis=0)
        last = tl.max(dealt_row(which, begin, UNIT - 1, count, turns, run, owned), axis=0)
        tensor, whole = slot_of(starts, numels, slots, first, last, CHUNK, SEARCH)
        whole = whole & (begin + UNIT <= owned)
        reach = which, begin, first, last, tensor
        for WHOLE in tl.static_range(2):
            for part in range(0, tl.where(whole == (WHOLE == 1), here, 0), ROWS):
                within = part + tl.arange(0, ROWS)
                local = begin + within
                written, row, slot, start, present, inside, at = rows_of_message(
                    reach,
                    part,
                    flat,
                    dealing,
                    shared,
                    column,
                    CHUNK,
                    COLUMNS,
                    K,
                    SELECTION,
                    SEARCH,
                    ROWS,
                    WHOLE,
                )
                quiet = silent
                if AGGREGATION == "":
                    signal = load_coordinates(
                        signals, slot, slots, start, column, inside & (not silent), KINDS
                    )
                    if SCANNED:
                        beyond = tl.max(tl.where(tl.abs(signal) <= limit, 0, 1), axis=1)
                        bad = tl.min(tl.where(beyond > 0, slot, slots), axis=0)
                        bad_slot = tl.minimum(bad_slot, bad)
                        quiet = quiet | (bad < slots)
                        signal = tl.where(quiet, 0.0, signal)
                else:
                    signal = aggregated(
                        arrived, wide(arrived_stride), arrived_statistics_at, arrived_indices_at,
                        replicas, local[:, None], present[:, None], at, column, scratch, CHUNK,
                        ARRIVED_K, ARRIVED_SELECTION, ARRIVED_PRECISION, ARRIVED_BLOCK,
                        ARRIVED_WIDTH, ARRIVED_BITMAP, True, AGGREGATION,
                    )  # fmt: skip
                place = (residual + row * CHUNK)[:, None] + column[None, :]
                if MEMORY:
                    kept = tl.where(quiet, 1.0, decay)
                    signal += tl.load(place, mask=inside, other=0.0) * kept
                coefficients = product_of(signal, forward, COLUMNS) if BASIS == "dct" else signal
                if SELECTION == "topk":
                    size = tl.abs(coefficients).to(tl.int32, bitcast=True)
                    chosen = largest_of(tl.where(in_row[None, :], size, -1), column, K, COLUMNS)
                    at = tl.where(chosen == 1, tl.cumsum(chosen, axis=1) - 1, -1)
                else:
                    chosen = (at >= 0).to(tl.int32)
                real = (chosen == 1) & written[:, None]
                value = tl.where(quiet | (present[:, None] == 0), 0.0, coefficients)
                numbered = local[:, None] * K + at
                if PRECISION == "fp32" and ALIGNED:
                    tl.store(
                        values_out.to(tl.pointer_type(tl.float32), bitcast=True) + numbered,
                        value,
                        mask=real,
                    )
                elif PRECISION == "fp32":
                    store_fp32(values_out, numbered, value, real)
                elif PRECISION == "bf16" and ALIGNED:
                    halves = values_out.to(tl.pointer_type(tl.int16), bitcast=True)
                    tl.store(halves + numbered, bf16_bits(value).to(tl.int16), mask=real)
                elif PRECISION == "bf16":
                    store_bf16(values_out, numbered, value, real)
                else:
                    tl.store(scratch + within[:, None] * K + at, value, mask=real)
                if WIDTH > 0:
                    if BITMAP:
                        tl.store(
                            numbers + within[:, None] * CHUNK + column[None, :],
                            chosen.to(tl.uint8), mask=written[:, None] & in_row[None, :],
                        )  # fmt: skip
                    else:
                        tl.store(
                            numbers + within[:, None] * K + at,
                            column[None, :].to(tl.uint8),
                            mask=real,
                        )
                if MEMORY:
                    if RELEASE == "exact" or RELEASE == "rounded":
                        value = as_bf16(value) if RELEASE == "rounded" else value
                        if SPARSE:
                            # wait for the values that other threads of this program wrote
                            tl.debug_barrier()
                            octets = scratch.to(tl.pointer_type(tl.uint8), bitcast=True) - begin * (
                                4 * K
                            )
                            octets = octets if BLOCK > 1 else values_out
                            # the index of value number i is at the address octets + numbers_at + i
                            numbers_at = numbers.to(tl.int64) - octets.to(tl.int64) - begin * K
                            sent = sum_of_vectors(
                                octets, 0, 0, numbers_at, 1, 1.0, local[:, None], present[:, None],
                                column, inverse, CHUNK, COLUMNS, K,
                                "fp32" if BLOCK > 1 else PRECISION, 1, 8, False,
                                ALIGNED or BLOCK > 1,
                            )  # fmt: skip
                        else:
                            sent = tl.where(chosen == 1, value, 0.0)
                            sent = product_of(sent, inverse, COLUMNS) if BASIS == "dct" else sent
                        signal -= sent * alpha
                    tl.store(place, signal, mask=inside)
        tl.debug_barrier()  # wait for the numbers that other threads of this program wrote
        if WIDTH > 0:
            indices_out = values_out + indices_at + begin * EACH * WIDTH // 8
            store_packed(indices_out, numbers, here * EACH, UNIT * EACH, WIDTH, BYTES)
        if PRECISION == "int8":
            for number in range(0, here * K, BLOCK):
                write_int8(
                    values_out + begin * K + number, values_out + statistics_at, scratch + number,
                    tl.minimum(here * K - number, BLOCK), (begin * K + number) // BLOCK,
                    (scratch + UNIT * K).to(tl.pointer_type(tl.int64), bitcast=True), 1024,
                )  # fmt: skip
        elif BLOCK > 1:
            item = tl.arange(0, BLOCK)
            bits: tl.constexpr = 1 if PRECISION == "sign" else 2 if PRECISION == "2bit" else 4
            each: tl.constexpr = 8 // bits
            octet = tl.arange(0, BLOCK // each)
            for block in range(tl.cdiv(here * K, BLOCK)):
                number = block * BLOCK + item
                real_values = number < here * K
                values = tl.load(scratch + number, mask=real_values, other=0.0)
                code = quantised(
                    values_out, values_out + statistics_at, values, real_values,
                    begin * K // BLOCK + block, negative_zeros, PRECISION, BLOCK,
                )  # fmt: skip
                code = tl.where(real_values, code, 0)
                packed = tl.sum(
                    tl.reshape(code, [BLOCK // each, each]) << (bits * tl.arange(0, each))[None, :],
                    axis=1,
                )
                used = block * BLOCK + octet * each < here * K
                tl.store(
                    values_out + (begin * K + block * BLOCK) // each + octet,
                    packed.to(tl.uint8),
                    mask=used,
                )
        # wait for all threads before the next unit overwrites `numbers`
        tl.debug_barrier()
        if RELEASE == "read":
            for WHOLE in tl.static_range(2):
                for part in range(0, tl.where(whole == (WHOLE == 1), here, 0), ROWS):
                    _, row, _, _, present, inside, at = rows_of_message(
                        reach,
                        part,
                        flat,
                        dealing,
                        shared,
                        column,
                        CHUNK,
                        COLUMNS,
                        K,
                        SELECTION,
                        SEARCH,
                        ROWS,
                        WHOLE,
                    )
                    local = (begin + part + tl.arange(0, ROWS))[:, None]
                    sent = coefficients_of(
                        values_out, values_out + statistics_at, values_out + indices_at, local,
                        present[:, None], at, column, CHUNK, K, SELECTION, PRECISION, BLOCK, WIDTH,
                        BITMAP, ALIGNED,
                    )  # fmt: skip
                    sent = product_of(sent, inverse, COLUMNS) if BASIS == "dct" else sent
                    place = (residual + row * CHUNK)[:, None] + column[None, :]
                    tl.store(
                        place, tl.load(place, mask=inside, other=0.0) - sent * alpha, mask=inside
                    )
    if SCANNED:
        number = tl.load(rising + tl.minimum(bad_slot, slots - 1)) + 1
        tl.store(found + tl.program_id(0), tl.where(bad_slot < slots, number, 0))
