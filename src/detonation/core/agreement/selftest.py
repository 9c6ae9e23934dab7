"""Trial: what this process makes of a fixed message, because threads, processors and libraries round differently."""

from dataclasses import replace

import torch
from torch import Tensor

from detonation.core.codec.aggregate import Agreed
from detonation.core.engine.native import engine_for
from detonation.core.flat.layout import digest
from detonation.core.memory import Memory
from detonation.core.schemes.scheme import Scheme

TRIAL = "decode of a test vector"
_SHAPE = (512, 512)


def trial(scheme: Scheme, device: torch.device, seed: int, kernels: bool) -> str:
    """A hash of what two fixed signals become: told, decoded as in training, and stepped on as optimizers do.

    Two processes with equal hashes turn the same messages into the same weights, as far as 262,144 numbers can tell.
    """
    layout = scheme.codec.layout({"trial": _SHAPE})
    agreed = Agreed([], [], scheme.combine)
    for scale in (1.0, 3.0):
        memory = Memory(layout, scheme.feedback, device) if scheme.feedback else None
        engine = engine_for(scheme.codec, layout, memory, device, seed, kernels)
        selected = engine.select([scale * _ramp(device)], 0)
        read = scheme.codec.read(scheme.codec.encode(selected), layout.rows)
        agreed = replace(agreed, values=[*agreed.values, read], columns=[*agreed.columns, selected.columns])
    update = torch.empty(_SHAPE, device=device)
    engine.write(agreed, [update])
    return digest([update, _stepped(update)])[:16]


def conditions() -> str:
    """What such a hash is known to depend on, in words."""
    return f"threads={torch.get_num_threads()}, cpu={torch.backends.cpu.get_cpu_capability()}"


def _ramp(device: torch.device) -> Tensor:
    """Numbers of many magnitudes and both signs, exact everywhere: no generator, no function that may round."""
    at = torch.arange(_SHAPE[0] * _SHAPE[1], dtype=torch.int64, device=device)
    mixed = (at * 2654435761) % 1048573  # a prime
    return ((mixed - 524286).to(torch.float32) / 65536 / 2 ** (at % 11).to(torch.float32)).view(_SHAPE)


def _stepped(update: Tensor) -> Tensor:
    """The operations of torch's optimizers: averages, squares, roots and quotients."""
    mean, square = (
        torch.zeros_like(update).lerp_(update, 0.1),
        torch.zeros_like(update).addcmul_(update, update, value=0.001),
    )
    return torch.ones_like(update).mul_(0.99).addcdiv_(mean, square.sqrt().add_(1e-8), value=-1e-3)
