"""`detonation probe`: measures the link of each axis, and the time of a training step without the
network.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch.distributed as dist

from detonation.cluster.init import LaunchPosition, interface_line, launch_position, local_device
from detonation.cluster.launch import run_under_launcher
from detonation.cluster.mesh import init_mesh
from detonation.cluster.network.measure import Everyone, probe_axis
from detonation.cluster.network.profile import Compute, Profile
from detonation.cluster.processes.rendezvous import use_interface
from detonation.core.schemes import known_schemes
from detonation.train.choice.asked import standing
from detonation.train.choice.step_times import forward_backward, optimizer_step
from detonation.train.loop.checks import check_config
from detonation.train.loop.session import Session, slowed, start_session
from detonation.train.output.directory import environment
from detonation.train.recipe.resolve import (
    Layers,
    fill_mesh,
    from_plain,
    merge,
    read_layers,
    to_plain,
)
from detonation.train.recipe.schema import Config, MeshConfig, Table, require
from detonation.train.run.start import compute_with_one_thread, on_ranks

_AXIS_S = 4.0
_OFF: Table = {
    "train": {"log_updates": False, "publish": ""},
    "mesh": {"elastic": False, "min_replicas": 1, "meet": ""},
}
"""Values that switch settings off while the probe runs. The probe does not measure these settings,
and with some of them scheme `none` would be refused.
"""


@dataclass(frozen=True)
class ProbeRequest:
    """A user's command; its fields are named after the flags of `detonation probe`.

    Without `recipe` it measures only the links.
    """

    recipe: Path | None = None
    overrides: tuple[str, ...] = ()
    replicas: int | None = None
    shards: int | None = None
    link: str | None = None
    slow_backend: str | None = None
    interface: str = ""


@dataclass(frozen=True)
class ProbeTask:
    """The mesh to measure, and the recipe after it was read and checked. Forked ranks inherit this
    object.
    """

    mesh: MeshConfig
    name: str = ""
    layers: Layers | None = None
    config: Config | None = None


def probe(request: ProbeRequest, fail: Callable[[Exception], int]) -> Profile | None:
    """Measures in the processes of a launcher, or in processes that this function starts. Returns
    the profile on the first rank, and None on all other ranks.

    See `train.run.start.run_training` for `fail` and errors.
    """
    place = launch_position(os.environ)
    if place is None:
        compute_with_one_thread()
        task = _prepare(request, None)
        use_interface(os.environ, request.interface)
        ranks = on_ranks(probe_on_rank, task, probe_afresh, [to_plain(request)], task.mesh)
        return Profile.of(ranks[0])
    prepare = partial(_prepare, request, place)

    def on_this_rank() -> Profile:
        return Profile.of(probe_on_rank(prepare()))

    profile = run_under_launcher(place, on_this_rank, fail, prepare, request.interface)
    if place.rank == 0:
        return profile
    return None


def _prepare(request: ProbeRequest, place: LaunchPosition | None) -> ProbeTask:
    flags = {
        "replicas": request.replicas,
        "shards": request.shards,
        "link": request.link,
        "slow_backend": request.slow_backend,
    }
    if request.recipe is None:
        if request.overrides:
            raise ValueError("--set changes a recipe: name a recipe")
        given = {key: value for key, value in flags.items() if value is not None}
        return ProbeTask(MeshConfig(**fill_mesh(given, place)))
    layers = read_layers(request.recipe, request.overrides, place, mesh=flags)
    config = check_config(standing(Layers(layers.tables, merge(layers.overrides, _OFF))))
    allowed = "one level: the schemes are measured on one axis"
    require(len(config.levels) == 1, "scheme", config.schemes, allowed)
    nodes = [*config.mesh.nodes]
    require(
        not nodes, "mesh.nodes", nodes, "left out: give the ranks of the smallest node as --shards"
    )
    return ProbeTask(config.mesh, request.recipe.stem, layers, config)


def probe_afresh(request: Table) -> Table:
    """Measures in a spawned rank. Such a rank inherits no objects from its parent process, so the
    recipe is read again.
    """
    return probe_on_rank(_prepare(from_plain(ProbeRequest, request), None))


def probe_on_rank(task: ProbeTask) -> Table:
    """Measures on this rank. Returns the profile as plain values. Collective."""
    device = local_device()
    slow = task.mesh.slow_backend or None
    mesh = init_mesh(task.mesh.replicas, task.mesh.shards, device.type, slow_backend=slow)
    if dist.get_rank() == 0 and (line := interface_line()):
        print(line, file=sys.stderr, flush=True)
    axes = {
        "replicate": probe_axis(slowed(mesh["replicate"], task.mesh.link), device, _AXIS_S),
        "shard": probe_axis(mesh["shard"], device, _AXIS_S / 2),
    }
    compute = None
    if task.config is not None and task.layers is not None:
        compute = _compute(start_session(task.config, device), task.name, task.layers)
    replicas, shards = mesh.shape
    backend = str(dist.get_backend())
    if slow:
        backend += f", {slow} between replicas"
    return asdict(Profile(replicas, shards, backend, axes, compute, environment()))


def _compute(session: Session, name: str, layers: Layers) -> Compute:
    everyone = Everyone(session.device)
    median, spread = forward_backward(session, everyone)
    # measure each scheme with the settings of the recipe, without the changes of `--set`
    plain = Layers(layers.tables, {**_OFF, "mesh": asdict(session.config.mesh)})
    steps = {}
    for scheme in dict.fromkeys([*known_schemes(), session.config.scheme.name]):
        step = optimizer_step(session, everyone, plain.under(scheme, {}))
        if step is not None:
            steps[scheme] = step
    trained = [each for each in session.model.parameters() if each.requires_grad]
    numel = sum(parameter.numel() for parameter in trained)
    train = session.config.train
    return Compute(name, numel, median, spread, steps, train.batch_size * train.accumulate)
