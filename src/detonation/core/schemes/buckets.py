"""Cuts a flat into buckets, which are sent while backward still computes other gradients."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from detonation.core.codec import Codec
from detonation.core.flat.layout import Layout
from detonation.core.flat.rows import BUCKETS, SMALL_BUCKETS, Bucket
from detonation.core.schemes.scheme import Scheme

SMALLEST = 2**20
"""Smallest size of a bucket in bytes of fp32."""


def aligned_rows(*codecs: Codec) -> int:
    """Messages of all `codecs` may be cut at multiples of this number of rows without changing a
    bit.

    It is at least 64, because a matrix product of fewer rows may round differently.
    """
    return math.lcm(*(codec.unit for codec in codecs), 64)


def rows_of_a_turn(scheme: Scheme, replicas: int) -> int:
    """Number of consecutive rows of one owner, before the rows of the next owner. Messages and
    replies may be cut at multiples of it.
    """
    return aligned_rows(scheme.codec, scheme.reply_codec(replicas))


def cut_into_buckets(
    layout: Layout, scheme: Scheme, unit: int, few: bool = False, late: Collection[str] = ()
) -> list[Bucket]:
    """The buckets of `layout` in the order of their rows. Together they need the same bytes as one
    whole message.

    Every bucket except the last has a multiple of `unit` rows (`traffic.buckets_of`). A layout in
    tiles has one bucket, because a multiple of `unit` would end inside a line of tiles.

    Args:
        layout: Of the whole flat.
        unit: Rows after which a message may be cut.
        few: See `block_rows`.
        late: Names of the parameters whose gradients arrive only at the end of backward. Their rows
            get buckets of their own, so that no other rows wait for them.
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
    """First row and end of the rows before, between and after the parameters in `late`, in
    multiples of `unit`.
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
    """Buckets of about `rows` rows, which contain either `early` or late rows.

    An early run of less than half a bucket counts as late, because a bucket for it would hide
    little and would need one more collective.
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

    Late buckets follow all other buckets. The bucket with the first rows is the last, because it
    carries the header.
    """
    return sorted(buckets, key=lambda each: (not each.first, each.late, -each.first))


def block_rows(scheme: Scheme, rows: int, few: bool) -> int:
    """Approximate number of rows of a bucket.

    Args:
        rows: Rows of the whole flat.
        few: True if there are at most `BUCKETS` buckets. Triton kernels need no temporaries, and
            each bucket costs them launches.
    """
    small = scheme.summable or scheme.signal == "parameters"
    if few:
        small = scheme.divides_messages
    buckets = BUCKETS
    if small:
        buckets = SMALL_BUCKETS
    return max(1, -(-rows // buckets))


def codec_of(bucket: Bucket, codec: Codec, rows: int) -> Codec:
    """The part of `codec` for the rows of `bucket`, in a flat of `rows` rows."""
    return replace(codec, selection=codec.selection.for_rows(bucket.first, rows))
