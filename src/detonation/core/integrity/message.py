"""The message of one step, its header, and a replica's report of parameters without a gradient.

A message is sent in runs (ranges of rows): engines write a run, a collective sends it, and the
receiver joins all runs. Under an all-gather, a message begins with a header of 64 bytes.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING

import torch

from detonation.core.codec import Codec, MessageRows, SharedIndices, Unpackable, joined, narrow
from detonation.core.compute.checksum import LINE_BYTES, checksums
from detonation.core.flat.rows import KeptRows

if TYPE_CHECKING:
    from torch import Tensor


MAGIC = int.from_bytes(b"DeToNAT", "little")
VERSION = 3
"""Version of the format of header and messages. Messages of other versions are refused."""
IDENTITY = MAGIC | VERSION << 56
HEADER_BYTES = 64
CHECKSUM_AT = 56
DIGITS = 3
"""Number of values that contain the status and mark of a replica in an all-reduce. Each value is
below 256, so bf16 represents it exactly.
"""


@dataclass(frozen=True)
class Header:
    """The content of the header of a message, which is sent as eight words of 64 bits.

    Args:
        schema: Hash of all settings that sender and receiver must share to read the message.
        place: Number of the message among its sender's messages of the step.
        status: 0, or 1 + the number of the parameter because of which the message is empty; `[]`
            int64 if only the device knows it.
        received: Two digests that must be the same on all replicas. The upper bits are a digest of
            the messages that the sender received earlier. The lower 32 bits are a digest of the
            options of its parameter groups.
    """

    schema: int
    step: int
    place: int
    sender: int
    status: int | Tensor = 0
    received: int = 0

    @property
    def origin(self) -> int:
        """The fourth word of the header: the sender in the upper 32 bits, and `place` (the number
        of the message in the step) in the lower 32 bits.
        """
        return self.sender << 32 | self.place

    def seal(self, messages: Tensor, nbytes: int) -> None:
        """Writes a header before the `nbytes` bytes of each of `messages`.

        Numbers that change at each step reach the device as arguments of a kernel launch, because
        copying a list to the device would block the host.

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
    """63 bits of the sha256 of `text`, as an integer."""
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
    """Copies a sealed message with `sender` as its new sender, without waiting for the device. The
    copy has a new checksum and zeros as padding; all other bytes are unchanged.

    Shapes: `[bytes]` uint8 -> the same.
    """
    copy = message.clone()
    if len(copy) < HEADER_BYTES:
        return copy
    words = copy[:HEADER_BYTES].view(torch.int64)
    sealed = words[0] & ~(-1 << 56) == MAGIC
    # the checksum includes the padding, which may be undefined, so zeros replace the padding
    last = copy[max(HEADER_BYTES, len(copy) - LINE_BYTES) :]
    places = torch.arange(len(copy) - len(last), len(copy), dtype=torch.int64, device=copy.device)
    last.masked_fill_(sealed & (places >= HEADER_BYTES + words[4]), 0)
    words[3] = torch.where(sealed, sender << 32 | words[3] & 0xFFFFFFFF, words[3])
    words[7] = torch.where(sealed, checksums(copy.unsqueeze(0), CHECKSUM_AT)[0], words[7])
    return copy


def put(place: Tensor, value: int | Tensor) -> None:
    """Writes `value` into the tensor `place`.

    The host does not wait, because `fill_` passes a number as an argument of the kernel launch.
    """
    if isinstance(value, torch.Tensor):
        place.copy_(value)
    else:
        place.fill_(value)


UNUSED_PLACE = 1 << 30
"""This number is added to the place (the number of a message within its step) that an observer
gets. It marks records that contain the unused parameters of a step instead of messages.
"""
NONE_MISSING, NEW_SET, FIRST_KNOWN = range(3)
"""What a message says about its sender's parameters without a gradient. `NONE_MISSING`: there are
none. `NEW_SET`: they are a new set, which the replicas must exchange. `FIRST_KNOWN` + n: they are
set number n of the remembered sets, which were exchanged earlier.
"""
MOST_KNOWN = 14
"""Replicas remember at most this many exchanged sets of parameters without a gradient. A message
can name a remembered set by its number."""
RECEIVED_BITS = 59
"""Number of bits of the digest in the seventh word of a header, if this word also reports
parameters without a gradient."""
NO_PARAMETERS: frozenset[int] = frozenset()

MissingSets = Sequence[bytes]
"""For each replica, the set of its parameters without a gradient, as one bit per parameter."""


@dataclass(eq=False)
class Missing:
    """The parameters without a gradient on this replica, in one step of a scheme that exchanges
    gradients.

    Args:
        octets: Set of the parameters, one bit each in the order of the layout.
        says: What the message says about these parameters, see `NONE_MISSING`.
        known: The exchanged sets that all replicas remembered when the message was sent, so that
            the message could name one of them.
        rows: For each row of the flat, the index of its parameter; see `Layout.row_numbers`.
        kept: Copies of rows of memories that the step changes.
        said: Returns what the message of each replica says, and waits for the device. None until
            all messages have arrived.
    """

    octets: bytes
    says: int
    known: Sequence[MissingSets]
    rows: Tensor
    kept: list[KeptRows] = field(default_factory=list)
    said: Callable[[], Mapping[int, int]] | None = None


