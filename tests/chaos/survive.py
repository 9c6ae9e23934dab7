"""Replicas that are killed, stopped, cut off and slowed down, and that come in, while the others train on.

Each world is forked ranks, and its store a process of its own; where the network is cut each replica has a namespace.
Every rank writes a line per step: its number and a digest of what the replicas agree on. In the end no step may be
missing from a survivor, and all digests of a step must be equal.
"""

import contextlib
import os
import random
import signal
import subprocess
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.lab import INTERFACE, NamespaceCluster, namespace_cluster
from rows import Row
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import detonation as dt
from commands import free_port
from detonation.core.flat.tensors import digest
from detonation.errors import ReplicaLeft
from detonation.link_speed import LinkSpeed
from zoo import Plain, batch, built

SCHEMES = {
    "demo": dt.demo(topk=4, chunk=16),
    "random_sign": dt.random_sign(rate=1 / 2),
    "full": dt.full(),
    "diloco": dt.diloco(every=5),
}
SHARDED, WHOLE, LEVELS = "sharded", "partly whole", "two levels"
SHAPES = ((4, 1, SHARDED), (2, 2, SHARDED), (4, 2, WHOLE), (4, 2, LEVELS))
"""Replicas, ranks of each, and what these ranks are to each other: nobody comes in where they hold the same."""
ENDING = {
    "kill": "kill -9",
    "stop": "SIGSTOP",
    "cut": "cut cable",
    "leave": "asked to leave (SIGTERM)",
}
KINDS = {**ENDING, "slow": "slow (SIGSTOP, SIGCONT)", "rejoin": "rejoin"}
SILENCE_S, LIMIT_S, AHEAD = 2.0, 120.0, 15
LINK, TOKEN = "1gbit", b"0123456789abcdef"
_ENDED = os.WEXITED | os.WNOHANG | os.WNOWAIT


@dataclass(frozen=True)
class Place:
    """A rank in a world: where it meets the others, and where it writes. joins: it comes in later."""

    address: tuple[str, int]
    folder: Path
    replica: int
    shard: int
    joins: bool
    nodes: NamespaceCluster | None

    @property
    def file(self) -> Path:
        return self.folder / f"{self.replica}-{self.shard}"

    @property
    def host(self) -> str:
        return self.nodes.address(self.replica) if self.nodes else "127.0.0.1"


