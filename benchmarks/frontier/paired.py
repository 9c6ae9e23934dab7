"""Paired 95 % intervals: the loss of each setting of the frontier against AdamW with full synchronisation.

    python -m benchmarks.frontier.paired    one line per setting and number of replicas with three seeds or more

A run is paired with the run of the baseline on the same seed and the same number of examples per step: seeds differ
more than methods do. The baseline is AdamW at its tuned learning rate with two replicas; with full synchronisation the
number of replicas changes the last bits alone. Seed 0 chose learning rates, so it judges only where no other seed was
run, and then only a loss of more than `WARN` is a measurement.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.compare.paired import Measured, judged, percent, scheme_of
from benchmarks.compare.rows import Row

RESULTS = sorted(Path("benchmarks/results").glob("*-frontier*.jsonl"))
BASELINES = {
    "recipes/quick-lm.toml": ("optimizer.lr=0.003", 32),
    "recipes/vit-fashion.toml": ("optimizer.lr=0.002", 128),
}
"""The learning rate of AdamW in full, and the examples per step, by recipe."""
WARN = 0.05
"""Loss on a single seed, relative to the baseline, that is worth a warning."""


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


def first_round(found: Mapping[tuple[Any, ...], dict[int, Row]]) -> Iterator[Measured]:
    """The settings of benchmarks/frontier that differ from the baseline in scheme and optimizer alone."""
    base = baselines(found)
    for (recipe, replicas, total, sets), runs in found.items():
        scheme = scheme_of(sets)
        if scheme is None or "Muon" in " ".join(sets) or (scheme.name == "full" and replicas != 2):
            continue
        if total == BASELINES[recipe][1] and set(runs) & set(base[recipe]):
            cost, _, seeds = judged(runs, base[recipe])
            if seeds >= 3 or cost > WARN:
                yield scheme, recipe, replicas, runs, "frontier", "research/frontier.md"


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
    args = parser.parse_args()
    print("\n".join(table(rows(args.results))))


if __name__ == "__main__":
    main()
