"""A guard whose messages kernels seal and inspect, in a few launches for all of a collective."""

from collections.abc import Collection, Sequence
from functools import cached_property, partial

import torch
from torch import Tensor

from detonation.core import runtime
from detonation.core.codec.aggregate import ClippedMean, WeightedMean
from detonation.core.codec.message_rows import MessageRows, SharedIndices, Workspace
from detonation.core.codec.received import Arrived
from detonation.core.compute.nonfinite import LIMIT
from detonation.core.integrity.guard import FORGET, LOUDER, Expected, Guard, Stage
from detonation.core.integrity.header import DIGITS, HEADER_BYTES, IDENTITY, Header, constant
from detonation.core.integrity.message import Message
from detonation.core.integrity.missing import Missing
from detonation.core.integrity.observer import StepObserver
from detonation.engines.triton.coding import coding_of, places_of, row_run
from detonation.kernels.gpu import inspection


class TritonGuard(Guard):
    """Seals and inspects by kernels what `Guard` does in tensor arithmetic, with the same result.

    Counts, warnings and reasons to stop follow in `FaultCounts.catch_up`.
    """

    on_kernels = True

    def _write_header(self, runs: Sequence[MessageRows], nbytes: int, header: Header) -> None:
        octets, status = runs[0].octets, header.status
        read = [row_run(run.codec, run.octets, run.room, run.rows) for run in runs]
        found = status if isinstance(status, Tensor) else constant(status, octets.device)
        self._inspector(len(octets)).seal(
            read,
            nbytes,
            IDENTITY,
            header.schema,
            header.step,
            header.origin,
            found,
            header.received,
        )

    def open(
        self,
        message: Message,
        stage: Stage,
        shared: Tensor | SharedIndices | None,
        observer: StepObserver | None = None,
    ) -> Arrived:
        if message.absent or observer is not None:  # rare, and told apart by the host
            return super().open(message, stage, shared, observer)
        codec, aggregation, body = stage.codec, stage.aggregation, self._inspected(message, stage)
        if isinstance(aggregation, ClippedMean):  # kernels know it as a mean with weights
            weights = stage.workspace.take(
                ("weights", stage.phase), (4 * len(body),), body.device
            ).view(torch.float32)
            self._inspector(len(body)).weigh(
                body, places_of(codec, stage.rows), coding_of(codec), weights
            )
            aggregation = WeightedMean(weights)
        return Arrived(codec, body, stage.rows, shared, aggregation, stage.unit, message.release)

    def _inspected(self, message: Message, stage: Stage) -> Tensor:
        """The messages that arrived run by run, put together; zeros replace unusable ones."""
        # [replicas, nbytes]
        codec, step, octets, rows = stage.codec, message.step, message.arrived, stage.rows
        nbytes, phase = codec.nbytes(rows), stage.phase
        pairs = sorted(zip(message.rows, octets, strict=True), key=lambda pair: pair[0])
        parts = [
            row_run(codec, each, 0 if first else HEADER_BYTES, count)
            for (first, count), each in pairs
        ]
        whole = octets[0]
        # the replicas of a simulation receive one buffer together, in which none may write
        if len(parts) > 1 or whole.device.type == "cpu" or not inspection.is_aligned(whole, 16):
            width = codec.width(rows, HEADER_BYTES)
            whole = stage.workspace.take(("whole", phase), (len(whole), width), whole.device)
        header = Header(self._schema, step, self._place | phase, 0)
        expected = Expected(header, nbytes, len(self._names), stage.signals)
        table = self._inspector(len(whole)).inspect(
            parts, whole, nbytes, coding_of(codec), places_of(codec, rows), IDENTITY, header.schema, step, header.place,
            expected.parameters, self.usual, stage.signals, inspection.Limits(LIMIT, LOUDER, FORGET),
        )  # fmt: skip
        report = partial(self._report, expected=expected, last=not phase)
        found = _readback(table)
        self._counts.report_later(step + self._delay, found, report)
        if message.missing and not phase:
            self.hear(message.missing, found)
        return whole[:, HEADER_BYTES : HEADER_BYTES + nbytes]

    def seal_sum(
        self, digits: Tensor, status: int | Tensor, step: int, missing: Missing | None = None
    ) -> None:
        found = status if isinstance(status, Tensor) else constant(status, digits.device)
        added = self._marks[step % len(self._marks)] << 8 * (DIGITS - 1)
        if missing:
            added += missing.says * self.statuses
        self._sums.seal(found, digits, DIGITS * self._replica, DIGITS, added)

    def open_sum(
        self, values: Sequence[Tensor], digits: Tensor, step: int, absent: Collection[int] = ()
    ) -> Tensor:
        report = self._reports.take("", (4 * (1 + len(digits)),), digits.device).view(torch.float32)
        self._sums.inspect(values, digits, report)
        self._counts.report_later(
            step + self._delay, _readback(report), partial(self._report_sum, step, absent)
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
    """The readback of numbers over which a later inspection writes: of a CPU that plays an
    accelerator, of a copy."""
    return runtime.Readback(numbers.clone() if numbers.device.type == "cpu" else numbers)
