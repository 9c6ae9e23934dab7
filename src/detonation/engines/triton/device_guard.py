"""A guard whose messages kernels seal and inspect, in a few launches for all of a collective."""

from collections.abc import Collection, Sequence
from functools import cached_property, partial

import torch
from torch import Tensor

from detonation.core import runtime
from detonation.core.codec.aggregate import Aggregation, ClippedMean, WeightedMean
from detonation.core.codec.arrived import Arrived
from detonation.core.codec.message_rows import MessageRows, SharedIndices
from detonation.core.compute.nonfinite import LIMIT
from detonation.core.integrity.guard import Guard
from detonation.core.integrity.header import DIGITS, HEADER_BYTES, IDENTITY, Header, constant
from detonation.core.integrity.message import Message, Tape, Workspace
from detonation.core.integrity.validate import FORGET, LOUDER, Expected
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
            read, nbytes, IDENTITY, header.schema, header.step, header.origin, found, header.received
        )

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
        octets = [] if tape is not None else message.wait()
        if message.absent or not octets:  # rare, and told apart by the host
            return super().open(message, rows, shared, aggregation, phase, signals, tape)
        codec, workspace = message.codec, workspace or Workspace()
        body = self._inspected(message, octets, rows, workspace, phase, signals)
        if isinstance(aggregation, ClippedMean):  # kernels know it as a mean with weights
            weights = workspace.take(("weights", phase), (4 * len(body),), body.device).view(torch.float32)
            self._inspector(len(body)).weigh(body, places_of(codec, rows), coding_of(codec), weights)
            aggregation = WeightedMean(weights)
        return Arrived(codec, body, rows, shared, aggregation)

    def _inspected(
        self, message: Message, octets: Sequence[Tensor], rows: int, workspace: Workspace, phase: int, signals: bool
    ) -> Tensor:
        """The messages that arrived run by run, put together; zeros replace unusable ones."""  # [replicas, nbytes]
        codec, step, nbytes = message.codec, message.step, message.codec.nbytes(rows)
        pairs = sorted(zip(message.rows, octets, strict=True), key=lambda pair: pair[0])
        parts = [row_run(codec, each, each.shape[1] - codec.nbytes(count), count) for (_, count), each in pairs]
        whole = octets[0]
        # the replicas of a simulation receive one buffer together, in which none may write
        if len(parts) > 1 or whole.device.type == "cpu" or not inspection.is_aligned(whole, 16):
            whole = workspace.take(("whole", phase), (len(whole), codec.width(rows, HEADER_BYTES)), whole.device)
        header = Header(self._schema, step, self._place | phase, 0)
        expected = Expected(header, nbytes, len(self._names), signals)
        table = self._inspector(len(whole)).inspect(
            parts, whole, nbytes, coding_of(codec), places_of(codec, rows), IDENTITY, header.schema, step, header.place,
            expected.parameters, self.usual, signals, inspection.Limits(LIMIT, LOUDER, FORGET),
        )  # fmt: skip
        report = partial(self._report, expected=expected, last=not phase)
        self._counts.report_later(step + self._delay, _readback(table), report)
        return whole[:, HEADER_BYTES : HEADER_BYTES + nbytes]

    def seal_sum(self, digits: Tensor, status: int | Tensor, step: int) -> None:
        found = status if isinstance(status, Tensor) else constant(status, digits.device)
        self._sums.seal(found, digits, DIGITS * self._replica, DIGITS, self._marks[step % len(self._marks)])

    def open_sum(
        self,
        values: Sequence[Tensor],
        digits: Tensor,
        step: int,
        absent: Collection[int] = (),
        workspace: Workspace | None = None,
    ) -> Tensor:
        workspace = workspace or Workspace()
        report = workspace.take("report", (4 * (1 + len(digits)),), digits.device).view(torch.float32)
        self._sums.inspect(values, digits, report)
        self._counts.report_later(step + self._delay, _readback(report), partial(self._report_sum, step, absent))
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


def _readback(numbers: Tensor) -> runtime.Readback:
    """The readback of numbers over which a later inspection writes: of a CPU that plays an accelerator, of a copy."""
    return runtime.Readback(numbers.clone() if numbers.device.type == "cpu" else numbers)
