"""Closure: the loss that torch's optimizers let a caller evaluate inside a step."""

from collections.abc import Callable
from typing import Any

import torch


def evaluated(closure: Callable[[], Any] | None) -> Any:
    """What `closure` returns, with gradients on; None where there is none."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
