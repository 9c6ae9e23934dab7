"""Build: from levels to replicators, and the comparison of replicas before their first message."""

import platform
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from detonation.core.channel import Channel
from detonation.core.flat import digest, local
from detonation.core.gradient_replicator import GradientReplicator
from detonation.core.link import Link
from detonation.core.parameter_replicator import ParameterReplicator
from detonation.core.replicator import Replicator
from detonation.core.scheme import Scheme
from detonation.core.traffic import check
from detonation.core.wire import Axis

Level = tuple[Axis, Scheme]


def build(
    parameters: Mapping[str, Tensor], base: Optimizer, levels: Sequence[Level], seed: int, kernels: bool
) -> list[Replicator]:
    """The replicators of all levels, over the local shards of `parameters`: one a level, or one a fragment of it.

    Raises `LargerThanDense` where a scheme would send more than full synchronisation.
    """
    device = _device(parameters)
    replicators: list[Replicator] = []
    for axis, scheme in levels:
        link = Link(axis)
        whole = scheme.codec.layout({n: local(p).shape for n, p in parameters.items()})
        check(scheme, whole, link.replicas)
        for fragment, round in enumerate(scheme.rounds):
            layout = whole.fragment(fragment, scheme.fragments)
            mine = {slot.name: parameters[slot.name] for slot in layout.slots}
            channel = Channel(scheme, layout, link, device, seed, kernels)
            if scheme.outer is None:
                replicators.append(GradientReplicator(mine, channel, base, scheme))
            else:
                replicators.append(ParameterReplicator(mine, channel, scheme, round))
    return replicators


def compare(replicators: Sequence[Replicator], levels: Sequence[Level], seed: int) -> None:
    """Raises `Mismatch` on all replicas where one differs in what must be the same, and names it. Collective."""
    schemes = [scheme for _, scheme in levels for _ in range(scheme.fragments)]
    for replicator, scheme in zip(replicators, schemes, strict=True):
        replicator.channel.link.agree(_description(scheme, replicator, seed), replicator.channel.device)


def _description(scheme: Scheme, replicator: Replicator, seed: int) -> dict[str, str]:
    """All that must be the same, by the name that an error shall use."""
    from detonation import __version__

    settings = {"detonation": __version__, "torch": torch.__version__, "machine": platform.machine()}
    settings |= {"scheme": scheme.name, "seed": str(seed), "kernel": replicator.channel.engine.name}
    settings |= {name: str(value) for name, value in scheme.arguments.items()}
    for slot, tensor in zip(replicator.channel.layout.slots, replicator.shared(), strict=True):
        settings[f"{slot.name} (shape)"] = f"{slot.shape} {tensor.dtype}"
        settings[f"{slot.name} (weights)"] = digest([tensor])[:16]
    return settings


def _device(parameters: Mapping[str, Tensor]) -> torch.device:
    devices = {local(parameter).device for parameter in parameters.values()}
    if len(devices) != 1:
        raise ValueError(f"the trained parameters are on {len(devices)} devices {sorted(map(str, devices))}, must be 1")
    return devices.pop()
