"""A shard axis over two nodes: the loss under quantized weights and gradients, and step times over a slow link.

    python -m benchmarks.bytes.shard_wire losses      trains what is missing, then prints intervals
    sudo python -m benchmarks.bytes.shard_wire lab    steps and bytes between two network namespaces

losses: quick-lm and vit-fashion under AdamW on 2 nodes x 2 ranks, one replica, seeds 1 to 3, a row per finished run.
Each run is paired with FSDP2's of the same seed.

lab: two nodes of two ranks, each node a network namespace whose link the kernel slows down; the T5 of
benchmarks/step/step_time.py. FSDP2 and the shard wires take turns in one world. Medians of the step time, and the bytes
that left a node, as the kernel counts them without headers, per parameter and step.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.compare.paired import judged, percent

RECIPES = {
    "recipes/quick-lm.toml": ("optimizer.lr=0.003", "train.batch_size=8"),
    "recipes/vit-fashion.toml": ("optimizer.lr=0.001", "train.batch_size=32", "train.steps=1200"),
}
"""The tuned learning rate of AdamW, and the batch of a rank: 32 and 128 examples per step. After 300 steps the
vision transformer cannot judge 1 %: its runs part by 5 % through rounding alone."""
WIRES = {
    "FSDP2": (),
    "4bit, 4bit": ("mesh.shard_weights=4bit", "mesh.shard_gradients=4bit"),
    "4bit, 8bit": ("mesh.shard_weights=4bit", "mesh.shard_gradients=8bit"),
    "8bit, 8bit": ("mesh.shard_weights=8bit", "mesh.shard_gradients=8bit"),
}
SEEDS = (1, 2, 3)
NODES, RANKS = 2, 2
T5_RECIPE = "recipes/t5-translation.toml"
T5 = (
    "model.hidden_size=256 model.layers=4 model.feed_forward=1024 data.source_length=64 data.target_length=64 "
    "train.batch_size=2 train.steps=100000 train.validate_every=0 schedule.name=constant scheme.name=none"
)
"""The T5 of benchmarks/step/step_time.py, 7.4 million parameters, and its batch."""
WARM = 2
"""Steps before the first that counts: the first gather is exact."""


def train(recipe: str, wire: str, seed: int) -> dict[str, Any]:
    """Trains one run; returns its row."""
    sets = ["scheme.name=none", f"seed={seed}", "train.validate_every=0", *RECIPES[recipe]]
    if WIRES[wire]:
        sets += ["mesh.shard_nodes=2", *WIRES[wire]]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run")
        flags = ["--replicas", "1", "--shards", "4", "--out", str(out), "--set", *sets]
        command = [sys.executable, "-m", "detonation", "train", recipe, *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        summary = json.loads((out / "summary.json").read_text())
    kept = {
        key: summary[key]
        for key in ("val_loss", "train_loss", "num_parameters", "steps", "fingerprint")
    }
    return {"recipe": recipe, "wire": wire, "seed": seed, **kept}


def losses(path: Path, wires: list[str], recipes: list[str], seeds: list[int]) -> None:
    """Trains the runs that `path` does not have, and prints the loss of each wire against FSDP2's."""
    path.touch()
    found = [json.loads(line) for line in path.read_text().splitlines()]
    for seed in seeds:
        for recipe in recipes:
            for wire in wires:
                if not any(
                    (row["recipe"], row["wire"], row["seed"]) == (recipe, wire, seed)
                    for row in found
                ):
                    found.append(train(recipe, wire, seed))
                    with path.open("a") as rows:
                        rows.write(json.dumps(found[-1]) + "\n")
    print("\n".join(table(found)))


