"""Everything that a run needs on one rank, made from its configuration in an order that is the same on all ranks."""

import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any, get_args, get_type_hints

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim.lr_scheduler import LambdaLR

import detonation as dt
from detonation import data, models
from detonation.cluster.network.throttled import Emulated
from detonation.core.link.communicator import Axis
from detonation.core.link.link_speed import Pace
from detonation.core.optimizer.replicated import check_order
from detonation.core.schemes.registry import SCHEMES
from detonation.train.loop.world import Ranks, World
from detonation.train.recipe import optimizers
from detonation.train.recipe.schema import REPLICATE, Choice, Config, Level, require

_PLAIN: dict[Any, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "text", NoneType: ""}


@dataclass(frozen=True)
class Session:
    """One rank of a run: its model's shard, the optimizer that replicates, and the data that all draw from."""

    config: Config
    world: World
    device: torch.device
    data: data.Data
    model: nn.Module
    base: torch.optim.Optimizer
    optimizer: dt.Replicated

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def world_size(self) -> int:
        return self.world.size


def check(config: Config) -> Config:
    """`config` with all that depends on library code resolved, without processes and before anything is written.

    Fills in the scheme's defaults and what the data says of the model. Raises `ValueError` for whatever would fail
    later: names, arguments, ranges, missing data, sizes that do not fit.
    """
    check_types("model", models.MODELS.get(config.model.name), config.model.arguments)
    check_types("data", data.TASKS.get(config.data.name), config.data.arguments)
    levels = check_levels(config.levels)
    optimizers.check(config.optimizer)
    loaded = load_data(config.data)
    model = Choice(config.model.name, _agreeing(config.model, loaded))
    with torch.device("meta"):
        models.build(model.name, model.arguments)
    needed = config.train.batch_size * config.mesh.replicas * config.mesh.shards
    if needed > len(loaded.train):
        sizes = f"{config.train.batch_size} x {config.mesh.replicas} replicas x {config.mesh.shards} shards"
        raise ValueError(f"train.batch_size {sizes} are {needed} examples, but there are {len(loaded.train)}")
    return replace(config, model=model, levels=levels)


def start(config: Config, device: torch.device) -> Session:
    """Model, optimizer and data on this rank. Collective; raises `ValueError` where replicas or sizes do not agree."""
    mesh = dt.init_mesh(config.mesh.replicas, config.mesh.shards, device.type)
    torch.manual_seed(config.seed)
    model = models.build(config.model.name, config.model.arguments).to(device)
    dt.shard(model, mesh)
    base = optimizers.build(config.optimizer, model)
    schemes = [dt.scheme(level.scheme.name, level.scheme.arguments) for level in config.levels]
    levels = list(zip(axes(config, mesh), schemes, strict=True))
    optimizer = dt.replicate(base, model, levels=levels, seed=config.seed, safety=safety(config))
    return Session(config, Ranks(mesh, device), device, load_data(config.data), model, base, optimizer)


def check_levels(levels: Sequence[Level]) -> tuple[Level, ...]:
    """`levels` with the defaults of their schemes filled in. Raises `ValueError` for what they cannot be."""
    for level in levels:
        where = "scheme" if level.axis == REPLICATE else f"scheme.{level.axis}"
        check_types(where, SCHEMES.get(level.scheme.name), level.scheme.arguments)
    schemes = [dt.scheme(level.scheme.name, level.scheme.arguments) for level in levels]
    check_order(schemes)
    pairs = zip(levels, schemes, strict=True)
    return tuple(replace(level, scheme=Choice(scheme.name, dict(scheme.arguments))) for level, scheme in pairs)


def axes(config: Config, mesh: DeviceMesh) -> list[Axis]:
    """The axis of each level, from the innermost outwards; an emulated link slows the outermost down. Collective."""
    if len(config.levels) == 1:
        return [between_replicas(mesh, config.mesh.emulated)]
    sizes = {level.axis: level.replicas for level in reversed(config.levels)} | {"shard": config.mesh.shards}
    tiers = init_device_mesh(mesh.device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    *inner, outermost = [tiers[level.axis] for level in config.levels]
    return [*inner, slowed(outermost, config.mesh.emulated)]


def safety(config: Config) -> dt.Safety:
    """What the recipe says of poison and drift."""
    return dt.Safety(config.train.non_finite, config.train.verify_every, config.train.on_drift)  # type: ignore[arg-type]


def between_replicas(mesh: DeviceMesh, link: str) -> Axis:
    """The axis that joins the replicas, slowed down where `link` says so. Collective."""
    return slowed(mesh["replicate"], link)


def slowed(axis: DeviceMesh, link: str) -> Axis:
    """`axis`, no faster than `link` says. Collective."""
    return Emulated(axis, Pace.parse(link)) if link else axis


def check_types(key: str, function: Callable[..., object] | None, arguments: Mapping[str, object]) -> None:
    """Raises `ValueError` for an argument of another type than `function` says, where it says a plain one."""
    hints = get_type_hints(function) if function is not None else {}
    for name, value in arguments.items():
        plain = set(get_args(hints.get(name))) or {hints.get(name)}
        if not plain <= set(_PLAIN):
            continue
        accepted = plain | ({int} if float in plain else set())
        names = " or ".join(sorted(_PLAIN[kind] for kind in plain if kind is not NoneType))
        require(type(value) in accepted, f"{key}.{name}", value, names)


def scheduler(session: Session, done: int) -> LambdaLR:
    """The schedule of `session`'s learning rate, `done` steps into the run."""
    for group in session.optimizer.param_groups:
        group["initial_lr"] = session.config.optimizer.lr
    factor = optimizers.lr_factor(session.config.schedule, session.config.train.steps)
    return LambdaLR(session.optimizer, factor, last_epoch=done - 1)


def load_data(chosen: Choice) -> data.Data:
    """The data set; loaded once in a process, and shared with the processes forked from it."""
    return _load_data(chosen.name, json.dumps(chosen.arguments, sort_keys=True))


@functools.cache
def _load_data(task: str, arguments: str) -> data.Data:
    return data.load(task, json.loads(arguments))


def _agreeing(model: Choice, loaded: data.Data) -> dict[str, object]:
    known = inspect.signature(models.MODELS[model.name]).parameters if model.name in models.MODELS else {}
    needed = {key: value for key, value in loaded.model.items() if key in known}
    for key, value in needed.items():
        given = model.arguments.get(key, value)
        if given != value and not (key == "vocab" and isinstance(given, int) and given > value):
            raise ValueError(f"model.{key} is {given!r}, but the data {loaded.name} has {key} {value}: leave it out")
    return {**needed, **model.arguments}
