"""Detection of values that must not reach a memory: a NaN would win top-k for ever and freeze its chunk everywhere."""

from collections.abc import Sequence

import torch
from torch import Tensor

from detonation.core.compute import kernel_library
from detonation.core.runtime import Runtime

LIMIT = 1e18
"""The largest value and norm of a message: the square of a larger one overflows fp32, as in Adam's second moment."""


def first_nonfinite(signals: Sequence[Tensor | None], runtime: Runtime) -> int | Tensor:
    """1 + the number of the first signal that holds NaN or a magnitude above `LIMIT`; 0 where none does.

    Shapes: any -> an int, or `[]` int64 where the device decides and the host does not wait.
    """
    present = [(i, signal) for i, signal in enumerate(signals) if signal is not None and signal.numel()]
    if not present:
        return 0
    tensors = [signal for _, signal in present]
    if not runtime.decides_on_device:
        if all(t.dtype == torch.float32 and t.device.type == "cpu" and t.is_contiguous() for t in tensors):
            kernel = kernel_library.load_library()
            if kernel:
                found = kernel.beyond(tensors, LIMIT)
                return 0 if found < 0 else 1 + present[found][0]
        norms = torch.stack([norm.float() for norm in torch._foreach_norm(tensors)])
        if (norms <= LIMIT).all():  # no number is larger than the root of the sum of all squares, which is fast to have
            return 0
    count, device = len(signals), tensors[0].device
    largest = [torch.zeros((), dtype=torch.float32, device=device)] * count  # an absent signal is within the limit
    for (i, _), norm in zip(present, torch._foreach_norm(tensors, ord=torch.inf), strict=True):
        largest[i] = norm.float()
    numbers = torch.arange(1, count + 1, dtype=torch.int64, device=device)
    # a signal within the limit has the number after the last, which is as good as 0
    first = numbers.masked_fill(torch.stack(largest) <= LIMIT, count + 1).amin() % (count + 1)
    return first if runtime.decides_on_device else int(first)
