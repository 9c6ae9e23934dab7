"""Build: from levels to replicators, and the comparison of replicas before their first message."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from detonation.core.agreement.consensus import Safety, Watch
from detonation.core.agreement.selftest import TRIAL, conditions, trial
from detonation.core.flat.layout import digest, local
from detonation.core.link.communicator import Axis
from detonation.core.link.hierarchical import ways
from detonation.core.link.link import Link
from detonation.core.replicator.base import Replicator
from detonation.core.replicator.channel import Channel
from detonation.core.replicator.gradient import GradientReplicator
from detonation.core.replicator.parameter import ParameterReplicator
from detonation.core.schemes.scheme import Scheme
from detonation.core.schemes.traffic import check

Level = tuple[Axis, Scheme]


def build(
    parameters: Mapping[str, Tensor],
    base: Optimizer,
    levels: Sequence[Level],
    lanes: DeviceMesh | None,
    seed: int,
    kernels: bool,
    safety: Safety,
) -> tuple[list[list[Replicator]], Watch]:
    """The replicators of each level, over the local shards of `parameters`: one, or one a fragment, or none.

    With `lanes` there may be two of each: for parameters that the lanes hold shards of, and for those held whole. With
    them comes the watch over what they hear.
    Raises `LargerThanDense` where a scheme would send more than full synchronisation.
    """
    device = _device(parameters)
    watch = Watch.over(parameters, device, safety)
    made: list[list[Replicator]] = []
    for number, (axis, scheme) in enumerate(levels, 1):
        made.append([])
        last = all(later.signal != "gradients" for _, later in levels[number:])
        for group, share in ways(parameters, lanes) if scheme.signal != "nothing" else []:
            link = Link(axis, lanes if share > 1 else None)
            ledger = watch.level(list(group), link, scheme.signal == "gradients")
            whole = scheme.codec.layout({n: local(p).shape for n, p in group.items()})
            check(scheme, whole, link.replicas, link.lanes)
            for fragment in range(scheme.fragments):
                layout = whole.fragment(fragment, scheme.fragments)
                mine = {slot.name: group[slot.name] for slot in layout.slots}
                place = sum(map(len, made))
                channel = Channel(scheme, layout, link, device, seed, kernels, ledger, place)
                made[-1].append(replicator(mine, channel, base, fragment, last))
    active = [axis for axis, scheme in levels if scheme.signal != "nothing"]
    watch.spread(active, [each for level in made for each in level])
    return made, watch


def replicator(
    parameters: Mapping[str, Tensor], channel: Channel, base: Optimizer, fragment: int, last: bool
) -> Replicator:
    """The replicator of one fragment of a level. last: whether no later level exchanges gradients."""
    scheme = channel.scheme
    if scheme.outer is None:
        return GradientReplicator(parameters, channel, base, scheme, last)
    return ParameterReplicator(parameters, channel, scheme, scheme.rounds[fragment])


def compare(replicators: Sequence[Replicator], seed: int, kernels: bool, safety: Safety) -> None:
    """Raises `Mismatch` on all replicas where one differs in what must be the same, and names it. Collective."""
    tried: dict[int, str] = {}  # by scheme: its fragments decode alike
    for each in replicators:
        channel = each.channel
        key = id(channel.scheme)
        tried[key] = tried.get(key) or trial(channel.scheme, channel.device, seed, kernels)
        description = _description(each, seed, safety) | {TRIAL: tried[key]}
        channel.link.agree(description, channel.device, {TRIAL: conditions()})


def _description(each: Replicator, seed: int, safety: Safety) -> dict[str, str]:
    """All that must be the same, by the name that an error shall use."""
    from detonation import __version__

    scheme = each.channel.scheme
    settings = {"detonation": __version__, "torch": torch.__version__, "machine": platform.machine()}
    settings |= {"scheme": scheme.name, "seed": str(seed), "kernel": each.channel.engine.name}
    settings |= {name: str(value) for name, value in asdict(safety).items()}
    settings |= {name: str(value) for name, value in scheme.arguments.items()}
    for slot, tensor in zip(each.channel.layout.slots, each.shared(), strict=True):
        settings[f"{slot.name} (shape)"] = f"{slot.shape} {tensor.dtype}"
        settings[f"{slot.name} (weights)"] = digest([tensor])[:16]
    return settings


def _device(parameters: Mapping[str, Tensor]) -> torch.device:
    devices = {local(parameter).device for parameter in parameters.values()}
    if len(devices) != 1:
        raise ValueError(f"the trained parameters are on {len(devices)} devices {sorted(map(str, devices))}, must be 1")
    return devices.pop()
