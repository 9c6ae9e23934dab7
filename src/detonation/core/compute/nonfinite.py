"""Finds NaN, infinite and far too large values before they are added to the memory of unsent
values. Every top-k would select a NaN in this memory, so the chunk with the NaN would never be
trained again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from detonation.core.compute import kernel_library
from detonation.core.runtime import Runtime

LIMIT = 1e18
"""Largest allowed norm of a message. The squares of much larger values overflow fp32, for example
in Adam's second moment.
"""
SIGNAL_LIMIT = 1e12
"""Largest allowed magnitude in a signal (gradients, or a change of the parameters).

Even the norm of a million such values is below `LIMIT`, so a sender finds its own bad values before
its receivers do.
"""


@dataclass(frozen=True)
class Verdict:
    """The result of checking the signals of a message or of a bucket.

    Args:
        bad: True if these signals must not be added to the memory of unsent values. If only the
            device knows the result, `bad` is a tensor in which any nonzero number means True.
        status: The status that the header of the message carries for these signals; see `Header`.
    """

    bad: bool | Tensor
    status: int | Tensor


FINE = Verdict(False, 0)
"""The verdict on signals without a bad value, and on a message without a signal."""


def inspected(signals: Sequence[Tensor | None], runtime: Runtime) -> Verdict:
    """Checks signals for bad values: on a CPU by a compiled kernel if there is one, else in plain
    torch.

    A signal is bad if it contains NaN or a magnitude above `SIGNAL_LIMIT`. If the device computes
    the verdict, the host does not wait for it.

    Shapes: any.
    """
    present = [
        (number, signal)
        for number, signal in enumerate(signals)
        if signal is not None and signal.numel()
    ]
    if not present:
        return FINE
    tensors = [signal for _, signal in present]
    if not runtime.decides_on_device:
        library = kernel_library.load_library()
        if library and all(
            t.dtype == torch.float32 and t.device.type == "cpu" and t.is_contiguous()
            for t in tensors
        ):
            at = library.beyond(tensors, SIGNAL_LIMIT)
            return FINE if at < 0 else Verdict(True, 1 + present[at][0])
        norms = torch.stack([norm.float() for norm in torch._foreach_norm(tensors)])
        # if the norm of a signal is within the limit, all values of the signal are, too
        if (norms <= SIGNAL_LIMIT).all():
            return FINE
    numbers, within = signals_within(signals, tensors[0].device)
    found = first_outside([numbers], [within])
    if runtime.decides_on_device:
        return Verdict(found > 0, found)
    first = int(found)
    return Verdict(first > 0, first)


def signals_within(
    signals: Sequence[Tensor | None], device: torch.device
) -> tuple[list[int], Tensor]:
    """The indices of the signals that are present and not empty; and for each of these signals
    whether all its values are within `SIGNAL_LIMIT`.

    Shapes: any -> `[signals that are not empty]` bool.
    """
    numbers = []
    present = []
    for number, signal in enumerate(signals):
        if signal is not None and signal.numel():
            numbers.append(number)
            present.append(signal)
    if not present:
        return [], torch.ones(0, dtype=torch.bool, device=device)
    largest = [norm.float() for norm in torch._foreach_norm(present, ord=torch.inf)]
    return numbers, torch.stack(largest) <= SIGNAL_LIMIT


def first_outside(numbers: Sequence[Sequence[int]], within: Sequence[Tensor]) -> Tensor:
    """1 + the smallest index of a signal that has a value outside of `SIGNAL_LIMIT`; 0 if no signal
    has such a value. Computed on the device.

    Args:
        numbers: For each bucket, the indices of its signals.
        within: For each bucket, whether each of these signals is within the limit.

    Shapes: `[signals]` bool each -> `[]` int64.
    """
    each = [number for part in numbers for number in part]
    together = within[0]
    if len(within) > 1:
        together = torch.cat(list(within))
    count = max(each) + 1
    # a signal within the limit counts as `count` + 1, which the remainder (%) below turns into 0
    found = _numbers(tuple(each), together.device).masked_fill(together, count + 1).amin()
    return found % (count + 1)


@lru_cache(maxsize=64)
def _numbers(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """A tensor on `device` that holds each of `numbers` plus 1; cached.

    Shapes: -> `[numbers]` int64.
    """
    found = torch.arange(1, len(numbers) + 1, dtype=torch.int64, device=device)
    for place, number in enumerate(numbers):
        if number != place:
            found[place].fill_(number + 1)
    return found
