"""Public names for your own scheme, basis, selection, aggregation or axis (docs/extending.md)."""

from detonation.core.codec.aggregate import AGGREGATIONS, Aggregation, Mean, NormWeighing
from detonation.core.codec.basis import DCT, Basis, Identity, TileDCT
from detonation.core.codec.codebooks import BlockCodebook
from detonation.core.codec.codec import Codec
from detonation.core.codec.precision import PRECISIONS, Float, Precision
from detonation.core.codec.selection import Everything, Random, Rotation, Selection, Striding, TopK
from detonation.core.compute.scatter_sum import scatter_sum
from detonation.core.link.communicator import Communicator, axis_named
from detonation.core.memory import Feedback
from detonation.core.round import Round
from detonation.core.schemes.gradients import momentum
from detonation.core.schemes.parameters import outer_sgd
from detonation.core.schemes.scheme import (
    SCHEMES,
    GradientScheme,
    Outer,
    ParameterScheme,
    Scheme,
    known_schemes,
    register,
)

__all__ = [
    "AGGREGATIONS",
    "DCT",
    "PRECISIONS",
    "SCHEMES",
    "Aggregation",
    "Basis",
    "BlockCodebook",
    "Codec",
    "Communicator",
    "Everything",
    "Feedback",
    "Float",
    "GradientScheme",
    "Identity",
    "Mean",
    "NormWeighing",
    "Outer",
    "ParameterScheme",
    "Precision",
    "Random",
    "Rotation",
    "Round",
    "Scheme",
    "Selection",
    "Striding",
    "TileDCT",
    "TopK",
    "axis_named",
    "known_schemes",
    "momentum",
    "outer_sgd",
    "register",
    "scatter_sum",
]
