"""Zeros in a message: the sign with which a precision without a code for zero sends them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio


def zeros_are_negative(sending: int, replica: int = 0, replicas: int = 1, cancel: bool = True) -> bool:
    """True where a replica sends zeros as negative numbers: over replicas and sendings they cancel.

    One bit has no zero: a coordinate without a signal reads as one magnitude, and moves if its sign is always the same.
    Successive sendings 2 n and 2 n + 1 have opposite signs. The order within a pair follows multiples of the golden
    ratio, so that a coordinate that is zero only at every second or third sending is balanced, too.

    Args:
        sending: How often the coordinate was sent before, as far as that is independent of the data. The step does not
            do: at an even period the coordinate is sent at steps of one parity.
        replica: From 0 to below `replicas`.
        cancel: Whether an even number of replicas cancels at once: right for votes, which tie, and where the update is
            used in proportion. The magnitudes of replicas differ, so that under a mean an arbitrary small number
            remains; an optimizer that looks at its sign would walk at random. With `cancel=False` one sign has the
            majority among the replicas, and such an optimizer moves to and fro.

    Example:
        >>> [zeros_are_negative(sending) for sending in range(6)]
        [False, True, True, False, False, True]
        >>> [zeros_are_negative(0, replica, 4) for replica in range(4)]
        [False, True, False, True]
        >>> [zeros_are_negative(0, replica, 4, cancel=False) for replica in range(4)]
        [False, True, False, False]
    """
    opposed = replica % 2 == 1 and (cancel or replica < replicas - 1)
    return ((sending // 2 * _GOLDEN >> 63) + sending + opposed) % 2 == 1


def is_negative(blocks: Tensor, scale: Tensor, negative_zeros: bool) -> Tensor:
    """True where a value is sent as a negative number; the rounding error of values of size `scale` counts as zero.

    A row of a memory that gets no more signals never returns to 0: first the rounding errors of the basis stay, then
    denormal numbers, which no decay makes smaller.

    Shapes: `[blocks, block]` and `[blocks, 1]` fp32 -> `[blocks, block]` bool.
    """
    zero = scale * 2**-18
    return blocks <= zero if negative_zeros else blocks < -zero
