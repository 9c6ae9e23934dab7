"""The guard seals the messages of a replica, and decides which received messages may be used."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from zlib import crc32

import torch
from torch import Tensor

from detonation.core import runtime
from detonation.core.codec.aggregate import Aggregation
from detonation.core.codec.arrived import Arrived
from detonation.core.codec.message_rows import MessageRows, SharedIndices, joined
from detonation.core.compute import kernel_library
from detonation.core.integrity.fault_counts import FaultCounts
from detonation.core.integrity.header import DIGITS, HEADER_BYTES, Header, hash63, put, unsealed
from detonation.core.integrity.message import Message, Tape, Workspace
from detonation.core.integrity.validate import (
    TOO_LARGE,
    TOO_LOUD,
    Expected,
    Facts,
    decide_usable,
    explain_faults,
    statuses_of_sum,
)


class Guard:
    """Seals and validates the messages between one channel and its link.

    The decision on a message is a function of its bytes and of the other messages of the exchange, so replicas that
    received the same bytes decide the same. With its next message each replica sends a digest of the bytes that it
    received. A refused message counts as zeros: the mean stays a mean over all replicas, so that no replica gains
    weight because the message of another was lost.

    place: Which of the messages of a step these are.

    A subclass may seal and inspect on the device: an engine brings it (`ReferenceEngine.guard`).

    Args:
        names: Of the parameters.
        schema: All settings that sender and receiver must share to read a message.
        place: As above.
        replica: The number of this replica.
        delay: Steps that a message may be in flight.
        counts: Counts every fault.
        on_device: Whether the device decides. Faulty messages are then never used either, but counts, warnings and
            reasons to stop follow only in `FaultCounts.catch_up`.
        usual: The usual norm of messages, see `decide_usable`; several guards may share it. `[1]` fp32.
        forget: Empties the memory that messages come from: after one that was too loud, the next ones would be, too.
    """

    on_kernels = False
    """True if kernels seal and inspect, so that the memory of messages is kept from step to step."""

    def __init__(
        self,
        names: Sequence[str],
        schema: str,
        place: int,
        replica: int,
        delay: int,
        counts: FaultCounts,
        on_device: bool = False,
        usual: Tensor | None = None,
        forget: Callable[[], object] = lambda: None,
    ) -> None:
        self._names, self._counts, self.place = list(names), counts, place
        self._schema, self._place, self._replica = hash63(schema), place << 2, replica
        self._delay, self._on_device = delay, on_device
        self.usual = torch.zeros(1, dtype=torch.float32, device="cpu") if usual is None else usual
        self._forget = forget
        self._high = 1 + (len(self._names) >> 16)  # statuses have as many highest digits; marks take the rest of 256
        marks, first = min(251, 256 // self._high - 1), (self._schema + 5 * place) % 251
        self._marks = [(1 + (first + step) % marks) * self._high for step in range(marks)]  # of steps, in turns
        self._sent = self._opened = 0
        self._received: dict[int, int] = {}  # digests by number of the exchange

    def seal(self, message: Message, status: int | Tensor | None, phase: int = 0) -> Tensor:
        """The bytes of the run that waits, for its collective; the last one of its message begins with the header.

        Args:
            status: 0, or 1 + the number of the parameter because of which a part of the message is zeros; None if more
                of this message follows.
            phase: Which of the collectives of an exchange; the last is 0.

        Shapes: -> `[messages, nbytes]` uint8, the header among them.
        """
        run, message.waiting = message.waiting, None
        assert run is not None
        message.sent.append(run)
        message.rows.append((run.first, run.rows))
        if status is not None:
            received, runs = 0, message.sent
            if len(runs) > 1:
                runs = sorted(runs, key=attrgetter("first"))
            if not phase:
                # of the exchange that all have surely opened, whoever looked at a message on its way
                opened = self._received.get(self._sent - 1 - self._delay, 0)
                received = opened >> 32 << 32 | crc32(self._counts.options)
                self._sent += 1
            nbytes = sum(message.codec.lengths[sum(each.rows for each in runs)])
            header = Header(self._schema, message.step, self._place | phase, self._replica, status, received)
            self._write_header(runs, nbytes, header)
            message.sent.clear()  # the collectives hold what they still need
        return run.octets[:, : run.room + sum(run.codec.lengths[run.rows])]

    def _write_header(self, runs: Sequence[MessageRows], nbytes: int, header: Header) -> None:
        octets = runs[0].octets
        if len(runs) == 1:
            header.seal(octets[:, : HEADER_BYTES + nbytes] if octets.device.type == "cpu" else octets, nbytes)
        else:
            whole = joined([run.parts for run in runs], HEADER_BYTES)
            header.seal(whole, nbytes)
            octets[:, :HEADER_BYTES] = whole[:, :HEADER_BYTES]

    def open(
        self,
        message: Message,
        rows: int,
        shared: Tensor | SharedIndices | None,
        aggregation: Aggregation,
        phase: int = 0,
        signals: bool = True,
        tape: Tape | None = None,
        workspace: Workspace | None = None,
    ) -> Arrived:
        """Waits for one sealed message per replica, validates and counts them; zeros replace unusable ones.

        Args:
            rows: Of each message.
            shared: Their indices, where all replicas know them.
            phase, signals: See `seal` and `Expected`.
            tape: Takes in the messages, unless they come from it.
            workspace: Where messages in several runs are put together.
        """
        octets = message.wait()
        whole = octets[0] if len(octets) == 1 and octets[0].device.type == "cpu" else message.whole(octets)
        codec, absent, nbytes = message.codec, message.absent, sum(message.codec.lengths[rows])
        if tape is not None and not tape.plays:
            for sender in absent:  # which a replay finds by its empty header
                whole[sender, :HEADER_BYTES] = 0
            tape.put(self.place, message.step, whole[:, : HEADER_BYTES + nbytes])
        arrived = Arrived(codec, whole[:, HEADER_BYTES : HEADER_BYTES + nbytes], rows, shared, aggregation)
        refused = self.admit(whole, nbytes, arrived.facts(), message.step, phase, signals, absent)
        if absent and signals:  # the aggregate is that of the others; an owner that is absent leaves its rows
            present = [sender for sender in range(len(whole)) if sender not in absent]
            arrived = replace(arrived, body=arrived.body[present])
            refused = None if refused is None else refused[present]
        if refused is not None:
            if arrived.body.device.type == "cpu":  # simulated replicas receive one buffer together
                arrived = replace(arrived, body=arrived.body.clone())
            arrived.blank(refused)
        return arrived

    def admit(
        self,
        messages: Tensor,
        nbytes: int,
        content: tuple[Tensor, Tensor],
        step: int,
        phase: int = 0,
        signals: bool = True,
        absent: Collection[int] = (),
    ) -> Tensor | None:
        """Decides which messages are refused, and counts the faults.

        Args:
            messages: One sealed message per replica.
            content: The facts about each message, from `Arrived.facts`.
            signals: See `Expected`.
            absent: Replicas that were lost: their messages are zeros, refused without a count.

        Shapes: messages `[replicas, 64 + nbytes + padding]` uint8 -> `[replicas]` bool, or None where none is.
        """
        header = Header(self._schema, step, self._place | phase, 0)
        expected = Expected(header, nbytes, len(self._names), signals)
        refused, table = decide_usable(Facts(*unsealed(messages), *content), expected, self.usual)
        if self._on_device:
            report = partial(self._report, expected=expected, last=not phase, absent=absent)
            self._counts.report_later(step + self._delay, runtime.Readback(table), report)
            return refused
        return None if self._report(table.tolist(), expected, not phase, absent) else refused

    def seal_sum(self, digits: Tensor, status: int | Tensor, step: int) -> None:
        """Writes this replica's status after the values of an all-reduce, and a mark of schema, place and step.

        Each replica writes three numbers for itself and zeros for the others, so that no header is needed. The last
        number has room for the mark, which is never 0.

        Shapes: `[3 * replicas]`, of any content.
        """
        mark = self._marks[step % len(self._marks)]
        digits.zero_()
        if isinstance(status, Tensor) or status:
            for i in range(DIGITS):
                put(digits[DIGITS * self._replica + i], (status >> 8 * i & 255) + mark * (i == DIGITS - 1))
        else:
            digits[DIGITS * self._replica + DIGITS - 1].fill_(mark)

    def open_sum(
        self,
        values: Sequence[Tensor],
        digits: Tensor,
        step: int,
        absent: Collection[int] = (),
        workspace: Workspace | None = None,
    ) -> bool | Tensor:
        """Counts the statuses in a sum; False where zeros must replace the values: not all are finite, or the messages
        do not belong together (`absent` ones may be missing). On an accelerator the device replaces what is not finite,
        or who decodes the values asks the report (`Sums`) that is returned, which lies in `workspace`.

        Shapes: values any, digits `[3 * replicas]` -> report `[1 + 3 * replicas]` fp32.
        """
        if self._on_device:
            norms = torch.stack([torch.linalg.vector_norm(each, torch.inf) for each in values])
            finite = norms.isfinite().all().view(1)
            found = runtime.Readback(torch.cat([finite.to(torch.float32), digits.to(torch.float32)]))
            self._counts.report_later(step + self._delay, found, partial(self._report_sum, step, absent))
            for each in values:
                each.masked_fill_(finite.logical_not(), 0.0)
            return True
        kernel = kernel_library.load_library() if values[0].dtype == torch.float32 else None
        if kernel:
            fine = kernel.beyond(values, torch.finfo(torch.float32).max) < 0
        else:
            fine = all(bool(each.isfinite().all()) for each in values)
        return self._report_sum(step, absent, [fine, *digits.tolist()])

    def _report(
        self, rows: Sequence[Sequence[int]], expected: Expected, last: bool, absent: Collection[int] = ()
    ) -> bool:
        """Counts the faults of each row of the table of `decide_usable`; returns True if no message is refused."""
        fine, step = not any(row[-1] for row in rows), expected.header.step
        faults = [""] * len(rows) if fine else explain_faults(rows, expected)
        if last:
            self._compare_received(rows, faults, step)
        used = list[int]()
        for sender, (row, fault) in enumerate(zip(rows, faults, strict=True)):
            if sender in absent:
                continue
            if fault:
                self._counts.refuse(sender, fault, step)
                if sender == self._replica and fault in (TOO_LARGE, TOO_LOUD):
                    self._forget()
            elif row[5]:
                self._counts.skip(sender, self._place, self._names[row[5] - 1], step)
            elif expected.signals:
                used.append(sender)
        self._counts.accept(used, self._place)
        return fine

    def _compare_received(self, rows: Sequence[Sequence[int]], faults: Sequence[str], step: int) -> None:
        """Compares the digests of all replicas, which reveal a message that was damaged on the way to some of them."""
        self._received[self._opened] = hash63(repr([(row[7], fault) for row, fault in zip(rows, faults, strict=True)]))
        self._received.pop(self._opened - 2 - self._delay, None)
        self._opened += 1
        digests = {sender: row[6] for sender, row in enumerate(rows) if not faults[sender]}
        if len(set(digests.values())) > 1:
            self._counts.differ(digests, step)

    def _report_sum(self, step: int, absent: Collection[int], found: Sequence[float]) -> bool:
        """Counts the status of each replica, and a sum that is not finite; False for that, and for another mark."""
        finite, *digits = found
        replicas, statuses = len(digits) // DIGITS, list[int]()
        mark = self._marks[step % len(self._marks)]
        if digits != [0, 0, mark] * replicas:
            statuses = statuses_of_sum(digits, self._replica, mark, self._high, absent)
        statuses = statuses or [0] * replicas
        self._counts.accept([sender for sender, status in enumerate(statuses) if not status], self._place)
        for sender, status in enumerate(statuses):
            if not status:
                continue
            if status < 0:
                self._counts.misplace(sender, step)
            elif status > len(self._names):
                self._counts.refuse(sender, "has a status that does not exist", step)
            else:
                self._counts.skip(sender, self._place, self._names[status - 1], step)
        if not finite:
            self._counts.refuse_sum(step)
        return bool(finite) and min(statuses, default=0) >= 0
