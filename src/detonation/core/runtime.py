"""Runtime: the settings that all parts of a replica's step share, in one object."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from detonation.core.round import LocalSteps

T = TypeVar("T")
_FP32 = ("none", "ieee")
"""torch's names for fp32 products whose inputs are not rounded first."""
_AS_IT_IS = nullcontext()


@cache
def _products() -> dict[str, Any]:
    """torch's settings of matrix products, by kind of device. The settings are looked up on first
    use, because the command `plan` does not import torch.
    """
    on_cpu = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    return {"cuda": torch.backends.cuda.matmul, "cpu": on_cpu}


def fp32_products() -> str:
    """How fp32 matrix products currently round on GPUs and on CPUs, as text: ieee, tf32 or bf16."""
    found = []
    for products in _products().values():
        precision = products.fp32_precision
        if precision in _FP32:
            precision = "ieee"
        found.append(precision)
    return ", ".join(found)


@contextmanager
def _exactly(products: Any, autocast: AbstractContextManager[None]) -> Iterator[None]:
    allowed = [each.fp32_precision for each in _products().values()]
    legacy = "highest"
    # torch raises an error here if the caller has set only torch's new API, `fp32_precision`
    with suppress(RuntimeError):
        legacy = torch.get_float32_matmul_precision()
        # also set torch's old API: torch raises an error if its old and new API disagree
        torch.set_float32_matmul_precision("highest")
    products.fp32_precision = "ieee"
    try:
        with autocast:
            yield
    finally:
        if legacy != "highest":
            torch.set_float32_matmul_precision(legacy)
        _products()["cuda"].fp32_precision, _products()["cpu"].fp32_precision = allowed


def accelerator_is_played() -> bool:
    """True if the CPU or the device `meta` simulates an accelerator, in tests and benchmarks. The
    environment variable DETONATION_KERNELS=triton requests such a simulation.
    """
    return os.environ.get("DETONATION_KERNELS") == "triton"


def decides_on_device(device: torch.device) -> bool:
    """True if decisions about tensors on `device` are computed on the device, because the host
    would otherwise have to wait for the device.
    """
    return device.type != "cpu" or accelerator_is_played()


@dataclass(frozen=True)
class Runtime:
    """The device on which a replica computes its steps, and the rules of arithmetic there.

    Args:
        device: Device of the trained parameters.
        seed: Seed of the random selections, the same on all replicas.
        kernels: Whether compiled kernels may be used. Kernels round differently from torch, so all
            replicas must use kernels, or none.
        local_steps: The local steps of each replica per round, if slow replicas run fewer steps;
            else None.
        stops_when_bad: Whether all replicas stop at a nonfinite signal, so that no memory of unsent
            values is used afterwards.
    """

    device: torch.device
    seed: int = 0
    kernels: bool = True
    local_steps: LocalSteps | None = None
    stops_when_bad: bool = False

    def exact_arithmetic(self) -> AbstractContextManager[None]:
        """A context in which a step computes in fp32, whatever the caller has set: without
        autocast, and without matrix products in TF32 or bf16.
        """
        kind = self.device.type
        if kind == "cpu":
            products = _products()["cpu"]
        else:
            products = _products()["cuda"]
        if self._may_autocast and torch.is_autocast_enabled(kind):
            return _exactly(products, torch.autocast(kind, enabled=False))
        if products.fp32_precision in _FP32:
            return _AS_IT_IS
        return _exactly(products, _AS_IT_IS)

    @cached_property
    def _may_autocast(self) -> bool:
        return torch.amp.is_autocast_available(self.device.type)

    def shared(self, key: Hashable, make: Callable[[], T]) -> T:
        """The object under `key` that all kernels of this optimizer share; `make` creates it at the
        first call.

        These kernels run one after the other. Kernels of another optimizer may run concurrently on
        another stream, and have objects of their own.
        """
        if key not in self._shared:
            self._shared[key] = make()
        return cast(T, self._shared[key])

    @cached_property
    def _shared(self) -> dict[Hashable, Any]:
        return {}

    @cached_property
    def decides_on_device(self) -> bool:
        """True if decisions about tensors are computed on this device; see the function
        `decides_on_device`."""
        return decides_on_device(self.device)


class Progress:
    """Progress of the steps in this process. A thread that watches the training reads it, without
    waiting or communication.

    Attributes:
        steps: Number of steps that have begun, over all optimizers.
        where: "inside" if a step has begun and not ended, "saving" during a save, else "outside".
        explain: Function that is called with an error that ends a step. It may add to the error's
            text which ranks have sent no message.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.where: Literal["inside", "outside", "saving"] = "outside"
        self.explain: Callable[[BaseException], None] = lambda error: None


PROGRESS = Progress()
"""The progress of this process. Simulated replicas are threads that share this object."""


def recorded(device: torch.device) -> Any:
    """Records an event on the current stream of an accelerator. The event completes when all work
    queued so far on this stream is done. Returns None on a CPU.
    """
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    event = module.Event()
    event.record(module.current_stream(device))
    return event


class Readback:
    """Copies a small tensor to the host in the background. The tensor must not change afterwards.

    Shapes: any; `read` returns nested lists of the same shape.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers
        if numbers.device.type != "cpu":
            self._numbers = torch.empty(
                numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True
            )
            self._numbers.copy_(numbers, non_blocking=True)
        self._event = recorded(numbers.device)

    def wait(self) -> Tensor:
        """Returns the copy on the host. Waits for the work that was queued on the device before the
        copy, but not for later work.

        Shapes: as the tensor.
        """
        if self._event:
            self._event.synchronize()
        return self._numbers

    def read(self) -> list[Any]:
        """The copied numbers as lists. Waits for the device like `wait`."""
        return self.wait().tolist()
