"""A codec combines a transform (basis), a selection of coefficients and a number format
(precision). Its pure functions convert between a flat matrix of parameters and a message.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

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
from detonation.core.flat.rows import RowOwners

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Selected:
    """The coefficients of a message, before they are encoded.

    Args:
        values: `[rows, k]` fp32; `[rows, 0]` if an engine has already written the values into the
            message and no other code needs them.
        indices: Indices of the values, in the same shape; None if `values` are whole rows.
        released: True if the values are already subtracted from the memory of unsent values.
    """

    values: Tensor
    indices: Tensor | Unpackable | None
    released: bool = False


class PartLengths(dict[int, tuple[int, ...]]):
    """Cache of `Codec.lengths` by count of rows, because every step needs the same lengths."""

    def __init__(self, codec: Codec) -> None:
        self._of = codec

    def __missing__(self, rows: int) -> tuple[int, ...]:
        selection = self._of.selection
        found = self._of.precision.lengths(rows, selection.k)
        if not selection.shared:
            found = (*found, self._of.index_coding.nbytes(rows))
        self[rows] = found
        return found


class Derived(dict[tuple[Any, ...], Any]):
    """Cache of what engines compute from a codec. `derived[make, *arguments]` calls
    `make(codec, *arguments)` on first use and stores the result, because a codec does not change.
    """

    def __init__(self, codec: Codec) -> None:
        self._of = codec

    def __missing__(self, key: tuple[Any, ...]) -> Any:
        make, *arguments = key
        found = self[key] = make(self._of, *arguments)
        return found


@dataclass(frozen=True)
class Codec:
    """Encodes a signal (gradients, or a change of the parameters) as a message, and decodes
    messages to an update.

    alignment: the size of each message is padded to a multiple of this many bytes; see
    `Scheme.aligned`.
    """

    basis: Basis
    selection: Selection
    precision: Precision
    alignment: int = 1

    @property
    def summable(self) -> bool:
        """True if an all-reduce can add messages, because all messages contain the same
        coordinates, in a dtype that torch can add.
        """
        return self.selection.shared and self.precision.summable

    @property
    def keeps_zeros(self) -> bool:
        """True if a coordinate that is zero on all replicas always gets a zero update, whatever the
        other coordinates of its row are.
        """
        return isinstance(self.basis, Identity) and not isinstance(self.precision, Sign | TwoBit)

    def layout(self, shapes: Mapping[str, Sequence[int]]) -> Layout:
        """The layout of the flat that this codec encodes, given the `shapes` of local shards by
        name."""
        return Layout.of(shapes, self.selection.chunk, self.basis.tile)

    @cached_property
    def derived(self) -> Derived:
        """Cache of what engines compute from this codec; see `Derived`."""
        return Derived(self)

    @cached_property
    def index_coding(self) -> IndexCoding:
        """The encoding of the indices in a message."""
        return IndexCoding(self.selection.chunk, self.selection.k)

    def nbytes(self, rows: int) -> int:
        """Bytes of a message of `rows` rows. This size does not depend on the values."""
        return sum(self.lengths[rows])

    def select(self, flat: Tensor, step: int, seed: int, out: Tensor | None = None) -> Selected:
        """Selects the coefficients of `flat` that are sent at `step`, without changing `flat`. For
        `out` see `pick`.

        Shapes: `[rows, chunk]` fp32 -> values `[rows, k]`.
        """
        coefficients = self.basis.forward(flat)
        if self.dense:
            return Selected(coefficients, None)
        return self.pick(coefficients, self.shared_indices(len(flat), step, seed, flat.device), out)

    def shared_indices(
        self, rows: int, step: int, seed: int, device: torch.device
    ) -> Tensor | None:
        """The indices of a shared selection at `step`; None if the selection depends on the data or
        sends whole rows.

        Shapes: -> `[rows, k]` int64.
        """
        if not self.selection.shared or self.dense:
            return None
        return indices_by_rule(self.selection, rows, step, seed, device)

    def pick(
        self, coefficients: Tensor, shared: Tensor | Unpackable | None, out: Tensor | None = None
    ) -> Selected:
        """Gathers the coefficients to send: those at the indices `shared` or, if `shared` is None,
        those that the selection chooses from the data.

        Args:
            coefficients: After the basis.
            shared: Indices that all replicas know; None if the selection looks at the data.
            out: Memory for the values; None for new memory. It is not used if whole rows are sent.

        Shapes: coefficients `[rows, chunk]` fp32, shared `[rows, k]` integer -> values `[rows, k]`.
        """
        if self.dense:
            return Selected(coefficients, None)
        if shared is None:
            indices = self.selection.indices(coefficients, 0, 0)
        else:
            indices = narrow(shared).to(torch.int64)
        return Selected(torch.gather(coefficients, 1, indices, out=out), indices)

    def empty(self, rows: int, step: int, seed: int, device: torch.device) -> Selected:
        """The content of an empty message: zeros at valid indices.

        Shapes: -> values `[rows, k]`.
        """
        k = self.selection.k
        values = torch.zeros(rows, k, dtype=torch.float32, device=device)
        if self.dense:
            return Selected(values, None)
        indices = self.shared_indices(rows, step, seed, device)
        if indices is None:
            indices = torch.arange(k, dtype=torch.int64, device=device).expand(rows, -1)
        return Selected(values, indices)

    def encode(self, selected: Selected, negative_zeros: bool = False) -> Tensor:
        """Encodes the `selected` coefficients as a message in newly allocated memory.

        Args:
            negative_zeros: See `Precision.encode`.

        Shapes: -> `[nbytes]` uint8.
        """
        rows = len(selected.values)
        device = selected.values.device
        memory = partial(torch.empty, 1, self.nbytes(rows), dtype=torch.uint8, device=device)
        run = MessageRows(self, rows, memory, negative_zeros=negative_zeros)
        self.write(selected, run)
        return run.body[0]

    def width(self, rows: int, room: int) -> int:
        """Bytes of a message of `rows` rows with a header of `room` bytes, rounded up to a multiple
        of `LINE_BYTES`."""
        return -(-self.sent(rows, room) // LINE_BYTES) * LINE_BYTES

    def sent(self, rows: int, room: int) -> int:
        """Returns how many bytes are sent for `rows` rows of a message: a header of `room` bytes,
        the encoded rows, and padding. The content of the padding is undefined.
        """
        return -(-(room + self.nbytes(rows)) // self.alignment) * self.alignment

    def write(self, selected: Selected, run: MessageRows) -> None:
        """Encodes selected coefficients into `run`, the buffer of a message. Values that are
        already in this buffer are not copied."""
        values = selected.values
        indices = selected.indices
        count = 1
        if run.owners:
            values, indices = self._dealt(selected, run.owners)
            count = run.owners.replicas
        encoded: list[Tensor | None] = []
        # values are encoded before `run` allocates its buffer, because the encoding may fail
        if not isinstance(self.precision, Float):
            octets = self.precision.encode(values, run.negative_zeros).view(count, -1)
            lengths = self.precision.lengths(run.rows, self.selection.k)
            encoded += torch.split(octets, list(lengths), 1)
            targets = [*run.parts]
        elif run.owners:  # writes bytes: a message for an owner may start at an unaligned address
            encoded.append(values.to(self.precision.dtype).view(torch.uint8).view(count, -1))
            targets = [*run.parts]
        else:
            assert run.numbers is not None
            if values.data_ptr() == run.numbers.data_ptr():
                encoded.append(None)
            else:
                encoded.append(values)
            targets = [run.numbers]
        if indices is not None and not self.selection.shared:
            encoded.append(self.index_coding.encode(indices).view(count, -1))
            targets += run.parts[len(targets) :]
        is_sent_alone = run.room or run.whole
        if values.device.type != "cpu" and is_sent_alone and (padding := run.padding) is not None:
            targets.append(padding)
            encoded.append(zero_byte(padding.device).expand_as(padding))
        copy(targets, encoded)

    def _dealt(self, selected: Selected, owners: RowOwners) -> tuple[Tensor, Tensor | None]:
        """The selected values and their indices, grouped by the owner of each row (the replica that
        aggregates this row). Padding rows hold zeros at valid indices.

        Shapes: -> `[owners, owned, k]` each.
        """
        if self.selection.shared or selected.indices is None:
            return owners.deal(selected.values), None
        sent = narrow(selected.indices)
        padding = None
        if owners.missing:
            padding = torch.arange(self.selection.k, dtype=sent.dtype, device=sent.device)
        values, indices = owners.deal_each([(selected.values, None), (sent, padding)])
        return values, indices

    def written(self, run: MessageRows) -> Tensor:
        """The values in `run`, the buffer of a message, as every receiver decodes them. In fp32 the
        returned tensor may share memory with this buffer.

        Shapes: -> `[rows of the flat, k]` fp32.
        """
        if run.whole or isinstance(self.precision, Float):
            values = self.values(run.parts, run.rows)
        else:
            end = run.room + self.precision.nbytes(run.rows, self.selection.k)
            encoded = run.octets[:, run.room : end]
            values = self.precision.decode(encoded, run.rows, self.selection.k)
        if run.owners:
            return run.owners.collect(values)
        return values[0]

    def values(self, parts: Sequence[Tensor], rows: int) -> Tensor:
        """Decodes the values of messages from the parts of these messages.

        Shapes: `[messages, length]` uint8 each -> `[messages, rows, k]` fp32.
        """
        k = self.selection.k
        if isinstance(self.precision, Float):
            values = numbers(parts[0], self.precision.dtype)
            return values.view(len(parts[0]), rows, k).to(torch.float32)
        encoded = list(parts)
        if not self.selection.shared:
            encoded.pop()  # the last part of a message holds the indices
        return self.precision.decode(torch.cat(encoded, 1), rows, k)

    @cached_property
    def unit(self) -> int:
        """Number of rows at whose multiples messages can be cut: each part then has whole blocks of
        the precision and whole bytes.
        """
        block = self.precision.block
        return math.lcm(block // math.gcd(block, self.selection.k), 8)

    @cached_property
    def lengths(self) -> Mapping[int, tuple[int, ...]]:
        """Maps the count of rows of a message to the sizes in bytes of the message's parts: values,
        statistics and indices. Each part can be cut at multiples of `unit` rows.
        """
        return PartLengths(self)

    def cut(self, parts: Sequence[Tensor], first: int, end: int) -> list[Tensor]:
        """Returns views of rows `first` to `end`, excluding `end`, of each of the `parts` of
        messages. `first` and `end` must be multiples of the property `unit`.

        Shapes: `[messages, length]` uint8 each -> the same.
        """
        bounds = zip(parts, self.lengths[first], self.lengths[end], strict=False)
        return [part[:, begin:stop] for part, begin, stop in bounds]

    def received(
        self,
        messages: Sequence[Tensor],
        rows: int,
        shared: Tensor | Unpackable | None,
        aggregation: Aggregation,
    ) -> Received:
        """Returns `messages`, one per replica, as if the network had delivered them.

        Args:
            messages: One per replica.
            rows: Number of rows of each message.
            shared: Indices of every message, if all replicas know them; else None.

        Shapes: messages `[nbytes]` uint8, shared `[rows, k]` integer.
        """
        nbytes = self.nbytes(rows)
        whole_words = -(-nbytes // 8) * 8
        device = messages[0].device
        memory = torch.empty(len(messages), whole_words, dtype=torch.uint8, device=device)
        body = memory[:, :nbytes]
        copy(body.unbind(), messages)
        if shared is not None:
            shared = narrow(shared)
        arrived = Arrived(self, body, rows, shared, aggregation, self.unit)
        if not aggregation.rowwise:
            arrived.weigh()
        return arrived

    @cached_property
    def dense(self) -> bool:
        """True if whole rows are sent, without indices."""
        return self.selection.shared and self.selection.k == self.selection.chunk
