"""Envelope: the 64 bytes before every gathered message, that say what it is, whose, and what its content adds up to."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from itertools import accumulate

import torch
from torch import Tensor

from detonation.core.compute.bitpack import signed
from detonation.core.integrity import readback
from detonation.kernels import native

MAGIC = int.from_bytes(b"DeToNAT", "little")
VERSION = 2
"""Of header and messages: another one cannot be read."""
_IDENTITY = MAGIC | VERSION << 56
HEADER_BYTES = 64
DIGITS = 3
"""Numbers below 256 in which a replica says its status where the network adds messages up, exact in bf16 too."""
_BLOCK = 1 << 20  # words that are summed at once: what a large tensor needs beside itself
_CACHED = 1 << 15  # the same on a CPU, whose cache they stay in
_KEPT = 1 << 20  # words whose weights are kept there, 8 MB of them
_STRIDE = 0x9E3779B97F4A7C15 - 2**64


@dataclass(frozen=True)
class Stamp:
    """What a message says of itself; each word from 0 to below 2**63.

    schema: of everything that both sides must know alike to read it. place: which of its sender's messages of that
    step it is. status: 0, or 1 + the number of the parameter for whose sake it tells nothing; `[]` int64 where only the
    device knows. heard: a digest of what its sender took in earlier, which must be the same on all replicas.
    """

    schema: int
    step: int
    place: int
    sender: int
    status: int | Tensor = 0
    heard: int = 0


def sealed(parts: Sequence[Tensor], stamp: Stamp) -> tuple[Tensor, ...]:
    """The header for `parts`, and after it the parts themselves."""
    place = stamp.sender << 32 | stamp.place
    nbytes = sum(part.nbytes for part in parts)
    words = _words([_IDENTITY, stamp.schema, stamp.step, place, nbytes, stamp.status, stamp.heard], parts[0].device)
    return (torch.cat([words, checksum([words, *parts]).view(1)]), *parts)


def resent(message: Tensor, sender: int) -> Tensor:
    """The bytes of a sealed message as `sender` would have sent it; anything else as it is."""
    words = message[:HEADER_BYTES].clone()
    if len(words) < HEADER_BYTES or int.from_bytes(bytes(words[:7].tolist()), "little") != MAGIC:
        return message
    header = words.view(torch.int64)
    header[-1] -= checksum([header[:-1]])
    header[3] = sender << 32 | int(header[3]) & 0xFFFFFFFF
    header[-1] += checksum([header[:-1]])
    return torch.cat([words, message[HEADER_BYTES:]])


def facts(messages: Sequence[Sequence[Tensor]]) -> Tensor:
    """The words of the header of each message, and what it really adds up to; `Facts` reads them."""
    added = checksums([[header[:-1], *parts] for header, *parts in messages])  # -> [messages, 9] int64
    return torch.cat([torch.stack([header for header, *_ in messages]), added.unsqueeze(1)], 1)


@dataclass(frozen=True)
class Facts:
    """What a header says, and whether it adds up: all that is needed to decide on it, whatever its bytes are."""

    words: Sequence[int]  # the header's, then the sum of what arrived

    @property
    def status(self) -> int:
        return self.words[5]

    @property
    def heard(self) -> int:
        return self.words[6]

    def fault(self, expected: Stamp, nbytes: int, parameters: int) -> str:
        """Why it is not the message that was expected, of `nbytes` after the header; "" where it is.

        Of `expected` all counts but status and heard; a status is at most `parameters`.
        """
        identity, schema, step, origin, length, status, _, said, added = self.words
        sender, place = origin >> 32, origin & 0xFFFFFFFF
        if identity & 2**56 - 1 != MAGIC:
            return "is no message of this library"
        if said != added:
            return "does not add up: it was damaged on its way"
        if identity >> 56 != VERSION:
            return f"is in version {identity >> 56} of the format, here it is {VERSION}"
        if schema != expected.schema:
            return "follows another schema: its sender has other settings"
        if step != expected.step:
            return f"is of step {step}, expected was step {expected.step}"
        if sender != expected.sender:
            return f"says that it is from replica {sender}"
        if place != expected.place:
            return "is of another level, part or phase of the step"
        if length != nbytes:
            return f"says that it has {length} bytes, expected were {nbytes}"
        if not 0 <= status <= parameters:
            return f"has status {status}, which does not exist"
        return ""


def faultless(words: Tensor, expected: Stamp, nbytes: int, parameters: int) -> Tensor:
    """Where `Facts.fault` finds nothing in the words of each sender, in arithmetic: nobody waits for the device."""
    identity, schema, step, origin, length, status, _, said, added = words.unbind(1)  # [replicas, 9] -> [replicas] bool
    senders = torch.arange(len(words), device=words.device) << 32
    same = (identity == _IDENTITY) & (schema == expected.schema) & (step == expected.step)
    same &= (origin == (senders | expected.place)) & (length == nbytes)
    return same & (status >= 0) & (status <= parameters) & (said == added)


def checksum(parts: Sequence[Tensor]) -> Tensor:
    """The sum of the 32-bit words of all parts, each times an odd number that depends on its place, modulo 2**64.

    It finds every change within one word, and any other but for one in about four thousand million; it is no
    protection against somebody who computes it anew. Plain arithmetic, so that it runs where the bytes are.
    """  # [] int64
    return checksums([parts])[0]


def checksums(messages: Sequence[Sequence[Tensor]]) -> Tensor:
    """The checksum of each of `messages`, whose parts are as long as those of the others."""  # [messages] int64
    # exact, so it does not matter which replicas have it; worth the call for a header too
    here = all(part.device.type == "cpu" and part.is_contiguous() for parts in messages for part in parts)
    library = native.load() if here else None
    starts = [0, *accumulate(-(-part.nbytes // 4) for part in messages[0])]
    if library:
        totals = [sum(map(library.checksum, parts, starts)) for parts in messages]
        return torch.tensor([signed(total) for total in totals])
    sums = [_summed(parts, first) for parts, first in zip(zip(*messages, strict=True), starts, strict=False)]
    return torch.stack(sums).sum(0)


def number(text: str) -> int:
    """A word that stands for `text`: 63 bits of its sha256."""
    return int.from_bytes(sha256(text.encode()).digest()[:8], "little") >> 1


def _words(said: Sequence[int | Tensor], device: torch.device) -> Tensor:
    if not readback.late(device):
        return torch.tensor(said)
    words = torch.empty(len(said), dtype=torch.int64, device=device)
    for word, value in zip(words.unbind(), said, strict=True):
        put(word, value)
    return words


def put(place: Tensor, value: int | Tensor) -> None:
    """Makes `place` (`[]`) hold `value`. A number goes to the device with the call; a list would be waited for."""
    if isinstance(value, Tensor):
        place.copy_(value)
    else:
        place.fill_(value)


def _summed(parts: Sequence[Tensor], first: int) -> Tensor:
    """The sum of each of `parts`, all as long as one another, whose words begin at place `first`."""  # [parts] int64
    lines, device = [_unsigned(part) for part in parts], parts[0].device
    totals = torch.zeros(len(parts), dtype=torch.int64, device=device)
    steps = _steps(_CACHED if device.type == "cpu" else _BLOCK, device)
    for start in range(0, len(lines[0]), len(steps)):
        blocks = [line[start : start + len(steps)] for line in lines]
        weights_of = _kept_weights if device.type == "cpu" and first + start < _KEPT else _weights
        weights = weights_of(first + start, len(blocks[0]), steps)  # they cost as much as what they are for
        totals += torch.stack([block.to(torch.int64).mul_(weights).sum() for block in blocks])
    return totals


def _unsigned(part: Tensor) -> Tensor:
    """The 32-bit words of `part`, filled up with zeros."""
    octets = part.detach().contiguous().view(-1).view(torch.uint8)
    if octets.numel() % 4 or octets.storage_offset() % 4:
        octets = torch.nn.functional.pad(octets, (0, -octets.numel() % 4)).clone()
    return octets.view(torch.uint32)


def _weights(first: int, count: int, steps: Tensor) -> Tensor:
    """An odd number for each place: neighbours have nothing in common, so that errors do not cancel."""  # [count]
    at = steps[:count] + signed(first * _STRIDE)
    return at.bitwise_xor_((at >> 32).bitwise_and_(0xFFFFFFFF)).bitwise_or_(1)


_kept_weights = lru_cache(maxsize=_KEPT // _CACHED)(_weights)


@lru_cache(maxsize=4)
def _steps(count: int, device: torch.device) -> Tensor:
    return torch.arange(1, count + 1, device=device) * _STRIDE  # [count] int64
