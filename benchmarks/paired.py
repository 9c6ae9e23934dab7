"""Paired 95 % intervals: the loss of each setting of the frontier against AdamW with full synchronisation.

    python benchmarks/paired.py                     one line per setting and number of replicas with three seeds or more
    python benchmarks/paired.py --losses > src/detonation/plan/losses.json       the planner's measurements

A run is paired with the run of the baseline on the same seed and the same number of examples per step: seeds differ
more than methods do. The baseline is AdamW at its tuned learning rate with two replicas; with full synchronisation the
number of replicas changes the last bits alone. Seed 0 chose learning rates, so it judges only where no other seed was
run, and then only a loss of more than `WARN` is a measurement. The rows of `KEPT` come from real worlds whose runs of
single seeds were not kept.
"""

import argparse
import json
import math
import statistics
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import detonation as dt
from detonation.plan.losses import trained_by

RESULTS = sorted(Path("benchmarks/results").glob("*-frontier*.jsonl"))
BASELINES = {
    "recipes/quick-lm.toml": ("optimizer.lr=0.003", 32),
    "recipes/vit-fashion.toml": ("optimizer.lr=0.002", 128),
}
"""The learning rate of AdamW in full, and the examples per step, by recipe."""
WARN = 0.05
"""Loss on a single seed, relative to the baseline, that is worth a warning."""
# fmt: off
STUDENT = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042, 2.040,
]
# fmt: on
"""Student's t for a two-sided 95 % interval, from 1 degree of freedom to 31."""
KEPT = [
    (
        "random",
        {"rate": 0.0625, "precision": "fp32", "delay": 0},
        "SignSGD",
        {"quick-lm": 0.0926, "vit-fashion": 0.1478},
    ),
    ("diloco", {"every": 20, "precision": "fp32"}, "AdamW", {"quick-lm": 0.0619, "vit-fashion": 0.1517}),
    ("demo", {"topk": 4, "chunk": 64, "precision": "fp32", "delay": 0}, "SignSGD", {"vit-fashion": 0.0142}),
]
"""Relative losses of research/log.md over three seeds, two replicas."""

Row = dict[str, Any]


def rows(paths: Sequence[Path]) -> dict[tuple[Any, ...], dict[int, Row]]:
    """Finished runs by setting and seed; a later file replaces the same run of an earlier one."""
    found: dict[tuple[Any, ...], dict[int, Row]] = {}
    for path in paths:
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if row["val_loss"]:
                key = (row["recipe"], row["replicas"], row["total"], tuple(sorted(row["sets"])))
                found.setdefault(key, {})[row["seed"]] = row
    return found


def baselines(found: Mapping[tuple[Any, ...], dict[int, Row]]) -> dict[str, dict[int, float]]:
    """Losses of the baseline of each recipe, by seed."""
    return {
        recipe: {s: row["val_loss"] for s, row in found[recipe, 2, total, _full(lr)].items()}
        for recipe, (lr, total) in BASELINES.items()
    }


def _full(lr: str) -> tuple[str, ...]:
    return tuple(sorted(("scheme.name=full", "optimizer.name=AdamW", lr)))


def judged(runs: Mapping[int, Row], base: Mapping[int, float]) -> tuple[float, tuple[float, float] | None, int]:
    """The relative loss over the seeds that both have, its interval with three seeds or more, and their number."""
    seeds = sorted(set(runs) & set(base) - {0}) or sorted(set(runs) & set(base))
    differences, mean = [runs[s]["val_loss"] - base[s] for s in seeds], statistics.fmean(base[s] for s in seeds)
    if len(seeds) < 3:
        return statistics.fmean(differences) / mean, None, len(seeds)
    middle, half = spread(differences)
    return middle / mean, ((middle - half) / mean, (middle + half) / mean), len(seeds)


def percent(cost: float, interval: tuple[float, float] | None) -> str:
    """A relative loss and its interval as tables write them, in percent: +1.4 [+0.9, +1.8]."""
    ends = [f"{100 * end:+.1f}" for end in interval or ()]
    return f"{100 * cost:+.1f}" + f" [{', '.join(ends)}]" * bool(ends)


