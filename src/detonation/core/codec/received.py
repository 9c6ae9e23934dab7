"""The messages of all replicas, as each replica receives them. Every replica receives the same
bytes, and decodes them in blocks of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, cast

import torch

from detonation.core.codec.aggregate import (
    Aggregation,
    Coefficients,
    Divided,
    Mean,
    NormWeighing,
    WeightedMean,
    message_norms,
)
from detonation.core.codec.codebooks import BlockCodebook
from detonation.core.codec.indices import PackedIndices, narrow
from detonation.core.codec.message_rows import SharedIndices
from detonation.core.codec.precision import Float, numbers

if TYPE_CHECKING:
    from torch import Tensor

    from detonation.core.codec.codec import Codec
    from detonation.core.flat.rows import RowOwners

NORM_BLOCKS = 4
"""Largest number of blocks of rows into which messages are cut to compute their norms."""
NORM_BLOCK = 2**18
"""Smallest number of coefficients in a block of rows for which norms of messages are computed."""


class Received:
    """The messages of all replicas after a collective, as bytes or as their sum.

    Args:
        rows: Rows of each message.
        aggregation: Combines all messages to one update.
        unit: Messages can be cut after multiples of this number of rows.
        width: Coefficients per row, of all replicas together; 0 if unknown.
        release: Gives the receive buffer back for reuse. Call it after the last read.
        owners: Assignment of rows to owners, if each message holds the rows of one owner.
    """

    rows: int
    aggregation: Aggregation
    unit: int = 1
    width: int = 0
    release: Callable[[], None] | None = None
    owners: RowOwners | None = None

    @property
    def source(self) -> Arrived | Sums | None:
        """The messages as they arrived, for an engine that decodes them itself; None if only `read`
        can decode them."""
        return None

    def read(self, first: int, end: int) -> Coefficients:
        """Decodes rows `first` to `end`, excluding `end`. `first` must be a multiple of `unit`, and
        `end` must be a multiple of `unit` or the count of all rows.
        """
        raise NotImplementedError

    def weigh(self) -> None:
        """Computes the norms of the whole messages, and replaces the aggregation that needs these
        norms by a weighted mean. The weighted mean gives the same update, and can be computed block
        by block.
        """
        rows = max(-(-self.rows // NORM_BLOCKS), NORM_BLOCK // max(1, self.width))
        norms = message_norms((block.values for block in self._read_in(rows)), self.rows)
        self.aggregation = WeightedMean(cast(NormWeighing, self.aggregation).weights(norms))

    def whole(self) -> Coefficients:
        """The coefficients of all rows."""
        return self.read(0, self.rows)

    def part(self, first: int, end: int) -> Coefficients:
        """Decodes rows `first` to `end`, excluding `end`, for any `first` and `end`."""
        start = first // self.unit * self.unit
        stop = min(self.rows, -(-end // self.unit) * self.unit)
        return self.read(start, stop).part(first - start, end - start)

    def rows_of(self, first: int, rows: int) -> Received:
        """A view of `rows` rows of these messages, from row `first` on. The view must begin and end
        at rows at which messages can be cut; see `unit`."""
        return ReceivedRows(self, first, rows)

    def blocks(self, rows: int, read: int = 0) -> Iterator[Coefficients]:
        """Decodes the messages, and yields their coefficients in blocks of `rows` rows. `rows` is
        rounded up to a multiple of `unit`.

        Args:
            rows: Rows per block.
            read: Rows that are decoded at once and then cut into blocks; at least `rows`.
        """
        for decoded_rows in self._read_in(max(rows, read)):
            count = decoded_rows.values.shape[1]
            if count <= rows or read <= rows:
                yield decoded_rows
            else:
                for first in range(0, count, rows):
                    yield decoded_rows.part(first, min(first + rows, count))
            del decoded_rows  # frees the decoded rows before the next rows are decoded

    def _read_in(self, rows: int) -> Iterator[Coefficients]:
        """Decodes and yields `rows` rows at a time; `rows` is rounded up to a multiple of
        `unit`."""
        step = max(1, -(-rows // self.unit)) * self.unit
        for first in range(0, max(1, self.rows), step):
            yield self.read(first, min(first + step, self.rows))


class ReceivedRows(Received):
    """A range of rows of received messages."""

    def __init__(self, whole: Received, first: int, rows: int) -> None:
        self._whole = whole
        self._first = first
        self.rows = rows
        self.aggregation = whole.aggregation
        self.unit = whole.unit
        self.width = whole.width

    def read(self, first: int, end: int) -> Coefficients:
        return self._whole.read(self._first + first, self._first + end)


class DecodedMessages(Received):
    """Messages that are already decoded.

    Shapes: as in `Coefficients`.
    """

    def __init__(self, values: Tensor, indices: Tensor | None) -> None:
        self._coefficients = Coefficients(values, indices)
        self.rows = values.shape[1]
        self.aggregation = Mean()

    def read(self, first: int, end: int) -> Coefficients:
        return self._coefficients.part(first, end)


@dataclass(eq=False)
class Arrived(Received):
    """The messages of all replicas as received bytes. They are decoded in blocks of rows, so no
    temporary copy is larger than a block.
    """

    codec: Codec
    body: Tensor  # shape: [replicas, nbytes] uint8
    rows: int
    # shape [rows, k]; for replies of owners [replicas, rows, k], because each owner has other rows
    shared: Tensor | SharedIndices | None
    aggregation: Aggregation
    unit: int = 1
    release: Callable[[], None] | None = None

    @property
    def width(self) -> int:  # type: ignore[override]
        return len(self.body) * self.codec.selection.k

    @property
    def source(self) -> Arrived:
        return self

    def facts(self) -> tuple[Tensor, Tensor]:
        """Checks the content of each message on the device that holds it: finds impossible indices
        and statistics, and computes the norm of the message. The guard uses these facts to refuse
        messages.

        Shapes: -> faults `[replicas]` int64 from `IndexCoding.faults`, or 3 for statistics that no
        encoder produces; and the norm `[replicas]` fp32.
        """
        packed = self._packed
        k = self.codec.selection.k
        allowed, norms = self.codec.precision.check(self._encoded, self.rows, k)
        if packed is None:
            faults = torch.zeros(len(norms), dtype=torch.int64, device=norms.device)
        else:
            faults = self.codec.index_coding.faults(packed)
        if allowed is not None:
            faults.masked_fill_(allowed.logical_not(), 3)
        return faults, norms

    def blank(self, skipped: Tensor) -> None:
        """Overwrites the refused messages `skipped` with zeros.

        Shapes: `[replicas]` bool.
        """
        self.body.masked_fill_(skipped.unsqueeze(1), 0)
        for known in ("levels", "_encoded"):  # drops results computed from refused messages
            vars(self).pop(known, None)
        if self._packed is not None:
            self._packed.blank(skipped)

    def read(self, first: int, end: int) -> Coefficients:
        """Decodes rows; see `Received.read`.

        If messages hold whole rows and the aggregation is the mean, a kernel may compute the mean
        while it decodes. The result then holds one message: the mean.
        """
        mean = self.codec.dense and isinstance(self.aggregation, Mean)
        return Coefficients(self.values(first, end, mean), self.indices(first, end))

    def values(self, first: int, end: int, mean: bool = False) -> Tensor:
        """The decoded values of rows `first` to `end`, excluding `end`; see `BlockCodebook.read`.

        Shapes: -> `[replicas, end - first, k]` fp32.
        """
        precision = self.codec.precision
        if isinstance(precision, Float):
            return self._encoded[:, first:end].to(torch.float32)
        rows = end - first
        parts: Sequence[Tensor] = self.parts
        if rows < self.rows:
            parts = self.codec.cut(parts, first, end)
        if not isinstance(precision, BlockCodebook):
            return self.codec.values(parts, rows)
        k = self.codec.selection.k
        begin = first * k // precision.block
        return precision.read(parts[0], self.levels, begin, (rows, k), mean)

    def indices(self, first: int, end: int) -> Tensor | PackedIndices | None:
        """The indices of rows `first` to `end`, excluding `end`; see `Coefficients`.

        Shapes: -> `[..., end - first, k]` integer.
        """
        if self.shared is not None:
            return narrow(self.shared)[..., first:end, :]
        if self._packed is None or end - first == self.rows:
            return self._packed
        return self._packed.part(first, end)

    @cached_property
    def parts(self) -> tuple[Tensor, ...]:
        """The parts of each message as views; see `MessageRows.parts`.

        Shapes: -> `[replicas, length]` uint8 each.
        """
        return torch.split(self.body, list(self.codec.lengths[self.rows]), 1)

    @cached_property
    def _encoded(self) -> Tensor:
        """The values of all messages in the encoding in which they were sent.

        Shapes: -> `[replicas, rows, k]` of a floating-point type, or `[replicas, nbytes]` uint8.
        """
        precision = self.codec.precision
        if isinstance(precision, Float):
            values = self.body[:, : self.codec.lengths[self.rows][0]]
            shape = (len(self.body), self.rows, self.codec.selection.k)
            return numbers(values, precision.dtype).view(shape)
        return self.body[:, : precision.nbytes(self.rows, self.codec.selection.k)]

    @cached_property
    def levels(self) -> Tensor:
        """The values that the codes of each block stand for; only for precisions that send
        codes."""
        assert isinstance(self.codec.precision, BlockCodebook)
        return self.codec.precision.all_levels(self.parts[1])

    @cached_property
    def _packed(self) -> PackedIndices | None:
        if self.codec.selection.shared:
            return None
        packed = self.body[:, self.body.shape[1] - self.codec.lengths[self.rows][-1] :]
        return PackedIndices(self.codec.index_coding, packed, self.rows)


class Collected(Received):
    """The replies of all owners (replicas that each aggregate some of the rows), put together to
    one message with all rows."""

    def __init__(self, replies: Arrived, owners: RowOwners) -> None:
        self._replies = replies
        self.owners = owners
        self.rows = owners.rows
        self.release = replies.release
        self.unit = owners.run * owners.replicas
        self.width = replies.codec.selection.k
        self.aggregation = Mean()

    @property
    def source(self) -> Arrived:
        return self._replies

    def read(self, first: int, end: int) -> Coefficients:
        assert self.owners
        owners = self.owners
        if end - first < self.rows:
            owners = owners.of_bucket(end - first)
        begin = first // owners.replicas
        stop = begin + owners.owned
        sent = []
        indices = self._replies.indices(begin, stop)
        # indices are unpacked before values, so that fewer temporary tensors exist at the same time
        if indices is not None:
            sent.append(narrow(indices))
        sent.append(self._replies.values(begin, stop))
        *unpacked, values = (lines.unsqueeze(0) for lines in owners.collect_each(sent))
        if not unpacked:
            return Coefficients(values, None)
        return Coefficients(values, unpacked[0])


@dataclass(eq=False)
class Sums(Received):
    """The sum of the messages of all replicas, computed by an all-reduce.

    Args:
        runs: For each run of rows, its first row and its values `[rows, k]`; in rising order.
        shared: Indices of all rows; None if the values are whole rows.
        report: `[1 + digits]` fp32. The first number is 1 if all values are finite, else 0. If this
            number is 0, the sum is read as zeros. None if the host has checked the values.
    """

    runs: Sequence[tuple[int, Tensor]]
    rows: int
    aggregation: Divided
    shared: Tensor | SharedIndices | None
    report: Tensor | None = None

    @property
    def source(self) -> Sums | None:
        if self.report is None:
            return None
        return self

    def read(self, first: int, end: int) -> Coefficients:
        cut = [run[max(0, first - at) : max(0, end - at)] for at, run in self.runs]
        parts = [part for part in cut if len(part)] or cut[:1]
        values = parts[0]
        if len(parts) > 1:
            values = torch.cat(parts)
        values = values.to(torch.float32).unsqueeze(0)
        if self.report is not None:
            values = values.masked_fill(self.report[0] == 0, 0.0)
        if self.shared is None:
            return Coefficients(values, None)
        return Coefficients(values, narrow(self.shared)[first:end])
