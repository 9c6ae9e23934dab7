"""Rows at once: how many an accelerator works on, so that temporaries take no more memory than one
bucket.

A bucket of fp32 is a quarter of the flat or less. All figures are bytes for each row. Blocks cost
launches, and owners and votes need most of them: there a flat that is not large is exchanged in
fewer blocks, which take up to two buckets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from detonation.core.codec.basis import DCT, Identity
from detonation.core.codec.codec import Codec
from detonation.core.codec.precision import FP32, Float
from detonation.core.codec.received import Arrived
from detonation.core.compute.scatter_sum import ONE_PASS_CHUNK, most_summed
from detonation.core.flat.rows import BUCKETS

if TYPE_CHECKING:
    from detonation.core.codec.received import Received

UNIT = 64
"""The rows that are always worked on together: a product of few rows may round differently."""
LARGE = 2**28
"""The coordinates from which memory counts more than launches where both cannot be had: a step then
takes 10 ms or more, of which some 80 launches less would save 0.4."""
MOST_BLOCKS = 32
"""The most blocks of a bucket: each costs launches."""


def kept_until_sent(codec: Codec) -> int:
    """Of a row that is encoded: its values and indices, which leave the memory while the collective
    runs."""
    k, indices = codec.selection.k, 0 if codec.dense else codec.index_coding.dtype.itemsize
    return k * (4 + indices)


def is_heavy(codec: Codec) -> bool:
    """True if what is kept of all rows takes more than half a bucket: it then leaves the memory
    before the message."""
    return 2 * BUCKETS * kept_until_sent(codec) > 4 * codec.selection.chunk


@dataclass(frozen=True)
class Room:
    """The memory that temporaries may take.

    Args:
        few_launches: Whether fewer blocks count more than memory.
    """

    rows: int
    few_launches: bool = False


def selected_at_once(codec: Codec, rows: int, room: Room) -> tuple[int, int]:
    """Of `rows`, those that absorb a signal at once, and those of which coefficients are selected."""
    if room.few_launches:
        return (_rows(rows, 8, room, 9),) * 2  # a bucket may end a little later
    k, line, message = codec.selection.k, 4 * codec.selection.chunk, codec.nbytes(UNIT) // UNIT
    if is_heavy(codec):
        # for the update
        kept = message + k * codec.index_coding.dtype.itemsize * codec.selection.shared
    else:
        kept = message + kept_until_sent(codec) - 4 * k * (codec.precision == FP32)
    # the messages that are sent and received have not been made
    free = line + BUCKETS * (2 * message - kept)
    transformed = (
        0
        if isinstance(codec.basis, Identity)
        else line
        if isinstance(codec.basis, DCT)
        else 2 * line
    )
    chosen = 0 if codec.selection.shared else line + 24 * k  # magnitudes; places and values, twice
    return _rows(rows, line, room, free), _rows(rows, max(line, transformed + chosen), room, free)


def released_at_once(codec: Codec, rows: int, room: Room) -> int:
    """Of `rows`, those that leave the memory at once."""
    if room.few_launches:
        return _rows(rows, 8, room, 9)
    kept = 0 if is_heavy(codec) else BUCKETS * kept_until_sent(codec)
    return _rows(rows, _decoded(codec, codec.selection.k), room, 4 * codec.selection.chunk - kept)


def replied_at_once(codec: Codec, answer: Codec, replicas: int, room: Room) -> int:
    """The rows that an owner aggregates and answers at once."""
    if room.few_launches:
        return room.rows
    width, line = replicas * codec.selection.k, 4 * codec.selection.chunk
    chosen = 0 if answer.selection.shared else 2 * line + 24 * answer.selection.k
    return _rows(replicas * room.rows, _decoded(codec, width) + 8 * width + chosen, room, line)


def decoded_at_once(codec: Codec, received: Received, room: Room, into_flat: bool = False) -> int:
    """The rows of messages that are decoded at once.

    Args:
        into_flat: Whether the result is one matrix: it is made in blocks only where that takes
            less.
    """
    line, width, source = (
        4 * codec.selection.chunk,
        received.width or codec.selection.k,
        received.source,
    )
    cost, kept = _decoded(codec, width), 0
    if into_flat and 4 * cost <= 5 * line:
        return received.rows
    if room.few_launches:
        return -(-received.rows // (BUCKETS * UNIT)) * UNIT
    if isinstance(source, Arrived):
        coding = source.codec.index_coding
        if not isinstance(source.codec.precision, Float):
            cost += 4 * width
        if not source.codec.selection.shared and not coding.bitmap:
            kept = width * coding.dtype.itemsize * -(-received.rows // room.rows)
    return _rows(received.rows, cost, room, line - kept)


def _decoded(codec: Codec, width: int) -> int:
    """The temporaries of a row while `width` coefficients of all replicas are decoded."""
    line, k = 4 * codec.selection.chunk, codec.selection.k
    if codec.dense:
        return line if codec.precision == FP32 else 2 * line
    one_pass = not codec.selection.shared and codec.selection.chunk <= ONE_PASS_CHUNK
    # values, places, and bags of a sum in one pass
    summed = line + (12 * width if one_pass else 16 * k)
    # which need no product
    few = isinstance(codec.basis, DCT) and width <= most_summed(codec.selection.chunk)
    products = (
        1 if few or isinstance(codec.basis, Identity) else 3 if isinstance(codec.basis, DCT) else 6
    )
    return max(summed, products * line)


def _rows(rows: int, cost: int, room: Room, free: int) -> int:
    """`rows` in equal blocks, each of which costs no more than what is free for the rows of a
    bucket."""
    most = max(room.rows * free // cost, room.rows // MOST_BLOCKS, UNIT)
    return -(-max(1, rows) // (-(-rows // most) * UNIT)) * UNIT if rows > most else max(1, rows)
