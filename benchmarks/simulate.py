"""Time of a step of `detonation simulate` against the forward and backward passes of its examples alone.

    python benchmarks/simulate.py [--recipe recipes/quick-lm.toml] [--replicas 2 16 64] [--total-batch 64]
    python benchmarks/simulate.py --set scheme.precision=fp32 --set scheme.error_feedback=true

CPU seconds of one process with one thread, the median over steps. "Passes alone" are forward and backward passes of one
model: of the same examples, as many as there are replicas, measured before and after the steps.
"""

import argparse
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from detonation.cluster.network.simulated import SimulatedCommunicator, simulate_replicas
from detonation.data import batch
from detonation.train.loop.session import load_data, seeded_model
from detonation.train.recipe.schema import Config
from detonation.train.verbs.simulate import Simulation, configured, train_virtual, virtual


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=Path(__file__).parents[1] / "recipes" / "quick-lm.toml")
    parser.add_argument("--replicas", nargs="+", type=int, default=[2, 16, 64])
    parser.add_argument("--total-batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=6, help="that are measured")
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| replicas | step, CPU s | passes alone | step / passes | all in one pass | the rest, ms a replica |")
    print("|---|---|---|---|---|---|")
    for replicas in args.replicas:
        sets = (*args.sets, f"train.steps={args.steps + 3}", "train.validate_every=0", "train.validation_batches=1")
        config = configured(Simulation(args.recipe, sets, replicas, args.total_batch))
        each, whole = passes(config, replicas, args.steps), passes(config, 1, args.steps, args.total_batch)
        step = statistics.median(steps(config))
        each = statistics.median([*each, *passes(config, replicas, args.steps)])  # before and after the steps
        over = (step - each) / replicas * 1e3
        cells = [str(replicas), f"{step:.2f}", f"{each:.2f}", f"{step / each:.2f}", f"{statistics.median(whole):.2f}"]
        print("| " + " | ".join([*cells, f"{over:.1f}"]) + " |", flush=True)


class Clock:
    """Takes in the steps of the first replica, in the place of a recorder."""

    def __init__(self) -> None:
        self.records: list[Any] = []
        self.ends: list[float] = []

    def add(self, record: Any) -> None:
        self.records.append(record)
        self.ends.append(time.process_time())


def steps(config: Config) -> list[float]:
    """The CPU seconds of each step of a simulation, without the first two and the last one, which validates."""
    clock: Any = Clock()

    def act(communicator: SimulatedCommunicator) -> None:
        train_virtual(virtual(config, communicator), None if communicator.replica else clock)

    simulate_replicas(act, config.mesh.replicas)
    return [end - begin for begin, end in itertools.pairwise(clock.ends[1:-1])]


def passes(config: Config, count: int, steps: int, size: int = 0) -> list[float]:
    """The CPU seconds of `count` forward and backward passes of `size` examples, or of those of a replica, per step."""
    model, data, took = seeded_model(config), load_data(config.data), list[float]()
    size = size or config.train.batch_size * config.train.accumulate
    for step in range(steps + 1):
        began = time.process_time()
        for replica in range(count):
            examples = batch(data.train, seed=config.seed, step=step, part=replica, parts=count, size=size)
            model(**examples).loss.backward()
            model.zero_grad()
        took.append(time.process_time() - began)
    return took[1:]


if __name__ == "__main__":
    main()
