"""Bad messages of many classes, and what guards make of them: `fuzz` is called by the tests and by the gate."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch import Tensor

import detonation as dt
from detonation.core.codec.aggregate import Coefficients, aggregate
from detonation.core.codec.codec import Codec
from detonation.core.codec.message_rows import joined
from detonation.core.codec.precision import Float
from detonation.core.codec.received import Received
from detonation.core.integrity.fault_counts import FaultCounts
from detonation.core.integrity.guard import Guard, Stage
from detonation.core.integrity.message import HEADER_BYTES, Header, Message, hash63

ROWS, REPLICAS, STEP, SEED, SCHEMA = 60, 3, 7, 1, "a schema"
SCHEMES = {
    "list": dt.demo(topk=2, chunk=100),  # seven bits can say more than 99
    "list-sign": dt.demo(topk=4, chunk=64, precision="sign"),
    "bitmap-2bit": dt.demo(topk=9, chunk=16, precision="2bit"),
    "bitmap-odd": dt.demo(topk=5, chunk=10, precision="bf16"),
    "shared": dt.schemes.random(rate=1 / 4),
    "int8": dt.schemes.random(rate=1 / 4, precision="int8"),
    "4bit": dt.schemes.random(rate=1 / 4, precision="4bit"),
}
FLOATS, CODES = ("list", "bitmap-odd", "shared"), ("list-sign", "bitmap-2bit", "int8", "4bit")
SIGNED, BITMAPS = ("list-sign", "bitmap-2bit", "4bit"), ("bitmap-2bit", "bitmap-odd")
Parts = list[Tensor]


@dataclass(frozen=True)
class Case:
    """An honest message, those near it (of the step before, of another replica), and what makes it bad."""

    codec: Codec
    parts: Parts
    earlier: Parts
    others: Parts
    stamp: Header
    random: torch.Generator

    def below(self, limit: int) -> int:
        return int(torch.randint(0, limit, (), generator=self.random))

    def bytes_like(self, line: Tensor) -> Tensor:
        return torch.randint(0, 256, line.shape, dtype=torch.uint8, generator=self.random)

    def word(self, at: int, value: int) -> Parts:
        """With another word in the header, which no longer adds up."""
        header = self.parts[0].clone()
        header[at] = value
        return [header, *self.parts[1:]]

    def flipped(self, at: int) -> Parts:
        return self.word(at, int(self.parts[0][at]) ^ 1 << self.below(62))

    def line(self) -> Tensor:
        return line_of(self.parts)

    def cut(self, line: Tensor) -> Parts:
        """A header and tensors from their bytes."""
        pieces = line.split([part.nbytes for part in self.parts])
        return [
            x.clone().view(part.dtype).view(part.shape)
            for x, part in zip(pieces, self.parts, strict=True)
        ]

    def meant(self, content: Parts | None = None, **stamp: int) -> Parts:
        """With another content or header that adds up all the same: by somebody who means it."""
        return sealed(replace(self.stamp, **stamp), content or self.parts[1:])

    def with_values(self, change: Callable[[Tensor], object]) -> Parts:
        """With other values, or other statistics where the values are codes."""
        values, *indices = (part.clone() for part in self.parts[1:])
        if values.is_floating_point():
            change(values.view(-1))
            return self.meant([values, *indices])
        precision, sent = self.codec.precision, ROWS * self.codec.selection.k
        codes = len(values) - 2 * precision.statistics * -(-sent // precision.block)
        statistics = values[codes:].clone().view(torch.bfloat16)
        change(statistics)
        return self.meant([torch.cat([values[:codes], statistics.view(torch.uint8)]), *indices])

    def with_columns(self, change: Callable[[Tensor], object]) -> Parts:
        """With other columns: a bitmap, or packed numbers."""
        values, indices = (part.clone() for part in self.parts[1:])
        change(indices)
        return self.meant([values, indices])

    def with_one_value(self, value: float) -> Parts:
        return self.with_values(lambda sent: sent[self.below(len(sent)) :][:1].fill_(value))


Bad = Callable[[Case], Parts]
CLASSES: dict[str, tuple[Bad, tuple[str, ...]]] = {}
"""What is done to an honest message, and to those of which schemes."""


def bad(*schemes: str) -> Callable[[Bad], Bad]:
    def add(function: Bad) -> Bad:
        CLASSES[function.__name__.replace("_", " ")] = function, schemes or tuple(SCHEMES)
        return function

    return add


for _at, _name in enumerate(
    ("identity", "schema", "step", "origin", "length", "status", "digest", "checksum")
):
    CLASSES[f"one bit of the {_name} flipped"] = (
        (lambda case, at=_at: case.flipped(at)),
        tuple(SCHEMES),
    )
for _name, _value in (
    ("NaN", float("nan")),
    ("infinity", float("inf")),
    ("minus infinity", float("-inf")),
):
    CLASSES[_name] = (lambda case, value=_value: case.with_one_value(value)), tuple(SCHEMES)


@bad()
def another_schema(case: Case) -> Parts:
    return case.meant(schema=hash63("another"))


@bad()
def another_step(case: Case) -> Parts:
    return case.meant(step=STEP + 1 + case.below(9))


@bad()
def a_sender_that_does_not_exist(case: Case) -> Parts:
    return case.meant(sender=REPLICAS + case.below(9))


@bad()
def another_place(case: Case) -> Parts:
    return case.meant(place=1 + case.below(9))


@bad()
def a_status_that_does_not_exist(case: Case) -> Parts:
    return case.meant(status=2 + case.below(99))


@bad()
def a_negative_status(case: Case) -> Parts:
    return case.meant(status=-1 - case.below(99))


@bad()
def replayed(case: Case) -> Parts:
    return case.earlier


@bad()
def what_another_replica_said(case: Case) -> Parts:
    return case.others


@bad()
def one_bit_of_the_content_flipped(case: Case) -> Parts:
    line = case.line()
    line[HEADER_BYTES + case.below(len(line) - HEADER_BYTES)] ^= 1 << case.below(8)
    return case.cut(line)


@bad()
def truncated(case: Case) -> Parts:
    line = case.line()
    line[HEADER_BYTES + case.below(len(line) // 2) :] = 0
    return case.cut(line)


@bad()
def moved_by_some_bytes(case: Case) -> Parts:
    line = case.line()
    return case.cut(line.roll(1 + case.below(len(line) - 1)))


@bad()
def halves_swapped(case: Case) -> Parts:
    line = case.line()
    content = line[HEADER_BYTES:]
    return case.cut(torch.cat([line[:HEADER_BYTES], content.roll(len(content) // 2)]))


@bad()
def another_byte_order(case: Case) -> Parts:
    line = case.line()
    whole = len(line) // 4 * 4
    return case.cut(torch.cat([line[:whole].view(-1, 4).flip(1).reshape(-1), line[whole:]]))


@bad()
def all_zeros(case: Case) -> Parts:
    return case.cut(torch.zeros_like(case.line()))


@bad()
def all_ones(case: Case) -> Parts:
    return case.cut(torch.full_like(case.line(), 255))


@bad()
def random_bytes(case: Case) -> Parts:
    return case.cut(case.bytes_like(case.line()))


@bad()
def random_content(case: Case) -> Parts:
    line = case.line()
    return case.cut(torch.cat([line[:HEADER_BYTES], case.bytes_like(line[HEADER_BYTES:])]))


@bad(*FLOATS)
def huge(case: Case) -> Parts:
    return case.with_one_value(1e30)


@bad(*FLOATS)
def a_million_times_as_loud_and_against(case: Case) -> Parts:
    return case.with_values(lambda sent: sent.mul_(-1e6))


@bad(*SIGNED)
def statistics_of_the_wrong_sign(case: Case) -> Parts:
    return case.with_values(lambda sent: sent[:1].fill_(-1.0))


@bad("list")
def a_column_outside_of_its_row(case: Case) -> Parts:
    return case.with_columns(lambda sent: sent[:2].fill_(0xFF))


@bad("list")
def a_column_twice_in_a_row(case: Case) -> Parts:
    return case.with_columns(lambda sent: sent[:2].zero_())


@bad("list", *BITMAPS)
def random_columns(case: Case) -> Parts:
    return case.with_columns(lambda sent: sent.copy_(case.bytes_like(sent)))


@bad(*BITMAPS)
def a_bitmap_too_full(case: Case) -> Parts:
    return case.with_columns(lambda sent: sent[:2].fill_(0xFF))


@bad(*BITMAPS)
def a_bitmap_too_empty(case: Case) -> Parts:
    return case.with_columns(lambda sent: sent[:2].zero_())


class Seen(FaultCounts):
    """A ledger that also keeps whom it heard of and why."""

    def __init__(self, replica: int) -> None:
        super().__init__(["w"], replica)
        self.named: list[tuple[int, str]] = []

    def refuse(self, sender: int, fault: str, step: int) -> None:
        self.named.append((sender, fault))
        super().refuse(sender, fault, step)

    def _warn(self, step: int, sender: int, text: str) -> None:
        pass  # a thousand lines that nobody reads


def guard(
    scheme: dt.schemes.Scheme, replica: int, ledger: FaultCounts | None = None, late: bool = False
) -> Guard:
    return Guard(["w"], SCHEMA, 0, replica, 0, ledger or Seen(replica), late)


def line_of(parts: Parts) -> Tensor:
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])


def parts_of(codec: Codec, message: Tensor) -> Parts:
    """The values of a message, in their type or as codes with statistics, and its indices if it carries any."""
    precision, k = codec.precision, codec.selection.k
    values, indices = message.split(
        [precision.nbytes(ROWS, k), len(message) - precision.nbytes(ROWS, k)]
    )
    if isinstance(precision, Float):
        values = values.view(precision.dtype).view(ROWS, k)
    return [values, indices] if len(indices) else [values]


def sealed(header: Header, content: Parts) -> Parts:
    """The header and tensors of a message."""
    message = joined([[line_of(content)[None]]], HEADER_BYTES)
    header.seal(message, len(line_of(content)))
    return [message[0, :HEADER_BYTES].clone().view(torch.int64), *content]


def opened(
    scheme: dt.schemes.Scheme, guard: Guard, arrived: list[Parts], shared: Tensor | None, step: int
) -> Received:
    """The messages of all replicas as an exchange opens them."""
    lines = torch.stack([line_of(parts) for parts in arrived])
    messages = joined([[lines[:, HEADER_BYTES:]]], HEADER_BYTES, lines[:, :HEADER_BYTES])
    message = Message(step, scheme.codec, arrived=[messages])
    content = guard.open(message, Stage(scheme.codec, ROWS, scheme.aggregation, ROWS), shared)
    if not scheme.aggregation.rowwise:
        content.weigh()
    return content


@cache
def honest(name: str) -> tuple[dict[tuple[int, int], Parts], Tensor | None]:
    """What each replica says at this step and the one before, by (replica, step); the columns that all know."""
    scheme, said = SCHEMES[name], {}
    for step in (STEP - 1, STEP):
        for replica in range(REPLICAS):
            generator = torch.Generator().manual_seed(100 * step + replica)
            flat = torch.randn(ROWS, scheme.codec.selection.chunk, generator=generator)
            selected = scheme.codec.select(flat, step, SEED)
            header = Header(hash63(SCHEMA), step, 0, replica)
            said[replica, step] = sealed(
                header, parts_of(scheme.codec, scheme.codec.encode(selected))
            )
    return said, selected.indices if scheme.codec.selection.shared else None


@dataclass
class Result:
    """How many messages of a class were tried; refused with their sender named; applied in any part."""

    tried: int = 0
    refused: int = 0
    applied: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


def fuzz(seed: int, count: int, late: bool = False) -> dict[str, Result]:
    """Sends `count` bad messages of all classes in turn, to their senders and to another; the outcome by class.

    late: the guards decide as on an accelerator, and say so afterwards.
    """
    random = torch.Generator().manual_seed(seed)
    results = {name: Result() for name in CLASSES}
    for trial in range(count):
        name = list(CLASSES)[trial % len(CLASSES)]
        function, schemes = CLASSES[name]
        _try(results[name], function, schemes[trial // len(CLASSES) % len(schemes)], random, late)
    return results


def _try(result: Result, function: Bad, name: str, random: torch.Generator, late: bool) -> None:
    said, shared = honest(name)
    scheme, sender = SCHEMES[name], int(torch.randint(0, REPLICAS, (), generator=random))
    other = (sender + 1) % REPLICAS
    stamp = Header(hash63(SCHEMA), STEP, 0, sender)
    case = Case(
        scheme.codec, said[sender, STEP], said[sender, STEP - 1], said[other, STEP], stamp, random
    )
    arrived = [said[replica, STEP] for replica in range(REPLICAS)]
    arrived[sender] = function(case)
    result.tried += 1
    outcomes = [_received(scheme, replica, arrived, shared, late) for replica in (sender, other)]
    result.refused += all(named == [sender] for named, _, _ in outcomes)
    without = silent(name, sender)
    result.applied += any(not torch.equal(update, without) for _, _, update in outcomes)
    result.reasons.update(reason for _, reasons, _ in outcomes for reason in set(reasons))


def _received(
    scheme: dt.schemes.Scheme, replica: int, arrived: list[Parts], shared: Tensor | None, late: bool
) -> tuple[list, list, Tensor]:
    """Whom `replica` refuses and why, and the update that it would apply."""
    ledger = Seen(replica)
    received = opened(scheme, guard(scheme, replica, ledger, late), arrived, shared, STEP)
    assert not (late and ledger.named)
    ledger.catch_up(STEP)
    update = aggregate(received.whole(), scheme.aggregation, scheme.codec.selection.chunk)
    return [sender for sender, _ in ledger.named], [reason for _, reason in ledger.named], update


@cache
def silent(name: str, sender: int) -> Tensor:
    """What is agreed on where `sender` says nothing but zeros, by the codec alone."""
    said, shared = honest(name)
    codec = SCHEMES[name].codec
    values = torch.stack(
        [codec.precision.decode(said[r, STEP][1], ROWS, codec.selection.k) for r in range(REPLICAS)]
    )
    values[sender] = 0
    indices = shared
    if shared is None:
        indices = torch.stack(
            [
                codec.index_coding.decode(said[r, STEP][2], ROWS, torch.int64)
                for r in range(REPLICAS)
            ]
        )
    return aggregate(
        Coefficients(values, indices), SCHEMES[name].aggregation, codec.selection.chunk
    )
