"""Validation: which messages may be used, decided once in tensor arithmetic; the host only explains why not."""

import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from detonation.core.compute.nonfinite import LIMIT
from detonation.core.integrity.header import DIGITS, IDENTITY, MAGIC, VERSION, Header

LOUDER = 1000.0
"""The largest allowed ratio of a norm to the usual norm: a momentum at decay 0.999 is at most 1000 gradients."""
FORGET = 0.9999
"""The share of the usual norm that stays from one exchange to the next, where most messages are quieter."""


TOO_LARGE = f"has values that are not finite, or above {LIMIT:g}"
TOO_LOUD = f"is more than {LOUDER:g} times as loud as most are, or were before"


@dataclass(frozen=True)
class Expected:
    """The properties that all messages of an exchange must have, whoever sends them.

    Args:
        header: Of replica 0; status and received digest are not compared.
        nbytes: The bytes after the header.
        parameters: The largest status.
        signals: Whether each message carries its sender's own signal, so that all norms are of similar size; an
            owner's aggregate is not.
    """

    header: Header
    nbytes: int
    parameters: int
    signals: bool


@dataclass(frozen=True)
class Facts:
    """The content of messages, as far as it decides whether they may be used.

    Args:
        words: Of the headers, `[replicas, 8]` int64.
        checksums: Of the bytes that arrived, `[replicas]` int64.
        content: Faults of the content, see `Arrived.facts`, `[replicas]` int64.
        norms: `[replicas]` fp32.
    """

    words: Tensor
    checksums: Tensor
    content: Tensor
    norms: Tensor


def decide_usable(facts: Facts, expected: Expected, usual: Tensor) -> tuple[Tensor, Tensor]:
    """Decides which messages are refused: the ones with a fault.

    A message is too loud if its norm is more than `LOUDER` times that of most messages, now *and* before: replicas that
    train sparsely are silent for long, but for the rounding that is left in their memory, and loud again as they were.
    `usual` is the largest such median so far. It is forgotten slowly, and not at all while most are silent. Only a norm
    that most messages reach counts, so that no single replica can raise it.

    Args:
        usual: The usual norm before this exchange, 0 at first; updated.

    Returns the refused messages, and a table for `explain_faults`: the eight words of the header, the checksum, faults
    of the content, the bits of the norm and of its bound in float64, and 1 where the message is refused.

    Shapes: usual `[1]` fp32 -> `[replicas]` bool, `[replicas, 13]` int64.
    """
    words, norms, header = facts.words, facts.norms, expected.header
    # the bits of numbers that are not negative rise as they do, and those of NaN are above all
    bits = norms.abs().double().view(torch.int64)
    found = torch.cat([words, torch.stack([facts.checksums, facts.content, bits], 1)], 1)
    limits, of_step = _limits(
        header.schema, header.place, expected.nbytes, expected.parameters, len(words), words.device
    )
    limits = limits.add(of_step, alpha=header.step)
    limits[:, :, 8].copy_(words[:, 7])  # the checksum is the one that the header states
    refused = (found < limits[0]).logical_or_(found > limits[1]).any(1)
    if expected.signals:
        heard = norms.masked_fill(refused, 0.0)
        senders = (heard > 0).sum(0, keepdim=True)
        # of two replicas the larger: none is accused; 0 if nobody sends anything
        middle = heard.sort(descending=True).values.gather(0, senders.sub_(1).div_(2, rounding_mode="trunc"))
        bound = torch.maximum(middle, usual).mul_(LOUDER)
        refused.logical_or_(norms > bound)
        remembered = torch.where(middle * LOUDER < usual, usual, usual * FORGET)
        torch.maximum(middle, remembered, out=usual)
    else:
        bound = _infinity(words.device)
    of_all = bound.double().view(torch.int64).expand(len(words), 1)
    return refused, torch.cat([found, of_all, refused.unsqueeze(1)], 1)


