"""Poison: what must not reach a memory. One NaN would win top-k for ever and freeze its chunk on every replica."""

from collections.abc import Sequence

import torch
from torch import Tensor

from detonation.kernels import native

LIMIT = 1e18
"""The largest value and norm of one message: the square of more is infinite in fp32, as in Adam's second moment."""


def poisoned(signals: Sequence[Tensor | None]) -> int:
    """1 + the number of the first signal that holds NaN or a magnitude above `LIMIT`; 0 where none does."""
    present = _present(signals)
    tensors = [signal for _, signal in present]
    if not tensors:
        return 0
    library = native.load_for(*tensors)
    if library and all(tensor.dtype == torch.float32 for tensor in tensors):
        found = library.beyond(tensors, LIMIT)
    else:
        found = _beyond(tensors)
    return 0 if found < 0 else 1 + present[found][0]


def poisoned_there(signals: Sequence[Tensor | None]) -> int | Tensor:
    """The same, `[]` int64 where the signals are, without waiting for it; 0 where there are none."""
    count, present = len(signals), _present(signals)
    if not present:
        return 0
    device = present[0][1].device
    norms = [torch.zeros((), device=device)] * count
    for (i, _), norm in zip(present, torch._foreach_norm([s for _, s in present], ord=torch.inf), strict=True):
        norms[i] = norm.float()
    numbers = torch.arange(1, count + 1, device=device)
    # what is within has the number after the last, which is as good as 0
    return numbers.masked_fill(torch.stack(norms) <= LIMIT, count + 1).amin() % (count + 1)


def _present(signals: Sequence[Tensor | None]) -> list[tuple[int, Tensor]]:
    return [(i, signal) for i, signal in enumerate(signals) if signal is not None and signal.numel()]


def _beyond(tensors: list[Tensor]) -> int:
    """The number of the first of `tensors` that holds NaN or a magnitude above `LIMIT`; -1 where none. One wait."""
    norms = torch.stack([norm.float() for norm in torch._foreach_norm(tensors)])
    if (norms <= LIMIT).all():  # no number is larger than the root of the sum of all squares, which is fast to have
        return -1
    within = torch.stack([norm.float() for norm in torch._foreach_norm(tensors, ord=torch.inf)]) <= LIMIT
    return -1 if within.all() else int(within.logical_not().nonzero()[0])
