"""The public names that you need for your own scheme, basis, selection, aggregation, axis or
optimizer (docs/extending.md).
"""

from detonation.core.agreement import StepTest, register_step_test
from detonation.core.codec import (
    AGGREGATIONS,
    DCT,
    PRECISIONS,
    Aggregation,
    Basis,
    BlockCodebook,
    Codec,
    Everything,
    Float,
    Identity,
    Mean,
    NormWeighing,
    Precision,
    Random,
    Rotation,
    Selection,
    Striding,
    TileDCT,
    TopK,
)
from detonation.core.compute.scatter_sum import scatter_sum
from detonation.core.link import Communicator, axis_named
from detonation.core.memory import Feedback
from detonation.core.round import Round
from detonation.core.schemes import (
    SCHEMES,
    GradientScheme,
    Outer,
    ParameterScheme,
    Scheme,
    known_schemes,
    momentum,
    outer_sgd,
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
    "StepTest",
    "Striding",
    "TileDCT",
    "TopK",
    "axis_named",
    "known_schemes",
    "momentum",
    "outer_sgd",
    "register",
    "register_step_test",
    "scatter_sum",
]
