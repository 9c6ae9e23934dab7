"""The header: 64 bytes before every gathered message, with its schema, its sender and its checksum."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from detonation.core.compute.checksum import checksum, checksums

MAGIC = int.from_bytes(b"DeToNAT", "little")
VERSION = 2
"""Of the format of header and messages; messages of another version are refused."""
IDENTITY = MAGIC | VERSION << 56
HEADER_BYTES = 64
DIGITS = 3
"""The numbers below 256 that carry the status of a replica in an all-reduce; exact in bf16, too."""


@dataclass(frozen=True)
class Header:
    """The content of a header; each word from 0 to below 2**63.

    Args:
        schema: A hash of all settings that sender and receiver must share to read the message.
        step: Of the exchange.
        place: Which of its sender's messages of that step it is.
        sender: The replica.
        status: 0, or 1 + the number of the parameter because of which the message is empty; `[]` int64 where only
            the device knows.
        received: A digest of the messages that its sender received earlier, which must be the same on all replicas.
    """

    schema: int
    step: int
    place: int
    sender: int
    status: int | Tensor = 0
    received: int = 0

    def sealed(self, messages: Sequence[Sequence[Tensor]], on_device: bool = False) -> list[tuple[Tensor, ...]]:
        """The parts of each message, with a header before them; all messages have parts of the same lengths.

        Shapes: any -> `[8]` int64 and the parts, per message.
        """
        parts = messages[0]
        nbytes = sum(part.nbytes for part in parts)
        origin = self.sender << 32 | self.place
        content = [IDENTITY, self.schema, self.step, origin, nbytes, self.status, self.received]
        if on_device:
            words = torch.empty(len(content), dtype=torch.int64, device=parts[0].device)
            for word, value in zip(words.unbind(), content, strict=True):
                put(word, value)
        else:
            words = torch.tensor(content, dtype=torch.int64, device="cpu")
        sums = checksums([[words, *parts] for parts in messages])
        return [(torch.cat([words, sums[i : i + 1]]), *parts) for i, parts in enumerate(messages)]


def resent(message: Tensor, sender: int) -> Tensor:
    """The bytes of a sealed message as `sender` would have sent it; other bytes without a change.

    Shapes: `[bytes]` uint8 -> the same.
    """
    words = message[:HEADER_BYTES].clone()
    if len(words) < HEADER_BYTES or int.from_bytes(bytes(words[:7].tolist()), "little") != MAGIC:
        return message
    header = words.view(torch.int64)
    header[-1] -= checksum([header[:-1]])
    header[3] = sender << 32 | int(header[3]) & 0xFFFFFFFF
    header[-1] += checksum([header[:-1]])
    return torch.cat([words, message[HEADER_BYTES:]])


def put(place: Tensor, value: int | Tensor) -> None:
    """Writes `value` to `place`. A number goes to the device with the call; for a list the host would wait.

    Shapes: `[]`.
    """
    if isinstance(value, Tensor):
        place.copy_(value)
    else:
        place.fill_(value)