def with_said(received: int, says: int) -> int:
    """Returns the seventh word of a header: the digest `received`, combined with the report `says`
    on the sender's parameters without a gradient. The word is negative if there are such
    parameters.

    >>> with_said(7, NONE_MISSING), said_in(with_said(7, 3)), with_said(7, 3) & 7
    (7, 3, 7)
    """
    if not says:
        return received
    return (received & (1 << RECEIVED_BITS) - 1) + (says - 1 << RECEIVED_BITS) - (1 << 63)


def said_in(received: int) -> int:
    """Reads the report on parameters without a gradient from the seventh word of a header; see
    `NONE_MISSING`.
    """
    if received >= 0:
        return NONE_MISSING
    return 1 + (received >> RECEIVED_BITS & 15)


def packed(numbers: Collection[int], count: int) -> bytes:
    """Returns the set `numbers` as bytes, one bit per number: bit i is 1 if i is in the set. Each
    number is below `count`.

    >>> packed([0, 9], 12)
    b'\\x01\\x02'
    """
    octets = bytearray(-(-count // 8))
    for number in numbers:
        octets[number >> 3] |= 1 << (number & 7)
    return bytes(octets)


def in_all(sets: Iterable[bytes]) -> frozenset[int]:
    """Returns the numbers that all of `sets` contain; `packed` makes such sets.

    >>> sorted(in_all([packed([0, 9, 10], 12), packed([0, 3, 10], 12)]))
    [0, 10]
    """
    octets = [functools.reduce(operator.and_, column) for column in zip(*sets, strict=True)]
    return frozenset(
        8 * at + bit for at, octet in enumerate(octets) for bit in range(8) if octet >> bit & 1
    )


@dataclass
class Message:
    """What one replica sends and receives in one stage of an exchange: one message for all
    replicas, or one message for each replica.

    A message may need several collectives. Each collective sends a run (consecutive rows). The last
    run begins with the header for all runs.

    Args:
        waiting: The run that the next collective sends, if it has been encoded.
        sent: Runs whose collectives were started; empty after the last run was sealed.
        rows: First row and number of rows of each of these runs.
        arriving: For each of these runs, a function that waits for the received bytes and returns
            them: `[replicas, nbytes]` uint8.
        arrived: The received bytes of each run, until they are released.
        shared: Indices that all replicas know, by the first row of the flat to which they belong.
        absent: Lost replicas whose messages are not complete, after all runs have arrived.
        recycle: Takes back receive buffers; None if these buffers are not reused.
        reply: The message with the answers of the owners; None if no owners answer.
        missing: Missing gradients of this replica; None if no gradient is missing.
        played: True if a `PlayedMessages` supplies this message, and owns the message's memory.
    """

    step: int
    codec: Codec
    waiting: MessageRows | None = None
    sent: list[MessageRows] = field(default_factory=list)
    rows: list[tuple[int, int]] = field(default_factory=list)
    arriving: list[Callable[[], Tensor]] = field(default_factory=list)
    arrived: list[Tensor] = field(default_factory=list)
    shared: dict[int, Tensor | SharedIndices] = field(default_factory=dict)
    absent: set[int] = field(default_factory=set)
    recycle: Callable[[Tensor], None] | None = None
    reply: Message | None = None
    missing: Missing | None = None
    played: bool = False

    def know(self, first: int, indices: Tensor | Unpackable | None) -> None:
        """Stores `indices`, the indices in the rows from row `first` of the flat on, if all
        replicas know these indices without a message.
        """
        if isinstance(indices, SharedIndices):
            self.shared[first] = indices
        elif indices is not None:
            self.shared[first] = narrow(indices)

    @property
    def indices(self) -> Tensor | SharedIndices | None:
        """Returns the indices of the selected coefficients in all rows of the flat; None if only
        the message contains these indices.

        Shapes: -> `[rows, k]` integer.
        """
        if len(self.shared) < 2:
            return next(iter(self.shared.values()), None)
        found = [self.shared[first] for first in sorted(self.shared)]
        rules = [each for each in found if isinstance(each, SharedIndices)]
        if len(rules) == len(found):
            return rules[0].of_all(sum(each.rows for each in rules))
        return torch.cat([narrow(each) for each in found])

    def whole(self, end: int) -> Tensor:
        """Joins the received runs (consecutive rows, see `MessageRows`) of each message. A joined
        message has `end` bytes, and zeros follow as padding.

        Shapes: -> `[messages of all replicas, end + padding]` uint8.
        """
        runs: list[Sequence[Tensor]]
        arrived = self.arrived
        if len(arrived) == 1:
            octets = arrived[0]
            if octets.shape[1] % 8 == 0:  # then all messages are aligned to 8 bytes
                octets[:, end:].zero_()
                return octets
            runs = [(octets[:, HEADER_BYTES:end],)]
        else:
            pairs = sorted(zip(self.rows, arrived, strict=True), key=lambda pair: pair[0])
            octets = pairs[0][1]
            runs = []
            for (first, rows), body in pairs:
                if not first:
                    body = body[:, HEADER_BYTES:]
                lengths = list(self.codec.lengths[rows])
                runs.append(torch.split(body[:, : sum(lengths)], lengths, 1))
        whole = joined(runs, HEADER_BYTES, octets[:, :HEADER_BYTES])
        self.release()
        return whole

    def release(self) -> None:
        """Gives the receive buffers back for reuse. The caller must not read these buffers
        afterwards.
        """
        if self.recycle:
            for each in self.arrived:
                self.recycle(each)
        self.arrived.clear()
