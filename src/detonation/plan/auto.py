"""`auto`: the scheme for the links that are there, measured where it is called."""

import hashlib
import json
import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from detonation.cluster.network.measure import probe_axis
from detonation.core.flat.layout import local
from detonation.core.link.communicator import Axis
from detonation.core.link.link import Link
from detonation.core.schemes.registry import scheme
from detonation.core.schemes.scheme import Scheme
from detonation.plan.choice import BUDGET, check_budget, choose, why
from detonation.plan.cost import Network, Shapes, Work
from detonation.plan.search import candidates, options

PROBE_S = 3.0
"""About how long the links are measured."""

_log = logging.getLogger("detonation")


def auto(model: nn.Module, axis: Axis, *, step_seconds: float, budget: float = BUDGET) -> Scheme:
    """The scheme that should cost `model` least loss, and wait for the network no more than `budget` of a step.

    Measures `axis` for a few seconds; call it on all ranks, after sharding and before `replicate`. The first rank
    decides, and all agree. step_seconds: of a training step without the network, above 0. budget: from 0 to 1. Where
    nothing fits, it is the scheme that waits least. Schemes that need an optimizer without state are left out. The
    reason is logged at level INFO of the logger "detonation".

        scheme = dt.auto(model, mesh["replicate"], step_seconds=0.35)
        optimizer = dt.replicate(optimizer, model, mesh["replicate"], scheme)
    """
    if not 0 < step_seconds < float("inf"):
        raise ValueError(f"step_seconds is {step_seconds}, must be the seconds of a step without the network, above 0")
    check_budget(budget)
    device = next(local(parameter).device for parameter in model.parameters())
    world = everyone(device)
    shards = node_shapes(model, Link(axis).replica, world, device)
    network = Network(axis.size(), len(shards), probe_axis(axis, device, PROBE_S).operations)
    known = [candidate for candidate in candidates() if not candidate.lookahead]
    found = options(known, Work(shards, step_seconds, overlap=False), network)
    best = choose(found, budget)
    _log.info("auto: %s", why(best, found, network, budget))
    return decided(best.cost.scheme, world, device)


def everyone(device: torch.device) -> Link:
    """A link between all ranks, to agree over. Collective."""
    return Link(init_device_mesh(device.type, (dist.get_world_size(),)))


def decided(mine: Scheme, world: Link, device: torch.device) -> Scheme:
    """What the first rank has chosen, on every rank. Collective.

    Raises `Mismatch` on all of them where one makes another scheme of the same words.
    """
    said = world.tell([mine.name, dict(mine.arguments)], device)[0]
    chosen = scheme(*said)
    words = json.dumps([chosen.name, dict(chosen.arguments)], sort_keys=True)
    world.agree({"scheme": hashlib.sha256(words.encode()).hexdigest()[:16]}, device, {"scheme": chosen.name})
    return chosen


def node_shapes(model: nn.Module, replica: int, world: Link, device: torch.device) -> Sequence[Shapes]:
    """The local shapes of the trained parameters on each rank of the first replica's node. Collective."""
    mine = {name: list(local(p).shape) for name, p in model.named_parameters() if p.requires_grad}
    everyones = world.tell([replica, mine], device)
    return [{name: tuple(shape) for name, shape in shapes.items()} for at, shapes in everyones if at == 0]
