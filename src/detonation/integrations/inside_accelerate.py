"""An optimizer replicated inside the wrapper of Accelerate, and the part of a checkpoint that holds its state."""

import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from detonation.checkpoint.async_save import save_checkpoint
from detonation.checkpoint.newest import load_checkpoint
from detonation.cluster.init import watch_waiting
from detonation.core.optim.wrapper import OptimizerWrapper
from detonation.core.optimizer.replicate import replicate
from detonation.core.optimizer.replicated import Replicated
from detonation.core.schemes.scheme import Scheme

PART_OF_REPLICAS = "detonation"
"""The directory of a checkpoint with the exact state of every rank; the rest is the library's own."""


class ReplicatedStep(OptimizerWrapper):
    """Steps with the replicas, and is the base optimizer in all else.

    So the libraries save the base optimizer's state alone. Of `Replicated.state_dict` they would copy the memory, and
    then drop it or mix the replicas.

    Args:
        inside: Whose step is taken.
    """

    def __init__(self, inside: Replicated) -> None:
        super().__init__(inside.base)
        self.replicated = inside

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step with the replicas."""
        return self.replicated.step(closure)

    def state_dict(self) -> dict[str, Any]:
        """The state of the base optimizer."""
        return self.base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of the base optimizer."""
        self.base.load_state_dict(state_dict)


def replicate_inside(
    wrapper: Any, accelerator: Accelerator, model: nn.Module, scheme: Scheme | str, settings: dict[str, Any]
) -> Replicated:
    """Replicates the optimizer inside Accelerate's `wrapper`, over the sharded `model`."""
    watch_waiting()
    inside = replicate(wrapper.optimizer, model, accelerator.torch_device_mesh["dp_replicate"], scheme, **settings)
    wrapper.optimizer = ReplicatedStep(inside)
    measure, clip = accelerator.clip_grad_norm_, settings["clip"]

    def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clipping comes after the exchange, in `step`; before it, each replica would scale by a norm of its own."""
        parameters = [parameters] if isinstance(parameters, Tensor) else [*parameters]
        mine = {id(parameter) for group in inside.param_groups for parameter in group["params"]}
        if not any(id(parameter) in mine for parameter in parameters):  # another model of this accelerator
            return measure(parameters, max_norm, norm_type)
        if math.isfinite(max_norm) and (max_norm, norm_type) != (clip, 2):
            remedy = f"pass clip={max_norm} to prepare, for the 2-norm of the gradients that replicas agreed on"
            raise ValueError(f"clip_grad_norm_({max_norm}) would clip each replica before the exchange: {remedy}")
        return measure(parameters, math.inf, norm_type)

    accelerator.clip_grad_norm_ = clip_grad_norm_
    return inside


def keep_with_states(accelerator: Accelerator, wrapper: Any, model: nn.Module) -> None:
    """Lets `save_state` and `load_state` keep the state of the replicated optimizer inside `wrapper`, too.

    The parts of an accelerator are numbered in the order of `prepare`: `detonation`, `detonation_1`, ...
    """

    def parts(path: str) -> Iterator[Path]:
        """The part of `wrapper`; none after `free_memory`, which forgets what was prepared."""
        kept = [each for each in accelerator._optimizers if isinstance(each.optimizer, ReplicatedStep)]
        for number, each in enumerate(kept):
            if each is wrapper:
                yield Path(path, f"{PART_OF_REPLICAS}_{number}" if number else PART_OF_REPLICAS)

    def save(models: Any, weights: Any, path: str) -> None:
        for part in parts(path):
            save_part(part, model, wrapper.optimizer.replicated)

    def load(models: Any, path: str) -> None:
        for part in parts(path):
            load_part(part, model, wrapper.optimizer.replicated)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def save_part(part: Path, model: nn.Module, optimizer: Replicated, extra: Mapping[str, Any] | None = None) -> None:
    """Saves in `part` what the library's own files beside it do not hold exactly. Collective."""
    state = AcceleratorState()
    if state.is_local_main_process:  # on each node, as they may share no file system
        shutil.rmtree(part, ignore_errors=True)  # of an earlier run: a later step of it would be loaded in our place
    state.wait_for_everyone()
    save_checkpoint(part, model, optimizer, extra, keep=1, frozen=False)


def load_part(part: Path, model: nn.Module, optimizer: Replicated) -> dict[str, Any]:
    """Loads the result of `save_part` over what the library has loaded; returns `extra`. Collective.

    Raises:
        ValueError: There is no `part`, or it is of another model, optimizer or scheme.
    """
    loaded = load_checkpoint(part, model, optimizer)
    if loaded is None:
        missing = f"{part.parent} has no directory {part.name}, the state of the replicas"
        raise ValueError(f"{missing}: was it saved with them?")
    return loaded.extra
