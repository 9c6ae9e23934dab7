"""Kernels that write checksums and headers, and inspect received messages, sums of an all-reduce,
and gradients before they are added to a memory of unsent values.
"""

import triton
import triton.language as tl

from detonation.kernels.gpu.addressing import (
    load_coordinates,
    rows_of_tile,
    searched,
    status_of,
    wide,
)
from detonation.kernels.gpu.numbers import LARGEST, facts_of, load_value, ranks_of, sum_of_halves

LINE_WORDS, LINE_BYTES = tl.constexpr(1024), tl.constexpr(4096)
TOGETHER = tl.constexpr(8)
"""Number of programs whose sums are added in one operation."""
HEADER_WORDS = tl.constexpr(16)
_ADDRESSES = ["address0", "address1", "address2", "address3"]


@triton.jit
def place_number(index):
    """Returns a pseudorandom number for the column or line with this `index`; lines are numbered
    after all columns. The caller sets the lowest bit for a column and clears it for a line. The
    result is the factor of the column or line in a checksum, as in `checksum._numbers`.
    """
    at = (index + 1).to(tl.int64) * -7046029254386353131  # the constant 0x9E3779B97F4A7C15 as int64
    return at ^ ((at >> 32) & 0xFFFFFFFF)


@triton.jit
def add_run(words, octets, run, line):
    """Reads the bytes of one run of rows that belong to checksum line `line`, and adds them to
    `words`, the 32-bit words of this line. `read_message` describes the sections of a run.
    """
    octet = (
        wide(line) * LINE_BYTES + 4 * tl.arange(0, LINE_WORDS)[:, None] + tl.arange(0, 4)[None, :]
    )
    shift = 8 * tl.arange(0, 4)[None, :]
    for part in range(4):
        begin, end = tl.load(run + 3 * part), tl.load(run + 3 * part + 1)
        source = tl.load(run + 3 * part + 2)
        if (begin < end) & (begin // LINE_BYTES <= line) & (line <= (end - 1) // LINE_BYTES):
            there = (octet >= begin) & (octet < end)
            found = tl.load(octets + (source + octet - begin), mask=there, other=0).to(tl.int32)
            words += tl.sum(found << shift, axis=1)
    return words


@triton.jit
def read_message(
    address0, stride0, address1, stride1, address2, stride2, address3, stride3, runs, lines, target,
    target_stride, columns, sums, firsts, squares, faults, parts,
    RUNS: tl.constexpr, SKIPPED: tl.constexpr, JOIN: tl.constexpr, FACTS: tl.constexpr,
    ALIGNED: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, K: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, BITMAP: tl.constexpr,
    SOME: tl.constexpr,
):  # fmt: skip
    """Reads messages, each in up to four runs (ranges of rows). Computes the checksum of each
    message, and the facts that decide whether the message is refused (`facts_of`). `parts` GPU
    programs together read one message.

    A run holds four sections for its rows: header, values, statistics and indices. The whole
    message holds each section once: the sections of all runs, joined. The checksum is computed over
    the whole message.

    Args:
        address0: Address of the first run of the first message. The first run of the next message
            is `stride0` bytes further.
        runs: `[RUNS, 16]` int64: for each of the four sections its begin and end in the whole
            message and its begin in the run; then the number of rows of the run.
        target: With `JOIN` the whole messages are written here, zero-padded to lines.
        columns: `[messages, parts, 1024]` int32: the sums that each program adds over its lines.
        sums: `[messages, parts]` int64: the weighted sum of these lines.
        firsts: `[messages]` int32, the sum of the first line, which is weighted later.
        squares, faults: See `facts_of`.
        SKIPPED: The first of the words of the header that count as zeros.
    """
    which, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    addresses, strides = (
        (address0, address1, address2, address3),
        (stride0, stride1, stride2, stride3),
    )
    column = tl.arange(0, LINE_WORDS)
    total = tl.zeros([LINE_WORDS], dtype=tl.int32)
    weighted = tl.zeros([1], dtype=tl.int64)
    for line in range(part, lines, parts):
        words = tl.zeros([LINE_WORDS], dtype=tl.int32)
        for run in tl.static_range(RUNS):
            octets = (wide(addresses[run]) + which * wide(strides[run])).to(
                tl.pointer_type(tl.uint8)
            )
            words = add_run(words, octets, runs + 16 * run, line)
        word = wide(line) * LINE_WORDS + column
        if JOIN:
            tl.store(
                (target + which * target_stride).to(tl.pointer_type(tl.int32), bitcast=True) + word,
                words,
            )
        words = tl.where((word >= SKIPPED) & (word < HEADER_WORDS), 0, words)
        total += words
        of_line = tl.sum(words.to(tl.int64), axis=0).to(tl.int32)
        tl.store(firsts + which, of_line, mask=line == 0)
        weight = place_number(wide(line) + LINE_WORDS) & -2
        weighted += tl.where(line == 0, 0, of_line.to(tl.int64) * weight)
    tl.store(columns + (which * parts + part) * LINE_WORDS + column, total)
    tl.store(sums + which * parts + part + tl.arange(0, 1), weighted)
    if FACTS:
        square = tl.zeros([SOME], dtype=tl.float32)
        found = tl.zeros([SOME], dtype=tl.int32)
        for run in tl.static_range(RUNS):
            octets = (wide(addresses[run]) + which * wide(strides[run])).to(
                tl.pointer_type(tl.uint8)
            )
            square, found = facts_of(
                octets, runs + 16 * run, part, parts, square, found, ALIGNED, CHUNK, COLUMNS, K,
                PRECISION, BLOCK, WIDTH, BITMAP, SOME,
            )  # fmt: skip
        bits = (tl.max(found & 1, axis=0) | tl.max(found & 2, axis=0)) | tl.max(found & 4, axis=0)
        tl.store(
            squares + which * parts + part + tl.arange(0, 1),
            sum_of_halves(tl.reshape(square, [1, SOME])),
        )
        tl.store(faults + which * parts + part, bits)


@triton.jit
def is_last(arrivals, programs):
    """Returns True in one of the `programs` GPU programs that call this function: the last one. The
    last program sees everything that the other programs have written before.

    arrivals: a counter of the calls, which is 0 before the first call and again after the last
    call. Which program is the last may vary, but changes no result.
    """
    # the barrier waits for all threads of this program; the atomic addition publishes their writes
    tl.debug_barrier()
    last = tl.atomic_add(arrivals, 1, sem="acq_rel") == programs - 1
    if last:
        tl.store(arrivals, 0)
    tl.debug_barrier()
    return last


@triton.jit
def checksum_of(which, columns, sums, firsts, parts, header, of_header):
    """Computes the checksum of a message, from the output of `read_message` and the words of the
    message's header, `[1024]` int32.
    """
    column = tl.arange(0, LINE_WORDS)
    total = header
    weighted = tl.zeros([1], dtype=tl.int64)
    # the program that ends last adds the sums of all programs of the message
    for begin in range(0, parts, TOGETHER):
        part = begin + tl.arange(0, TOGETHER)
        there = part < parts
        place = (which * parts + part)[:, None] * LINE_WORDS + column[None, :]
        total += tl.sum(tl.load(columns + place, mask=there[:, None], other=0), axis=0)
        weighted += tl.sum(tl.load(sums + which * parts + part, mask=there, other=0), axis=0)
    first = (tl.load(firsts + which) + of_header).to(tl.int64) * (
        place_number(wide(0) + LINE_WORDS) & -2
    )
    return tl.sum(total.to(tl.int64) * (place_number(column) | 1), axis=0) + tl.sum(
        weighted + first, axis=0
    )


@triton.jit(
    do_not_specialize=[
        *_ADDRESSES,
        "lines",
        "schema",
        "step",
        "origin",
        "nbytes",
        "statuses",
        "received",
    ]
)
def seal_kernel(
    address0, stride0, address1, stride1, address2, stride2, address3, stride3, runs, lines,
    columns, sums, firsts, parts, arrivals, message, stride, identity, schema, step, origin, nbytes,
    status, statuses, received: tl.int64,
    RUNS: tl.constexpr, STATUSES: tl.constexpr,
):  # fmt: skip
    """Writes the header of each message, with its checksum. A message may begin at any address.

    `parts` programs read a message (see `read_message`); the last of them writes the header.

    Args:
        message: The first byte of the run with the header of the first message. The header of the
            next message is `stride` bytes further.
        arrivals: `[messages]` int32, see `is_last`.
    """
    read_message(
        address0, stride0, address1, stride1, address2, stride2, address3, stride3, runs, lines,
        message, stride, columns, sums, firsts, columns, columns, parts, RUNS, 0, False, False,
        False, 1, 1, 1, "fp32", 1, 0, False, 1,
    )  # fmt: skip
    which = (tl.program_id(0) // parts).to(tl.int64)
    if is_last(arrivals + which, parts):
        write_header(
            which, message, stride, columns, sums, firsts, parts, identity, schema, step, origin,
            nbytes, status, statuses, received, STATUSES,
        )  # fmt: skip


@triton.jit
def write_header(
    which, message, stride, columns, sums, firsts, parts, identity, schema, step, origin, nbytes,
    status, statuses, received,
    STATUSES: tl.constexpr,
):  # fmt: skip
    """Writes the header of message number `which`; see `seal_kernel`."""
    column = tl.arange(0, LINE_WORDS)
    word = column // 2
    content = tl.zeros([LINE_WORDS], dtype=tl.int64)
    given = (
        identity,
        schema,
        step,
        origin,
        nbytes,
        status_of(status, statuses, STATUSES),
        received,
    )
    for number in tl.static_range(7):
        content = tl.where(word == number, given[number], content)
    header = (content >> (32 * (column % 2))).to(tl.int32)
    of_header = tl.sum(header.to(tl.int64), axis=0).to(tl.int32)
    found = checksum_of(which, columns, sums, firsts, parts, header, of_header)
    header = tl.where(word == 7, (found >> (32 * (column % 2))).to(tl.int32), header)
    for byte in tl.static_range(4):
        octet = ((header >> (8 * byte)) & 255).to(tl.uint8)
        tl.store(message + which * stride + 4 * column + byte, octet, mask=column < HEADER_WORDS)


@triton.jit(
    do_not_specialize=[*_ADDRESSES, "lines", "schema", "step", "place", "nbytes", "parameters"]
)
def inspect_kernel(
    address0, stride0, address1, stride1, address2, stride2, address3, stride3, runs, lines,
    message, stride, columns, sums, firsts, squares, faults, parts, arrivals, scale, identity,
    schema, step, place, nbytes, parameters, usual, limit, louder, forget, table, replicas,
    RUNS: tl.constexpr, SKIPPED: tl.constexpr, JOIN: tl.constexpr, ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr, COLUMNS: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, BITMAP: tl.constexpr, SOME: tl.constexpr,
    REPLICAS: tl.constexpr, SIGNALS: tl.constexpr,
):  # fmt: skip
    """Reads the messages of all replicas, with `parts` programs for each message. The last program
    of a message inspects this message. The last of all programs decides which messages are refused.

    Args:
        message: The whole messages; with `JOIN` they are joined here. See `read_message` and
            `decide_messages`.
        arrivals: `[replicas + 1]` int32, see `is_last`.
    """
    read_message(
        address0, stride0, address1, stride1, address2, stride2, address3, stride3, runs, lines,
        message, stride,
        columns, sums, firsts, squares, faults, parts, RUNS, SKIPPED, JOIN, True, ALIGNED, CHUNK,
        COLUMNS, K,
        PRECISION, BLOCK, WIDTH, BITMAP, SOME
    )  # fmt: skip
    which = tl.program_id(0) // parts
    if is_last(arrivals + which, parts):
        inspect_message(
            which, message, stride, columns, sums, firsts, squares, faults, parts, scale, identity,
            schema, step, place, nbytes, parameters, limit, table,
        )  # fmt: skip
        if is_last(arrivals + replicas, replicas):
            decide_messages(
                message, stride, nbytes, usual, louder, forget, table, replicas, REPLICAS, SIGNALS
            )


@triton.jit
def inspect_message(
    replica, message, stride, columns, sums, firsts, squares, faults, parts, scale, identity,
    schema, step, place, nbytes, parameters, limit, table,
):  # fmt: skip
    """Writes the row of one message in the table of `decide_messages`. The norm of the message is
    the square root of its sum of squares, times `scale`.
    """
    which = tl.zeros([1], dtype=tl.int64) + replica
    head = (message + wide(replica) * stride).to(tl.pointer_type(tl.int64), bitcast=True)
    found = checksum_of(
        wide(replica), columns, sums, firsts, parts, tl.zeros([LINE_WORDS], dtype=tl.int32), 0
    )
    square = tl.zeros([1], dtype=tl.float32)
    fault = tl.zeros([1], dtype=tl.int32)
    for part in range(parts):
        square += tl.load(squares + which * parts + part)
        fault |= tl.load(faults + which * parts + part)
    norm = tl.sqrt_rn(square) * scale
    content = tl.where((fault & 4) > 0, 3, tl.where((fault & 1) > 0, 1, fault & 2)).to(tl.int64)
    status, stated = tl.load(head + 5), tl.load(head + 7)
    right = (
        (tl.load(head) == identity) & (tl.load(head + 1) == schema) & (tl.load(head + 2) == step)
    )
    right = (
        right & (tl.load(head + 3) == (wide(replica) << 32) + place) & (tl.load(head + 4) == nbytes)
    )
    right = right & (stated == found) & (status >= 0) & (status <= parameters)
    line = table + which * 13
    tl.store(line + 8, tl.zeros([1], tl.int64) + found)
    tl.store(line + 9, content)
    tl.store(line + 10, norm.to(tl.float64).to(tl.int64, bitcast=True))
    tl.store(line + 12, ((content == 0) & (norm <= limit) & right).to(tl.int64))
    tl.store(table + replica * 13 + tl.arange(0, 8), tl.load(head + tl.arange(0, 8)))


@triton.jit
def decide_messages(
    message,
    stride,
    nbytes,
    usual,
    louder,
    forget,
    table,
    replicas,
    REPLICAS: tl.constexpr,
    SIGNALS: tl.constexpr,
):
    """Decides which messages are refused, in the same way as `guard.decide_usable` and
    `Arrived.facts`. Replaces refused messages by zeros.

    Args:
        usual: `[1]` fp32, the typical norm, which is updated. louder, forget: constants of
            `validate`.
        table: `[replicas, 13]` int64; the last number is 1 if `inspect_message` finds no fault.
    """
    column = tl.arange(0, LINE_WORDS)
    number = tl.arange(0, REPLICAS)
    norms = tl.load(table + number * 13 + 10, mask=number < replicas, other=0)
    norms = norms.to(tl.float64, bitcast=True).to(tl.float32)
    fine = tl.load(table + number * 13 + 12, mask=number < replicas, other=0).to(tl.int32)
    bound = tl.zeros([1], dtype=tl.float32) + float("inf")
    if SIGNALS:
        sending = (fine == 1) & (norms > 0)
        size = tl.where(sending, norms, float("inf"))
        rank = ranks_of(size, number)
        middle = tl.max(
            tl.where(rank == tl.sum(sending.to(tl.int32), axis=0) // 2, size, 0.0), axis=0
        )
        middle = tl.where(middle == float("inf"), 0.0, middle)
        before = tl.load(usual + tl.arange(0, 1))
        bound = tl.maximum(middle, before) * louder
        fine = tl.where(norms <= bound, fine, 0)
        remembered = tl.where(middle * louder < before, before, before * forget)
        tl.store(usual + tl.arange(0, 1), tl.maximum(middle, remembered))
    bits = (tl.zeros([REPLICAS], tl.float64) + bound.to(tl.float64)).to(tl.int64, bitcast=True)
    tl.store(table + number * 13 + 11, bits, mask=number < replicas)
    tl.store(table + number * 13 + 12, (1 - fine).to(tl.int64), mask=number < replicas)
    for replica in range(replicas):
        # refusals are rare, so one slow program clears the message without a separate launch
        spoiled = tl.sum(tl.where(number == replica, 1 - fine, 0), axis=0)
        for first in range(0, tl.where(spoiled > 0, tl.cdiv(nbytes, LINE_WORDS), 0)):
            octet = wide(first) * LINE_WORDS + column
            begin = message + wide(replica) * stride + 4 * HEADER_WORDS + octet
            tl.store(begin, tl.zeros([LINE_WORDS], tl.uint8), mask=octet < nbytes)


@triton.jit(do_not_specialize=["slots", "rows"])
def scan_kernel(
    signals, starts, numels, numbers, slots, rows, limit, found,
    ROW: tl.constexpr, ROWS: tl.constexpr, KINDS: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """Searches tensors for values that are nonfinite or above `limit` in magnitude. Each program
    writes 1 + the index of the first tensor in which it finds such a value; 0 if it finds no such
    value.

    numbers: the indices of the tensors, in rising order, `[slots]` int64.
    """
    column = tl.arange(0, ROW)
    first = tl.zeros([ROWS], dtype=tl.int64) + slots
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        begin = tl.max(wide(tile) * ROWS, axis=0)
        row = begin + tl.arange(0, ROWS)
        slot = searched(starts, begin, slots, SEARCH)
        _, slot, start, _, inside = rows_of_tile(
            starts,
            numels,
            slots,
            slot,
            begin,
            begin + ROWS - 1,
            row,
            row < rows,
            column,
            ROW,
            SEARCH,
            False,
        )
        value = tl.abs(load_coordinates(signals, slot, slots, start, column, inside, KINDS))
        beyond = tl.max(tl.where(value <= limit, 0, 1), axis=1)
        first = tl.minimum(first, tl.where(beyond > 0, slot, slots))
    slot = tl.min(first, axis=0)
    number = tl.load(numbers + tl.minimum(slot, slots - 1))
    tl.store(found + tl.program_id(0), tl.where(slot < slots, number + 1, 0))


@triton.jit(do_not_specialize=["statuses", "count", "first", "added"])
def seal_sum_kernel(
    status, statuses, digits, count, first, added,
    EACH: tl.constexpr, STATUSES: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """Adds `added` to a status, and writes the sum after the values of an all-reduce.

    The sum is encoded as `EACH` digits in base 256, from digit `first` on. The digits of all other
    replicas are set to zero.

    Shapes: digits `[count]` fp32 or bf16, which represent such numbers exactly.
    """
    found = status_of(status, statuses, STATUSES) + added
    item = tl.arange(0, SOME)
    own = (item >= first) & (item < first + EACH)
    digit = (found >> (8 * tl.where(own, item - first, 0))) & 255
    tl.store(digits + item, tl.where(own, digit, 0).to(tl.float32), mask=item < count)


@triton.jit(do_not_specialize=[*_ADDRESSES, "count0", "count1", "count2", "count3", "count"])
def inspect_sum_kernel(
    address0, count0, address1, count1, address2, count2, address3, count3, digits, report, count,
    faults, parts, arrivals,
    RUNS: tl.constexpr, PRECISION: tl.constexpr, SOME: tl.constexpr, PARTS: tl.constexpr,
    DIGITS: tl.constexpr,
):  # fmt: skip
    """Inspects the sum of an all-reduce. The rows of the sum are in up to four runs (ranges of
    rows), each at an address of its own. The last of `parts` programs writes the report.

    Args:
        address0: Address of the first run, which has `count0` values.
        digits: `[count]` fp32 or bf16; see `seal_sum_kernel`.
        report: `[1 + count]` fp32: 1 if all values are finite, else 0; then the digits.
        faults, arrivals: `[parts]` and `[1]` int32, see `is_last`.
    """
    item = tl.arange(0, SOME)
    fault = tl.zeros([SOME], dtype=tl.int32)
    for run in tl.static_range(RUNS):
        octets = wide((address0, address1, address2, address3)[run]).to(tl.pointer_type(tl.uint8))
        values = (count0, count1, count2, count3)[run]
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
