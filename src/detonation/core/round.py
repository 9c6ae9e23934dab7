"""Round: the steps at which messages are exchanged. Pure arithmetic on step numbers, counted from 0."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Round:
    """An exchange after every `every` steps, shifted by `offset` steps; its update is applied `delay` steps later.

    >>> [step for step in range(9) if Round(every=3).ends(step)]
    [2, 5, 8]
    >>> [step for step in range(9) if Round(every=3, offset=1).ends(step)]
    [3, 6]
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

    def ends(self, step: int) -> bool:
        """True if `step`, counted from 0, is the last of a round; an offset makes the first round longer."""
        return step + 1 > self.offset and (step + 1 - self.offset) % self.every == 0
