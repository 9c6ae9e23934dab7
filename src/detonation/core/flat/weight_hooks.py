"""Hooks for packages outside of core, which are called after weights changed without an optimizer
step, and when replicas are compared.
"""

from collections.abc import Callable

from torch import nn

ON_MOVE: list[Callable[[], object]] = []
"""Called on all ranks after weights changed without an optimizer step."""
ON_COMPARISON: list[Callable[[nn.Module], object]] = []
"""Called with the model when replicas are compared, and after rounds were completed. All ranks call
these hooks together."""


def moved() -> None:
    """Calls the hooks in `ON_MOVE`. All ranks must call this function after weights have changed
    without an optimizer step.
    """
    for hook in ON_MOVE:
        hook()


def compared(model: nn.Module) -> None:
    """Calls the hooks in `ON_COMPARISON` with `model`. All ranks must call this function together,
    when the replicas of `model` are compared."""
    for hook in ON_COMPARISON:
        hook(model)