@lru_cache(maxsize=64)
def _limits(
    schema: int, place: int, nbytes: int, parameters: int, replicas: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The least and the largest of the first columns of a right table, but for step and checksum; and 1 in the column
    of the step."""  # [2, replicas, 11] and [11] int64
    anything = torch.iinfo(torch.int64)
    loudest = struct.unpack("q", struct.pack("d", LIMIT))[0]
    lowest = [IDENTITY, schema, 0, place, nbytes, 0, anything.min, anything.min, 0, 0, 0]
    highest = [IDENTITY, schema, 0, place, nbytes, parameters, anything.max, anything.max, 0, 0, loudest]
    found = torch.empty(2, replicas, len(lowest), dtype=torch.int64, device=device)
    of_step = torch.zeros(len(lowest), dtype=torch.int64, device=device)
    of_step[2].fill_(1)
    for words, limits in zip((lowest, highest), found, strict=True):
        for word, column in zip(words, limits.unbind(1), strict=True):
            column.fill_(word)
    found[:, :, 3].add_(torch.arange(replicas, dtype=torch.int64, device=device) << 32)
    return found, of_step


@lru_cache(maxsize=16)
def _infinity(device: torch.device) -> Tensor:
    return torch.full((1,), torch.inf, dtype=torch.float64, device=device)


def explain_faults(table: Sequence[Sequence[int]], expected: Expected) -> list[str]:
    """The fault of each message of `table` (see `decide_usable`), in replica order; "" for a message without one."""
    return [_fault(sender, row, expected) for sender, row in enumerate(table)]


def _fault(replica: int, row: Sequence[int], expected: Expected) -> str:
    identity, schema, step, origin, length, status, _, stated, added, content, *_ = row
    norm, bound = struct.unpack("2d", struct.pack("2q", *row[10:12]))
    sender, place, header = origin >> 32, origin & 0xFFFFFFFF, expected.header
    reasons = {
        "is no message of this library": identity & 2**56 - 1 != MAGIC,
        "does not add up: it was damaged on its way": stated != added,
        f"is in version {identity >> 56} of the format, here it is {VERSION}": identity >> 56 != VERSION,
        "follows another schema: its sender has other settings": schema != header.schema,
        f"is of step {step}, expected was step {header.step}": step != header.step,
        f"says that it is from replica {sender}": sender != replica,
        "is of another level, part or phase of the step": place != header.place,
        f"says that it has {length} bytes, expected were {expected.nbytes}": length != expected.nbytes,
        f"has status {status}, which does not exist": not 0 <= status <= expected.parameters,
        "has an index outside of its row": content == 1,
        "has an index twice or out of order": content == 2,
        "has statistics that no encoder makes": content == 3,
        TOO_LARGE: not norm <= LIMIT,
        TOO_LOUD: norm > bound,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def statuses_of_sum(digits: Sequence[float], replica: int, mark: int, high: int, absent: Collection[int]) -> list[int]:
    """The status of each replica in the digits of an all-reduce; -1 where it has another mark, or none.

    Args:
        replica: The one that reads.
        mark, high: Which is in the last digit of each, and below which the last digit of a status is.
        absent: The replicas that may have added nothing.

    >>> statuses_of_sum([0, 0, 9, 3, 1, 9, 0, 0, 8, 0, 0, 0], 0, 9, 1, [3])
    [0, 259, -1, 0]
    """
    replicas, found = len(digits) // DIGITS, list[int]()
    if digits[DIGITS * replica + DIGITS - 1] >= 2 * mark and all(0 <= digit < 256 * replicas for digit in digits):
        # of a communicator of one replica that stands for all; bf16 rounds the sum of three marks
        means = [digit / replicas for digit in digits]
        digits = [mark if abs(mean - mark) <= mark / 256 else round(mean) for mean in means]
        absent = range(replicas)
    for sender in range(replicas):
        *low, top = digits[DIGITS * sender : DIGITS * (sender + 1)]
        known = all(0 <= digit <= 255 and digit == int(digit) for digit in low) and top - mark in range(high)
        status = sum(int(digit) << 8 * i for i, digit in enumerate((*low, top - mark))) if known else -1
        found.append(0 if sender in absent and not any((*low, top)) else status)
    return found
