"""One training run, from a recipe to a finished run directory: checks first, then processes."""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from detonation.choices import unknown
from detonation.cluster.init import Place, launched
from detonation.cluster.network import namespaces
from detonation.cluster.processes.launch import run_local
from detonation.cluster.processes.rendezvous import keep_to_one_interface
from detonation.cluster.processes.under_launcher import run_launched
from detonation.core.link.link_speed import Pace
from detonation.core.schemes.registry import SCHEMES
from detonation.train.auto.asked import Asked, Auto
from detonation.train.loop.session import check
from detonation.train.output import directory, trackers
from detonation.train.output.screen import clear
from detonation.train.recipe import resolve
from detonation.train.recipe.schema import Config, Mesh, Table, require, to_table
from detonation.train.recipe.sizes import check_sizes
from detonation.train.run.restarts import restartable, restarted
from detonation.train.run.worker import Task, work


@dataclass(frozen=True)
class Request:
    """What a user asked for. `replicas`, `shards` and `link` are those of the recipe, or of the launcher, when None."""

    recipe: Path
    overrides: tuple[str, ...] = ()
    replicas: int | None = None
    shards: int | None = None
    link: str | None = None
    out: Path | None = None
    resume: bool = False
    stop_after: int | None = None
    checkpoint_every: int | None = None
    keep: int | None = None
    interface: str = ""
    loggers: tuple[str, ...] = ()
    lab: bool = False
    to_stderr: bool = False


def run(request: Request, fail: Callable[[Exception], int]) -> Table:
    """Trains as `request` says, in the world that a launcher started or in one of its own; returns the summary.

    Raises `ValueError` for bad input before any process starts, and `WorldError` when a rank fails.
    fail: shows an error and returns the exit code, for the end of a launcher's rank that cannot raise: its main thread
    waits for a rank that is lost.
    """
    require(request.stop_after is None or request.stop_after >= 1, "--stop-after", request.stop_after, "at least 1")
    every = request.checkpoint_every
    require(every is None or every >= 1, "--checkpoint-every", every, "at least 1")
    require(request.keep is None or request.keep >= 1, "--keep", request.keep, "at least 1")
    if request.resume and request.out is None:
        raise ValueError("--resume needs --out: the run directory to continue")
    if restartable(os.environ) and request.out is None:
        raise ValueError("a run that its launcher may start again needs --out: the run directory to continue")
    place = launched(os.environ)
    if place is not None:
        return run_launched(
            place, lambda: _finished(request) or work(_prepared(request, place)[0]), fail, interface=request.interface
        )
    if finished := _finished(request):
        return finished
    keep_to_one_interface(os.environ, True, request.interface)
    # A process that computed with several threads must not be forked: the children would wait for threads they lack.
    torch.set_num_threads(1)
    task, config = _prepared(request, None)
    try:
        return dict(on_ranks(work, task, config.mesh, nodes=config.levels[-1].replicas)[0])
    finally:
        clear(request.to_stderr)


