"""Checksums of messages, computed on the device that holds their bytes."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from detonation.core.compute import kernel_library
from detonation.core.compute.bitpack import signed

if TYPE_CHECKING:
    from torch import Tensor

LINE_BYTES = 4096
"""Bytes of a line. The checksum arranges the 32-bit words of a message in lines of this size, and
sums the words of each line and of each column. So no temporary tensor is as large as the message.
"""
_WORDS = LINE_BYTES // 4
_STRIDE = 0x9E3779B97F4A7C15


def checksum(tensor: Tensor) -> Tensor:
    """The checksum of the bytes of `tensor`; see `checksums`.

    Shapes: any -> `[]` int64.
    """
    return checksums(tensor.detach().contiguous().view(1, -1).view(torch.uint8))[0]


def checksums(messages: Tensor, skipped: int = -1, out: Tensor | None = None) -> Tensor:
    """The checksum of each message: a weighted sum of the message's 32-bit words, in which the
    weight of a word depends on its position.

    A message is padded with zeros to whole lines of `LINE_BYTES`. The words of each line and of
    each column are summed first, modulo 2**32. Each line has an even factor, and each column an odd
    factor. The sums, times their factors, are added modulo 2**64. The checksum detects every change
    within one word, and misses about one in four billion of all other changes. The checksum does
    not protect against attackers, because attackers can compute it, too.

    Args:
        messages: May be views of larger rows.
        skipped: Offset of eight bytes in the first line that count as zeros, a multiple of 4; -1 if
            all bytes count.
        out: Memory for the result. It may be a part of `messages`, which are read first.

    Shapes: `[messages, nbytes]` uint8, contiguous within a message -> `[messages]` int64.
    """
    if out is None:
        out = torch.empty(len(messages), dtype=torch.int64, device=messages.device)
    if messages.device.type == "cpu":
        # the compiled kernel is exact, so replicas with and without kernels get equal bits
        kernel = kernel_library.load_library()
        if kernel:
            return out.copy_(kernel.checksums(messages, skipped))
    if not messages.shape[1]:
        return out.zero_()
    words = _words(messages)
    count, left = divmod(words.shape[1], _WORDS)
    lines = words[:, : count * _WORDS].view(len(words), count, _WORDS)
    sums = torch.empty(
        len(words), _WORDS + count + (left > 0), dtype=torch.int32, device=words.device
    )
    torch.sum(lines, 1, dtype=torch.int32, out=sums[:, :_WORDS])
    torch.sum(lines, 2, dtype=torch.int32, out=sums[:, _WORDS : _WORDS + count])
    if left:
        last = words[:, count * _WORDS :]
        sums[:, :left].add_(last)
        torch.sum(last, 1, dtype=torch.int32, out=sums[:, -1])
    if skipped >= 0:
        stated = words[:, skipped // 4 : skipped // 4 + 2]
        sums[:, skipped // 4 : skipped // 4 + 2].sub_(stated)
        sums[:, _WORDS].sub_(stated.sum(1, dtype=torch.int32))
    return torch.sum(sums.mul(_numbers(sums.shape[1] - _WORDS, words.device)), 1, out=out)


def _words(messages: Tensor) -> Tensor:
    """The 32-bit words of each message. The result is a view if torch can make one. Otherwise it is
    a copy, in which zeros pad each message to a multiple of `LINE_BYTES`.

    Shapes: `[messages, nbytes]` uint8 -> `[messages, words]` int32.
    """
    if messages.shape[1] % 4 or messages.storage_offset() % 4 or messages.stride(0) % 4:
        messages = torch.nn.functional.pad(
            messages, (0, -messages.shape[1] % LINE_BYTES)
        ).contiguous()
    return messages.view(torch.int32)


@lru_cache(maxsize=32)
def _numbers(lines: int, device: torch.device) -> Tensor:
    """The factors by which `checksums` multiplies its sums: an odd factor for each column of words,
    followed by an even factor for each line of words. Neighbouring factors are unrelated, so errors
    in neighbouring words do not cancel.
    """
    at = torch.arange(1, 1 + _WORDS + lines, dtype=torch.int64, device=device) * signed(_STRIDE)
    mixed = at.bitwise_xor_((at >> 32).bitwise_and_(0xFFFFFFFF))
    mixed[:_WORDS].bitwise_or_(1)
    mixed[_WORDS:].bitwise_and_(-2)
    return mixed