def table(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """One line per recipe and wire: mean loss, and its paired difference from FSDP2 with the 95 % interval."""
    yield "| recipe | weights, gradients | seeds | loss | to FSDP2, % |"
    yield "|---|---|---|---|---|"
    for recipe in RECIPES:
        by_wire = {
            wire: {r["seed"]: r for r in found if (r["recipe"], r["wire"]) == (recipe, wire)}
            for wire in WIRES
        }
        base = {seed: row["val_loss"] for seed, row in by_wire["FSDP2"].items()}
        for wire, runs in by_wire.items():
            if set(runs) & set(base):
                cost, interval, count = judged(runs, base)
                mean = sum(row["val_loss"] for row in runs.values()) / len(runs)
                yield f"| {Path(recipe).stem} | {wire} | {count} | {mean:.4f} | {percent(cost, interval)} |"


def lab(link: str, wires: list[str], turns: int) -> None:
    """Times steps of each wire between two namespaces, in turns; prints medians, and the bytes that left a node."""
    import torch
    from benchmarks.lab import namespace_cluster

    from detonation.cluster.launch import run_local
    from detonation.link_speed import LinkSpeed

    torch.set_num_threads(1)  # before the ranks are forked
    with namespace_cluster(NODES, LinkSpeed.parse(link)) as cluster:
        found = run_local(
            _rank,
            NODES * RANKS,
            [cluster, wires, turns],
            enter=lambda rank: cluster.enter(rank // RANKS),
        )
    parameters, rows = found[0]
    seconds = {wire: statistics.median(row[0] for row in rows[wire]) for wire in wires}
    print(f"{parameters:,} parameters, {NODES} nodes of {RANKS} ranks, {link}")
    print(
        "| weights, gradients | step, s | FSDP2 / it | sent by a node, bytes | per parameter | counted by links |"
    )
    print("|---|---|---|---|---|---|")
    for wire in wires:
        kernel, counted = (statistics.fmean(row[n] for row in rows[wire]) for n in (1, 2))
        cells = [
            wire,
            f"{seconds[wire]:.3f}",
            f"{seconds[wires[0]] / seconds[wire]:.1f}",
            f"{kernel:,.0f}",
        ]
        print("| " + " | ".join([*cells, f"{kernel / parameters:.3f}", f"{counted:,.0f}"]) + " |")


def _rank(
    cluster: Any, wires: list[str], turns: int
) -> tuple[int, dict[str, list[tuple[float, float, float]]]]:
    """The number of parameters, and seconds and bytes of each turn, as node 0 sends them."""
    import torch
    import torch.distributed as dist

    import detonation as dt
    from detonation.cluster.processes.signals import Stop
    from detonation.train.loop.checks import check_config
    from detonation.train.loop.fit import fit
    from detonation.train.loop.session import start_session
    from detonation.train.recipe.resolve import Request

    sessions = {}
    for wire in wires:
        sets = (*T5.split(), *(("mesh.shard_nodes=2", *WIRES[wire]) if WIRES[wire] else ()))
        config = check_config(
            Request(Path(T5_RECIPE), sets, 1, NODES * RANKS).layers(None).config()
        )
        sessions[wire] = start_session(config, torch.device("cpu"))
    rows = dict[str, list[tuple[float, float, float]]]({wire: [] for wire in wires})
    for turn in range(turns + WARM):
        for wire, session in sessions.items():
            before, counted = (
                cluster.counters(0),
                session.world.over_shards(dt.shard_bytes_sent(session.model)),
            )
            dist.barrier()
            records: list[Any] = []
            fit(session, turn, turn + 1, records.append, Stop())
            dist.barrier()
            sent = cluster.counters(0).since(before).sent_data_bytes
            counted = session.world.over_shards(dt.shard_bytes_sent(session.model)) - counted
            if turn >= WARM:
                rows[wire].append((records[0].seconds, sent, counted / NODES))
    return sum(p.numel() for p in sessions[wires[0]].model.parameters()), rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["losses", "lab"])
    parser.add_argument(
        "--rows", type=Path, default=Path("benchmarks/results/2026-11-22-shard-wire.jsonl")
    )
    parser.add_argument("--wires", nargs="+", default=["FSDP2", "4bit, 4bit"], choices=WIRES)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--link", default="100mbit")
    parser.add_argument("--turns", type=int, default=7, help="steps of each wire")
    args = parser.parse_args()
    if args.what == "losses":
        return losses(args.rows, args.wires, args.recipes, args.seeds)
    return lab(args.link, args.wires, args.turns)


if __name__ == "__main__":
    main()
