"""Functions with which a replica finds the other replicas of an elastic run, and joins a run that
already trains.
"""

import contextlib
import dataclasses
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from detonation.cluster.mesh import init_mesh, shard
from detonation.cluster.position import LaunchPosition, host_and_port, require_known_host
from detonation.cluster.processes.failure import RunError
from detonation.cluster.quorum.store import meeting_store
from detonation.cluster.survive.elastic_axis import Guest
from detonation.cluster.survive.surviving import SurvivingCommunicator
from detonation.feed.admission import admitted
from detonation.feed.token import LostFeed, Refused, read_token
from detonation.train.choice.asked import Asked
from detonation.train.loop.checks import load_data
from detonation.train.loop.session import Session, safety, seeded_model, surviving_axis
from detonation.train.loop.world import ElasticRanks, require_same_settings, settings_of_run
from detonation.train.output import directory
from detonation.train.recipe.resolve import Request
from detonation.train.recipe.schema import Config


def meeting_of(request: Request) -> str:
    """Returns the address at which the replicas of `request` meet; "" if the request has none.

    This works even if other settings of the request are invalid.
    """
    for each in reversed(request.overrides):
        key, _, value = each.partition("=")
        if key.strip() == "mesh.meet":
            return value.strip().strip("\"'")
    with contextlib.suppress(ValueError):
        return request.layers(None).config().mesh.meet
    return ""


def check_place(
    request: Request, config: Config, place: LaunchPosition | None, asked: Asked | None
) -> None:
    """Raises `ValueError` if the elastic options of `request` conflict."""
    number = request.replica
    mesh = config.mesh
    last = config.levels[-1].replicas
    if request.join and len(config.levels) > 1:
        raise ValueError(
            "replicas cannot join a run with several levels: start all replicas with the run"
        )
    if request.join and number is not None:
        raise ValueError(
            f"--replica {number} conflicts with --join, which takes the next free number: leave"
            " --replica out"
        )
    if number is not None and not (mesh.elastic and mesh.meet and 0 <= number < last):
        raise ValueError(
            f"--replica {number} needs --elastic, --meet HOST:PORT and 0 <= replica < {last}"
        )
    if mesh.elastic and place is not None and number is None and not request.join:
        raise ValueError(
            "under a launcher each replica of an elastic run is a job of its own: give --replica"
            " and --meet"
        )
    if request.join:
        _check_directory_of_newcomer(request.out)
    _check_addresses(request, mesh.meet)


def _check_directory_of_newcomer(out: Path | None) -> None:
    if out is None:
        raise ValueError("--join needs --out: the run directory, for checkpoints")
    if (out / directory.SUMMARY).exists():
        raise ValueError(
            f"run directory {out} holds a finished run, and the joined run would replace its"
            " checkpoints: choose another --out"
        )


def _check_addresses(request: Request, meet: str) -> None:
    """Raises `ValueError` if the address of a store is wrong, or if this command would have to host
    several stores.
    """
    for flag, addresses in (("--meet", meet), ("--join", request.join)):
        if addresses:
            require_known_host(flag, addresses)
    if "," in meet and request.replica is None and not request.join:
        raise ValueError(
            f"--meet is {meet!r}, but a command hosts one store only: start detonation meet at each"
            " address, and give --replica"
        )


def check_feed(address: str) -> None:
    """Raises `ValueError` if `address` has no port, or if there is no token for the followers of
    the feed.
    """
    host_and_port(address)
    read_token()


def joined_session(
    config: Config, asked: Asked | None, device: torch.device, address: str, out: Path
) -> Session:
    """Builds the session of a replica that joins a run through the store at `address`. Collective.

    If the recipe has scheme "auto", the replica uses the scheme that the run has chosen. The
    replica receives weights, optimizer state and `step_count` from the run.
    """
    read_token()  # check everything on this machine before contacting other replicas
    directory.require_writable(out)
    store = meeting_store(address)
    mesh = init_mesh(1, config.mesh.shards, device.type)
    model = seeded_model(config).to(device)
    shard(model, mesh, wire=config.mesh.shard_wire)
    guest = Guest(
        store,
        mesh,
        link=config.mesh.link,
        min_replicas=config.mesh.min_replicas,
        silence_s=config.peers.silence_s,
    )
    # First ask the run for its settings, because the run may still be choosing its scheme.
    if asked is not None:
        settings = settings_of_run(guest.membership)
        scheme = {
            key.removeprefix("scheme."): value
            for key, value in settings.items()
            if key.startswith("scheme.")
        }
        config = asked.under(scheme)
    require_same_settings(guest.membership, config)
    try:
        optimizer, axis = admitted(model, guest, safety=safety(config), timeout_s=_WAIT_S)
    except LostFeed as error:
        remedy = ""
        if isinstance(error.__cause__, Refused):
            remedy = "; give this command the token and the version of detonation that the run has"
        raise RunError(f"cannot join the run at {address}: {error}{remedy}") from error
    world = ElasticRanks(mesh, axis, config.train)
    data = load_data(config.data)
    return Session(config, world, device, data, model, optimizer.base, optimizer)


def elastic_axis_of(
    config: Config, device: torch.device
) -> tuple[SurvivingCommunicator | None, list[DeviceMesh]]:
    """Creates the axis between the replicas of an elastic run, and the axes inside a replica.
    Collective.

    For a run that is not elastic, returns None and an empty list.
    """
    if not config.mesh.elastic:
        return None, []
    replica = init_mesh(config.nodes_inside, config.mesh.shards, device.type)
    axis = surviving_axis(config, replica)
    return axis, [replica["shard"], replica["replicate"]]


_WAIT_S = 300.0


@dataclasses.dataclass(frozen=True)
class RunTask:
    """A run whose recipe and flags are read and checked. Forked ranks inherit this object.

    Args:
        request: Command of the user; without `out` the run creates a new directory in `runs`.
        config: Configuration; with `asked`, it holds another scheme until the choice is made.
        asked: Rules for choosing the scheme, if it is not chosen yet.
        resume: Continue the run in the directory, because the user asks for it or the launcher
            restarted the run.
        may_start: With `resume`: start from the beginning if no checkpoint exists.
    """

    request: Request
    config: Config
    asked: Asked | None = None
    resume: bool = False
    may_start: bool = False
