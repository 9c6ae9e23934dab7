"""The message of one step: encoded piece by piece, sent in one collective or in several, and joined again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from detonation.core.codec.codec import Codec, Message
from detonation.core.codec.form import Dealt, MessageForm
from detonation.core.compute import kernel_library
from detonation.core.compute.checksum import LINE_BYTES
from detonation.core.integrity.header import HEADER_BYTES
from detonation.core.link.link import Arriving


@dataclass(frozen=True)
class Piece:
    """The encoded rows of a message from `first` on, part by part."""

    first: int
    rows: int
    parts: Sequence[Tensor]  # [messages, length] uint8 each
    form: MessageForm | None = None  # of a message that an engine wrote


@dataclass
class Outgoing:
    """The messages of one collective stage of a step: one for all replicas, or one for each.

    The wire carries the bytes of one message with one header, however many collectives it takes: each carries a run of
    rows, and the last one begins with the header, which speaks of all.

    absent: after `wait`, the replicas whose messages did not arrive whole, because they were lost.

    Args:
        count: The number of messages.
    """

    codec: Codec
    count: int
    waiting: list[Piece] = field(default_factory=list)
    sent: list[Piece] = field(default_factory=list)
    arriving: list[Arriving] = field(default_factory=list)
    played: Callable[[], Tensor] | None = None  # what arrives in the place of a collective: header and bytes
    runs: list[tuple[int, int]] = field(default_factory=list)  # first row and rows of each collective
    absent: set[int] = field(default_factory=set)
    kernels: Any = None  # the module `detonation.kernels.gpu.launches`, where it seals and inspects

    def add(self, first: int, rows: int, message: Message) -> None:
        """Adds the encoded rows from `first` on."""
        self.waiting.append(Piece(first, rows, self.codec.parts(message, rows, self.count), message.form))

    def next_run(self) -> Tensor:
        """The bytes of the pieces that wait, to be sent before the last.

        Shapes: -> `[messages, nbytes]` uint8.
        """
        pieces, self.waiting = _in_order(self.waiting), []
        self.sent += pieces
        self.runs.append((pieces[0].first, sum(piece.rows for piece in pieces)))
        return joined([piece.parts for piece in pieces])

    def last_run(self) -> tuple[Tensor, Tensor | None, int]:
        """The whole of each message, to be sealed; then the room for the header and the bytes that were not sent yet,
        or None where nothing was sent yet.

        Shapes: -> `[messages, 64 + nbytes + padding]` and `[messages, 64 + some bytes]` uint8, and nbytes.
        """
        pieces, early = _in_order(self.waiting), self.sent
        self.waiting, self.sent = [], []
        self.runs.append((pieces[0].first, sum(piece.rows for piece in pieces)))
        form = pieces[0].form
        if self.kernels is not None and form is not None and len(pieces) == 1 and not early:
            nbytes = self.codec.nbytes(form.owned)
            return form.buffer, None, nbytes
        whole, nbytes = padded([piece.parts for piece in _in_order([*early, *pieces])], HEADER_BYTES)
        if not early:
            return whole, None, nbytes
        return whole, joined([piece.parts for piece in pieces], HEADER_BYTES), nbytes

    def wait(self) -> tuple[Tensor, int]:
        """Waits for all runs and puts them together.

        Shapes: -> `[messages of all replicas, 64 + nbytes + padding]` uint8, and nbytes.
        """
        if self.played:
            octets = self.played()
            whole, nbytes = padded([[octets[:, HEADER_BYTES:]]], HEADER_BYTES)
            whole[:, :HEADER_BYTES].copy_(octets[:, :HEADER_BYTES])
            self.absent = {row for row, header in enumerate(octets[:, :HEADER_BYTES]) if not header.any()}
            return whole, nbytes
        arrived, pieces = [each() for each in self.arriving], []
        self.absent.update(*(each.absent for each in self.arriving))
        nbytes = self.codec.nbytes(sum(rows for _, rows in self.runs))
        of_several = len(arrived) == 1 and len(arrived[0]) > 1  # torch refuses other types at the odd stride of one
        if of_several and arrived[0].device.type == "cpu" and kernel_library.load_library():
            return arrived[0], nbytes  # which kernels read at any address
        if self.kernels is not None and len(arrived) == 1:
            return self._aligned(arrived[0]), nbytes
        for (first, rows), octets in zip(self.runs, arrived, strict=True):
            body = octets[:, octets.shape[1] - self.codec.nbytes(rows) :]
            pieces.append(Piece(first, rows, torch.split(body, list(self.codec.lengths(rows)), 1)))
        whole, _ = padded([piece.parts for piece in _in_order(pieces)], HEADER_BYTES)
        whole[:, :HEADER_BYTES].copy_(arrived[-1][:, :HEADER_BYTES])
        self.release()
        return whole, nbytes

    def _aligned(self, octets: Tensor) -> Tensor:
        """Messages as kernels read them: each begins at an address for any type."""
        if not (octets.data_ptr() % 16 or octets.stride(0) % 16):
            return octets
        width = -(-octets.shape[1] // LINE_BYTES) * LINE_BYTES
        whole = torch.empty(len(octets), width, dtype=torch.uint8, device=octets.device)
        self.kernels.align(octets, whole)
        self.release()
        return whole

    def release(self) -> None:
        """Returns the receive buffers."""
        for each in self.arriving:
            each.release()
        self.arriving.clear()


def form_of(codec: Codec, rows: int, dealt: Dealt, negative_zeros: bool, device: torch.device) -> MessageForm:
    """The form of `dealt.count` messages of `rows` rows, each with room for a header, padded to lines of a checksum."""
    width = -(-(HEADER_BYTES + codec.nbytes(rows)) // LINE_BYTES) * LINE_BYTES
    buffer = torch.empty(dealt.count, width, dtype=torch.uint8, device=device)
    return MessageForm(buffer, HEADER_BYTES, rows, dealt, negative_zeros)


def joined(pieces: Sequence[Sequence[Tensor]], room: int = 0) -> Tensor:
    """`room` free bytes, and then part by part the bytes of all pieces.

    Shapes: per piece and part `[messages, length]` -> `[messages, room + nbytes]` uint8.
    """
    parts = [part for parts in zip(*pieces, strict=True) for part in parts]
    nbytes = sum(part.shape[1] for part in parts)
    found = torch.empty(len(parts[0]), room + nbytes, dtype=torch.uint8, device=parts[0].device)
    _write(found[:, room:], parts)
    return found


def padded(pieces: Sequence[Sequence[Tensor]], room: int) -> tuple[Tensor, int]:
    """`joined`, zero-padded to whole lines of a checksum; every message begins at an address for any type."""
    parts = [part for parts in zip(*pieces, strict=True) for part in parts]
    nbytes = sum(part.shape[1] for part in parts)
    width = -(-(room + nbytes) // LINE_BYTES) * LINE_BYTES
    found = torch.empty(len(parts[0]), width, dtype=torch.uint8, device=parts[0].device)
    _write(found[:, room : room + nbytes], parts)
    found[:, :room].zero_()
    found[:, room + nbytes :].zero_()
    return found, nbytes


def _write(target: Tensor, parts: Sequence[Tensor]) -> None:
    torch._foreach_copy_(list(torch.split(target, [part.shape[1] for part in parts], 1)), list(parts))


def _in_order(pieces: Sequence[Piece]) -> list[Piece]:
    return sorted(pieces, key=lambda piece: piece.first)
