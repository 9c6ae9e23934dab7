"""A scheme whose rule of selection is a new class, and an engine for it."""

from dataclasses import dataclass

from torch import Tensor

from detonation.core.engine.reference import ReferenceEngine
from detonation.extend import DCT, GradientScheme, TopK, momentum, register


@dataclass(frozen=True)
class Quarters(TopK):
    """The largest of each quarter of a row, so that all frequencies are sent alike."""

    def indices(self, coefficients: Tensor, step: int, seed: int) -> Tensor:
        rows = len(coefficients)
        quarters = coefficients.abs().view(rows, 4, self.chunk // 4)
        found = quarters.topk(self.topk // 4, dim=2).indices
        for number in range(4):
            found[:, number] += number * (self.chunk // 4)
        return found.flatten(1).sort(1).values


@register
def quartered(topk: int = 4, chunk: int = 64, decay: float = 0.999) -> GradientScheme:
    """The largest DCT coefficients of each quarter of a row of the momentum."""
    return momentum(DCT(), Quarters(topk, chunk), decay)


class QuartersEngine(ReferenceEngine):
    """The reference engine under a name of its own, as a start for a faster one."""

    name = "quarters"


def quarters_engine(codec, layout, memory, runtime, room):
    """The engine for `Quarters`; None for every other selection."""
    if not isinstance(codec.selection, Quarters):
        return None
    return QuartersEngine(codec, layout, memory, runtime, room)
