"""The runtime of a replica's step: choices that every part shares, so that they ride in one argument."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial

import torch


def decides_on_device(device: torch.device) -> bool:
    """True if decisions about tensors on `device` are computed there, because the host would have to wait for them."""
    return device.type != "cpu"


@dataclass(frozen=True)
class Runtime:
    """The device of a replica's step, and how its arithmetic is done.

    Args:
        device: Of the trained parameters.
        seed: Of the random selections; the same on all replicas.
        kernels: Whether compiled kernels may be used. They round differently, so all replicas must use them, or none.
    """

    device: torch.device
    seed: int = 0
    kernels: bool = True

    @cached_property
    def without_autocast(self) -> Callable[[], AbstractContextManager[object]]:
        """Makes a context in which autocast is off: a step's arithmetic is fp32, wherever the caller stands."""
        kind = self.device.type
        return partial(torch.autocast, kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext

    @cached_property
    def decides_on_device(self) -> bool:
        """See the function `decides_on_device`."""
        return decides_on_device(self.device)
