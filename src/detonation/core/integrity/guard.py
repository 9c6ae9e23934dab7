"""The guard seals the messages of a replica, and decides which received messages may be used."""

import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from operator import attrgetter
from zlib import crc32

import torch
from torch import Tensor

from detonation.core import runtime
from detonation.core.codec.aggregate import Aggregation
from detonation.core.codec.codec import Codec
from detonation.core.codec.message_rows import MessageRows, SharedIndices, Workspace, joined
from detonation.core.codec.received import Arrived
from detonation.core.compute.checksum import checksums
from detonation.core.compute.nonfinite import LIMIT
from detonation.core.integrity.header import (
    CHECKSUM_AT,
    HEADER_BYTES,
    IDENTITY,
    MAGIC,
    VERSION,
    Header,
    hash63,
)
from detonation.core.integrity.message import Message
from detonation.core.integrity.missing import (
    NONE_MISSING,
    RECEIVED_BITS,
    Missing,
    said_in,
    with_said,
)
from detonation.core.integrity.observer import StepObserver
from detonation.core.integrity.sums import SumGuard

LOUDER = 1000.0
"""The largest allowed ratio of a norm to the usual norm: a momentum at decay 0.999 is at most 1000
gradients."""
FORGET = 0.9999
"""The share of the usual norm that stays from one exchange to the next, where most messages are
quieter."""


TOO_LARGE = f"has values that are not finite, or above {LIMIT:g}"
TOO_LOUD = f"is more than {LOUDER:g} times as loud as most are, or were before"


@dataclass(frozen=True)
class Stage:
    """One collective of an exchange: what is the same of its messages at every step.

    Args:
        codec, rows, aggregation, unit: Of the messages that arrive, see `Arrived`.
        phase: Which of the collectives of an exchange; the last is 0.
        signals: See `Expected`.
        workspace: Where messages in several runs are put together.
    """

    codec: Codec
    rows: int
    aggregation: Aggregation
    unit: int
    phase: int = 0
    signals: bool = True
    workspace: Workspace = field(default_factory=Workspace)


@dataclass(frozen=True)
class Expected:
    """The properties that all messages of an exchange must have, whoever sends them.

    Args:
        header: Of replica 0; status and received digest are not compared.
        nbytes: The bytes after the header.
        parameters: The largest status.
        signals: Whether each message carries its sender's own signal, so that all norms are of
            similar size; an owner's aggregate is not.
    """

    header: Header
    nbytes: int
    parameters: int
    signals: bool


def unsealed(messages: Tensor) -> tuple[Tensor, Tensor]:
    """The words of each header, and the checksum of each message, as if it stated none.

    Shapes: `[messages, nbytes]` uint8 -> `[messages, 8]` and `[messages]` int64.
    """
    words = (
        messages[:, :HEADER_BYTES].clone(memory_format=torch.contiguous_format).view(torch.int64)
    )
    return words, checksums(messages, CHECKSUM_AT)


def decide_usable(
    words: Tensor, added: Tensor, content: Tensor, norms: Tensor, expected: Expected, usual: Tensor
) -> tuple[Tensor, Tensor]:
    """Decides which messages are refused: the ones with a fault.

    A message is too loud if its norm is more than `LOUDER` times that of most messages, now *and*
    before: replicas that train sparsely are silent for long, but for the rounding that is left in
    their memory, and loud again as they were. `usual` is the largest such median so far. It is
    forgotten slowly, and not at all while most are silent. Only a norm that most messages reach
    counts, so that no single replica can raise it.

    Args:
        words, added: Of the headers, and the checksums of the bytes that arrived; see `unsealed`.
        content, norms: See `Arrived.facts`.
        usual: The usual norm before this exchange, 0 at first; updated.

    Returns the refused messages, and a table for `explain_faults`: the eight words of the header,
    the checksum, faults of the content, the bits of the norm and of its bound in float64, and 1
    where the message is refused.

    Shapes: words `[replicas, 8]`, added and content `[replicas]` int64, norms `[replicas]`, usual
    `[1]` fp32 -> `[replicas]` bool, `[replicas, 13]` int64.
    """
    header = expected.header
    # the bits of numbers that are not negative rise as they do, and those of NaN are above all
    bits = norms.abs().double().view(torch.int64)
    found = torch.cat([words, torch.stack([added, content, bits], 1)], 1)
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
        middle = heard.sort(descending=True).values.gather(
            0, senders.sub_(1).div_(2, rounding_mode="trunc")
        )
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
    """The least and the largest of the first columns of a right table, but for step and checksum;
    and 1 in the column of the step."""  # [2, replicas, 11] and [11] int64
    anything = torch.iinfo(torch.int64)
    loudest = struct.unpack("q", struct.pack("d", LIMIT))[0]
    lowest = [IDENTITY, schema, 0, place, nbytes, 0, anything.min, anything.min, 0, 0, 0]
    highest = [
        IDENTITY,
        schema,
        0,
        place,
        nbytes,
        parameters,
        anything.max,
        anything.max,
        0,
        0,
        loudest,
    ]
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
    """The fault of each message of `table` (see `decide_usable`), in replica order; "" for a
    message without one."""
    return [_fault(sender, row, expected) for sender, row in enumerate(table)]


