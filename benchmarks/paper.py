"""The paper's experiment: loss against seconds at 10, 100, 1000 and 10,000 Mbit/s, for a language and a vision model.

    python benchmarks/paper.py loss [--only T5] [--limit 3]      missing trainings, as two virtual replicas
    sudo python benchmarks/paper.py times --only T5              step times of 2 nodes x 2 ranks in namespaces; and ViT
    python benchmarks/paper.py table > benchmarks/results/2026-11-20-paper.md
    python benchmarks/paper.py figure docs/paper                 writes .svg and .png

The weights after a step do not depend on the link, so each scheme is trained once, and seconds are steps times the
median step time on each link (benchmarks/lab.py); for diloco, the mean over whole rounds. Results are rows of a file;
existing trainings are not run again, and the last of several timings counts.
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import namespaces

RESULTS = Path("benchmarks/results/2026-11-20-paper.jsonl")
LINKS = ("10mbit", "100mbit", "1gbit", "10gbit")
BASELINE = "AdamW, full"
ROUND = 20
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Task:
    """A training task.

    sets: settings of the recipe for training, with `total` examples per step over all replicas; timed: settings for
    timing, with as many examples per step.
    """

    recipe: str
    sets: str
    total: int
    timed: str


TASKS = {
    "T5": Task(
        namespaces.RECIPE,
        "model.hidden_size=256 model.layers=4 model.feed_forward=1024 data.source_length=64 data.target_length=64 "
        "schedule.warmup=20 train.steps=200 train.validate_every=20 train.validation_batches=64",
        total=8,
        timed=namespaces.SETS,
    ),
    "ViT": Task("recipes/vit-fashion.toml", "train.validate_every=25", 128, "train.validate_every=0"),
}
"""The T5 of benchmarks/step_time.py (7.4M parameters), and vit-fashion unchanged (205 thousand)."""

SCHEMES = {
    BASELINE: "scheme.name=full optimizer.name=AdamW",
    "demo 4/64": "scheme.name=demo scheme.topk=4 scheme.decay={} optimizer.name=SignSGD",
    "demo 1/64, sign": "scheme.name=demo scheme.topk=1 scheme.precision=sign scheme.error_feedback=false "
    "scheme.decay=0.95 optimizer.name=SignSGD",
    "random 1/32": "scheme.name=random scheme.rate=0.03125 scheme.decay=0.95 optimizer.name=SignSGD",
    "striding 1/32": "scheme.name=striding scheme.rate=0.03125 scheme.decay=0.95 optimizer.name=SignSGD",
    "diloco": f"scheme.name=diloco scheme.every={ROUND} scheme.outer_lr=1.0 scheme.outer_momentum=0.0 "
    "optimizer.name=AdamW",
}
DECAY = {"T5": 0.999, "ViT": 0.95}
"""For demo in fp32, from the recipes."""

RATES = {
    "T5": {
        BASELINE: (1e-3, 3e-3, 5e-4),
        "demo 4/64": (1e-3, 2e-3, 4e-3),
        "demo 1/64, sign": (2e-3, 4e-3, 1e-3),
        "random 1/32": (2e-2, 1e-2, 4e-2),
        "striding 1/32": (2e-2, 1e-2, 4e-2),
        "diloco": (1e-3, 3e-3, 2e-3),
    },
    "ViT": {
        BASELINE: (1e-3, 2e-3, 5e-4),
        "demo 4/64": (2e-3, 1e-3, 4e-3),
        "demo 1/64, sign": (2e-3, 4e-3, 1e-3),
        "random 1/32": (4e-2, 2e-2, 8e-2),
        "striding 1/32": (4e-2, 2e-2, 8e-2),
        "diloco": (3e-3, 1e-3, 2e-3),
    },
}
"""Three learning rates per method, the most likely first."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One training."""

    task: str
    method: str
    lr: float
    seed: int

    @property
    def sets(self) -> tuple[str, ...]:
        scheme = SCHEMES[self.method].format(DECAY[self.task])
        return (*TASKS[self.task].sets.split(), *scheme.split(), f"optimizer.lr={self.lr}", f"seed={self.seed}")


