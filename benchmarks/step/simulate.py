"""Time of a step of `detonation simulate` against the forward and backward passes of its examples alone.

    python -m benchmarks.step.simulate [--recipe recipes/quick-lm.toml] [--replicas 2 16 64] [--total-batch 64]
    python -m benchmarks.step.simulate --set scheme.precision=fp32 --set scheme.error_feedback=true
    python -m benchmarks.step.simulate --replicas 64 --parts

CPU seconds of one process with one thread, the median over steps. "Passes alone" are forward and backward passes of one
model: of the same examples, as many as there are replicas, measured before and after the steps. `--parts` prints what a
replica's milliseconds of a step are, by the processor time of its thread: of each part without the parts within it.
"""

import argparse
import functools
import itertools
import statistics
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from detonation.cluster.network import simulated
from detonation.cluster.network.simulated import SimulatedCommunicator, simulate_replicas
from detonation.core.codec.codec import Codec
from detonation.core.codec.received import Arrived
from detonation.core.compute import nonfinite
from detonation.core.engine.reference import ReferenceEngine
from detonation.core.exchange import two_stage
from detonation.core.exchange.two_stage import TwoStage
from detonation.core.integrity import guard
from detonation.core.integrity.guard import Guard
from detonation.core.optimizer.replicated import Replicated
from detonation.core.replicator.channel import Channel
from detonation.core.replicator.overlap import Overlap
from detonation.data import batch
from detonation.engines.native_engine import NativeEngine
from detonation.train.loop import fit
from detonation.train.loop.checks import load_data
from detonation.train.loop.session import seeded_model
from detonation.train.recipe.schema import Config
from detonation.train.verbs.simulate import Simulation, configured, train_virtual, virtual


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--recipe", type=Path, default=Path(__file__).parents[2] / "recipes" / "quick-lm.toml"
    )
    parser.add_argument("--replicas", nargs="+", type=int, default=[2, 16, 64])
    parser.add_argument("--total-batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=6, help="that are measured")
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--parts", action="store_true", help="what the time of a step is")
    args = parser.parse_args()
    torch.set_num_threads(1)
    parts = Parts() if args.parts else None
    print(
        "| replicas | step, CPU s | passes alone | step / passes | all in one pass | the rest, ms a replica |"
    )
    print("|---|---|---|---|---|---|")
    for replicas in args.replicas:
        sets = (
            *args.sets,
            f"train.steps={args.steps + 3}",
            "train.validate_every=0",
            "train.validation_batches=1",
        )
        config = configured(Simulation(args.recipe, sets, replicas, args.total_batch))
        each, whole = (
            passes(config, replicas, args.steps),
            passes(config, 1, args.steps, args.total_batch),
        )
        step = statistics.median(steps(config, parts))
        each = statistics.median(
            [*each, *passes(config, replicas, args.steps)]
        )  # before and after the steps
        over = (step - each) / replicas * 1e3
        cells = [
            str(replicas),
            f"{step:.2f}",
            f"{each:.2f}",
            f"{step / each:.2f}",
            f"{statistics.median(whole):.2f}",
        ]
        print("| " + " | ".join([*cells, f"{over:.1f}"]) + " |", flush=True)
        if parts:
            parts.show(replicas * args.steps)


PARTS: dict[str, list[tuple[Any, str]]] = {
    "forward passes, and data": [(fit, "_gradients")],
    "backward passes": [(torch.Tensor, "backward")],
    "hooks and buckets": [(Overlap, name) for name in ("_on_gradient", "finish")],
    "the signal is finite": [(ReferenceEngine, "inspect"), (nonfinite, "signals_within")],
    "encoding": [
        (NativeEngine, "encode_into"),
        (ReferenceEngine, "encode_into"),
        (Channel, "_encode"),
    ],
    "writing messages": [(Codec, "write")],
    "sealing": [(Guard, "seal")],
    "inspecting": [(Guard, "open"), (guard, "decide_usable"), (Guard, "_report")],
    "answering as an owner": [(TwoStage, "_reply"), (two_stage, "aggregate"), (Arrived, "read")],
    "turns": [(simulated._Scheduler, "wait"), (simulated._Collective, "result")],
    "the rest of a step": [
        (Replicated, "step"),
        (Replicated, "zero_grad"),
        (Replicated, "renumber"),
    ],
}
"""The functions of each part."""


class Parts:
    """Sums the processor time of threads within functions, while `on`, without that of the functions within them."""

    def __init__(self) -> None:
        self.on, self._seconds, self._local = False, Counter[str](), threading.local()
        for part, functions in PARTS.items():
            for owner, name in functions:
                made = self._timed(getattr(owner, name), part)
                is_static = isinstance(vars(owner).get(name), staticmethod)
                setattr(owner, name, staticmethod(made) if is_static else made)

    def _timed(self, function: Any, part: str) -> Any:
        @functools.wraps(function)
        def timed(*arguments: Any, **options: Any) -> Any:
            if not self.on:
                return function(*arguments, **options)
            within = self._local.__dict__.setdefault("within", [])
            within.append(0.0)
            began = time.thread_time()
            try:
                return function(*arguments, **options)
            finally:
                took = time.thread_time() - began
                self._seconds[part] += took - within.pop()
                if within:
                    within[-1] += took

        return timed

    def show(self, steps: int) -> None:
        """Prints the milliseconds of one of `steps` steps of a replica, and begins anew."""
        for part, seconds in self._seconds.most_common():
            print(f"    {seconds / steps * 1e3:6.2f} ms  {part}")
        self._seconds.clear()


class Clock:
    """Takes in the steps of the first replica, in the place of a recorder."""

    def __init__(self, count: int, parts: Parts | None) -> None:
        self.records: list[Any] = []
        self.ends: list[float] = []
        self._count, self._parts = count, parts

    def add(self, record: Any) -> None:
        self.records.append(record)
        self.ends.append(time.process_time())
        if self._parts:
            self._parts.on = 2 <= len(self.ends) < self._count - 1


def steps(config: Config, parts: Parts | None = None) -> list[float]:
    """The CPU seconds of each step of a simulation, without the first two and the last one, which validates."""
    clock: Any = Clock(config.train.steps, parts)

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
            examples = batch(
                data.train, seed=config.seed, step=step, part=replica, parts=count, size=size
            )
            model(**examples).loss.backward()
            model.zero_grad()
        took.append(time.process_time() - began)
    return took[1:]


if __name__ == "__main__":
    main()
