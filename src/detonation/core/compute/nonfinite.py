"""Finds values that must not enter a memory. A NaN would win every top-k and freeze its chunk on
all replicas.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from detonation.core.compute import kernel_library
from detonation.core.runtime import Runtime

LIMIT = 1e18
"""Largest norm of a message. The square of a larger norm overflows fp32, as in Adam's second
moment.
"""
SIGNAL_LIMIT = 1e12
"""Largest value of a signal.

A million such values have the norm `LIMIT`, so the sender detects bad values before its receivers.
"""


@dataclass(frozen=True)
class Verdict:
    """Result of inspecting the signals of a message or of a bucket.

    bad: whether these signals must not enter the memory. If only the device knows, `bad` is a
    tensor in which any nonzero number means True. status: the header's status for these signals;
    see `Header`.
    """

    bad: bool | Tensor
    status: int | Tensor


FINE = Verdict(False, 0)
"""Verdict on finite signals, and on signals that nobody sends."""


def inspected(signals: Sequence[Tensor | None], runtime: Runtime) -> Verdict:
    """The verdict on signals, computed in plain torch or by a compiled kernel on a CPU.

    A signal is bad if it contains NaN or a magnitude above `SIGNAL_LIMIT`. If the device decides,
    the host does not wait.

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
        if (norms <= SIGNAL_LIMIT).all():  # no value is larger than the norm of all values
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
    """The numbers of the nonempty signals, and for each whether it is within the limit.

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
    """1 + the smallest number in `numbers` whose signal exceeds the limit; 0 if no signal does.
    Computed on the device.

    Shapes: `[signals]` bool each -> `[]` int64.
    """
    each = [number for part in numbers for number in part]
    together = within[0]
    if len(within) > 1:
        together = torch.cat(list(within))
    count = max(each) + 1
    # for a signal within the limit, the position is past the end; it becomes 0
    found = _numbers(tuple(each), together.device).masked_fill(together, count + 1).amin()
    return found % (count + 1)


@lru_cache(maxsize=64)
def _numbers(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Adds 1 to each number.

    Shapes: -> `[numbers]` int64.
    """
    found = torch.arange(1, len(numbers) + 1, dtype=torch.int64, device=device)
    for place, number in enumerate(numbers):
        if number != place:
            found[place].fill_(number + 1)
    return found
