"""Describes codecs for Triton kernels: which codecs are supported, and their constants."""

from typing import NamedTuple

from torch import Tensor

from detonation.core.codec import (
    DCT,
    PRECISIONS,
    Aggregation,
    Arrived,
    Codec,
    Everything,
    Identity,
    MajorityVote,
    Mean,
    MeanNonzero,
    Random,
    Received,
    SharedIndices,
    Striding,
    Sums,
    TopK,
    WeightedMean,
)
from detonation.core.flat.rows import RowOwners
from detonation.kernels.gpu.inspection import RowRun
from detonation.kernels.gpu.launching import Coding, Places

LONGEST_TRANSFORM = 128
"""Length of the longest row whose basis matrix fits into the registers of a kernel program."""
LONGEST_ROW = 256
"""Length of the longest row whose coordinates fit into the registers of a kernel program, with
indices of one byte.
"""
LONGEST_SHARED = 1024
"""Length of the longest row of a shared selection, whose indices are not sent."""
AGGREGATION_NAMES: dict[type[Aggregation], str] = {
    Mean: "mean", MeanNonzero: "nonzero", MajorityVote: "majority", WeightedMean: "weighted",
}  # fmt: skip
"""The aggregations that kernels support, by type."""
PRECISION_NAMES = {precision: name for name, precision in PRECISIONS.items()}
_PRECISION_IDS = {id(precision) for precision in PRECISION_NAMES}  # faster to compare than objects
_SELECTIONS: dict[type, str] = {
    TopK: "topk",
    Random: "random",
    Striding: "striding",
    Everything: "everything",
}


def why_not_triton(codec: Codec, aggregation: Aggregation | None = None) -> str:
    """Returns the reason why kernels cannot encode for `codec` or decode for `aggregation`; "" if
    kernels can do it.
    """
    if aggregation is not None and type(aggregation) not in AGGREGATION_NAMES:
        return f"no kernel aggregates by {type(aggregation).__name__}"
    basis = type(codec.basis)
    selection = codec.selection
    if basis not in (DCT, Identity):
        return f"no kernel transforms by {basis.__name__}"
    if type(selection) not in _SELECTIONS:
        return f"no kernel selects by {type(selection).__name__}"
    longest = LONGEST_ROW
    if basis is DCT:
        longest = LONGEST_TRANSFORM
    elif selection.shared:
        longest = LONGEST_SHARED
    if selection.chunk > longest:
        return f"a row of {selection.chunk} is longer than the {longest} that a kernel holds"
    if codec.precision not in PRECISION_NAMES:
        return f"no kernel encodes in {codec.precision!r}"
    return ""


def why_decoded_in_torch(received: Received) -> str:
    """Returns the reason why kernels cannot decode the `received` messages; "" if kernels can."""
    source: object = received
    if not isinstance(source, Arrived):
        source = received.source
    aggregation = type(received.aggregation)
    if not isinstance(source, Arrived | Sums):
        return "it is given coefficients in the place of messages"
    if isinstance(source, Arrived):
        if aggregation not in AGGREGATION_NAMES:
            return f"no kernel aggregates by {aggregation.__name__}"
        precision = source.codec.precision
        if id(precision) not in _PRECISION_IDS and precision not in PRECISION_NAMES:
            return f"no kernel decodes {precision!r}"
        if type(source.codec.selection) in (TopK, Everything):
            return ""  # these messages can be decoded without the step number in `SharedIndices`
    if isinstance(source.shared, SharedIndices):
        return ""
    return "it is given indices in the place of their rule"


def coding_of(codec: Codec) -> Coding:
    """Returns the compile-time constants that kernels need for `codec`."""
    selection = codec.selection
    basis = "none"
    if isinstance(codec.basis, DCT):
        basis = "dct"
    rule = _SELECTIONS[type(selection)]
    precision = PRECISION_NAMES[codec.precision]
    width = 0
    is_bitmap = False
    if not selection.shared:
        is_bitmap = codec.index_coding.bitmap
        if not is_bitmap:
            width = codec.index_coding.width
    block = codec.precision.block
    return Coding(selection.chunk, selection.k, basis, rule, precision, block, width, is_bitmap)


def places_of(codec: Codec, rows: int, owners: RowOwners | None = None) -> Places:
    """Returns the byte layout of a message of `rows` rows for kernels. With `owners`, returns the
    layout of the messages to all owners (the replicas that aggregate these rows).
    """
    lengths = codec.precision.lengths(rows, codec.selection.k)
    if owners:
        dealt = (owners.replicas, owners.in_turns, owners.run)
    else:
        dealt = (1, 0, 1)
    return Places(lengths[0], sum(lengths), *dealt, rows)


def row_run(codec: Codec, octets: Tensor, room: int, rows: int) -> RowRun:
    """Returns a run of rows of messages in the form that kernels read.

    Shapes: octets `[messages, room + nbytes]` uint8.
    """
    return RowRun(octets, room, rows, format_of(codec, rows).lengths)


class Format(NamedTuple):
    """The format of messages of one codec with a given number of rows, in the form that kernels
    read.

    lengths: bytes of the values, the statistics and the indices.
    """

    coding: Coding
    places: Places
    lengths: tuple[int, int, int]


def format_of(codec: Codec, rows: int, owners: RowOwners | None = None) -> Format:
    """Returns the format of messages; see `places_of`. The format is made once for each codec."""
    found: Format | None = codec.derived.get((rows, owners))
    if found is None:
        values, *statistics = codec.precision.lengths(rows, codec.selection.k)
        indices = codec.nbytes(rows) - values - sum(statistics)
        lengths = values, sum(statistics), indices
        found = Format(coding_of(codec), places_of(codec, rows, owners), lengths)
        codec.derived[rows, owners] = found
    return found