def spread(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half of its 95 % interval."""
    half = STUDENT[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), half


def scheme_of(sets: Sequence[str]) -> dt.Scheme | None:
    """The scheme of a run with nothing but settings of scheme and optimizer, else None."""
    values = dict(each.split("=", 1) for each in sets)
    if any(not key.startswith(("scheme.", "optimizer.")) for key in values):
        return None
    given = {key.removeprefix("scheme."): value for key, value in values.items() if key.startswith("scheme.")}
    arguments = {key: _value(value) for key, value in given.items() if key != "name"}
    return dt.scheme(given["name"], arguments)


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


Measured = tuple[dt.Scheme, str, int, dict[int, Row], tuple[float, tuple[float, float] | None, int], str]
"""A scheme, its recipe and replicas, its runs by seed, what `judged` says of them, and the page that tells it."""


def first_round(found: Mapping[tuple[Any, ...], dict[int, Row]]) -> Iterator[Measured]:
    """The settings of benchmarks/frontier.py that differ from the baseline in scheme and optimizer alone."""
    base = baselines(found)
    for (recipe, replicas, total, sets), runs in found.items():
        scheme = scheme_of(sets)
        if scheme is None or "Muon" in " ".join(sets) or (scheme.name == "full" and replicas != 2):
            continue
        if total == BASELINES[recipe][1] and set(runs) & set(base[recipe]):
            yield scheme, recipe, replicas, runs, judged(runs, base[recipe]), "research/frontier.md"


def losses(measured: Iterable[Measured]) -> list[Row]:
    """The rows of losses.json: for each setting, optimizer and task the best learning rate."""
    best = dict[str, Row]()
    for scheme, recipe, replicas, runs, (cost, interval, seeds), source in measured:
        if seeds < 3 and cost <= WARN:
            continue
        arguments = {key: value for key, value in scheme.arguments.items() if key != "link"}
        size, name = next(iter(runs.values())), Path(recipe).stem
        settings = {key: _value(text) for key, text in (each.split("=") for each in size["sets"] if "=" in each)}
        own = {key.removeprefix("optimizer."): value for key, value in settings.items() if key.startswith("optimizer.")}
        optimizer = trained_by(own["name"], own)
        row = {
            "scheme": scheme.name,
            "arguments": arguments,
            "optimizer": optimizer,
            "cost": round(cost, 4) + 0.0,
            "interval": [round(end, 4) + 0.0 for end in interval] if interval else None,
            "seeds": seeds,
            "recipe": name,
            "parameters": size["num_parameters"],
            "steps": size["steps"],
            "replicas": replicas,
            "source": source,
        }
        task = [name, row["parameters"], row["steps"]]
        key = json.dumps([scheme.name, arguments, optimizer, *task, replicas])
        before = best.get(key)
        # More seeds say more than a lower loss on fewer, and a later round, which was tuned, more than an earlier one.
        if (
            before is None
            or seeds > before["seeds"]
            or (seeds == before["seeds"] and (cost < before["cost"] or source != before["source"]))
        ):
            best[key] = row
    like = {row["recipe"]: row for row in reversed(best.values())}  # the first of a recipe: its model as it is
    kept = [
        {**like[recipe], "scheme": name, "arguments": arguments, "optimizer": optimizer, "cost": cost}
        | {"interval": None, "seeds": 3, "replicas": 2, "source": "research/log.md"}
        for name, arguments, optimizer, by_recipe in KEPT
        for recipe, cost in by_recipe.items()
    ]
    return [*best.values(), *kept]


def table(found: Mapping[tuple[Any, ...], dict[int, Row]]) -> Iterator[str]:
    """One line per setting, number of replicas and examples per step with three seeds or more."""
    base = baselines(found)
    yield "| recipe | replicas | examples per step | settings | seeds | to AdamW in full, % |"
    yield "|---|---|---|---|---|---|"
    for (recipe, replicas, total, sets), runs in found.items():
        if len((set(runs) & set(base[recipe])) - {0}) >= 3:
            cost, interval, seeds = judged(runs, base[recipe])
            settings = " ".join(each.split(".", 1)[1] for each in sets)
            line = (Path(recipe).stem, replicas, total, settings, seeds, percent(cost, interval))
            yield "| " + " | ".join(map(str, line)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="*", type=Path, default=RESULTS)
    parser.add_argument("--losses", action="store_true", help="print the planner's measurements as JSON")
    args = parser.parse_args()
    found = rows(args.results)
    if args.losses:
        from paper import planned  # these two judge by the functions here
        from second_round import second_round

        every = losses([*first_round(found), *second_round(), *planned()])
        print("[\n  " + ",\n  ".join(json.dumps(row) for row in every) + "\n]")
        return
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
