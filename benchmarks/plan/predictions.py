"""Predicted against measured step time: the error of `detonation plan` about `detonation train`.

    python -m benchmarks.plan.predictions run --recipes quick-lm --rates 10 100    appends rows
    python -m benchmarks.plan.predictions table > benchmarks/results/2026-11-20-predictions.md

For each rate a world of 2 x 2 local ranks over a throttled link (`--link`) takes turns. In each turn it measures the
link as `detonation probe` does; then, scheme by scheme, it measures the compute time of a step as the probe does, and
trains some steps with the code of `detonation train`. Predictions use only the measurements before those steps. The
table shows medians over the turns; under a scheme with rounds, the weighted mean of the medians of steps with and
without an exchange.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

RESULTS = Path("benchmarks/results/2026-11-20-predictions.jsonl")
RECIPES = {
    "quick-lm": ("recipes/quick-lm.toml", []),
    "vit-fashion": ("recipes/vit-fashion.toml", []),
    "t5": (
        "recipes/t5-translation.toml",
        ["model.hidden_size=256", "model.layers=4", "model.feed_forward=1024"],
    ),
}
SIGN = "scheme.name=demo scheme.topk=1 scheme.decay=0.95 scheme.precision=sign scheme.error_feedback=false"
SCHEMES = {
    "full": "scheme.name=full",
    "demo": "scheme.name=demo scheme.precision=fp32",
    "demo, 1 bit": SIGN,
    "random": "scheme.name=random",
    "striding": "scheme.name=striding",
    "diloco": "scheme.name=diloco",
}
WORLD = {"replicas": 2, "shards": 2}
TURNS = 2
STEPS, LONGEST_S = 8, 8.0
"""Steps per turn, fewer where they would take longer than LONGEST_S seconds, but at least one round."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run")
    run.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES)[:2])
    run.add_argument("--rates", nargs="+", type=int, default=[10, 100, 1000, 10000], help="Mbit/s")
    run.add_argument("--results", type=Path, default=RESULTS)
    verbs.add_parser("table").add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.verb == "table":
        return table([json.loads(line) for line in args.results.read_text().splitlines()])
    return measure_all(args.recipes, args.rates, args.results)


def measure_all(names: list[str], rates: list[int], results: Path) -> None:
    import torch

    from detonation.cluster.launch import run_local
    from detonation.train.loop.checks import load_data

    torch.set_num_threads(1)
    for name in names:
        load_data(configured(name, "full", rates[0]).data)  # once, for all ranks are forks
        for rate in rates:
            rows = run_local(measure, 4, [name, rate])[0]
            with results.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
            for row in rows:
                print(json.dumps(row), flush=True)


def configured(name: str, scheme: str, rate: int) -> Any:
    """The checked configuration of a recipe under a scheme, over a throttled link of `rate` Mbit/s."""
    from detonation.train.loop.checks import check_config
    from detonation.train.recipe.resolve import Request

    path, sets = RECIPES[name]
    sets = (*sets, *SCHEMES[scheme].split(), "train.validate_every=0", "train.steps=100000")
    return check_config(
        Request(Path(path), (*sets, f'mesh.link="{rate}mbit,1ms"'), **WORLD).layers(None).config()
    )


def measure(name: str, rate: int) -> list[dict[str, Any]]:
    """One row for each scheme. Runs on every rank."""
    import torch

    import detonation as dt
    from detonation.cluster.network.measure import probe_axis
    from detonation.plan.cost import Network
    from detonation.train.loop.session import slowed, start_session

    device = torch.device("cpu")
    mesh = dt.init_mesh(WORLD["replicas"], WORLD["shards"], "cpu")
    probed = start_session(configured(name, "full", rate), device)
    runs = {scheme: Trained(configured(name, scheme, rate)) for scheme in SCHEMES}
    link = slowed(mesh["replicate"], probed.config.mesh.link)
    for _ in range(TURNS):
        network = Network(*WORLD.values(), probe_axis(link, device, budget_s=2.0).operations)
        for run in runs.values():
            run.turn(probed, network)
    return [
        {"recipe": name, "mbit": rate, "scheme": scheme, **run.row()}
        for scheme, run in runs.items()
    ]


