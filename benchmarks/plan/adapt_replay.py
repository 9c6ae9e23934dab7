"""What `adapt` gains on a link that changes: its time to a loss against that of the best setting known afterwards.

    python -m benchmarks.plan.adapt_replay

Replays runs on a clock: the adapter of `detonation train` decides from waits that the plan predicts on the link of the
moment, with 5 % of noise; no network and no training. A run has the loss when its steps, each divided by the number
that its setting needs for one of the baseline (`plan`'s losses, measured at 5, 10 and 30 steps a round, and a straight
line in the logarithm of the length), make 1,000. The link is at full rate, for a third of the time a tenth of it (or
ten times as far), and back.
"""

import argparse
import math
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import detonation as dt
from detonation.cluster.network.profile import Step
from detonation.core.schemes.scheme import Scheme
from detonation.link_speed import LinkSpeed
from detonation.plan.cost import Cost, Network, Work, cost, report_s
from detonation.plan.losses import Goal, estimate
from detonation.plan.search import largest_within
from detonation.train.choice.adapt import Adapter, Followed
from detonation.train.loop.checks import check_config, shard_shapes
from detonation.train.recipe.resolve import Request

ROUNDS = (5, 10, 20, 30, 50, 100, 200, 500)
MEASURED = (5, 10, 30)
KEPT = {"precision": "2bit", "outer_lr": 1.0, "outer_momentum": 0.0, "aggregate": "rescaled_mean"}
GOAL = 1000
LINKS = [
    ("100mbit,20ms", "10mbit,20ms"),
    ("20mbit,5ms", "2mbit,5ms"),
    ("200mbit,50ms", "20mbit,50ms"),
]
FARTHER = [("100mbit,10ms", "100mbit,100ms")]
BUDGET, STEP = 0.1, Step(0.004, 0.002)


def muloco(every: int) -> Scheme:
    return dt.scheme("muloco", {"every": every, **KEPT})


def needed(every: int, parameters: int) -> float:
    """Steps for one of the baseline."""
    known = [
        (math.log(each), estimate(muloco(each), "Muon", Goal(2, parameters, GOAL)))
        for each in MEASURED
    ]
    (x0, y0), *_, (x1, y1) = [(x, found.steps_factor) for x, found in known if found]
    return y0 + (y1 - y0) * (math.log(every) - x0) / (x1 - x0)


class Clock:
    """A run of one setting after another, on a link that is `slow` from one moment to another."""

    def __init__(self, work: Work, links: Sequence[str], from_s: float, until_s: float) -> None:
        self.work, self.from_s, self.until_s = work, from_s, until_s
        self.networks = [Network.of_link_speed(LinkSpeed.parse(link), 2, 1) for link in links]
        self.parameters = sum(work.sizes.values())
        self.now = self.done = 0.0
        self._known: dict[tuple[int, int], tuple[Cost, float]] = {}

    @property
    def network(self) -> Network:
        return self.networks[self.from_s <= self.now < self.until_s]

    def step(self, scheme: Scheme) -> Cost:
        """Takes the average step of a round; returns its cost."""
        key = scheme.round.every, int(self.from_s <= self.now < self.until_s)
        if key not in self._known:
            self._known[key] = (
                cost(scheme, self.work, self.network),
                needed(scheme.round.every, self.parameters),
            )
        price, steps = self._known[key]
        self.now, self.done = self.now + price.total_s, self.done + 1 / steps
        return price


def fixed(every: int, clock: Clock) -> float:
    """Seconds to the loss at one setting."""
    while clock.done < GOAL:
        clock.step(muloco(every))
    return clock.now


def adapted(clock: Clock) -> tuple[float, list[str], list[int]]:
    """Seconds to the loss with the adapter, which begins with its own choice for the first link; and what it says.

    The last are the lengths of a round at the beginning and at the end.
    """
    first = largest_within(
        [muloco(every) for every in ROUNDS], clock.work, clock.networks[0], BUDGET
    )
    optimizer = SimpleNamespace(levels=[(None, first)])
    optimizer.reconfigure = lambda scheme: optimizer.levels.__setitem__(0, (None, scheme))
    session: Any = SimpleNamespace(
        config=config(first.round.every),
        device=torch.device("cpu"),
        rank=0,
        optimizer=optimizer,
        waits=SimpleNamespace(),
    )
    adapter = Adapter(session, Followed(BUDGET, clock.networks[0], clock.work.compute_s, STEP))
    noise, lines, number = random.Random(1), list[str](), 0
    while clock.done < GOAL:
        scheme, network = optimizer.levels[0][1], clock.network
        number += 1
        price, reported = clock.step(scheme), report_s(scheme, clock.work, network)
        waited = (price.exposed_s - reported) * scheme.round.every * scheme.round.sends(number - 1)
        parts = {"waited_s": waited, "agreeing_s": reported}
        record: Any = SimpleNamespace(
            step=number, **{key: each * noise.gauss(1, 0.05) for key, each in parts.items()}
        )
        lines += adapter.after(record)
    return clock.now, lines, [first.round.every, optimizer.levels[0][1].round.every]


def config(every: int) -> Any:
    given = (
        "scheme.name=muloco",
        f"scheme.every={every}",
        "optimizer.name=Muon",
        "train.validate_every=0",
    )
    return check_config(Request(Path("recipes/quick-lm.toml"), given, 2, 1).layers(None).config())


def clocks(links: Sequence[str], compute_s: float) -> Callable[[], Clock]:
    """Makes clocks of a run whose link is the second of `links` for about the second third of its time."""
    work = Work(shard_shapes(config(5)), compute_s, {"muloco": STEP}, reports=True)
    rough = fixed(30, Clock(work, [links[0]] * 2, 0, 0))
    return lambda: Clock(work, links, rough / 3, 2 * rough / 3)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--compute", type=float, default=0.1, help="seconds of forward and backward"
    )
    args = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    titles = (
        "link",
        "for a third of the time",
        "best fixed",
        "its time",
        "adapt",
        "against the best",
        "worst fixed",
    )
    print("| " + " | ".join([*titles, "moves", "every"]) + " |\n" + "|---" * 9 + "|")
    for links in [*LINKS, *FARTHER]:
        clock = clocks(links, args.compute)
        times = {every: fixed(every, clock()) for every in ROUNDS}
        best = min(times, key=lambda every: times[every])
        seconds, lines, lengths = adapted(clock())
        cells = [*links, f"every={best}", f"{times[best]:.0f} s", f"{seconds:.0f} s"]
        cells += [
            f"{seconds / times[best] - 1:+.1%}",
            f"{max(times.values()) / times[best] - 1:+.1%}",
            str(len(lines)),
        ]
        cells += [f"{lengths[0]}, at the end {lengths[1]}"]
        print("| " + " | ".join(cells) + " |", flush=True)
        print("\n".join(f"    {line}" for line in lines), file=sys.stderr)
    dt.leave()


if __name__ == "__main__":
    main()
