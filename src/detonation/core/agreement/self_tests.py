"""The self-test: hashes the results of decoding test messages and of optimizer steps. Replicas
compare these hashes, because different thread counts, processors and libraries may round
differently.
"""

import platform
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from detonation.core.agreement.clipping import norms_of
from detonation.core.codec import Selected
from detonation.core.engine import engine_for
from detonation.core.flat.layout import Layout
from detonation.core.flat.tensors import digest
from detonation.core.memory import Memory
from detonation.core.optim import BaseStep, SignSGD
from detonation.core.runtime import Runtime
from detonation.core.schemes import Scheme

SELFTEST = "decode of a test vector"
STEP_SELFTEST = "optimizer's steps on a test vector"
NORM_SELFTEST = "norm of a test vector"
CLOSE = "replicas that stay close"
TESTS = SELFTEST, STEP_SELFTEST, NORM_SELFTEST, CLOSE
"""The test results that may differ between replicas, if a gate keeps the replicas close to each
other instead of bitwise equal."""
_SHAPE = (512, 512)


@dataclass(frozen=True)
class StepTest:
    """How the self-test runs steps of a class of optimizers.

    Attributes:
        rows: Count of rows of the test matrix, at most 512; each row has 512 numbers. For an
            optimizer whose step is slow, the matrix has fewer rows.
        is_elementwise: Whether the step of a weight depends only on the gradient of this weight.
    """

    rows: int = _SHAPE[0]
    is_elementwise: bool = True


_TESTED: dict[type[Optimizer], StepTest] = dict.fromkeys((SGD, Adam, AdamW, SignSGD), StepTest())
"""The classes of optimizers whose own steps the self-test runs. For any other optimizer, the
self-test runs the elementwise operations of which most optimizers consist.
"""


def register_step_test(optimizer: type[Optimizer], test: StepTest) -> None:
    """Makes the self-test run steps of the class `optimizer`, instead of the elementwise operations
    of which most optimizers consist.

    Args:
        optimizer: The class, without its subclasses. The self-test creates an instance with the
            options of the training's optimizer.
    """
    _TESTED[optimizer] = test


