"""Inspection: checksums and headers written, and everything inspected that decides whether values may be used."""

import triton
import triton.language as tl

from detonation.kernels.gpu.addressing import load_coordinates, slot_of, span_of, wide
from detonation.kernels.gpu.numbers import load_bf16, load_packed, load_value

LINE_WORDS = tl.constexpr(1024)
HEADER_WORDS = tl.constexpr(16)


@triton.jit
def place_number(index):
    """The number of a column, or of a line after all columns, before its lowest bit is set: see `checksum._numbers`."""
    at = (index + 1).to(tl.int64) * -7046029254386353131  # 0x9E3779B97F4A7C15
    return at ^ ((at >> 32) & 0xFFFFFFFF)


@triton.jit
def sums_kernel(message, stride, nbytes, lines, columns, sums, firsts, parts, SKIPPED: tl.constexpr):
    """Adds up each column of a message over some of its lines, and these lines, weighted; `parts` programs a message.

    Args:
        nbytes: Of a message with its header; what comes after it counts as zeros.
        columns, sums: `[messages, parts, 1024]` int32 and `[messages, parts]` int64.
        firsts: `[messages]` int32, the sum of the first line, whose weight comes later.
        SKIPPED: The first of the words of the header that count as zeros.
    """
    which, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    column = tl.arange(0, LINE_WORDS)
    total = tl.zeros([LINE_WORDS], dtype=tl.int32)
    weighted = tl.zeros([1], dtype=tl.int64)
    for line in range(part, lines, parts):
        word = wide(line) * LINE_WORDS + column
        left = nbytes - word * 4
        words = tl.load((message + which * stride).to(tl.pointer_type(tl.int32), bitcast=True) + word,
                        mask=left > 0, other=0)  # fmt: skip
        ends = (left < 4) & (left > 0)
        words = tl.where(ends, words & ((1 << (8 * tl.where(ends, left, 0)).to(tl.int32)) - 1), words)
        words = tl.where((word >= SKIPPED) & (word < HEADER_WORDS), 0, words)
        total += words
        of_line = tl.sum(words.to(tl.int64), axis=0).to(tl.int32)
        tl.store(firsts + which, of_line, mask=line == 0)
        weight = place_number(wide(line) + LINE_WORDS) & -2
        weighted += tl.where(line == 0, 0, of_line.to(tl.int64) * weight)
    tl.store(columns + (which * parts + part) * LINE_WORDS + column, total)
    tl.store(sums + which * parts + part + tl.arange(0, 1), weighted)


@triton.jit
def checksum_of(which, columns, sums, firsts, parts, header, of_header):
    """The checksum of a message from the output of `sums_kernel` and the words of its header, `[1024]` int32."""
    column = tl.arange(0, LINE_WORDS)
    total = header
    weighted = tl.zeros([1], dtype=tl.int64)
    for part in range(parts):
        total += tl.load(columns + (which * parts + part) * LINE_WORDS + column)
        weighted += tl.load(sums + which * parts + part + tl.arange(0, 1))
    first = (tl.load(firsts + which) + of_header).to(tl.int64) * (place_number(wide(0) + LINE_WORDS) & -2)
    return tl.sum(total.to(tl.int64) * (place_number(column) | 1), axis=0) + tl.sum(weighted + first, axis=0)


@triton.jit(do_not_specialize=["step", "received"])
def seal_kernel(
    message, stride, columns, sums, firsts, parts, identity, schema, step, origin, nbytes, status, received
):
    """Writes the header of each message, with its checksum."""
    which = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, LINE_WORDS)
    word = column // 2
    content = tl.zeros([LINE_WORDS], dtype=tl.int64)
    content = tl.where(word == 0, identity, content)
    content = tl.where(word == 1, schema, content)
    content = tl.where(word == 2, step, content)
    content = tl.where(word == 3, origin, content)
    content = tl.where(word == 4, nbytes, content)
    content = tl.where(word == 5, tl.load(status), content)
    content = tl.where(word == 6, received, content)
    header = (content >> (32 * (column % 2))).to(tl.int32)
    of_header = tl.sum(header.to(tl.int64), axis=0).to(tl.int32)
    found = checksum_of(which, columns, sums, firsts, parts, header, of_header)
    header = tl.where(word == 7, (found >> (32 * (column % 2))).to(tl.int32), header)
    place = (message + which * stride).to(tl.pointer_type(tl.int32), bitcast=True) + column
    tl.store(place, header, mask=column < HEADER_WORDS)


@triton.jit
def square_of(value):
    """The square of fp32 numbers, above 0 unless they are 0: a norm of 0 says that nothing was sent."""
    square = value * value
    return tl.where(value == 0, 0.0, tl.where(square < 1.2e-38, 1.2e-38, square))


