"""A run among replicas that may be lost, or come: its place where they meet, and the session of one that comes in."""

import os
from datetime import timedelta

import torch
from torch._C._distributed_c10d import TCPStore

from detonation.cluster.init import LaunchPosition
from detonation.cluster.machine.interfaces import addresses_of, host_and_port
from detonation.cluster.mesh import init_mesh, shard
from detonation.cluster.processes.rendezvous import GLOO_INTERFACE
from detonation.cluster.survive.guests import Guest
from detonation.feed.admission import admitted
from detonation.train.loop.session import Session, load_data, safety, seeded_model
from detonation.train.loop.world import ElasticRanks, require_same_settings
from detonation.train.recipe.schema import Config
from detonation.train.run.request import Request

_WAIT_S = 300.0


def check_place(request: Request, config: Config, place: LaunchPosition | None, asked: bool) -> None:
    """Raises `ValueError` where an elastic run cannot start as `request` wants it.

    Args:
        asked: The scheme is still to be chosen by measuring the links.
    """
    number, mesh = request.replica, config.mesh
    if mesh.elastic and asked:
        raise ValueError("an elastic run does not measure its links: name a scheme in the place of auto")
    if number is not None and not (mesh.elastic and mesh.meet and 0 <= number < mesh.replicas):
        raise ValueError(f"--replica {number} needs --elastic, --meet HOST:PORT and 0 <= replica < {mesh.replicas}")
    if mesh.elastic and place is not None and number is None and not request.join:
        raise ValueError("under a launcher an elastic run is one world for each replica: give --replica and --meet")
    if request.join and request.out is None:
        raise ValueError("--join needs --out: the run directory, for checkpoints")
    for address in filter(None, (mesh.meet, request.join)):
        host_and_port(address)


def joined_session(config: Config, device: torch.device, address: str) -> Session:
    """The session of a replica that comes in while others train, at the store of `address`. Collective.

    Its weights and the state of its optimizer are those of the others; `optimizer.step_count` is the step.
    """
    host, port = host_and_port(address)
    store = TCPStore(host, port, timeout=timedelta(seconds=_WAIT_S))
    mesh = init_mesh(1, config.mesh.shards, device.type)
    model = seeded_model(config).to(device)
    shard(model, mesh, wire=config.mesh.shard_wire)
    guest = Guest(store, mesh, min_replicas=config.mesh.min_replicas, silence_s=config.peers.silence_s)
    require_same_settings(guest.membership, config)
    optimizer, axis = admitted(model, guest, safety=safety(config), timeout_s=_WAIT_S)
    return Session(config, ElasticRanks(mesh, axis), device, load_data(config.data), model, optimizer.base, optimizer)


def own_address() -> str:
    """The address of this machine at which a replica that comes in finds the state."""
    return next(iter(addresses_of(os.environ.get(GLOO_INTERFACE, ""))), "127.0.0.1")
