"""The paper's experiment: loss against seconds at 10, 100, 1000 and 10,000 Mbit/s, for a language and a vision model.

    python -m benchmarks.paper loss [--only WORDS] [--limit 3]   missing trainings, as two virtual replicas
    sudo python -m benchmarks.paper times --only T5              step times of 2 nodes x 2 ranks in namespaces; and ViT
    python -m benchmarks.paper claims [NUMBER]                   each claim with its table and its verdict
    python -m benchmarks.paper figure docs/paper                 writes .svg and .png
    python -m benchmarks.paper gain docs/gain                    the same of the seconds of a step alone

The weights after a step do not depend on the link. So each scheme is trained once, and seconds are
steps times the median step time on each link (benchmarks/plan/namespaces.py); for diloco, the mean
over whole rounds. Every method is tuned with the same budget and judged on three seeds that did not
tune it (benchmarks/compare/tuning.py). Results are rows of two files; existing trainings are not
run again, and the last of several timings counts.
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.compare.drawing import drawn
from benchmarks.compare.paired import Measured
from benchmarks.compare.queue import made_by
from benchmarks.compare.rows import Cell, Row, finished, rows
from benchmarks.compare.tuning import Method, Rows, measured, run_missing
from benchmarks.plan import namespaces

TIMES = Path("benchmarks/results/2026-11-20-paper.jsonl")
LOSSES = Path("benchmarks/results/2026-11-22-paper.jsonl")
LINKS = ("10mbit", "100mbit", "1gbit", "10gbit")
BASELINE = "AdamW, full"
ROUND = 20


@dataclasses.dataclass(frozen=True)
class Task:
    """A training task.

    sets: settings of the recipe for training, with `total` examples per step over all replicas; timed: settings for
    timing, with as many examples per step; decay: of the memory of `demo` with fp32 values;
    parameters, steps: of the training.
    """

    recipe: str
    sets: str
    total: int
    timed: str
    decay: float
    parameters: int
    steps: int


TASKS = {
    "T5": Task(
        namespaces.RECIPE,
        "model.hidden_size=256 model.layers=4 model.feed_forward=1024 data.source_length=64 data.target_length=64 "
        "schedule.warmup=20 train.steps=200 train.validate_every=25 train.validation_batches=48 "
        "train.bleu_sentences=64",
        total=8,
        timed=namespaces.SETS,
        decay=0.999,
        parameters=7_444_224,
        steps=200,
    ),
    "ViT": Task(
        "recipes/vit-fashion.toml",
        "train.validate_every=25",
        total=128,
        timed="train.validate_every=0",
        decay=0.95,
        parameters=205_066,
        steps=300,
    ),
}
"""The T5 of benchmarks/step/step_time.py (7.4M parameters), and vit-fashion unchanged (205 thousand)."""
DECODER = "LM"
JUDGED = TASKS | {
    DECODER: Task(
        "recipes/quick-lm.toml",
        "data.source=sotu train.validation_batches=1000000 train.validate_every=300",
        total=16,
        timed="",
        decay=0.999,
        parameters=590_976,
        steps=300,
    )
}
"""All tasks: also a decoder-only language model, for the claim that names one. It is not timed."""

ADAMW = SIGN = (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
SPARSE = (5e-3, 1e-2, 2e-2, 4e-2, 8e-2)
SGD = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0, 10.0, 30.0, 100.0)
ONE_BIT = "scheme.precision=sign scheme.error_feedback=false scheme.decay=0.95"
DEMO = "scheme.name=demo scheme.topk=4 scheme.chunk=64"
VALUES = f"{DEMO} scheme.precision=fp32 scheme.decay={{}}"
SCHEMES = {
    BASELINE: ("scheme.name=full optimizer.name=AdamW", ADAMW),
    "demo 4/64": (f"{VALUES} optimizer.name=SignSGD", SIGN),
    "demo 1/64, sign": (f"scheme.name=demo scheme.topk=1 {ONE_BIT} optimizer.name=SignSGD", SIGN),
    "random 1/32": (
        "scheme.name=random scheme.rate=0.03125 scheme.decay=0.95 optimizer.name=SignSGD",
        SPARSE,
    ),
    "striding 1/32": (
        "scheme.name=striding scheme.rate=0.03125 scheme.decay=0.95 optimizer.name=SignSGD",
        SPARSE,
    ),
    "diloco": (
        f"scheme.name=diloco scheme.every={ROUND} scheme.outer_lr=1.0 scheme.outer_momentum=0.0 optimizer.name=AdamW",
        ADAMW,
    ),
}
"""The schemes that are trained and timed: their settings, and the learning rates that are tried."""
UNTIMED = {
    "loco 4bit, AdamW": ("scheme.name=loco scheme.precision=4bit optimizer.name=AdamW", ADAMW),
    "random 1/4": (
        "scheme.name=random scheme.rate=0.25 scheme.decay=0.9 optimizer.name=SignSGD",
        SIGN,
    ),
    "AdamW 0, 0.95 4/64": (f"{VALUES} optimizer.name=AdamW optimizer.betas=[0.0,0.95]", ADAMW),
    "decoupled AdamW 4/64": (
        "scheme.name=decoupled_adamw scheme.topk=4 optimizer.name=AdamW",
        ADAMW,
    ),
    "sign before, 4/64": (f"{DEMO} {ONE_BIT} optimizer.name=SGD", SGD),
    "sign before and after, 4/64": (f"{DEMO} {ONE_BIT} optimizer.name=SignSGD", SIGN),
    "no sign, 4/64": (f"{VALUES} optimizer.name=SGD", SGD),
    "demo 4/64, bf16": (
        f"{DEMO} scheme.precision=bf16 scheme.error_feedback=true scheme.decay={{}} optimizer.name=SignSGD",
        SIGN,
    ),
    "random 1/32, bf16": (
        "scheme.name=random scheme.rate=0.03125 scheme.precision=bf16 scheme.decay=0.95 optimizer.name=SignSGD",
        SPARSE,
    ),
}
RIVALS = ("random 1/32", "random 1/4", "striding 1/32", "diloco")
"""The schemes that the paper compares with `demo` for each kind of model."""
CHUNKS = {
    "ViT": [(topk, chunk) for chunk in (32, 64, 128) for topk in (1, 4, 16)],
    "T5": [(4, 32), (1, 32), (16, 32), (4, 64), (4, 128)],
}
"""Pairs of top-k and chunk: all on the cheap task, and those that differ in one from the paper's best on the other."""