class Trained:
    """A run of some steps per turn, with the predictions made before each turn."""

    def __init__(self, config: Any) -> None:
        import torch

        import detonation as dt
        from detonation.train.loop.session import start_session

        self.config, self.done = config, 0
        self.scheme = dt.scheme(config.scheme.name, config.scheme.arguments)
        self.session = start_session(config, torch.device("cpu"))
        self.session.optimizer.set_up()
        self.predicted: list[Any] = []
        self.records: list[Any] = []

    def turn(self, probed: Any, network: Any) -> None:
        """Predicts from measurements made now, then trains."""
        from detonation.cluster.processes.signals import Stop
        from detonation.plan.cost import Work, cost
        from detonation.train.choice.step_times import forward_backward, optimizer_step
        from detonation.train.loop.checks import shard_shapes
        from detonation.train.loop.fit import fit

        compute_s, _ = forward_backward(probed)
        steps = {self.scheme.name: optimizer_step(probed, self.config)}
        work = Work(shard_shapes(self.config), compute_s, steps)
        self.predicted.append(cost(self.scheme, work, network))
        count, every = (
            max(5, min(STEPS, int(LONGEST_S / self.predicted[-1].total_s))),
            self.scheme.round.every,
        )
        until, records = self.done + -(-count // every) * every, []
        fit(self.session, self.done, until, records.append, Stop())
        self.records += records[2:] if every == 1 else records
        self.done = until

    def row(self) -> dict[str, Any]:
        """Medians over the turns."""
        every = self.scheme.round.every
        kinds = [
            [r for r in self.records if (r.step % every == 0) == sends] for sends in (False, True)
        ]
        pairs = list(zip([(every - 1) / every, 1 / every], kinds, strict=True))

        def typical(value: str) -> float:
            return sum(
                share * statistics.median(getattr(r, value) for r in kind)
                for share, kind in pairs
                if kind
            )

        parts = {
            "predicted": "total_s",
            "compute": "compute_s",
            "step": "step_s",
            "exposed": "exposed_s",
        }
        row = {
            name: statistics.median(getattr(cost, value) for cost in self.predicted)
            for name, value in parts.items()
        }
        row |= {
            "measured": typical("seconds"),
            "waited": typical("waited_s"),
            "in_step": typical("step_s"),
        }
        return {
            **row,
            "planned_bytes": self.predicted[0].bytes_sent,
            "bytes": typical("bytes_sent"),
            "steps": self.done,
        }


def table(rows: list[dict[str, Any]]) -> None:
    latest = {(row["recipe"], row["mbit"], row["scheme"]): row for row in rows}
    print(
        "| recipe | Mbit/s | scheme | step, ms: predicted / measured | off by | compute | waiting | KB per step |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for (recipe, rate, scheme), row in sorted(latest.items(), key=lambda item: item[0][:2]):
        own = row["measured"] - row["in_step"]  # all except the optimizer's step
        pairs = [
            (row["predicted"], row["measured"]),
            (row["compute"], own),
            (row["exposed"], row["waited"]),
        ]
        step, compute, waiting = (f"{_ms(one)} / {_ms(other)}" for one, other in pairs)
        sent = " / ".join(f"{row[name] / 1e3:.1f}" for name in ("planned_bytes", "bytes"))
        print(
            f"| {recipe} | {rate} | {scheme} | {step} | {_off(row):+.0%} | {compute} | {waiting} | {sent} |"
        )
    errors = [abs(_off(row)) for row in latest.values()]
    within = sum(error <= 0.15 for error in errors)
    print(
        f"\nMedian error of a step {statistics.median(errors):.1%}; {within} of {len(errors)} within 15 %."
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.{0 if seconds > 0.01 else 1}f}"


def _off(row: dict[str, Any]) -> float:
    return float(row["predicted"] / row["measured"] - 1)


if __name__ == "__main__":
    main()
