"""Loss at bytes of the exchange: owners of rows with several replies, against all-gather.

    python -m benchmarks.bytes.links run [--only WORDS] [--results FILE]      runs missing rows, one by one
    python -m benchmarks.bytes.links table                                    paired 95 % intervals over the seeds

Each row is one simulated training: of a small classifier that learns from a random teacher (`teacher`, seconds), or of
`detonation simulate recipes/quick-lm.toml` with 32 examples per step in all, as in benchmarks/frontier (`quick-lm`,
minutes). The data do not depend on the form of the exchange, so runs of one seed are compared in pairs. Existing rows
are not run again.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import detonation as dt
from detonation.cluster.network.simulated import SimulatedCommunicator, simulate_replicas
from detonation.core.link.communicator import Communicator
from detonation.extend import DCT, TopK, outer_sgd
from detonation.plan.losses import spread

RESULTS = Path("benchmarks/results/2026-11-22-links.jsonl")
STEPS, BATCH = 300, 16

SIGNS = {"decay": 0.95, "precision": "sign", "error_feedback": False}
CASES: dict[str, tuple[dt.schemes.Scheme, str, float]] = {
    "demo 1/64 sign": (dt.demo(topk=1, **SIGNS), "SignSGD", 2e-3),
    "demo 4/64 fp32": (dt.demo(), "SignSGD", 2e-3),
    "decoupled_adamw 4/64 fp32": (dt.schemes.decoupled_adamw(), "AdamW", 3e-3),
    "demo 4/64 sign": (dt.demo(**SIGNS), "SignSGD", 2e-3),
    "demo_diloco 10": (
        outer_sgd(10, 1.0, basis=DCT(), selection=TopK(4, 64), decay=0.95),
        "AdamW",
        3e-3,
    ),
    "random_sign 1/8": (dt.random_sign(decay=0.9, cycle=True), "SignSGD", 4e-3),
}
"""Scheme, base optimizer and its learning rate for `teacher`."""

FORMS = ("all-gather", "owner")
"""The exchanges; owners answer with the library's reply."""

LM = {"demo 1/64 sign": 4e-3, "demo 4/64 fp32": 4e-3}
"""Learning rate of SignSGD for `quick-lm`, as in benchmarks/frontier/grid.py."""


@dataclass(frozen=True)
class Cell:
    """One run."""

    task: str
    case: str
    form: str
    replicas: int
    seed: int


def grid() -> Iterator[Cell]:
    """All runs, the most important first."""
    cases = list(CASES)
    for replicas, some in (
        (8, cases[1:]),
        (4, cases[1:]),
        (16, cases[:1]),
        (32, cases[:2]),
        (8, cases[:1]),
    ):
        for case in some:
            for seed in range(8 if replicas <= 8 else 3):
                for form in FORMS:
                    yield Cell("teacher", case, form, replicas, seed)
    for replicas, some in (
        (16, list(LM)[:1]),
        (8, list(LM)[1:]),
        (4, list(LM)[1:]),
        (32, list(LM)),
    ):
        for case in some:
            for seed in (1, 2, 3):
                for form in FORMS:
                    yield Cell("quick-lm", case, form, replicas, seed)


def scheme_of(cell: Cell) -> dt.schemes.Scheme:
    """The scheme of a run, with its form of exchange."""
    scheme = CASES[cell.case][0]
    if cell.form == "all-gather":
        return replace(scheme, link="all-gather")
    return replace(scheme, link="owner")


def run(cell: Cell) -> dict[str, Any]:
    """Trains one run and returns its row."""
    began = time.process_time()
    act = taught if cell.task == "teacher" else read
    loss, sent, numel = simulate_replicas(
        lambda communicator: act(cell, communicator), cell.replicas
    )[0]
    bytes_per_parameter = sent / numel
    row = {"val_loss": loss, "bytes_per_parameter": bytes_per_parameter}
    return {**asdict(cell), **row, "cpu_s": round(time.process_time() - began, 1)}