def methods() -> Iterator[Method]:
    """Lists the methods, the most important first. The study is the task."""
    for task in TASKS:
        yield from (method(task, name, *chosen) for name, chosen in SCHEMES.items())
    for task, pairs in CHUNKS.items():
        for topk, chunk in pairs:
            codec = f"scheme.topk={topk} scheme.chunk={chunk} scheme.precision=fp32"
            sets = f"scheme.name=demo {codec} scheme.decay={{}} optimizer.name=SignSGD"
            yield method(task, f"top-k {topk} of {chunk}", sets, SIGN)
    for task in reversed(TASKS):
        yield from (method(task, name, *chosen) for name, chosen in UNTIMED.items())
    for name in (BASELINE, "demo 4/64", *RIVALS):
        yield method(DECODER, name, *(SCHEMES | UNTIMED)[name])


def method(task: str, name: str, sets: str, rates: tuple[float, ...]) -> Method:
    chosen = JUDGED[task]
    return Method(
        task, name, chosen.recipe, f"{chosen.sets} {sets.format(chosen.decay)}", rates, chosen.total
    )


def train(cell: Cell) -> Row:
    """Trains two virtual replicas, bit for bit like real ones, and returns a row with validation losses by step."""
    from detonation.cluster.processes.signals import Stop
    from detonation.train.loop.fit import fit
    from detonation.train.output.metrics import Record
    from detonation.train.verbs.simulate import Simulation, configured, virtual

    config = configured(
        Simulation(Path(cell.recipe), (*cell.sets, f"seed={cell.seed}"), cell.replicas, cell.total)
    )
    made = made_by()  # before the run: the commit that it began with
    began = time.process_time()
    records: list[Record] = []

    def act(communicator: Any) -> None:
        log = records.append if communicator.replica == 0 else lambda record: None
        fit(virtual(config, communicator), 0, config.train.steps, log, Stop())

    if finished(act, cell.replicas) is None:
        records = []
    curve = [(r.step, r.val_loss) for r in records if r.val_loss is not None]
    last = {
        f"val_{name}": getattr(records[-1], f"val_{name}", None) if records else None
        for name in MEASURES
    }
    cpu_s = round(time.process_time() - began, 1)
    return {**dataclasses.asdict(cell), **last, "validation": curve, "cpu_s": cpu_s, **made}


