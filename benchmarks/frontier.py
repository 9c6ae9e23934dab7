"""Loss against bytes: which scheme reaches which validation loss, for how many bytes a parameter and step.

    python benchmarks/frontier.py run [--only TEXT] [--part 0/2] [--limit 3]     runs what is missing, row by row
    python benchmarks/frontier.py table > benchmarks/results/2026-11-20-frontier.md
    python benchmarks/frontier.py figure docs/frontier                           writes .svg and .png

The grid is the data below, in order of importance; each run is one simulated training (`detonation simulate`), at the
same examples a step for any number of replicas, and one row of --results. Rows that are there are not run again, so it
can be stopped and continued. Seed 0 chose the rates; seeds 1, 2 and 3 judge them.
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path("benchmarks/results/2026-11-20-frontier.jsonl")
QUICK, VIT = "recipes/quick-lm.toml", "recipes/vit-fashion.toml"
TOTAL = {QUICK: 32, VIT: 128}
"""Examples a step over all replicas: those of the recipe at 2 replicas x 2 shards. With more replicas one each."""

NOISE = 0.05
"""What a run differs by from its twin whose last bits differ: docs/log.md."""

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run. `study` is the question that it belongs to, `method` a name for tables."""

    study: str
    method: str
    recipe: str
    sets: tuple[str, ...]
    replicas: int
    total: int
    seed: int

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.recipe, tuple(sorted(self.sets)), self.replicas, self.total, self.seed)


def adamw(lr: float) -> str:
    return f"scheme.name=full optimizer.name=AdamW optimizer.lr={lr}"


def dense(lr: float, decay: float = 0.999) -> str:
    """demo with fp32 values."""
    return f"scheme.name=demo scheme.topk=4 scheme.decay={decay} optimizer.name=SignSGD optimizer.lr={lr}"


def signs(topk: int, chunk: int, decay: float, lr: float) -> str:
    """demo with one bit a value."""
    codec = f"scheme.topk={topk} scheme.chunk={chunk} scheme.precision=sign scheme.error=drop"
    return f"scheme.name=demo {codec} scheme.decay={decay} optimizer.name=SignSGD optimizer.lr={lr}"


def votes(period: int, decay: float, lr: float) -> str:
    """random_sign at rate 1 / period."""
    scheme = f"scheme.name=random_sign scheme.rate={1 / period} scheme.decay={decay}"
    return f"{scheme} optimizer.name=SignSGD optimizer.lr={lr}"


def muon(lr: float, scheme: str = "full") -> str:
    """Muon in full, or inside the rounds of muloco."""
    return f"scheme.name={scheme} optimizer.name=Muon optimizer.lr={lr}"


def muloco(every: int, precision: str) -> str:
    """Rounds of Muon in few bits, at the outer settings and rate of recipes/quick-lm.toml."""
    return f"{muon(1e-2, 'muloco')} scheme.every={every} scheme.precision={precision} {PLAIN_OUTER}"


def averaged(scheme: str, also: str = "") -> str:
    """Rounds of 20 steps of AdamW, as recipes/quick-lm.toml has them."""
    return f"scheme.name={scheme} scheme.every=20 {also} optimizer.name=AdamW optimizer.lr=3e-3"


PLAIN_OUTER = "scheme.outer_lr=1.0 scheme.outer_momentum=0.0"

CHOSEN = {
    "AdamW, full": adamw(3e-3),
    "demo 4/64, fp32": dense(4e-3),
    "demo 4/64, sign": signs(4, 64, 0.999, 4e-3),
    "demo 1/64, sign": signs(1, 64, 0.95, 4e-3),
    "demo 1/128, sign": signs(1, 128, 0.95, 4e-3),
    "random_sign 1/8": votes(8, 0.9, 2e-2),
    "random_sign 1/16": votes(16, 0.9, 4e-2),
    "random_sign 1/4": votes(4, 0.9, 1e-2),
    "Muon, full": muon(1e-2),
    "muloco 60, 4bit": muloco(60, "4bit"),
    "muloco 30, 2bit": muloco(30, "2bit"),
    "sparseloco 20": averaged("sparseloco"),
    "demo_diloco 20": averaged("demo_diloco", PLAIN_OUTER),
    "streaming_diloco 20": averaged("streaming_diloco", f"scheme.delay=2 {PLAIN_OUTER}"),
}
"""quick-lm at 2 replicas, at the rates that seed 0 chose."""

CORE = ("random_sign 1/8", "demo 1/64, sign", "demo 1/128, sign", "AdamW, full", "demo 4/64, fp32")

AVERAGED = ("sparseloco 20", "demo_diloco 20", "streaming_diloco 20")