def taught(cell: Cell, communicator: Communicator) -> tuple[float, float, int]:
    """Validation loss of the student, bytes per step, and parameters."""
    generator = torch.Generator().manual_seed(1)
    hidden, out = (torch.randn(shape, generator=generator) for shape in ((64, 128), (128, 10)))

    def teach(x: Tensor) -> Tensor:  # [batch, 64] -> [batch]
        return ((0.2 * x @ hidden).tanh() @ out).argmax(1)

    torch.manual_seed(cell.seed)
    student = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    _, name, lr = CASES[cell.case]
    optimizers = {"SignSGD": dt.SignSGD, "AdamW": torch.optim.AdamW}
    base = optimizers[name](student.parameters(), lr=lr)
    optimizer = dt.replicate(base, student, communicator, scheme_of(cell))
    schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20) * (1 - step / STEPS))
    generator = torch.Generator().manual_seed(1000 * (cell.seed + 1) + communicator.replica)
    for _ in range(STEPS):
        x = torch.randn(BATCH, 64, generator=generator)
        nn.functional.cross_entropy(student(x), teach(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    optimizer.synchronize()
    x = torch.randn(4096, 64, generator=torch.Generator().manual_seed(99))
    with torch.no_grad():
        loss = float(nn.functional.cross_entropy(student(x), teach(x)))
    return loss, optimizer.stats.bytes_sent / STEPS, sum(p.numel() for p in student.parameters())


def read(cell: Cell, communicator: SimulatedCommunicator) -> tuple[float, float, int]:
    """Validation loss of the language model, bytes per step, and parameters."""
    from detonation.train.loop.session import safety
    from detonation.train.verbs.simulate import Simulation, configured, train_virtual, virtual

    recipe = Path("recipes/quick-lm.toml")
    sets = ("train.validate_every=0", f"seed={cell.seed}", f"optimizer.lr={LM[cell.case]}")
    config = configured(Simulation(recipe, sets, cell.replicas, 32))
    session = virtual(config, communicator)
    scheme = scheme_of(cell)
    optimizer = dt.replicate(
        session.base, session.model, communicator, scheme, seed=config.seed, safety=safety(config)
    )
    summary = train_virtual(replace(session, optimizer=optimizer))
    return summary["val_loss"], summary["bytes_sent_per_step"], summary["num_parameters"]


def rows(path: Path) -> dict[Cell, dict[str, Any]]:
    """Reads the existing rows."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {
        Cell(*(line[key] for key in ("task", "case", "form", "replicas", "seed"))): line
        for line in lines
    }


def table(found: dict[Cell, dict[str, Any]]) -> Iterator[str]:
    """One line per form: mean loss, and its paired difference from all-gather with the 95 % interval."""
    yield "| task | scheme | replicas | exchange | bytes per parameter and step | seeds | loss | against all-gather |"
    yield "|---|---|---|---|---|---|---|---|"
    for task, case, form, replicas in dict.fromkeys(
        (c.task, c.case, c.form, c.replicas) for c in grid()
    ):
        pairs = []
        for cell, row in found.items():
            other = found.get(replace(cell, form="all-gather"))
            if (cell.task, cell.case, cell.form, cell.replicas) == (
                task,
                case,
                form,
                replicas,
            ) and other:
                pairs.append((row, other))
        if not pairs:
            continue
        mean = statistics.fmean(row["val_loss"] for row, _ in pairs)
        size = f"{pairs[0][0]['bytes_per_parameter']:.4f}"
        difference = against([row["val_loss"] / other["val_loss"] - 1 for row, other in pairs])
        against_all_gather = "" if form == "all-gather" else difference
        yield f"| {task} | {case} | {replicas} | {form} | {size} | {len(pairs)} | {mean:.4f} | {against_all_gather} |"


def against(differences: Sequence[float]) -> str:
    if len(differences) < 2:
        return f"{100 * differences[0]:+.2f} %"
    mean, half = spread(differences)
    return f"{100 * mean:+.2f} % +- {100 * half:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["run", "table"])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument(
        "--only", default="", help="runs whose task, scheme, form or R=number; hold all these words"
    )
    args = parser.parse_args()
    if args.action == "table":
        print("\n".join(table(rows(args.results))))
        return
    torch.set_num_threads(1)
    for cell in grid():
        text = f"{cell.task} {cell.case} {cell.form} R={cell.replicas};"
        if cell in rows(args.results) or not all(word in text for word in args.only.split()):
            continue
        row = run(cell)
        with args.results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(text, f"seed={cell.seed}", row["val_loss"], f"{row['cpu_s']} s", flush=True)


if __name__ == "__main__":
    main()