def _fault(replica: int, row: Sequence[int], expected: Expected) -> str:
    identity, schema, step, origin, length, status, _, stated, added, content, *_ = row
    norm, bound = struct.unpack("2d", struct.pack("2q", *row[10:12]))
    sender, place, header = origin >> 32, origin & 0xFFFFFFFF, expected.header
    reasons = {
        "is no message of this library": identity & 2**56 - 1 != MAGIC,
        "does not add up: it was damaged on its way": stated != added,
        f"is in version {identity >> 56} of the format, here it is {VERSION}": identity >> 56
        != VERSION,
        "follows another schema: its sender has other settings": schema != header.schema,
        f"is of step {step}, expected was step {header.step}": step != header.step,
        f"says that it is from replica {sender}": sender != replica,
        "is of another level, part or phase of the step": place != header.place,
        f"says that it has {length} bytes, expected were {expected.nbytes}": length
        != expected.nbytes,
        f"has status {status}, which does not exist": not 0 <= status <= expected.parameters,
        "has an index outside of its row": content == 1,
        "has an index twice or out of order": content == 2,
        "has statistics that no encoder makes": content == 3,
        TOO_LARGE: not norm <= LIMIT,
        TOO_LOUD: norm > bound,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _take_recorded(message: Message) -> None:
    """Marks a message as that of a playback, which owns its memory; an absent replica has an empty
    header."""
    message.recycle = None
    headers = message.arrived[0][:, :HEADER_BYTES]
    message.absent = {sender for sender, header in enumerate(headers) if not header.any()}


def _empty_headers(whole: Tensor, absent: Collection[int]) -> None:
    """Empties the headers of `absent` replicas, by which a replay knows them."""
    for sender in absent:
        whole[sender, :HEADER_BYTES] = 0


def _without(
    absent: Collection[int], found: Arrived, refused: Tensor | None
) -> tuple[Arrived, Tensor | None]:
    """The messages, and which of them are refused, without those of `absent` replicas."""
    present = [sender for sender in range(len(found.body)) if sender not in absent]
    if refused is not None:
        refused = refused[present]
    return replace(found, body=found.body[present]), refused


class Guard(SumGuard):
    """Seals and validates the messages between one channel and its link.

    The decision on a message is a function of its bytes and of the other messages of the exchange,
    so replicas that received the same bytes decide the same. With its next message each replica
    sends a digest of the bytes that it received. A refused message counts as zeros: the mean stays
    a mean over all replicas, so that no replica gains weight because the message of another was
    lost.

    A subclass may seal and inspect on the device: an engine brings it (`ReferenceEngine.guard`).
    """

    on_kernels = False
    """True if kernels seal and inspect, so that the memory of messages is kept from step to step.
    """

    def seal(self, message: Message, status: int | Tensor | None, phase: int = 0) -> Tensor:
        """The bytes of the run that waits, for its collective; the last one of its message begins
        with the header.

        Args:
            status: 0, or 1 + the number of the parameter because of which a part of the message is
                zeros; None if more of this message follows.
            phase: Which of the collectives of an exchange; the last is 0.

        Shapes: -> `[messages, Codec.sent]` uint8, the header among them.
        """
        run = message.waiting
        assert run is not None
        message.waiting = None
        message.sent.append(run)
        message.rows.append((run.first, run.rows))
        if status is not None:
            received = 0
            runs = message.sent
            if len(runs) > 1:
                runs = sorted(runs, key=attrgetter("first"))
            if not phase:
                # the digest of the last exchange that all replicas have opened for certain, even if
                # one of them read a message early
                opened = self._received.get(self._sent - 1 - self._delay, 0)
                received = (opened >> 32 ^ self.noted) << 32 | crc32(self._counts.options)
                if message.missing:
                    received = with_said(received, message.missing.says)
                self._sent += 1
            nbytes = sum(message.codec.lengths[sum(each.rows for each in runs)])
            header = Header(
                self._schema, message.step, self._place | phase, self._replica, status, received
            )
            self._write_header(runs, nbytes, header)
            message.sent.clear()  # the collectives hold what they still need
        end = run.room + sum(run.codec.lengths[run.rows])
        return run.octets[:, : end + -end % run.codec.alignment]

    def _write_header(self, runs: Sequence[MessageRows], nbytes: int, header: Header) -> None:
        octets = runs[0].octets
        if len(runs) == 1:
            header.seal(
                octets[:, : HEADER_BYTES + nbytes] if octets.device.type == "cpu" else octets,
                nbytes,
            )
        else:
            whole = joined([run.parts for run in runs], HEADER_BYTES)
            header.seal(whole, nbytes)
            octets[:, :HEADER_BYTES] = whole[:, :HEADER_BYTES]

    def open(
        self,
        message: Message,
        stage: Stage,
        shared: Tensor | SharedIndices | None,
        observer: StepObserver | None = None,
    ) -> Arrived:
        """Validates and counts the sealed messages that have arrived, one per replica; zeros
        replace unusable ones.

        Args:
            shared: Their indices, where all replicas know them.
            observer: Sees the messages, unless they are played.
        """
        arrived = message.arrived
        if message.played:
            _take_recorded(message)
        absent = message.absent
        end = HEADER_BYTES + sum(stage.codec.lengths[stage.rows])
        back = partial(message.recycle, arrived[0]) if message.recycle else None
        simple = len(arrived) == 1 and arrived[0].device.type == "cpu"
        whole = arrived[0][:, :end] if simple else message.whole(end)
        if observer is not None and not message.played:
            _empty_headers(whole, absent)
            observer.received(self.place, message.step, whole[:, :end])
        body = whole[:, HEADER_BYTES:end]
        if not arrived:  # `whole` has memory of its own
            back = None
        found = Arrived(stage.codec, body, stage.rows, shared, stage.aggregation, stage.unit, back)
        refused = self.admit(message, stage, whole, found.facts())
        # the mean is over the replicas that sent; the rows of an absent owner stay as they are
        if absent and stage.signals:
            found, refused = _without(absent, found, refused)
        if refused is not None:
            if found.body.device.type == "cpu":  # simulated replicas receive one buffer together
                found = replace(found, body=found.body.clone())
            found.blank(refused)
        return found

    def admit(
        self, message: Message, stage: Stage, whole: Tensor, content: tuple[Tensor, Tensor]
    ) -> Tensor | None:
        """Decides which messages are refused, and counts the faults; not of absent replicas, whose
        messages are zeros.

        Args:
            whole: The bytes of `message`, one sealed message per replica.
            content: The facts about each message, from `Arrived.facts`.

        Shapes: whole `[replicas, 64 + nbytes + padding]` uint8 -> `[replicas]` bool, or None where
        none is.
        """
        header = Header(self._schema, message.step, self._place | stage.phase, 0)
        expected = Expected(
            header, sum(stage.codec.lengths[stage.rows]), len(self._names), stage.signals
        )
        refused, table = decide_usable(*unsealed(whole), *content, expected, self.usual)
        if message.missing and not stage.phase:
            self.hear(message.missing, runtime.Readback(table), message.absent)
        report = partial(
            self._report, expected=expected, last=not stage.phase, absent=message.absent
        )
        if self._on_device:
            self._counts.report_later(message.step + self._delay, runtime.Readback(table), report)
            return refused
        return None if report(table.tolist()) else refused

    def hear(self, missing: Missing, table: runtime.Readback, absent: Collection[int] = ()) -> None:
        """Lets `missing` read what the messages of a table of `decide_usable` say."""

        def said() -> dict[int, int]:
            rows = enumerate(table.read())
            return {
                sender: said_in(row[6]) if row[0] == IDENTITY else NONE_MISSING
                for sender, row in rows
                if sender not in absent
            }

        missing.said = said

    def _report(
        self,
        rows: Sequence[Sequence[int]],
        expected: Expected,
        last: bool,
        absent: Collection[int] = (),
    ) -> bool:
        """Counts the faults of each row of the table of `decide_usable`; returns True if no message
        is refused."""
        fine = not any(row[-1] for row in rows)
        step = expected.header.step
        faults = [""] * len(rows) if fine else explain_faults(rows, expected)
        if last:
            self._compare_received(rows, faults, step)
        used = list[int]()
        if absent:
            self._counts.miss(absent)
        for sender, (row, fault) in enumerate(zip(rows, faults, strict=True)):
            if sender in absent:
                continue
            if fault:
                self._refuse(sender, fault, step)
            elif row[5]:
                self._counts.skip(sender, self._place, self._names[row[5] - 1], step)
            elif expected.signals:
                used.append(sender)
        # messages in use end a row of skipped or refused ones
        if self._counts.skipped or self._counts.refused:
            self._counts.accept(used, self._place)
        return fine

    def _refuse(self, sender: int, fault: str, step: int) -> None:
        """Counts a refused message, and clears the memory of this replica if its own message was
        too large."""
        self._counts.refuse(sender, fault, step)
        if sender == self._replica and fault in (TOO_LARGE, TOO_LOUD):
            self._forget()

    def _compare_received(
        self, rows: Sequence[Sequence[int]], faults: Sequence[str], step: int
    ) -> None:
        """Compares the digests of all replicas, which reveal a message that was damaged on the way
        to some of them."""
        self._received[self._opened] = hash63(
            repr([(row[7], fault) for row, fault in zip(rows, faults, strict=True)])
        )
        self._received.pop(self._opened - 2 - self._delay, None)
        self._opened += 1
        lower = (1 << RECEIVED_BITS) - 1
        digests = {sender: row[6] & lower for sender, row in enumerate(rows) if not faults[sender]}
        if len(set(digests.values())) > 1:
            self._counts.differ(digests, step)