ROUNDS = ("muloco 60, 4bit", "muloco 30, 2bit", "Muon, full")

VISION = {
    "AdamW, full": adamw(1e-3),
    "demo 1/64, sign": signs(1, 64, 0.95, 4e-3),
    "random_sign 1/8": votes(8, 0.9, 2e-2),
}
"""vit-fashion at 2 replicas."""

VISION_TUNING = {
    "AdamW, full": [adamw(5e-4), adamw(2e-3)],
    "demo 1/64, sign": [signs(1, 64, 0.95, lr) for lr in (1e-3, 2e-3, 4e-3, 8e-3)],
    "random_sign 1/8": [votes(8, 0.9, lr) for lr in (2.5e-3, 5e-3, 1e-2, 2e-2)],
}
"""Of vit-fashion on seed 0; AdamW's other rates are in docs/log.md."""

VISION_OF_EIGHT = [
    *(("random_sign 1/8", votes(8, 0.9, lr)) for lr in (1e-2, 2e-2, 4e-2)),
    ("demo 1/64, sign", signs(1, 64, 0.95, 4e-3)),
    *(("demo 4/64, sign", signs(4, 64, 0.95, lr)) for lr in (2e-3, 4e-3)),
]
"""Of vit-fashion with 8 replicas, on seed 0."""

LATE = "scheme.delay=1 scheme.lookahead={}"

LARGER = "model.hidden_size=256 model.layers=4 model.feed_forward=1024"
"""quick-lm with 7 times as many parameters."""


def grid() -> Iterator[Cell]:
    """All runs, the most important first."""
    for seed in (1, 2):
        for method in CORE:
            yield chosen(method, seed)
    for seed in (1, 2, 3):
        for method in ROUNDS:
            yield chosen(method, seed)
    for seed in (1, 2, 3):
        for method in ("random_sign 1/8", "AdamW, full"):
            yield chosen(method, seed, "replicas", replicas=8)
    for method in ("random_sign 1/8", "AdamW, full"):
        yield chosen(method, 1, "replicas", replicas=32)
    yield chosen("demo 1/64, sign", 1, "replicas", replicas=8)
    for setting in (
        signs(1, 64, 0.95, 4e-3) + " scheme.combine=senders",
        signs(1, 64, 0.99, 4e-3),
        signs(1, 64, 0.95, 2e-3),
    ):
        yield cell("replicas", "demo 1/64, sign", QUICK, setting, 8, seed=1)
    for method in ("demo 4/64, sign", "demo 1/128, sign", "demo 4/64, fp32", "muloco 30, 2bit"):
        yield chosen(method, 1, "replicas", replicas=8)
    for seed in (1, 2, 3):
        for method, sets in VISION.items():
            yield cell("vision", method, VIT, sets, 2, seed)
        yield cell("vision", "demo 1/64, sign", VIT, signs(1, 64, 0.95, 2e-3), 2, seed)
    for method, settings in VISION_TUNING.items():
        for sets in settings:
            yield cell("tuning", method, VIT, sets, 2, seed=0)
    for method, sets in VISION_OF_EIGHT:
        yield cell("tuning", method, VIT, sets, 8, seed=0)
    for seed in (1, 2, 3):
        for replicas, lr in ((2, 5e-3), (8, 5e-3), (8, 2e-2)):
            yield cell("vision", "random_sign 1/8", VIT, votes(8, 0.9, lr), replicas, seed)
        yield cell("vision", "AdamW, full", VIT, VISION["AdamW, full"], 8, seed)
        yield chosen("demo 1/64, sign", seed, "replicas", replicas=8)
        for method in AVERAGED:
            yield chosen(method, seed)
    for seed in (4, 5):  # as the first three lie far apart
        for method in ("AdamW, full", "demo 1/64, sign"):
            yield cell("vision", method, VIT, VISION[method], 2, seed)
        yield cell("vision", "random_sign 1/8", VIT, votes(8, 0.9, 2e-2), 8, seed)
    for seed in (1, 2, 3, 4, 5):
        yield cell("vision", "AdamW, full", VIT, adamw(2e-3), 2, seed)
    for method in CORE[:2]:
        yield chosen(method, 1, "late", LATE.format("true"))
    for method in CORE:
        yield chosen(method, 3)
    for method in ("AdamW, full", "demo 1/64, sign", "random_sign 1/8"):
        yield chosen(method, 1, "replicas", replicas=32)
    yield from tuning()
    for method in CHOSEN:
        yield chosen(method, 1)
    for method in CORE[:2]:
        yield chosen(method, 1, "late", LATE.format("false"))
    for seed in (1, 2, 3):
        for method in ("demo 1/64, sign", "random_sign 1/8", "demo 4/64, sign"):
            yield chosen(method, seed, "replicas", replicas=4)
    for seed in (1, 2, 3):
        yield chosen("random_sign 1/16", seed, "replicas", replicas=8)
    for method in ("demo 1/64, sign", "AdamW, full", "random_sign 1/8", "demo 4/64, sign"):
        yield chosen(method, 1, "batch", replicas=8, total=128)  # 16 a replica, as with two
    for method in ("random_sign 1/8", "AdamW, full"):
        yield chosen(method, 1, "replicas", replicas=64)
    for seed in (2, 3):
        yield chosen("random_sign 1/8", seed, "replicas", replicas=32)
    for seed in (2, 3):
        for method in ("demo 4/64, sign", "random_sign 1/16"):
            yield chosen(method, seed)
    for method in ("AdamW, full", "random_sign 1/8", "demo 1/64, sign"):
        yield chosen(method, 1, "long", "train.steps=1200")
    yield chosen("random_sign 1/8", 1, "long", "train.steps=1200", replicas=8)
    for method in ("AdamW, full", "demo 1/64, sign", "random_sign 1/8"):
        yield chosen(method, 1, "larger", LARGER)
    for method in ("random_sign 1/8", "muloco 30, 2bit"):
        yield chosen(method, 1, "larger", LARGER, replicas=8)


