"""Cuts a flat into buckets, which are sent while backward still computes other gradients."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from detonation.core.codec import Codec
from detonation.core.flat.layout import Layout
from detonation.core.flat.rows import BUCKETS, SMALL_BUCKETS, Bucket
from detonation.core.schemes.scheme import Scheme

SMALLEST = 2**20
"""Smallest size of a bucket, as bytes of its coordinates in fp32."""


def aligned_rows(*codecs: Codec) -> int:
    """Returns a number of rows at whose multiples the messages of all `codecs` can be cut without
    changing a bit of the result.

    The number is at least 64, because a matrix product of fewer rows may round differently.
    """
    return math.lcm(*(codec.unit for codec in codecs), 64)


def rows_of_a_turn(scheme: Scheme, replicas: int) -> int:
    """Returns the number of consecutive rows that one owner (a replica that aggregates rows for
    all) gets before the next owner gets rows. Messages and replies can be cut at multiples of this
    number.
    """
    return aligned_rows(scheme.codec, scheme.reply_codec(replicas))


def cut_into_buckets(
    layout: Layout, scheme: Scheme, unit: int, few: bool = False, late: Collection[str] = ()
) -> list[Bucket]:
    """Cuts the rows of `layout` into buckets, and returns the buckets in the order of their rows.
    All buckets together need as many bytes as one whole message, apart from headers and padding.

    Every bucket except the last has a multiple of `unit` rows, see `traffic.buckets_of`. A layout
    in tiles has one bucket, because a multiple of `unit` may end inside a line of tiles.

    Args:
        layout: Layout of the whole flat.
        unit: A message may be cut after multiples of this number of rows.
        few: See `block_rows`.
        late: Names of the parameters whose gradients arrive only at the end of backward. Their rows
            get separate buckets, so that no other rows wait for these gradients.
    """
    smallest = max(1, SMALLEST // (4 * layout.chunk * unit)) * unit
    rows = max(smallest, -(-block_rows(scheme, layout.rows, few) // unit) * unit)
    if layout.rows < 2 * smallest or layout.rows <= rows or layout.tiled:
        return [Bucket.whole(layout)]
    early = [*_early_runs(layout, late, unit)]
    found = _cut(layout, early, rows, smallest)
    while few and late and len(found) > BUCKETS:
        rows = -(-5 * rows // (4 * unit)) * unit
        found = _cut(layout, early, rows, smallest)
    return found


def _early_runs(layout: Layout, late: Collection[str], unit: int) -> Iterator[tuple[int, int]]:
    """Yields runs of consecutive rows, each as its first row and its end. The rows of a run belong
    to no parameter in `late` (the parameters whose gradients arrive last). Each run begins and ends
    at a multiple of `unit` rows, except that the last run ends with the layout.
    """
    first = 0
    for slot in layout.slots:
        if slot.rows and slot.name in late:
            yield first, slot.row // unit * unit
            first = -(-(slot.row + slot.rows) // unit) * unit
    yield first, layout.rows


def _cut(
    layout: Layout, early: Collection[tuple[int, int]], rows: int, smallest: int
) -> list[Bucket]:
    """Cuts the layout into buckets of about `rows` rows. A bucket contains either rows of the
    `early` runs, or late rows whose gradients arrive last.

    An early run of less than half a bucket counts as late. A separate bucket would save little
    waiting time, and would need one more collective.
    """
    runs: list[tuple[int, int, bool]] = []
    end = 0
    for first, after in early:
        if after - first >= rows // 2:
            runs += [(end, first, True), (first, after, False)]
            end = after
    runs.append((end, layout.rows, True))
    found = []
    for first, after, late in runs:
        starts = [first, *range(first + rows, after - smallest, rows)]
        ends = [*starts[1:], after]
        pairs = zip(starts, ends, strict=True)
        found += [Bucket.of(layout, start, end, late) for start, end in pairs if start < end]
    return found


def sending_order(buckets: Sequence[Bucket]) -> list[Bucket]:
    """The order in which all replicas send `buckets`: last rows first, as backward computes them.

    Late buckets, whose gradients arrive only at the end of backward, follow all other buckets. The
    bucket with the first rows is sent last, because it carries the header.
    """
    return sorted(buckets, key=lambda each: (not each.first, each.late, -each.first))


def block_rows(scheme: Scheme, rows: int, few: bool) -> int:
    """Returns the approximate number of rows of a bucket.

    Args:
        rows: Rows of the whole flat.
        few: True for Triton kernels, which need no temporary tensors, but several launches for each
            bucket. Gradients then get at most `BUCKETS` buckets.
    """
    small = scheme.summable or scheme.signal == "parameters"
    if few:
        small = scheme.divides_messages
    buckets = BUCKETS
    if small:
        buckets = SMALL_BUCKETS
    return max(1, -(-rows // buckets))


def codec_of(bucket: Bucket, codec: Codec, rows: int) -> Codec:
    """Returns `codec` with a selection that covers only the rows of `bucket`. The whole flat has
    `rows` rows.
    """
    return replace(codec, selection=codec.selection.for_rows(bucket.first, rows))
