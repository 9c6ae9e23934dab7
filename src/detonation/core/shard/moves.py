"""When weights have moved: an exchange between nodes is due then, and every rank must know it by itself."""

from functools import cache

from torch.optim.optimizer import register_optimizer_step_post_hook


class WeightMoves:
    """Counts the moves of weights in this process: the steps of all torch optimizers, and what else is announced.

    Every rank takes the same steps, so all agree on when weights are exchanged. A tensor's own version would not do:
    a rank whose shard is empty has nothing to write to.
    """

    count = 0

    def __call__(self, *_: object) -> None:
        """Announces a move, on all ranks alike."""
        self.count += 1


WEIGHT_MOVES = WeightMoves()
"""Of this process."""


@cache
def watch_optimizers() -> None:
    """Announces each step of an optimizer from now on."""
    register_optimizer_step_post_hook(WEIGHT_MOVES)
