"""What sending during backward brings: a training step with and without `overlap()` on links of different pace.

    python benchmarks/overlap.py

Two replicas, gloo ranks of one thread each, on an emulated link. For each case steps with and without take turns in one
run; medians, in ms. waited: how long a step stood still for the network.
"""

import argparse
import os
import statistics
import tempfile
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import detonation as dt
from detonation import models
from detonation.cluster.network.throttled import Emulated
from detonation.core.link.link_speed import Pace

MODEL = ("olmo2", {"hidden_size": 336, "layers": 6, "heads": 8, "feed_forward": 1344})
BATCH, CONTEXT = 2, 128
CASES = [  # a scheme, and links on which its message takes a part of backward, about as long, and longer
    ("full", {}, ["4gbit,1ms", "1gbit,1ms"]),
    ("demo", {}, ["1gbit,1ms", "100mbit,5ms", "50mbit,5ms"]),
    ("random_sign", {}, ["10mbit,5ms", "5mbit,20ms"]),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="steps of each kind, besides the first")
    args = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (folder, args.rounds), nprocs=2, start_method="fork")


def _rank(rank: int, folder: str, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    mesh = dt.init_mesh(2, 1, "cpu")
    say = print if rank == 0 else lambda *_, **__: None
    titles = ["scheme", "link", "MB a step", "forward", "backward", "step", "with", "ratio", "waited", "with"]
    say("| " + " | ".join(titles) + " |\n" + "|---" * len(titles) + "|")
    for name, arguments, links in CASES:
        for link in links:
            say(_row(mesh, name, arguments, link, rounds), flush=True)
    dist.barrier()


def _row(mesh: Any, name: str, arguments: dict[str, Any], link: str, rounds: int) -> str:
    torch.manual_seed(0)
    model = models.build(*MODEL)
    base = dt.SignSGD(model.parameters(), lr=1e-4)
    optimizer = dt.replicate(base, model, Emulated(mesh["replicate"], Pace.parse(link)), dt.scheme(name, arguments))
    _step(model, optimizer, False)  # sets up
    sent = optimizer.bytes_sent
    _step(model, optimizer, True)  # makes the buckets
    sent = optimizer.bytes_sent - sent
    taken: dict[bool, list[tuple[float, ...]]] = {False: [], True: []}
    for turn in range(2 * rounds):
        taken[bool(turn % 2)].append(_step(model, optimizer, bool(turn % 2)))
    forward, backward, plain, waited = (statistics.median(column) for column in zip(*taken[False], strict=True))
    *_, overlapped, less = (statistics.median(column) for column in zip(*taken[True], strict=True))
    times = [f"{1e3 * t:.0f}" for t in (forward, backward, plain, overlapped)]
    ratio, waits = f"{overlapped / plain:.2f}", [f"{1e3 * t:.0f}" for t in (waited, less)]
    return "| " + " | ".join([name, link, f"{sent / 1e6:.2f}", *times, ratio, *waits]) + " |"


def _step(model: Any, optimizer: Any, overlapped: bool) -> tuple[float, ...]:
    """Seconds of forward, backward, the whole step, and of waiting in it."""
    tokens = torch.randint(256, (BATCH, CONTEXT))
    dist.barrier()
    waited, began = optimizer.waited_s, time.perf_counter()
    loss = model(input_ids=tokens, labels=tokens).loss
    computed = time.perf_counter()
    with optimizer.overlap() if overlapped else nullcontext():
        loss.backward()
    backward = time.perf_counter()
    optimizer.step()
    optimizer.zero_grad()
    ended = time.perf_counter()
    return computed - began, backward - computed, ended - began, optimizer.waited_s - waited


if __name__ == "__main__":
    main()
