"""A guard of messages with Triton kernels, which add status and checksum to messages and inspect
messages in a few launches per collective.
"""

from collections.abc import Collection, Sequence
from functools import cached_property, partial
from operator import itemgetter

import torch
from torch import Tensor

from detonation.core import runtime
from detonation.core.codec import (
    Arrived,
    ClippedMean,
    MessageRows,
    SharedIndices,
    WeightedMean,
    Workspace,
)
from detonation.core.compute.nonfinite import LIMIT
from detonation.core.integrity.guard import FORGET, LOUDER, Expected, Guard, Stage
from detonation.core.integrity.message import (
    DIGITS,
    HEADER_BYTES,
    IDENTITY,
    Header,
    Message,
    Missing,
    constant,
)
from detonation.core.integrity.observer import StepObserver
from detonation.engines.triton.coding import format_of, row_run
from detonation.kernels.gpu import inspection

_LIMITS = inspection.Limits(LIMIT, LOUDER, FORGET)
_ROWS = itemgetter(0)


class TritonGuard(Guard):
    """Seals and inspects messages by kernels. The result is the same as that of `Guard`, which uses
    tensor arithmetic.

    The counts, the warnings and the reasons to stop follow later, in `FaultCounts.catch_up`.
    """

    on_kernels = True

    def _write_header(self, runs: Sequence[MessageRows], nbytes: int, header: Header) -> None:
        octets = runs[0].octets
        read = []
        for run in runs:
            read.append(row_run(run.codec, run.octets, run.room, run.rows))
        status = _on_device(header.status, octets.device)
        self._inspector(octets.shape[0]).seal(
            read,
            nbytes,
            IDENTITY,
            header.schema,
            header.step,
            header.sender << 32 | header.place,
            status,
            header.received,
        )

    def open(
        self,
        message: Message,
        stage: Stage,
        shared: Tensor | SharedIndices | None,
        observer: StepObserver | None = None,
    ) -> Arrived:
        # absent replicas are rare, so the slower code on the host handles their messages
        if message.absent or observer is not None:
            return super().open(message, stage, shared, observer)
        codec = stage.codec
        aggregation = stage.aggregation
        body = self._inspected(message, stage)
        # the kernels have no clipped mean, so they compute it as a weighted mean
        if isinstance(aggregation, ClippedMean):
            nbytes = 4 * len(body)
            taken = stage.workspace.take(("weights", stage.phase), (nbytes,), body.device)
            weights = taken.view(torch.float32)
            coding, places, _ = format_of(codec, stage.rows)
            self._inspector(len(body)).weigh(body, places, coding, weights)
            aggregation = WeightedMean(weights)
        return Arrived(codec, body, stage.rows, shared, aggregation, stage.unit, message.release)

    def _inspected(self, message: Message, stage: Stage) -> Tensor:
        """Joins the runs of rows in received messages to whole messages. Refused messages become
        zeros.

        Shapes: -> `[replicas, nbytes]` uint8.
        """
        codec = stage.codec
        step = message.step
        octets = message.arrived
        rows = stage.rows
        nbytes = sum(codec.lengths[rows])
        phase = stage.phase
        pairs = sorted(zip(message.rows, octets, strict=True), key=_ROWS)
        parts = []
        for (first, count), each in pairs:
            room = 0
            if not first:
                room = HEADER_BYTES
            parts.append(row_run(codec, each, room, count))
        coding, places, _ = format_of(codec, rows)
        whole = octets[0]
        # simulated replicas share one receive buffer, so none of them may overwrite it
        if len(parts) > 1 or whole.device.type == "cpu" or not inspection.is_aligned(whole, 16):
            width = codec.width(rows, HEADER_BYTES)
            shape = whole.shape[0], width
            whole = stage.workspace.take(("whole", phase), shape, whole.device)
        header = Header(self._schema, step, self._place | phase, 0)
        expected = Expected(header, nbytes, len(self._names), stage.signals)
        table = self._inspector(whole.shape[0]).inspect(
            parts,
            whole,
            nbytes,
            coding,
            places,
            IDENTITY,
            header.schema,
            step,
            header.place,
            expected.parameters,
            self.usual,
            stage.signals,
            _LIMITS,
        )
        report = partial(self._report, expected=expected, last=not phase)
        found = _readback(table)
        self._counts.report_later(step + self._delay, found, report)
        if message.missing and not phase:
            self.hear(message.missing, found)
        return whole[:, HEADER_BYTES : HEADER_BYTES + nbytes]

    def seal_sum(
        self, digits: Tensor, status: int | Tensor, step: int, missing: Missing | None = None
    ) -> None:
        found = _on_device(status, digits.device)
        added = self._marks[step % len(self._marks)] << 8 * (DIGITS - 1)
        if missing:
            added += missing.says * self.statuses
        self._sums.seal(found, digits, DIGITS * self._replica, DIGITS, added)

    def open_sum(
        self, values: Sequence[Tensor], digits: Tensor, step: int, absent: Collection[int] = ()
    ) -> Tensor:
        report = self._reports.take("", (4 * (1 + len(digits)),), digits.device).view(torch.float32)
        self._sums.inspect(values, digits, report)
        found = _readback(report)
        self._counts.report_later(
            step + self._delay, found, partial(self._report_sum, step, absent)
        )
        return report

    def _inspector(self, count: int) -> inspection.Inspector:
        if count not in self._inspectors:
            self._inspectors[count] = inspection.Inspector(count, self.usual.device)
        return self._inspectors[count]

    @cached_property
    def _inspectors(self) -> dict[int, inspection.Inspector]:
        return {}

    @cached_property
    def _sums(self) -> inspection.SumInspector:
        return inspection.SumInspector(self.usual.device)

    @cached_property
    def _reports(self) -> Workspace:
        return Workspace(self._delay + 1)


def _readback(numbers: Tensor) -> runtime.Readback:
    """Starts to read back `numbers`, which a later inspection overwrites. If the CPU simulates an
    accelerator, a copy is read.
    """
    if numbers.device.type == "cpu":
        numbers = numbers.clone()
    return runtime.Readback(numbers)


def _on_device(status: int | Tensor, device: torch.device) -> Tensor:
    if isinstance(status, Tensor):
        return status
    return constant(status, device)