MEASURES = ("loss", "accuracy", "bleu")


def planned(path: Path = LOSSES) -> Iterator[Measured]:
    """What the planner learns: of the timed tasks, since its language models have rows of their own."""
    done = rows(path)
    for each in (method for method in methods() if method.study in TASKS):
        task = TASKS[each.study]
        for scheme, recipe, replicas, runs, study, source in measured(each, done):
            size = {"num_parameters": task.parameters, "steps": task.steps}
            yield (
                scheme,
                recipe,
                replicas,
                {seed: row | size for seed, row in runs.items()},
                study,
                source,
            )


def timings() -> list[Row]:
    found = [json.loads(line) for line in TIMES.read_text().splitlines()] if TIMES.exists() else []
    return [row for row in found if row["kind"] == "time"]


def time_steps(only: str, ranks: int, links: Sequence[str]) -> None:
    """Times all schemes of the tasks whose name contains `only` on each link, in turns, with `ranks` per node."""
    for name, task in TASKS.items():
        if only not in name:
            continue
        subjects = []
        for scheme, (settings, _) in SCHEMES.items():
            sets = (*task.timed.split(), *settings.format(task.decay).split(), "train.steps=100000")
            subjects.append(
                namespaces.Subject(
                    scheme, task.recipe, sets, unit=ROUND if scheme == "diloco" else 1
                )
            )

        def record(timing: namespaces.Timing, task: str = name) -> None:
            row = {"kind": "time", "task": task, "ranks": ranks, **dataclasses.asdict(timing)}
            with TIMES.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(
                task,
                timing.name,
                timing.link,
                f"{timing.median:.3f} s",
                len(timing.seconds),
                flush=True,
            )

        namespaces.measure(subjects, {link: turns(link) for link in links}, record, ranks)


def turns(link: str) -> dict[str, int]:
    """Number of timings of each scheme on a link: fewer where a step takes half a minute."""
    count = {"10mbit": 3, "100mbit": 5}.get(link, 7)
    return dict.fromkeys(SCHEMES, count) | {
        BASELINE: {"10mbit": 3, "100mbit": 3}.get(link, 5),
        "diloco": 1,
    }


def step_seconds(task: str, link: str, ranks: int = namespaces.RANKS) -> dict[str, float]:
    """The median seconds of a step on `link`, by scheme; of the last timing."""
    timed = [
        row for row in timings() if (row["task"], row["ranks"], row["link"]) == (task, ranks, link)
    ]
    return {row["name"]: statistics.median(row["seconds"]) for row in timed}


def curves(task: str, done: Rows) -> dict[str, dict[int, Row]]:
    """The judging runs of each timed scheme that has some, by seed."""
    found = {
        each.name: each.judged(done)
        for each in methods()
        if each.study == task and each.name in SCHEMES
    }
    return {name: runs for name, runs in found.items() if runs}


