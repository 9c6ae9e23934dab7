"""The public names of all schemes. Each scheme is a function that takes its arguments. `detonation`
itself exports only the main schemes.
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
