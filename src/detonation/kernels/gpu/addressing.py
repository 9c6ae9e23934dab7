"""Finds addresses inside a kernel: of rows in tensors, of rows in messages to owners (replicas that
aggregate rows), and of the selected coefficients of rows.
"""

import triton
import triton.language as tl

FP32, BF16, FP16 = 1, 2, 4
"""Dtypes of tensors, each as one bit of a bit set."""


@triton.jit
def wide(number):
    """Converts a number to an int64 tensor of shape `[1]`, so that its products do not overflow."""
    return tl.zeros([1], dtype=tl.int64) + number


@triton.jit
def bf16_bits(numbers):
    """Returns the bits of fp32 numbers rounded to bf16 (to nearest, ties to even). Integer
    arithmetic makes the rounding equal on all devices.
    """
    bits = numbers.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    # replaces NaN by a fixed NaN, because rounding the bits of a NaN could overflow to zero
    return tl.where(numbers == numbers, rounded, 0x7FC0)


@triton.jit
def as_bf16(numbers):
    """Rounds fp32 numbers to bf16, and returns them as fp32."""
    return (bf16_bits(numbers) << 16).to(tl.float32, bitcast=True)


@triton.jit
def status_of(status, statuses, STATUSES: tl.constexpr):
    """Returns the smallest number above 0 in `status`, `[statuses]` int64; 0 if there is none."""
    item = tl.arange(0, STATUSES)
    found = tl.load(status + item, mask=item < statuses, other=0)
    least = tl.min(tl.where(found > 0, found, 1 << 62), axis=0)
    return tl.where(least == (1 << 62), 0, least)


@triton.jit
def searched(starts, rows, slots, SEARCH: tl.constexpr):
    """Returns, for each row, the last slot (rows of one tensor) that begins at or before the row.
    This skips empty slots, because the slot after an empty slot begins at the same row.
    """
    low = tl.zeros_like(rows).to(tl.int32)
    high = low + slots
    for _ in tl.static_range(SEARCH):
        middle = (low + high) >> 1
        ahead = tl.load(starts + middle) <= rows
        low = tl.where(ahead, middle, low)
        high = tl.where(ahead, high, middle)
    return low


@triton.jit
def slot_of(starts, numels, slots, first, last, CHUNK: tl.constexpr, SEARCH: tl.constexpr):
    """Returns the slot (rows of one tensor) of row `first`, and whether this slot contains all
    coordinates of the rows up to `last`. The number of these coordinates must be below 2**31.
    """
    slot = searched(starts, first, slots, SEARCH)
    left = tl.load(numels + slot) - (first - tl.load(starts + slot)) * CHUNK
    return slot, tl.minimum(left, 1 << 31) >= (last + 1 - first) * CHUNK


