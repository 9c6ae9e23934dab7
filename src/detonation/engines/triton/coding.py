"""Describes codecs for Triton kernels: which codecs are supported, and their constants."""

from detonation.core.codec import (
    DCT,
    PRECISIONS,
    Aggregation,
    Codec,
    Everything,
    Identity,
    MajorityVote,
    Mean,
    MeanNonzero,
    Random,
    SharedIndices,
    Striding,
    TopK,
    WeightedMean,
)
from detonation.core.flat.rows import RowOwners
from detonation.kernels.gpu.inspection import RunShape
from detonation.kernels.gpu.launching import Coding, Places

LONGEST_TRANSFORM = 128
"""Length of the longest row whose basis matrix fits into the registers of a kernel program."""
LONGEST_ROW = 256
"""Length of the longest row whose coordinates fit into the registers of a kernel program, with
indices of one byte.
"""
LONGEST_SHARED = 1024
"""Length of the longest row that kernels support for a shared selection, which sends no indices."""
AGGREGATION_NAMES: dict[type[Aggregation], str] = {
    Mean: "mean", MeanNonzero: "nonzero", MajorityVote: "majority", WeightedMean: "weighted",
}  # fmt: skip
"""The aggregations that kernels support, by type."""
PRECISION_NAMES = {precision: name for name, precision in PRECISIONS.items()}
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
        return f"chunk {selection.chunk} is above {longest}, the longest row of a kernel"
    if codec.precision not in PRECISION_NAMES:
        return f"no kernel encodes in {codec.precision!r}"
    return ""


def why_decoded_in_torch(codec: Codec, aggregation: type[Aggregation], shared: type) -> str:
    """Returns the reason why kernels cannot decode messages of `codec`; "" if kernels can.

    Args:
        shared: The type of the indices that all replicas know.
    """
    if aggregation not in AGGREGATION_NAMES:
        return f"no kernel aggregates by {aggregation.__name__}"
    if codec.precision not in PRECISION_NAMES:
        return f"no kernel decodes {codec.precision!r}"
    if type(codec.selection) in (TopK, Everything):
        return ""  # messages of these selections can be decoded without `SharedIndices`
    return why_indices_in_torch(shared)


def why_indices_in_torch(shared: type) -> str:
    """Returns the reason why kernels cannot compute the indices that all replicas know; "" if
    kernels can."""
    if issubclass(shared, SharedIndices):
        return ""
    return "it received indices instead of the rule that computes them"


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


def run_shape(codec: Codec, room: int, rows: int) -> RunShape:
    """Returns the shape of a run of rows of messages, in the form that kernels read."""
    values, *statistics = codec.precision.lengths(rows, codec.selection.k)
    indices = codec.nbytes(rows) - values - sum(statistics)
    return RunShape(room, rows, (values, sum(statistics), indices))