def on_ranks(work: Callable[[Table], Any], task: Table, mesh: Mesh, nodes: int) -> list[Any]:
    """What `work(task)` returns on each rank of a world on this machine; in a lab of so many nodes, if `mesh` asks."""
    size = mesh.replicas * mesh.shards
    if not mesh.lab:
        return run_local(work, size, [task])
    with namespaces.lab(nodes, Pace.parse(mesh.link)) as made:
        return run_local(work, size, [task], enter=lambda rank: made.enter(rank * nodes // size))


def is_first() -> bool:
    """Is this the process that speaks for all: rank 0 of a launcher's, or the one that started its own?"""
    place = launched(os.environ)
    return place is None or place.rank == 0


def configure(request: Request, place: Place | None) -> Config:
    """The configuration of the recipe with what the launcher and the command line say, the latter last."""
    return resolve.resolve(*layers(request, place))


def standing(request: Request, place: Place | None) -> Config:
    """The same, with full synchronisation in the place of a scheme that is still to be chosen."""
    config, layered = configure(request, place), layers(request, place)
    asked = Auto.of(config)
    return config if asked is None else Asked(asked, *layered).under("full", {})


def layers(request: Request, place: Place | None) -> tuple[Table, Table]:
    """The recipe's tables, and those of the launcher and the command line to lay over them."""
    overrides = resolve.parse_sets(request.overrides)
    flags = {"replicas": request.replicas, "shards": request.shards, "link": request.link, "lab": request.lab or None}
    mesh = {**overrides.get("mesh", {}), **{key: value for key, value in flags.items() if value is not None}}
    saving = {"checkpoint_every": request.checkpoint_every, "keep": request.keep}
    given: Table = {key: value for key, value in saving.items() if value is not None}
    if request.loggers:
        given["loggers"] = list(request.loggers)
    overrides = {**overrides, "train": {**overrides.get("train", {}), **given}}
    table = resolve.read(request.recipe)
    for scheme in table.get("tuned", {}):
        if scheme not in SCHEMES:
            raise unknown("scheme in [tuned]", scheme, SCHEMES)
    mesh = _world(mesh, resolve.replicas_of_levels(table, overrides), place)
    return table, {**overrides, "mesh": mesh}


def _world(mesh: Table, levels: int | None, place: Place | None) -> Table:
    """The mesh in a launcher's world; where the recipe has levels, `levels` is how many replicas they come to."""
    if levels is None or "replicas" in mesh:
        return fill(mesh, place)
    return {key: value for key, value in fill({**mesh, "replicas": levels}, place).items() if key != "replicas"}


def _finished(request: Request) -> Table | None:
    """The summary of a run that had finished when its launcher started it again."""
    if request.out is None or not restarted(os.environ) or not (request.out / directory.SUMMARY).exists():
        return None
    return {**directory.read_json(request.out / directory.SUMMARY), "directory": str(request.out)}


def _prepared(request: Request, place: Place | None) -> tuple[Table, Config]:
    """The task that every rank will do, and its configuration; whatever can be checked before is checked here."""
    config = configure(request, place)
    check_lab(config.mesh, place)
    chosen = Auto.of(config)
    asked = None if chosen is None else Asked(chosen, *layers(request, place))
    config = check(config) if asked is None else asked.check()
    if asked is None:
        check_sizes(config)
    if place is None or place.rank == 0:
        trackers.check(config.train.loggers)
        if request.out is not None:
            again = restartable(os.environ)
            directory.check_free(request.out, request.resume or restarted(os.environ), may_start=again)
    return asdict(_task(request, config, asked)), config


def check_lab(mesh: Mesh, place: Place | None) -> None:
    """Raises `ValueError` where `mesh` asks for a lab that there cannot be."""
    if mesh.lab and place is not None:
        raise ValueError("a lab has processes of its own: leave mesh.lab out under a launcher")
    if mesh.lab:
        namespaces.check(Pace.parse(mesh.link))


def fill(mesh: Table, place: Place | None) -> Table:
    """A launcher's world: a replica is a node, unless the command line says otherwise."""
    if place is None:
        return mesh
    replicas, shards = mesh.get("replicas"), mesh.get("shards")
    if shards is None:
        shards = place.local_world_size if replicas is None else place.world_size // replicas
    if replicas is None:
        replicas = place.world_size // shards
    if replicas * shards != place.world_size:
        product = f"{replicas} replicas x {shards} shards are {replicas * shards} processes"
        raise ValueError(f"{product}, but the launcher started {place.world_size}")
    return {**mesh, "replicas": replicas, "shards": shards}


def _task(request: Request, config: Config, asked: Asked | None) -> Task:
    return Task(
        config=to_table(config),
        asked=None if asked is None else asdict(asked),
        name=request.recipe.stem,
        out="" if request.out is None else str(request.out),
        resume=request.resume or restarted(os.environ),
        may_start=restartable(os.environ),
        stop_after=request.stop_after or 0,
        to_stderr=request.to_stderr,
    )