def survived(folder: Path, seed: int, faults: int) -> list[Row]:
    """Rows for `faults` faults, over all schemes and shapes in turn."""
    kinds = [kind for kind in KINDS if kind != "cut" or os.geteuid() == 0]
    rows = {kind: Row(f"{KINDS[kind]}, survived in place") for kind in kinds}
    rng, number, recoveries, bag = random.Random(seed), 0, list[float](), list[str]()
    while (left := faults - sum(row.tried for row in rows.values())) > 0:
        shape = SHAPES[number % len(SHAPES)]
        name = list(SCHEMES)[
            (number + number // len(SHAPES)) % len(SCHEMES)
        ]  # each with each in turn
        place = folder / f"world{number}"
        place.mkdir(parents=True)
        if len(bag) < len(kinds):
            bag += rng.sample(kinds, len(kinds))
        drawn = _possible(bag, shape, min(left, len(kinds)))
        with contextlib.ExitStack() as held:
            nodes = None
            if "cut" in drawn:
                count = shape[0] + drawn.count("rejoin") + 1
                nodes = held.enter_context(namespace_cluster(count, LinkSpeed.parse(LINK)))
            recoveries += world(place, name, shape, drawn, nodes, rng, rows)
        number += 1
    if recoveries:
        middle = sorted(recoveries)[len(recoveries) // 2]
        rows["kill"].note = (
            f"from notice to the next collective: median {middle:.2f} s, worst {max(recoveries):.2f} s "
            f"({len(recoveries)} recoveries of ranks)"
        )
    return list(rows.values())


def _possible(bag: list[str], shape: tuple[int, int, str], most: int) -> list[str]:
    """Takes kinds of faults out of `bag`, in an order that leaves one replica; two, where racks compare."""
    drawn: list[str] = []
    replicas, _, inside = shape
    least = 1 if inside == SHARDED else 2
    for kind in list(bag):
        admits = kind != "rejoin" or inside == SHARDED
        if admits and len(drawn) < most and (kind not in ENDING or replicas > least):
            bag.remove(kind)
            drawn.append(kind)
            replicas += (kind == "rejoin") - (kind in ENDING)
    return drawn


def world(
    folder: Path,
    name: str,
    shape: tuple[int, int, str],
    kinds: list[str],
    nodes: NamespaceCluster | None,
    rng: random.Random,
    rows: dict[str, Row],
) -> list[float]:
    """One world, which suffers faults of `kinds` one after the other. Returns the seconds of each recovery."""
    replicas, shards, inside = shape
    everyone, keeper = range(replicas + kinds.count("rejoin")), replicas + kinds.count("rejoin")
    address = (nodes.address(keeper), 29400) if nodes else ("127.0.0.1", free_port())
    store = _forked(lambda: _keep_store(address, nodes, keeper), folder / "store")
    places = [
        Place(address, folder, r, s, r >= replicas, nodes) for r in everyone for s in range(shards)
    ]
    pids = {
        (p.replica, p.shard): _forked(lambda p=p: _train(p, name, shape), p.file) for p in places
    }
    alive, kind = set(range(replicas)), kinds[0]
    try:
        for kind in kinds:
            _steps_on(places, alive, rng.randrange(2, 7))
            time.sleep(rng.random() * 0.02)
            since = time.monotonic()
            if kind == "rejoin":
                victim = next(
                    r for r in everyone if r >= replicas and not (folder / f"go{r}").exists()
                )
                (folder / f"go{victim}").touch()
                alive.add(victim)
            else:
                victim = rng.choice(sorted(alive))
                _strike(kind, pids[victim, rng.randrange(shards)], victim, nodes)
                alive -= {victim} if kind in ENDING else set()
            _steps_on(places, alive, 2)
            rows[kind].add(since=since)
        _steps_on(places, alive, 6)
    except TimeoutError as error:
        rows[kind].add(f"{name} {shape} {kinds}: {error}")
    finally:
        (folder / "end").touch()
        recoveries = _ended(places, pids, alive, rows[kinds[-1]], f"{name} {shape} {kinds}")
        os.kill(store, signal.SIGKILL)
        os.waitpid(store, 0)
    for shard in range(shards):
        mine = [place for place in places if place.shard == shard]
        _compare(mine, alive, 1, rows[kinds[-1]], f"{name} {shape} {kinds}")
    if inside != SHARDED:
        _compare(places, alive, 2, rows[kinds[-1]], f"{name} {shape} {kinds}, what all ranks hold")
    return recoveries


def _strike(kind: str, pid: int, victim: int, nodes: NamespaceCluster | None) -> None:
    if kind == "cut":
        assert nodes is not None
        subprocess.run(
            ["ip", "-n", nodes.names[victim], "link", "set", INTERFACE, "down"], check=True
        )
    else:
        os.kill(pid, {"kill": signal.SIGKILL, "leave": signal.SIGTERM}.get(kind, signal.SIGSTOP))
    if kind == "slow":
        time.sleep(SILENCE_S / 4)
        os.kill(pid, signal.SIGCONT)


def _forked(act, file: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        torch.set_num_threads(1)
        act()
    except BaseException as error:
        file.with_suffix(".error").write_text(repr(error))
        os._exit(1)
    os._exit(0)


def _keep_store(address: tuple[str, int], nodes: NamespaceCluster | None, node: int) -> None:
    if nodes:
        nodes.enter(node)
    store = dist.TCPStore(*address, is_master=True, wait_for_workers=False)
    while store is not None:
        signal.pause()


def _train(place: Place, name: str, shape: tuple[int, int, str]) -> None:
    replicas, shards, inside = shape
    if place.nodes:
        place.nodes.enter(place.replica)
    while place.joins and not (place.folder / f"go{place.replica}").exists():
        if _is_over(place.folder):
            return
        time.sleep(0.01)
    store = dist.TCPStore(*place.address, timeout=timedelta(seconds=60))
    mesh, model = None, built(Plain)
    if shards > 1:  # each replica is a world of its own
        own = dist.PrefixStore(f"replica{place.replica}", store)
        dist.init_process_group("gloo", store=own, rank=place.shard, world_size=shards)
        mesh = dt.init_mesh(1, shards, "cpu")
        if inside == SHARDED:
            dt.shard(model, mesh)
        elif inside == WHOLE:
            fully_shard(model.layers[0], mesh=mesh["shard"])
    if place.joins:
        optimizer, axis = dt.admitted(
            model, dt.Guest(store, mesh, silence_s=SILENCE_S), token=TOKEN
        )
    else:
        axis = dt.elastic(
            mesh, replica=place.replica, replicas=replicas, store=store, silence_s=SILENCE_S
        )
        way = {
            SHARDED: {"axis": axis, "scheme": SCHEMES[name]},
            WHOLE: {"axis": axis, "scheme": SCHEMES[name], "intra_node": mesh and mesh["shard"]},
            LEVELS: {"levels": [(mesh and mesh["shard"], dt.full()), (axis, SCHEMES[name])]},
        }
        optimizer = dt.replicate(
            torch.optim.AdamW(model.parameters(), lr=1e-3), model, **way[inside]
        )
    door = dt.Admission(model, optimizer, place.host, token=TOKEN) if inside == SHARDED else None
    signal.signal(signal.SIGTERM, lambda *_: axis.depart())
    with contextlib.suppress(ReplicaLeft), place.file.open("w", buffering=1) as lines:
        while not _comes_to_end(place.folder, store, optimizer.step_count):
            model(
                batch(axis.replica * shards + place.shard, optimizer.step_count, 32)
            ).mean().backward()
            for parameter in model.parameters() if inside == WHOLE else ():
                if not isinstance(parameter, DTensor):
                    dist.all_reduce(parameter.grad, group=mesh.get_group("shard"))
            optimizer.step()
            optimizer.zero_grad()
            parts = [
                each for each in optimizer.build() if each.link.elastic
            ]  # racks differ inside a round
            whole = [
                each
                for each in parts
                if not any(isinstance(p, DTensor) for p in each.parameters.values())
            ]
            found = (
                digest([t for each in some for t in each.shared_weights()])[:16]
                for some in (parts, whole)
            )
            lines.write(f"{optimizer.step_count} {' '.join(found)}\n")
            if door:
                door.after_step()
    if not _is_over(place.folder):
        return  # it has left
    axis.close()
    place.file.with_suffix(".losses").write_text(
        " ".join(str(loss.recovered_s) for loss in axis.losses if loss.replicas)
    )


def _is_over(folder: Path) -> bool:
    return (folder / "end").exists()


def _comes_to_end(folder: Path, store: dist.TCPStore, step: int) -> bool:
    """True after the last step, which the first rank that sees the end sets for all.

    No other rank is as far ahead by then: a rank that ended earlier would be a loss for the others.
    """
    if _is_over(folder):
        store.compare_set("last", "", str(step + AHEAD))
    return bool(store.check(["last"])) and step >= int(store.get("last"))


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


def _ended(
    places: list[Place], pids: dict[tuple[int, int], int], alive: set[int], row: Row, name: str
) -> list[float]:
    """Waits until those that are alive have ended, all after the same step, and ends the others."""
    deadline = time.monotonic() + LIMIT_S
    left = [pid for (replica, _), pid in pids.items() if replica in alive]
    while time.monotonic() < deadline and any(os.waitid(os.P_PID, p, _ENDED) is None for p in left):
        time.sleep(0.01)
    for pid in pids.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    living = [place for place in places if place.replica in alive]
    errors = {place.file.name: _error(place.file) for place in living if _error(place.file)}
    row.losses += [f"{name}: {errors}"] if errors else []
    row.losses += [
        f"{name}: {p.file.name} did not end"
        for p in living
        if not p.file.with_suffix(".losses").exists() and not errors
    ]
    losses = [place.file.with_suffix(".losses") for place in living]
    return [
        float(number) for file in losses if file.exists() for number in file.read_text().split()
    ]


def _compare(places: list[Place], alive: set[int], column: int, row: Row, what: str) -> None:
    """Every survivor took every step from its first one on, and all of them agreed at each, and on the last.

    Args:
        column: Of the digest in a line.
    """
    seen: dict[str, str] = {}
    lasts = set()
    for place in places:
        if place.replica not in alive:
            continue
        lines = [line.split() for line in _lines(place.file)]
        first = int(lines[0][0]) if place.joins and lines else 1
        for expected, (step, found) in enumerate(
            ((line[0], line[column]) for line in lines), first
        ):
            if int(step) != expected:
                row.losses.append(
                    f"{what}: replica {place.replica} has step {step} in the place of {expected}"
                )
                break
            if seen.setdefault(step, found) != found:
                row.losses.append(f"{what}: replica {place.replica} differs after step {step}")
                break
        lasts.add(lines[-1][0] if lines else "none")
    if len(lasts) > 1:
        row.losses.append(f"{what}: the replicas ended after steps {sorted(lasts)}")


def _lines(file: Path) -> list[str]:
    """The whole lines of a file that is being written."""
    return file.read_text().split("\n")[:-1] if file.exists() else []


def _error(file: Path) -> str:
    error = file.with_suffix(".error")
    return error.read_text() if error.exists() else ""
