"""Detection of values that must not reach a memory: a NaN would win top-k for ever and freeze its
chunk everywhere."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from detonation.core.compute import kernel_library
from detonation.core.runtime import Runtime

LIMIT = 1e18
"""The largest norm of a message: the square of a larger one overflows fp32, as in Adam's second
moment."""
SIGNAL_LIMIT = 1e12
"""The largest value of a signal.

The norm of a million of them is `LIMIT`, so that their sender learns of it first.
"""


def first_nonfinite(signals: Sequence[Tensor | None], runtime: Runtime) -> int | Tensor:
    """1 + the number of the first signal that holds NaN or a magnitude above `SIGNAL_LIMIT`; 0
    where none does.

    Shapes: any -> an int, or `[]` int64 where the device decides and the host does not wait.
    """
    present = [
        (number, signal)
        for number, signal in enumerate(signals)
        if signal is not None and signal.numel()
    ]
    if not present:
        return 0
    tensors = [signal for _, signal in present]
    if not runtime.decides_on_device:
        library = kernel_library.load_library()
        if library and all(
            t.dtype == torch.float32 and t.device.type == "cpu" and t.is_contiguous()
            for t in tensors
        ):
            at = library.beyond(tensors, SIGNAL_LIMIT)
            return 0 if at < 0 else 1 + present[at][0]
        norms = torch.stack([norm.float() for norm in torch._foreach_norm(tensors)])
        if (
            norms <= SIGNAL_LIMIT
        ).all():  # no number is larger than the root of the sum of all squares
            return 0
    numbers, within = signals_within(signals, tensors[0].device)
    found = first_outside([numbers], [within])
    return found if runtime.decides_on_device else int(found)


def signals_within(
    signals: Sequence[Tensor | None], device: torch.device
) -> tuple[list[int], Tensor]:
    """The numbers of the signals that hold something, and of each whether all of it is within the
    limit.

    Shapes: any -> `[signals that hold something]` bool.
    """
    present = [
        (i, signal) for i, signal in enumerate(signals) if signal is not None and signal.numel()
    ]
    if not present:
        return [], torch.ones(0, dtype=torch.bool, device=device)
    largest = [
        norm.float()
        for norm in torch._foreach_norm([signal for _, signal in present], ord=torch.inf)
    ]
    return [i for i, _ in present], torch.stack(largest) <= SIGNAL_LIMIT


def first_outside(numbers: Sequence[Sequence[int]], within: Sequence[Tensor]) -> Tensor:
    """1 + the smallest of `numbers` whose signal is not within the limit, on the device; 0 where
    all are.

    Shapes: `[signals]` bool each -> `[]` int64.
    """
    each = [number for some in numbers for number in some]
    together = torch.cat(list(within)) if len(within) > 1 else within[0]
    count = max(each) + 1
    # a signal within the limit has the number after the last, which is as good as 0
    found = _numbers(tuple(each), together.device).masked_fill(together, count + 1).amin()
    return found % (count + 1)


@lru_cache(maxsize=64)
def _numbers(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """1 + each number."""  # [numbers] int64
    found = torch.arange(1, len(numbers) + 1, dtype=torch.int64, device=device)
    for place, number in enumerate(numbers):
        if number != place:
            found[place].fill_(number + 1)
    return found
