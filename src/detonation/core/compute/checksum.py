"""Checksums of messages, computed on the device that holds their bytes."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from detonation.core.compute import kernel_library
from detonation.core.compute.bitpack import signed

_BLOCK = 1 << 20  # words per pass: the temporary memory for a large tensor
_CACHED = 1 << 15  # the same on a CPU, in whose cache they stay
_KEPT = 1 << 20  # words whose weights are cached, 8 MB of them
_STRIDE = 0x9E3779B97F4A7C15 - 2**64


def checksum(parts: Sequence[Tensor]) -> Tensor:
    """The sum of the 32-bit words of all parts, each times an odd number that depends on its position, modulo 2**64.

    It detects every change within one word, and misses about one in four thousand million of all other changes. It does
    not protect against an attacker, who can recompute it.

    Shapes: any -> `[]` int64.
    """
    return checksums([parts])[0]


def checksums(messages: Sequence[Sequence[Tensor]]) -> Tensor:
    """The checksum of each of `messages`, which all have parts of the same lengths.

    Shapes: any -> `[messages]` int64.
    """
    starts = [0, *accumulate([-(-part.nbytes // 4) for part in messages[0]])]
    # exact, so it does not matter which replicas have the kernel; worth the call for a header, too
    if all(part.device.type == "cpu" and part.is_contiguous() for parts in messages for part in parts):
        kernel = kernel_library.load_library()
        if kernel:
            totals = [signed(total) for total in kernel.checksums(messages, starts)]
            return torch.tensor(totals, dtype=torch.int64, device="cpu")
    sums = [_summed(parts, first) for parts, first in zip(zip(*messages, strict=True), starts, strict=False)]
    return torch.stack(sums).sum(0)


def _summed(parts: Sequence[Tensor], first: int) -> Tensor:
    """The sum of each of `parts`, all of one length, whose words begin at position `first`."""  # [parts] int64
    lines, device = [_unsigned(part) for part in parts], parts[0].device
    totals = torch.zeros(len(parts), dtype=torch.int64, device=device)
    steps = _steps(_CACHED if device.type == "cpu" else _BLOCK, device)
    for start in range(0, len(lines[0]), len(steps)):
        blocks = [line[start : start + len(steps)] for line in lines]
        weights_of = _kept_weights if device.type == "cpu" and first + start < _KEPT else _weights
        weights = weights_of(first + start, len(blocks[0]), steps)  # as much work as the sum itself
        totals += torch.stack([block.to(torch.int64).mul_(weights).sum() for block in blocks])
    return totals


def _unsigned(part: Tensor) -> Tensor:
    """The 32-bit words of `part`, zero-padded."""
    octets = part.detach().contiguous().view(-1).view(torch.uint8)
    if octets.numel() % 4 or octets.storage_offset() % 4:
        octets = torch.nn.functional.pad(octets, (0, -octets.numel() % 4)).clone()
    return octets.view(torch.uint32)


def _weights(first: int, count: int, steps: Tensor) -> Tensor:
    """An odd number for each position: neighbours are unrelated, so that errors do not cancel."""  # [count]
    at = steps[:count] + signed(first * _STRIDE)
    return at.bitwise_xor_((at >> 32).bitwise_and_(0xFFFFFFFF)).bitwise_or_(1)


_kept_weights = lru_cache(maxsize=_KEPT // _CACHED)(_weights)


@lru_cache(maxsize=4)
def _steps(count: int, device: torch.device) -> Tensor:
    return torch.arange(1, count + 1, dtype=torch.int64, device=device) * _STRIDE  # [count] int64
