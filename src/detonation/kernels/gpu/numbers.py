"""Numbers of a message: reads, writes and checks values, packed numbers and statistics at any
address.
"""

import triton
import triton.language as tl

from detonation.kernels.gpu.addressing import bf16_bits, wide

LARGEST = tl.constexpr(3.4028234663852886e38)
"""The largest finite fp32 number."""


@triton.jit
def halves_of(numbers):
    """Returns the first and the last half of each row: `[rows, n]` -> twice `[rows, n / 2]`."""
    return tl.split(
        tl.permute(tl.reshape(numbers, [numbers.shape[0], 2, numbers.shape[1] // 2]), [0, 2, 1])
    )


@triton.jit
def sum_of_halves(numbers):
    """Adds the numbers of each row in the order of `scatter_sum.added`. The order of `tl.sum` would
    depend on the compiler and the target. Shapes: `[rows, n]` -> `[rows]`.
    """
    if numbers.shape[1] > 1:
        first, last = halves_of(numbers)
        found = sum_of_halves(first + last)
    else:
        found = tl.reshape(numbers, [numbers.shape[0]])
    return found


@triton.jit
def product_of(numbers, matrix, COLUMNS: tl.constexpr):
    """Multiplies rows by a matrix. Each element is a chain of fused multiply-adds that begins at
    zero (`scatter_sum.product_in_order`). A row longer than 64 is read in quarters, because a whole
    row would not fit into the registers.

    Shapes: numbers `[rows, COLUMNS]` fp32, matrix `[COLUMNS, COLUMNS]` in memory -> `[rows,
    COLUMNS]` fp32.
    """
    some: tl.constexpr = COLUMNS if COLUMNS <= 64 else COLUMNS // 4
    places = matrix + tl.arange(0, some)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    if COLUMNS <= 64:
        found = tl.dot(numbers, tl.load(places), input_precision="ieee")
    else:
        first, last = halves_of(numbers)
        one, two = halves_of(first)
        three, four = halves_of(last)
        found = tl.dot(one, tl.load(places), input_precision="ieee")
        found = tl.dot(two, tl.load(places + some * COLUMNS), found, input_precision="ieee")
        found = tl.dot(three, tl.load(places + 2 * some * COLUMNS), found, input_precision="ieee")
        found = tl.dot(four, tl.load(places + 3 * some * COLUMNS), found, input_precision="ieee")
    return found


@triton.jit
def load_bf16(octets, index, mask):
    """Loads the numbers at the indices `index` of a bf16 array, and returns them as fp32. The
    address `octets` of the array may be unaligned.
    """
    low = tl.load(octets + 2 * index, mask=mask, other=0).to(tl.int32)
    high = tl.load(octets + 2 * index + 1, mask=mask, other=0).to(tl.int32)
    return ((low << 16) | (high << 24)).to(tl.float32, bitcast=True)


@triton.jit
def store_bf16(octets, index, numbers, mask):
    """Stores `numbers` at the indices `index` of a bf16 array at address `octets`, which may be
    unaligned. Returns the rounded values.
    """
    bits = bf16_bits(numbers)
    tl.store(octets + 2 * index, (bits & 255).to(tl.uint8), mask=mask)
    tl.store(octets + 2 * index + 1, (bits >> 8).to(tl.uint8), mask=mask)
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def load_fp32(octets, index, mask):
    """Loads the numbers at the indices `index` of an fp32 array at address `octets`, which may be
    unaligned.
    """
    bits = tl.load(octets + 4 * index, mask=mask, other=0).to(tl.int32)
    for byte in tl.static_range(1, 4):
        bits |= tl.load(octets + 4 * index + byte, mask=mask, other=0).to(tl.int32) << (8 * byte)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def store_fp32(octets, index, numbers, mask):
    """Stores fp32 `numbers` at the indices `index` of an array at address `octets`, which may be
    unaligned.
    """
    bits = numbers.to(tl.int32, bitcast=True)
    for byte in tl.static_range(4):
        tl.store(octets + 4 * index + byte, ((bits >> (8 * byte)) & 255).to(tl.uint8), mask=mask)


@triton.jit
def load_packed(octets, index, mask, WIDTH: tl.constexpr):
    """Loads number `index` of a series of packed numbers of `WIDTH` bits, at most 8."""
    bit = index * WIDTH
    found = tl.load(octets + (bit >> 3), mask=mask, other=0).to(tl.int32)
    if 8 % WIDTH:  # a packed number may end in the next byte
        ends = mask & ((bit & 7) + WIDTH > 8)
        found |= tl.load(octets + (bit >> 3) + 1, mask=ends, other=0).to(tl.int32) << 8
    return (found >> (bit & 7).to(tl.int32)) & ((1 << WIDTH) - 1)


@triton.jit
def store_packed(octets, numbers, count, total, WIDTH: tl.constexpr, BYTES: tl.constexpr):
    """Packs `numbers`, each of which has one byte in memory, without gaps. The output has space for
    `total` numbers, but only the first `count` numbers are real.

    Each output byte is assembled from all numbers that have a bit in it, so that no two programs or
    threads write the same byte.
    """
    for first in range(0, (tl.minimum(count, total) * WIDTH + 7) // 8, BYTES):
        byte = first + tl.arange(0, BYTES)
        begins = byte * 8 // WIDTH
        found = tl.zeros_like(byte)
        for more in tl.static_range((8 + WIDTH - 2) // WIDTH + 1):
            number = begins + more
            value = tl.load(numbers + number, mask=number < tl.minimum(count, total), other=0).to(
                tl.int32
            )
            # shift < 8: the number has a bit in this byte; shift < 0: it began in an earlier byte
            shift = number * WIDTH - byte * 8
            moved = tl.where(
                shift < 0,
                value >> tl.maximum(-shift, 0),
                value << tl.minimum(tl.maximum(shift, 0), 8),
            )
            found |= tl.where(shift < 8, moved, 0)
        wanted = (byte < total * WIDTH // 8) & (byte < (count * WIDTH + 7) // 8)
        tl.store(octets + byte, (found & 255).to(tl.uint8), mask=wanted)


@triton.jit
def load_value(
    octets, statistics, index, mask,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Returns value number `index` of a message, as every receiver decodes it.

    Args:
        octets: Address of the values; with `ALIGNED` it is aligned for their type.
        statistics: Address of the statistics of blocks of `BLOCK` values; may be unaligned.
    """
    if PRECISION == "fp32" and ALIGNED:
        return tl.load(
            octets.to(tl.pointer_type(tl.float32), bitcast=True) + index, mask=mask, other=0.0
        )
    if PRECISION == "fp32":
        return load_fp32(octets, index, mask)
    if PRECISION == "bf16" and ALIGNED:
        found = tl.load(
            octets.to(tl.pointer_type(tl.bfloat16), bitcast=True) + index, mask=mask, other=0.0
        )
        return found.to(tl.float32)
    if PRECISION == "bf16":
        return load_bf16(octets, index, mask)
    if PRECISION == "sign":
        size = load_bf16(statistics, index // BLOCK, mask)
        return tl.where(load_packed(octets, index, mask, 1) == 1, -size, size)
    if PRECISION == "2bit":
        code = load_packed(octets, index, mask, 2)
        return load_bf16(statistics, index // BLOCK * 4 + code, mask)
    if PRECISION == "4bit":
        code = load_packed(octets, index, mask, 4)
        # 2 to the power -(code & 7), assembled from the bits of an fp32 number
        power = ((127 - (code & 7)) << 23).to(tl.float32, bitcast=True)
        size = tl.where((code & 7) == 7, 0.0, load_bf16(statistics, index // BLOCK, mask) * power)
        return tl.where(code > 7, -size, size)
    code = tl.load(octets + index, mask=mask, other=0).to(tl.int32)
    return load_bf16(statistics, index // BLOCK * 256 + code, mask)


@triton.jit
def negative_of(values, scale, negative_zeros):
    """True for a value that is sent as negative. A value counts as zero if its magnitude is at most
    the rounding error of values of size `scale`. Zeros are sent as negative if `negative_zeros` is
    set.
    """
    zero = scale * 3.814697265625e-06  # this factor is 2**-18
    return tl.where(negative_zeros != 0, values <= zero, values < -zero)


@triton.jit
def quantised(
    octets,
    statistics,
    values,
    real,
    block,
    negative_zeros,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Encodes block number `block` of a message: writes the statistics of the block, and returns
    the code of each value.
    """
    # `values` and `real` have the shape [BLOCK]; `real` is False at the padding
    values = tl.where(real, values, 0.0)
    size = tl.abs(values)
    written = tl.max(real.to(tl.int32)) > 0
    count = tl.maximum(tl.sum(real.to(tl.float32)), 1.0)
    if PRECISION == "sign":
        scale = tl.div_rn(tl.sum(size), count)
        store_bf16(statistics, block, scale, written)
        return negative_of(values, scale, negative_zeros).to(tl.int32)
    if PRECISION == "2bit":
        deviation = tl.div_rn(tl.sqrt_rn(tl.sum(values * values)), tl.sqrt_rn(count))
        large = size > deviation
        over, under = large & (values > 0), large & (values < 0)
        overs, unders = tl.sum(over.to(tl.float32)), tl.sum(under.to(tl.float32))
        small = tl.div_rn(
            tl.sum(tl.where(large, 0.0, size)), tl.maximum(count - overs - unders, 1.0)
        )
        high = tl.div_rn(tl.sum(tl.where(over, values, 0.0)), tl.maximum(overs, 1.0))
        low = tl.div_rn(tl.sum(tl.where(under, values, 0.0)), tl.maximum(unders, 1.0))
        store_bf16(statistics, block * 4, small, written)
        store_bf16(statistics, block * 4 + 1, high, written)
        store_bf16(statistics, block * 4 + 2, -small, written)
        store_bf16(statistics, block * 4 + 3, low, written)
        return 2 * negative_of(values, deviation, negative_zeros).to(tl.int32) + large.to(tl.int32)
    largest = store_bf16(statistics, block, tl.max(size), written)
    code = tl.zeros_like(size).to(tl.int32)
    for octave in tl.static_range(6):
        # `code` becomes log2(largest / size), rounded to a whole number from 0 to 6
        code += (largest > size * (2.0 ** (octave + 0.5))).to(tl.int32)
    code = tl.where(size <= largest * 0.0078125, 7, code)
    return code + tl.where(values < 0, 8, 0)


@triton.jit
def rounded(numbers):
    """Rounds fp32 numbers to whole numbers, ties to even."""
    size = tl.abs(numbers)
    # from 2**23 on, all fp32 numbers are whole numbers
    whole = tl.where(size < 8388608.0, (size + 8388608.0) - 8388608.0, size)
    return tl.where(numbers < 0, -whole, whole)


@triton.jit
def write_int8(octets, statistics, values, count, block, totals, SOME: tl.constexpr):
    """Encodes block number `block` of a message, which has `count` values: writes the codes and the
    statistics of the block (`precision.Int8`).

    Only this function adds in no fixed order. The numbers are whole, so the order changes no bit.

    Args:
        octets: Address for the code of the first value.
        totals: `[256]` int64, scratch memory: for each bin 2**17 times its sum, plus the number of
            its values.
    """
    item, bin_number = tl.arange(0, SOME), tl.arange(0, 256)
    square = tl.zeros([SOME], dtype=tl.float32)
    for first in range(0, count, SOME):
        value = tl.load(values + first + item, mask=first + item < count, other=0.0)
        square += value * value
    deviation = tl.div_rn(
        tl.sqrt_rn(tl.sum(square, axis=0)),
        tl.sqrt_rn((tl.zeros([1], tl.int32) + count).to(tl.float32)),
    )
    width = tl.maximum(deviation, 1e-30) * 0.046875
    tl.store(totals + bin_number, tl.zeros([256], tl.int64))
    tl.debug_barrier()
    for first in range(0, count, SOME):
        real = first + item < count
        scaled = tl.div_rn(
            tl.load(values + first + item, mask=real, other=0.0),
            tl.zeros([SOME], tl.float32) + width,
        )
        code = rounded(tl.minimum(tl.maximum(scaled, -127.0), 127.0)).to(tl.int32) + 128
        code = tl.minimum(tl.maximum(code, 0), 255)  # clamping makes the code of NaN valid, too
        tl.store(octets + first + item, code.to(tl.uint8), mask=real)
        # value / width exceeds 8192 only if all values are so small that their squares are 0
        far = tl.minimum(tl.maximum(scaled, -8192.0), 8192.0)
        units = rounded(far * 4096.0).to(tl.int64)
        tl.atomic_add(totals + code, units * 131072 + 1, mask=real, sem="relaxed", scope="cta")
    tl.debug_barrier()
    total = tl.load(totals + bin_number)
    number = tl.maximum(total & 131071, 1).to(tl.float32)
    mean = tl.div_rn((total >> 17).to(tl.float32), number) * (width * 0.000244140625)
    store_bf16(
        statistics,
        block * 256 + bin_number,
        tl.where(bin_number == 128, 0.0, mean),
        bin_number < 256,
    )
    tl.debug_barrier()  # wait until all threads have read the totals, which the next block clears


@triton.jit
def ranks_of(size, number):
    """Returns the sorted position of each number: how many numbers are smaller, or are equal and
    have a smaller index.
    """
    less, equal = size[None, :] < size[:, None], size[None, :] == size[:, None]
    return tl.sum((less | (equal & (number[None, :] < number[:, None]))).to(tl.int32), axis=1)


@triton.jit
def square_of(value):
    """Squares fp32 numbers. The square of a nonzero number is never 0, because a norm of 0 means
    that nothing was sent.
    """
    square = value * value
    return tl.where(value == 0, 0.0, tl.where(square < 1.2e-38, 1.2e-38, square))


@triton.jit
def finite_size(statistic):
    """Returns the magnitudes of fp32 numbers; infinity for NaN, because a maximum would ignore
    NaN.
    """
    size = tl.abs(statistic)
    return tl.where(size <= LARGEST, size, float("inf"))


@triton.jit
def facts_of(
    octets, run, part, parts, square, found,
    ALIGNED: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, K: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, BITMAP: tl.constexpr,
    SOME: tl.constexpr,
):  # fmt: skip
    """Adds the facts of one run (a range of rows) to the facts of its message. The facts decide
    whether the message is refused.

    SOME: the number of values that are read in one operation. square: `[SOME]` fp32, partial sums
    of squares for the norm. found: `[SOME]` int32: 1 for an index outside of its row, 2 for an
    index out of order, 4 for a statistic that no encoder produces.
    """
    values = octets + tl.load(run + 5)
    statistics_at = tl.load(run + 8) - tl.load(run + 5)
    indices_at = tl.load(run + 11) - tl.load(run + 5)
    rows = tl.load(run + 12)
    item = tl.arange(0, SOME)
    numbers = rows * K
    if PRECISION == "fp32" or PRECISION == "bf16":
        for first in range(part, tl.cdiv(numbers, SOME), parts):
            number = wide(first) * SOME + item
            value = load_value(values, values, number, number < numbers, PRECISION, BLOCK, ALIGNED)
            square += square_of(value)
    elif PRECISION == "int8":
        block_item, level = tl.arange(0, SOME // 256), tl.arange(0, 256)
        blocks = tl.cdiv(numbers, BLOCK)
        for first in range(part, tl.cdiv(blocks, SOME // 256), parts):
            block = (wide(first) * (SOME // 256) + block_item)[:, None]
            statistic = load_bf16(
                values + statistics_at, block * 256 + level[None, :], block < blocks
            )
            largest = tl.max(finite_size(statistic), axis=1)
            square += tl.where(
                item == 0, sum_of_halves(tl.reshape(square_of(largest), [1, SOME // 256])), 0.0
            )
    else:
        each: tl.constexpr = 4 if PRECISION == "2bit" else 1
        blocks = tl.cdiv(numbers, BLOCK)
        for first in range(part, tl.cdiv(blocks, SOME), parts):
            block = wide(first) * SOME + item
            largest = tl.zeros([SOME], dtype=tl.float32)
            for number in range(each):
                statistic = load_bf16(values + statistics_at, block * each + number, block < blocks)
                largest = tl.maximum(largest, finite_size(statistic))
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
                bits = load_packed(
                    values + indices_at, row[:, None] * CHUNK + column[None, :], inside, 1
                )
                wrong |= tl.where(
                    (row < rows) & (tl.sum(tl.where(inside, bits, 0), axis=1) != K), 2, 0
                )
            found |= tl.max(wrong, axis=0)
        else:
            for first in range(part, tl.cdiv(numbers, SOME), parts):
                number = wide(first) * SOME + item
                there = number < numbers
                index = load_packed(values + indices_at, number, there, WIDTH)
                after = there & (number % K != 0)
                before = load_packed(values + indices_at, tl.maximum(number - 1, 0), after, WIDTH)
                found |= tl.where(after & (index <= before), 2, 0) | tl.where(
                    there & (index >= CHUNK), 1, 0
                )
    return square, found
