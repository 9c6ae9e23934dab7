"""Verdict: which messages may be used. The host says why not; the device, where nobody waits for it, only that."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from detonation.core.integrity.header import Facts, Stamp, faultless
from detonation.core.integrity.nonfinite import LIMIT

LOUDER = 1000.0
"""How often the median of all norms one may be: momentum at decay 0.999 cannot be more times a single gradient."""


@dataclass(frozen=True)
class Expected:
    """What all messages of an exchange must be, whoever sends them.

    signals: whether each tells what is new on it, so that they are about as loud as one another; not what it makes of
    the others' messages.
    """

    stamp: Stamp
    nbytes: int
    parameters: int
    signals: bool


@dataclass(frozen=True)
class Inspected:
    """What was found in a message."""

    header: Facts
    columns: int  # 0, or what `Columns.fault` found
    lawful: bool
    norm: float

    @classmethod
    def of(cls, row: Sequence[int]) -> "Inspected":
        (norm,) = struct.unpack("d", struct.pack("q", row[11]))
        return cls(Facts(row[:9]), row[9], bool(row[10]), norm)

    def fault(self, sender: int, expected: Expected) -> str:
        """Why the message is not to be used, whatever the others say; "" where it is."""
        if fault := self.header.fault(replace(expected.stamp, sender=sender), expected.nbytes, expected.parameters):
            return fault
        if self.columns:
            return ("has a column outside of its row", "has a column twice or out of order")[self.columns - 1]
        if not self.lawful:
            return "has statistics that no encoder makes"
        if not self.norm <= LIMIT:
            return f"has values that are not finite, or above {LIMIT:g}"
        return ""


def faults(table: Sequence[Inspected], expected: Expected) -> list[str]:
    """Why each message is not to be used, in replica order; "" where it is."""
    found = [each.fault(sender, expected) for sender, each in enumerate(table)]
    return _too_loud(table, found) if expected.signals else found


def usable(table: Tensor, expected: Expected) -> Tensor:
    """Which messages have no fault and are not to be skipped, in arithmetic where `table` lies."""
    columns, lawful, bits = table[:, 9:].unbind(1)  # [replicas, 12] int64 -> [replicas] bool
    norms = bits.view(torch.float64)
    fine = faultless(table[:, :9], expected.stamp, expected.nbytes, expected.parameters)
    fine = fine & (columns == 0) & (lawful != 0) & (norms <= LIMIT)
    if expected.signals:
        telling = fine & (norms > 0)
        rising = norms.masked_fill(telling.logical_not(), torch.inf).sort().values  # without any, nothing is too loud
        middle = rising.gather(0, telling.sum(0, keepdim=True) // 2)
        fine = fine & (norms <= LOUDER * middle)
    return fine & (table[:, 5] == 0)


def _too_loud(table: Sequence[Inspected], faults: Sequence[str]) -> list[str]:
    """`faults`, and where there is none that a message is far louder than the upper median of those that say anything.

    With two replicas nobody can tell which of them is wrong.
    """
    norms = sorted(t.norm for t, fault in zip(table, faults, strict=True) if not fault and t.norm > 0)
    if not norms:
        return list(faults)
    bound = LOUDER * norms[len(norms) // 2]
    loud = f"is more than {LOUDER:g} times as loud as most"
    return [fault or (loud if t.norm > bound else "") for t, fault in zip(table, faults, strict=True)]
