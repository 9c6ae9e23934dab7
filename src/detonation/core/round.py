"""Round: the steps at which messages are exchanged, and who takes them.

Arithmetic on step numbers, counted from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

SLACK_PERCENT = 5
"""A replica takes as many local steps as end within this much more than the fastest replica's
round."""


@dataclass(frozen=True)
class Round:
    """A round of `every` steps: its update is applied once `offset` steps are over, and then every
    `every` steps.

    The message leaves `delay` steps before its update is applied. A message that would leave before
    the first step does not exist, and the first round is that much longer.

    >>> [step for step in range(9) if Round(every=3).sends(step)]
    [2, 5, 8]
    >>> [step for step in range(9) if Round(every=3, delay=1).sends(step)]
    [1, 4, 7]
    >>> [step for step in range(9) if Round(every=3, delay=1, offset=1).sends(step)]
    [2, 5, 8]
    """

    every: int = 1
    delay: int = 0
    offset: int = 0

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every is {self.every}, must be at least 1")
        if self.delay < 0:
            raise ValueError(f"delay is {self.delay}, must be at least 0")
        if not 0 <= self.offset < self.every:
            raise ValueError(
                f"offset is {self.offset}, must be from 0 to below every ({self.every})"
            )

    def sends(self, step: int) -> bool:
        """True if a message leaves after `step`, counted from 0."""
        return step >= 0 and (step + 1 + self.delay - self.offset) % self.every == 0


class LocalSteps:
    """The local steps that each replica takes in the `every` steps of a round; the same on all
    replicas.

    A replica that takes fewer sits the other steps out, evenly spread. All take the last one.

    counts: Local steps of each replica per round, `[replicas]` int64 from 1 to every.

    >>> steps = LocalSteps(every=4, replicas=3)
    >>> steps.agree([100, 210, 900])
    >>> steps.counts.tolist(), [steps.taken(step).tolist() for step in range(4)]
    ([4, 2, 1], [[True, False, False], [True, True, False], [True, False, False], [True, True,
    True]])
    """

    def __init__(self, every: int, replicas: int) -> None:
        self.every = every
        self.counts = torch.full((replicas,), every, dtype=torch.int64, device="cpu")

    def restart(self, every: int) -> None:
        """Lets all replicas take all of `every` steps, until they agree on something else."""
        self.every = every
        self.counts.fill_(every)

    def taken(self, step: int) -> Tensor:
        """The replicas that take `step`.

        Shapes: -> `[replicas]` bool.
        """
        at = step % self.every
        return (at + 1) * self.counts // self.every > at * self.counts // self.every

    def agree(self, durations: Sequence[int]) -> None:
        """Gives each replica the local steps that fit into the fastest one's round, with
        `SLACK_PERCENT`.

        Args:
            durations: Of a local step of each replica, in any unit; 0 where it is unknown, and
                nothing changes.
        """
        if not all(durations):
            return
        most = [
            self.every * min(durations) * (100 + SLACK_PERCENT) // (100 * each)
            for each in durations
        ]
        self.counts.copy_(torch.tensor(most, dtype=torch.int64, device="cpu").clamp_(1, self.every))
