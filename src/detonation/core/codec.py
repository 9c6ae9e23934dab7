"""Codec: basis x selection x precision. Pure functions between a flat matrix and the message that is sent."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from detonation.core.basis import Basis
from detonation.core.precision import Precision
from detonation.core.selection import Selection

Combine = Literal["replicas", "senders"]


@dataclass(frozen=True)
class Message:
    """What one replica tells: encoded values, and their columns where the others cannot know them.

    It owns its memory: nothing that happens to the residual later changes it.
    """

    values: Tensor
    columns: Tensor | None = None  # [rows, kept], in the smallest integer type that holds a column

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return (self.values,) if self.columns is None else (self.values, self.columns)


@dataclass(frozen=True)
class Codec:
    """How a signal becomes a message and messages become an update."""

    basis: Basis
    selection: Selection
    precision: Precision

    @property
    def summable(self) -> bool:
        """Whether the network may add messages up: all tell the same coordinates, in a type that can be added."""
        return self.selection.shared and self.precision.summable

    def nbytes(self, rows: int) -> int:
        """Bytes of the message of `rows` rows, whatever is in them."""
        values = self.precision.nbytes(rows, self.selection.kept)
        columns = 0 if self.selection.shared else rows * self.selection.kept * self._column_type.itemsize
        return values + columns

    def encode(self, flat: Tensor, step: int, seed: int) -> Message:
        """The message that tells of `flat` at `step`; `flat` is left as it is."""  # [rows, chunk]
        coefficients = self.basis.forward(flat)
        if self._whole:
            return Message(self.precision.encode(coefficients))
        columns = self.selection.columns(coefficients, step, seed)
        values = self.precision.encode(coefficients.gather(1, columns))
        return Message(values, None if self.selection.shared else columns.to(self._column_type))

    def decode(self, messages: Sequence[Message], rows: int, step: int, seed: int, combine: Combine) -> Tensor:
        """The mean of what `messages` tell, in replica order: over all of them, or over those that sent a coefficient.

        One message is read back as it is. Columns within a row are unique, so no two writes of one message collide
        and the sum is the same on every replica.
        """  # [rows, chunk]
        values = [self.precision.decode(message.values) for message in messages]
        if self._whole:
            return self.basis.inverse(sum(values[1:], start=values[0]) / len(values))
        total = torch.zeros(rows, self.selection.chunk, device=values[0].device)
        senders = torch.zeros_like(total) if combine == "senders" else None
        for message, told in zip(messages, values, strict=True):
            columns = self._columns(message, total, step, seed)
            total.scatter_add_(1, columns, told)
            if senders is not None:
                senders.scatter_add_(1, columns, (told != 0).to(total.dtype))
        return self.basis.inverse(total / (len(messages) if senders is None else senders.clamp_(min=1)))

    @property
    def _whole(self) -> bool:
        return self.selection.shared and self.selection.kept == self.selection.chunk

    @property
    def _column_type(self) -> torch.dtype:
        chunk = self.selection.chunk
        return torch.uint8 if chunk <= 2**8 else torch.int16 if chunk <= 2**15 else torch.int32

    def _columns(self, message: Message, like: Tensor, step: int, seed: int) -> Tensor:
        if message.columns is None:
            return self.selection.columns(like, step, seed)
        return message.columns.to(torch.long)
