"""Guard: seals what a replica tells, and inspects what arrives before any of it is used."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from detonation.core.codec.codec import Codec, Message
from detonation.core.codec.indices import Packed
from detonation.core.codec.precision import Float
from detonation.core.integrity import readback
from detonation.core.integrity.fault_counts import Ledger
from detonation.core.integrity.header import DIGITS, Stamp, facts, number, put, sealed
from detonation.core.integrity.nonfinite import poisoned, poisoned_there
from detonation.core.integrity.validate import Expected, Inspected, faults, usable
from detonation.kernels import native


@dataclass(frozen=True)
class Opened:
    """What arrived, in replica order, as it may be used: zeros from a replica that tells nothing or was refused."""

    values: list[Tensor]  # [rows, kept]
    columns: list[Tensor | Packed | None]


class Guard:
    """Stands between one channel and its link, the same on all replicas.

    The decision on a message is a function of its bytes and of those beside it, so replicas that received the same
    bytes take it alike; whether they did, each tells with its next message. A message that is refused counts as zeros:
    the mean stays one over all replicas, so that nobody's voice grows because another's was lost.

    late: whether the device decides, and the ledger hears of it when somebody catches up: no message is ever used that
    must not be, but a count, a warning or a reason to stop comes later.
    """

    def __init__(
        self,
        codec: Codec,
        names: Sequence[str],
        schema: str,
        place: int,
        replica: int,
        delay: int,
        ledger: Ledger,
        late: bool = False,
    ) -> None:
        self._codec, self._names, self._ledger = codec, list(names), ledger
        self._stamp = Stamp(number(schema), 0, place << 2, replica)
        self._delay, self._late = delay, late
        self._sent = self._opened = 0
        self._heard: dict[int, int] = {}  # by number of the exchange

    def status(self, signals: Sequence[Tensor | None]) -> int | Tensor:
        """0, or 1 + the number of the first parameter whose signal must not reach the memory; `[]` int64 where late."""
        return poisoned_there(signals) if self._late else poisoned(signals)

    def seal(self, message: Message, step: int, status: int | Tensor, phase: int = 0) -> tuple[Tensor, ...]:
        """The parts to send. phase: which of the collectives of an exchange; the last one is 0."""
        heard = 0
        if not phase:
            # of the exchange that all have surely taken in, whoever looked at one on its way
            heard = self._heard.get(self._sent - 1 - self._delay, 0)
            self._sent += 1
        return sealed(
            message.parts, replace(self._expected(step, phase, self._stamp.sender), status=status, heard=heard)
        )

    def open(
        self,
        arrived: Sequence[Sequence[Tensor]],
        rows: int,
        shared: Sequence[Tensor | Packed | None],
        step: int,
        phase: int = 0,
        signals: bool = True,
    ) -> Opened:
        """What `arrived`, one sealed message a replica: inspected, counted and read.

        shared: the columns of each where all know them. signals: see `Expected`.
        """
        messages = [Message(*parts[1:]) for parts in arrived]
        values = [self._codec.read(message, rows) for message in messages]
        columns = [None if m.columns is None else Packed(self._codec.columns, m.columns, rows) for m in messages]
        looked = [self._look(*each, rows) for each in zip(messages, values, columns, strict=True)]
        table = torch.cat([facts(arrived), torch.stack(looked)], 1)  # [replicas, 12]
        nbytes = sum(part.nbytes for part in messages[0].parts)
        expected = Expected(self._expected(step, phase, 0), nbytes, len(self._names), signals)
        report = partial(self._report, expected=expected, last=not phase)
        use: Sequence[bool] | Tensor
        if self._late:
            use = usable(table, expected)
            self._ledger.hear(step + self._delay, readback.Later(table), report)
        else:
            use = report(table.tolist())
        opened = Opened([], [])
        for packed, told, where, used in zip(columns, values, shared, use, strict=True):
            opened.values.append(_kept(told, used))
            opened.columns.append(where if packed is None else self._columns(packed, used))
        return opened

    def seal_sum(self, values: Tensor, replicas: int, status: int | Tensor) -> Tensor:
        """What the network may add up: `values`, as the precision writes them, and after them everyone's status.

        Each replica has three places for its own and zeros in the others', so that no header is needed.
        """  # [rows, kept] -> [rows * kept + 3 * replicas]
        assert isinstance(self._codec.precision, Float)
        count, mine = values.numel(), DIGITS * self._stamp.sender
        buffer = torch.empty(count + DIGITS * replicas, dtype=self._codec.precision.dtype, device=values.device)
        buffer[:count].view_as(values).copy_(values)
        buffer[count:].zero_()
        if isinstance(status, Tensor) or status:
            for i in range(DIGITS):
                put(buffer[count + mine + i], status >> 8 * i & 255)
        return buffer

    def open_sum(self, total: Tensor, count: int, step: int) -> Tensor:
        """The sum of the values alone, after all statuses were counted; zeros where it is not finite."""  # [count]
        values = total[:count]
        if self._late:
            finite = values.isfinite().all().view(1)
            found = readback.Later(_joined(finite, total[count:]))
            self._ledger.hear(step + self._delay, found, partial(self._report_sum, step=step))
            return values.masked_fill_(finite.logical_not(), 0.0)
        library = native.load_for(values)
        if library and values.dtype == torch.float32:
            finite = torch.tensor([library.beyond([values], torch.finfo(torch.float32).max) < 0])
        else:
            finite = values.isfinite().all().view(1)
        fine = self._report_sum(_joined(finite, total[count:]).tolist(), step)
        return values if fine else torch.zeros_like(values)

    def _report(self, rows: Sequence[Sequence[int]], expected: Expected, last: bool) -> list[bool]:
        """Counts what was found in each message; whether each may be used. last: see `seal`."""
        table = [Inspected.of(row) for row in rows]
        found, step = faults(table, expected), expected.stamp.step
        if last:
            self._compare(table, found, step)
        statuses = [each.header.status for each in table]
        return [
            self._count(sender, fault, statuses[sender], step, expected.signals) for sender, fault in enumerate(found)
        ]

    def _report_sum(self, found: Sequence[float], step: int) -> bool:
        """Counts everyone's status; whether the sum may be used."""
        fine, *digits = found
        for sender in range(len(digits) // DIGITS):
            own = digits[DIGITS * sender : DIGITS * (sender + 1)]
            known = all(0 <= digit <= 255 and digit == int(digit) for digit in own)
            status = sum(int(digit) << 8 * i for i, digit in enumerate(own)) if known else -1
            fault = "" if 0 <= status <= len(self._names) else "has a status that does not exist"
            self._count(sender, fault, status, step, signals=True)
        if not fine:
            self._ledger.refuse_sum(step)
        return bool(fine)

    def _expected(self, step: int, phase: int, sender: int) -> Stamp:
        return replace(self._stamp, step=step, place=self._stamp.place | phase, sender=sender)

    def _look(self, message: Message, told: Tensor, columns: Packed | None, rows: int) -> Tensor:
        """What the decision on a message needs beside its `facts`, on the device that it is on."""  # [3] int64
        places = columns.fault() if columns else torch.zeros((), device=told.device)
        lawful = self._codec.precision.lawful(message.values, rows, self._codec.selection.kept)
        norm = torch.linalg.vector_norm(told).double().view(torch.int64)
        return torch.stack([places.long(), lawful.long(), norm])

    def _compare(self, table: Sequence[Inspected], faults: Sequence[str], step: int) -> None:
        """Did all hear the same earlier? A message that was damaged on its way to some only shows here."""
        self._heard[self._opened] = number(repr([(t.header.words[7], f) for t, f in zip(table, faults, strict=True)]))
        self._heard.pop(self._opened - 2 - self._delay, None)
        self._opened += 1
        heard = {r: t.header.heard for r, (t, fault) in enumerate(zip(table, faults, strict=True)) if not fault}
        usual = Counter(heard.values()).most_common(1)
        for sender, what in heard.items():
            if what != usual[0][0]:
                self._ledger.differ(sender, step)

    def _count(self, sender: int, fault: str, status: int, step: int, signals: bool) -> bool:
        """Whether the message may be used."""
        if fault:
            self._ledger.refuse(sender, fault, step)
        elif status:
            self._ledger.skip(sender, self._stamp.place, self._names[status - 1], step)
        elif signals:
            self._ledger.fine(sender, self._stamp.place)
        return not fault and not status

    def _columns(self, packed: Packed, used: bool | Tensor) -> Tensor | Packed:
        if isinstance(used, Tensor):  # bytes of zeros are columns, too
            return replace(packed, encoded=packed.encoded.masked_fill(used.logical_not(), 0))
        if used:
            return packed
        return torch.arange(self._codec.selection.kept, device=packed.encoded.device).expand(packed.rows, -1)


def _kept(told: Tensor, used: bool | Tensor) -> Tensor:
    """`told`, or zeros."""
    if isinstance(used, Tensor):
        return told.masked_fill(used.logical_not(), 0.0)
    return told if used else torch.zeros_like(told)


def _joined(finite: Tensor, digits: Tensor) -> Tensor:
    return torch.cat([finite.to(torch.float32), digits.to(torch.float32)])
