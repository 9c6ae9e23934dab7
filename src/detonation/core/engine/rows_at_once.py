"""Block sizes: how many rows an accelerator processes at once, so that temporary tensors need no
more memory than one bucket in fp32.

A bucket is at most a quarter of the flat. All sizes in this module are bytes per row. Each block
costs kernel launches, most of all in an exchange through owners and with a majority vote. In these
two cases a flat of fewer than `LARGE` coordinates is processed in fewer blocks. These blocks need
at most the memory of two buckets.
"""

from dataclasses import dataclass

from detonation.core.codec import DCT, FP32, Arrived, Codec, Float, Identity, Received
from detonation.core.compute.scatter_sum import ONE_PASS_CHUNK, most_summed
from detonation.core.flat.rows import BUCKETS

UNIT = 64
"""Rows are always processed in multiples of this number: a matrix product of fewer rows may round
differently.
"""
LARGE = 2**28
"""From this number of coordinates on, saving memory matters more than saving kernel launches: a
step then takes 10 ms or more, and 80 fewer launches would save only 0.4 ms.
"""
MOST_BLOCKS = 32
"""Largest number of blocks into which a bucket is cut."""


def kept_until_sent(codec: Codec) -> int:
    """Bytes per row of the values and indices that are kept after encoding. During the collective
    these values are subtracted from the memory of unsent values, and then freed.
    """
    of_each = 4
    if not codec.dense:
        of_each += codec.index_coding.dtype.itemsize
    return codec.selection.k * of_each


def is_heavy(codec: Codec) -> bool:
    """True if the values and indices of all encoded rows need more storage than half a bucket. In
    this case they are not kept during the collective: the values are subtracted from the memory of
    unsent values before the message is sent.
    """
    return 2 * BUCKETS * kept_until_sent(codec) > 4 * codec.selection.chunk


@dataclass(frozen=True)
class Room:
    """Limit on the memory that temporary tensors may use.

    Args:
        rows: Rows of a bucket.
        few_launches: True if fewer blocks are preferred to less memory.
    """

    rows: int
    few_launches: bool = False


def selected_at_once(codec: Codec, rows: int, room: Room) -> tuple[int, int]:
    """Two counts of rows, each at most `rows`. Signals are added to the memory of unsent values in
    blocks of the first count. Coefficients are selected in blocks of the second count.
    """
    if room.few_launches:
        # up to 9 / 8 of a bucket at once, because the last bucket can be longer than the others
        at_once = _rows(rows, 8, room, 9)
        return at_once, at_once
    k = codec.selection.k
    line = 4 * codec.selection.chunk
    message = codec.nbytes(UNIT) // UNIT
    if is_heavy(codec):
        # bytes that are kept: the message, and the indices that the update needs later
        kept = message + k * codec.index_coding.dtype.itemsize * codec.selection.shared
    else:
        kept = message + kept_until_sent(codec) - 4 * k * (codec.precision == FP32)
    # no messages have arrived yet, so temporary tensors may use the bytes that messages need later
    free = line + BUCKETS * (2 * message - kept)
    chosen = line * _transforms(codec)
    if not codec.selection.shared:
        # bytes of the magnitudes, and of two copies of the selected indices and values
        chosen += line + 24 * k
    return _rows(rows, line, room, free), _rows(rows, max(line, chosen), room, free)


def released_at_once(codec: Codec, rows: int, room: Room) -> int:
    """Number of rows per block, at most `rows`, in which the sent values are subtracted from the
    memory of unsent values."""
    if room.few_launches:
        return _rows(rows, 8, room, 9)
    free = 4 * codec.selection.chunk
    if not is_heavy(codec):
        free -= BUCKETS * kept_until_sent(codec)
    return _rows(rows, _decoded(codec, codec.selection.k), room, free)


def replied_at_once(codec: Codec, answer: Codec, replicas: int, room: Room) -> int:
    """Number of rows per block in which an owner (a replica that aggregates some rows for all)
    aggregates messages and encodes its reply."""
    if room.few_launches:
        return room.rows
    width = replicas * codec.selection.k
    line = 4 * codec.selection.chunk
    cost = _decoded(codec, width) + 8 * width
    if not answer.selection.shared:
        cost += 2 * line + 24 * answer.selection.k
    return _rows(replicas * room.rows, cost, room, line)


def decoded_at_once(codec: Codec, received: Received, room: Room, into_flat: bool = False) -> int:
    """Number of rows of messages that are decoded at once.

    Args:
        into_flat: True if the result is one matrix. The matrix is computed in blocks only if
            blocks need less memory.
    """
    line = 4 * codec.selection.chunk
    width = received.width or codec.selection.k
    source = received.source
    cost = _decoded(codec, width)
    kept = 0
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
    """Bytes of temporary tensors per row during decoding, if all replicas together sent `width`
    coefficients per row."""
    line = 4 * codec.selection.chunk
    if codec.dense:
        if codec.precision == FP32:
            return line
        return 2 * line
    summed = line
    if not codec.selection.shared and codec.selection.chunk <= ONE_PASS_CHUNK:
        summed += 12 * width  # bytes of values, positions and bag numbers in `torch.embedding_bag`
    else:
        summed += 16 * codec.selection.k
    products = (1, 3, 6)[_transforms(codec)]
    if isinstance(codec.basis, DCT) and width <= most_summed(codec.selection.chunk):
        products = 1  # a sum over few coefficients needs no matrix product
    return max(summed, products * line)


def _transforms(codec: Codec) -> int:
    """Number of matrix products in one transform of the basis: 0 for the identity, 1 for chunks, 2
    for tiles."""
    if isinstance(codec.basis, Identity):
        return 0
    if isinstance(codec.basis, DCT):
        return 1
    return 2


def _rows(rows: int, cost: int, room: Room, free: int) -> int:
    """Number of rows of one block, if `rows` rows are cut into equal blocks.

    The temporary tensors of a block need `cost` bytes for each row of the block. Together they may
    use `free` bytes for each row of a bucket. A block may exceed this limit, because it has at
    least `UNIT` rows, and because a bucket has at most `MOST_BLOCKS` blocks.
    """
    most = max(room.rows * free // cost, room.rows // MOST_BLOCKS, UNIT)
    if rows <= most:
        return max(1, rows)
    blocks = -(-rows // most)
    return -(-rows // (blocks * UNIT)) * UNIT
