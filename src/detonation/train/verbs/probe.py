"""What `detonation probe` measures: every axis of the world, and a recipe's training step without the network."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import detonation as dt
from detonation.cluster.init import Place, device_here, launched
from detonation.cluster.network.measure import probe_axis
from detonation.cluster.network.profile import Compute, Profile
from detonation.cluster.processes.under_launcher import run_launched
from detonation.core.schemes.registry import SCHEMES
from detonation.train.loop.session import Session, between_replicas, check, start
from detonation.train.loop.timing import forward_backward, optimizer_step
from detonation.train.output.environment import environment
from detonation.train.recipe import resolve
from detonation.train.recipe.schema import Mesh, Table, from_table, require, to_table
from detonation.train.run.run import Request, check_lab, fill, on_ranks, standing

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
        task = _prepare(path, overrides, replicas, shards, link, None)
        mesh = Mesh(**task["mesh"])
        return Profile.of(on_ranks(work, task, mesh, nodes=mesh.replicas)[0])
    prepare = partial(_prepare, path, overrides, replicas, shards, link, place)
    profile = run_launched(place, lambda: Profile.of(work(prepare())), fail)
    return profile if place.rank == 0 else None


def _prepare(
    path: Path | None,
    overrides: Sequence[str],
    replicas: int | None,
    shards: int | None,
    link: str | None,
    place: Place | None,
) -> Table:
    if path is None:
        if overrides:
            raise ValueError("--set changes a recipe: name one")
        given = {"replicas": replicas, "shards": shards, "link": link}
        mesh = Mesh(**fill({key: value for key, value in given.items() if value is not None}, place))
        task = Task(asdict(mesh))
    else:
        config = check(standing(Request(path, tuple(overrides), replicas, shards, link), place))
        require(len(config.levels) == 1, "scheme", config.schemes, "one level: the schemes are measured on one axis")
        task = Task(asdict(config.mesh), path.stem, resolve.read(path), to_table(config))
        check_lab(config.mesh, place)
    return asdict(task)


def work(task: Table) -> Table:
    """Measures a `Task`, given as a table, on this rank; returns the profile as a table. Collective."""
    todo = Task(**task)
    device = device_here()
    mesh = dt.init_mesh(todo.mesh["replicas"], todo.mesh["shards"], device.type)
    axes = {
        "replicate": probe_axis(between_replicas(mesh, Mesh(**todo.mesh).emulated), device, _AXIS_S),
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
    every = {
        s: optimizer_step(session, resolve.resolve(tables, {"scheme": {"name": s}, "mesh": mesh})) for s in SCHEMES
    }
    steps = {scheme: step for scheme, step in every.items() if step is not None}
    numel = sum(parameter.numel() for parameter in session.model.parameters())
    return Compute(name, numel, median, spread, steps)
