"""The planner's measurements of losses: the rows of frontier, second round, paper and long rounds.

python -m benchmarks.plan.losses > src/detonation/plan/losses.json
"""

import argparse
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.compare.paired import Measured, value_of
from benchmarks.compare.rows import Row
from benchmarks.frontier import paired
from benchmarks.long_rounds import experiment as long_rounds
from benchmarks.paper import experiment as paper
from benchmarks.second_round.experiment import second_round

from detonation.plan.losses import TWO_RATES, Loss, trained_by

AS_RECIPE = {"optimizer.ratio": TWO_RATES}
"""Settings of the optimizers of benchmarks/size_law, as the recipe's own optimizers name them."""
NAMES = {
    f"benchmarks.size_law.optimizers:{name.lower()}": name for name in ("AdamW", "Muon", "SignSGD")
}


def losses(measured: Iterable[Measured]) -> list[Row]:
    """The rows of losses.json: for each setting, optimizer and task the best learning rate."""
    best = dict[str, Row]()
    for scheme, recipe, replicas, runs, study, source in measured:
        size, settings = next(iter(runs.values())), _settings(next(iter(runs.values()))["sets"])
        own = {
            AS_RECIPE.get(key, key.removeprefix("optimizer.")): value
            for key, value in settings.items()
            if key.startswith("optimizer.")
        }
        own["name"] = NAMES.get(own["name"], own["name"])
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
        key = json.dumps([*(row[part] for part in parts), Loss(**row).has_two_rates])
        # More seeds say more than a lower loss on fewer.
        if key not in best or _order(row) < _order(best[key]):
            best[key] = row
    return list(best.values())


def _settings(sets: Sequence[str]) -> dict[str, Any]:
    return {
        key: value_of(text) for key, text in (each.split("=", 1) for each in sets if "=" in each)
    }


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    first = paired.first_round(paired.rows(paired.RESULTS))
    every = losses([*first, *second_round(), *paper.planned(), *long_rounds.planned()])
    print("[\n  " + ",\n  ".join(json.dumps(row) for row in every) + "\n]")


if __name__ == "__main__":
    main()
