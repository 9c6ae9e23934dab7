"""Sums of the network: three numbers after the values say, in the place of a header, what a replica
has to say."""

from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch
from torch import Tensor

from detonation.core import runtime
from detonation.core.compute import kernel_library
from detonation.core.integrity.fault_counts import FaultCounts
from detonation.core.integrity.header import DIGITS, hash63, put
from detonation.core.integrity.missing import FIRST_KNOWN, MOST_KNOWN, Missing


class SumGuard:
    """Seals and validates the sums of one channel; a `Guard` does so with messages, too.

    place: Which of the messages of a step these are.

    Args:
        schema: All settings that sender and receiver must share to read a message.
        delay: Steps that a message may be in flight.
        on_device: Whether the device decides. Faulty messages are then never used either, but
            counts, warnings and reasons to stop follow only in `FaultCounts.catch_up`.
        usual: The usual norm of messages, see `decide_usable`; several guards may share it. `[1]`
            fp32.
        forget: Empties the memory that messages come from: after one that was too loud, the next
            ones would be, too.
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
        forget: Callable[[], object] = lambda: None,
    ) -> None:
        self._names, self._counts, self.place = list(names), counts, place
        self._schema, self._place, self._replica = hash63(schema), place << 2, replica
        self._delay, self._on_device = delay, on_device
        self.usual = torch.zeros(1, dtype=torch.float32, device="cpu") if usual is None else usual
        self._forget = forget
        self.statuses = 1 + len(self._names)
        # a status also says what is missing: see `missing`
        self.most_known = max(1, (1 << 16) // self.statuses - FIRST_KNOWN)
        self._most_said = FIRST_KNOWN + min(self.most_known, MOST_KNOWN)
        # statuses have as many highest digits; marks take the rest of 256
        self._high = 1 + (self._most_said * self.statuses >> 16)
        marks, first = min(251, 256 // self._high - 1), (self._schema + 5 * place) % 251
        # of steps, in turns
        self._marks = [(1 + (first + step) % marks) * self._high for step in range(marks)]
        self.noted = 0  # a digest of the sets that the replicas exchanged, see `Unused`
        self._sent = self._opened = 0
        self._received: dict[int, int] = {}  # digests by number of the exchange

    def seal_sum(
        self, digits: Tensor, status: int | Tensor, step: int, missing: Missing | None = None
    ) -> None:
        """Writes this replica's status after the values of an all-reduce, and a mark of schema,
        place and step.

        Each replica writes three numbers for itself and zeros for the others, so that no header is
        needed. The last number has room for the mark, which is never 0.

        Shapes: `[3 * replicas]`, of any content.
        """
        mark = self._marks[step % len(self._marks)]
        if missing:
            status = status + missing.says * self.statuses
        digits.zero_()
        if isinstance(status, Tensor) or status:
            for i in range(DIGITS):
                put(
                    digits[DIGITS * self._replica + i],
                    (status >> 8 * i & 255) + mark * (i == DIGITS - 1),
                )
        else:
            digits[DIGITS * self._replica + DIGITS - 1].fill_(mark)

    def open_sum(
        self, values: Sequence[Tensor], digits: Tensor, step: int, absent: Collection[int] = ()
    ) -> bool | Tensor:
        """Counts the statuses in a sum; False where zeros must replace the values: not all are
        finite, or the messages do not belong together (`absent` ones may be missing). On an
        accelerator the device replaces what is not finite, or who decodes the values asks the
        report (`Sums`) that is returned.

        Shapes: values any, digits `[3 * replicas]` -> report `[1 + 3 * replicas]` fp32.
        """
        if self._on_device:
            norms = torch.stack([torch.linalg.vector_norm(each, torch.inf) for each in values])
            finite = norms.isfinite().all().view(1)
            found = runtime.Readback(
                torch.cat([finite.to(torch.float32), digits.to(torch.float32)])
            )
            self._counts.report_later(
                step + self._delay, found, partial(self._report_sum, step, absent)
            )
            for each in values:
                each.masked_fill_(finite.logical_not(), 0.0)
            return True
        kernel = kernel_library.load_library() if values[0].dtype == torch.float32 else None
        if kernel:
            fine = kernel.beyond(values, torch.finfo(torch.float32).max) < 0
        else:
            fine = all(bool(each.isfinite().all()) for each in values)
        said, mark = digits.tolist(), self._marks[step % len(self._marks)]
        if (
            fine
            and said == [0, 0, mark] * (len(said) // DIGITS)
            and not (self._counts.skipped or self._counts.refused)
        ):
            return True
        return self._report_sum(step, absent, [fine, *said])

    def _report_sum(self, step: int, absent: Collection[int], found: Sequence[float]) -> bool:
        """Counts the status of each replica, and a sum that is not finite; False for that, and for
        another mark."""
        finite, *digits = found
        if absent:
            self._counts.miss(absent)
        statuses = statuses_of_sum(
            digits, self._replica, self._marks[step % len(self._marks)], self._high, absent
        )
        self._counts.accept(
            [sender for sender, status in enumerate(statuses) if not status % self.statuses],
            self._place,
        )
        for sender, status in enumerate(statuses):
            number = status % self.statuses
            if status < 0:
                self._counts.misplace(sender, step)
            elif status >= self._most_said * self.statuses:
                self._counts.refuse(sender, "has a status that does not exist", step)
            elif number:
                self._counts.skip(sender, self._place, self._names[number - 1], step)
        if not finite:
            self._counts.refuse_sum(step)
        return bool(finite) and min(statuses, default=0) >= 0

    def hear_sum(
        self, missing: Missing, digits: Tensor, step: int, absent: Collection[int]
    ) -> None:
        """Lets `missing` read what the statuses in the sum of `step` say.

        Shapes: `[3 * replicas]`.
        """
        copied = runtime.Readback(digits.to(torch.float32, copy=True))

        def said() -> dict[int, int]:
            mark = self._marks[step % len(self._marks)]
            found = statuses_of_sum(copied.read(), self._replica, mark, self._high, absent)
            return {
                sender: max(0, status) // self.statuses
                for sender, status in enumerate(found)
                if sender not in absent
            }

        missing.said = said


def statuses_of_sum(
    digits: Sequence[float], replica: int, mark: int, high: int, absent: Collection[int]
) -> list[int]:
    """The status of each replica in the digits of an all-reduce; -1 where it has another mark, or
    none.

    Args:
        replica: The one that reads.
        mark, high: Which is in the last digit of each, and below which the last digit of a status
            is.
        absent: The replicas that may have added nothing.

    >>> statuses_of_sum([0, 0, 9, 3, 1, 9, 0, 0, 8, 0, 0, 0], 0, 9, 1, [3])
    [0, 259, -1, 0]
    """
    replicas, found = len(digits) // DIGITS, list[int]()
    if digits[DIGITS * replica + DIGITS - 1] >= 2 * mark and all(
        0 <= digit < 256 * replicas for digit in digits
    ):
        # of a communicator of one replica that stands for all; bf16 rounds the sum of three marks
        means = [digit / replicas for digit in digits]
        digits = [mark if abs(mean - mark) <= mark / 256 else round(mean) for mean in means]
        absent = range(replicas)
    for sender in range(replicas):
        *low, top = digits[DIGITS * sender : DIGITS * (sender + 1)]
        known = all(
            0 <= digit <= 255 and digit == int(digit) for digit in low
        ) and top - mark in range(high)
        status = (
            sum(int(digit) << 8 * i for i, digit in enumerate((*low, top - mark))) if known else -1
        )
        found.append(0 if sender in absent and not any((*low, top)) else status)
    return found