def grid() -> Iterator[Cell]:
    """Lists all trainings, the most important first."""
    for turn in range(3):
        for task, methods in RATES.items():
            for method, rates in methods.items():
                yield Cell(task, method, rates[turn], seed=0)


def train(cell: Cell) -> Row:
    """Trains two virtual replicas, bit for bit like real ones, and returns a row with validation losses by step."""
    from detonation.cluster.network.simulated import simulate_replicas
    from detonation.cluster.processes.signals import Stop
    from detonation.train.loop.fit import NonFiniteLoss, fit
    from detonation.train.output.metrics import Record
    from detonation.train.verbs.simulate import Simulation, configured, virtual

    task = TASKS[cell.task]
    config = configured(Simulation(Path(task.recipe), cell.sets, 2, task.total))
    began = time.process_time()
    records: list[Record] = []

    def act(communicator: Any) -> None:
        log = records.append if communicator.replica == 0 else lambda record: None
        fit(virtual(config, communicator), 0, config.train.steps, log, Stop())

    try:
        simulate_replicas(act, 2)
    except NonFiniteLoss:
        records = []
    curve = [(r.step, r.val_loss) for r in records if r.val_loss is not None]
    cpu_s = round(time.process_time() - began, 1)
    return {"kind": "loss", **dataclasses.asdict(cell), "validation": curve, "cpu_s": cpu_s}


def rows(kind: str) -> list[Row]:
    found = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    return [row for row in found if row["kind"] == kind]


def keep(row: Row) -> None:
    with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")


def train_missing(limit: int, only: str) -> None:
    done = {Cell(row["task"], row["method"], row["lr"], row["seed"]) for row in rows("loss")}
    missing = [cell for cell in grid() if cell not in done and only in f"{cell.task} {cell.method}"]
    for left, cell in zip(range(len(missing), 0, -1), missing[:limit], strict=False):
        row = train(cell)
        keep(row)
        print(left, cell, row["validation"][-1:], row["cpu_s"], flush=True)


def time_steps(only: str, ranks: int, links: Sequence[str]) -> None:
    """Times all schemes of the tasks whose name contains `only` on each link, in turns, with `ranks` per node."""
    for name, task in TASKS.items():
        if only not in name:
            continue
        subjects = []
        for method in SCHEMES:
            sets = (*task.timed.split(), *SCHEMES[method].format(DECAY[name]).split(), "train.steps=100000")
            subjects.append(namespaces.Subject(method, task.recipe, sets, unit=ROUND if method == "diloco" else 1))

        def record(timing: namespaces.Timing, task: str = name) -> None:
            keep({"kind": "time", "task": task, "ranks": ranks, **dataclasses.asdict(timing)})
            print(task, timing.name, timing.link, f"{timing.median:.3f} s", len(timing.seconds), flush=True)

        namespaces.measure(subjects, {link: turns(link) for link in links}, record, ranks)


def turns(link: str) -> dict[str, int]:
    """Number of timings of each scheme on a link: fewer where a step takes half a minute."""
    count = {"10mbit": 3, "100mbit": 5}.get(link, 7)
    return dict.fromkeys(SCHEMES, count) | {BASELINE: {"10mbit": 3, "100mbit": 3}.get(link, 5), "diloco": 1}


@dataclasses.dataclass(frozen=True)
class Result:
    """The best of `tried` trainings of a method, and its seconds per step on each link and bytes per step."""

    method: str
    lr: float
    tried: int
    validation: Sequence[tuple[int, float]]
    seconds: dict[str, float]
    bytes_sent: float | None

    @property
    def loss(self) -> float:
        return self.validation[-1][1]


def results(task: str, ranks: int = namespaces.RANKS) -> list[Result]:
    found = []
    measured = [row for row in rows("time") if (row["task"], row["ranks"]) == (task, ranks)]
    for method in SCHEMES:
        trained = [row for row in rows("loss") if (row["task"], row["method"]) == (task, method)]
        timed = {row["link"]: row for row in measured if row["name"] == method}
        finite = [row for row in trained if row["validation"]]  # the others diverged
        best = min(finite, key=lambda row: row["validation"][-1][1])
        seconds = {link: statistics.median(row["seconds"]) for link, row in timed.items()}
        sent = next((row["bytes_sent"] for row in timed.values()), None)
        found.append(Result(method, best["lr"], len(trained), best["validation"], seconds, sent))
    return found


