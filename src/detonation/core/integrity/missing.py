"""Missing gradients: what a replica tells the others of the parameters that had none in a step."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from detonation.core.flat.kept import KeptRows

if TYPE_CHECKING:
    from torch import Tensor

UNUSED_PLACE = 1 << 30
"""Added to a place of observed messages: the parameters that nobody used in a step."""
NONE_MISSING, NEW_SET, FIRST_KNOWN = range(3)
"""What a message says: nothing is missing; a new set is; its set of the first known exchange is."""
MOST_KNOWN = 14
"""The most exchanges of sets that all replicas remember, and a message can name."""
RECEIVED_BITS = 59
"""The bits that stay a digest in the seventh word of a header that says what is missing."""
NO_PARAMETERS: frozenset[int] = frozenset()

MissingSets = Sequence[bytes]
"""The set of missing gradients of each replica, one bit per parameter."""


@dataclass(eq=False)
class Missing:
    """The parameters without a gradient on this replica, in one step of a scheme of gradients.

    step: At which the message was sent.
    octets: The set of the parameters, one bit each in the order of the layout.
    says: What the message says of them.
    known: The exchanges of sets that a message could name when this one left.
    rows: The number of the parameter of each row of the flat, see `Layout.row_numbers`.
    kept: The rows of memories that the step changes.
    said: What the message of each replica says, once all have arrived; it waits for the device.
    unused: The parameters that no replica used, once all agree.
    """

    step: int
    octets: bytes
    says: int
    known: Sequence[MissingSets]
    rows: Tensor
    kept: list[KeptRows] = field(default_factory=list)
    said: Callable[[], Mapping[int, int]] | None = None
    unused: frozenset[int] | None = None


def with_said(received: int, says: int) -> int:
    """The seventh word of a header that says what is missing: below 0, unlike that of others.

    >>> with_said(7, NONE_MISSING), said_in(with_said(7, 3)), with_said(7, 3) & 7
    (7, 3, 7)
    """
    if not says:
        return received
    return (received & (1 << RECEIVED_BITS) - 1) + (says - 1 << RECEIVED_BITS) - (1 << 63)


def said_in(received: int) -> int:
    """What the seventh word of a header says."""
    return NONE_MISSING if received >= 0 else 1 + (received >> RECEIVED_BITS & 15)


def packed(numbers: Collection[int], count: int) -> bytes:
    """A set of numbers below `count`, one bit each.

    >>> packed([0, 9], 12)
    b'\\x01\\x02'
    """
    octets = bytearray(-(-count // 8))
    for number in numbers:
        octets[number >> 3] |= 1 << (number & 7)
    return bytes(octets)


def in_all(sets: Iterable[bytes]) -> frozenset[int]:
    """The numbers that are in each of `sets`.

    >>> sorted(in_all([packed([0, 9, 10], 12), packed([0, 3, 10], 12)]))
    [0, 10]
    """
    octets = [functools.reduce(operator.and_, column) for column in zip(*sets, strict=True)]
    return frozenset(
        8 * at + bit for at, octet in enumerate(octets) for bit in range(8) if octet >> bit & 1
    )
