"""Replicas that are killed, stopped and paused while the others train on, without a restart.

Each world is forked ranks over a store that the parent keeps. Every rank writes a line per step: its number and a
digest of what the replicas agree on. In the end no step may be missing from a survivor, and all digests of a step must
be equal.
"""

import contextlib
import os
import random
import signal
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rows import Row

import detonation as dt
from detonation.core.flat.tensors import digest
from zoo import Plain, batch, built

SCHEMES = {
    "demo": dt.demo(topk=4, chunk=16),
    "random_sign": dt.random_sign(rate=1 / 2),
    "full": dt.full(),
    "diloco": dt.diloco(every=5),
}
SHAPES = ((4, 1), (2, 2))
SILENCE_S, LIMIT_S = 2.0, 120.0
_ENDED = os.WEXITED | os.WNOHANG | os.WNOWAIT


@dataclass(frozen=True)
class Place:
    """A rank in a world: where it meets the others, and where it writes."""

    port: int
    folder: Path
    replica: int
    shard: int

    @property
    def file(self) -> Path:
        return self.folder / f"{self.replica}-{self.shard}"


def survived(folder: Path, seed: int, faults: int) -> list[Row]:
    """Rows for `faults` faults, over all schemes and shapes in turn."""
    rows = {kind: Row(f"{kind}, survived in place") for kind in ("kill -9", "SIGSTOP", "pause")}
    rng, number, recoveries, bag = random.Random(seed), 0, list[float](), list[str]()
    while sum(row.tried for row in rows.values()) < faults:
        name, shape = list(SCHEMES)[number % len(SCHEMES)], SHAPES[number // len(SCHEMES) % len(SHAPES)]
        place = folder / f"world{number}"
        place.mkdir(parents=True)
        if len(bag) < shape[0] - 1:
            bag += rng.sample(list(rows), len(rows))
        kinds = [bag.pop(0) for _ in range(shape[0] - 1)]
        recoveries += world(place, name, shape, kinds, rng, rows)
        number += 1
    if recoveries:
        middle = sorted(recoveries)[len(recoveries) // 2]
        rows["kill -9"].note = (
            f"from notice to the next collective: median {middle:.2f} s, worst {max(recoveries):.2f} s "
            f"({len(recoveries)} recoveries of ranks)"
        )
    return list(rows.values())


def world(
    folder: Path, name: str, shape: tuple[int, int], kinds: list[str], rng: random.Random, rows: dict[str, Row]
) -> list[float]:
    """One world, which suffers faults of `kinds` one after the other. Returns the seconds of each recovery."""
    replicas, shards = shape
    listener = socket.create_server(("127.0.0.1", 0))
    places = [Place(listener.getsockname()[1], folder, r, s) for r in range(replicas) for s in range(shards)]
    pids = {(place.replica, place.shard): _forked(place, name, shape) for place in places}
    port = listener.getsockname()[1]  # kept by the parent once all ranks are forked: it has threads
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
    )
    alive, kind = set(range(replicas)), kinds[0]
    try:
        for kind in kinds:
            _steps_on(places, alive, rng.randrange(2, 7))
            time.sleep(rng.random() * 0.02)
            victim, shard = rng.choice(sorted(alive)), rng.randrange(shards)
            pid, since = pids[victim, shard], time.monotonic()
            if kind == "pause":
                os.kill(pid, signal.SIGSTOP)
                time.sleep(SILENCE_S / 4)
                os.kill(pid, signal.SIGCONT)
            else:
                os.kill(pid, signal.SIGKILL if kind == "kill -9" else signal.SIGSTOP)
                alive.discard(victim)
            _steps_on(places, alive, 2)
            rows[kind].add(since=since)
        _steps_on(places, alive, 6)
    except TimeoutError as error:
        rows[kind].add(f"{name} {shape}: {error}")
    finally:
        _announce_end(folder, max(len(_lines(place.file)) for place in places) + 20)
        recoveries = _ended(places, pids, alive, rows[kinds[-1]], name)
        del store
    for shard in range(shards):
        _compare(places, alive, shard, rows[kinds[-1]], f"{name} {shape} {kinds}")
    return recoveries


def _forked(place: Place, name: str, shape: tuple[int, int]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        _train(place, name, shape)
    except BaseException as error:
        place.file.with_suffix(".error").write_text(repr(error))
        os._exit(1)
    os._exit(0)


def _train(place: Place, name: str, shape: tuple[int, int]) -> None:
    torch.set_num_threads(1)
    replicas, shards = shape
    store = dist.TCPStore("127.0.0.1", place.port, timeout=timedelta(seconds=60))
    mesh, model = None, built(Plain)
    if shards > 1:  # each replica is a world of its own
        own = dist.PrefixStore(f"replica{place.replica}", store)
        dist.init_process_group("gloo", store=own, rank=place.shard, world_size=shards)
        mesh = dt.init_mesh(1, shards, "cpu")
        dt.shard(model, mesh)
    axis = dt.elastic(mesh, replica=place.replica, replicas=replicas, store=store, silence_s=SILENCE_S)
    optimizer = dt.replicate(torch.optim.AdamW(model.parameters(), lr=1e-3), model, axis, SCHEMES[name])
    with place.file.open("w", buffering=1) as lines:
        while not _is_over(place.folder, optimizer.step_count):
            model(batch(place.replica * shards + place.shard, optimizer.step_count, 32)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            agreed = [tensor for each in optimizer.build() for tensor in each.shared_weights()]
            lines.write(f"{optimizer.step_count} {digest(agreed)[:16]}\n")
    axis.close()
    place.file.with_suffix(".losses").write_text(
        " ".join(str(loss.recovered_s) for loss in axis.losses if loss.replicas)
    )


def _announce_end(folder: Path, step: int) -> None:
    """Lets all ranks end after `step`, which none has reached: a rank that ended earlier would be a loss."""
    (folder / "ending").write_text(str(step))
    (folder / "ending").rename(folder / "end")


def _is_over(folder: Path, step: int) -> bool:
    end = folder / "end"
    return end.exists() and step >= int(end.read_text())


def _steps_on(places: list[Place], alive: set[int], steps: int) -> None:
    """Waits until every replica that is alive has taken `steps` more steps."""
    files = [place.file for place in places if place.replica in alive]
    deadline = time.monotonic() + LIMIT_S
    goals = {file: len(_lines(file)) + steps for file in files}
    while any(len(_lines(file)) < goal for file, goal in goals.items()):
        if time.monotonic() > deadline:
            stuck = [file.name for file, goal in goals.items() if len(_lines(file)) < goal]
            raise TimeoutError(f"ranks {stuck} stand still: {[_error(file) for file in files]}")
        time.sleep(0.01)


def _ended(places: list[Place], pids: dict[tuple[int, int], int], alive: set[int], row: Row, name: str) -> list[float]:
    """Waits until those that are alive have ended, all after the same step, and ends the others."""
    deadline = time.monotonic() + 30
    left = [pid for (replica, _), pid in pids.items() if replica in alive]
    while time.monotonic() < deadline and any(os.waitid(os.P_PID, p, _ENDED) is None for p in left):
        time.sleep(0.01)
    for pid in pids.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    errors = {place.file.name: _error(place.file) for place in places if place.replica in alive and _error(place.file)}
    row.losses += [f"{name}: {errors}"] if errors else []
    losses = [place.file.with_suffix(".losses") for place in places if place.replica in alive]
    return [float(number) for file in losses if file.exists() for number in file.read_text().split()]


def _compare(places: list[Place], alive: set[int], shard: int, row: Row, what: str) -> None:
    """Every survivor took every step, and all of them agreed at each."""
    seen: dict[str, str] = {}
    for place in places:
        if place.shard != shard or place.replica not in alive:
            continue
        for expected, (step, found) in enumerate((line.split() for line in _lines(place.file)), 1):
            if int(step) != expected:
                row.losses.append(f"{what}: replica {place.replica} has step {step} in the place of {expected}")
                break
            if seen.setdefault(step, found) != found:
                row.losses.append(f"{what}: replica {place.replica} differs after step {step}")
                break


def _lines(file: Path) -> list[str]:
    """The whole lines of a file that is being written."""
    return file.read_text().split("\n")[:-1] if file.exists() else []


def _error(file: Path) -> str:
    error = file.with_suffix(".error")
    return error.read_text() if error.exists() else ""
