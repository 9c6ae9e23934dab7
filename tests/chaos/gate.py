"""The gate: faults of all kinds, as `make chaos` prints them. Seeded; exits 1 when anything was lost.

OMP_NUM_THREADS=1 PYTHONPATH=tests python tests/chaos/gate.py [--seed N] [--repeat N] [--short]
"""

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from faults import disk_full, killed_and_stopped, preempted, uninterrupted
from rows import Row, table
from storage import corruptions, crash_points
from survive import survived

from payloads import CLASSES, fuzz


@dataclass(frozen=True)
class Amount:
    """The number of faults of each kind, in runs of `steps`.

    crashes: (scheme, step of the previous checkpoint) of each save that is cut short. messages: per class of bad ones.
    faults: that the others survive without a restart.
    """

    steps: int
    kills: int
    stops: int
    signals: int
    crashes: tuple[tuple[str, int], ...]
    corruptions: int
    sizes: int
    messages: int
    faults: int


CRASHES = tuple((name, first) for name in ("demo", "diloco", "full") for first in (1, 2))
FULL = Amount(60, 40, 20, 10, CRASHES, 1000, 20, 28, 48)
SHORT = Amount(16, 2, 1, 1, CRASHES[:1], 100, 1, 2, 3)


def gate(seed: int, amount: Amount, folder: Path) -> list[Row]:
    """All rows of the table."""
    whole = uninterrupted(folder / "whole", amount.steps)
    newest = max((whole.out / "checkpoints").iterdir())
    return [
        *killed_and_stopped(folder / "killed", whole, seed, amount.kills, amount.stops),
        preempted(folder / "preempted", whole, seed, amount.signals),
        crash_points(folder / "crashed", amount.crashes),
        corruptions(newest, folder / "corrupted", seed, amount.corruptions),
        *disk_full(folder / "full", whole, amount.sizes),
        bad_messages(seed, amount.messages),
        *survived(folder / "survived", seed, amount.faults),
    ]


def bad_messages(seed: int, each: int) -> Row:
    """Bad messages of every class: none is used, and the sender of each is named."""
    row = Row("bad messages")
    for name, result in fuzz(seed, each * len(CLASSES)).items():
        row.tried += result.tried
        row.losses += [f"{name}: {result.applied} were used"] * (result.tried - result.refused)
    return row


def main() -> int:
    """Runs the gate and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--repeat", type=int, default=1, help="number of repetitions, with consecutive seeds"
    )
    parser.add_argument(
        "--survive", type=int, default=0, help="only so many faults that others survive in place"
    )
    parser.add_argument("--short", action="store_true", help="the part that `make test-all` runs")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    lost = 0
    for seed in range(chosen.seed, chosen.seed + chosen.repeat):
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
            amount = SHORT if chosen.short else FULL
            rows = (
                survived(Path(folder), seed, chosen.survive)
                if chosen.survive
                else gate(seed, amount, Path(folder))
            )
        print(f"seed {seed}, {time.monotonic() - began:.0f} s")
        print(table(rows), flush=True)
        lost += sum(row.lost for row in rows)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
