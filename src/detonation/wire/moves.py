"""When weights have moved: an exchange between nodes is due then, and every rank must know it by itself."""

from functools import cache

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook


class WeightMoves:
    """Counts the moves of sharded weights in this process: the steps of torch optimizers, and what else is announced.

    Every rank takes the same steps, so all agree on when weights are exchanged. A tensor's own version would not do:
    a rank whose shard is empty has nothing to write to.
    """

    count = 0

    def __call__(self) -> None:
        """Announces a move, on all ranks alike."""
        self.count += 1


WEIGHT_MOVES = WeightMoves()
"""Of this process."""


@cache
def watch_optimizers() -> None:
    """Announces each step of an optimizer of sharded weights from now on.

    A model that one rank alone trains beside them is none: the other ranks would not know of an exchange.
    """
    register_optimizer_step_post_hook(_announce)


def _announce(optimizer: Optimizer, *_: object) -> None:
    if any(isinstance(parameter, DTensor) for group in optimizer.param_groups for parameter in group["params"]):
        WEIGHT_MOVES()
