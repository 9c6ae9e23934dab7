"""The runtime of a replica's step: choices that every part shares, so that they ride in one argument."""

from dataclasses import dataclass
from functools import cached_property

import torch


def decides_on_device(device: torch.device) -> bool:
    """Whether decisions about tensors on `device` are computed there, because the host would have to wait for them."""
    return device.type != "cpu"


@dataclass(frozen=True)
class Runtime:
    """Where a replica's step runs and what it is drawn from.

    Args:
        device: Of the trained parameters.
        seed: Of the random selections; the same on all replicas.
        kernels: Whether compiled kernels may be used. They round differently, so all replicas must use them, or none.
    """

    device: torch.device
    seed: int = 0
    kernels: bool = True

    @cached_property
    def decides_on_device(self) -> bool:
        """See the function `decides_on_device`."""
        return decides_on_device(self.device)
