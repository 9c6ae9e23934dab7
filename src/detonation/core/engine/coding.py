"""A codec as the Triton kernels see it: which ones they know, and the part that is compiled into a kernel."""

from dataclasses import replace
from typing import Any

from detonation.core.codec.aggregate import Aggregation, ClippedMean, MajorityVote, Mean, MeanNonzero, WeightedMean
from detonation.core.codec.basis import DCT, Identity
from detonation.core.codec.codec import Arrived, Codec
from detonation.core.codec.form import WHOLE, Dealt
from detonation.core.codec.precision import PRECISIONS
from detonation.core.codec.selection import Everything, Random, Slicing, Striding, TopK

LONGEST_TRANSFORM, LONGEST_ROW = 128, 256
"""The longest rows whose matrix of a basis, and whose coordinates, the registers of a program hold."""
AGGREGATION_NAMES: dict[type[Aggregation], str] = {
    Mean: "mean", MeanNonzero: "nonzero", MajorityVote: "majority", WeightedMean: "weighted",
}  # fmt: skip
"""The aggregations that kernels know, by type."""
PRECISION_NAMES = {precision: name for name, precision in PRECISIONS.items()}
"""Every precision's name."""
_ROTATIONS: dict[type, str] = {Random: "random", Striding: "striding", Slicing: "slicing", Everything: "slicing"}


def why_not_triton(codec: Codec, aggregation: Aggregation | None = None) -> str:
    """The reason why no kernel encodes for `codec`, or decodes for `aggregation`; "" where kernels do."""
    if aggregation is not None and type(aggregation) not in AGGREGATION_NAMES:
        return f"no kernel aggregates by {type(aggregation).__name__}"
    basis, selection = type(codec.basis), codec.selection
    if basis not in (DCT, Identity):
        return f"no kernel transforms by {basis.__name__}"
    if type(selection) not in (TopK, *_ROTATIONS):
        return f"no kernel selects by {type(selection).__name__}"
    if isinstance(selection, Everything) and codec.summable:
        return "a whole gradient that the network adds up is one copy, which needs no kernel"
    longest = LONGEST_TRANSFORM if basis is DCT else LONGEST_ROW
    if selection.chunk > longest:
        return f"a row of {selection.chunk} is longer than the {longest} that a kernel holds"
    name = PRECISION_NAMES.get(codec.precision, repr(codec.precision))
    return "" if name in ("fp32", "bf16", "sign", "2bit", "4bit") else f"no kernel encodes in {name}"


def coding_of(kernels: Any, codec: Codec) -> Any:
    """The part of `codec` that is compiled into a kernel (`Coding`)."""
    selection, coding, sends = codec.selection, codec.index_coding, not codec.selection.shared
    return kernels.Coding(
        selection.chunk,
        selection.k,
        "dct" if isinstance(codec.basis, DCT) else "none",
        "topk" if isinstance(selection, TopK) else _ROTATIONS[type(selection)],
        PRECISION_NAMES[codec.precision],
        codec.precision.block,
        coding.width if sends and not coding.bitmap else 0,
        coding.bitmap and sends,
    )


def places_of(kernels: Any, codec: Codec, owned: int, dealt: Dealt) -> Any:
    """The bytes of a message of `owned` rows, as kernels read them (`Places`)."""
    lengths = codec.precision.lengths(owned, codec.selection.k)
    return kernels.Places(lengths[0], sum(lengths), dealt.count, dealt.turns, dealt.run, owned)


def weighed(kernels: Any, arrived: Arrived) -> Arrived:
    """Messages whose aggregation kernels know: the weights of a clipped mean are computed now, in a launch."""
    if not isinstance(arrived.aggregation, ClippedMean) or why_not_triton(arrived.codec):
        return arrived
    coding, places = coding_of(kernels, arrived.codec), places_of(kernels, arrived.codec, arrived.rows, WHOLE)
    return replace(arrived, aggregation=WeightedMean(kernels.clipped_weights(arrived.body, places, coding)))
