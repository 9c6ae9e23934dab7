"""OptimizerWrapper: wraps another optimizer, and shares its parameter groups and state."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from detonation.core.flat.tensors import local


class OptimizerWrapper(Optimizer):
    """An optimizer with the parameter groups and the state of the optimizer `base`, so that
    schedulers and tools can use it like `base`. Subclasses implement `step`.
    """

    # `_step_supports_amp_scaling` makes torch's GradScaler call `step` even after an overflow.
    # GradScaler must not skip `step` on one replica, because the other replicas would wait for it.
    _step_supports_amp_scaling = True
    grad_scale: Tensor | None
    found_inf: Tensor | None

    def __init__(self, base: Optimizer) -> None:
        self.base = base
        # torch's `__setstate__` prepares hooks and profiling, but creates no parameter groups
        super().__setstate__({})

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"optimizer.{name} does not exist: for the attributes of the optimizer inside, use"
            " optimizer.base"
        )

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "this optimizer holds connections of its process and cannot be copied or pickled:"
            " use state_dict()"
        )

    def unscale(self) -> Tensor | None:
        """Divides the gradients by the scale of the GradScaler, if a GradScaler calls this step.
        Returns whether the GradScaler found an overflow.

        Shapes: -> `[]` fp32, nonzero if a gradient overflowed; None without a GradScaler.
        """
        if (scale := vars(self).get("grad_scale")) is not None:
            gradients = [
                local(p.grad)
                for group in self.param_groups
                for p in group["params"]
                if p.grad is not None
            ]
            if gradients:
                inverse = scale.to(gradients[0].device).double().reciprocal().float()
                torch._foreach_mul_(gradients, inverse)
        return vars(self).get("found_inf")

    # properties, because load_state_dict may replace these objects of the base optimizer
    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.base.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.base.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.base.defaults

    def with_saving_hooks(self, made: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Calls the hooks before `state_dict`, then `made`, which makes a state dict, then the
        hooks after `state_dict`. Returns the state dict.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        found = made()
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, found)
            if changed is not None:
                found = changed
        return found

    def with_loading_hooks(
        self, state_dict: dict[str, Any], load: Callable[[dict[str, Any]], None]
    ) -> None:
        """Calls the hooks before `load_state_dict`, then `load` with the state dict, then the hooks
        after `load_state_dict`.
        """
        given = dict(state_dict)  # copied, because a hook may modify the state dict in place
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, given)
            if changed is not None:
                given = changed
        load(given)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def call_before_saving(self) -> None:
        """Calls the hooks before `state_dict`, of this optimizer and of `base`, when a checkpoint
        is saved without a call of `state_dict`.

        Raises `ValueError` if there are hooks after `state_dict`, because a change that they make
        to a state dict would have no effect.
        """
        for each in (self, self.base):
            _refuse_hooks(each._optimizer_state_dict_post_hooks.values(), "saves")
        for each in (self, self.base):
            for hook in each._optimizer_state_dict_pre_hooks.values():
                hook(each)

    def refuse_loading_hooks(self) -> None:
        """Raises `ValueError` if there are hooks that change a state dict before it is loaded. A
        checkpoint that is loaded without a state dict would ignore such changes.
        """
        for each in (self, self.base):
            _refuse_hooks(each._optimizer_load_state_dict_pre_hooks.values(), "loads")

    def call_after_loading(self) -> None:
        """Calls the hooks after `load_state_dict`, of `base` and of this optimizer, when a
        checkpoint was loaded without a call of `load_state_dict`.
        """
        for each in (self.base, self):
            for hook in each._optimizer_load_state_dict_post_hooks.values():
                hook(each)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.base.add_param_group(param_group)


def names_of(hooks: Iterable[Callable[..., object]]) -> list[str]:
    return [getattr(hook, "__qualname__", type(hook).__name__) for hook in hooks]


def _refuse_hooks(hooks: Iterable[Callable[..., object]], does: str) -> None:
    names = names_of(hooks)
    if names:
        raise ValueError(
            f"a checkpoint {does} no state dict, so the hook {names[0]} would have no effect:"
            " remove the hook, or save and load state_dict() of this optimizer, one file per"
            " rank"
        )


def evaluated(closure: Callable[[], Any] | None) -> Any:
    """Calls `closure` with gradients enabled, as torch's optimizers do in a step, and returns its
    value. Returns None if `closure` is None.
    """
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
