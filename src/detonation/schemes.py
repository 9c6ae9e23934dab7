"""Public names of all schemes, each a function of its arguments. `detonation` itself exports the
main ones.
"""

from detonation.core.schemes.compressed import muloco, sparseloco, sparta
from detonation.core.schemes.gradients import decoupled_adamw, demo, full, loco, none
from detonation.core.schemes.parameters import diloco, local_sgd, streaming_diloco
from detonation.core.schemes.rotating import random, random_sign, striding
from detonation.core.schemes.scheme import Scheme

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
