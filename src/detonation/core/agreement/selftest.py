"""The self-test: a hash of how this process decodes fixed messages, because threads, processors and libraries round
differently."""

import torch
from torch import Tensor

from detonation.core.agreement.clipping import norms_of
from detonation.core.engine.compiled import engine_for
from detonation.core.flat.tensors import digest
from detonation.core.memory import Memory
from detonation.core.runtime import Runtime
from detonation.core.schemes.scheme import Scheme

SELFTEST = "decode of a test vector"
NORM_SELFTEST = "norm of a test vector"
_SHAPE = (512, 512)


def selftest(scheme: Scheme, runtime: Runtime) -> str:
    """A hash of two fixed signals after encoding, decoding as in training, and a step as optimizers take it.

    Two processes with equal hashes turn the same messages into the same weights, as far as 262,144 numbers can tell.
    """
    with runtime.exact_arithmetic():
        return _hash(scheme, runtime)


def _hash(scheme: Scheme, runtime: Runtime) -> str:
    layout = scheme.codec.layout({"selftest": _SHAPE})
    before, messages = _ramp(runtime.device), list[Tensor]()
    for scale in (1.0, 3.0):
        memory = Memory(layout, scheme.feedback, runtime.device) if scheme.feedback else None
        engine = engine_for(scheme.codec, layout, memory, runtime)
        selected = engine.encode([scale * before], 0)
        messages.append(scheme.codec.encode(selected))
    shared = selected.indices if scheme.codec.selection.shared else None
    received = scheme.codec.received(messages, layout.rows, shared, scheme.aggregation)
    update = torch.empty(_SHAPE, dtype=torch.float32, device=runtime.device)
    engine.write(received, [update])
    # `before` is not zeros: to add to zero rounds alike with and without fused multiply-add
    mean = before.lerp(update, 0.1)
    square = before.square().addcmul_(update, update, value=0.001)
    stepped = before.mul(0.99).add_(update, alpha=-0.3).addcdiv_(mean, square.sqrt().add_(1e-8), value=-1e-3)
    return digest([update, stepped])[:16]


def norm_selftest(device: torch.device) -> str:
    """The norm of a fixed vector, by which all replicas must scale the same update."""
    return digest([norms_of([_ramp(device)], device)])[:16]


def selftest_conditions(device: torch.device) -> str:
    """The settings on which such a hash is known to depend, as text: of a GPU its model and CUDA."""
    settings = [f"threads={torch.get_num_threads()}", f"cpu={torch.backends.cpu.get_cpu_capability()}"]
    if device.type == "cuda":
        settings += [f"gpu={torch.cuda.get_device_name(device)}", f"cuda={torch.version.cuda or torch.version.hip}"]
    return ", ".join(settings)


def _ramp(device: torch.device) -> Tensor:
    """Numbers of many magnitudes and both signs, the same everywhere: no generator, no function that may round."""
    numel = _SHAPE[0] * _SHAPE[1]
    mixed = (torch.arange(numel, dtype=torch.int64, device=device) * 2654435761) % 1048573  # a prime
    powers = torch.tensor([2.0**at for at in range(11)], dtype=torch.float32, device=device)
    magnitudes = powers.repeat(-(-numel // 11))[:numel]
    return ((mixed - 524286).to(torch.float32) / 65536 / magnitudes).view(_SHAPE)
