"""The gain of sending during backward: a training step with and without `overlap()` on links of different speeds.

    python benchmarks/overlap.py

Two replicas, gloo ranks of one thread each, on a throttled link. In each case steps with and without overlap take turns
in one run; medians, in ms. waited: the time that a step stood still for the network.
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
from detonation.cluster.network.throttled import ThrottledCommunicator
from detonation.link_speed import LinkSpeed

MODEL = ("olmo2", {"hidden_size": 336, "layers": 6, "heads": 8, "feed_forward": 1344})
BATCH, CONTEXT = 2, 128
CASES = [  # a scheme, and links on which its message takes less time than backward, about the same, and more
    ("full", {}, ["4gbit,1ms", "1gbit,1ms"]),
    ("demo", {}, ["1gbit,1ms", "100mbit,5ms", "50mbit,5ms"]),
    ("random_sign", {}, ["10mbit,5ms", "5mbit,20ms"]),
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=7, help="steps with and without overlap, besides the first"
    )
    args = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (folder, args.rounds), nprocs=2, start_method="fork")


def _rank(rank: int, folder: str, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2
    )
    mesh = dt.init_mesh(2, 1, "cpu")
    show = print if rank == 0 else lambda *_, **__: None
    titles = [
        "scheme",
        "link",
        "MB per step",
        "forward",
        "backward",
        "step",
        "with",
        "ratio",
        "waited",
        "with",
    ]
    show("| " + " | ".join(titles) + " |\n" + "|---" * len(titles) + "|")
    for name, arguments, links in CASES:
        for link in links:
            show(_row(mesh, name, arguments, link, rounds), flush=True)
    dist.barrier()


def _row(mesh: Any, name: str, arguments: dict[str, Any], link: str, rounds: int) -> str:
    torch.manual_seed(0)
    model = models.build_model(*MODEL)
    base = dt.SignSGD(model.parameters(), lr=1e-4)
    optimizer = dt.replicate(
        base,
        model,
        ThrottledCommunicator(mesh["replicate"], LinkSpeed.parse(link)),
        dt.scheme(name, arguments),
    )
    _step(model, optimizer, False)  # sets up
    sent = optimizer.stats.bytes_sent
    _step(model, optimizer, True)  # makes the buckets
    sent = optimizer.stats.bytes_sent - sent
    taken: dict[bool, list[tuple[float, ...]]] = {False: [], True: []}
    for turn in range(2 * rounds):
        taken[bool(turn % 2)].append(_step(model, optimizer, bool(turn % 2)))
    forward, backward, plain, waited = (
        statistics.median(column) for column in zip(*taken[False], strict=True)
    )
    *_, overlapped, less = (statistics.median(column) for column in zip(*taken[True], strict=True))
    times = [f"{1e3 * t:.0f}" for t in (forward, backward, plain, overlapped)]
    ratio, waits = f"{overlapped / plain:.2f}", [f"{1e3 * t:.0f}" for t in (waited, less)]
    return "| " + " | ".join([name, link, f"{sent / 1e6:.2f}", *times, ratio, *waits]) + " |"


def _step(model: Any, optimizer: Any, overlapped: bool) -> tuple[float, ...]:
    """Seconds of forward, backward, the whole step, and the waiting within it."""
    tokens = torch.randint(256, (BATCH, CONTEXT))
    dist.barrier()
    waited, began = optimizer.stats.waited_s, time.perf_counter()
    loss = model(input_ids=tokens, labels=tokens).loss
    computed = time.perf_counter()
    with optimizer.overlap() if overlapped else nullcontext():
        loss.backward()
    backward = time.perf_counter()
    optimizer.step()
    optimizer.zero_grad()
    ended = time.perf_counter()
    return computed - began, backward - computed, ended - began, optimizer.stats.waited_s - waited


if __name__ == "__main__":
    main()
