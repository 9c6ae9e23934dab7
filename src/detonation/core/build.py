"""Build: from levels to replicators, and the comparison of replicas before their first message."""

import platform
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from detonation.core.channel import Channel
from detonation.core.flat import Layout, digest, local
from detonation.core.link import Link
from detonation.core.replicators import GradientReplicator, ParameterReplicator, Replicator
from detonation.core.schemes import Scheme

Level = tuple[DeviceMesh, Scheme]


def build(
    parameters: Mapping[str, Tensor], base: Optimizer, levels: Sequence[Level], seed: int, kernels: bool
) -> list[Replicator]:
    """One replicator a level, over the local shards of `parameters`."""
    device, shapes = _device(parameters), {name: local(p).shape for name, p in parameters.items()}
    replicators: list[Replicator] = []
    for axis, scheme in levels:
        layout = Layout.of(shapes, scheme.codec.selection.chunk)
        channel = Channel(scheme, layout, Link(axis), device, seed, kernels)
        if scheme.outer is None:
            replicators.append(GradientReplicator(parameters, channel, base, scheme))
        else:
            replicators.append(ParameterReplicator(parameters, channel, scheme.round, scheme.outer))
    return replicators


def compare(
    parameters: Mapping[str, Tensor], replicators: Sequence[Replicator], levels: Sequence[Level], seed: int
) -> None:
    """Raises `Mismatch` on all replicas where one differs in what must be the same, and names it. Collective."""
    for replicator, (_, scheme) in zip(replicators, levels, strict=True):
        replicator.channel.link.agree(_description(scheme, parameters, replicator, seed), _device(parameters))


def _description(scheme: Scheme, parameters: Mapping[str, Tensor], replicator: Replicator, seed: int) -> dict[str, str]:
    """All that must be the same, by the name that an error shall use."""
    from detonation import __version__

    settings = {"detonation": __version__, "torch": torch.__version__, "machine": platform.machine()}
    settings |= {"scheme": scheme.name, "seed": str(seed), "kernel": replicator.channel.engine.name}
    settings |= {name: str(value) for name, value in scheme.arguments.items()}
    tensors = {name: local(parameter) for name, parameter in parameters.items()}
    settings |= {f"{name} (shape)": f"{tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items()}
    weights = zip(parameters, replicator.shared(), strict=True)
    return settings | {f"{name} (weights)": digest([tensor])[:16] for name, tensor in weights}


def _device(parameters: Mapping[str, Tensor]) -> torch.device:
    devices = {local(parameter).device for parameter in parameters.values()}
    if len(devices) != 1:
        raise ValueError(f"the trained parameters are on {len(devices)} devices {sorted(map(str, devices))}, must be 1")
    return devices.pop()
