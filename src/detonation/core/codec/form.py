"""The form of a message as kernels write it: where its bytes go, and how rows are dealt to several messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from detonation.core.codec.indices import IndexCoding
from detonation.core.codec.selection import Selection

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Dealt:
    """How the rows of a flat are dealt to `count` messages: the first `turns` rows of each in turns of `run` rows, and
    equal parts of the remainder."""

    count: int = 1
    turns: int = 0
    run: int = 1


WHOLE = Dealt()
"""All rows in one message, in order."""


@dataclass(frozen=True)
class MessageForm:
    """The place and the form of the messages that an engine writes itself.

    Args:
        buffer: The messages, `[count, room + nbytes + padding]` uint8; kept until the collective that sends them ends.
        room: The bytes before each message, for a header.
        owned: The rows of each message.
        dealt: The rows of the flat in each message.
        negative_zeros: See `Precision.encode`.
    """

    buffer: Tensor
    room: int
    owned: int
    dealt: Dealt = WHOLE
    negative_zeros: bool = False


@dataclass(frozen=True)
class Sums:
    """The sum of all replicas' messages, as the network has added it up, for an engine that decodes it itself.

    Args:
        runs: The first row of each run of rows, and its values `[rows, k]`; in the order of the rows.
        report: `[1 + digits]` fp32, whose first number is 1 where all values are finite; the sum counts as zeros where
            it is 0.
        replicas: Of the mean.
        shared: The indices of all rows, None where the values are whole rows.
    """

    runs: Sequence[tuple[int, Tensor]]
    report: Tensor
    replicas: int
    shared: Tensor | SharedIndices | None


def indices_by_rule(selection: Selection, rows: int, step: int, seed: int, device: torch.device) -> Tensor:
    """The indices of a selection that all replicas share: they depend on no coefficient.

    Shapes: -> `[rows, k]` int64.
    """
    like = torch.empty(1, selection.chunk, dtype=torch.float32, device=device)
    return selection.indices(like.expand(rows, -1), step, seed)


@dataclass(frozen=True)
class SharedIndices:
    """The indices that a shared selection sends of some rows at one step; computed on first use, and only once.

    Kernels compute them where they need them, and ask for `step` alone.
    """

    selection: Selection
    rows: int
    step: int
    seed: int
    device: torch.device

    @cached_property
    def unpacked(self) -> Tensor:
        """The indices.

        Shapes: -> `[rows, k]` of `IndexCoding.dtype`.
        """
        found = indices_by_rule(self.selection, self.rows, self.step, self.seed, self.device)
        return found.to(IndexCoding(self.selection.chunk, self.selection.k).dtype)

    def of_all(self, rows: int) -> SharedIndices:
        """The indices of all `rows` rows of the flat that these rows begin."""
        return replace(self, selection=self.selection.for_rows(0, rows), rows=rows)
