"""The names that the help lists, known without an import of torch; tests compare them with those that there are."""

import sys

from detonation.choices import entry_points

SCHEME_NAMES = (
    "decoupled_adamw", "demo", "demo_diloco", "demo_published", "diloco", "distro", "eager_diloco", "full", "local_sgd",
    "loco", "muloco", "none", "random", "random_sign", "slicing", "sparseloco", "sparta", "streaming_diloco",
    "striding",
)  # fmt: skip
"""The schemes of this library; here too, because `--help` must not wait for torch."""


OPTIMIZER_NAMES = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop",
    "SGD", "SignSGD",
)  # fmt: skip
"""The optimizers by name, for `--help`."""
MODEL_NAMES = ("olmo2", "olmoe", "t5", "vit")
"""The models of this library, for `--help`."""


def registered_schemes() -> str:
    """The names of all schemes: of this library, of installed packages, and those registered in this process."""
    registry = sys.modules.get("detonation.core.schemes.registry")
    return ", ".join(sorted({*SCHEME_NAMES, *entry_points("detonation.schemes"), *getattr(registry, "SCHEMES", ())}))
