"""The guard seals the messages of a replica, and decides which received messages may be used."""

from collections.abc import Callable, Collection, Sequence
from functools import cached_property, partial
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from detonation.core.codec.message_rows import MessageRows, joined, row_run
from detonation.core.compute import kernel_library
from detonation.core.compute.nonfinite import LIMIT
from detonation.core.integrity import readback
from detonation.core.integrity.fault_counts import FaultCounts
from detonation.core.integrity.header import DIGITS, HEADER_BYTES, IDENTITY, Header, constant, hash63, put, unsealed
from detonation.core.integrity.validate import (
    FORGET,
    LOUDER,
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
        kernels: The module `detonation.kernels.gpu.launches`, where it seals and inspects.
        forget: Empties the memory that messages come from: after one that was too loud, the next ones would be, too.
    """

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
        kernels: Any = None,
        forget: Callable[[], object] = lambda: None,
    ) -> None:
        self._names, self._counts, self.place = list(names), counts, place
        self._schema, self._place, self._replica = hash63(schema), place << 2, replica
        self._delay, self._on_device = delay, on_device
        self.usual = torch.zeros(1, dtype=torch.float32, device="cpu") if usual is None else usual
        self.kernels, self._inspectors, self._forget = kernels, dict[int, Any](), forget
        self._high = 1 + (len(self._names) >> 16)  # statuses have as many highest digits; marks take the rest of 256
        self._marks, self._first_mark = min(251, 256 // self._high - 1), (self._schema + 5 * place) % 251
        self._sent = self._opened = 0
        self._received: dict[int, int] = {}  # digests by number of the exchange

    def seal(self, runs: Sequence[MessageRows], step: int, status: int | Tensor, phase: int = 0) -> None:
        """Writes the header of each message of one collective, in the room of its first run.

        Args:
            runs: In the order of their rows: of one replica's message, or of one to each owner.
            status: 0, or 1 + the number of the parameter because of which a part of the message is zeros.
            phase: Which of the collectives of an exchange; the last is 0.
        """
        header, octets = self._header(step, status, phase), runs[0].octets
        nbytes = runs[0].nbytes if len(runs) == 1 else runs[0].codec.nbytes(sum(run.rows for run in runs))
        if self.kernels is not None:
            read = [row_run(self.kernels, run.codec, run.octets, run.room, run.rows) for run in runs]
            found = status if isinstance(status, Tensor) else constant(status, octets.device)
            inspector = self._inspector(len(octets))
            inspector.seal(read, nbytes, IDENTITY, header.schema, step, header.origin, found, header.received)
        elif len(runs) == 1:
            header.seal(octets[:, : HEADER_BYTES + nbytes] if octets.device.type == "cpu" else octets, nbytes)
        else:
            whole = joined([run.parts for run in runs], HEADER_BYTES)
            header.seal(whole, nbytes)
            octets[:, :HEADER_BYTES] = whole[:, :HEADER_BYTES]

    def _header(self, step: int, status: int | Tensor, phase: int) -> Header:
        received = 0
        if not phase:
            # of the exchange that all have surely opened, whoever looked at a message on its way
            received = self._received.get(self._sent - 1 - self._delay, 0) >> 32 << 32 | crc32(self._counts.options)
            self._sent += 1
        return Header(self._schema, step, self._place | phase, self._replica, status, received)

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
            self._counts.report_later(step + self._delay, readback.Readback(table), report)
            return refused
        return None if self._report(table.tolist(), expected, not phase, absent) else refused

    def inspect(
        self,
        runs: Sequence[Any],
        whole: Tensor,
        nbytes: int,
        coding: Any,
        places: Any,
        step: int,
        phase: int = 0,
        signals: bool = True,
    ) -> None:
        """`admit`, and zeros in the place of refused messages, by kernels.

        Args:
            runs: Of the messages, in the order of their rows (`RowRun`).
            whole: Where they are joined; the octets of the only run, if that is aligned and no one else's.
            coding, places: Of the messages, as kernels read them (`engine.accelerated`).

        Shapes: whole `[replicas, 64 + nbytes or more]` uint8.
        """
        header = Header(self._schema, step, self._place | phase, 0)
        expected = Expected(header, nbytes, len(self._names), signals)
        limits = self.kernels.Limits(LIMIT, LOUDER, FORGET)
        table = self._inspector(len(whole)).inspect(
            runs, whole, nbytes, coding, places, IDENTITY, header.schema, step, header.place, expected.parameters,
            self.usual, signals, limits,
        )  # fmt: skip
        report = partial(self._report, expected=expected, last=not phase)
        self._counts.report_later(step + self._delay, _readback(table), report)

    def weigh(self, messages: Tensor, coding: Any, places: Any, weights: Tensor) -> None:
        """Writes the weights of a clipped mean, by a kernel.

        Args:
            coding, places: Of the messages, as in `inspect`.

        Shapes: messages `[replicas, nbytes]` uint8, weights `[replicas]` fp32.
        """
        self._inspector(len(messages)).weigh(messages, places, coding, weights)

    def _inspector(self, count: int) -> Any:
        if count not in self._inspectors:
            self._inspectors[count] = self.kernels.Inspector(count, self.usual.device)
        return self._inspectors[count]

    def seal_sum(self, digits: Tensor, status: int | Tensor, step: int) -> None:
        """Writes this replica's status after the values of an all-reduce, and a mark of schema, place and step.

        Each replica writes three numbers for itself and zeros for the others, so that no header is needed. The last
        number has room for the mark, which is never 0.

        Shapes: `[3 * replicas]`, zeros; of any content where kernels write them.
        """
        mark = (1 + (self._first_mark + step) % self._marks) * self._high
        if self.kernels is not None:
            found = status if isinstance(status, Tensor) else constant(status, digits.device)
            self._sums.seal(found, digits, DIGITS * self._replica, DIGITS, mark)
        elif isinstance(status, Tensor) or status:
            for i in range(DIGITS):
                put(digits[DIGITS * self._replica + i], (status >> 8 * i & 255) + mark * (i == DIGITS - 1))
        else:
            digits[DIGITS * self._replica + DIGITS - 1].fill_(mark)

    def open_sum(self, values: Sequence[Tensor], digits: Tensor, step: int, absent: Collection[int] = ()) -> bool:
        """Counts the statuses in a sum; False where zeros must replace the values: not all are finite, or the messages
        do not belong together (`absent` ones may be missing). On an accelerator the device replaces what is not finite.

        Shapes: values any, digits `[3 * replicas]`.
        """
        if self._on_device:
            norms = torch.stack([torch.linalg.vector_norm(each, torch.inf) for each in values])
            finite = norms.isfinite().all().view(1)
            found = readback.Readback(torch.cat([finite.to(torch.float32), digits.to(torch.float32)]))
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

    def inspect_sum(
        self, values: Sequence[Tensor], digits: Tensor, step: int, report: Tensor, absent: Collection[int] = ()
    ) -> None:
        """`open_sum` by kernels. Who decodes the values asks `report` whether they count.

        Shapes: values any, digits `[3 * replicas]`, report `[1 + 3 * replicas]` fp32.
        """
        self._sums.inspect(values, digits, report)
        self._counts.report_later(step + self._delay, _readback(report), partial(self._report_sum, step, absent))

    @cached_property
    def _sums(self) -> Any:
        return self.kernels.SumInspector(self.usual.device)

    def _report(
        self, rows: Sequence[Sequence[int]], expected: Expected, last: bool, absent: Collection[int] = ()
    ) -> bool:
        """Counts the faults of each row of the table of `decide_usable`; returns True if no message is refused."""
        fine, step = not any(row[-1] for row in rows), expected.header.step
        faults = [""] * len(rows) if fine else explain_faults(rows, expected)
        if last:
            self._compare_received(rows, faults, step)
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
                self._counts.accept(sender, self._place)
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
        mark = (1 + (self._first_mark + step) % self._marks) * self._high
        if digits != [0, 0, mark] * replicas:
            statuses = statuses_of_sum(digits, self._replica, mark, self._high, absent)
        for sender, status in enumerate(statuses or [0] * replicas):
            if not status:
                self._counts.accept(sender, self._place)
            elif status < 0:
                self._counts.misplace(sender, step)
            elif status > len(self._names):
                self._counts.refuse(sender, "has a status that does not exist", step)
            else:
                self._counts.skip(sender, self._place, self._names[status - 1], step)
        if not finite:
            self._counts.refuse_sum(step)
        return bool(finite) and min(statuses, default=0) >= 0


def _readback(numbers: Tensor) -> readback.Readback:
    """The readback of numbers over which a later inspection writes: of a CPU that plays an accelerator, of a copy."""
    return readback.Readback(numbers.clone() if numbers.device.type == "cpu" else numbers)
