"""Validation: which messages may be used, decided once in tensor arithmetic; the host only explains why not."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from detonation.core.compute.checksum import checksums
from detonation.core.compute.nonfinite import LIMIT
from detonation.core.integrity.header import IDENTITY, MAGIC, VERSION, Header

LOUDER = 1000.0
"""The largest allowed ratio of a norm to the usual norm: a momentum at decay 0.999 is at most 1000 gradients."""
FORGET = 0.9999
"""The share of the usual norm that stays from one exchange to the next, where most messages are quieter."""


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


def decide_usable(messages: Sequence[Sequence[Tensor]], content: Tensor, expected: Expected, usual: Tensor) -> Tensor:
    """Decides which messages may be used: the ones that have no fault and are not empty.

    A message is too loud if its norm is more than `LOUDER` times that of most messages, now *and* before: replicas that
    train sparsely are silent for long, but for the rounding that is left in their memory, and then loud again as they
    were. `usual` is the largest such median so far. It is forgotten slowly, and not at all while most are silent. Only
    a norm that most messages reach counts, so that no single replica can raise it.

    Args:
        messages: One sealed message per replica: header and parts.
        content: The facts about each message, from `Codec.open`.
        usual: The usual norm before this exchange, 0 at first; updated.

    Shapes: content `[replicas, 3]` int64, usual `[1]` float64 -> `[replicas, 14]` int64: the eight words of the header,
    the checksum of the content, the three facts of `content`, the bits of `usual` as it was, and 1 where the message
    may be used.
    """
    sums = checksums([[header[:-1], *parts] for header, *parts in messages])
    table = torch.cat([torch.stack([header for header, *_ in messages]), sums.unsqueeze(1), content], 1)
    identity, schema, step, origin, length, status, _, stated, added, indices, lawful, bits = table.unbind(1)
    header, norms = expected.header, bits.view(torch.float64)
    senders = torch.arange(len(table), dtype=torch.int64, device=table.device) << 32
    fine = (identity == IDENTITY) & (schema == header.schema) & (step == header.step)
    fine &= (origin == (senders | header.place)) & (length == expected.nbytes)
    fine &= (status >= 0) & (status <= expected.parameters) & (stated == added)
    fine &= (indices == 0) & (lawful != 0) & (norms <= LIMIT)
    before = usual.clone()
    if expected.signals:
        sending = fine & (norms > 0)
        rising = norms.masked_fill(sending.logical_not(), torch.inf).sort().values
        middle = rising.gather(0, sending.sum(0, keepdim=True) // 2)  # of two replicas the larger: none is accused
        middle.masked_fill_(middle.isinf(), 0.0)  # nobody sends anything
        fine = fine & (norms <= LOUDER * torch.maximum(middle, before))
        remembered = torch.where(LOUDER * middle < before, before, FORGET * before)
        usual.copy_(torch.maximum(middle, remembered))
    bits = before.view(torch.int64).expand(len(table))
    return torch.cat([table, torch.stack([bits, (fine & (status == 0)).long()], 1)], 1)


def explain_faults(table: Sequence[Sequence[int]], expected: Expected) -> list[str]:
    """The fault of each message of `table` (see `decide_usable`), in replica order; "" for a message without one."""
    norms, (usual, *_) = ([struct.unpack("d", struct.pack("q", row[i]))[0] for row in table] for i in (11, 12))
    found = [_fault(sender, row, norms[sender], expected) for sender, row in enumerate(table)]
    sending = sorted(norm for norm, fault in zip(norms, found, strict=True) if not fault and norm > 0)
    if not expected.signals or not sending:
        return found
    # the upper median of the norms of those that send anything; with two replicas nobody can tell which is wrong
    bound = LOUDER * max(sending[len(sending) // 2], usual)
    loud = f"is more than {LOUDER:g} times as loud as most are, or were before"
    return [fault or (loud if norm > bound else "") for norm, fault in zip(norms, found, strict=True)]


def _fault(replica: int, row: Sequence[int], norm: float, expected: Expected) -> str:
    identity, schema, step, origin, length, status, _, stated, added, indices, lawful, *_ = row
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
        "has an index outside of its row": indices == 1,
        "has an index twice or out of order": indices == 2,
        "has statistics that no encoder makes": not lawful,
        f"has values that are not finite, or above {LIMIT:g}": not norm <= LIMIT,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
