"""Validates all-reduces. A message that is summed has no header; it ends with three numbers for
each replica, which encode the status of that replica.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch
from torch import Tensor

from detonation.core import runtime
from detonation.core.compute import kernel_library
from detonation.core.integrity.fault_counts import FaultCounts
from detonation.core.integrity.message import DIGITS, FIRST_KNOWN, MOST_KNOWN, Missing, hash63, put


class SumGuard:
    """Seals what one replica contributes to the all-reduces of one channel, and validates the sums.
    `Guard` extends this class to gathered messages.

    Args:
        schema: All settings that sender and receiver must share to read a message.
        place: Number of the message among the messages of a step.
        delay: Number of steps for which a message may be in flight.
        on_device: True if the device decides which messages are used. `FaultCounts.catch_up` then
            counts and reports faulty messages later.
        usual: Reference norm of messages, see `decide_usable`; several guards may share it. `[1]`
            fp32.
        forget: Clears this replica's memory of unsent values. Called if a message was too large,
            because the next messages would also be too large.
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
        self._names = list(names)
        self._counts = counts
        self.place = place
        self._schema = hash63(schema)
        self._place = place << 2
        self._replica = replica
        self._delay = delay
        self._on_device = on_device
        if usual is None:
            usual = torch.zeros(1, dtype=torch.float32, device="cpu")
        self.usual = usual
        self._forget = forget
        self.statuses = 1 + len(self._names)
        # each status also contains a report on parameters without a gradient; see `Missing.says`
        self.most_known = max(1, (1 << 16) // self.statuses - FIRST_KNOWN)
        self._most_said = FIRST_KNOWN + min(self.most_known, MOST_KNOWN)
        # the last of the three status numbers also contains a mark of the step, and stays below 256
        self._high = 1 + (self._most_said * self.statuses >> 16)
        marks = min(251, 256 // self._high - 1)
        first = (self._schema + 5 * place) % 251
        # marks of messages for `seal_sum`; consecutive steps have different marks
        self._marks = [(1 + (first + step) % marks) * self._high for step in range(marks)]
        # digest of the sets of unused parameters that replicas exchanged; see `Unused`
        self.noted = 0
        self._sent = 0
        self._opened = 0
        # digests of the messages received in earlier exchanges, by the index of the exchange
        self._received: dict[int, int] = {}

    def seal_sum(
        self, digits: Tensor, status: int | Tensor, step: int, missing: Missing | None = None
    ) -> None:
        """Writes this replica's status after the values of an all-reduce, with a mark that depends
        on the settings (schema), the number of the message in the step, and the step.

        Each replica writes three numbers for itself and zeros for the other replicas, so the sum
        needs no header. The last number contains the mark, which is never 0.

        Shapes: `[3 * replicas]`, with undefined content.
        """
        mark = self._marks[step % len(self._marks)]
        if missing:
            status = status + missing.says * self.statuses
        digits.zero_()
        if isinstance(status, Tensor) or status:
            for i in range(DIGITS):
                digit = (status >> 8 * i & 255) + mark * (i == DIGITS - 1)
                put(digits[DIGITS * self._replica + i], digit)
        else:
            digits[DIGITS * self._replica + DIGITS - 1].fill_(mark)

    def open_sum(
        self, values: Sequence[Tensor], digits: Tensor, step: int, absent: Collection[int] = ()
    ) -> bool | Tensor:
        """Validates the sum of an all-reduce, and counts the faults that the replicas report in
        this sum. Returns False if zeros must replace the values: a value is not finite, or a
        replica that is not `absent` added the message of another step.

        On an accelerator the device itself replaces values that are not finite. A subclass may
        instead return a report, which tells the decoder whether to use zeros in place of the values
        (see `Sums`).

        Shapes: values any, digits `[3 * replicas]` -> report `[1 + 3 * replicas]` fp32.
        """
        if self._on_device:
            largest = [torch.linalg.vector_norm(each, torch.inf) for each in values]
            finite = torch.stack(largest).isfinite().all().view(1)
            numbers = torch.cat([finite.to(torch.float32), digits.to(torch.float32)])
            report = partial(self._report_sum, step, absent)
            due = step + self._delay
            self._counts.reports.append((due, runtime.Readback(numbers), report))
            for each in values:
                each.masked_fill_(finite.logical_not(), 0.0)
            return True
        if values[0].dtype == torch.float32 and (kernel := kernel_library.load_library()):
            fine = kernel.beyond(values, torch.finfo(torch.float32).max) < 0
        else:
            fine = all(bool(each.isfinite().all()) for each in values)
        said = digits.tolist()
        mark = self._marks[step % len(self._marks)]
        had_faults = self._counts.skipped or self._counts.refused
        if fine and said == [0, 0, mark] * (len(said) // DIGITS) and not had_faults:
            return True
        return self._report_sum(step, absent, [fine, *said])

    def _report_sum(self, step: int, absent: Collection[int], found: Sequence[float]) -> bool:
        """Counts the faults that the status of each replica reports, and counts a sum that is not
        finite. Returns False if the sum is not finite, or if a replica's status has the mark of
        another step.
        """
        finite, *digits = found
        if absent:
            self._counts.miss(absent)
        mark = self._marks[step % len(self._marks)]
        statuses = statuses_of_sum(digits, self._replica, mark, self._high, absent)
        used = [sender for sender, status in enumerate(statuses) if not status % self.statuses]
        self._counts.accept(used, self._place)
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
        """Sets `missing.said` to a function that returns each replica's report on its parameters
        without a gradient (see `Missing.says`).

        The function reads each report from the status of the replica in `digits`, the numbers at
        the end of the sum of `step`.

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
    """Reads the status of each replica from its three status numbers (digits) in an all-reduce. The
    status is -1 if the last digit does not contain `mark`, or if a digit is not valid. An absent
    replica whose digits are zeros has the status 0.

    Args:
        replica: The replica that reads.
        mark: Number that every replica adds to its last digit at this step; see `seal_sum`.
        high: The last digit of a status is below this number.
        absent: Replicas that may have added nothing.

    >>> statuses_of_sum([0, 0, 9, 3, 1, 9, 0, 0, 8, 0, 0, 0], 0, 9, 1, [3])
    [0, 259, -1, 0]
    """
    replicas = len(digits) // DIGITS
    is_repeated = digits[DIGITS * replica + DIGITS - 1] >= 2 * mark
    if is_repeated and all(0 <= digit < 256 * replicas for digit in digits):
        # simulated replicas send equal messages, so each sum is `replicas` times one status number
        digits = [_mean_digit(digit / replicas, mark) for digit in digits]
        absent = range(replicas)
    found = []
    for sender in range(replicas):
        own = digits[DIGITS * sender : DIGITS * (sender + 1)]
        if sender in absent and not any(own):
            found.append(0)
        else:
            found.append(_status(own, mark, high))
    return found


def _mean_digit(mean: float, mark: int) -> int:
    """Returns the status number (digit) of a message, given the mean of this digit over several
    equal messages.

    A mean close to `mark` (the number in the last digit) counts as `mark`. Such a mean may differ
    from `mark`, because an all-reduce in bf16 rounds the sum of the marks.
    """
    if abs(mean - mark) <= mark / 256:
        return mark
    return round(mean)


def _status(digits: Sequence[float], mark: int, high: int) -> int:
    """Reads the status of one replica from its digits; see `statuses_of_sum`."""
    *low, top = digits
    if any(not 0 <= digit <= 255 or digit != int(digit) for digit in low):
        return -1
    if top - mark not in range(high):
        return -1
    octets = *low, top - mark
    return sum(int(digit) << 8 * i for i, digit in enumerate(octets))
