"""The session of one rank: model, optimizer and data, which are built from the configuration.

All ranks build these parts in the same order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim.lr_scheduler import LambdaLR

from detonation.cluster.mesh import init_mesh, shard, slow_axis_backend
from detonation.cluster.network.throttled import ThrottledCommunicator
from detonation.cluster.survive.elastic_axis import elastic, place
from detonation.cluster.survive.surviving import SurvivingCommunicator
from detonation.core.agreement import Safety
from detonation.core.link import Axis
from detonation.core.optimizer import Replicated, replicate
from detonation.data import Data
from detonation.link_speed import LinkSpeed
from detonation.models import build_model
from detonation.train.loop.checks import _with_layers, load_data, mark_of_data, scheme_of
from detonation.train.loop.world import ElasticRanks, Ranks, Waits, World, require_same_settings
from detonation.train.recipe import optimizers
from detonation.train.recipe.schema import Config


@dataclass(frozen=True)
class Session:
    """One rank of a run: its shard of the model, the replicating optimizer, and the data set."""

    config: Config
    world: World
    device: torch.device
    data: Data
    model: nn.Module
    base: torch.optim.Optimizer
    optimizer: Replicated
    waits: Waits = field(default_factory=Waits)

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def world_size(self) -> int:
        return self.world.size

    @cached_property
    def data_mark(self) -> list[object]:
        """See `mark_of_data`. Hashing decodes some examples, so it is done once."""
        return mark_of_data(self.data)


def start_session(
    config: Config, device: torch.device, axis: Axis | None = None, data: Data | None = None
) -> Session:
    """Builds the session of this rank. Collective.

    Raises `ValueError` if replicas have different settings, or if the mesh does not fit the number
    of ranks.

    Args:
        axis: Replaces the outermost axis, such as `surviving_axis` in an elastic run.
        data: Replaces the data that `config` names, which are then not loaded.
    """
    replicas = config.mesh.replicas
    # In an elastic run, each replica of the outermost level has a process group of its own.
    # In an elastic run, `replicas` counts only the replicas in the process group of this rank.
    if config.mesh.elastic:
        replicas = config.nodes_inside
    nodes = config.mesh.nodes or config.mesh.shards
    slow = config.mesh.slow_backend or None
    mesh = init_mesh(replicas, nodes, device.type, slow_backend=slow)
    model = seeded_model(config).to(device)
    shard(model, mesh, wire=config.mesh.shard_wire)
    base = optimizers.build_optimizer(config.optimizer, model)
    if isinstance(axis, SurvivingCommunicator):
        require_same_settings(axis.host.membership, config)
    optimizer = replicated_run(config, base, model, axes(config, mesh, axis))
    world: World
    if isinstance(axis, SurvivingCommunicator):
        world = ElasticRanks(mesh, axis, config.train)
    else:
        world = Ranks(mesh, device, config.mesh.sizes[:replicas])
    if data is None:
        data = load_data(config.data)
    return Session(config, world, device, data, model, base, optimizer)


def replicated_run(
    config: Config, base: torch.optim.Optimizer, model: nn.Module, joined: Sequence[Axis]
) -> Replicated:
    """Returns an optimizer that steps `base` and exchanges updates along the axis of each level.
    This call is not collective: the first step of the optimizer builds the levels.
    """
    schemes = map(scheme_of, config.levels)
    levels = list(zip(joined, schemes, strict=True))
    clip = config.train.clip or None
    balance = config.train.balance
    return replicate(
        base,
        model,
        levels=levels,
        safety=safety(config),
        clip=clip,
        balance=balance,
        seed=config.seed,
    )


def surviving_axis(config: Config, mesh: DeviceMesh) -> SurvivingCommunicator:
    """Creates the axis between replicas that may be lost during the run. `mesh` contains only the
    ranks of this replica. Collective.
    """
    here = place()
    if here is None:
        raise ValueError("mesh.elastic needs the address of a store: give --meet and --replica")
    return elastic(
        mesh,
        replica=here.replica,
        replicas=here.replicas,
        store=here.store,
        min_replicas=config.mesh.min_replicas,
        silence_s=config.peers.silence_s,
        link=config.mesh.link,
    )


def seeded_model(config: Config) -> nn.Module:
    """Builds the model of `config` with its initial weights. The table [train] says whether the
    layers of the model are compiled, and whether layers recompute activations.
    """
    torch.manual_seed(config.seed)
    return _with_layers(build_model(config.model.name, config.model.arguments), config.train)


def axes(config: Config, mesh: DeviceMesh, between: Axis | None = None) -> list[Axis]:
    """Returns the axis of each level of replication, the innermost level first. An emulated link
    slows down only the outermost axis. Collective.

    Args:
        mesh: Mesh of all levels; without the outermost level if `between` is given.
        between: Outermost axis; by default a dimension of the mesh.
    """
    if len(config.levels) == 1:
        return [between or slowed(mesh["replicate"], config.mesh.link)]
    levels = config.levels
    if between is not None:
        levels = levels[:-1]
    sizes = {level.axis: level.replicas for level in reversed(levels)}
    sizes["shard"] = config.mesh.shards
    slow = config.mesh.slow_backend or None
    backend = slow_axis_backend(levels[-1].axis, mesh.device_type, slow)
    tiers = init_device_mesh(
        mesh.device_type,
        tuple(sizes.values()),
        mesh_dim_names=tuple(sizes),
        backend_override=backend,
    )
    inner: list[Axis] = [tiers[level.axis] for level in config.levels[:-1]]
    return [*inner, between or slowed(tiers[config.levels[-1].axis], config.mesh.link)]


def safety(config: Config) -> Safety:
    train = config.train
    return Safety(train.non_finite, train.verify_every, train.on_desync)  # type: ignore[arg-type]


def slowed(axis: DeviceMesh, link: str) -> Axis:
    """Returns a communicator along `axis` that is limited to the speed of `link`. If `link` is "",
    returns `axis` unchanged. Collective.
    """
    if link:
        return ThrottledCommunicator(axis, LinkSpeed.parse(link))
    return axis


def scheduler(session: Session, done: int) -> LambdaLR:
    """Returns the schedule of the learning rate, continued after `done` steps."""
    for group in session.optimizer.param_groups:
        group["initial_lr"] = session.config.optimizer.lr * group.get(optimizers.RATIO, 1.0)
    factor = optimizers.lr_factor(session.config.schedule, session.config.train.steps)
    return LambdaLR(session.optimizer, factor, last_epoch=done - 1)
