"""Blocks: values that are encoded together, with statistics of their own."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def blocked(lines: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """The values of several lines in blocks, the last one of a line zero-padded, and the number of values in each.

    Shapes: `[..., n]` -> `[blocks, block]` and `[blocks, 1]` fp32.
    """
    missing = -lines.shape[-1] % block
    filled = torch.nn.functional.pad(lines, (0, missing)) if missing else lines
    blocks = filled.reshape(-1, block)  # of one line after the other
    return blocks, _counts(len(blocks), filled.shape[-1] // block, block - missing, block, lines.device)


@lru_cache(maxsize=64)
def _counts(blocks: int, blocks_of_a_line: int, last: int, block: int, device: torch.device) -> Tensor:
    """The number of values in each block: `last` in the last one of each line."""  # [blocks, 1]
    counts = torch.full((blocks, 1), float(block), dtype=torch.float32, device=device)
    if blocks:
        counts[blocks_of_a_line - 1 :: blocks_of_a_line].fill_(float(last))
    return counts


@lru_cache(maxsize=64)
def ones(count: int, device: torch.device) -> Tensor:
    """Shapes: -> `[count, 1]` fp32."""
    return torch.ones(count, 1, dtype=torch.float32, device=device)


def looked_up(levels: Tensor, codes: Tensor) -> Tensor:
    """The level of each code of a block.

    Shapes: `[blocks, levels]` fp32, `[blocks, block]` integer -> `[blocks, block]` fp32.
    """
    if codes.device.type == "cpu":
        return levels.gather(1, codes.to(torch.int64))
    places = _firsts(*levels.shape, levels.device) + codes  # which take half the memory of int64
    return levels.view(-1).index_select(0, places.view(-1)).view(codes.shape)


@lru_cache(maxsize=64)
def _firsts(blocks: int, levels: int, device: torch.device) -> Tensor:
    """The place of the first level of each block among those of all."""  # [blocks, 1] integer
    narrow = torch.int32 if blocks * levels < 2**31 else torch.int64
    return torch.arange(0, blocks * levels, levels, dtype=narrow, device=device).unsqueeze(1)


def line_of(blocks: Tensor, messages: torch.Size) -> Tensor:
    """The blocks of each message, joined to one line.

    Shapes: `[blocks of all messages, ...]` -> `[..., n]`.
    """
    count = messages.numel()
    return blocks.reshape(*messages, blocks.numel() // count if count else 0)