@triton.jit
def rows_of_tile(
    starts, numels, slots, slot, first, last, row, present, column,
    CHUNK: tl.constexpr, SEARCH: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Locates rows `first` to `last`, most of which are in `slot` (the rows of one tensor). Returns
    for each row: its index, its slot, its offset in the flattened tensor, whether the row exists,
    and which of its coordinates exist.

    WHOLE: True if `slot` contains all these rows. In this case nothing is read per row, and the
    masks are constants.

    Shapes: row, present `[rows]` -> row `[rows]`, slot `[1]` or `[rows]`, twice `[rows]`, and
    `[rows, columns]` bool.
    """
    if WHOLE:
        found, present = tl.zeros([1], dtype=tl.int32) + slot, tl.zeros_like(row) == 0
        begin = (first - tl.load(starts + slot)) * CHUNK + (row - first).to(tl.int32) * CHUNK
        inside = present[:, None] & (column < CHUNK)[None, :]
    else:
        found = tl.zeros_like(row).to(tl.int32) + slot
        row = tl.where(present, row, 0)
        if tl.load(starts + slot + 1, mask=slot + 1 < slots, other=1 << 62) <= last:
            found = searched(starts, row, slots, SEARCH)
        begin = (row - tl.load(starts + found)) * CHUNK
        left = tl.minimum(tl.load(numels + found) - begin, CHUNK).to(tl.int32)
        inside = present[:, None] & (column[None, :] < left[:, None])
    return row, found, begin, present, inside


@triton.jit
def load_coordinates(table, slot, slots, begin, column, inside, KINDS: tl.constexpr):
    """Loads coordinates of rows as fp32. The coordinates begin at offset `begin` in the tensors
    whose addresses are in `table`. Masked coordinates and absent tensors give 0.
    """
    address = tl.load(table + slot)
    kind = tl.load(table + slots + slot)
    there = inside & (address != 0)[:, None]
    found = tl.zeros(inside.shape, dtype=tl.float32)
    for bit in tl.static_range(3):
        if KINDS >> bit & 1:
            read = address.to(tl.pointer_type((tl.float32, tl.bfloat16, tl.float16)[bit]))
            place, mine = (
                (read + begin)[:, None] + column[None, :],
                there & (kind == 1 << bit)[:, None],
            )
            found += tl.load(place, mask=mine, other=0.0).to(tl.float32)
    return found


@triton.jit
def store_coordinates(table, slot, slots, begin, column, inside, numbers, KINDS: tl.constexpr):
    """Stores fp32 coordinates of rows into the tensors whose addresses are in `table`, in the dtype
    of each tensor.
    """
    address = tl.load(table + slot)
    kind = tl.load(table + slots + slot)
    there = inside & (address != 0)[:, None]
    for bit in tl.static_range(3):
        if KINDS >> bit & 1:
            written = address.to(tl.pointer_type((tl.float32, tl.int16, tl.float16)[bit]))
            place, mine = (
                (written + begin)[:, None] + column[None, :],
                there & (kind == 1 << bit)[:, None],
            )
            tl.store(place, bf16_bits(numbers).to(tl.int16) if bit == 1 else numbers, mask=mine)


@triton.jit
def rounded_as(numbers, kind, KINDS: tl.constexpr):
    """Rounds the fp32 `numbers` of each row to the dtype of the row's tensor, because torch rounds
    after every operation. Returns fp32 numbers.
    """
    found = numbers
    if KINDS & 2:
        found = tl.where(kind == 2, as_bf16(numbers), found)
    if KINDS & 4:
        found = tl.where(kind == 4, numbers.to(tl.float16).to(tl.float32), found)
    return found


@triton.jit
def dealt_row(message, begin, item, messages, turns, run, owned):
    """Returns the index in the flat (matrix of all rows) of row `begin + item` of message number
    `message`; see `RowOwners.deal`.

    item: int32, so that each division per row needs only 32 bits. turns: count of rows of each
    message that are assigned to messages round robin, in runs of `run` rows. The remaining rows are
    split into equal parts, one for each message.
    """
    row = wide(begin + item)
    if messages > 1:
        of_turn = (begin % run).to(tl.int32) + item
        in_turns = ((begin // run + of_turn // run) * messages + message) * run + of_turn % run
        after = wide(turns) * messages + message * (owned - turns) + (row - turns)
        row = tl.where(row < turns, in_turns, after)
    return row


@triton.jit
def message_of_row(begin, item, messages, turns, run, owned):
    """Returns the message that contains row `begin + item` of the flat (matrix of all rows), and
    the index of the row in this message. This is the inverse of `dealt_row`.
    """
    of_turn = (begin % run).to(tl.int32) + item
    turn = (begin // run % messages).to(tl.int32) + of_turn // run
    # if `rest` is not negative, it is below `messages * run`, so 32 bits suffice for the division
    rest = begin + item - wide(turns) * messages
    left = tl.maximum(wide(owned) - turns, 1).to(tl.int32)
    message = tl.where(rest < 0, turn % messages, rest.to(tl.int32) // left)
    in_turns = (begin // run // messages + turn // messages) * run + of_turn % run
    return message.to(tl.int64), tl.where(rest < 0, in_turns, turns + rest.to(tl.int32) % left)


@triton.jit
def largest_of(size, column, K: tl.constexpr, COLUMNS: tl.constexpr):
    """Selects the `K` largest magnitudes of each row by their bits. Among equal magnitudes, those
    with the smallest indices are selected.
    """
    # shapes: size [rows, COLUMNS] int32, negative in padding -> the same shape, 1 if selected
    chosen = tl.zeros_like(size)
    if K <= 8:  # for a small K, selects one maximum after the other
        for _ in range(K):
            best = tl.max(size, axis=1)[:, None]
            first = tl.min(tl.where(size == best, column[None, :], COLUMNS), axis=1)[:, None]
            hit = column[None, :] == first
            chosen = tl.where(hit, 1, chosen)
            size = tl.where(hit, -2, size)
    else:  # finds the bits of the smallest selected magnitude, highest bit first
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
    """Applies the output function of splitmix64 (Steele, Lea & Flood, 2014) to a word, as
    `selection._random_words` does.
    """
    word = (
        word ^ ((word >> 30) & 0x3FFFFFFFF)
    ) * -4658895280553007687  # the constant 0xBF58476D1CE4E5B9 as int64
    word = (word ^ ((word >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685  # 0x94D049BB133111EB
    return word ^ ((word >> 31) & 0x1FFFFFFFF)


@triton.jit
def random_word(start, index):
    """Returns random word number `index` of the sequence that begins at `start`."""
    return mixed((index + 1).to(tl.int64) * -7046029254386353131 + start)  # 0x9E3779B97F4A7C15


@triton.jit
def permutation_of_row(start, row):
    """Returns which of 64 permutations a row of the flat uses in this cycle, as an index."""
    word = random_word(start, row // 8)
    return (word >> (row % 8 * 8)) & 63


@triton.jit
def places_of_row(
    table, turn, first_row, row, rows, column,
    CHUNK: tl.constexpr, K: tl.constexpr, SELECTION: tl.constexpr,
):  # fmt: skip
    """Returns, for each coefficient of the given rows, its position among the `K` coefficients of
    its row that are sent; -1 if the coefficient is not sent.

    table, turn: the output of `rotation_kernel`. first_row: the index, in the whole flat, of the
    first given row. rows: count of rows in the flat; rows from this index on are padding. The first
    `K` coefficients of each padding row are sent.
    """
    permutation = tl.zeros_like(row)
    if SELECTION == "random":
        permutation = permutation_of_row(tl.load(turn), first_row + row)
    real = (row < rows)[:, None] & (column < CHUNK)[None, :]
    first = tl.where((row >= rows)[:, None] & (column < K)[None, :], column[None, :], -1)
    return tl.load((table + permutation * CHUNK)[:, None] + column[None, :], mask=real, other=first)


@triton.jit(do_not_specialize=["words", "choices", "share", "deal"])
def rotation_kernel(
    table, turn, words, choices, share, deal,
    CHUNK: tl.constexpr, COLUMNS: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr,
    KIND: tl.constexpr, EACH: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """Writes, for each coordinate of a row, its position among the coordinates that are sent at
    this step, or -1 if it is not sent. Each program handles `EACH` permutations.

    Args:
        table: `[permutations, CHUNK]` int32, the positions; permutation n is at index n ^ `deal`.
        turn: `[1]` int64. The kernel copies `choices` to it, for `permutation_of_row`.
        words: The int64 that starts the random words of the permutations.
        choices: The int64 that starts the random words by which rows choose a permutation.
        share, deal: The second and third number of `selection.Rotation.phase`.
    """
    which = tl.program_id(0) * EACH + tl.arange(0, EACH)
    column = tl.arange(0, COLUMNS)
    place = tl.zeros([EACH, COLUMNS], dtype=tl.int32) + column[None, :]
    if (
        KIND == "random"
        # a coefficient's position is the rank of its random word among the words of its permutation
    ):
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
    """Returns random word number `first + index`, with its lowest `BITS` bits replaced by `index`,
    so that the words of a permutation differ.
    """
    return ((random_word(words, first + index) >> BITS) << BITS) + index
