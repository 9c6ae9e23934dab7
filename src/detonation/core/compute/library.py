"""The door to `detonation.kernels`: nothing else in the package imports it."""

from torch import Tensor

from detonation.kernels.native import KERNEL_CHUNKS, Library, SignRate, load_library

__all__ = ["KERNEL_CHUNKS", "WORTH_A_CALL", "Library", "SignRate", "library_for", "load_library"]

WORTH_A_CALL = 4096
"""Numbers from which on a kernel pays that may round differently than torch."""


def library_for(*tensors: Tensor) -> Library | None:
    """The kernels where they can take all `tensors` (contiguous, on the CPU) and these are worth a call.

    Shapes: any.
    """
    if sum(tensor.numel() for tensor in tensors) < WORTH_A_CALL:
        return None
    return load_library() if all(t.device.type == "cpu" and t.is_contiguous() for t in tensors) else None
