"""Access to the compiled kernels: no other module of the package imports `detonation.kernels`."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from detonation.core.runtime import Runtime, accelerator_is_played
from detonation.kernels.native import KERNEL_CHUNKS, Library, SignRate, load_library

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["KERNEL_CHUNKS", "WORTH_A_CALL", "Library", "SignRate", "gpu_kernels", "library_for", "load_library"]

WORTH_A_CALL = 4096
"""The number of elements from which a call of a kernel that may round differently from torch pays off."""


def library_for(*tensors: Tensor) -> Library | None:
    """The kernels, if all `tensors` are contiguous, on the CPU and together large enough for a call; else None.

    Shapes: any.
    """
    if sum(tensor.numel() for tensor in tensors) < WORTH_A_CALL:
        return None
    return load_library() if all(t.device.type == "cpu" and t.is_contiguous() for t in tensors) else None


def gpu_kernels(runtime: Runtime) -> tuple[ModuleType | None, str]:
    """The Triton kernels (`detonation.kernels.gpu.launches`) where a step can use them, or None and the reason."""
    if not runtime.kernels:
        return None, "kernels are turned off"
    if runtime.device.type != "cuda" and not accelerator_is_played():
        return None, f"the device is {runtime.device.type}"
    found = _launches()
    if runtime.device.type == "cuda" and found[0] is not None and found[0].INTERPRETED:
        raise RuntimeError("TRITON_INTERPRET=1 would run the kernels on the CPU, with addresses of the GPU: unset it")
    return found


@cache
def _launches() -> tuple[ModuleType | None, str]:
    try:
        return import_module("detonation.kernels.gpu.launches"), ""
    except ImportError as error:
        return None, f"triton cannot be imported: {error}"
