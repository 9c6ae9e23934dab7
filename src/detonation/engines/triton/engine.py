"""The Triton engine: encodes and decodes the rows of one replica on an accelerator, with one launch
for all rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from detonation.core.codec import (
    DCT,
    FP32,
    PRECISIONS,
    Aggregation,
    Arrived,
    Codec,
    Collected,
    Identity,
    Mean,
    MessageRows,
    PackedIndices,
    Random,
    Received,
    Rotation,
    Selected,
    Selection,
    SharedIndices,
    Sums,
    dct_matrix,
    dct_waves,
    random_start,
)
from detonation.core.compute.kernel_library import SignRate
from detonation.core.compute.nonfinite import SIGNAL_LIMIT, Verdict
from detonation.core.compute.scatter_sum import most_summed
from detonation.core.engine import ReferenceEngine, Room, SignalInspector
from detonation.core.exchange import empty_octets
from detonation.core.flat.layout import Layout, copy
from detonation.core.flat.rows import RowOwners
from detonation.core.memory import Feedback, Memory
from detonation.core.runtime import Runtime
from detonation.engines.triton import note_engine
from detonation.engines.triton.coding import (
    AGGREGATION_NAMES,
    coding_of,
    places_of,
    why_decoded_in_torch,
    why_indices_in_torch,
    why_not_triton,
)
from detonation.engines.triton.device_guard import TritonGuard
from detonation.kernels.gpu import inspection, launches, launching

_DTYPE = attrgetter("dtype")
OwnerRows = tuple[int, int, int, int, int, int]
"""Six numbers that say which rows an owner (a replica that aggregates some rows) has. They are: the
number of the owner, the number of owners, the owner's rows that are assigned round robin, the rows
of one run, all rows of the owner, and all rows of the flat. See `addressing.dealt_row`.
"""


class StatusInspector(SignalInspector):
    """Inspects each bucket of gradients in one launch. The launch writes the status of the bucket
    to one row of a table.

    one: a status, from which the table takes the length, dtype and device of its rows.
    """

    def __init__(self, runtime: Runtime, one: Tensor, buckets: int) -> None:
        super().__init__(runtime)
        # shape [buckets, n] int64
        self._statuses = one.new_zeros(buckets, len(one))
        self._seen = 0

    def begin(self) -> None:
        self._seen = 0

    def look(
        self, pieces: Sequence[Tensor | None], numbers: Sequence[int], engine: Any
    ) -> bool | Tensor:
        bad: Tensor = engine.scan(pieces, numbers, self._statuses[self._seen])
        self._seen += 1
        return bad

    def status(self) -> int | Tensor:
        return self._statuses


class TritonEngine(ReferenceEngine):
    """Runs each operation of `ReferenceEngine` in one launch. Plain torch runs the operations that
    no kernel supports.

    Args:
        of_owner: The owner whose replies are encoded; None for the messages of a replica.
    """

    name = "triton"
    reads_status = True
    guard = TritonGuard

    def __init__(
        self,
        codec: Codec,
        layout: Layout,
        memory: Memory | None,
        runtime: Runtime,
        room: Room | None = None,
        of_owner: OwnerRows | None = None,
    ) -> None:
        super().__init__(codec, layout, memory, runtime, room)
        self.needs_own_values = False
        self._releases = "read"
        if self._exact:
            self._releases = "exact"
        # bf16 rounds each value separately, so the kernel need not read the sent values back
        elif codec.precision == PRECISIONS["bf16"]:
            self._releases = "rounded"
        self.releases_at_once = True
        self._of_owner = of_owner
        self._runtime = runtime
        firsts = [slot.row for slot in layout.slots]
        numels = [slot.numel for slot in layout.slots]
        self._slots = launching.Slots(firsts, numels, layout.rows, self.device)
        self._signals = launching.Addresses(self.device)
        self._targets = launching.Addresses(self.device)
        self._fine = torch.zeros((), dtype=torch.int64, device=self.device)
        self._nothing = torch.empty(layout.rows, 0, dtype=torch.float32, device=self.device)
        self._found = self._fine.new_zeros(launches.PROGRAMS)
        self._numbers = torch.arange(len(numels), device=self.device)
        self._scanner: tuple[tuple[int, ...], Any] = ((), None)
        self._rates: tuple[tuple[SignRate, ...], Tensor] = ((), self._fine)
        if runtime.stops_when_bad:
            # the launch that encodes also finds nonfinite values and writes the status
            self.found_later = Verdict(self._found, self._found)
        # the result of `encode_into`, which has written the selected values into the message
        self._written = Selected(self._nothing, None)
        # `encode` returns fp32 values, unless `_releases` is "read".
        # With "read", the kernel reads values back from the message to subtract them from memory.
        self._selects = codec
        if self._releases != "read":
            self._selects = replace(codec, precision=FP32)
        # The keys are Python's `id` of each codec, because hashing a codec is slow.
        # Each value also holds its codec, so that Python does not reuse the `id` for another codec.
        self._coders: dict[int, tuple[Codec, Any]] = {}

    def encode(
        self,
        signals: Sequence[Tensor | None],
        step: int,
        bad: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Selected:
        codec = self._selects
        rows = self.layout.rows
        octets = partial(empty_octets, (1, codec.nbytes(rows)), device=self.device)
        run = MessageRows(codec, rows, octets)
        self.encode_into(run, signals, step, bad, codec)
        return Selected(codec.written(run), self._indices(run, step))

    def encode_into(
        self,
        run: MessageRows,
        signals: Sequence[Tensor | None],
        step: int,
        bad: Tensor | None = None,
        codec: Codec | None = None,
        arrived: Any = None,
    ) -> Selected:
        """Encodes the signals, or the aggregate of the messages `arrived`, by `codec`. If `codec`
        is None, the engine's own codec is used.
        """
        codec = codec or self.codec
        _, coder = self._coders.get(id(codec)) or self._made(codec)
        if codec.selection.shared:
            self._rotate(coder, codec.selection, step)
        # `read` refers to copies of signals, so that no copy is freed before the launch
        read: list[Tensor | None] = []
        for signal in signals:
            if signal is not None:
                if signal.dtype not in launching.KIND_OF:
                    signal = signal.float()
                signal = signal.contiguous()
            read.append(signal)
        scanned = None
        if bad is self._found:
            scanned = self._numbers, SIGNAL_LIMIT, bad
        if bad is None or scanned:
            bad = self._fine
        residual = None
        decay = 0.0
        alpha = 0.0
        if self.memory:
            residual = self.memory.residual
            decay = self.memory.feedback.decay
            alpha = self.memory.feedback.alpha
        coder.encode(
            self._signals.update(read),
            bad,
            run.octets[:, run.room :],
            codec.derived[places_of, run.rows, run.owners],
            residual,
            decay,
            alpha,
            release=self._releases,
            negative_zeros=run.negative_zeros,
            arrived=arrived,
            scanned=scanned,
        )
        if not codec.selection.shared:
            return self._written
        return Selected(self._nothing, self._indices(run, step))

    def inspect(self, signals: Sequence[Tensor | None], runtime: Runtime) -> Verdict:
        status = self.scan(signals, range(len(signals)))
        return Verdict(status, status)

    def inspector(self, buckets: int) -> SignalInspector:
        nothing: list[Tensor | None] = [None] * len(self.layout.slots)
        one = self.scan(nothing, range(len(nothing)))
        return StatusInspector(self._runtime, one, buckets)

    def scan(
        self, signals: Sequence[Tensor | None], numbers: Sequence[int], found: Tensor | None = None
    ) -> Tensor:
        """Returns the status of the gradients of the parameters with the indices `numbers`, in
        rising order; see `Scanner.scan`.

        Shapes: one local shape per parameter -> `[n]` int64.
        """
        key = tuple(numbers)
        if self._scanner[0] != key or self._scanner[1] is None:
            numels = [slot.numel for slot in self.layout.slots]
            self._scanner = key, inspection.Scanner(numels, key, self.device, self._signals)
        status: Tensor = self._scanner[1].scan(signals, SIGNAL_LIMIT, found)
        return status

    def empty(self, step: int) -> Selected:
        selection = self.codec.selection
        rows = self.layout.rows
        if not selection.shared:
            return super().empty(step)
        # the indices have the format of a shared selection, so that one kernel decodes all messages
        shared = SharedIndices(selection, rows, step, self._seed, self.device)
        values = torch.zeros(rows, selection.k, dtype=torch.float32, device=self.device)
        return Selected(values, shared)

    def release(self, selected: Selected, own: Tensor | None) -> None:
        """Does nothing, because `encode` subtracts the sent values from the memory of unsent
        values.
        """

    def own_message(self, run: MessageRows, selected: Selected) -> Received:
        shared = None
        if isinstance(selected.indices, SharedIndices):
            shared = selected.indices
        # the message is not copied, because a kernel can read it in its buffer
        mine = Arrived(self.codec, run.body, run.rows, shared, Mean())
        if run.owners:
            return Collected(mine, run.owners)
        return mine

    def decode(self, received: Received) -> Tensor:
        if not self.reads(received):
            return super().decode(received)
        shape = self.layout.rows, self.layout.chunk
        flat = torch.empty(shape, dtype=torch.float32, device=self.device)
        self._decode(received, "flat", flat=flat)
        return flat

    def write(self, received: Received, targets: Sequence[Tensor]) -> None:
        if not self.reads(received):
            super().write(received, targets)
            return
        # targets that kernels cannot write are written through a copy
        odd = [i for i, target in enumerate(targets) if not self._is_writable(target)]
        decoded = list(targets)
        for i in odd:
            decoded[i] = torch.empty(targets[i].shape, dtype=torch.float32, device=self.device)
        self._decode(received, "tensors", decoded)
        copy([targets[i] for i in odd], [decoded[i] for i in odd])

    def sign_mover(
        self, received: Received, weights: Sequence[Tensor]
    ) -> Callable[[Sequence[SignRate]], object] | None:
        if not self.reads(received):
            return super().sign_mover(received, weights)
        # no Python function is called per weight, because there may be thousands of weights
        are_known = {*map(_DTYPE, weights)} <= launching.KIND_OF.keys()
        if are_known and all(map(Tensor.is_contiguous, weights)):
            return partial(self._decode, received, "signs", weights, None)
        return None

    def _is_writable(self, tensor: Tensor) -> bool:
        return tensor.dtype in launching.KIND_OF and tensor.is_contiguous()

    def reads(self, received: Received) -> bool:
        """True if kernels can decode the `received` messages; otherwise logs the reason once."""
        source: Received | None = received
        if not isinstance(source, Arrived):
            source = received.source
        if isinstance(source, Arrived):
            kinds = type(received.aggregation), type(source.shared)
            reason = source.codec.derived[why_decoded_in_torch, *kinds]
        elif source is None:
            reason = "it received coefficients instead of messages"
        else:
            reason = why_indices_in_torch(type(source.shared))
        if reason:
            note_engine(f"decodes in torch, because {reason}")
        return not reason

    def reply(self, received: Received, run: MessageRows, step: int) -> None:
        """Encodes the answer of an owner of rows: the sum of the coefficients of the update and the
        owner's unsent coefficients.
        """
        source = received.source
        assert isinstance(source, Arrived)
        coding = source.codec.derived[coding_of,]
        places = source.codec.derived[places_of, source.rows, None]
        name = AGGREGATION_NAMES[type(received.aggregation)]
        arrivals = launches.Arrivals(source.body, places, coding, len(source.body), name)
        self.encode_into(run, [None], step, arrived=arrivals)

    def replier(
        self,
        answer: Codec,
        aggregation: Aggregation,
        residual: Tensor,
        owners: RowOwners,
        owner: int,
    ) -> "TritonEngine | None":
        if reason := why_not_triton(answer, aggregation):
            note_engine(f"answers as an owner in torch, because {reason}")
            return None
        codec = replace(answer, basis=Identity())
        layout = codec.layout({"the rows of an owner": residual.shape})
        memory = Memory(layout, Feedback(decay=1.0), residual.device, residual)
        mine = owner, owners.replicas, owners.in_turns, owners.run, owners.owned, owners.rows
        return TritonEngine(codec, layout, memory, self._runtime, of_owner=mine)

    def _indices(self, run: MessageRows, step: int) -> SharedIndices | PackedIndices:
        rows = self.layout.rows
        codec = self.codec
        if codec.selection.shared:
            return SharedIndices(codec.selection, rows, step, self._seed, self.device)
        return PackedIndices(codec.index_coding, run.parts[-1][0], rows)

    def _decode(
        self,
        received: Received,
        into: str,
        targets: Sequence[Tensor] = (),
        flat: Tensor | None = None,
        rates: Sequence[SignRate] = (),
    ) -> None:
        source: Received | None = received
        if not isinstance(source, Arrived):
            source = received.source
        assert isinstance(source, Arrived | Sums)
        codec = self.codec
        if isinstance(source, Arrived):
            codec = source.codec
        _, coder = self._coders.get(id(codec)) or self._made(codec)
        if codec.selection.shared:
            step = 0
            if isinstance(source.shared, SharedIndices):
                step = source.shared.step
            self._rotate(coder, codec.selection, step)
        addresses = self._targets
        if targets:
            addresses = addresses.update(targets)
        table = None
        if rates:
            if self._rates[0] != tuple(rates):
                numbers = [number for rate in rates for number in rate]
                self._rates = tuple(rates), launching.uploaded(numbers, torch.float32, self.device)
            table = self._rates[1]
        # autograd does not see the writes of kernels, so the tensors need a new version
        torch._C._increment_version(targets)
        if isinstance(source, Sums):
            _, first = source.runs[0]
            coder.decode(
                first.flatten().unsqueeze(0),
                codec.derived[places_of, received.rows, None],
                source.aggregation.replicas,
                "sum",
                into,
                addresses,
                flat,
                table,
                None,
                source.runs,
                source.report,
            )
            return
        replicas = source.body.shape[0]
        if received.owners:
            replicas = 1
        aggregation = received.aggregation
        selection = codec.selection
        is_sparse_mean = isinstance(aggregation, Mean) and not selection.shared
        few = replicas * selection.k <= most_summed(selection.chunk)
        coder.decode(
            source.body,
            codec.derived[places_of, source.rows, received.owners],
            replicas,
            AGGREGATION_NAMES[type(aggregation)],
            into,
            addresses,
            flat,
            table,
            getattr(aggregation, "of_replicas", None),
            summed=isinstance(codec.basis, DCT) and is_sparse_mean and few,
        )

    def _rotate(self, coder: Any, selection: Selection, step: int) -> None:
        """Computes the indices of a shared selection at `step`, unless the table already holds the
        indices of this step.
        """
        phase = (0, 0, 0)
        if isinstance(selection, Rotation):
            phase = selection.phase(step, self._seed)
        if coder.rotations.place == phase:
            return
        coder.rotations.place = phase
        cycle, share, change = phase
        words = random_start(self._seed, cycle, 0)
        choices = random_start(self._seed, cycle, 1)
        coder.rotations.rotate(coder.coding, words, choices, share, change)

    def _made(self, codec: Codec) -> tuple[Codec, Any]:
        """Creates and caches the `Coder` that launches the kernels for `codec`."""
        compiled = codec.derived[coding_of,]
        side = 1
        if isinstance(codec.basis, DCT):
            side = codec.selection.chunk
        matrix = dct_matrix(side, self.device)
        waves = dct_waves(side, self.device)
        first = 0
        if isinstance(self.codec.selection, Random):
            first = self.codec.selection.first
        selecting = replace(compiled, basis="none", precision="fp32", block=1)
        room = partial(launches.Rotations.room, selecting, self.device)
        # all buckets and owners of a step share one table of the positions that are sent
        rotations = self._runtime.shared(("rotations", selecting), room)
        coder = launches.Coder(
            compiled,
            self._slots,
            matrix,
            waves,
            rotations,
            self._runtime.shared,
            first,
            self._of_owner,
        )
        found = self._coders[id(codec)] = codec, coder
        return found
