"""Guard: seals what a replica tells, and inspects what arrives before any of it is used."""

import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from detonation.core.codec import Codec, Message
from detonation.core.columns import Packed
from detonation.core.envelope import DIGITS, Facts, Stamp, facts, number, sealed
from detonation.core.ledger import Ledger
from detonation.core.precision import Float
from detonation.kernels import native

LIMIT = 1e18
"""The largest value and norm of one message: the square of more is infinite in fp32, as in Adam's second moment."""
LOUDER = 1000.0
"""How often the median of all norms one may be: momentum at decay 0.999 cannot be more times a single gradient."""


@dataclass(frozen=True)
class Opened:
    """What arrived, in replica order, as it may be used: zeros from a replica that tells nothing or was refused."""

    values: list[Tensor]  # [rows, kept]
    columns: list[Tensor | Packed | None]


class Guard:
    """Stands between one channel and its link, the same on all replicas.

    The decision on a message is a function of its bytes and of those beside it, so replicas that received the same
    bytes take it alike; whether they did, each tells with its next message. A message that is refused counts as zeros:
    the mean stays one over all replicas, so that nobody's voice grows because another's was lost.
    """

    def __init__(
        self, codec: Codec, names: Sequence[str], schema: str, place: int, replica: int, delay: int, ledger: Ledger
    ) -> None:
        self._codec, self._names, self._ledger = codec, list(names), ledger
        self._stamp = Stamp(number(schema), 0, place << 2, replica)
        self._delay = delay
        self._sent = self._opened = 0
        self._heard: dict[int, int] = {}  # by number of the exchange

    def status(self, signals: Sequence[Tensor | None]) -> int:
        """0, or 1 + the number of the first parameter whose signal must not reach the memory.

        One NaN would win top-k for ever and freeze its chunk on every replica.
        """
        present = [(i, s) for i, s in enumerate(signals) if s is not None and s.numel()]
        tensors = [signal for _, signal in present]
        if not tensors:
            return 0
        library = native.load_for(*tensors)
        if library and all(tensor.dtype == torch.float32 for tensor in tensors):
            found = library.beyond(tensors, LIMIT)
        else:
            found = _beyond(tensors)
        return 0 if found < 0 else 1 + present[found][0]

    def seal(self, message: Message, step: int, status: int, phase: int = 0) -> tuple[Tensor, ...]:
        """The parts to send. phase: which of the collectives of an exchange; the last one is 0."""
        heard = 0
        if not phase:
            # of the exchange that all have surely taken in, whoever looked at one on its way
            heard = self._heard.get(self._sent - 1 - self._delay, 0)
            self._sent += 1
        return sealed(
            message.parts, replace(self._expected(step, phase, self._stamp.sender), status=status, heard=heard)
        )

    def open(
        self,
        arrived: Sequence[Sequence[Tensor]],
        rows: int,
        shared: Sequence[Tensor | Packed | None],
        step: int,
        phase: int = 0,
        signals: bool = True,
    ) -> Opened:
        """What `arrived`, one sealed message a replica: inspected, counted and read.

        shared: the columns of each where all know them. signals: whether each tells what is new on it, so that they
        are about as loud as one another; not what it makes of the others' messages.
        """
        messages = [Message(*parts[1:]) for parts in arrived]
        values = [self._codec.read(message, rows) for message in messages]
        looked = [self._look(parts, told, rows) for parts, told in zip(arrived, values, strict=True)]
        table = [_Inspected.of(row) for row in torch.stack(looked).tolist()]  # the only wait for a device
        nbytes = sum(part.nbytes for part in messages[0].parts)
        faults = [each.fault(self._expected(step, phase, r), nbytes, len(self._names)) for r, each in enumerate(table)]
        if signals:
            faults = _too_loud(table, faults)
        if not phase:
            self._compare(table, faults, step)
        self._ledger.news = True
        opened = Opened([], [])
        for sender, (message, told, where) in enumerate(zip(messages, values, shared, strict=True)):
            used = self._count(sender, faults[sender], table[sender].header.status, step, signals)
            opened.values.append(told if used else torch.zeros_like(told))
            opened.columns.append(where if message.columns is None else self._columns(message.columns, rows, used))
        return opened

    def seal_sum(self, values: Tensor, replicas: int, status: int) -> Tensor:
        """What the network may add up: `values`, as the precision writes them, and after them everyone's status.

        Each replica has three places for its own and zeros in the others', so that no header is needed.
        """  # [rows, kept] -> [rows * kept + 3 * replicas]
        assert isinstance(self._codec.precision, Float)
        count, mine = values.numel(), DIGITS * self._stamp.sender
        buffer = torch.empty(count + DIGITS * replicas, dtype=self._codec.precision.dtype, device=values.device)
        buffer[:count].view_as(values).copy_(values)
        buffer[count:].zero_()
        if status:
            digits = torch.tensor([status >> 8 * i & 255 for i in range(DIGITS)], dtype=buffer.dtype)
            buffer[count + mine : count + mine + DIGITS].copy_(digits)
        return buffer

    def open_sum(self, total: Tensor, count: int, step: int) -> Tensor:
        """The sum of the values alone, after all statuses were counted; zeros where it is not finite."""  # [count]
        values = total[:count]
        library = native.load_for(values)
        if library and values.dtype == torch.float32:
            finite = torch.tensor([library.beyond([values], torch.finfo(torch.float32).max) < 0])
        else:
            finite = values.isfinite().all().view(1)
        fine, *digits = torch.cat([finite.to(torch.float32), total[count:].to(torch.float32)]).tolist()
        for sender in range(len(digits) // DIGITS):
            own = digits[DIGITS * sender : DIGITS * (sender + 1)]
            known = all(0 <= digit <= 255 and digit == int(digit) for digit in own)
            status = sum(int(digit) << 8 * i for i, digit in enumerate(own)) if known else -1
            fault = "" if 0 <= status <= len(self._names) else "has a status that does not exist"
            self._count(sender, fault, status, step, signals=True)
        self._ledger.news = True
        if not fine:
            self._ledger.refuse_sum(step)
        return values if fine else torch.zeros_like(values)

    def _expected(self, step: int, phase: int, sender: int) -> Stamp:
        return replace(self._stamp, step=step, place=self._stamp.place | phase, sender=sender)

    def _look(self, parts: Sequence[Tensor], told: Tensor, rows: int) -> Tensor:
        """All that the decision on a message needs, on the device that it is on."""  # [12] int64
        _, values, *columns = parts
        precision, kept = self._codec.precision, self._codec.selection.kept
        places = self._codec.columns.fault(columns[0], rows) if columns else torch.zeros((), device=told.device)
        lawful = precision.lawful(values, rows, kept)
        norm = torch.linalg.vector_norm(told).double().view(torch.int64)
        return torch.cat([facts(parts), torch.stack([places.long(), lawful.long(), norm])])

    def _compare(self, table: Sequence["_Inspected"], faults: Sequence[str], step: int) -> None:
        """Did all hear the same earlier? A message that was damaged on its way to some only shows here."""
        self._heard[self._opened] = number(repr([(t.header.words[7], f) for t, f in zip(table, faults, strict=True)]))
        self._heard.pop(self._opened - 2 - self._delay, None)
        self._opened += 1
        heard = {r: t.header.heard for r, (t, fault) in enumerate(zip(table, faults, strict=True)) if not fault}
        usual = Counter(heard.values()).most_common(1)
        for sender, what in heard.items():
            if what != usual[0][0]:
                self._ledger.differ(sender, step)

    def _count(self, sender: int, fault: str, status: int, step: int, signals: bool) -> bool:
        """Whether the message may be used."""
        if fault:
            self._ledger.refuse(sender, fault, step)
        elif status:
            self._ledger.skip(sender, self._stamp.place, self._names[status - 1], step)
        elif signals:
            self._ledger.fine(sender, self._stamp.place)
        return not fault and not status

    def _columns(self, encoded: Tensor, rows: int, used: bool) -> Tensor | Packed:
        if used:
            return Packed(self._codec.columns, encoded, rows)
        return torch.arange(self._codec.selection.kept, device=encoded.device).expand(rows, -1)


def _beyond(tensors: list[Tensor]) -> int:
    """The number of the first of `tensors` that holds NaN or a magnitude above `LIMIT`; -1 where none. One wait."""
    norms = torch.stack([norm.float() for norm in torch._foreach_norm(tensors)])
    if (norms <= LIMIT).all():  # no number is larger than the root of the sum of all squares, which is fast to have
        return -1
    within = torch.stack([norm.float() for norm in torch._foreach_norm(tensors, ord=torch.inf)]) <= LIMIT
    return -1 if within.all() else int(within.logical_not().nonzero()[0])


@dataclass(frozen=True)
class _Inspected:
    """What was found in a message."""

    header: Facts
    columns: int  # 0, or what `Columns.fault` found
    lawful: bool
    norm: float

    @classmethod
    def of(cls, row: Sequence[int]) -> "_Inspected":
        (norm,) = struct.unpack("d", struct.pack("q", row[11]))
        return cls(Facts(row[:9]), row[9], bool(row[10]), norm)

    def fault(self, expected: Stamp, nbytes: int, parameters: int) -> str:
        """Why the message is not to be used, whatever the others say; "" where it is."""
        if fault := self.header.fault(expected, nbytes, parameters):
            return fault
        if self.columns:
            return ("has a column outside of its row", "has a column twice or out of order")[self.columns - 1]
        if not self.lawful:
            return "has statistics that no encoder makes"
        if not self.norm <= LIMIT:
            return f"has values that are not finite, or above {LIMIT:g}"
        return ""


def _too_loud(table: Sequence[_Inspected], faults: Sequence[str]) -> list[str]:
    """`faults`, and where there is none that a message is far louder than the upper median of those that say anything.

    With two replicas nobody can tell which of them is wrong.
    """
    norms = sorted(t.norm for t, fault in zip(table, faults, strict=True) if not fault and t.norm > 0)
    if not norms:
        return list(faults)
    bound = LOUDER * norms[len(norms) // 2]
    loud = f"is more than {LOUDER:g} times as loud as most"
    return [fault or (loud if t.norm > bound else "") for t, fault in zip(table, faults, strict=True)]
