"""What one machine of the replay does: it trains, and keeps a store if it is one of the hosts.

Each machine writes a line after each step: the moment, the step, the number of replicas, a digest of
the weights, the examples that it computed, and the loss on data that nobody trains on. Where the
number of replicas changes it also writes its memory before and after.
"""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import detonation as dt
from detonation.cluster.quorum.store import meeting_store
from detonation.core.exchange.two_stage import TwoStage
from detonation.core.flat.tensors import digest
from detonation.errors import ReplicaLeft

SCHEMES = {"demo": dt.demo(topk=4, chunk=16), "random_sign": dt.random_sign(rate=1 / 4)}
TOKEN = b"a token for a benchmark"
POLL_S = 0.01

WARM = "import torch, detonation as dt; dt.SignSGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)"
"""What a process imports before it trains; an optimizer of torch imports its compiler."""


BATCH = 32
"""Examples of a step, however many machines there are."""


def made(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 16))


class Task:
    """What is learned: the outputs of another net. `seed` draws the examples of each step."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._teacher = made(1).requires_grad_(False)
        self._held_out = torch.rand(256, 32, generator=torch.Generator().manual_seed(1))

    def loss(self, model: torch.nn.Module, step: int, examples: range) -> torch.Tensor:
        """The mean loss of some of the `BATCH` examples of a step."""
        generator = torch.Generator().manual_seed(1_000_003 * self._seed + step)
        chosen = torch.rand(BATCH, 32, generator=generator)[examples.start : examples.stop]
        return (model(chosen) - self._teacher(chosen)).square().mean()

    @torch.no_grad()
    def held_out(self, model: torch.nn.Module) -> float:
        """The loss on examples that no step has."""
        return (model(self._held_out) - self._teacher(self._held_out)).square().mean().item()


def train(
    folder: Path,
    addresses: str,
    name: str,
    replica: int,
    replicas: int,
    scheme: str,
    pace_s: float,
    seed: int = 0,
) -> None:
    """The loop of one machine: of `replicas` that begin together, or, with a negative `replica`, of a newcomer.

    It stands still for `pace_s` in each step, as a host does whose accelerator computes.
    """
    store = meeting_store(addresses)
    model, task = made(), Task(seed)
    if replica < 0:
        optimizer, axis = dt.admitted(model, dt.Guest(store), token=TOKEN, timeout_s=120.0)
    else:
        axis = dt.elastic(replica=replica, replicas=replicas, store=store)
        base = dt.SignSGD(model.parameters(), lr=1e-3)
        optimizer = dt.replicate(base, model, axis, SCHEMES[scheme])
        loaded = dt.load_checkpoint(folder / "checkpoints", model, optimizer)
        began, saved = time.monotonic(), loaded.step if loaded else 0
        step = dt.replay(folder / "updates", optimizer) if (folder / "updates").exists() else 0
        if step:
            taken = f"{step - saved} {time.monotonic() - began}"
            (folder / f"{name}.loaded").write_text(
                f"{step} {digest(model.parameters())[:16]} {taken}"
            )
    log = dt.UpdateLog(folder / "updates")
    optimizer.record(log)
    door = dt.Admission(model, optimizer, token=TOKEN)
    noticed: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: noticed.append(1))
    watch_memory(optimizer, axis, folder, name)
    asked = 0
    with (
        contextlib.suppress(ReplicaLeft),
        (folder / f"{name}.steps").open("w", buffering=1) as lines,
    ):
        while True:
            time.sleep(pace_s)
            optimizer.renumber()
            (micro,) = axis.share(BATCH)
            part = micro.examples
            (micro.weight * task.loss(model, optimizer.step_count, part)).backward()
            optimizer.step()
            optimizer.zero_grad()
            found, loss = digest(model.parameters())[:16], task.held_out(model)
            lines.write(
                f"{time.monotonic()} {optimizer.step_count} {axis.size()} {found}"
                f" {part.start} {part.stop} {loss:.6f}\n"
            )
            door.after_step()
            wanted = int((folder / "save").read_text() or 0) if (folder / "save").exists() else 0
            rows = axis.all_gather(torch.tensor([len(noticed), wanted]))().view(-1, 2)
            if bool((rows[:, 0] > 0).all()):  # nobody is left to hand over to
                dt.save_checkpoint(folder / "checkpoints", model, optimizer)
                axis.close()
                return
            if (
                noticed and asked == 1
            ):  # where all have a notice, some hear of it a step before the others
                axis.depart()
            asked += bool(noticed)
            if int(rows[:, 1].max()) > 0 and bool((rows[:, 1] > 0).all()):
                path = dt.save_checkpoint(folder / "checkpoints", model, optimizer)
                log.rotate(oldest=optimizer.step_count)
                (folder / f"{name}.saved").write_text(f"{wanted} {path.name} {found}")
                while (folder / "save").exists():  # the conductor removes it once all have saved
                    time.sleep(POLL_S)


def watch_memory(optimizer: Any, axis: Any, folder: Path, name: str) -> None:
    """Writes the memory of this replica before and after each change of their number."""
    renumber = optimizer.renumber

    def memory() -> np.ndarray:
        channel = optimizer.build()[0].channel
        flat, link = channel.memory.residual.clone(), channel.link
        if isinstance(
            channel.exchange, TwoStage
        ):  # its part of the mean that owners have not sent is of all
            owned = [
                channel.exchange.residual * (replica == link.replica)
                for replica in range(link.replicas)
            ]
            flat += link.replicas * channel.scheme.codec.basis.inverse(
                channel.exchange.owners.collect(owned)
            )
        return np.array(flat.numpy())

    def watched() -> None:
        if not optimizer.is_built:
            renumber()
            return
        before, was, step = memory(), axis.size(), optimizer.step_count
        try:
            renumber()
        except ReplicaLeft:
            np.save(folder / f"{step}-before-{was}-{name}.npy", before)
            raise
        if axis.size() != was:
            np.save(folder / f"{step}-before-{was}-{name}.npy", before)
            np.save(folder / f"{step}-after-{axis.size()}-{name}.npy", memory())

    optimizer.renumber = watched


def forked(act: Callable[[], None], error: Path) -> int:
    """The id of a process that does `act` alone, and writes its error."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        signal.signal(
            signal.SIGINT, signal.SIG_IGN
        )  # of a terminal, which all get: the conductor ends this process
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        torch.set_num_threads(1)
        act()
        code = 0
    except BaseException as problem:
        error.write_text(repr(problem))
    os._exit(code)


def keep_store(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    kept = dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    while kept is not None:
        signal.pause()
