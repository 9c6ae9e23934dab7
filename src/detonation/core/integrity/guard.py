"""The guard seals the messages of a replica, and decides which of those that arrive may be used."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from hashlib import sha256

import torch
from torch import Tensor

from detonation.core.compute import library
from detonation.core.integrity import readback
from detonation.core.integrity.fault_counts import FaultCounts
from detonation.core.integrity.header import DIGITS, Header, put
from detonation.core.integrity.validate import Expected, decide_usable, explain_faults


class Guard:
    """Stands between one channel and its link, the same on all replicas.

    The decision on a message is a function of its bytes and of the messages beside it, so replicas that received the
    same bytes take it alike; whether they did, each sends with its next message, as a digest. A message that is refused
    counts as zeros: the mean stays a mean over all replicas, so that nobody's voice grows because another's was lost.

    Args:
        names: Of the parameters.
        schema: Everything that both sides must know alike to read a message.
        place: Which of the messages of a step these are.
        replica: This one.
        delay: Steps that a message may be on its way.
        counts: Hears of every fault.
        on_device: Whether the device decides. The counts then follow later: no message is ever used that must not be,
            but a count, a warning or a reason to stop comes when somebody catches up.
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
    ) -> None:
        self._names, self._counts = list(names), counts
        self._schema, self._place, self._replica = hash63(schema), place << 2, replica
        self._delay, self._on_device = delay, on_device
        self._sent = self._opened = 0
        self._received: dict[int, int] = {}  # digests by number of the exchange

    def seal(
        self, messages: Sequence[Sequence[Tensor]], step: int, status: int | Tensor, phase: int = 0
    ) -> list[tuple[Tensor, ...]]:
        """Puts a header before the parts of each message of one collective.

        Args:
            status: 0, or 1 + the number of the parameter for whose sake the message is empty.
            phase: Which of the collectives of an exchange; the last is 0.

        Shapes: any, alike in all messages -> `[8]` int64, and the parts.
        """
        received = 0
        if not phase:
            # of the exchange that all have surely opened, whoever looked at a message on its way
            received = self._received.get(self._sent - 1 - self._delay, 0)
            self._sent += 1
        header = Header(self._schema, step, self._place | phase, self._replica, status, received)
        return header.sealed(messages, self._on_device)

    def admit(
        self, messages: Sequence[Sequence[Tensor]], content: Tensor, step: int, phase: int = 0, signals: bool = True
    ) -> Tensor | None:
        """Decides which messages may be used, and counts the rest.

        Args:
            messages: One sealed message per replica: header and parts.
            content: What `Codec.open` found in each.
            signals: See `Expected`.

        Shapes: content `[replicas, 3]` int64 -> `[replicas]` bool, or None where all may be used.
        """
        nbytes = sum([part.nbytes for part in messages[0][1:]])
        header = Header(self._schema, step, self._place | phase, 0)
        expected = Expected(header, nbytes, len(self._names), signals)
        table = decide_usable(messages, content, expected)
        if self._on_device:
            report = partial(self._report, expected=expected, last=not phase)
            self._counts.report_later(step + self._delay, readback.Readback(table), report)
            return table[:, -1] != 0
        return None if self._report(table.tolist(), expected, last=not phase) else table[:, -1] != 0

    def seal_sum(self, values: Tensor, dtype: torch.dtype, replicas: int, status: int | Tensor) -> Tensor:
        """The buffer that the network may add up: `values` in `dtype`, and after them everyone's status.

        Each replica has three places for its own status and zeros in the others', so that no header is needed.

        Shapes: `[rows, k]` -> `[rows * k + 3 * replicas]`.
        """
        count, first = values.numel(), DIGITS * self._replica
        buffer = torch.empty(count + DIGITS * replicas, dtype=dtype, device=values.device)
        buffer[:count].view_as(values).copy_(values)
        buffer[count:].zero_()
        if isinstance(status, Tensor) or status:
            for i in range(DIGITS):
                put(buffer[count + first + i], status >> 8 * i & 255)
        return buffer

    def open_sum(self, total: Tensor, count: int, step: int) -> Tensor:
        """The sum of the values alone, after all statuses were counted; zeros where it is not finite.

        Shapes: `[count + 3 * replicas]` -> `[count]`.
        """
        values = total[:count]
        if self._on_device:
            finite = values.isfinite().all().view(1)
            found = readback.Readback(torch.cat([finite.to(torch.float32), total[count:].to(torch.float32)]))
            self._counts.report_later(step + self._delay, found, partial(self._report_sum, step=step))
            return values.masked_fill_(finite.logical_not(), 0.0)
        kernel = library.load_library() if values.dtype == torch.float32 and values.is_contiguous() else None
        fine = kernel.beyond([values], torch.finfo(torch.float32).max) < 0 if kernel else bool(values.isfinite().all())
        self._report_sum([fine, *total[count:].tolist()], step)
        return values if fine else torch.zeros_like(values)

    def _report(self, rows: Sequence[Sequence[int]], expected: Expected, last: bool) -> bool:
        """Counts the faults of each row of a table with its decision in the last column; whether there are none."""
        used, step = [row[12] for row in rows], expected.header.step
        faults = [""] * len(rows) if all(used) else explain_faults(rows, expected)
        if last:
            self._compare_received(rows, faults, step)
        if expected.signals:
            self._counts.accept([sender for sender, fine in enumerate(used) if fine], self._place)
        if all(used):
            return True
        for sender, (row, fault) in enumerate(zip(rows, faults, strict=True)):
            if fault:
                self._counts.refuse(sender, fault, step)
            elif row[5]:
                self._counts.skip(sender, self._place, self._names[row[5] - 1], step)
        return False

    def _compare_received(self, rows: Sequence[Sequence[int]], faults: Sequence[str], step: int) -> None:
        """Did all receive the same earlier? A message that was damaged on its way to some only shows here."""
        self._received[self._opened] = hash63(repr([(row[7], fault) for row, fault in zip(rows, faults, strict=True)]))
        self._received.pop(self._opened - 2 - self._delay, None)
        self._opened += 1
        digests = {sender: row[6] for sender, row in enumerate(rows) if not faults[sender]}
        if len(set(digests.values())) > 1:
            usual = Counter(digests.values()).most_common(1)[0][0]
            for sender, digest in digests.items():
                if digest != usual:
                    self._counts.differ(sender, step)

    def _report_sum(self, found: Sequence[float], step: int) -> None:
        """Counts everyone's status, and a sum that is not finite."""
        finite, *digits = found
        if any(digits):
            for sender in range(len(digits) // DIGITS):
                own = digits[DIGITS * sender : DIGITS * (sender + 1)]
                known = all(0 <= digit <= 255 and digit == int(digit) for digit in own)
                status = sum(int(digit) << 8 * i for i, digit in enumerate(own)) if known else -1
                if not 0 <= status <= len(self._names):
                    self._counts.refuse(sender, "has a status that does not exist", step)
                elif status:
                    self._counts.skip(sender, self._place, self._names[status - 1], step)
                else:
                    self._counts.accept([sender], self._place)
        else:
            self._counts.accept(range(len(digits) // DIGITS), self._place)
        if not finite:
            self._counts.refuse_sum(step)


def hash63(text: str) -> int:
    """A word that stands for `text`: 63 bits of its sha256."""
    return int.from_bytes(sha256(text.encode()).digest()[:8], "little") >> 1
