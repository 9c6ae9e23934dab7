"""Paired 95 % intervals: the loss of each setting of the frontier against AdamW with full synchronisation.

    python benchmarks/paired.py                     one line per setting and number of replicas with three seeds or more
    python benchmarks/paired.py --losses > src/detonation/plan/losses.json       the planner's measurements

A run is paired with the run of the baseline on the same seed and the same number of examples per step: seeds differ
more than methods do. The baseline is AdamW at its tuned learning rate with two replicas; with full synchronisation the
number of replicas changes the last bits alone. Seed 0 chose learning rates, so it judges only where no other seed was
run, and then only a loss of more than `WARN` is a measurement.
"""

import argparse
import json
import statistics
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import detonation as dt
from detonation.extend import SCHEMES
from detonation.plan.losses import relative, trained_by

RESULTS = sorted(Path("benchmarks/results").glob("*-frontier*.jsonl"))
BASELINES = {
    "recipes/quick-lm.toml": ("optimizer.lr=0.003", 32),
    "recipes/vit-fashion.toml": ("optimizer.lr=0.002", 128),
}
"""The learning rate of AdamW in full, and the examples per step, by recipe."""
WARN = 0.05
"""Loss on a single seed, relative to the baseline, that is worth a warning."""

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


def judged(
    runs: Mapping[int, Row], base: Mapping[int, float]
) -> tuple[float, tuple[float, float] | None, int]:
    """The relative loss over the seeds that both have, its interval with three seeds or more, and their number."""
    return relative({seed: row["val_loss"] for seed, row in runs.items()}, base)


def percent(cost: float, interval: tuple[float, float] | None) -> str:
    """A relative loss and its interval as tables write them, in percent: +1.4 [+0.9, +1.8]."""
    ends = [f"{100 * end:+.1f}" for end in interval or ()]
    return f"{100 * cost:+.1f}" + f" [{', '.join(ends)}]" * bool(ends)


def scheme_of(sets: Sequence[str]) -> dt.schemes.Scheme | None:
    """The scheme of a run with nothing but settings of scheme and optimizer, else None, as of what is gone."""
    values = dict(each.split("=", 1) for each in sets)
    if any(not key.startswith(("scheme.", "optimizer.")) for key in values):
        return None
    given = {
        key.removeprefix("scheme."): value
        for key, value in values.items()
        if key.startswith("scheme.")
    }
    if given["name"] not in SCHEMES:
        return None
    arguments = {key: _value(value) for key, value in given.items() if key != "name"}
    ahead, made = arguments.pop("lookahead", True), dt.scheme(given["name"], arguments)
    return None if ahead and made.signal == "gradients" and made.round.delay else made


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


Measured = tuple[dt.schemes.Scheme, str, int, dict[int, Row], str, str]
"""A scheme, its recipe and replicas, its runs by seed, their study, and the page that tells it."""


def first_round(found: Mapping[tuple[Any, ...], dict[int, Row]]) -> Iterator[Measured]:
    """The settings of benchmarks/frontier.py that differ from the baseline in scheme and optimizer alone."""
    base = baselines(found)
    for (recipe, replicas, total, sets), runs in found.items():
        scheme = scheme_of(sets)
        if scheme is None or "Muon" in " ".join(sets) or (scheme.name == "full" and replicas != 2):
            continue
        if total == BASELINES[recipe][1] and set(runs) & set(base[recipe]):
            cost, _, seeds = judged(runs, base[recipe])
            if seeds >= 3 or cost > WARN:
                yield scheme, recipe, replicas, runs, "frontier", "research/frontier.md"


def losses(measured: Iterable[Measured]) -> list[Row]:
    """The rows of losses.json: for each setting, optimizer and task the best learning rate."""
    best = dict[str, Row]()
    for scheme, recipe, replicas, runs, study, source in measured:
        size, settings = next(iter(runs.values())), _settings(next(iter(runs.values()))["sets"])
        own = {
            key.removeprefix("optimizer."): value
            for key, value in settings.items()
            if key.startswith("optimizer.")
        }
        row = {
            "scheme": scheme.name,
            "arguments": {key: value for key, value in scheme.arguments.items() if key != "link"},
            "optimizer": trained_by(own["name"], own),
            "settings": {key: value for key, value in own.items() if key != "name"},
            "study": study,
            "recipe": Path(recipe).stem,
            "parameters": size["num_parameters"],
            "steps": size["steps"],
            "replicas": replicas,
            "losses": {str(seed): round(row["val_loss"], 5) for seed, row in sorted(runs.items())},
            "source": source,
        }
        row |= {"curve": curve} if (curve := _curve(runs.values())) else {}
        parts = (
            "scheme",
            "arguments",
            "optimizer",
            "study",
            "recipe",
            "parameters",
            "steps",
            "replicas",
        )
        key = json.dumps([row[part] for part in parts])
        # More seeds say more than a lower loss on fewer.
        if key not in best or _order(row) < _order(best[key]):
            best[key] = row
    return list(best.values())


def _settings(sets: Sequence[str]) -> dict[str, Any]:
    return {key: _value(text) for key, text in (each.split("=", 1) for each in sets if "=" in each)}


def _order(row: Row) -> tuple[int, float]:
    judging = [loss for seed, loss in row["losses"].items() if seed != "0"] or list(
        row["losses"].values()
    )
    return -len(judging), statistics.fmean(judging)


def _curve(runs: Iterable[Row]) -> list[list[float]]:
    """Steps and mean losses where the runs were validated on the way; their end is in `losses`."""
    every = [dict(row["validation"]) for row in runs if "validation" in row]
    steps = sorted(every[0]) if every else []
    return [[step, round(statistics.fmean(each[step] for each in every), 4)] for step in steps]


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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="*", type=Path, default=RESULTS)
    parser.add_argument(
        "--losses", action="store_true", help="print the planner's measurements as JSON"
    )
    args = parser.parse_args()
    found = rows(args.results)
    if args.losses:
        import long_rounds  # these three judge by the functions here
        import paper
        from second_round import second_round

        every = losses(
            [*first_round(found), *second_round(), *paper.planned(), *long_rounds.planned()]
        )
        print("[\n  " + ",\n  ".join(json.dumps(row) for row in every) + "\n]")
        return
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
