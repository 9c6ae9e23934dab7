"""A codec is basis x selection x precision: pure functions between a flat matrix and the message
that is sent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch

from detonation.core.codec.aggregate import Aggregation
from detonation.core.codec.basis import Basis, Identity
from detonation.core.codec.codebooks import Sign, TwoBit
from detonation.core.codec.indices import IndexCoding, Unpackable, narrow
from detonation.core.codec.message_rows import MessageRows, indices_by_rule, zero_byte
from detonation.core.codec.precision import Float, Precision, numbers
from detonation.core.codec.received import Arrived, Received
from detonation.core.codec.selection import Selection
from detonation.core.compute.checksum import LINE_BYTES
from detonation.core.flat.layout import Layout, copy
from detonation.core.flat.owners import RowOwners

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Selected:
    """The coefficients that a message carries, before they are encoded.

    Args:
        values: `[rows, k]` fp32; `[rows, 0]` where an engine has written them into a run, and
            nobody needs them.
        indices: Of the values, as many, or None where `values` are whole rows.
    """

    values: Tensor
    indices: Tensor | Unpackable | None


class PartLengths(dict[int, tuple[int, ...]]):
    """`Codec.lengths`: computed once for each number of rows, because every step asks for the same
    few."""

    def __init__(self, codec: Codec) -> None:
        self._of = codec

    def __missing__(self, rows: int) -> tuple[int, ...]:
        indices = () if self._of.selection.shared else (self._of.index_coding.nbytes(rows),)
        self[rows] = found = *self._of.precision.lengths(rows, self._of.selection.k), *indices
        return found


@dataclass(frozen=True)
class Codec:
    """Turns a signal into a message, and messages into an update.

    See `Scheme.aligned` for its `alignment`.
    """

    basis: Basis
    selection: Selection
    precision: Precision
    alignment: int = 1

    @property
    def summable(self) -> bool:
        """True if an all-reduce can add messages: all carry the same coordinates, in a type that
        can be added."""
        return self.selection.shared and self.precision.summable

    @property
    def keeps_zeros(self) -> bool:
        """True if the update of a coordinate that was zero on all replicas is zero, whatever stands
        beside it."""
        return isinstance(self.basis, Identity) and not isinstance(self.precision, Sign | TwoBit)

    def layout(self, shapes: Mapping[str, Sequence[int]]) -> Layout:
        """The layout of the flat that this codec reads, for local shards of these `shapes` by
        parameter name."""
        return Layout.of(shapes, self.selection.chunk, self.basis.tile)

    @cached_property
    def index_coding(self) -> IndexCoding:
        """The encoding of indices that are sent."""
        return IndexCoding(self.selection.chunk, self.selection.k)

    def nbytes(self, rows: int) -> int:
        """Bytes of a message of `rows` rows, independent of its values."""
        return sum(self.lengths[rows])

    def select(self, flat: Tensor, step: int, seed: int, out: Tensor | None = None) -> Selected:
        """The coefficients of `flat` to send at `step`; `flat` does not change. `out` as in `pick`.

        Shapes: `[rows, chunk]` fp32 -> values `[rows, k]`.
        """
        coefficients = self.basis.forward(flat)
        if self.dense:
            return Selected(coefficients, None)
        return self.pick(coefficients, self.shared_indices(len(flat), step, seed, flat.device), out)

    def shared_indices(
        self, rows: int, step: int, seed: int, device: torch.device
    ) -> Tensor | None:
        """The indices that a shared selection sends at `step`; None where the data decide, or whole
        rows are sent.

        Shapes: -> `[rows, k]` int64.
        """
        if not self.selection.shared or self.dense:
            return None
        return indices_by_rule(self.selection, rows, step, seed, device)

    def pick(
        self, coefficients: Tensor, shared: Tensor | Unpackable | None, out: Tensor | None = None
    ) -> Selected:
        """The coefficients at the indices that all replicas share or, without them, at the indices
        of the selection.

        Args:
            out: Where the values go; new memory when left out, and unused where whole rows are
                sent.

        Shapes: `[rows, chunk]` fp32, shared `[rows, k]` integer -> values `[rows, k]`.
        """
        if self.dense:
            return Selected(coefficients, None)
        indices = (
            self.selection.indices(coefficients, 0, 0)
            if shared is None
            else narrow(shared).to(torch.int64)
        )
        return Selected(torch.gather(coefficients, 1, indices, out=out), indices)

    def empty(self, rows: int, step: int, seed: int, device: torch.device) -> Selected:
        """The content of an empty message: zeros, at valid indices.

        Shapes: -> values `[rows, k]`.
        """
        if self.dense:
            return Selected(
                torch.zeros(rows, self.selection.chunk, dtype=torch.float32, device=device), None
            )
        indices = self.shared_indices(rows, step, seed, device)
        if indices is None:
            indices = torch.arange(self.selection.k, dtype=torch.int64, device=device).expand(
                rows, -1
            )
        return Selected(
            torch.zeros(rows, self.selection.k, dtype=torch.float32, device=device), indices
        )

    def encode(self, selected: Selected, negative_zeros: bool = False) -> Tensor:
        """A message of its own memory: later changes of the residual do not change it.

        Args:
            negative_zeros: See `Precision.encode`.

        Shapes: -> `[nbytes]` uint8.
        """
        rows, device = len(selected.values), selected.values.device
        memory = partial(torch.empty, 1, self.nbytes(rows), dtype=torch.uint8, device=device)
        run = MessageRows(self, rows, memory, negative_zeros=negative_zeros)
        self.write(selected, run)
        return run.body[0]

    def width(self, rows: int, room: int) -> int:
        """The bytes of a message with `room` for its header: up to the end of a line of its
        checksum."""
        return -(-self.sent(rows, room) // LINE_BYTES) * LINE_BYTES

    def sent(self, rows: int, room: int) -> int:
        """The bytes of a run of rows as it travels: with `room` for its header, and padding of any
        content."""
        return -(-(room + self.nbytes(rows)) // self.alignment) * self.alignment

    def write(self, selected: Selected, run: MessageRows) -> None:
        """Encodes a selection into a run, unless its values lie there already."""
        values, indices = selected.values, selected.indices
        if run.owners:
            values, indices = self._dealt(selected, run.owners)
        count, encoded = run.owners.replicas if run.owners else 1, list["Tensor | None"]()
        if not isinstance(self.precision, Float):  # before the memory of the run is taken
            octets = self.precision.encode(values, run.negative_zeros).view(count, -1)
            encoded += torch.split(
                octets, list(self.precision.lengths(run.rows, self.selection.k)), 1
            )
            targets = [*run.parts]
        elif run.owners:  # each message begins at any address
            encoded.append(values.to(self.precision.dtype).view(torch.uint8).view(count, -1))
            targets = [*run.parts]
        else:
            assert run.numbers is not None
            encoded.append(None if values.data_ptr() == run.numbers.data_ptr() else values)
            targets = [run.numbers]
        if indices is not None and not self.selection.shared:
            encoded.append(self.index_coding.encode(indices).view(count, -1))
            targets += run.parts[len(targets) :]
        if (
            values.device.type != "cpu"
            and (run.room or run.whole)
            and (padding := run.padding) is not None
        ):
            targets.append(padding)
            encoded.append(zero_byte(padding.device).expand_as(padding))
        copy(targets, encoded)

    def _dealt(self, selected: Selected, owners: RowOwners) -> tuple[Tensor, Tensor | None]:
        """The values and the indices of each owner; padding is zeros, at valid indices."""
        # [owners, owned, k]
        if self.selection.shared or selected.indices is None:
            return owners.deal(selected.values), None
        sent = narrow(selected.indices)
        padding = (
            torch.arange(self.selection.k, dtype=sent.dtype, device=sent.device)
            if owners.missing
            else None
        )
        values, indices = owners.deal_each([(selected.values, None), (sent, padding)])
        return values, indices

    def written(self, run: MessageRows) -> Tensor:
        """The values of a run, as every receiver decodes them; in fp32 they may share its memory.

        Shapes: -> `[rows of the flat, k]` fp32.
        """
        if run.whole or isinstance(self.precision, Float):
            values = self.values(run.parts, run.rows)
        else:
            encoded = run.octets[
                :, run.room : run.room + sum(self.precision.lengths(run.rows, self.selection.k))
            ]
            values = self.precision.decode(encoded, run.rows, self.selection.k)
        return run.owners.collect(values) if run.owners else values[0]

    def values(self, parts: Sequence[Tensor], rows: int) -> Tensor:
        """The values of messages, from their parts.

        Shapes: `[messages, length]` uint8 each -> `[messages, rows, k]` fp32.
        """
        k = self.selection.k
        if isinstance(self.precision, Float):
            return (
                numbers(parts[0], self.precision.dtype)
                .view(len(parts[0]), rows, k)
                .to(torch.float32)
            )
        encoded = parts if self.selection.shared else parts[:-1]
        return self.precision.decode(torch.cat(tuple(encoded), 1), rows, k)

    @cached_property
    def unit(self) -> int:
        """The number of rows after which a message can be cut: whole blocks of the precision, and
        whole bytes."""
        block = self.precision.block
        return math.lcm(block // math.gcd(block, self.selection.k), 8)

    @cached_property
    def lengths(self) -> Mapping[int, tuple[int, ...]]:
        """The bytes of each part of a message, by its rows; between two aligned rows every part can
        be cut."""
        return PartLengths(self)

    def cut(self, parts: Sequence[Tensor], first: int, end: int) -> list[Tensor]:
        """The rows from `first` to below `end`, where messages can be cut, of messages in parts.

        Shapes: `[messages, length]` uint8 each -> the same.
        """
        return [
            part[:, a:b]
            for part, a, b in zip(parts, self.lengths[first], self.lengths[end], strict=False)
        ]

    def received(
        self,
        messages: Sequence[Tensor],
        rows: int,
        shared: Tensor | Unpackable | None,
        aggregation: Aggregation,
    ) -> Received:
        """`messages`, one per replica, as if they had arrived.

        Args:
            shared: The indices of every message where all replicas know them, else None.

        Shapes: messages `[nbytes]` uint8, shared `[rows, k]` integer.
        """
        nbytes, device = self.nbytes(rows), messages[0].device
        body = torch.empty(len(messages), -(-nbytes // 8) * 8, dtype=torch.uint8, device=device)[
            :, :nbytes
        ]
        copy(body.unbind(), messages)
        known = None if shared is None else narrow(shared)
        arrived = Arrived(self, body, rows, known, aggregation, self.unit)
        if not aggregation.rowwise:
            arrived.weigh()
        return arrived

    @cached_property
    def dense(self) -> bool:
        """True if whole rows are sent, without indices."""
        return self.selection.shared and self.selection.k == self.selection.chunk
