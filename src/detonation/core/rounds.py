"""Round: at which steps something is exchanged. Pure arithmetic on step numbers, counted from 0."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Round:
    """Every `every` steps, at the end of the last one; what was sent is applied `delay` steps later.

    >>> [step for step in range(9) if Round(every=3).ends(step)]
    [2, 5, 8]
    """

    every: int = 1
    delay: int = 0

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every is {self.every}, must be at least 1")
        if self.delay < 0:
            raise ValueError(f"delay is {self.delay}, must be at least 0")

    def ends(self, step: int) -> bool:
        return (step + 1) % self.every == 0
