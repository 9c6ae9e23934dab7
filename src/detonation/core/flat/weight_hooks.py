"""Hooks on weights: where a room outside of core hears of weights that moved, and of a comparison
of the replicas.

They are empty unless a room attaches: whoever moves weights beside the steps of optimizers calls
`moved`, and whoever compares the replicas calls `compared`.
"""

from collections.abc import Callable

from torch import nn

ON_MOVE: list[Callable[[], object]] = []
"""Called, on all ranks alike, after weights moved without a step of an optimizer."""
ON_COMPARISON: list[Callable[[nn.Module], object]] = []
"""Called with the model where replicas are compared, and after rounds were completed.

Collective.
"""


def moved() -> None:
    """Announces that weights moved without a step of an optimizer, on all ranks alike."""
    for hook in ON_MOVE:
        hook()


def compared(model: nn.Module) -> None:
    """Announces that the replicas of `model` are compared. Collective."""
    for hook in ON_COMPARISON:
        hook(model)
