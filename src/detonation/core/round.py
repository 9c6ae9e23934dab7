"""Round: the steps at which messages are exchanged. Pure arithmetic on step numbers, counted from 0."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Round:
    """A round of `every` steps: its update is applied once `offset` steps are over, and then every `every` steps.

    The message leaves `delay` steps before its update is applied. A message that would leave before the first step does
    not exist, and the first round is that much longer.

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
            raise ValueError(f"offset is {self.offset}, must be from 0 to below every ({self.every})")

    def sends(self, step: int) -> bool:
        """True if a message leaves after `step`, counted from 0."""
        return step >= 0 and (step + 1 + self.delay - self.offset) % self.every == 0
