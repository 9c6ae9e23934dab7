"""Choices: which coefficients of each row are sent, by their magnitudes or by (seed, step, row) alone."""

import triton
import triton.language as tl


@triton.jit
def largest_of(size, column, K: tl.constexpr, COLUMNS: tl.constexpr):
    """The `K` largest magnitudes of each row, by their bits; of equal ones those with the smallest indices."""
    # size [rows, COLUMNS] int32, below 0 at the padding -> [rows, COLUMNS] int32, 1 where chosen
    chosen = tl.zeros_like(size)
    if K <= 8:  # one after the other
        for _ in range(K):
            best = tl.max(size, axis=1)[:, None]
            first = tl.min(tl.where(size == best, column[None, :], COLUMNS), axis=1)[:, None]
            hit = column[None, :] == first
            chosen = tl.where(hit, 1, chosen)
            size = tl.where(hit, -2, size)
    else:  # the bits of the smallest magnitude that is chosen, from the highest down
        edge = tl.zeros_like(tl.max(size, axis=1))
        for bit in range(31):
            higher = edge | (1 << (30 - bit))
            enough = tl.sum((size >= higher[:, None]).to(tl.int32), axis=1) >= K
            edge = tl.where(enough, higher, edge)
        above = (size > edge[:, None]).to(tl.int32)
        tied = (size == edge[:, None]).to(tl.int32)
        missing = K - tl.sum(above, axis=1)[:, None]
        chosen = above + tl.where(tl.cumsum(tied, axis=1) <= missing, tied, 0)
    return chosen


@triton.jit
def mixed(word):
    """One output of splitmix64 (Steele, Lea & Flood, 2014): `selection._random_words` does the same."""
    word = (word ^ ((word >> 30) & 0x3FFFFFFFF)) * -4658895280553007687  # 0xBF58476D1CE4E5B9 as int64
    word = (word ^ ((word >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685  # 0x94D049BB133111EB
    return word ^ ((word >> 31) & 0x1FFFFFFFF)


@triton.jit
def random_word(start, index):
    """Word number `index` of those that follow from `start`."""
    return mixed((index + 1).to(tl.int64) * -7046029254386353131 + start)  # 0x9E3779B97F4A7C15


@triton.jit
def permutation_of_row(start, row):
    """The number, below 64, of the permutation that a row of the flat walks through in this cycle."""
    word = random_word(start, row // 8)
    return (word >> (row % 8 * 8)) & 63


@triton.jit
def places_of_row(
    table, turn, first_row, row, rows, column, CHUNK: tl.constexpr, K: tl.constexpr, SELECTION: tl.constexpr
):  # fmt: skip
    """The place of each coefficient of some rows among those that all replicas send, -1 for one that is not sent.

    table, turn: The output of `rotation_kernel`. first_row: The number of row 0 among those of the whole flat. rows: Of
    the flat; later ones are padding, of which the first coefficients are sent.
    """
    permutation = tl.zeros_like(row)
    if SELECTION == "random":
        permutation = permutation_of_row(tl.load(turn), first_row + row)
    real = (row < rows)[:, None] & (column < CHUNK)[None, :]
    first = tl.where((row >= rows)[:, None] & (column < K)[None, :], column[None, :], -1)
    return tl.load((table + permutation * CHUNK)[:, None] + column[None, :], mask=real, other=first)


@triton.jit(do_not_specialize=["words", "choices", "share", "deal"])
def rotation_kernel(
    table, turn, words, choices, share, deal, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, K: tl.constexpr,
    BITS: tl.constexpr, KIND: tl.constexpr, EACH: tl.constexpr, SOME: tl.constexpr
):  # fmt: skip
    """Writes for each coordinate of a row its place among those sent at this step, or -1; `EACH` permutations each.

    share, deal: See `selection.Rotation.place`. Permutation n takes the place of number n ^ deal.
    Shapes: table `[permutations, CHUNK]` int32, turn `[1]` int64: `choices`, for `permutation_of_row`.
    """
    which = tl.program_id(0) * EACH + tl.arange(0, EACH)
    column = tl.arange(0, COLUMNS)
    place = tl.zeros([EACH, COLUMNS], dtype=tl.int32) + column[None, :]
    if KIND == "random":  # the rank of a word among those of its permutation: low bits are the index, no two are equal
        mine = word_of(words, which[:, None] * CHUNK, column[None, :], BITS)
        rank = tl.zeros([EACH, COLUMNS], dtype=tl.int32)
        for first in range(0, CHUNK, SOME):
            other = first + tl.arange(0, SOME)
            theirs = word_of(words, which[:, None] * CHUNK, other[None, :], BITS)
            before = (theirs[:, None, :] < mine[:, :, None]) & (other < CHUNK)[None, None, :]
            rank += tl.sum(before.to(tl.int32), axis=2)
        place = rank - share * K
    elif KIND == "striding":
        period: tl.constexpr = CHUNK // K
        place = tl.where(place % period == share, place // period, -1)
    else:
        place -= share * K
    sent = (place >= 0) & (place < K)
    tl.store(
        table + (which ^ deal)[:, None] * CHUNK + column[None, :],
        tl.where(sent, place, -1),
        mask=(column < CHUNK)[None, :],
    )
    tl.store(turn, choices, mask=tl.program_id(0) == 0)


@triton.jit
def word_of(words, first, index, BITS: tl.constexpr):
    """The random word of an index, which its lowest bits are."""
    return ((random_word(words, first + index) >> BITS) << BITS) + index
