"""The cost of a checkpoint: how long training stands still, beside a plain copy of the same tensors.

    python -m benchmarks.step.save [--hidden 512] [--layers 8] [--saves 15]

Two replicas x two shards, gloo ranks of one thread, an OLMo2 with AdamW and `demo`. Medians over the saves, in ms, of
the slowest rank: a copy of all tensors that are saved; `save`, which returns once they are copied; and the time until
the checkpoint is whole. Copy and save take turns, so that other load on the machine hits both.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

import detonation as dt
from detonation import models
from detonation.checkpoint.snapshot import take_snapshot
from detonation.cluster.launch import run_local


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--saves", type=int, default=15)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_local(measure, 4, [folder, args.hidden, args.layers, args.saves])
    mb = sum(rank["bytes"] for rank in ranks) / 1e6
    copy, save, whole = (max(rank[name] for rank in ranks) for name in ("copy", "save", "whole"))
    print(
        f"{mb:.0f} MB: a copy {copy:.1f} ms, save {save:.1f} ms ({save / copy:.2f} of a copy), whole in {whole:.0f} ms"
    )


def measure(folder: str, hidden: int, layers: int, saves: int) -> dict[str, float]:
    """Medians on this rank, in ms, and the bytes of its state."""
    mesh = dt.init_mesh(2, 2, "cpu")
    torch.manual_seed(0)
    model = dt.shard(
        models.build_model(
            "olmo2", {"hidden_size": hidden, "layers": layers, "feed_forward": 4 * hidden}
        ),
        mesh,
    )
    optimizer = dt.replicate(
        torch.optim.AdamW(model.parameters()), model, mesh["replicate"], dt.demo()
    )
    tokens = torch.randint(256, (1, 16))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    tensors = take_snapshot(model, optimizer).tensors
    times: dict[str, list[float]] = {"copy": [], "save": [], "whole": []}
    with dt.Checkpoints(Path(folder), model, optimizer, keep=2) as checkpoints:
        for _ in range(saves + 1):
            began = time.perf_counter()
            copies = [tensor.clone() for tensor in tensors.values()]
            times["copy"].append(time.perf_counter() - began)
            del copies
            optimizer.step_count += 1
            began = time.perf_counter()
            checkpoints.save()
            times["save"].append(time.perf_counter() - began)
            checkpoints.wait()
            times["whole"].append(time.perf_counter() - began)
    medians = {name: 1000 * statistics.median(values[1:]) for name, values in times.items()}
    return {**medians, "bytes": sum(tensor.nbytes for tensor in tensors.values())}


if __name__ == "__main__":
    main()