def figure(path: Path, done: Rows) -> None:
    """Validation loss, mean and range over seeds, against seconds: a row per task and a panel per link."""
    from detonation.report.figures import COLOURS

    with drawn(path, 11, 0.4 + 2.6 * len(TASKS), dpi=80) as drawing:
        panels = drawing.subplots(len(TASKS), len(LINKS), sharex=True, sharey="row", squeeze=False)
        for row, name in zip(panels, TASKS, strict=True):
            found = curves(name, done)
            for axes, link in zip(row, LINKS, strict=True):
                seconds = step_seconds(name, link)
                for (method, runs), colour in zip(found.items(), COLOURS, strict=False):
                    if method in seconds:
                        steps, losses = mean_curve(runs)
                        x = [step * seconds[method] for step in steps]
                        every = list(zip(*(losses_of(run) for run in runs.values()), strict=True))
                        axes.fill_between(
                            x, list(map(min, every)), list(map(max, every)), color=colour, alpha=0.2
                        )
                        axes.plot(
                            x, losses, ".-", color=colour, linewidth=1.2, markersize=4, label=method
                        )
                axes.set_xscale("log")
                axes.set_title(f"{name}, {link}", fontsize=9)
                axes.grid(alpha=0.2)
            row[0].set_ylabel("validation loss (nats)")
        for axes in panels[-1]:
            axes.set_xlabel("seconds in steps")
        handles, labels = panels[0][0].get_legend_handles_labels()
        drawing.legend(
            handles, labels, loc="outside upper center", ncols=len(labels), frameon=False
        )


def gain(path: Path) -> None:
    """Bars: the seconds of a step of the T5 on each link, in full and as one sign of 64, and their ratio."""
    from detonation.report.figures import COLOURS

    names = {BASELINE: "full synchronisation", "demo 1/64, sign": "demo, one sign of 64"}
    seconds = [[step_seconds("T5", link)[name] for name in names] for link in LINKS]
    with drawn(path, 7, 2.6, dpi=120) as drawing:
        axes = drawing.subplots()
        for offset, (label, colour) in enumerate(zip(names.values(), COLOURS, strict=False)):
            places = [place + 0.36 * offset for place in range(len(LINKS))]
            axes.barh(places, [pair[offset] for pair in seconds], 0.34, label=label, color=colour)
        for place, pair in enumerate(seconds):
            for offset, each in enumerate(pair):
                ratio = f", {pair[0] / each:.2g} times faster" if offset else ""
                axes.text(
                    each * 1.05,
                    place + 0.36 * offset,
                    f"{each:.2g} s{ratio}",
                    va="center",
                    fontsize=8,
                )
        rates = [link.replace("mbit", " Mbit/s").replace("gbit", " Gbit/s") for link in LINKS]
        axes.set_yticks([place + 0.18 for place in range(len(LINKS))], rates)
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.set_xlim(0.1, 100)
        axes.set_xlabel("seconds per step, lower is better")
        axes.legend(frameon=False, loc="lower right")


def mean_curve(runs: dict[int, Row]) -> tuple[list[int], list[float]]:
    """Steps, and the mean validation loss over the runs at each."""
    steps = [step for step, _ in next(iter(runs.values()))["validation"]]
    return steps, [
        statistics.fmean(losses) for losses in zip(*map(losses_of, runs.values()), strict=True)
    ]


def losses_of(run: Row) -> list[float]:
    return [loss for _, loss in run["validation"]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["loss", "times", "claims", "figure", "gain"])
    parser.add_argument("what", nargs="?", help="the number of a claim, or the path of the figure")
    parser.add_argument("--losses", type=Path, default=LOSSES, help="file of the rows of trainings")
    parser.add_argument("--limit", type=int, default=10**9, help="stop after so many trainings")
    parser.add_argument(
        "--only", default="", help="tasks (and, for trainings, methods) that hold all these words"
    )
    parser.add_argument("--ranks", type=int, default=namespaces.RANKS, help="per node, for timing")
    parser.add_argument("--links", nargs="+", default=LINKS, choices=LINKS, help="for timing")
    args = parser.parse_args()
    if args.action == "loss":
        run_missing(list(methods()), args.losses, train, args.only, args.limit)
    elif args.action == "times":
        time_steps(args.only, args.ranks, args.links)
    elif args.action == "claims":
        from benchmarks.paper.claims import CLAIMS

        for number, claim in enumerate(CLAIMS, 1):
            if args.what in (None, str(number)):
                print(f"{number}. {claim.__doc__}\n\n{claim(rows(args.losses))}\n")
    elif args.action == "gain":
        gain(Path(args.what or "docs/gain"))
    else:
        figure(Path(args.what or "docs/paper"), rows(args.losses))
