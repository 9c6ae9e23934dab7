"""Closure: the loss that torch's optimizers let a caller evaluate inside a step."""

from collections.abc import Callable
from typing import Any

import torch


def evaluated(closure: Callable[[], Any] | None) -> Any:
    """Calls `closure` with gradients enabled and returns its value; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