def table() -> str:
    """Loss at equal steps, and the step time on each link with its ratio to the baseline."""
    lines = []
    timed = dict.fromkeys((row["task"], row["ranks"]) for row in rows("time"))
    for name, ranks in timed | dict.fromkeys((name, namespaces.RANKS) for name in TASKS):
        found = results(name, ranks)
        full = next(result for result in found if result.method == BASELINE)
        titles = ["scheme", "lr", "of", "loss", "to AdamW", "sent per step", *(f"{link}, s" for link in LINKS)]
        lines += [f"{name}, {namespaces.NODES} nodes x {ranks}:", "", "| " + " | ".join(titles) + " |"]
        lines += ["|" + "---|" * len(titles), *(line(result, full) for result in found), ""]
    return "\n".join(lines)


def line(result: Result, full: Result) -> str:
    cells = [result.method, f"{result.lr:g}", f"{result.tried}", f"{result.loss:.4f}"]
    cells += [
        f"{result.loss / full.loss - 1:+.1%}",
        "not timed" if result.bytes_sent is None else f"{result.bytes_sent / 1e3:,.1f} kB",
    ]
    cells += [seconds(result, full, link) for link in LINKS]
    return "| " + " | ".join(cells) + " |"


def seconds(result: Result, full: Result, link: str) -> str:
    if not {link} <= result.seconds.keys() & full.seconds.keys():
        return "not timed"
    return f"{result.seconds[link]:.3f} ({full.seconds[link] / result.seconds[link]:.1f}x)"


def figure(path: Path) -> None:
    """Validation loss against seconds: one row per task and one panel per link that were timed."""
    import matplotlib
    from matplotlib.figure import Figure

    from detonation.report.figures.colours import LIGHT

    timed = [row for row in rows("time") if row["ranks"] == namespaces.RANKS]
    tasks, links = list(dict.fromkeys(row["task"] for row in timed)), list(dict.fromkeys(row["link"] for row in timed))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "detonation", "font.size": 9}):
        drawing = Figure(figsize=(11, 0.4 + 2.6 * len(tasks)), layout="constrained")
        panels = drawing.subplots(len(tasks), len(links), sharex=True, sharey="row", squeeze=False)
        for row, name in zip(panels, tasks, strict=True):
            found = results(name)
            for axes, link in zip(row, links, strict=True):
                for result, colour in zip(found, LIGHT, strict=True):
                    if link not in result.seconds:
                        continue
                    x = [step * result.seconds[link] for step, _ in result.validation]
                    y = [loss for _, loss in result.validation]
                    axes.plot(x, y, ".-", color=colour, linewidth=1.2, markersize=4, label=result.method)
                axes.set_xscale("log")
                axes.set_title(f"{name}, {link}", fontsize=9)
                axes.grid(alpha=0.2)
                axes.spines[["top", "right"]].set_visible(False)
            row[0].set_ylabel("validation loss (nats)")
        for axes in panels[-1]:
            axes.set_xlabel("seconds in steps")
        handles, labels = panels[0][0].get_legend_handles_labels()
        drawing.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
        drawing.savefig(path.with_suffix(".svg"), metadata={"Date": None, "Creator": None})
        drawing.savefig(path.with_suffix(".png"), dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["loss", "times", "table", "figure"])
    parser.add_argument("path", nargs="?", type=Path, default=Path("docs/paper"), help="of the figure")
    parser.add_argument("--limit", type=int, default=10**9, help="stop after so many trainings")
    parser.add_argument("--only", default="", help="tasks (and, for trainings, methods) that contain this text")
    parser.add_argument("--ranks", type=int, default=namespaces.RANKS, help="per node, for timing")
    parser.add_argument("--links", nargs="+", default=LINKS, choices=LINKS, help="for timing")
    args = parser.parse_args()
    if args.action == "loss":
        train_missing(args.limit, args.only)
    elif args.action == "times":
        time_steps(args.only, args.ranks, args.links)
    elif args.action == "table":
        print(table())
    else:
        figure(args.path)


if __name__ == "__main__":
    main()
