"""The self-test: hashes of how this process decodes fixed messages and steps the optimizer, because
threads, processors and libraries round differently."""

import platform
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from detonation.core.agreement.clipping import norms_of
from detonation.core.codec.codec import Selected
from detonation.core.engine.choice import engine_for
from detonation.core.flat.layout import Layout
from detonation.core.flat.tensors import digest
from detonation.core.memory import Memory
from detonation.core.optim.base_step import BaseStep
from detonation.core.optim.muon import Muon
from detonation.core.optim.signsgd import SignSGD
from detonation.core.runtime import Runtime
from detonation.core.schemes.scheme import Scheme

SELFTEST = "decode of a test vector"
STEP_SELFTEST = "optimizer's steps on a test vector"
NORM_SELFTEST = "norm of a test vector"
CLOSE = "replicas that stay close"
TESTS = SELFTEST, STEP_SELFTEST, NORM_SELFTEST, CLOSE
"""Entries that may differ between replicas that need not have equal bits."""
_SHAPE = (512, 512)
_PROBED = SGD, Adam, AdamW, Muon, SignSGD
"""The optimizers of which steps are taken; for others stand the operations that optimizers are made
of."""


def selftest(scheme: Scheme, runtime: Runtime, base: BaseStep | None) -> dict[str, str]:
    """Hashes of two fixed messages, decoded as in training, and of steps of the optimizer with the
    settings in `base`.

    Two processes with equal hashes turn the same messages into the same weights, as far as 262,144
    numbers can tell.

    Args:
        base: The steps that must be alike; None where each replica steps by itself. Steps by signs
            round alike on all processors.
    """
    with runtime.exact_arithmetic():
        layout = scheme.codec.layout({"selftest": _SHAPE})
        memory = Memory(layout, scheme.feedback, runtime.device) if scheme.feedback else None
        shared = scheme.codec.shared_indices(layout.rows, 0, runtime.seed, runtime.device)
        messages = [_message(scheme, layout, number, shared, runtime.device) for number in range(2)]
        update = torch.empty(_SHAPE, dtype=torch.float32, device=runtime.device)
        received = scheme.codec.received(messages, layout.rows, shared, scheme.aggregation)
        engine_for(scheme.codec, layout, memory, runtime).write(received, [update])
        found = {SELFTEST: digest([update])[:16]}
        if base and not (
            isinstance(base.optimizer, SignSGD) and base.optimizer.moves_by_signs_alone
        ):
            gradient = _ramp(update.numel(), runtime.device).view(_SHAPE).flip(0)
            with base.rounding:
                # `before` is not zeros: to add to zero rounds alike with and without fused
                # multiply-add
                before = _ramp(update.numel(), runtime.device).view(_SHAPE)
                # whose products take long
                some = slice(64 if isinstance(base.optimizer, Muon) else None)
                found[STEP_SELFTEST] = digest(
                    _steps([before[some]], [gradient[some]], base.optimizer)
                )[:16]
        return found


def _message(
    scheme: Scheme, layout: Layout, number: int, shared: Tensor | None, device: torch.device
) -> Tensor:
    """A message with the same bytes on all processors, which may select and encode a signal
    differently."""
    codec, rows, indices = scheme.codec, layout.rows, shared
    chunk, k = codec.selection.chunk, codec.selection.k
    values = _ramp(rows * k, device)
    if codec.precision.block > 1:  # whole numbers whose squares add up exactly, in any order
        values = (values * 1024).remainder(11).floor() - 5
    if not codec.selection.shared:
        apart = chunk // k
        begins = (torch.arange(rows, dtype=torch.int64, device=device) + 7 * number) % (
            chunk - (k - 1) * apart
        )
        indices = begins.unsqueeze(1) + apart * torch.arange(k, dtype=torch.int64, device=device)
    return codec.encode(Selected((1 + 2 * number) * values.view(rows, k), indices))


def rounds_by_place(base: Optimizer, dtype: torch.dtype, device: torch.device) -> bool:
    """True if a step of `base` rounds numbers at the end of a shard unlike others, as some loops of
    CPUs do.

    What Muon multiplies is whole; the operations around it are those of other optimizers.
    """
    before = _ramp(257 * 5, device).view(257, 5).to(dtype)
    update, elementwise = before.flip(0), None if isinstance(base, Muon) else base
    (whole,) = _steps([before], [update], elementwise)
    return not torch.equal(
        whole, torch.stack(_steps(before.unbind(), update.unbind(), elementwise))
    )


def _steps(
    before: Sequence[Tensor], updates: Sequence[Tensor], base: Optimizer | None
) -> list[Tensor]:
    """Each tensor after two steps of an optimizer like `base`, or after the operations of which
    others are made."""
    kind: Any = type(base)
    if base is not None and kind in _PROBED:
        weights = [torch.nn.Parameter(each.clone()) for each in before]
        made = kind([{**base.param_groups[0], "params": weights, "lr": 1e-3}])
        for scale in (1.0, 0.7):  # the first meets states that are zero
            for weight, update in zip(weights, updates, strict=True):
                weight.grad = update * scale
            made.step()
        return [weight.detach() for weight in weights]
    return [_operations(each, update) for each, update in zip(before, updates, strict=True)]


def _operations(before: Tensor, update: Tensor) -> Tensor:
    mean = before.lerp(update, 0.1)
    square = before.square().addcmul_(update, update, value=0.001)
    return (
        before.mul(0.99)
        .add_(update, alpha=-0.3)
        .addcdiv_(mean, square.sqrt().add_(1e-8), value=-1e-3)
    )


def norm_selftest(device: torch.device) -> str:
    """The norm of a fixed vector, by which all replicas must scale the same update."""
    return digest([norms_of([_ramp(_SHAPE[0] * _SHAPE[1], device)], device)])[:16]


def selftest_conditions(device: torch.device) -> str:
    """The settings on which such a hash is known to depend, as text: of a GPU its model and CUDA."""
    processor = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    settings = [f"threads={torch.get_num_threads()}", f"cpu={processor}"]
    if device.type == "cuda":
        settings += [
            f"gpu={torch.cuda.get_device_name(device)}",
            f"cuda={torch.version.cuda or torch.version.hip}",
        ]
    return ", ".join(settings)


def _ramp(numel: int, device: torch.device) -> Tensor:
    """Numbers of many magnitudes and both signs, the same everywhere: no generator, no function
    that may round."""
    mixed = (
        torch.arange(numel, dtype=torch.int64, device=device) * 2654435761
    ) % 1048573  # a prime
    powers = torch.tensor([2.0**at for at in range(11)], dtype=torch.float32, device=device)
    magnitudes = powers.repeat(-(-numel // 11))[:numel]
    return (mixed - 524286).to(torch.float32) / 65536 / magnitudes