def selftest(
    scheme: Scheme,
    runtime: Runtime,
    base: BaseStep | None,
    options: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """Decodes two fixed messages to an update, and returns a hash of this update. With `base`, also
    returns a hash of weights after optimizer steps with the settings of `base`.

    If two processes have equal hashes, they very likely compute equal weights from equal messages,
    because the test covers 262,144 numbers.

    Args:
        base: Steps that must be equal on all replicas; None if each replica steps by itself. Steps
            that use only signs are not tested, because all processors round such steps alike.
        options: Options of another step, which replace the options in `base`.
    """
    with runtime.exact_arithmetic():
        layout = scheme.codec.layout({"selftest": _SHAPE})
        memory = None
        if scheme.feedback:
            memory = Memory(layout, scheme.feedback, runtime.device)
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
            with base.rounding or nullcontext():
                # `before` has no zeros: a sum with zero hides whether a multiply-add is fused
                before = _ramp(update.numel(), runtime.device).view(_SHAPE)
                rows = _test_of(base.optimizer).rows
                steps = _steps([before[:rows]], [gradient[:rows]], base.optimizer, options)
                found[STEP_SELFTEST] = digest(steps)[:16]
        return found


def _message(
    scheme: Scheme, layout: Layout, number: int, shared: Tensor | None, device: torch.device
) -> Tensor:
    """Builds a test message that has the same bytes on all processors. The message is not encoded
    from a gradient, because processors may select and encode values differently.
    """
    codec = scheme.codec
    rows = layout.rows
    k = codec.selection.k
    values = _ramp(rows * k, device)
    if codec.precision.block > 1:  # the values are integers, so that sums of squares are exact
        values = (values * 1024).remainder(11).floor() - 5
    indices = shared
    if not codec.selection.shared:
        apart = codec.selection.chunk // k
        begins = torch.arange(rows, dtype=torch.int64, device=device) + 7 * number
        begins %= codec.selection.chunk - (k - 1) * apart
        indices = begins.unsqueeze(1) + apart * torch.arange(k, dtype=torch.int64, device=device)
    return codec.encode(Selected((1 + 2 * number) * values.view(rows, k), indices))


def rounds_by_place(base: Optimizer, dtype: torch.dtype, device: torch.device) -> bool:
    """True if a step of `base` rounds equal numbers differently at different positions of a tensor.
    Vectorised CPU loops may do so for the last numbers of a shard.

    For an optimizer that computes with whole matrices, such as Muon, elementwise operations are
    tested instead of its step.
    """
    before = _ramp(257 * 5, device).view(257, 5).to(dtype)
    update = before.flip(0)
    elementwise: Optimizer | None = base
    if not _test_of(base).is_elementwise:
        elementwise = None
    (whole,) = _steps([before], [update], elementwise)
    row_by_row = torch.stack(_steps(before.unbind(), update.unbind(), elementwise))
    return not torch.equal(whole, row_by_row)


def _test_of(optimizer: Optimizer) -> StepTest:
    return _TESTED.get(type(optimizer), StepTest())


def _steps(
    before: Sequence[Tensor],
    updates: Sequence[Tensor],
    base: Optimizer | None,
    options: Mapping[str, Any] | None = None,
) -> list[Tensor]:
    """Returns each tensor of `before` after two steps of an optimizer that has the class and the
    options of `base`, but lr 0.001. For a class that is not in `_TESTED`, elementwise operations
    replace the steps.
    """
    kind: Any = type(base)
    if base is not None and kind in _TESTED:
        weights = [torch.nn.Parameter(each.clone()) for each in before]
        given = {**base.param_groups[0], **(options or {})}
        made = kind([{**given, "params": weights, "lr": 1e-3}])
        for scale in (1.0, 0.7):  # two steps, because only the second step reads optimizer state
            for weight, update in zip(weights, updates, strict=True):
                weight.grad = update * scale
            made.step()
        return [weight.detach() for weight in weights]
    return [_operations(each, update) for each, update in zip(before, updates, strict=True)]


def _operations(before: Tensor, update: Tensor) -> Tensor:
    mean = before.lerp(update, 0.1)
    square = before.square().addcmul_(update, update, value=0.001)
    root = square.sqrt().add_(1e-8)
    return before.mul(0.99).add_(update, alpha=-0.3).addcdiv_(mean, root, value=-1e-3)


def norm_selftest(device: torch.device) -> str:
    """Returns the hash of the norm of a fixed vector. Replicas compare this hash, because clipping
    needs equal norms on all replicas."""
    vector = _ramp(_SHAPE[0] * _SHAPE[1], device)
    return digest([norms_of([vector], device)])[:16]


def selftest_conditions(device: torch.device) -> str:
    """Returns, as text, what may change the hashes of the self-test: count of threads, processor,
    GPU and CUDA version."""
    processor = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    settings = [f"threads={torch.get_num_threads()}", f"cpu={processor}"]
    if device.type == "cuda":
        settings += [
            f"gpu={torch.cuda.get_device_name(device)}",
            f"cuda={torch.version.cuda or torch.version.hip}",
        ]
    return ", ".join(settings)


def _ramp(numel: int, device: torch.device) -> Tensor:
    """Returns test numbers of many magnitudes and both signs. These numbers are bitwise equal on
    every machine, because no random generator and no operation with rounding errors computes them.
    """
    prime = 1048573
    mixed = (torch.arange(numel, dtype=torch.int64, device=device) * 2654435761) % prime
    powers = torch.tensor([2.0**at for at in range(11)], dtype=torch.float32, device=device)
    magnitudes = powers.repeat(-(-numel // 11))[:numel]
    return (mixed - 524286).to(torch.float32) / 65536 / magnitudes
