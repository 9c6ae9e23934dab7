"""What `detonation probe` measures: every axis of the world, and a recipe's training step without the network."""

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import detonation as dt
from detonation.cluster.echo import Echo
from detonation.cluster.join import Place, device_here, launched
from detonation.cluster.launch import run_local
from detonation.cluster.launched import run_launched
from detonation.cluster.probe import probe_axis, slowest
from detonation.cluster.profile import Compute, Profile, Step
from detonation.core.schemes import SCHEMES
from detonation.train import optimizers, recipe
from detonation.train.config import Config, Mesh, Table, from_table, require, to_table
from detonation.train.environment import environment
from detonation.train.loop import backward
from detonation.train.run import Request, configure, fill
from detonation.train.setup import Session, between_replicas, check, start

_REPEATS = 5
_AXIS_S = 4.0


@dataclass(frozen=True)
class Task:
    """What to measure, in plain values: the world alone, or a recipe too, as its file and its configuration."""

    mesh: Table
    name: str = ""
    tables: Table | None = None
    config: Table | None = None


def probe(
    path: Path | None,
    overrides: Sequence[str],
    replicas: int | None,
    shards: int | None,
    link: str | None,
    fail: Callable[[Exception], int],
) -> Profile | None:
    """Measures in the world that a launcher started, or in one of its own; None on all ranks but the first.

    Raises `ValueError` for bad input before any process starts, and `WorldError` when a rank fails.
    fail: as in `train.run.run`.
    """
    place = launched(os.environ)
    if place is None:
        torch.set_num_threads(1)  # a process that computed with several threads must not be forked
        task, world_size = _prepare(path, overrides, replicas, shards, link, None)
        return Profile.of(run_local(work, world_size, [task])[0])
    prepare = partial(_prepare, path, overrides, replicas, shards, link, place)
    profile = run_launched(place, lambda: Profile.of(work(prepare()[0])), fail)
    return profile if place.rank == 0 else None


def _prepare(
    path: Path | None,
    overrides: Sequence[str],
    replicas: int | None,
    shards: int | None,
    link: str | None,
    place: Place | None,
) -> tuple[Table, int]:
    if path is None:
        if overrides:
            raise ValueError("--set changes a recipe: name one")
        given = {"replicas": replicas, "shards": shards, "link": link}
        mesh = Mesh(**fill({key: value for key, value in given.items() if value is not None}, place))
        task = Task(asdict(mesh))
    else:
        config = check(configure(Request(path, tuple(overrides), replicas, shards, link), place))
        require(len(config.levels) == 1, "scheme", config.schemes, "one level: the schemes are measured on one axis")
        mesh = config.mesh
        task = Task(asdict(mesh), path.stem, recipe.read(path), to_table(config))
    return asdict(task), mesh.replicas * mesh.shards


def work(task: Table) -> Table:
    """Measures a `Task`, given as a table, on this rank; returns the profile as a table. Collective."""
    todo = Task(**task)
    device = device_here()
    mesh = dt.init_mesh(todo.mesh["replicas"], todo.mesh["shards"], device.type)
    axes = {
        "replicate": probe_axis(between_replicas(mesh, todo.mesh["link"]), device, _AXIS_S),
        "shard": probe_axis(mesh["shard"], device, _AXIS_S / 2),
    }
    compute = None
    if todo.config is not None and todo.tables is not None:
        compute = _compute(start(from_table(todo.config), device), todo.name, todo.tables)
    replicas, shards = mesh.shape
    return asdict(Profile(replicas, shards, dist.get_backend(), axes, compute, environment()))


def _compute(session: Session, name: str, tables: Mapping[str, Any]) -> Compute:
    median, spread = forward_backward(session)
    mesh = asdict(session.config.mesh)
    every = {s: optimizer_step(session, recipe.resolve(tables, {"scheme": {"name": s}, "mesh": mesh})) for s in SCHEMES}
    steps = {scheme: step for scheme, step in every.items() if step is not None}
    numel = sum(parameter.numel() for parameter in session.model.parameters())
    return Compute(name, numel, median, spread, steps)


def forward_backward(session: Session) -> tuple[float, float]:
    """The median time of the forward and backward passes of a step, and their spread (IQR / median). Collective."""
    backward(session, 0)
    low, median, high = statistics.quantiles(_times(lambda: backward(session, 0)), n=4)
    return median, (high - low) / median


def optimizer_step(session: Session, config: Config) -> Step | None:
    """The optimizer's step of `config` on the model of `session`, among replicas that all say the same. Collective.

    None where that is refused: larger than dense, or look-ahead with an optimizer that cannot do it.
    """
    scheme = dt.scheme(config.scheme.name, config.scheme.arguments)
    base = optimizers.build(config.optimizer, session.model)
    optimizer = dt.replicate(base, session.model, Echo(session.config.mesh.replicas), scheme)
    try:
        optimizer.step()
    except ValueError:
        return None

    def at(step: int) -> float:
        def again() -> None:
            optimizer.step_count = step
            optimizer.step()

        return statistics.median(_times(again))

    last = scheme.round.every - 1
    return Step(at(last), at(last - 1) if last else 0.0)


def _times(function: Callable[[], object]) -> list[float]:
    """How long `function` takes, several times over; of all ranks, which begin together, the slowest counts."""
    times = []
    for _ in range(_REPEATS):
        dist.barrier()
        began = time.perf_counter()
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    agreed: list[float] = slowest(torch.tensor(times, dtype=torch.float64)).tolist()
    return agreed
