"""The header: 64 bytes before every gathered message, with its schema, sender and checksum."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING

import torch

from detonation.core.compute.checksum import LINE_BYTES, checksums

if TYPE_CHECKING:
    from torch import Tensor

MAGIC = int.from_bytes(b"DeToNAT", "little")
VERSION = 3
"""Version of the format of header and messages. Messages of other versions are refused."""
IDENTITY = MAGIC | VERSION << 56
HEADER_BYTES = 64
CHECKSUM_AT = 56
DIGITS = 3
"""Number of values below 256 that contain the status and mark of a replica in an all-reduce; bf16
represents them exactly.
"""


@dataclass(frozen=True)
class Header:
    """The content of a header. Each word is from 0 to below 2**63.

    Args:
        schema: Hash of all settings that sender and receiver must share to read the message.
        place: Number of the message among its sender's messages of the step.
        status: 0, or 1 + the number of the parameter because of which the message is empty; `[]`
            int64 if only the device knows it.
        received: A digest that must be the same on all replicas: of the messages that the sender
            received earlier, and in the lower 32 bits of the options of its parameter groups.
    """

    schema: int
    step: int
    place: int
    sender: int
    status: int | Tensor = 0
    received: int = 0

    @property
    def origin(self) -> int:
        """The fourth word: sender and position of the message."""
        return self.sender << 32 | self.place

    def seal(self, messages: Tensor, nbytes: int) -> None:
        """Writes the header of each message before its `nbytes` bytes.

        Numbers that change at each step reach the device as arguments of a kernel launch. Copying a
        list would block the host.

        Shapes: `[messages, 64 + nbytes + padding]` uint8, each aligned for int64, with zeros as
        padding.
        """
        words = messages[:, :HEADER_BYTES].view(torch.int64)
        origin = self.sender << 32 | self.place
        device = messages.device
        if device.type == "cpu" and not isinstance(self.status, torch.Tensor):
            content = [
                IDENTITY,
                self.schema,
                self.step,
                origin,
                nbytes,
                self.status,
                self.received,
                0,
            ]
            words.copy_(torch.tensor(content, dtype=torch.int64, device="cpu"))
        else:
            constants = _constants((IDENTITY, self.schema, 0, origin, nbytes, 0, 0, 0), device)
            torch.add(constants.expand_as(words), _unit(2, device), alpha=self.step, out=words)
            if self.received:
                words.add_(_unit(6, device), alpha=self.received)
            if isinstance(self.status, torch.Tensor) or self.status:
                put(words[:, 5], self.status)
        checksums(messages, out=words[:, 7])


def hash63(text: str) -> int:
    """63 bits of the sha256 of `text`, as a number."""
    return int.from_bytes(sha256(text.encode()).digest()[:8], "little") >> 1


@lru_cache(maxsize=64)
def _constants(words: tuple[int, ...], device: torch.device) -> Tensor:
    found = torch.empty(len(words), dtype=torch.int64, device=device)
    for place, word in zip(found.unbind(), words, strict=True):
        place.fill_(word)
    return found


@lru_cache(maxsize=16)
def _unit(place: int, device: torch.device) -> Tensor:
    return _constants(tuple(int(word == place) for word in range(8)), device)


def constant(number: int, device: torch.device) -> Tensor:
    """`number` as a tensor on `device`, cached.

    Shapes: -> `[]` int64.
    """
    return _constants((number,), device)[0]


def resent(message: Tensor, sender: int) -> Tensor:
    """Copies a sealed message with `sender` as its new sender, without waiting for the device.
    Other bytes are copied unchanged.

    Shapes: `[bytes]` uint8 -> the same.
    """
    copy = message.clone()
    if len(copy) < HEADER_BYTES:
        return copy
    words = copy[:HEADER_BYTES].view(torch.int64)
    sealed = words[0] & ~(-1 << 56) == MAGIC
    # the last checksum line may end with undefined padding
    last = copy[max(HEADER_BYTES, len(copy) - LINE_BYTES) :]
    places = torch.arange(len(copy) - len(last), len(copy), dtype=torch.int64, device=copy.device)
    last.masked_fill_(sealed & (places >= HEADER_BYTES + words[4]), 0)
    words[3] = torch.where(sealed, sender << 32 | words[3] & 0xFFFFFFFF, words[3])
    words[7] = torch.where(sealed, checksums(copy.unsqueeze(0), CHECKSUM_AT)[0], words[7])
    return copy


def put(place: Tensor, value: int | Tensor) -> None:
    """Writes `value` to `place`.

    The host does not wait: `fill_` passes a number as an argument of the kernel launch.
    """
    if isinstance(value, torch.Tensor):
        place.copy_(value)
    else:
        place.fill_(value)
