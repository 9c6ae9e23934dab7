"""The guard: seals a replica's messages with a header and checksum, and decides which received
messages are used.
"""

import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from operator import attrgetter, itemgetter
from zlib import crc32

import torch
from torch import Tensor

from detonation.core import runtime
from detonation.core.codec import (
    Aggregation,
    Arrived,
    Codec,
    MessageRows,
    SharedIndices,
    Workspace,
    joined,
)
from detonation.core.compute.checksum import checksums
from detonation.core.compute.nonfinite import LIMIT
from detonation.core.integrity.message import (
    CHECKSUM_AT,
    HEADER_BYTES,
    IDENTITY,
    MAGIC,
    NONE_MISSING,
    RECEIVED_BITS,
    VERSION,
    Header,
    Message,
    Missing,
    hash63,
    said_in,
    with_said,
)
from detonation.core.integrity.observer import StepObserver
from detonation.core.integrity.sums import SumGuard

LOUDER = 1000.0
"""Largest allowed ratio of the norm of a message to the reference norm. Valid messages stay below
this ratio, because a momentum with decay 0.999 is at most as large as 1000 gradients.
"""
FORGET = 0.9999
"""Factor by which the reference norm shrinks at each exchange, while most messages have a smaller
norm."""

_ROWS = attrgetter("rows")
_REFUSED = itemgetter(-1)
TOO_LARGE = f"has values that are not finite, or above {LIMIT:g}"
TOO_LOUD = f"has a norm over {LOUDER:g} times as large as those of most messages, now and earlier"


@dataclass(frozen=True)
class Stage:
    """Properties of one collective of an exchange. They do not change from step to step.

    Args:
        codec, rows, aggregation, unit: Properties of the received messages, see `Arrived`.
        phase: Number of the collective in the exchange; the last collective has number 0.
        signals: See `Expected`.
        workspace: Buffers to join messages of several runs.
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
    """Properties that all messages of an exchange must have.

    Args:
        header: Header of replica 0; status and received digest are not compared.
        nbytes: Number of bytes after the header.
        parameters: Number of parameters, which is the largest valid status.
        signals: True if each message carries its sender's own signal, so that all norms are of
            similar size. False for the aggregates of owners.
    """

    header: Header
    nbytes: int
    parameters: int
    signals: bool


def unsealed(messages: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the words of each header, and a newly computed checksum of each message. For this
    checksum, the header's word with the received checksum counts as 0.

    Shapes: `[messages, nbytes]` uint8 -> `[messages, 8]` and `[messages]` int64.
    """
    headers = messages[:, :HEADER_BYTES].clone(memory_format=torch.contiguous_format)
    return headers.view(torch.int64), checksums(messages, CHECKSUM_AT)


def decide_usable(
    words: Tensor, added: Tensor, content: Tensor, norms: Tensor, expected: Expected, usual: Tensor
) -> tuple[Tensor, Tensor]:
    """Decides which messages are refused, because of their header, checksum, content or norm.

    The norm of a message is too large if it exceeds both `LOUDER` times the median norm of this
    exchange and `LOUDER` times the reference norm `usual`. Sparse gradients need the reference
    norm: replicas may send almost zeros for many steps, and then messages as large as before. Each
    exchange first shrinks the reference norm slightly, except while most messages are almost zero.
    Then it raises the reference norm to the median, if the median is larger. With three or more
    senders, a single sender cannot raise the median above all other norms. The median of two norms
    is the larger norm.

    Args:
        words, added: Words of the headers, and checksums of the received bytes; see `unsealed`.
        content, norms: See `Arrived.facts`.
        usual: Reference norm before this exchange, 0 at first; updated in place.

    Returns the refused messages, and a table for `explain_faults`. The columns of the table are the
    eight words of the header, the checksum, faults of the content, the float64 bits of the norm and
    of the largest allowed norm, and 1 if the message is refused.

    Shapes: words `[replicas, 8]`, added and content `[replicas]` int64, norms `[replicas]`, usual
    `[1]` fp32 -> `[replicas]` bool, `[replicas, 13]` int64.
    """
    header = expected.header
    # Norms are compared as integers, because the bits of nonnegative floats keep their order.
    # The bits of NaN are larger than the bits of any number.
    bits = norms.abs().double().view(torch.int64)
    found = torch.cat([words, torch.stack([added, content, bits], 1)], 1)
    replicas = len(words)
    limits, of_step = _limits(
        header.schema, header.place, expected.nbytes, expected.parameters, replicas, words.device
    )
    limits = limits.add(of_step, alpha=header.step)
    limits[:, :, 8].copy_(words[:, 7])  # the computed checksum must equal the received checksum
    refused = (found < limits[0]).logical_or_(found > limits[1]).any(1)
    if expected.signals:
        heard = norms.masked_fill(refused, 0.0)
        senders = (heard > 0).sum(0, keepdim=True)
        # the median of two norms is the larger one, so that neither of the two messages is refused
        middle = senders.sub_(1).div_(2, rounding_mode="trunc")
        median = heard.sort(descending=True).values.gather(0, middle)
        bound = torch.maximum(median, usual).mul_(LOUDER)
        refused.logical_or_(norms > bound)
        remembered = torch.where(median * LOUDER < usual, usual, usual * FORGET)
        torch.maximum(median, remembered, out=usual)
    else:
        bound = _infinity(words.device)
    of_all = bound.double().view(torch.int64).expand(replicas, 1)
    return refused, torch.cat([found, of_all, refused.unsqueeze(1)], 1)


