"""A codec as the Triton kernels see it: which ones they know, and the part that is compiled into a
kernel."""

from torch import Tensor

from detonation.core.codec.aggregate import (
    Aggregation,
    MajorityVote,
    Mean,
    MeanNonzero,
    WeightedMean,
)
from detonation.core.codec.basis import DCT, Identity
from detonation.core.codec.codec import Codec
from detonation.core.codec.message_rows import SharedIndices
from detonation.core.codec.precision import PRECISIONS
from detonation.core.codec.received import Arrived, Received, Sums
from detonation.core.codec.selection import Everything, Random, Striding, TopK
from detonation.core.flat.owners import RowOwners
from detonation.kernels.gpu.inspection import RowRun
from detonation.kernels.gpu.launching import Coding, Places

LONGEST_TRANSFORM, LONGEST_ROW, LONGEST_SHARED = 128, 256, 1024
"""The longest rows whose matrix of a basis, and whose coordinates, the registers of a program hold;
and those of a selection that all replicas share, of which no index has to fit into a byte."""
AGGREGATION_NAMES: dict[type[Aggregation], str] = {
    Mean: "mean", MeanNonzero: "nonzero", MajorityVote: "majority", WeightedMean: "weighted",
}  # fmt: skip
"""The aggregations that kernels know, by type."""
PRECISION_NAMES = {precision: name for name, precision in PRECISIONS.items()}
_ROTATIONS: dict[type, str] = {Random: "random", Striding: "striding", Everything: "everything"}


def why_not_triton(codec: Codec, aggregation: Aggregation | None = None) -> str:
    """The reason why no kernel encodes for `codec`, or decodes for `aggregation`; "" where kernels
    do."""
    if aggregation is not None and type(aggregation) not in AGGREGATION_NAMES:
        return f"no kernel aggregates by {type(aggregation).__name__}"
    basis, selection = type(codec.basis), codec.selection
    if basis not in (DCT, Identity):
        return f"no kernel transforms by {basis.__name__}"
    if type(selection) not in (TopK, *_ROTATIONS):
        return f"no kernel selects by {type(selection).__name__}"
    longest = (
        LONGEST_TRANSFORM if basis is DCT else LONGEST_SHARED if selection.shared else LONGEST_ROW
    )
    if selection.chunk > longest:
        return f"a row of {selection.chunk} is longer than the {longest} that a kernel holds"
    return "" if codec.precision in PRECISION_NAMES else f"no kernel encodes in {codec.precision!r}"


def why_decoded_in_torch(received: Received) -> str:
    """The reason why no kernel decodes these messages; "" where one does."""
    source, aggregation = received.source, type(received.aggregation)
    if not isinstance(source, Arrived | Sums):
        return "it is given coefficients in the place of messages"
    if isinstance(source, Arrived):
        if aggregation not in AGGREGATION_NAMES:
            return f"no kernel aggregates by {aggregation.__name__}"
        if source.codec.precision not in PRECISION_NAMES:
            return f"no kernel decodes {source.codec.precision!r}"
        if type(source.codec.selection) in (
            TopK,
            Everything,
        ):
            # which need no step; the others' indices tell it
            return ""
    return (
        ""
        if isinstance(source.shared, SharedIndices)
        else "it is given indices in the place of their rule"
    )


def coding_of(codec: Codec) -> Coding:
    selection, coding, sends = codec.selection, codec.index_coding, not codec.selection.shared
    return Coding(
        selection.chunk,
        selection.k,
        "dct" if isinstance(codec.basis, DCT) else "none",
        "topk" if isinstance(selection, TopK) else _ROTATIONS[type(selection)],
        PRECISION_NAMES[codec.precision],
        codec.precision.block,
        coding.width if sends and not coding.bitmap else 0,
        coding.bitmap and sends,
    )


def places_of(codec: Codec, rows: int, owners: RowOwners | None = None) -> Places:
    """The bytes of a message of `rows` rows, as kernels read them (`Places`); of one for each owner
    of rows."""
    lengths = codec.precision.lengths(rows, codec.selection.k)
    dealt = (owners.replicas, owners.in_turns, owners.run) if owners else (1, 0, 1)
    return Places(lengths[0], sum(lengths), *dealt, rows)


def row_run(codec: Codec, octets: Tensor, room: int, rows: int) -> RowRun:
    """A run of rows of messages, as kernels read it."""  # octets [messages, room + nbytes] uint8
    lengths = codec.precision.lengths(rows, codec.selection.k)
    return RowRun(
        octets, room, rows, (lengths[0], sum(lengths[1:]), codec.nbytes(rows) - sum(lengths))
    )