@triton.jit
def facts_kernel(
    body, stride, statistics_at, indices_at, rows, squares, faults, parts,
    CHUNK: tl.constexpr, COLUMNS: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, BITMAP: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """The facts that decide about the content of each message, over some of its rows; `parts` programs a message.

    squares, faults: `[messages, parts]` fp32, the sum of the squares that make the norm; and int32: 1 for an index
    outside of its row, 2 for one out of order, 4 for a statistic that no encoder produces.
    """
    which, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    values = body + which * stride
    square = tl.zeros([SOME], dtype=tl.float32)
    found = tl.zeros([SOME], dtype=tl.int32)
    item = tl.arange(0, SOME)
    numbers = rows.to(tl.int64) * K
    if PRECISION == "fp32" or PRECISION == "bf16":
        for first in range(part, tl.cdiv(numbers, SOME), parts):
            number = wide(first) * SOME + item
            value = load_value(values, values, number, number < numbers, PRECISION, BLOCK)
            square += square_of(value)
    else:
        each: tl.constexpr = 4 if PRECISION == "2bit" else 256 if PRECISION == "int8" else 1
        blocks = tl.cdiv(numbers, BLOCK)
        for first in range(part, tl.cdiv(blocks, SOME), parts):
            block = wide(first) * SOME + item
            largest = tl.zeros([SOME], dtype=tl.float32)
            for number in range(each):
                statistic = load_bf16(values + statistics_at, block * each + number, block < blocks)
                size = tl.abs(statistic)
                largest = tl.where(size <= largest, largest, size)  # keeps what is not a number
                if PRECISION != "int8":
                    signed = tl.where(number > 1, -statistic, statistic)
                    found |= tl.where(signed >= 0, 0, 4)
            square += square_of(largest)
    if WIDTH > 0:
        if BITMAP:
            row_item = tl.arange(0, SOME // COLUMNS)
            column = tl.arange(0, COLUMNS)
            wrong = tl.zeros([SOME // COLUMNS], dtype=tl.int32)
            for first in range(part, tl.cdiv(rows, SOME // COLUMNS), parts):
                row = wide(first) * (SOME // COLUMNS) + row_item
                inside = (row < rows)[:, None] & (column < CHUNK)[None, :]
                bits = load_packed(values + indices_at, row[:, None] * CHUNK + column[None, :], inside, 1)
                wrong |= tl.where((row < rows) & (tl.sum(tl.where(inside, bits, 0), axis=1) != K), 2, 0)
            found |= tl.max(wrong, axis=0)
        else:
            for first in range(part, tl.cdiv(numbers, SOME), parts):
                number = wide(first) * SOME + item
                there = number < numbers
                index = load_packed(values + indices_at, number, there, WIDTH)
                after = there & (number % K != 0)
                before = load_packed(values + indices_at, tl.maximum(number - 1, 0), after, WIDTH)
                found |= tl.where(after & (index <= before), 2, 0) | tl.where(there & (index >= CHUNK), 1, 0)
    bits = (tl.max(found & 1, axis=0) | tl.max(found & 2, axis=0)) | tl.max(found & 4, axis=0)
    tl.store(squares + which * parts + part, tl.sum(square, axis=0))
    tl.store(faults + which * parts + part, bits)


@triton.jit(do_not_specialize=["step"])
def decide_kernel(
    message, stride, columns, sums, firsts, sum_parts, squares, faults, fact_parts, scale,
    identity, schema, step, place, nbytes, parameters, usual, limit, louder, forget, table, replicas,
    REPLICAS: tl.constexpr, SIGNALS: tl.constexpr,
):  # fmt: skip
    """Decides which messages are refused, as `validate.decide_usable` and `Arrived.facts`, and replaces these by zeros.

    Args:
        scale: By which the root of the squares is multiplied.
        usual: `[1]` fp32, updated; limit, louder, forget: the constants of `validate`.
        table: `[replicas, 13]` int64.
    """
    column = tl.arange(0, LINE_WORDS)
    number = tl.arange(0, REPLICAS)
    norms = tl.zeros([REPLICAS], dtype=tl.float32)
    fine = tl.zeros([REPLICAS], dtype=tl.int32)
    for replica in range(replicas):
        which = tl.zeros([1], dtype=tl.int64) + replica
        head = (message + wide(replica) * stride).to(tl.pointer_type(tl.int64), bitcast=True)
        none = tl.zeros([LINE_WORDS], dtype=tl.int32)
        found = checksum_of(wide(replica), columns, sums, firsts, sum_parts, none, 0)
        square = tl.zeros([1], dtype=tl.float32)
        fault = tl.zeros([1], dtype=tl.int32)
        for part in range(fact_parts):
            square += tl.load(squares + which * fact_parts + part)
            fault |= tl.load(faults + which * fact_parts + part)
        norm = tl.sqrt_rn(square) * scale
        content = tl.where((fault & 4) > 0, 3, tl.where((fault & 1) > 0, 1, fault & 2)).to(tl.int64)
        status, stated = tl.load(head + 5), tl.load(head + 7)
        right = (tl.load(head) == identity) & (tl.load(head + 1) == schema) & (tl.load(head + 2) == step)
        right = right & (tl.load(head + 3) == (wide(replica) << 32) + place) & (tl.load(head + 4) == nbytes)
        right = right & (stated == found) & (status >= 0) & (status <= parameters)
        good = (content == 0) & (norm <= limit) & right
        norms = tl.where(number == replica, norm, norms)
        fine = tl.where(number == replica, good.to(tl.int32), fine)
        line = table + which * 13
        tl.store(line + 8, tl.zeros([1], tl.int64) + found)
        tl.store(line + 9, content)
        tl.store(line + 10, norm.to(tl.float64).to(tl.int64, bitcast=True))
        copied = tl.arange(0, 8)
        tl.store(table + replica * 13 + copied, tl.load(head + copied))
    bound = tl.zeros([1], dtype=tl.float32) + float("inf")
    if SIGNALS:
        sending = (fine == 1) & (norms > 0)
        size = tl.where(sending, norms, float("inf"))
        earlier = (size[None, :] < size[:, None]) | (
            (size[None, :] == size[:, None]) & (number[None, :] < number[:, None])
        )
        rank = tl.sum(earlier.to(tl.int32), axis=1)
        middle = tl.max(tl.where(rank == tl.sum(sending.to(tl.int32), axis=0) // 2, size, 0.0), axis=0)
        middle = tl.where(middle == float("inf"), 0.0, middle)
        before = tl.load(usual + tl.arange(0, 1))
        bound = tl.maximum(middle, before) * louder
        fine = tl.where(norms <= bound, fine, 0)
        remembered = tl.where(middle * louder < before, before, before * forget)
        tl.store(usual + tl.arange(0, 1), tl.maximum(middle, remembered))
    bits = (tl.zeros([REPLICAS], tl.float64) + bound.to(tl.float64)).to(tl.int64, bitcast=True)
    tl.store(table + number * 13 + 11, bits, mask=number < replicas)
    tl.store(table + number * 13 + 12, (1 - fine).to(tl.int64), mask=number < replicas)
    for replica in range(replicas):  # rare, so that one program may take its time: a launch for it would cost each step
        spoiled = tl.sum(tl.where(number == replica, 1 - fine, 0), axis=0)
        for first in range(0, tl.where(spoiled > 0, tl.cdiv(nbytes, LINE_WORDS), 0)):
            octet = wide(first) * LINE_WORDS + column
            begin = message + wide(replica) * stride + 4 * HEADER_WORDS + octet
            tl.store(begin, tl.zeros([LINE_WORDS], tl.uint8), mask=octet < nbytes)


@triton.jit
def align_kernel(source, source_stride, target, target_stride, nbytes, parts, SOME: tl.constexpr):
    """Copies messages that begin at any address to where each begins at one for any type."""
    which = (tl.program_id(0) // parts).to(tl.int64)
    for first in range(tl.program_id(0) % parts, tl.cdiv(nbytes, SOME), parts):
        octet = wide(first) * SOME + tl.arange(0, SOME)
        copied = tl.load(source + which * source_stride + octet, mask=octet < nbytes, other=0)
        tl.store(target + which * target_stride + octet, copied, mask=octet < nbytes)


@triton.jit
def scan_kernel(
    signals, starts, numels, slots, rows, limit, found,
    ROW: tl.constexpr, ROWS: tl.constexpr, KINDS: tl.constexpr, SEARCH: tl.constexpr
):  # fmt: skip
    """Writes for each program the first tensor with a value that is not finite or above `limit`, or the number after
    the last one."""
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
    tl.store(found + tl.program_id(0), tl.min(first, axis=0))


@triton.jit
def settle_kernel(found, programs, slots, status, SOME: tl.constexpr):
    """Writes 1 + the number of the first tensor that any program found, or 0."""
    item = tl.arange(0, SOME)
    first = tl.min(tl.load(found + item, mask=item < programs, other=slots), axis=0)
    tl.store(status, tl.where(first < slots, first + 1, 0).to(tl.int64))