@lru_cache(maxsize=64)
def _limits(
    schema: int, place: int, nbytes: int, parameters: int, replicas: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Returns the smallest and the largest valid value of each of the first 11 columns in the table
    of `decide_usable`, for step 0. Also returns a row with 1 in the column of the step and 0 in all
    other columns.

    For another step, the caller adds the step times this row to the limits. The caller also
    replaces the limits in the column of the checksum.

    Shapes: -> `[2, replicas, 11]` and `[11]` int64.
    """
    anything = torch.iinfo(torch.int64)
    largest_norm = struct.unpack("q", struct.pack("d", LIMIT))[0]
    exact = [IDENTITY, schema, 0, place, nbytes]
    lowest = [*exact, 0, anything.min, anything.min, 0, 0, 0]
    highest = [*exact, parameters, anything.max, anything.max, 0, 0, largest_norm]
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
    """Returns the fault of each message in `table` (see `decide_usable`) as text, in replica order;
    "" for a message without a fault.
    """
    return [_fault(sender, row, expected) for sender, row in enumerate(table)]


def _fault(replica: int, row: Sequence[int], expected: Expected) -> str:
    identity, schema, step, origin, length, status, _, stated, added, content, *_ = row
    norm, bound = struct.unpack("2d", struct.pack("2q", *row[10:12]))
    version = identity >> 56
    sender = origin >> 32
    place = origin & 0xFFFFFFFF
    header = expected.header
    nbytes = expected.nbytes
    reasons = [
        (identity & 2**56 - 1 != MAGIC, "is no message of this library"),
        (stated != added, "has a wrong checksum: it was damaged on its way"),
        (version != VERSION, f"has format version {version}, must have version {VERSION}"),
        (schema != header.schema, "follows another schema: its sender has other settings"),
        (step != header.step, f"belongs to step {step}, must belong to step {header.step}"),
        (sender != replica, f"says that it is from replica {sender}"),
        (place != header.place, "belongs to another level, part or phase of the step"),
        (length != nbytes, f"says that it has {length} bytes, must have {nbytes}"),
        (
            not 0 <= status <= expected.parameters,
            f"has status {status}, which does not exist",
        ),
        (content == 1, "has an index outside of its row"),
        (content == 2, "has an index twice or out of order"),
        (content == 3, "has statistics that no encoder makes"),
        (not norm <= LIMIT, TOO_LARGE),
        (norm > bound, TOO_LOUD),
    ]
    return next((reason for holds, reason in reasons if holds), "")


def _take_recorded(message: Message) -> None:
    """Prepares a message that is replayed from a recorded run. Its buffer belongs to the recording,
    so this buffer is not reused. A header of zeros marks a replica that was absent.
    """
    message.recycle = None
    headers = message.arrived[0][:, :HEADER_BYTES]
    message.absent = {sender for sender, header in enumerate(headers) if not header.any()}


def _empty_headers(whole: Tensor, absent: Collection[int]) -> None:
    """Sets the headers of `absent` replicas to zero, so that a replay recognises these replicas as
    absent."""
    for sender in absent:
        whole[sender, :HEADER_BYTES] = 0


def _without(
    absent: Collection[int], found: Arrived, refused: Tensor | None
) -> tuple[Arrived, Tensor | None]:
    """Returns the messages and the flags of refused messages, without the entries of `absent`
    replicas.
    """
    present = [sender for sender in range(len(found.body)) if sender not in absent]
    if refused is not None:
        refused = refused[present]
    return replace(found, body=found.body[present]), refused


class Guard(SumGuard):
    """Seals and validates the messages between one channel and its link.

    The decision on a message depends only on the received bytes of the exchange, so replicas that
    received the same bytes decide alike. The next message of each replica carries a digest of the
    bytes that this replica received. A refused message counts as zeros. The mean remains a mean
    over all replicas, so the refusal of a message gives no other replica more weight.

    A subclass can seal and validate messages in kernels on the device. The engine names the class
    to use (`ReferenceEngine.guard`).
    """

    on_kernels = False
    """True if kernels seal and validate messages. The memory of messages is then reused from step
    to step."""

    def seal(self, message: Message, status: int | Tensor | None, phase: int = 0) -> Tensor:
        """Returns the bytes that the next collective sends: the consecutive rows (a run) in
        `message.waiting`. The last run of a message begins with the header.

        Args:
            status: 0, or 1 + the number of the parameter because of which a part of the message is
                zeros; None if further runs of this message follow.
            phase: See `Stage`.

        Shapes: -> `[messages, Codec.sent]` uint8, including the header.
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
                # digest of the latest exchange that every replica has certainly completed
                opened = self._received.get(self._sent - 1 - self._delay, 0)
                received = (opened >> 32 ^ self.noted) << 32 | crc32(self._counts.options)
                if message.missing:
                    received = with_said(received, message.missing.says)
                self._sent += 1
            nbytes = sum(message.codec.lengths[sum(map(_ROWS, runs))])
            self._write_header(runs, nbytes, message.step, self._place | phase, status, received)
            # Drops the buffers of the message: collectives that still run keep their tensors alive.
            message.sent.clear()
        end = run.room + sum(run.codec.lengths[run.rows])
        return run.octets[:, : end + -end % run.codec.alignment]

    def _write_header(
        self,
        runs: Sequence[MessageRows],
        nbytes: int,
        step: int,
        place: int,
        status: int | Tensor,
        received: int,
    ) -> None:
        """Writes the header of a message of `nbytes` bytes before the first of its `runs`; see
        `Header`.
        """
        octets = runs[0].octets
        whole = octets
        if len(runs) > 1:
            whole = joined([run.parts for run in runs], HEADER_BYTES)
        elif octets.device.type == "cpu":
            whole = octets[:, : HEADER_BYTES + nbytes]
        header = Header(self._schema, step, place, self._replica, status, received)
        header.seal(whole, nbytes)
        if len(runs) > 1:
            octets[:, :HEADER_BYTES] = whole[:, :HEADER_BYTES]

    def open(
        self,
        message: Message,
        stage: Stage,
        shared: Tensor | SharedIndices | None,
        observer: StepObserver | None = None,
    ) -> Arrived:
        """Validates the received messages, one per replica, and counts their faults. Replaces
        refused messages by zeros.

        Args:
            shared: Indices that all replicas know; None if the messages contain them.
            observer: Sees the messages, unless they are played back.
        """
        arrived = message.arrived
        if message.played:
            _take_recorded(message)
        absent = message.absent
        end = HEADER_BYTES + sum(stage.codec.lengths[stage.rows])
        back = None
        if message.recycle:
            back = partial(message.recycle, arrived[0])
        if len(arrived) == 1 and arrived[0].device.type == "cpu":
            whole = arrived[0][:, :end]
        else:
            whole = message.whole(end)
        if observer is not None and not message.played:
            _empty_headers(whole, absent)
            observer.received(self.place, message.step, whole[:, :end])
        body = whole[:, HEADER_BYTES:end]
        # `Message.whole` has copied the bytes, and has given the receive buffers back for reuse
        if not arrived:
            back = None
        found = Arrived(stage.codec, body, stage.rows, shared, stage.aggregation, stage.unit, back)
        refused = self.admit(message, stage, whole, found.facts())
        # A mean over signals leaves absent replicas out.
        # An absent owner's aggregate stays in `found` as zeros, so the update of its rows is zero.
        if absent and stage.signals:
            found, refused = _without(absent, found, refused)
        if refused is not None:
            # zeros are written to a copy, because simulated replicas share one receive buffer
            if found.body.device.type == "cpu":
                found = replace(found, body=found.body.clone())
            found.blank(refused)
        return found

    def admit(
        self, message: Message, stage: Stage, whole: Tensor, content: tuple[Tensor, Tensor]
    ) -> Tensor | None:
        """Decides which messages are refused, and counts their faults. Faults of absent replicas,
        whose messages are zeros, are not counted.

        Args:
            whole: The bytes of `message`, one sealed message per replica.
            content: Result of `Arrived.facts`.

        Shapes: whole `[replicas, 64 + nbytes + padding]` uint8 -> `[replicas]` bool, or None if no
        message is refused.
        """
        step = message.step
        header = Header(self._schema, step, self._place | stage.phase, 0)
        nbytes = sum(stage.codec.lengths[stage.rows])
        expected = Expected(header, nbytes, len(self._names), stage.signals)
        refused, table = decide_usable(*unsealed(whole), *content, expected, self.usual)
        if message.missing and not stage.phase:
            self.hear(message.missing, runtime.Readback(table), message.absent)
        explain = partial(explain_faults, expected=expected)
        report = partial(
            self._report, explain=explain, step=step, stage=stage, absent=message.absent
        )
        if self._on_device:
            due = step + self._delay
            self._counts.reports.append((due, runtime.Readback(table), report))
            return refused
        if report(table.tolist()):
            return None
        return refused

    def hear(self, missing: Missing, table: runtime.Readback, absent: Collection[int] = ()) -> None:
        """Sets `missing.said` to a function that returns each replica's report on its parameters
        without a gradient. The function reads the reports from `table`, which `decide_usable` made.
        """

        def said() -> dict[int, int]:
            found = {}
            for sender, row in enumerate(table.read()):
                if sender in absent:
                    continue
                found[sender] = NONE_MISSING
                if row[0] == IDENTITY:
                    found[sender] = said_in(row[6])
            return found

        missing.said = said

    def _report(
        self,
        rows: Sequence[Sequence[int]],
        explain: Callable[[Sequence[Sequence[int]]], list[str]],
        step: int,
        stage: Stage,
        absent: Collection[int] = (),
    ) -> bool:
        """Counts the faults in `rows`, the table that `decide_usable` made. Returns True if no
        message is refused.
        """
        fine = not any(map(_REFUSED, rows))
        faults = [""] * len(rows)
        if not fine:
            faults = explain(rows)
        if not stage.phase:
            self._compare_received(rows, faults, step)
        used = []
        if absent:
            self._counts.miss(absent)
        for sender, (row, fault) in enumerate(zip(rows, faults, strict=True)):
            if sender in absent:
                continue
            if fault:
                self._refuse(sender, fault, step)
            elif row[5]:
                self._counts.skip(sender, self._place, self._names[row[5] - 1], step)
            elif stage.signals:
                used.append(sender)
        # a used message ends a series of skips; `FORGIVEN` used messages cancel earlier refusals
        if self._counts.skipped or self._counts.refused:
            self._counts.accept(used, self._place)
        return fine

    def _refuse(self, sender: int, fault: str, step: int) -> None:
        """Counts a refused message. If this replica sent the message and its values or norm were
        too large, also clears this replica's memory of unsent values.
        """
        self._counts.refuse(sender, fault, step)
        if sender == self._replica and fault in (TOO_LARGE, TOO_LOUD):
            self._forget()

    def _compare_received(
        self, rows: Sequence[Sequence[int]], faults: Sequence[str], step: int
    ) -> None:
        """Compares the digests in the messages of all replicas. Each digest covers the messages
        that the sender received in earlier exchanges. So digests differ if only some replicas
        received a damaged message.
        """
        received = [(row[7], fault) for row, fault in zip(rows, faults, strict=True)]
        self._received[self._opened] = hash63(repr(received))
        self._received.pop(self._opened - 2 - self._delay, None)
        self._opened += 1
        lower = (1 << RECEIVED_BITS) - 1
        digests = {sender: row[6] & lower for sender, row in enumerate(rows) if not faults[sender]}
        if len(set(digests.values())) > 1:
            self._counts.differ(digests, step)
