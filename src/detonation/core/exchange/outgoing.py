"""The message of one step: encoded piece by piece, sent in one collective or in several, and joined again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from detonation.core.codec.codec import Codec, Message
from detonation.core.codec.form import Dealt, MessageForm
from detonation.core.compute import kernel_library
from detonation.core.compute.checksum import LINE_BYTES
from detonation.core.exchange.workspace import Workspace
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
        form = message.form
        if form is None:
            parts: Sequence[Tensor] = self.codec.parts(message, rows, self.count)
        else:
            body = form.buffer[:, form.room : form.room + self.codec.nbytes(rows)]
            parts = torch.split(body, list(self.codec.lengths(rows)), 1)
        self.waiting.append(Piece(first, rows, parts, form))

    def next_run(self) -> Tensor:
        """The bytes of the pieces that wait, to be sent before the last.

        Shapes: -> `[messages, nbytes]` uint8.
        """
        pieces = self._take_waiting()
        self.sent += pieces
        form = pieces[0].form
        if form is not None and len(pieces) == 1 and not form.room:
            return form.buffer
        return joined([piece.parts for piece in pieces])

    def last_runs(self) -> list[tuple[MessageForm, int]] | None:
        """The forms of all pieces in the order of their rows, and the rows of each, where engines wrote a run each and
        left room for the header in the last to be sent; else None, and `last_run` has it all."""
        pieces = _in_order([*self.sent, *self.waiting])
        forms = [(piece.form, piece.rows) for piece in pieces if piece.form is not None]
        if self.kernels is None or len(forms) < len(pieces) or len(self.waiting) > 1 or not self.waiting[0].form:
            return None
        if [form for form, _ in forms if form.room] != [self.waiting[0].form]:
            return None
        self._take_waiting()
        return forms

    def last_run(self) -> tuple[Tensor, Tensor | None, int]:
        """The whole of each message, to be sealed; then the room for the header and the bytes that were not sent yet,
        or None where nothing was sent yet.

        Shapes: -> `[messages, 64 + nbytes + padding]` and `[messages, 64 + some bytes]` uint8, and nbytes.
        """
        early, pieces = self.sent, self._take_waiting()
        self.sent = []
        whole, nbytes = padded([piece.parts for piece in _in_order([*early, *pieces])], HEADER_BYTES)
        if not early:
            return whole, None, nbytes
        return whole, joined([piece.parts for piece in pieces], HEADER_BYTES), nbytes

    def wait(self) -> list[Tensor]:
        """Waits for all runs.

        Shapes: -> of each `[messages of all replicas, bytes]` uint8.
        """
        if self.played:
            octets = self.played()
            self.absent = {row for row, header in enumerate(octets[:, :HEADER_BYTES]) if not header.any()}
            return [octets]
        arrived = [each() for each in self.arriving]
        self.absent.update(*(each.absent for each in self.arriving))
        return arrived

    def whole(self, arrived: Sequence[Tensor]) -> tuple[Tensor, int]:
        """The output of `wait`, put together.

        Shapes: -> `[messages of all replicas, 64 + nbytes + padding]` uint8, and nbytes.
        """
        if self.played:
            nbytes = arrived[0].shape[1] - HEADER_BYTES
            whole = padded([[arrived[0]]], 0)[0]
        else:
            nbytes = self.codec.nbytes(sum(rows for _, rows in self.runs))
            if len(arrived) == 1 and _is_readable(arrived[0]):
                return arrived[0], nbytes
            pieces = []
            for (first, rows), octets in zip(self.runs, arrived, strict=True):
                body = octets[:, octets.shape[1] - self.codec.nbytes(rows) :]
                pieces.append(Piece(first, rows, torch.split(body, list(self.codec.lengths(rows)), 1)))
            parts = [
                part for parts in zip(*[piece.parts for piece in _in_order(pieces)], strict=True) for part in parts
            ]
            whole = padded([[arrived[-1][:, :HEADER_BYTES], *parts]], 0)[0]
        self.release()
        return whole, nbytes

    def _take_waiting(self) -> list[Piece]:
        """The pieces that wait, which become one run."""
        pieces, self.waiting = _in_order(self.waiting), []
        self.runs.append((pieces[0].first, sum(piece.rows for piece in pieces)))
        return pieces

    def release(self) -> None:
        """Returns the receive buffers. On an accelerator they are kept for the next step only where a step by kernels
        allocates nothing else: torch's allocator has others for them until then."""
        for each in self.arriving:
            if self.kernels is not None or (each.rows is not None and each.rows.device.type == "cpu"):
                each.release()
        self.arriving.clear()


def form_of(
    codec: Codec,
    rows: int,
    dealt: Dealt,
    negative_zeros: bool,
    device: torch.device,
    first: int = 0,
    workspace: Workspace | None = None,
) -> MessageForm:
    """The form of `dealt.count` messages of `rows` rows, as they travel.

    Args:
        first: The first row, which is 0 in the run that is sent last: that one has room for the header.
    """
    room = 0 if first else HEADER_BYTES
    shape = dealt.count, room + codec.nbytes(rows)
    buffer = (workspace or Workspace()).take(("form", first), shape, device)
    return MessageForm(buffer, room, rows, dealt, negative_zeros)


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
    """`joined`, zero-padded to whole lines of a checksum; every message begins at an address for any type.

    The free bytes are written by the header.
    """
    parts = [part for parts in zip(*pieces, strict=True) for part in parts]
    nbytes = sum(part.shape[1] for part in parts)
    width = -(-(room + nbytes) // LINE_BYTES) * LINE_BYTES
    found = torch.empty(len(parts[0]), width, dtype=torch.uint8, device=parts[0].device)
    padding = _zero(found.device).expand(len(found), width - room - nbytes)
    _write(found[:, room:], [*parts, padding])
    return found, nbytes


def _is_readable(messages: Tensor) -> bool:
    """True if messages can be inspected and decoded where they arrived."""  # [messages, bytes] uint8
    if messages.device.type != "cpu":
        return messages.shape[1] % 8 == 0  # torch reads numbers at their own addresses only
    # kernels read them anywhere, but torch refuses other types at the odd stride of a single one
    return len(messages) > 1 and kernel_library.load_library() is not None


def _write(target: Tensor, parts: Sequence[Tensor]) -> None:
    torch._foreach_copy_(list(torch.split(target, [part.shape[1] for part in parts], 1)), list(parts))


@lru_cache(maxsize=8)
def _zero(device: torch.device) -> Tensor:
    return torch.zeros(1, 1, dtype=torch.uint8, device=device)


def _in_order(pieces: Sequence[Piece]) -> list[Piece]:
    return sorted(pieces, key=lambda piece: piece.first)
