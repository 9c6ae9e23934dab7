"""One rank of the worlds of world.py: it runs the cases that it is told, and says what rank 0 found as lines of JSON.

A launcher's variables say which rank this is. The last case, `killed`, ends the last rank; the others go on until they
notice.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.gpu.children import stacks_at_the_end
from benchmarks.gpu.common import no_waits
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import detonation as dt

SCHEMES = {
    "demo": lambda: dt.demo(),
    "demo in signs": lambda: dt.demo(precision="sign", error_feedback=False),
    "random_sign": lambda: dt.random_sign(),
    "loco": lambda: dt.loco(),
    "full": lambda: dt.full(),
}
WARM = 4
"""The first steps, which are not timed; after them nothing may make the host wait."""


class Rank:
    """This rank, and the size of what it trains: `steps` of a few layers of `width`."""

    def __init__(self, device: str, steps: int, width: int) -> None:
        self.device, self.steps, self.width = torch.device(device), steps, width

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Linear(self.width, self.width, device=self.device) for _ in range(4)]
        return nn.Sequential(*[part for layer in layers for part in (layer, nn.GELU())])

    def loss(self, model: nn.Module, step: int) -> torch.Tensor:
        own = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        return model(torch.randn(16, self.width, generator=own).to(self.device)).square().mean()

    def trained(
        self, mesh: DeviceMesh, scheme: dt.schemes.Scheme, overlap: bool
    ) -> tuple[str, float]:
        """The fingerprint of the weights after all steps, and the seconds of the steps that were not the first."""
        model = self.model()
        if mesh["shard"].size() > 1:
            dt.shard(model, mesh)
        base = dt.SignSGD(model.parameters(), lr=1e-3)
        optimizer, began = dt.replicate(base, model, mesh["replicate"], scheme), 0.0
        for step in range(self.steps):
            if step == min(WARM, self.steps - 1):
                self.synchronize()
                began = time.perf_counter()
            loss = self.loss(model, step)
            with optimizer.overlap() if overlap else nullcontext():
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        self.synchronize()
        seconds = time.perf_counter() - began
        weights, equal = dt.fingerprint(model, mesh)
        assert equal, "the replicas differ"
        return weights, seconds / max(1, self.steps - WARM)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def overlap(rank: Rank, replicas: int, shards: int) -> None:
    """Buckets that leave during backward bring the same weights as one message after it."""
    mesh = dt.init_mesh(replicas, shards, rank.device.type, timeout_s=60)
    for name, scheme in SCHEMES.items():
        (after, after_s), (during, during_s) = (
            rank.trained(mesh, scheme(), overlap) for overlap in (False, True)
        )
        seen = "" if after == during else f"{after[:16]} after backward, {during[:16]} during it"
        times = {"ms": 1e3 * after_s, "with_overlap": 1e3 * during_s}
        say(
            case=f"overlap, {name}",
            world=f"{replicas} x {shards}",
            holds=not seen,
            seen=seen,
            **times,
        )


def lanes(rank: Rank, replicas: int, shards: int) -> None:
    """What all ranks of a node hold whole crosses the slow link once: all ranks end with equal weights."""
    mesh = dt.init_mesh(replicas, shards, rank.device.type, timeout_s=60)
    model, inside = rank.model(), mesh.get_group("shard")
    base = dt.SignSGD(model.parameters(), lr=1e-3)
    optimizer, began = dt.replicate(base, model, mesh["replicate"], dt.demo()), time.perf_counter()
    for step in range(rank.steps):
        rank.loss(model, step).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=inside)
        optimizer.step()
        optimizer.zero_grad()
    sums = torch.stack([parameter.detach().double().sum() for parameter in model.parameters()])
    everyone = [torch.empty_like(sums) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, sums)
    equal, ms = (
        all(torch.equal(each, sums) for each in everyone),
        1e3 * (time.perf_counter() - began) / rank.steps,
    )
    say(
        case="whole parameters on sharded nodes",
        world=f"{replicas} x {shards}",
        holds=equal,
        seen="",
        ms=ms,
    )


def wire(rank: Rank, replicas: int, shards: int) -> None:
    """Shards on two nodes exchange in few bits, and no operation makes the host wait."""
    mesh = dt.init_mesh(1, replicas * shards, rank.device.type, timeout_s=60)
    model = dt.shard(rank.model(), mesh, None, dt.shard_wire(nodes=2))
    optimizer, began = torch.optim.AdamW(model.parameters(), lr=1e-3), 0.0
    for step in range(rank.steps):
        with no_waits(rank.device) if step >= WARM else nullcontext():
            loss = rank.loss(model, step) if step < WARM else held(model, rank)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        began = began or time.perf_counter()
    rank.synchronize()
    ms = 1e3 * (time.perf_counter() - began) / max(1, rank.steps - 1)
    say(
        case="shard wire without a wait",
        world=f"1 x {replicas * shards}",
        holds=True,
        seen="",
        ms=ms,
    )


def held(model: nn.Module, rank: Rank) -> torch.Tensor:
    """A loss whose examples are made on the device: a copy from the host would wait."""
    return model(torch.ones(16, rank.width, device=rank.device)).square().mean()


def killed(rank: Rank, replicas: int, shards: int) -> None:
    """The last rank ends without a word; the others have to end, too."""
    mesh = dt.init_mesh(replicas, shards, rank.device.type, timeout_s=20)
    model = rank.model()
    base = dt.SignSGD(model.parameters(), lr=1e-3)
    optimizer = dt.replicate(base, model, mesh["replicate"], dt.demo())
    for step in range(10_000):
        rank.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == WARM and dist.get_rank() == dist.get_world_size() - 1:
            rank.synchronize()
            os.kill(os.getpid(), signal.SIGKILL)


CASES: dict[str, Callable[[Rank, int, int], None]] = {
    "overlap": overlap, "lanes": lanes, "wire": wire, "killed": killed,
}  # fmt: skip


def say(**found: Any) -> None:
    """Prints a line, of rank 0."""
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="+", choices=CASES)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=1024)
    args = parser.parse_args()
    stacks_at_the_end()
    torch.set_num_threads(1)
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    rank = Rank(args.device, args.steps, args.width)
    for case in args.cases:
        CASES[case](rank, args.replicas, args.shards)
    dt.leave()


if __name__ == "__main__":
    sys.exit(main())
