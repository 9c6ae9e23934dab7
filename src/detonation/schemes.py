"""Public names of all schemes, each a function of its arguments. `detonation` itself exports the
main ones.
"""

from detonation.core.schemes import (
    Scheme,
    decoupled_adamw,
    demo,
    diloco,
    full,
    local_sgd,
    loco,
    muloco,
    none,
    random,
    random_sign,
    sparseloco,
    sparta,
    streaming_diloco,
    striding,
)

__all__ = [
    "Scheme",
    "decoupled_adamw",
    "demo",
    "diloco",
    "full",
    "local_sgd",
    "loco",
    "muloco",
    "none",
    "random",
    "random_sign",
    "sparseloco",
    "sparta",
    "streaming_diloco",
    "striding",
]
