"""A guard of messages with Triton kernels, which add status and checksum to messages and inspect
messages in a few launches per collective.
"""

from collections.abc import Callable, Collection, Sequence
from functools import cache, cached_property, partial
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
from detonation.core.exchange import empty_octets
from detonation.core.integrity.guard import FORGET, LOUDER, Expected, Guard, Stage, explain_faults
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
from detonation.engines.triton.coding import coding_of, places_of, run_shape
from detonation.kernels.gpu import inspection

_LIMITS = inspection.Limits(LIMIT, LOUDER, FORGET)
_ROWS = itemgetter(0)


class TritonGuard(Guard):
    """Seals and inspects messages by kernels. The result is the same as that of `Guard`, which uses
    tensor arithmetic.

    `FaultCounts.catch_up` counts faults later, then warns, and may stop training.
    """

    on_kernels = True

    def _write_header(
        self,
        runs: Sequence[MessageRows],
        nbytes: int,
        step: int,
        place: int,
        status: int | Tensor,
        received: int,
    ) -> None:
        octets = []
        shapes = []
        for run in runs:
            octets.append(run.octets)
            shapes.append(run.codec.derived[run_shape, run.room, run.rows])
        if not isinstance(status, Tensor):
            status = constant(status, octets[0].device)
        self._inspector(octets[0].shape[0]).seal(
            octets,
            shapes,
            nbytes,
            IDENTITY,
            self._schema,
            step,
            self._replica << 32 | place,
            status,
            received,
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
        rows = stage.rows
        phase = stage.phase
        step = message.step
        runs = []
        shapes = []
        for (first, count), run in sorted(
            zip(message.rows, message.arrived, strict=True), key=_ROWS
        ):
            room = 0
            if not first:
                room = HEADER_BYTES
            runs.append(run)
            shapes.append(codec.derived[run_shape, room, count])
        whole = runs[0]
        replicas = whole.shape[0]
        stride = whole.stride(0)
        # simulated replicas share one receive buffer, so none of them may overwrite it
        may_stay = len(runs) == 1 and whole.device.type != "cpu"
        if not (may_stay and inspection.is_aligned(whole.data_ptr(), replicas, stride, 16)):
            shape = replicas, codec.width(rows, HEADER_BYTES)
            make = partial(empty_octets, shape, device=whole.device)
            whole = stage.workspace.take(("whole", phase), shape, make)
        nbytes = sum(codec.lengths[rows])
        table = self._inspector(replicas).inspect(
            runs,
            shapes,
            whole,
            nbytes,
            codec.derived[coding_of,],
            codec.derived[places_of, rows, None],
            IDENTITY,
            self._schema,
            step,
            self._place | phase,
            len(self._names),
            self.usual,
            stage.signals,
            _LIMITS,
        )
        found = runtime.Readback(table)
        explain = partial(self._explain, step, stage)
        report = partial(self._report, explain=explain, step=step, stage=stage)
        self._counts.reports.append((step + self._delay, found, report))
        if message.missing and not phase:
            self.hear(message.missing, found)
        body = whole[:, HEADER_BYTES : HEADER_BYTES + nbytes]
        aggregation = stage.aggregation
        if isinstance(aggregation, ClippedMean):
            aggregation = self._clipped(body, stage)
        back: Callable[[], None] = message.release
        if message.recycle and len(runs) == 1:
            back = partial(message.recycle, runs[0])
        return Arrived(codec, body, rows, shared, aggregation, stage.unit, back)

    def _explain(self, step: int, stage: Stage, table: Sequence[Sequence[int]]) -> list[str]:
        header = Header(self._schema, step, self._place | stage.phase, 0)
        nbytes = sum(stage.codec.lengths[stage.rows])
        expected = Expected(header, nbytes, len(self._names), stage.signals)
        return explain_faults(table, expected)

    def _clipped(self, body: Tensor, stage: Stage) -> WeightedMean:
        """Returns the clipped mean of the messages as a weighted mean, which kernels compute.

        Shapes: body `[replicas, nbytes]` uint8.
        """
        replicas = len(body)
        make = partial(torch.empty, replicas, dtype=torch.float32, device=body.device)
        weights = stage.workspace.take(("weights", stage.phase), replicas, make)
        derived = stage.codec.derived
        places = derived[places_of, stage.rows, None]
        self._inspector(replicas).weigh(body, places, derived[coding_of,], weights)
        return WeightedMean(weights)

    def seal_sum(
        self, digits: Tensor, status: int | Tensor, step: int, missing: Missing | None = None
    ) -> None:
        if not isinstance(status, Tensor):
            status = constant(status, digits.device)
        added = self._marks[step % len(self._marks)] << 8 * (DIGITS - 1)
        if missing:
            added += missing.says * self.statuses
        self._sums.seal(status, digits, DIGITS * self._replica, DIGITS, added)

    def open_sum(
        self, values: Sequence[Tensor], digits: Tensor, step: int, absent: Collection[int] = ()
    ) -> Tensor:
        size = 1 + len(digits)
        make = partial(torch.empty, size, dtype=torch.float32, device=digits.device)
        report = self._reports.take("", size, make)
        self._sums.inspect(values, digits, report)
        read = report
        # on a CPU a readback would share the report's memory, which a later step overwrites
        if report.device.type == "cpu":
            read = report.clone()
        found = runtime.Readback(read)
        said = partial(self._report_sum, step, absent)
        self._counts.reports.append((step + self._delay, found, said))
        return report

    @cached_property
    def _inspector(self) -> Callable[[int], inspection.Inspector]:
        """A function that returns the inspector for a number of messages. It creates each inspector
        only once.
        """
        return cache(partial(inspection.Inspector, device=self.usual.device))

    @cached_property
    def _sums(self) -> inspection.SumInspector:
        return inspection.SumInspector(self.usual.device)

    @cached_property
    def _reports(self) -> Workspace:
        return Workspace(self._delay + 1)
