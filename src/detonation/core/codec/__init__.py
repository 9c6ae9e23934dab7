"""Codecs of messages: a transform (basis), a selection of coefficients, and a number format
(precision); also the aggregation of messages. Encoding and decoding are pure functions between a
flat matrix of parameters and a message.

Each part of a codec is a frozen dataclass behind a Protocol, so users can write their own parts.
Other packages import the parts from this package.
"""

from detonation.core.codec.aggregate import (
    AGGREGATIONS,
    Aggregation,
    ClippedMean,
    Coefficients,
    Divided,
    MajorityVote,
    Mean,
    MeanNonzero,
    NormWeighing,
    WeightedMean,
    aggregate,
)
from detonation.core.codec.basis import DCT, Basis, Identity, TileDCT, dct_matrix, dct_waves
from detonation.core.codec.codebooks import E3M0, BlockCodebook, Sign
from detonation.core.codec.codec import Codec, Selected
from detonation.core.codec.indices import PackedIndices, Unpackable, narrow
from detonation.core.codec.message_rows import MessageRows, SharedIndices, Workspace, joined
from detonation.core.codec.precision import FP32, PRECISIONS, Float, Precision
from detonation.core.codec.received import Arrived, Collected, DecodedMessages, Received, Sums
from detonation.core.codec.selection import (
    Everything,
    Random,
    Rotation,
    Selection,
    Striding,
    TopK,
    random_start,
)
