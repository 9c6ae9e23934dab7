"""`slicing` of detonation 0.5: sends a window of the momentum, which moves on at each step."""

from dataclasses import dataclass

import torch
from torch import Tensor

from detonation.extend import GradientScheme, Identity, Rotation, momentum, register


@dataclass(frozen=True)
class Slicing(Rotation):
    """`k` neighbouring coordinates of each row, and the next `k` at the next step."""

    def indices(self, coefficients: Tensor, step: int, seed: int) -> Tensor:
        _, share, _ = self.phase(step, seed)
        window = torch.arange(share * self.k, (share + 1) * self.k, device=coefficients.device)
        return window.expand(len(coefficients), -1)


@register
def slicing(rate: float = 1 / 16, decay: float = 0.999) -> GradientScheme:
    """A window of the momentum, the same on all replicas and without indices."""
    return momentum(Identity(), Slicing(rate), decay)
