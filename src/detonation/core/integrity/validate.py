"""Validation: which messages may be used, decided once in tensor arithmetic; the host only explains why not."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

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


@dataclass(frozen=True)
class Facts:
    """The content of messages, as far as it decides whether they may be used.

    A message is too loud if its norm is more than `LOUDER` times that of most messages, now *and* before: replicas that
    train sparsely are silent for long, but for the rounding that is left in their memory, and then loud again as they
    were. `usual` is the largest such median so far. It is forgotten slowly, and not at all while most are silent. Only
    a norm that most messages reach counts, so that no single replica can raise it.

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
    wanted = _wanted(header.schema, header.place, expected.nbytes, len(words), words.device).clone()
    wanted[:, 2].fill_(header.step)
    status, stated = words[:, 5], words[:, 7]
    alike = [facts.checksums - stated, status.clamp(0, expected.parameters) - status, facts.content]
    wrong = torch.cat([words[:, :5] - wanted, torch.stack(alike, 1)], 1)
    fine = (wrong == 0).all(1) & (norms <= LIMIT)
    if expected.signals:
        sending = fine & (norms > 0)
        rising = norms.masked_fill(sending.logical_not(), torch.inf).sort().values
        middle = rising.gather(0, sending.sum(0, keepdim=True) // 2)  # of two replicas the larger: none is accused
        middle.nan_to_num_(posinf=0.0)  # nobody sends anything
        bound = torch.maximum(middle, usual).mul_(LOUDER).expand_as(norms)
        fine = fine & (norms <= bound)
        remembered = torch.where(middle * LOUDER < usual, usual, usual * FORGET)
        torch.maximum(middle, remembered, out=usual)
    else:
        bound = torch.full_like(norms, torch.inf)
    refused = fine.logical_not()
    numbers = torch.stack([norms, bound], 1).double().view(torch.int64)
    checked = torch.stack([facts.checksums, facts.content], 1)
    return refused, torch.cat([words, checked, numbers, refused.unsqueeze(1)], 1)


@lru_cache(maxsize=64)
def _wanted(schema: int, place: int, nbytes: int, replicas: int, device: torch.device) -> Tensor:
    """The first words of each header, but for the step."""  # [replicas, 5] int64
    found = torch.empty(replicas, 5, dtype=torch.int64, device=device)
    for column, word in zip(found.unbind(1), (IDENTITY, schema, 0, place, nbytes), strict=True):
        column.fill_(word)
    found[:, 3].add_(torch.arange(replicas, dtype=torch.int64, device=device) << 32)
    return found


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
        f"has values that are not finite, or above {LIMIT:g}": not norm <= LIMIT,
        f"is more than {LOUDER:g} times as loud as most are, or were before": norm > bound,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