def chosen(method: str, seed: int, study: str = "bytes", also: str = "", replicas: int = 2, total: int = 0) -> Cell:
    return cell(study, method, QUICK, f"{CHOSEN[method]} {also}", replicas, seed, total)


def tuning() -> Iterator[Cell]:
    """Rates and decays on seed 0 at 2 replicas; those of AdamW and of demo in fp32 are in docs/log.md."""
    for method, settings in {
        "random_sign 1/8": [votes(8, 0.9, 4e-2), votes(8, 0.95, 2e-2), votes(8, 0.95, 1e-2), votes(8, 0.9, 2e-2)],
        "random_sign 1/4": [votes(4, 0.8, 2e-2), votes(4, 0.9, 1e-2), votes(4, 0.95, 1e-2)],
        "demo 1/128, sign": [
            signs(1, 128, 0.95, 4e-3),
            signs(1, 128, 0.95, 8e-3),
            signs(1, 128, 0.9, 4e-3),
            signs(1, 128, 0.9, 8e-3),
        ],
        "random_sign 1/16": [votes(16, 0.95, 4e-2), votes(16, 0.9, 4e-2)],
    }.items():
        for sets in settings:
            yield cell("tuning", method, QUICK, sets, 2, seed=0)


def cell(study: str, method: str, recipe: str, sets: str, replicas: int, seed: int, total: int = 0) -> Cell:
    return Cell(study, method, recipe, tuple(sets.split()), replicas, total or max(TOTAL[recipe], replicas), seed)


def run(cell: Cell) -> Row:
    """The row of one run; `val_loss` None where the loss was lost."""
    from detonation.cluster.network.simulated import play
    from detonation.train.loop.fit import NonFiniteLoss
    from detonation.train.verbs.simulate import Simulation, configured, train_virtual, virtual

    sets = (*cell.sets, "train.validate_every=0", f"seed={cell.seed}")
    config = configured(Simulation(Path(cell.recipe), sets, cell.replicas, cell.total))
    began = time.process_time()
    try:
        summary = play(lambda wire: train_virtual(virtual(config, wire)), cell.replicas)[0]
    except NonFiniteLoss:
        summary = {"val_loss": None}
    kept = (
        "val_loss",
        "val_accuracy",
        "train_loss",
        "num_parameters",
        "steps",
        "bytes_sent_per_step",
        "replicas_equal",
    )
    row = {key: summary[key] for key in kept if key in summary}
    return {**dataclasses.asdict(cell), **row, "cpu_s": round(time.process_time() - began, 1)}


def run_missing(path: Path, only: str, part: str, limit: int) -> None:
    number, parts = map(int, part.split("/"))
    wanted = {c.key: c for c in grid() if only in f"{c.study} {c.method} {c.recipe} {' '.join(c.sets)} R={c.replicas}"}
    missing = [c for i, c in enumerate(wanted.values()) if i % parts == number and c.key not in rows(path)]
    for left, cell in zip(range(len(missing), 0, -1), missing[:limit], strict=False):
        row = run(cell)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(left, cell.study, " ".join(cell.sets), f"R={cell.replicas} seed={cell.seed}", row["val_loss"], flush=True)


def rows(path: Path) -> dict[tuple[Any, ...], Row]:
    """What was run already, by key."""
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {(r["recipe"], tuple(sorted(r["sets"])), r["replicas"], r["total"], r["seed"]): r for r in found}


