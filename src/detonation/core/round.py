"""Rounds: the steps at which messages are exchanged, and the local steps that each replica runs.

Step numbers start at 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

SLACK_PERCENT = 5
"""A replica runs as many local steps as fit into the duration of the fastest replica's round plus
this percentage.
"""


@dataclass(frozen=True)
class Round:
    """The schedule of rounds: an update is applied after the first `offset` steps, and again after
    every further `every` steps.

    The message of an update is sent `delay` steps before the update is applied. If a message would
    have to be sent before the first step, this exchange is skipped. The first round is then longer.

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
                f"offset is {self.offset}, must be at least 0 and less than every ({self.every})"
            )

    @property
    def stays_open(self) -> bool:
        """True if a round can be incomplete between two steps: because it has several steps, or
        because an update is applied with a delay."""
        return self.every > 1 or self.delay > 0

    def ends(self, step: int) -> bool:
        """True if a round of local steps ends after `step`, under balance (a slow replica takes
        fewer local steps). With `offset` 0, this is the step after which a message is sent.
        """
        return (step + 1 + self.delay) % self.every == 0

    def sends(self, step: int) -> bool:
        """True if a message is sent after the step with the number `step`."""
        return step >= 0 and (step + 1 + self.delay - self.offset) % self.every == 0


class LocalSteps:
    """Decides which of the `every` steps of a round each replica runs. All replicas know the local
    steps of every replica.

    A replica with fewer than `every` local steps skips steps at even intervals. All replicas run
    the last step before a message is sent (see `Round.ends`). The steps after a message may have no
    effect: if the update is applied with a delay, it overwrites these steps.

    counts: Local steps of each replica per round, `[replicas]` int64 from 1 to every.

    >>> steps = LocalSteps(Round(every=4), replicas=3)
    >>> steps.agree([100, 210, 900])
    >>> steps.counts.tolist(), [steps.taken(step).sum().item() for step in range(4)]
    ([4, 2, 1], [1, 2, 1, 3])
    """

    def __init__(self, round: Round, replicas: int) -> None:
        self.round = round
        self.counts = torch.full((replicas,), round.every, dtype=torch.int64, device="cpu")

    def restart(self, round: Round) -> None:
        """Replaces the schedule of rounds by `round`. Each replica runs all steps until the next
        call of `agree`."""
        self.round = round
        self.counts.fill_(round.every)

    def taken(self, step: int) -> Tensor:
        """For each replica, whether it runs `step`.

        Shapes: -> `[replicas]` bool.
        """
        every = self.round.every
        at = (step + self.round.delay) % every
        return (at + 1) * self.counts // every > at * self.counts // every

    def agree(self, durations: Sequence[int]) -> None:
        """Sets the number of local steps of each replica: as many as fit into the duration of the
        fastest replica's round plus `SLACK_PERCENT` percent.

        Args:
            durations: Duration of a local step of each replica, in any unit. If any duration is 0
                (unknown), the counts do not change.
        """
        if not all(durations):
            return
        most = [
            self.round.every * min(durations) * (100 + SLACK_PERCENT) // (100 * each)
            for each in durations
        ]
        counts = torch.tensor(most, dtype=torch.int64, device="cpu")
        self.counts.copy_(counts.clamp_(1, self.round.every))
