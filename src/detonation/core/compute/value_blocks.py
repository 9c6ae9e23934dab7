"""Blocks: values that are encoded together, with statistics of their own."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from detonation.core.compute.bitpack import unpack

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


def decoded(packed: Tensor, levels: Tensor, first: int, shape: tuple[int, int], width: int, block: int) -> Tensor:
    """The values of rows of a message, or of several, from the packed codes of `width` bits.

    Args:
        levels: Of all blocks of each message, by code.
        first: The block with which the rows begin.
        shape: Rows, and values of a row.
        block: Values of a block.

    Shapes: packed `[..., nbytes]` uint8, levels `[..., blocks, 2**width]` fp32 -> `[..., rows, k]` fp32.
    """
    messages, count = packed.shape[:-1], math.prod(shape)
    codes = unpack(packed, count, width, torch.uint8)
    missing = -count % block
    filled = torch.nn.functional.pad(codes, (0, missing)) if missing else codes
    blocks = filled.shape[-1] // block
    values = _looked_up(levels, slice(first, first + blocks), filled.view(*messages, blocks, block))
    return values.view(*messages, blocks * block)[..., :count].view(*messages, *shape)


def _looked_up(levels: Tensor, some: slice, codes: Tensor) -> Tensor:
    """The level of each code of some blocks of each message."""  # codes [..., some blocks, block]
    if codes.device.type == "cpu":
        return levels[..., some, :].gather(-1, codes.to(torch.int64))
    firsts = _firsts(levels.numel() // levels.shape[-1], levels.shape[-1], levels.device)
    places = firsts.view(*levels.shape[:-1], 1)[..., some, :] + codes  # which take half the memory of int64
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
