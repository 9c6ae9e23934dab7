"""Numbers of a message: values in each precision, packed numbers and statistics, read and written byte by byte."""

import triton
import triton.language as tl

from detonation.kernels.gpu.addressing import bf16_bits


@triton.jit
def load_bf16(octets, index, mask):
    """The bf16 number `index` from `octets` on, at any address, as fp32."""
    low = tl.load(octets + 2 * index, mask=mask, other=0).to(tl.int32)
    high = tl.load(octets + 2 * index + 1, mask=mask, other=0).to(tl.int32)
    return ((low << 16) | (high << 24)).to(tl.float32, bitcast=True)


@triton.jit
def store_bf16(octets, index, numbers, mask):
    """Writes `numbers` in bf16 as number `index` from `octets` on, at any address; returns them as they are read."""
    bits = bf16_bits(numbers)
    tl.store(octets + 2 * index, (bits & 255).to(tl.uint8), mask=mask)
    tl.store(octets + 2 * index + 1, (bits >> 8).to(tl.uint8), mask=mask)
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def load_packed(octets, index, mask, WIDTH: tl.constexpr):
    """Number `index` of `WIDTH` bits, at most 8, among packed ones."""
    bit = index * WIDTH
    found = tl.load(octets + bit // 8, mask=mask, other=0).to(tl.int32)
    if 8 % WIDTH:  # it may end in the next byte
        ends = mask & (bit % 8 + WIDTH > 8)
        found |= tl.load(octets + bit // 8 + 1, mask=ends, other=0).to(tl.int32) << 8
    return (found >> (bit % 8).to(tl.int32)) & ((1 << WIDTH) - 1)


@triton.jit
def store_packed(octets, numbers, count, total, WIDTH: tl.constexpr, BYTES: tl.constexpr):
    """Packs `total` numbers of one byte each, of which the first `count` are real, into whole bytes.

    Each byte is put together from the numbers that have a bit in it, so that no two programs or threads write one.
    """
    for first in range(0, total * WIDTH // 8, BYTES):
        byte = first + tl.arange(0, BYTES)
        begins = byte * 8 // WIDTH
        found = tl.zeros_like(byte)
        for more in tl.static_range((8 + WIDTH - 2) // WIDTH + 1):
            number = begins + more
            value = tl.load(numbers + number, mask=number < tl.minimum(count, total), other=0).to(tl.int32)
            shift = number * WIDTH - byte * 8  # below 8 where it has a bit in the byte, below 0 where it began before
            moved = tl.where(shift < 0, value >> tl.maximum(-shift, 0), value << tl.minimum(tl.maximum(shift, 0), 8))
            found |= tl.where(shift < 8, moved, 0)
        wanted = (byte < total * WIDTH // 8) & (byte < (count * WIDTH + 7) // 8)
        tl.store(octets + byte, (found & 255).to(tl.uint8), mask=wanted)


@triton.jit
def load_value(octets, statistics, index, mask, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    """Value number `index` of a message, as every receiver decodes it.

    Args:
        octets: Where the values begin; aligned for fp32 and bf16.
        statistics: Where the statistics of blocks of `BLOCK` values begin, at any address.
    """
    if PRECISION == "fp32":
        return tl.load(octets.to(tl.pointer_type(tl.float32), bitcast=True) + index, mask=mask, other=0.0)
    if PRECISION == "bf16":
        found = tl.load(octets.to(tl.pointer_type(tl.bfloat16), bitcast=True) + index, mask=mask, other=0.0)
        return found.to(tl.float32)
    if PRECISION == "sign":
        size = load_bf16(statistics, index // BLOCK, mask)
        return tl.where(load_packed(octets, index, mask, 1) == 1, -size, size)
    if PRECISION == "2bit":
        code = load_packed(octets, index, mask, 2)
        return load_bf16(statistics, index // BLOCK * 4 + code, mask)
    if PRECISION == "4bit":
        code = load_packed(octets, index, mask, 4)
        power = ((127 - (code & 7)) << 23).to(tl.float32, bitcast=True)  # 2 to the power of minus the exponent
        size = tl.where((code & 7) == 7, 0.0, load_bf16(statistics, index // BLOCK, mask) * power)
        return tl.where(code > 7, -size, size)
    code = tl.load(octets + index, mask=mask, other=0).to(tl.int32)
    return load_bf16(statistics, index // BLOCK * 256 + code, mask)


@triton.jit
def negative_of(values, scale, negative_zeros):
    """True where a value is sent as a negative number; the rounding error of values of size `scale` counts as zero."""
    zero = scale * 3.814697265625e-06  # 2**-18
    return tl.where(negative_zeros != 0, values <= zero, values < -zero)


@triton.jit
def quantised(octets, statistics, values, real, block, negative_zeros, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    """Encodes the block number `block` of a message: writes its statistics, and returns the code of each value.

    Shapes: values and real `[BLOCK]`, the second False at the padding.
    """
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
        small = tl.div_rn(tl.sum(tl.where(large, 0.0, size)), tl.maximum(count - overs - unders, 1.0))
        high = tl.div_rn(tl.sum(tl.where(over, values, 0.0)), tl.maximum(overs, 1.0))
        low = tl.div_rn(tl.sum(tl.where(under, values, 0.0)), tl.maximum(unders, 1.0))
        store_bf16(statistics, block * 4, small, written)
        store_bf16(statistics, block * 4 + 1, high, written)
        store_bf16(statistics, block * 4 + 2, -small, written)
        store_bf16(statistics, block * 4 + 3, low, written)
        return 2 * negative_of(values, deviation, negative_zeros).to(tl.int32) + large.to(tl.int32)
    largest = store_bf16(statistics, block, tl.max(size), written)
    code = tl.zeros_like(size).to(tl.int32)
    for octave in tl.static_range(6):  # rounded where the ratio passes a half-integral power of two: no logarithm
        code += (largest > size * (2.0 ** (octave + 0.5))).to(tl.int32)
    code = tl.where(size <= largest * 0.0078125, 7, code)
    return code + tl.where(values < 0, 8, 0)
