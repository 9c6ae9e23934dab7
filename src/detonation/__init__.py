"""DeToNATION: train PyTorch models sharded inside the node, and let nodes exchange only what matters.

The public names are loaded on first use, so that `detonation --help` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from detonation.checkpoint.load import load_checkpoint as load_checkpoint
    from detonation.checkpoint.writer import Checkpoints as Checkpoints
    from detonation.checkpoint.writer import save_checkpoint as save_checkpoint
    from detonation.cluster.join import leave as leave
    from detonation.cluster.mesh import init_mesh as init_mesh
    from detonation.cluster.mesh import same_weights as same_weights
    from detonation.cluster.mesh import shard as shard
    from detonation.cluster.verify import fingerprint as fingerprint
    from detonation.core.checkpoint import TrainingState as TrainingState
    from detonation.core.checkpoint import load_replica_state as load_replica_state
    from detonation.core.checkpoint import replica_state as replica_state
    from detonation.core.gradient_schemes import decoupled_adamw as decoupled_adamw
    from detonation.core.gradient_schemes import demo as demo
    from detonation.core.gradient_schemes import distro as distro
    from detonation.core.gradient_schemes import full as full
    from detonation.core.gradient_schemes import none as none
    from detonation.core.gradient_schemes import random as random
    from detonation.core.gradient_schemes import random_sign as random_sign
    from detonation.core.gradient_schemes import slicing as slicing
    from detonation.core.gradient_schemes import striding as striding
    from detonation.core.muon import Muon as Muon
    from detonation.core.parameter_schemes import demo_diloco as demo_diloco
    from detonation.core.parameter_schemes import diloco as diloco
    from detonation.core.parameter_schemes import eager_diloco as eager_diloco
    from detonation.core.parameter_schemes import local_sgd as local_sgd
    from detonation.core.parameter_schemes import muloco as muloco
    from detonation.core.parameter_schemes import sparseloco as sparseloco
    from detonation.core.parameter_schemes import sparta as sparta
    from detonation.core.parameter_schemes import streaming_diloco as streaming_diloco
    from detonation.core.replicate import Replicated as Replicated
    from detonation.core.replicate import replicate as replicate
    from detonation.core.scheme import Scheme as Scheme
    from detonation.core.schemes import scheme as scheme
    from detonation.core.signsgd import SignSGD as SignSGD
    from detonation.core.watch import Safety as Safety
    from detonation.plan.auto import auto as auto

__version__ = "0.1.0"

_HOME = {
    "detonation.checkpoint.load": ["load_checkpoint"],
    "detonation.checkpoint.writer": ["Checkpoints", "save_checkpoint"],
    "detonation.cluster.join": ["leave"],
    "detonation.cluster.mesh": ["init_mesh", "same_weights", "shard"],
    "detonation.cluster.verify": ["fingerprint"],
    "detonation.core.checkpoint": ["TrainingState", "load_replica_state", "replica_state"],
    "detonation.core.replicate": ["Replicated", "replicate"],
    "detonation.core.gradient_schemes": [
        "decoupled_adamw", "demo", "distro", "full", "none", "random", "random_sign", "slicing", "striding",
    ],
    "detonation.core.muon": ["Muon"],
    "detonation.core.parameter_schemes": [
        "demo_diloco", "diloco", "eager_diloco", "local_sgd", "muloco", "sparseloco", "sparta", "streaming_diloco",
    ],
    "detonation.core.scheme": ["Scheme"],
    "detonation.core.schemes": ["scheme"],
    "detonation.core.signsgd": ["SignSGD"],
    "detonation.core.watch": ["Safety"],
    "detonation.plan.auto": ["auto"],
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = ["__version__", *sorted(_MODULE_OF)]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'detonation' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
