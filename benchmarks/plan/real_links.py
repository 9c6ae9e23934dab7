"""Predicted against measured step time over links as they are: latency, jitter, loss and the traffic of others.

    sudo python -m benchmarks.plan.real_links run --results rows.jsonl            appends a row for each link and scheme
    python -m benchmarks.plan.real_links table --results rows.jsonl

Two nodes of one rank each, in network namespaces behind a relay (benchmarks/lab/relayed_nodes.py). On each link a world
measures the link as `detonation probe` does, and then, scheme by scheme, the compute of a step, and trains some steps
with the code of `detonation train`. What is measured is the mean time of a step. Forward and backward contain a pause,
in the place of an accelerator that computes, so that a busy processor changes a step little.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.lab.relay import Conditions

RESULTS = Path("benchmarks/results/2026-11-26-real-links.jsonl")
RECIPE = "recipes/quick-lm.toml"
SETS = (
    "model.hidden_size=64 model.feed_forward=256 model.heads=2 data.context=64 train.batch_size=2 train.steps=100000 "
    "train.validate_every=0 schedule.name=constant"
)
ADAMW = "optimizer.name=AdamW optimizer.lr=1e-4"
SCHEMES = {
    "full": f"scheme.name=full {ADAMW}",
    "demo": "scheme.name=demo scheme.precision=fp32 scheme.error_feedback=true",
    "owner": "scheme.name=demo scheme.precision=fp32 scheme.error_feedback=true scheme.link=owner",
    "diloco": f"scheme.name=diloco scheme.every=8 {ADAMW}",
}
PROBE_S = 10.0
WARM, STEPS = 8, 16
"""Steps before those that count, and these: whole rounds of `diloco`."""


@dataclass(frozen=True)
class Case:
    """A link and the seconds that forward and backward pause on it. competing, loss: shares, of rate and packets."""

    link: str
    jitter_s: float
    loss: float
    competing: float
    compute_s: float

    def conditions(self) -> Conditions:
        rough = {"jitter_s": self.jitter_s, "loss": self.loss, "competing": self.competing}
        return Conditions.of(self.link, **rough)

    def __str__(self) -> str:
        parts = [self.link]
        parts += [f"jitter {1e3 * self.jitter_s:g} ms"] if self.jitter_s else []
        parts += [f"loss {self.loss:.2%}"] if self.loss else []
        return ", ".join(parts + ([f"others {self.competing:.0%}"] if self.competing else []))


TUNED = [
    Case("20mbit,20ms", 0, 0, 0, 0.1),
    Case("100mbit,50ms", 0, 0, 0, 0.3),
    Case("50mbit,30ms", 0, 0.001, 0, 0.15),
    Case("200mbit,10ms", 0.005, 0, 0, 0.05),
    Case("100mbit,20ms", 0, 0, 0.3, 0.2),
    Case("10mbit,100ms", 0, 0, 0, 0.4),
]
"""The links on which the prediction was made."""


Range = tuple[float, float]


def drawn(
    count: int = 20,
    seed: int = 44,
    rates: Range = (5, 500),
    latencies: Range = (1, 100),
    computes: Range = (0.05, 0.5),
) -> Iterator[Case]:
    """Draws links, by itself those of `HELD_OUT`: rates in Mbit/s, latencies in ms one way, compute in seconds.

    These are even in their logarithm. Jitter (up to half of the latency), loss (to 0.5 %) and others (to 40 %) are each
    absent on half of them.
    """
    draws = random.Random(seed)

    def even(low: float, high: float) -> float:
        return float(low * (high / low) ** draws.random())

    for _ in range(count):
        rate, latency = even(*rates), even(*latencies)
        jitter = draws.choice([0, 1]) * draws.uniform(0, 0.5) * latency
        loss, others = (draws.choice([0, 1]) * draws.uniform(0, most) for most in (0.005, 0.4))
        rounded = (float(f"{each:.2g}") for each in (jitter / 1e3, loss, others, even(*computes)))
        yield Case(f"{rate:.3g}mbit,{latency:.2g}ms", *rounded)


HELD_OUT = list(drawn())
"""Drawn before anything was tuned, and looked at once."""


def run(case: Case) -> list[dict[str, Any]]:
    """A row for each scheme, from a world of its own on this link."""
    from benchmarks.lab.relayed_nodes import relayed_cluster

    from detonation.cluster.launch import run_local

    with relayed_cluster(2, case.conditions()) as cluster:
        return run_local(measure, 2, [case], enter=cluster.enter)[0]


def measure(case: Case) -> list[dict[str, Any]]:
    """The rows. Runs on every rank."""
    import torch

    import detonation as dt
    from detonation.cluster.network.measure import probe_axis

    mesh = dt.init_mesh(2, 1, "cpu")
    trainings = {name: Training(configured(sets), case.compute_s) for name, sets in SCHEMES.items()}
    began = time.perf_counter()
    probed = asdict(probe_axis(mesh["replicate"], torch.device("cpu"), PROBE_S))
    shared = {**asdict(case), "probed": probed, "probed_s": time.perf_counter() - began}
    return [{**shared, "scheme": name, **training.row()} for name, training in trainings.items()]


class Training:
    """A run of some steps, and the compute of a step as the probe measures it before and after them."""

    def __init__(self, config: Any, compute_s: float, warm: int = WARM) -> None:
        import torch

        from detonation.core.link.link import Link
        from detonation.train.loop.session import start_session

        self.config = config
        self._session = start_session(self.config, torch.device("cpu"))
        pause_in(self._session.model, compute_s)
        self._session.optimizer.set_up()
        self._done, self._collecting, collect = 0, 0.0, Link.collect

        def timed(link: Any, words: Any) -> Any:  # which no record counts as waiting
            began = time.perf_counter()
            found = collect(link, words)
            self._collecting += time.perf_counter() - began
            return found

        Link.collect = timed  # type: ignore[method-assign]
        self.train(warm)

    def row(self) -> dict[str, Any]:
        import torch.distributed as dist

        from detonation.train.choice.step_times import forward_backward, optimizer_step

        before = forward_backward(self._session)[0]
        step, steps = optimizer_step(self._session, self.config), self.train(STEPS)
        assert step
        compute, ranks = [before, forward_backward(self._session)[0]], [steps, steps]
        dist.all_gather_object(ranks, steps)
        return {"compute": compute, "step": asdict(step), "records": ranks}

    def train(self, count: int) -> list[list[float]]:
        """Of each step its seconds, and those of waiting."""
        from detonation.cluster.processes.signals import Stop
        from detonation.train.loop.fit import fit

        found: list[list[float]] = []

        def report(record: Any) -> None:
            found.append(
                [record.seconds, record.waited_s + (record.agreeing_s or 0.0) + self._collecting]
            )
            self._collecting = 0.0

        self._collecting = 0.0
        fit(self._session, self._done, self._done + count, report, Stop())
        self._done += count
        return found


def configured(sets: str) -> Any:
    """The checked configuration of the recipe under a scheme."""
    from detonation.train.loop.checks import check_config
    from detonation.train.recipe.resolve import Request

    return check_config(
        Request(Path(RECIPE), (*SETS.split(), *sets.split()), 2, 1).layers(None).config()
    )


def pause_in(model: Any, seconds: float) -> None:
    """Lets forward take a third of `seconds` more, and backward the rest, before it comes to any parameter."""
    import torch

    class Pause(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, loss: Any) -> Any:
            time.sleep(seconds / 3)
            return loss.clone()

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            time.sleep(seconds * 2 / 3)
            return gradient

    def after(module: Any, arguments: Any, output: Any) -> Any:
        output.loss = Pause.apply(output.loss)
        return output

    model.register_forward_hook(after)


WAYS = "plan", "network", "line"
"""Ways to predict a step; see `predicted`."""


def predicted(row: dict[str, Any]) -> dict[str, float]:
    """The mean seconds of a step as measured, and as predicted in three ways.

    "plan": by `detonation plan` with the compute that was measured before and after the steps. "network": the same,
    with the compute of the measured steps themselves, so that a processor whose load changes does not count. "line":
    "plan" by the straight lines alone, without what silence and the ranks' reports cost.
    """
    import detonation as dt
    from detonation.cluster.network.profile import Step, axis_profile
    from detonation.plan.cost import Network, Work, cost
    from detonation.train.loop.checks import shard_shapes

    config, probed = configured(SCHEMES[row["scheme"]]), axis_profile(row["probed"])
    scheme, shapes = dt.scheme(config.scheme.name, config.scheme.arguments), shard_shapes(config)
    seconds = statistics.fmean(taken for taken, _ in chain(*row["records"]))
    together = zip(
        *row["records"], strict=True
    )  # the slower rank counts, as in what a probe says of compute
    own = statistics.fmean(max(taken - waited for taken, waited in ranks) for ranks in together)
    steps, compute = {scheme.name: Step(**row["step"])}, statistics.fmean(row["compute"])
    network = Network.of_axis(probed, 1)
    ways = {
        "plan": (Work(shapes, compute, steps, reports=True), network),
        "network": (Work(shapes, own, reports=True), network),
        "line": (Work(shapes, compute, steps), Network(2, 1, probed.operations)),
    }
    return {"measured": seconds, **{name: cost(scheme, *way).total_s for name, way in ways.items()}}


def table(rows: list[dict[str, Any]]) -> None:
    latest = {tuple(row[name] for name in (*Case.__match_args__, "scheme")): row for row in rows}
    errors: dict[str, list[float]] = {}
    titles = ["link", "compute, ms", "scheme", "measured, ms", *WAYS, "compute moved"]
    print("| " + " | ".join(titles) + " |\n" + "|---" * len(titles) + "|")
    for row in latest.values():
        case, found = Case(*(row[name] for name in Case.__match_args__)), predicted(row)
        measured, moved = found.pop("measured"), row["compute"][1] / row["compute"][0] - 1
        off = {name: seconds / measured - 1 for name, seconds in found.items()}
        cells = [str(case), f"{1e3 * case.compute_s:.0f}", row["scheme"], f"{1e3 * measured:.0f}"]
        print(
            "| "
            + " | ".join([*cells, *(f"{each:+.1%}" for each in off.values()), f"{moved:+.0%}"])
            + " |"
        )
        for name, each in off.items():
            errors.setdefault(name, []).append(abs(each))
    print()
    for name, each in errors.items():
        within = sum(error <= 0.15 for error in each)
        print(
            f"{name}: median {statistics.median(each):.1%}, worst {max(each):.1%}, {within} of {len(each)} up to 15 %"
        )
    for name in WAYS:
        lost = regrets([*latest.values()], name)
        print(
            f"chosen by {name}: {statistics.median(lost):.1%} (median), {max(lost):.1%} (worst) later than the best"
        )


def regrets(rows: list[dict[str, Any]], way: str) -> list[float]:
    """For each link, how much longer the setting with the best prediction takes to the loss than the best as measured.

    Steps to the loss of the baseline after 1,000 are those that `plan` expects; of `diloco` as of rounds of 10 steps.
    """
    from detonation.core.schemes.scheme import scheme
    from detonation.plan.losses import Goal, estimate

    links: dict[Case, list[tuple[float, float]]] = {}
    for row in rows:
        config, found = configured(SCHEMES[row["scheme"]]), predicted(row)
        arguments = {"every": 10} if row["scheme"] == "diloco" else config.scheme.arguments
        known = estimate(
            scheme(config.scheme.name, arguments), config.optimizer.name, Goal(2, 164_000, 1000)
        )
        assert known
        case = Case(*(row[name] for name in Case.__match_args__))
        links.setdefault(case, []).append(
            (found[way] * known.steps_factor, found["measured"] * known.steps_factor)
        )
    return [min(each)[1] / min(measured for _, measured in each) - 1 for each in links.values()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["run", "table"])
    parser.add_argument("--links", choices=["tuned", "held-out"], default="held-out")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of links")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.action == "table":
        table([json.loads(line) for line in args.results.read_text().splitlines()])
        return
    import torch

    torch.set_num_threads(1)  # before the ranks are forked
    cases = TUNED if args.links == "tuned" else HELD_OUT
    for number in args.only or range(len(cases)):
        began = time.perf_counter()
        rows = run(cases[number])
        with args.results.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        print(f"{number}: {cases[number]} in {time.perf_counter() - began:.0f} s", flush=True)
        for row in rows:
            mean = statistics.fmean(record[0] for record in row["records"][0])
            print(
                f"    {row['scheme']:8} {mean:.3f} s, compute {statistics.median(row['compute']):.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
