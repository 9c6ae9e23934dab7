"""The face of an optimizer that shares everything with a base optimizer but the step."""

from typing import Any

from torch.optim import Optimizer

_RENAMED = {"settle": "synchronize", "settled": "agreed_weights", "change": "reconfigure", "place": "coordinates"} | {
    name: f"stats.{name}"
    for name in ("bytes_sent", "bytes_sent_by_level", "waited_s", "skipped", "skipped_by_parameter", "refused")
}


class SharesBase(Optimizer):
    """An optimizer with the groups, state and defaults of `base`, for schedulers and other tools.

    Args:
        base: Any torch optimizer.
    """

    def __init__(self, base: Optimizer) -> None:
        self.base = base
        super().__setstate__({})  # hooks and profiling, without a second list of parameters

    def __getattr__(self, name: str) -> Any:
        now = f"is called optimizer.{_RENAMED[name]} since version 0.2" if name in _RENAMED else "does not exist"
        raise AttributeError(f"optimizer.{name} {now}")

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