def groups(found: Sequence[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows that differ in their seed alone, by `keys`, in the order of the grid."""
    together = defaultdict(list)
    for row in found:
        together[tuple(tuple(row[key]) if key == "sets" else row[key] for key in keys)].append(row)
    return dict(together)


def table(found: Sequence[Row]) -> str:
    """Every setting as one line: mean, smallest and largest validation loss over its seeds, and bytes."""
    lines = [
        "| study | method | recipe | settings | replicas | examples a step | seeds | val loss | min | max | accuracy "
        "| bytes a parameter and step |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (study, method, recipe, sets, replicas, total), same in groups(
        found, "study", "method", "recipe", "sets", "replicas", "total"
    ).items():
        said = " ".join(s.split(".", 1)[1] for s in sets)
        seeds = " ".join(str(row["seed"]) for row in same)
        cells = [study, method, Path(recipe).stem, said, str(replicas), str(total), seeds, *measured(same)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def measured(same: Sequence[Row]) -> list[str]:
    """Loss, its smallest and largest, accuracy and bytes of one setting."""
    losses = [row["val_loss"] for row in same]
    if None in losses:
        return ["diverged", "", "", "", ""]
    accuracies = [row["val_accuracy"] for row in same if "val_accuracy" in row]
    accuracy = f"{statistics.fmean(accuracies):.4f}" if accuracies else ""
    loss = [f"{f(losses):.4f}" for f in (statistics.fmean, min, max)]
    return [*loss, accuracy, f"{per_parameter(same[0]):.4f}"]


def per_parameter(row: Row) -> float:
    return float(row["bytes_sent_per_step"] / row["num_parameters"])


def figure(found: Sequence[Row], path: Path) -> None:
    """Loss against bytes on quick-lm at 2 replicas: filled points judge (mean, best to worst), hollow ones tuned.

    The grey band is what single runs differ by from their twins (docs/log.md), around AdamW with full synchronisation.
    """
    import matplotlib
    from matplotlib.figure import Figure

    from detonation.report.figures.colours import LIGHT

    asked = [row for row in found if row["study"] in ("bytes", "tuning") and row["recipe"] == QUICK]
    shown = [row for row in asked if row["val_loss"]]
    methods = list(dict.fromkeys(row["method"] for row in shown))
    full = statistics.fmean(row["val_loss"] for row in shown if row["method"] == "AdamW, full")
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "detonation", "font.size": 10}):
        drawing = Figure(figsize=(8.6, 4.2), layout="constrained")
        axes = drawing.add_subplot()
        axes.axhspan(full - NOISE / 2, full + NOISE / 2, color="0.92", zorder=0)
        for (method, study, _), same in groups(shown, "method", "study", "sets").items():
            losses = [row["val_loss"] for row in same]
            mean, x, colour = statistics.fmean(losses), per_parameter(same[0]), LIGHT[methods.index(method) % 6]
            bar = [[mean - min(losses)], [max(losses) - mean]]
            face = colour if study == "bytes" else "white"
            axes.errorbar(
                [x],
                [mean],
                yerr=bar,
                fmt="os^"[methods.index(method) // 6],
                color=colour,
                markerfacecolor=face,
                capsize=3,
                markersize=7,
                label=method if study == "bytes" else None,
            )
        drawing.legend(frameon=False, loc="outside right upper")
        axes.set_xscale("log")
        axes.set_xlim(0.001, 12)
        axes.margins(y=0.12)
        axes.set_xlabel("bytes a parameter and step, sent by one of 2 replicas")
        axes.set_ylabel("validation loss (nats a byte)")
        axes.spines[["top", "right"]].set_visible(False)
        drawing.savefig(path.with_suffix(".svg"), metadata={"Date": None, "Creator": None})
        drawing.savefig(path.with_suffix(".png"), dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "table", "figure"])
    parser.add_argument("path", nargs="?", type=Path, default=Path("docs/frontier"), help="of the figure")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--only", default="", help="runs whose study, method, settings or R=number hold this text")
    parser.add_argument("--part", default="0/1", help="every n-th of them, to share them between processes")
    parser.add_argument("--limit", type=int, default=10**9, help="stop after so many")
    args = parser.parse_args()
    if args.action == "run":
        run_missing(args.results, args.only, args.part, args.limit)
        return
    done, wanted = rows(args.results), {cell.key: cell for cell in grid()}
    found = [{**done[key], **dataclasses.asdict(cell)} for key, cell in wanted.items() if key in done]
    if args.action == "table":
        print(table(found))
    else:
        figure(found, args.path)


if __name__ == "__main__":
    main()
