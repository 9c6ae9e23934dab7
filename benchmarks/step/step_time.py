"""Time of an optimizer step: ours, the published package's, and AdamW with one bucketed all-reduce.

    pip install --no-deps --target /tmp/published detonation==0.5.1 einops mltiming
    python -m benchmarks.step.step_time --published /tmp/published
    python -m benchmarks.step.step_time --baseline ../before/src   # another build of this package takes its turns, too

Each subject is a separate world of two gloo ranks with one thread per rank. The processes stay and take turns, so that
other load on the machine affects all subjects. A step is everything between a gradient and an updated weight; with
--whole, also the forward and backward pass of the real model. The table has medians over rounds, in ms: CPU time of a
rank, and wall time. "ours-plain" is plain torch, as on a machine without g++; "ours-sign" sends one bit per
coefficient, and "ours-sign-no-ef" keeps no errors of these, as the recipes have it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODELS = {
    "t5": ("t5", {"hidden_size": 256, "layers": 4, "feed_forward": 1024}),
    "vit": ("vit", {"hidden_size": 240, "layers": 8, "heads": 8, "feed_forward": 960, "patch_size": 4, "channels": 3,
                    "image_size": 32}),
    "gpt": ("olmo2", {"hidden_size": 336, "layers": 6, "heads": 8, "feed_forward": 1344}),
}  # fmt: skip
SUBJECTS = ["adamw", "ours", "ours-plain", "ours-sign", "ours-sign-no-ef", "published"]
BATCHES = {"t5": (2, 64), "vit": (4, 3, 32, 32), "gpt": (2, 64)}  # per rank, with --whole


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--published", type=Path, help="directory with detonation==0.5.1")
    parser.add_argument(
        "--baseline", type=Path, help="src directory of another build of this package"
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--topk", nargs="+", type=int, default=[4, 32])
    parser.add_argument(
        "--layouts", nargs="+", default=["flat", "tensors"], choices=["flat", "tensors"]
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--whole",
        action="store_true",
        help="time whole training steps, with forward and backward pass",
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(**json.loads(args.worker))
    if args.whole:
        args.published, args.layouts = None, ["tensors"]
    print(
        "| model | tensors | topk | subject | CPU ms | wall ms | CPU: published / this | CPU: this / adamw |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in args.models:
        for layout in args.layouts:
            shapes = shapes_of(name, layout)
            for topk in args.topk:
                table(name, shapes, topk, args.published, args.baseline, args.rounds, args.whole)
    return None


def shapes_of(name: str, layout: str) -> list[list[int]]:
    """Shapes of a model's parameters, or of one flat tensor of their total size."""
    import torch

    from detonation import models

    with torch.device("meta"):
        shapes = [list(p.shape) for p in models.build_model(*MODELS[name]).parameters()]
    if layout == "tensors":
        return shapes
    return [[sum(torch.Size(shape).numel() for shape in shapes) // 4096 * 4096]]


def table(
    name: str,
    shapes: list[list[int]],
    topk: int,
    published: Path | None,
    baseline: Path | None,
    rounds: int,
    whole: bool,
) -> None:
    subjects = [s for s in SUBJECTS if s != "published" or published]
    sources = {"published": published}
    if baseline:
        sources |= {f"{s}-before": baseline for s in subjects if s.startswith("ours")}
        subjects = sorted([*subjects, *(s for s in sources if s.endswith("-before"))])
    worlds = {s: World(s, shapes, topk, sources.get(s), name if whole else "") for s in subjects}
    times: dict[str, list[tuple[float, float]]] = {s: [] for s in subjects}
    for turn in range(rounds + 1):
        for subject, world in worlds.items():
            measured = world.turn()
            if turn:  # the first turn warms up
                times[subject].append(measured)
    for world in worlds.values():
        world.close()
    cpu = {s: statistics.median(t[0] for t in times[s]) for s in subjects}
    for s in subjects:
        wall = statistics.median(t[1] for t in times[s])
        faster = f"{cpu['published'] / cpu[s]:.1f}" if published else ""
        cells = [name, str(len(shapes)), str(topk), s, f"{cpu[s]:.1f}", f"{wall:.1f}", faster]
        print("| " + " | ".join([*cells, f"{cpu[s] / cpu['adamw']:.2f}"]) + " |", flush=True)


class World:
    """Two processes that take a few steps on request."""

    def __init__(
        self, subject: str, shapes: list[list[int]], topk: int, source: Path | None, model: str
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        if source:
            env["PYTHONPATH"] = str(source)
        self._ranks = []
        for rank in range(2):
            task = {
                "subject": subject.removesuffix("-before"),
                "shapes": shapes,
                "topk": topk,
                "rank": rank,
                "store": self._folder.name,
                "model": model,
            }
            command = [sys.executable, __file__, "--worker", json.dumps(task)]
            pipes: dict[str, Any] = {
                "stdin": subprocess.PIPE,
                "stdout": subprocess.PIPE,
                "text": True,
                "env": env,
            }
            self._ranks.append(subprocess.Popen(command, **pipes))

    def turn(self) -> tuple[float, float]:
        """Requests steps; returns CPU and wall ms per step of the first rank."""
        for rank in self._ranks:
            assert rank.stdin
            rank.stdin.write("go\n")
            rank.stdin.flush()
        answers = [self._answer(rank) for rank in self._ranks]
        return answers[0]["cpu"], answers[0]["wall"]

    def _answer(self, rank: "subprocess.Popen[str]") -> dict[str, float]:
        assert rank.stdout
        for line in rank.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"a rank ended with {rank.wait()}")

    def close(self) -> None:
        for rank in self._ranks:
            assert rank.stdin
            rank.stdin.close()
            rank.wait()
        self._folder.cleanup()


def work(
    subject: str, shapes: list[list[int]], topk: int, rank: int, store: str, model: str
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{store}/store", 2), rank=rank, world_size=2
    )
    parameters, gradients, learn = trained(model, rank) if model else drawn(shapes, rank)
    step = {"adamw": adamw, "published": published}.get(subject, ours)(parameters, topk, subject)
    for _ in sys.stdin:
        cpu, wall = [], []
        for _ in range(3):
            for p, g in zip(parameters, gradients, strict=True):
                p.grad = None if g is None else g.clone()
            dist.barrier()
            began, worked = time.perf_counter(), time.process_time()
            learn()
            step()
            cpu.append(1e3 * (time.process_time() - worked))
            wall.append(1e3 * (time.perf_counter() - began))
        print(
            json.dumps({"cpu": statistics.median(cpu), "wall": statistics.median(wall)}), flush=True
        )


def drawn(shapes: list[list[int]], rank: int) -> tuple[list[Any], list[Any], Callable[[], Any]]:
    """Makes parameters of these shapes and random gradients, without a model to compute."""
    import torch

    generator = torch.Generator().manual_seed(rank)
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    return parameters, [torch.randn(shape, generator=generator) for shape in shapes], lambda: None


def trained(name: str, rank: int) -> tuple[list[Any], list[Any], Callable[[], Any]]:
    """Makes a model: its parameters, no gradients, and the forward and backward pass that computes them."""
    import torch

    from detonation import models

    torch.manual_seed(0)
    model, shape = models.build_model(*MODELS[name]), BATCHES[name]
    generator = torch.Generator().manual_seed(rank)
    if name == "vit":
        inputs = {
            "pixel_values": torch.randn(shape, generator=generator),
            "labels": torch.arange(shape[0]),
        }
    else:
        tokens = torch.randint(3, 256, shape, generator=generator)
        inputs = {"input_ids": tokens, "labels": tokens}
    parameters = list(model.parameters())
    return parameters, [None] * len(parameters), lambda: model(**inputs).loss.backward()


def ours(parameters: list[Any], topk: int, subject: str) -> Callable[[], Any]:
    import torch

    import detonation as dt

    if subject == "ours-plain":  # whatever the build calls it
        from detonation.kernels import native

        native.load = native.load_library = lambda: None
    model = torch.nn.Module()
    for i, p in enumerate(parameters):
        model.register_parameter(f"p{i}", p)
    precision: dict[str, Any] = {"precision": "sign", "decay": 0.95} if "sign" in subject else {}
    if subject.startswith("ours-sign-no-ef"):
        precision["error_feedback"] = False
    mesh = dt.init_mesh(2, 1, "cpu")
    scheme = dt.demo(topk=topk, chunk=64, **precision)
    base = dt.SignSGD(parameters, lr=1e-3)
    return dt.replicate(
        base, model, mesh["replicate"], scheme, kernels=subject != "ours-plain"
    ).step


def published(parameters: list[Any], topk: int, subject: str) -> Callable[[], Any]:
    import torch.distributed as dist

    from detonation import DeMoReplicator, DeToSGD

    alone = [dist.new_group([r]) for r in range(2)][dist.get_rank()]
    replicator = DeMoReplicator(compression_topk=topk, compression_chunk=64)
    groups = {"sharding_parallel_group": alone, "replication_parallel_group": dist.group.WORLD}
    return DeToSGD(parameters, lr=1e-3, replicator=replicator, **groups).step


def adamw(parameters: list[Any], topk: int, subject: str) -> Callable[[], Any]:
    import torch
    import torch.distributed as dist

    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    bucket = torch.empty(sum(p.numel() for p in parameters))
    views = [
        v.view_as(p)
        for v, p in zip(bucket.split([p.numel() for p in parameters]), parameters, strict=True)
    ]

    def step() -> None:
        torch._foreach_copy_(views, [p.grad for p in parameters])
        dist.all_reduce(bucket)
        bucket.div_(2)
        torch._foreach_copy_([p.grad for p in parameters], views)
        optimizer.step()

    return step


if __name__ == "__main__":
    main()
