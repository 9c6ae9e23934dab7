"""Gives core access to the compiled CPU kernels. No other module of core imports these kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from detonation.kernels.native import KERNEL_CHUNKS, Library, SignRate, load_library

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["KERNEL_CHUNKS", "WORTH_A_CALL", "Library", "SignRate", "library_for", "load_library"]

WORTH_A_CALL = 4096
"""A kernel that may round differently from torch is called only for at least this number of
elements.
"""


def library_for(*tensors: Tensor) -> Library | None:
    """The compiled kernels, if all `tensors` are contiguous, are on the CPU, and together have at
    least `WORTH_A_CALL` elements; else None.
    """
    if sum(tensor.numel() for tensor in tensors) < WORTH_A_CALL:
        return None
    if not all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors):
        return None
    return load_library()
