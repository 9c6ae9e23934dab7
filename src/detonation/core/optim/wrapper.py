"""OptimizerWrapper: an optimizer around another, whose groups and state it shares."""

from typing import Any

from torch.optim import Optimizer

from detonation.choices import RENAMED_ATTRIBUTES


class OptimizerWrapper(Optimizer):
    """Passes on all that schedulers and tools ask of an optimizer to `base`; its subclasses take the steps."""

    def __init__(self, base: Optimizer) -> None:
        self.base = base
        super().__setstate__({})  # hooks and profiling, without a second list of parameters

    def __getattr__(self, name: str) -> Any:
        now = RENAMED_ATTRIBUTES.get(name)
        is_now = f"is called optimizer.{now} since version 0.2" if now else "does not exist"
        raise AttributeError(f"optimizer.{name} {is_now}")

    # the next three are the base optimizer's own, also after it replaced them in load_state_dict
    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.base.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.base.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.base.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.base.add_param_group(param_group)
