"""Schemes: frozen descriptions of messages and their schedule, a registry of schemes, and formulas
for their bytes.

Importing this package registers every built-in scheme. A scheme knows nothing of network links.
"""

from detonation.core.schemes.buckets import (
    aligned_rows,
    codec_of,
    rows_of_a_turn,
    sending_order,
)
from detonation.core.schemes.gradients import (
    decoupled_adamw,
    demo,
    full,
    loco,
    momentum,
    none,
    random,
    random_sign,
    striding,
)
from detonation.core.schemes.order import check_order
from detonation.core.schemes.parameters import (
    diloco,
    local_sgd,
    muloco,
    outer_sgd,
    sparseloco,
    sparta,
    streaming_diloco,
)
from detonation.core.schemes.scheme import (
    ALIGNMENT,
    SCHEMES,
    GradientScheme,
    Outer,
    ParameterScheme,
    Scheme,
    known_schemes,
    register,
    scheme,
)
from detonation.core.schemes.traffic import (
    LargerThanDense,
    arguments_text,
    buckets_of,
    bytes_per_rank,
    bytes_sent,
    collective_for,
    dense_bytes,
    hops,
    is_sent_at_once,
    mean_bytes,
    message_bytes,
    require_below_dense,
    ring_bytes,
)
