"""Settings that are allowed each by itself, and do not fit together."""

from detonation.core.schemes.registry import scheme
from detonation.core.schemes.scheme import Scheme
from detonation.core.schemes.traffic import dense_bytes, mean_bytes
from detonation.train.recipe.schema import Config
from detonation.train.recipe.sizes import shard_shapes

LITTLE_GAIN = 2 / 3
"""The share of full synchronisation from which on a scheme that leaves something out is hardly worth it."""


def misfits(config: Config) -> list[str]:
    """The settings of `config` that do not fit together, one line each, with what to change."""
    steps, warmup, optimizer = config.train.steps, config.schedule.warmup, config.optimizer
    found = []
    if warmup >= steps:
        found.append(f"schedule.warmup is {warmup}, all of the {steps} steps: the learning rate only rises")
    if config.train.clip and optimizer.name == "SignSGD" and not optimizer.arguments.get("momentum"):
        found.append("train.clip changes nothing for SignSGD without momentum, which moves by signs: leave it out")
    for level in config.levels:
        chosen = scheme(level.scheme.name, level.scheme.arguments)
        every = chosen.round.every
        if every > steps:
            found.append(
                f"{chosen.name} exchanges every {every} steps, but there are {steps}: replicas meet at the end alone; "
                "choose a smaller every"
            )
        if chosen.name not in ("full", "none") and (share := _share(config, chosen, level.replicas)) > LITTLE_GAIN:
            found.append(
                f"{chosen.name} sends {share:.0%} of what full synchronisation sends, which leaves nothing out"
            )
    return found


def _share(config: Config, chosen: Scheme, replicas: int) -> float:
    """The bytes per step of `chosen`, as a share of those of full synchronisation."""
    layouts = [chosen.codec.layout(shapes) for shapes in shard_shapes(config)]
    sent = sum(mean_bytes(chosen, layout, replicas) for layout in layouts)
    dense = sum(dense_bytes(layout.numel, replicas) for layout in layouts)
    return sent / dense if dense else 0.0
