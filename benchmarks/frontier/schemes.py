"""Trains a recipe once for each scheme, setting and seed, and prints a table.

    python -m benchmarks.frontier.schemes recipes/quick-lm.toml --schemes full demo --seeds 0 1 2
    python -m benchmarks.frontier.schemes recipes/quick-lm.toml --schemes demo \\
        --grid optimizer.lr=1e-3,2e-3 scheme.decay=0.95

Runs that are in --out are not run again. Each row is a mean over the seeds, with the spread (max - min); "equal" is yes
where the replicas ended bitwise equal in all runs.
"""

import argparse
import itertools
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--schemes", nargs="+", required=True)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument(
        "--grid", nargs="*", default=[], metavar="path=value,value", help="settings to cross"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/schemes"))
    args = parser.parse_args()

    choices = [grid.partition("=") for grid in args.grid]
    combinations = itertools.product(
        *[[f"{path}={value}" for value in values.split(",")] for path, _, values in choices]
    )
    rows = []
    for scheme, combination in itertools.product(args.schemes, map(list, combinations)):
        settings = [f"scheme.name={scheme}", *combination]
        runs = [summary(args.recipe, args.out, [*settings, f"seed={seed}"]) for seed in args.seeds]
        rows.append(row(scheme, combination, [run for run in runs if run]))
        print(rows[-1], file=sys.stderr, flush=True)
    print(
        "| scheme | settings | val loss | spread | accuracy | KB per step | reduction | seconds | ms per step | equal |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    print("\n".join(rows))


def summary(recipe: Path, out: Path, settings: list[str]) -> dict[str, Any] | None:
    """Returns summary.json of one run; None where it failed, as with a learning rate that makes the loss non-finite."""
    directory = out / recipe.stem / re.sub(r"[^\w.=-]+", "_", ",".join(settings))
    if not (directory / "summary.json").exists():
        flags = [flag for setting in settings for flag in ("--set", setting)]
        command = [
            sys.executable,
            "-m",
            "detonation",
            "train",
            str(recipe),
            *flags,
            "--out",
            str(directory),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(f"{' '.join(settings)}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
            return None
    return json.loads((directory / "summary.json").read_text())


def row(scheme: str, settings: list[str], runs: list[dict[str, Any]]) -> str:
    text = ", ".join(settings) or "as in the recipe"
    if not runs:
        return f"| {scheme} | {text} | diverged | | | | | | |"
    losses = [run["val_loss"] for run in runs]
    accuracies = [run["val_accuracy"] for run in runs if run.get("val_accuracy") is not None]
    mean = {
        key: statistics.fmean(run[key] for run in runs)
        for key in ("bytes_sent_per_step", "seconds", "steps")
    }
    reduction = runs[0]["reduction"]
    cells = [
        scheme, text, f"{statistics.fmean(losses):.4f}", f"{max(losses) - min(losses):.4f}",
        f"{statistics.fmean(accuracies):.4f}" if accuracies else "",
        f"{mean['bytes_sent_per_step'] / 1e3:,.1f}", f"{reduction:.1f}" if reduction else "-",
        f"{mean['seconds']:.0f}", f"{1e3 * statistics.median(r['median_step_seconds'] for r in runs):.0f}",
        "yes" if all(run["replicas_equal"] for run in runs) else "no",
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
