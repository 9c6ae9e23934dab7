"""Missing gradients: how a replica reports parameters without a gradient in a step."""

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
"""Added to the position of observed messages: marks the record of parameters that no replica used
in a step.
"""
NONE_MISSING, NEW_SET, FIRST_KNOWN = range(3)
"""A message's report on missing gradients: none are missing; a new set; or a set exchanged earlier,
as `FIRST_KNOWN` plus its number among the remembered ones.
"""
MOST_KNOWN = 14
"""Number of exchanged sets that all replicas remember, and that a message can name."""
RECEIVED_BITS = 59
"""Bits of the digest in the seventh word of a header that reports missing gradients."""
NO_PARAMETERS: frozenset[int] = frozenset()

MissingSets = Sequence[bytes]
"""Set of missing gradients of each replica, one bit per parameter."""


@dataclass(eq=False)
class Missing:
    """The parameters without a gradient on this replica, in one step of a scheme of gradients.

    Args:
        step: Step at which the message was sent.
        octets: Set of the parameters, one bit each in the order of the layout.
        says: What the message says of them: see `NONE_MISSING`.
        known: Exchanges of sets that a message could name when this one was sent.
        rows: Number of the parameter of each row of the flat, see `Layout.row_numbers`.
        kept: Copies of rows of memories that the step changes.
        said: Returns what the message of each replica says, once all have arrived; waits for the
            device.
        unused: Parameters that no replica used, once all agree.
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
    """The seventh word of a header, negative if it reports missing gradients.

    >>> with_said(7, NONE_MISSING), said_in(with_said(7, 3)), with_said(7, 3) & 7
    (7, 3, 7)
    """
    if not says:
        return received
    return (received & (1 << RECEIVED_BITS) - 1) + (says - 1 << RECEIVED_BITS) - (1 << 63)


def said_in(received: int) -> int:
    """The report on missing gradients in the seventh word of a header; see `NONE_MISSING`."""
    if received >= 0:
        return NONE_MISSING
    return 1 + (received >> RECEIVED_BITS & 15)


def packed(numbers: Collection[int], count: int) -> bytes:
    """A set of numbers below `count` as one bit each.

    >>> packed([0, 9], 12)
    b'\\x01\\x02'
    """
    octets = bytearray(-(-count // 8))
    for number in numbers:
        octets[number >> 3] |= 1 << (number & 7)
    return bytes(octets)


def in_all(sets: Iterable[bytes]) -> frozenset[int]:
    """The numbers contained in each of `sets`.

    >>> sorted(in_all([packed([0, 9, 10], 12), packed([0, 3, 10], 12)]))
    [0, 10]
    """
    octets = [functools.reduce(operator.and_, column) for column in zip(*sets, strict=True)]
    return frozenset(
        8 * at + bit for at, octet in enumerate(octets) for bit in range(8) if octet >> bit & 1
    )
