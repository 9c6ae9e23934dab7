"""The sizes of the grid, and what follows from a size: parameters, batch, steps and warm-up."""

import dataclasses
import math

TOKENS = 20
"""Training tokens per parameter, each a byte."""
CONTEXT = 128
BYTES, LAYERS, HEADS = 256, 2, 4
NORMS = 4
"""Norms of a layer."""
ROUND = 30
"""Steps are a multiple of it: a run ends with a round."""
WINDOW = 3
"""Evaluations whose mean is the final loss: after the last step, 30 and 60 steps before it."""
SMALLEST, OF_SMALLEST = 37_152, 8
"""Parameters of the smallest model, and its examples per step."""


@dataclasses.dataclass(frozen=True)
class Size:
    """A model with two layers; `seeds` judge each scheme."""

    name: str
    hidden: int
    feed_forward: int
    seeds: int

    @property
    def parameters(self) -> int:
        """Of an OLMo2: four matrices of attention and three of the feed-forward in a layer."""
        matrices = 4 * self.hidden + 3 * self.feed_forward
        layer = self.hidden * (matrices + NORMS)
        return self.hidden * (2 * BYTES + 1) + LAYERS * layer

    @property
    def batch(self) -> int:
        """Examples per step over all replicas: with the root of the size, a multiple of eight."""
        return 8 * round(OF_SMALLEST / 8 * math.sqrt(self.parameters / SMALLEST))

    @property
    def steps(self) -> int:
        return ROUND * round(TOKENS * self.parameters / (self.batch * CONTEXT) / ROUND)

    @property
    def sets(self) -> str:
        """The settings of a run of this size, without scheme and optimizer."""
        evaluated = f"later:{self.steps - WINDOW * ROUND}:train.validate_every={ROUND}"
        model = f"model.hidden_size={self.hidden} model.feed_forward={self.feed_forward}"
        return f"{model} train.steps={self.steps} schedule.warmup={self.steps // 20} {evaluated}"


SIZES = (
    Size("0.037M", 32, 64, 5),
    Size("0.14M", 64, 192, 5),
    Size("0.59M", 128, 512, 3),
    Size("1.2M", 192, 704, 2),
)
LARGEST = Size("2.3M", 256, 1088, 2)
"""Of two schemes alone, where hours are left."""
PREDICTED = Size("30M", 928, 4096, 1), Size("125M", 1920, 8192, 1)
"""Sizes for which the laws are written down before anybody trains them."""
