"""How soon ranks go on after one of four is lost in a collective: by torch's own means, and by an abandoned group.

GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 python -m benchmarks.faults.survive
OMP_NUM_THREADS=1 python -m benchmarks.faults.survive step [--steps 300] [--numel 2097152]

Rank 1 is killed or stopped half a second after the others began an all-gather whose timeout is 6 s. The others call
`abort` on their group, or drop it, or abandon it to another thread, 0.5 s later, and make a group of three. Printed are
the seconds from the loss until the collective ended, and until the new group had gathered, of the slowest rank.

With `step`: the step of an optimizer over `dt.elastic` and over the axis of a mesh without a loss. Both take turns in
two processes; printed are medians and tenth percentiles of rank 0, and the processor time of all its threads.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

import detonation as dt
from detonation.cluster.launch import run_local
from detonation.cluster.survive.groups import Flight, Group

LIMIT_S, BEFORE_S, NOTICE_S = 6.0, 0.5, 0.5
LEFT = [0, 2, 3]


def rank_after_loss(rank: int, port: int, way: str, fault: int, file: Path) -> None:
    """One rank of four; rank 1 is lost."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=60))
    group: Group | ProcessGroupGloo
    if way == "abandon":
        group = Group(PrefixStore("before", store), rank, 4, LIMIT_S)
    else:
        group = ProcessGroupGloo(PrefixStore("before", store), rank, 4, timedelta(seconds=LIMIT_S))
    mine, target, ended = torch.ones(1000), torch.empty(4, 1000), threading.Event()
    if rank == 1:
        time.sleep(BEFORE_S)
        os.kill(os.getpid(), fault)
    lost = time.monotonic() + BEFORE_S
    if isinstance(group, Group):
        Flight(group.all_gather(target, mine), ended.set)
        ended.wait(BEFORE_S + NOTICE_S)
        group.abandon()
    else:
        work = group._allgather_base(target.view(-1), mine)
        if way == "abort":
            threading.Timer(BEFORE_S + NOTICE_S, group.abort).start()
        with contextlib.suppress(RuntimeError):
            work.wait()
        del work, group
    waited = time.monotonic() - lost
    after = Group(PrefixStore("after", store), LEFT.index(rank), 3, LIMIT_S)
    again = Flight(after.all_gather(torch.empty(3, 1000), mine), ended.set)
    while not again.ended:
        time.sleep(0.0005)
    file.write_text(json.dumps([waited, time.monotonic() - lost]))


def measured(way: str, fault: int) -> tuple[float, float]:
    """The slowest rank's seconds until the old collective ended, and until the new group had gathered."""
    listener, pids = socket.create_server(("127.0.0.1", 0)), []
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(rank)) for rank in range(4)]
        for rank in range(4):
            pids.append(os.fork())
            if not pids[-1]:
                rank_after_loss(rank, listener.getsockname()[1], way, fault, files[rank])
                os._exit(0)
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        for rank in LEFT:
            os.waitpid(pids[rank], 0)
        os.kill(pids[1], signal.SIGKILL)
        os.waitpid(pids[1], 0)
        del store
        seconds = [json.loads(files[rank].read_text()) for rank in LEFT]
    return max(waited for waited, _ in seconds), max(whole for _, whole in seconds)


def steps_of(count: int, numel: int) -> list[list[float]]:
    """Wall and processor milliseconds of each step over the mesh axis and over the elastic one, in turns."""
    torch.set_num_threads(1)
    mesh = dt.init_mesh(replicas=2)
    elastic = dt.elastic(mesh)
    found: list[list[float]] = [[], [], [], []]
    optimizers = []
    for axis in (mesh["replicate"], elastic):
        model = torch.nn.Linear(1024, numel // 1024, bias=False)
        model.weight.grad = torch.randn(numel // 1024, 1024)
        optimizers.append(
            (model, dt.replicate(dt.SignSGD(model.parameters(), lr=1e-3), model, axis, dt.demo()))
        )
    dt.same_weights(optimizers[0][0], mesh["replicate"])
    optimizers[1][0].load_state_dict(optimizers[0][0].state_dict())
    for step in range(count + 10):
        for index, (_, optimizer) in enumerate(optimizers):
            began, cpu = time.perf_counter(), time.process_time()
            optimizer.step()
            if step >= 10:
                found[2 * index].append(1000 * (time.perf_counter() - began))
                found[2 * index + 1].append(1000 * (time.process_time() - cpu))
    elastic.close()
    return found


def compare_steps() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["step"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--numel", type=int, default=2**21)
    args = parser.parse_args()
    found = run_local(steps_of, 2, [args.steps, args.numel], timeout_s=3600)[0]
    print("| axis | wall, median ms | wall, tenth percentile | processor, median ms |")
    print("|---|---|---|---|")
    medians = []
    for name, wall, cpu in (("mesh", *found[:2]), ("elastic", *found[2:])):
        medians.append(
            (statistics.median(wall), statistics.quantiles(wall, n=10)[0], statistics.median(cpu))
        )
        print(f"| {name} | {medians[-1][0]:.2f} | {medians[-1][1]:.2f} | {medians[-1][2]:.2f} |")
    print(
        "| elastic more | "
        + " | ".join(f"{100 * (b / a - 1):+.1f} %" for a, b in zip(*medians, strict=True))
        + " |"
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        compare_steps()
        sys.exit()
    print(f"{'way':10} {'fault':8} {'old ended, s':>13} {'new gathered, s':>16}")
    for way_ in ("abort", "drop", "abandon"):
        for fault_ in (signal.SIGKILL, signal.SIGSTOP):
            waited_, whole_ = measured(way_, fault_)
            print(f"{way_:10} {fault_.name:8} {waited_:13.2f} {whole_:16.2f}", flush=True)
