"""DeToNATION: train PyTorch models sharded inside the node, and let nodes exchange only what matters.

The public names are loaded on first use, so that `detonation --help` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from detonation.checkpoint.load.newest import load_checkpoint as load_checkpoint
    from detonation.checkpoint.save.async_save import Checkpoints as Checkpoints
    from detonation.checkpoint.save.async_save import save_checkpoint as save_checkpoint
    from detonation.cluster.fingerprint import fingerprint as fingerprint
    from detonation.cluster.init import leave as leave
    from detonation.cluster.mesh import init_mesh as init_mesh
    from detonation.cluster.mesh import same_weights as same_weights
    from detonation.cluster.mesh import shard as shard
    from detonation.core.agreement.consensus import Safety as Safety
    from detonation.core.optim.muon import Muon as Muon
    from detonation.core.optim.signsgd import SignSGD as SignSGD
    from detonation.core.optimizer.replicated import Replicated as Replicated
    from detonation.core.optimizer.replicated import replicate as replicate
    from detonation.core.optimizer.state import TrainingState as TrainingState
    from detonation.core.optimizer.state import load_replica_state as load_replica_state
    from detonation.core.optimizer.state import replica_state as replica_state
    from detonation.core.schemes.gradients import decoupled_adamw as decoupled_adamw
    from detonation.core.schemes.gradients import demo as demo
    from detonation.core.schemes.gradients import distro as distro
    from detonation.core.schemes.gradients import full as full
    from detonation.core.schemes.gradients import none as none
    from detonation.core.schemes.gradients import random as random
    from detonation.core.schemes.gradients import random_sign as random_sign
    from detonation.core.schemes.gradients import slicing as slicing
    from detonation.core.schemes.gradients import striding as striding
    from detonation.core.schemes.parameters import demo_diloco as demo_diloco
    from detonation.core.schemes.parameters import diloco as diloco
    from detonation.core.schemes.parameters import eager_diloco as eager_diloco
    from detonation.core.schemes.parameters import local_sgd as local_sgd
    from detonation.core.schemes.parameters import muloco as muloco
    from detonation.core.schemes.parameters import sparseloco as sparseloco
    from detonation.core.schemes.parameters import sparta as sparta
    from detonation.core.schemes.parameters import streaming_diloco as streaming_diloco
    from detonation.core.schemes.registry import scheme as scheme
    from detonation.core.schemes.scheme import Scheme as Scheme
    from detonation.plan.auto import auto as auto

__version__ = "0.1.0"

_HOME = {
    "detonation.checkpoint.load.newest": ["load_checkpoint"],
    "detonation.checkpoint.save.async_save": ["Checkpoints", "save_checkpoint"],
    "detonation.cluster.init": ["leave"],
    "detonation.cluster.mesh": ["init_mesh", "same_weights", "shard"],
    "detonation.cluster.fingerprint": ["fingerprint"],
    "detonation.core.optimizer.state": ["TrainingState", "load_replica_state", "replica_state"],
    "detonation.core.optimizer.replicated": ["Replicated", "replicate"],
    "detonation.core.schemes.gradients": [
        "decoupled_adamw", "demo", "distro", "full", "none", "random", "random_sign", "slicing", "striding",
    ],
    "detonation.core.optim.muon": ["Muon"],
    "detonation.core.schemes.parameters": [
        "demo_diloco", "diloco", "eager_diloco", "local_sgd", "muloco", "sparseloco", "sparta", "streaming_diloco",
    ],
    "detonation.core.schemes.scheme": ["Scheme"],
    "detonation.core.schemes.registry": ["scheme"],
    "detonation.core.optim.signsgd": ["SignSGD"],
    "detonation.core.agreement.consensus": ["Safety"],
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
