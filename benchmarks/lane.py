"""One lane of a warp, played: which instructions of a kernel's machine code (SASS) run, with the arguments of a launch.

Control flow needs few instructions: integers, predicates, division. These are computed as a GPU does; every other
result, and whatever is read from memory that nobody described, is unknown. So a loop runs as often as on the GPU, also
one that the assembler has unrolled, and nothing has to be guessed from the code's shape. A branch on an unknown value
is taken as its `Path` says, and counted: who reports the number of instructions reports these branches, too.

The lane is lane 0 of warp 0; other warps of these kernels take the same way. Instructions whose guard is false count:
they take their turn. Supported: compute capability 8.0 to 9.0.
"""

import re
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise

import numpy as np

MASK = 0xFFFFFFFF
Known = int | None
"""32 bits of a register, or None where they are unknown."""


@dataclass(frozen=True)
class Instruction:
    """An instruction as nvdisasm prints it. stall: the cycles that the assembler has the warp wait before its next."""

    at: int
    guard: str
    name: str
    operands: tuple[str, ...]
    stall: int

    @property
    def base(self) -> str:
        """The name without its modifiers."""
        return self.name.split(".")[0]


@dataclass
class Code:
    """The machine code of a kernel: its instructions, and the number of the one that each label stands for."""

    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    parameters_at: int = 0x210
    """Where parameters begin in constant memory."""

    @classmethod
    def parse(cls, text: str) -> "Code":
        """Reads what `nvdisasm -hex` prints."""
        code = cls()
        if bank := re.search(r"EIATTR_PARAM_CBANK.*?\.short\s+(0x[0-9a-f]+)", text, re.DOTALL):
            code.parameters_at = int(bank[1], 16)
        lines = text.splitlines()
        for number, line in enumerate(lines):
            if label := re.match(r"\s*([.$\w]+):\s*$", line):
                code.labels[label[1]] = len(code.instructions)
            found = re.match(
                r"\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z]\S*)\s*(.*?)\s*;", line
            )
            if found:
                high = re.search(r"/\* 0x([0-9a-f]{16}) \*/", lines[number + 1])
                stall = int(high[1], 16) >> 41 & 15 if high else 1
                operands = tuple(filter(None, re.split(r",\s*", found[4])))
                guard = (found[2] or "").strip().removeprefix("@")
                code.instructions.append(
                    Instruction(int(found[1], 16), guard, found[3], operands, max(1, stall))
                )
        return code


@dataclass
class Path:
    """How often each instruction ran.

    Args:
        counts: By the number of the instruction.
        unknown: Branches on unknown values, by the number of the instruction.
        turns: How often each jump backwards was taken, by the same.
    """

    counts: Counter[int]
    unknown: Counter[int]
    turns: Counter[int]


def play(
    code: Code,
    constants: Mapping[int, int],
    program: int,
    memory: Mapping[int, int] | None = None,
    arrives: Sequence[int] = (),
    most: int = 5_000_000,
) -> Path:
    """Plays one lane of program number `program`.

    Args:
        constants: Words of constant memory by their addresses; unknown where absent.
        memory: Words of global memory by their addresses; the kernel's own writes are not followed.
        arrives: What atomic additions to global memory find there, one after the other; 0 from then on.
        most: Instructions, after which it raises RuntimeError.
    """
    lane = _Lane(constants, program, memory or {}, list(arrives))
    blocks = _blocks(code)
    by_address = {each.at: number for number, each in enumerate(code.instructions)}
    runs, unknown, turns = Counter[int](), Counter[int](), Counter[int]()
    at = ran = 0
    while True:
        block = blocks[at]
        runs[at] += 1
        ran += block.end - at
        if ran > most:
            raise RuntimeError(f"more than {most} instructions")
        for guard, act, each in block.acts:
            sure = guard(lane)
            if sure is not False:
                act(lane)
                if sure is None:  # what it would have written is unknown
                    _forget(each, lane)
        at = block.end
        if (jump := block.jump) is None:
            continue
        sure = block.guard(lane)
        if sure is None:
            unknown[at - 1] += 1
        if not sure:
            continue
        if jump.base == "EXIT":
            counts = Counter(
                {
                    each: count
                    for begin, count in runs.items()
                    for each in range(begin, blocks[begin].end)
                }
            )
            return Path(counts, unknown, turns)
        if jump.base == "RET":
            goes = by_address[lane.registers[_number(jump.operands[0].split()[0])]]  # type: ignore[index]
        else:
            goes = code.labels[jump.operands[-1].strip("`()")]
        turns[at - 1] += goes < at
        at = goes


@dataclass(frozen=True)
class _Block:
    """Instructions that run one after the other, up to `end`: those that can matter to a jump, and the jump."""

    end: int
    acts: list[tuple[Callable[["_Lane"], bool | None], "Act", Instruction]]
    jump: Instruction | None
    guard: Callable[["_Lane"], bool | None]


def _blocks(code: Code) -> dict[int, _Block]:
    """The blocks by the number of their first instruction."""
    instructions = code.instructions
    jumps = {
        number
        for number, each in enumerate(instructions)
        if each.base in _JUMPS and ".DIV" not in each.name
    }
    starts = sorted(
        {0, *code.labels.values(), *(number + 1 for number in jumps)} - {len(instructions)}
    )
    matters, found = _matters(instructions), dict[int, _Block]()
    for begin, end in pairwise([*starts, len(instructions)]):
        acts = [
            (_predicate(each.guard or "PT"), _act(each), each)
            for number, each in enumerate(instructions[begin:end], begin) if number in matters and number not in jumps
        ]  # fmt: skip
        jump = instructions[end - 1] if end - 1 in jumps else None
        guards = [_predicate(text) for text in (_guards(jump) if jump else [])]
        found[begin] = _Block(
            end,
            acts,
            jump,
            lambda lane, guards=guards: reduce(_and, (g(lane) for g in guards), True),
        )
    return found


def _guards(jump: Instruction) -> list[str]:
    """The predicates that must be true for a jump."""
    return [text for text in (jump.guard, *jump.operands[:-1]) if text and _is_predicate(text)]


def _matters(instructions: Sequence[Instruction]) -> set[int]:
    """The instructions on whose results a jump can depend: from the jumps back to what their operands are made of."""
    found, wanted, before = set[int](), set[str](), -1
    for each in instructions:
        if each.base in _JUMPS:
            wanted |= (
                _read(each) if each.base == "RET" else {text.lstrip("!") for text in _guards(each)}
            )
    while len(found) + len(wanted) != before:
        before = len(found) + len(wanted)
        for number, each in enumerate(instructions):
            if each.base in _JUMPS:
                continue
            if _written(each) & wanted:
                found.add(number)
                wanted.add(each.guard.lstrip("!"))
                if each.base.removeprefix("U") in _COMPUTED:
                    wanted |= _read(each)
    return found


def _read(each: Instruction) -> set[str]:
    """The names of what an instruction reads, and more: a register that it writes, and the second of pairs."""
    text = " ".join(each.operands)
    numbers = {_number(name) for name in re.findall(r"\bU?R(?:\d+|Z)\b", text)}
    names = {f"R{number + more}" for number in numbers for more in (0, 1)} | set(
        re.findall(r"\bU?P[0-6]\b", text)
    )
    if each.base == "P2R":
        names |= {f"P{number}" for number in range(7)}
    return names | {"memory"} if each.base in ("LDS", "LDL") else names


def _written(each: Instruction) -> set[str]:
    if each.base in ("STS", "STL"):
        return {"memory"}
    if each.base == "R2P":
        return {f"P{number}" for number in range(7)}
    decided, written, _ = _outputs(each)
    names = {f"{'U' * (number > 7)}P{number % 8}" for number in decided}
    return (
        names
        if written is None
        else names | {f"R{written + more}" for more in range(_width(each.name))}
    )


_JUMPS = {"BRA", "EXIT", "CALL", "RET"}
_SPECIAL = {
    "SR_TID.X": 0,
    "SR_LANEID": 0,
    "SR_CgaCtaId": 0,
    "SR_TID.Y": 0,
    "SR_TID.Z": 0,
    "SR_LTMASK": 0,
}


class _Lane:
    def __init__(
        self,
        constants: Mapping[int, int],
        program: int,
        memory: Mapping[int, int],
        arrives: list[int],
    ) -> None:
        self.constants, self.memory, self.arrives = constants, memory, arrives
        self.special = _SPECIAL | {"SR_CTAID.X": program, "SR_CTAID.Y": 0, "SR_CTAID.Z": 0}
        self.registers: list[Known] = [None] * 512  # R0 to RZ, then UR0 to URZ
        self.predicates: list[bool | None] = [None] * 16  # P0 to PT, then UP0 to UPT
        self.kept: dict[tuple[str, int], Known] = {}  # shared and local memory
        self.registers[255] = self.registers[511] = 0
        self.predicates[7] = self.predicates[15] = True

    def write(self, number: int, value: Known) -> None:
        if number not in (255, 511):
            self.registers[number] = None if value is None else value & MASK

    def write_wide(self, number: int, value: Known) -> None:
        self.write(number, value)
        if number not in (255, 511):
            self.write(number + 1, None if value is None else value >> 32)

    def decide(self, number: int, value: bool | None) -> None:
        if number not in (7, 15):
            self.predicates[number] = value


Getter = Callable[[_Lane], Known]
Act = Callable[[_Lane], None]


def _number(name: str) -> int:
    """The number of a register in `_Lane.registers`."""
    name = name.split(".")[0].strip("-~|!")
    uniform = name.startswith("U")
    digits = name.lstrip("UR")
    return (256 if uniform else 0) + (255 if digits == "Z" else int(digits))


def _is_register(text: str) -> bool:
    return re.fullmatch(r"[-~|]*U?R(\d+|Z)[.\w|]*", text) is not None


def _is_predicate(text: str) -> bool:
    return re.fullmatch(r"!?U?P(\d|T)", text) is not None


def _predicate_number(text: str) -> int:
    text = text.lstrip("!")
    return (8 if text[0] == "U" else 0) + (7 if text[-1] == "T" else int(text[-1]))


def _predicate(text: str) -> Callable[[_Lane], bool | None]:
    number, negated = _predicate_number(text), text.startswith("!")

    def get(lane: _Lane) -> bool | None:
        found = lane.predicates[number]
        return found if found is None else found != negated

    return get


def _and(one: bool | None, other: bool | None) -> bool | None:
    if one is False or other is False:
        return False
    return None if one is None or other is None else True


def _or(one: bool | None, other: bool | None) -> bool | None:
    if one or other:
        return True
    return None if one is None or other is None else False


def _getter(text: str, wide: bool = False) -> Getter:
    """Reads an operand: 32 bits, or 64 of a pair."""
    sign, plain = text[0] if text[0] in "-~" else "", text.lstrip("-~")
    if plain.startswith("|"):
        return lambda lane: None
    if _is_register(plain):
        number = _number(plain)

        def raw(lane: _Lane) -> Known:
            low = lane.registers[number]
            if not wide or number in (255, 511):
                return low
            high = lane.registers[number + 1]
            return None if low is None or high is None else low | high << 32

    elif place := re.fullmatch(r"c\[0x0\]\[(U?R\w+)?\+?(0x[0-9a-f]+)?\]", plain):
        base = _getter(place[1]) if place[1] else lambda lane: 0
        offset = int(place[2] or "0", 16)

        def raw(lane: _Lane) -> Known:
            if (begin := base(lane)) is None:
                return None
            low = lane.constants.get(begin + offset)
            if not wide:
                return low
            high = lane.constants.get(begin + offset + 4)
            return None if low is None or high is None else low | high << 32

    elif re.fullmatch(r"0x[0-9a-f]+", plain):
        value = int(plain, 16)

        def raw(lane: _Lane) -> Known:
            return value

    else:
        return lambda lane: None
    if not sign:
        return raw
    mask = (1 << 64) - 1 if wide else MASK

    def signed(lane: _Lane) -> Known:
        found = raw(lane)
        if found is None:
            return None
        return (
            mask ^ found if sign == "~" else (mask ^ found) + 1
        )  # a carry more: that of a difference

    return signed


def _as_signed(value: int, bits: int = 32) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def _width(name: str) -> int:
    """The registers that an instruction writes."""
    if ".128" in name:
        return 4
    return (
        2
        if re.search(r"\.64\b|\.WIDE|I2F\.F64|F2F\.F64|^D[A-Z]{3}|F2I\.[US]64|^CS2R(?!\.32)", name)
        else 1
    )


def _outputs(each: Instruction) -> tuple[list[int], int | None, list[str]]:
    """The predicates that an instruction writes, the register, and the operands that it reads."""
    rest, decided = list(each.operands), list[int]()
    if each.base in (
        "STG",
        "STS",
        "STL",
        "BAR",
        "NOP",
        "R2P",
        "BSSY",
        "BSYNC",
        "RED",
        "MEMBAR",
        "WARPSYNC",
        "DEPBAR",
    ):
        return [], None, rest
    while rest and _is_predicate(rest[0]):
        decided.append(_predicate_number(rest.pop(0)))
    if each.base.lstrip("U") in ("ISETP", "FSETP", "DSETP", "PLOP3", "HSETP2", "PSETP", "FCHK"):
        more = 1 if each.base == "FCHK" else 2
        rest = list(each.operands[more:])
        return decided[:more], None, rest
    written = _number(rest.pop(0)) if rest and _is_register(rest[0]) else None
    while (
        rest
        and _is_predicate(rest[0])
        and each.base.lstrip("U") in ("IADD3", "LEA", "IMAD", "LOP3")
    ):
        decided.append(_predicate_number(rest.pop(0)))
    return decided, written, rest


def _forget(each: Instruction, lane: _Lane) -> None:
    decided, written, _ = _outputs(each)
    for number in decided:
        lane.decide(number, None)
    if written is not None:
        for more in range(_width(each.name) if written not in (255, 511) else 0):
            lane.write(written + more, None)


def _act(each: Instruction) -> Act:
    """What an instruction does to a lane."""
    name, parts = each.name, each.name.split(".")
    base = parts[0].removeprefix("U") if parts[0] not in ("UMOV", "ULDC") else parts[0][1:]
    decided, written, given = _outputs(each)
    predicates = [_predicate(text) for text in given if _is_predicate(text)]
    operands = [text for text in given if not _is_predicate(text)]
    if base == "R2P":
        return _from_register(operands)
    if base in ("STS", "STL") or base in ("LDS", "LDL"):
        return _kept(base, name, operands, written)
    if base in ("ISETP", "PLOP3", "FCHK"):
        return _deciding(base, parts, decided, operands, predicates)
    if written is None and not (base == "LOP3" and decided):
        return lambda lane: _forget(each, lane)
    to = 255 if written is None else written
    if base in ("LDG", "LD"):
        return _loading(name, operands, to)
    if base == "ATOMG":
        return lambda lane: lane.write(to, lane.arrives.pop(0) if lane.arrives else 0)
    if base == "LDC":
        get = _getter(operands[0], ".64" in name)
        return lambda lane: (
            lane.write_wide(to, get(lane)) if ".64" in name else lane.write(to, get(lane))
        )
    if base in ("S2R", "S2UR"):
        return lambda lane: lane.write(to, lane.special.get(operands[0]))
    if base == "VOTEU" and "ANY" in parts:  # in a branch that one lane takes alone
        return lambda lane: lane.write(to, 1)
    if base == "SHFL" and "IDX" in parts:
        number, which = _getter(operands[0]), _getter(operands[1])
        return lambda lane: lane.write(to, number(lane) if which(lane) == 0 else None)
    if base == "CS2R":
        value = 0 if operands[0] == "SRZ" else None
        return lambda lane: (
            lane.write_wide(to, value) if _width(name) == 2 else lane.write(to, value)
        )
    if base in ("IADD3", "VIADD", "LEA", "IMAD"):
        return _adding(base, parts, decided, to, operands, predicates)
    if base == "HFMA2" and operands[0].endswith("RZ"):  # a constant
        try:
            halves = [np.float16(float(text)).view(np.uint16) for text in operands[2:4]]
        except ValueError:
            return lambda lane: lane.write(to, None)
        return lambda lane: lane.write(to, int(halves[0]) << 16 | int(halves[1]))
    if base == "SEL" or base == "FSEL":
        return _selecting(to, operands, predicates)
    if base == "LOP3":
        return _logical(decided, to, operands)
    if base == "P2R":
        mask = int(operands[-1], 16)

        def packed(lane: _Lane) -> None:
            bits = [lane.predicates[number] for number in range(7) if mask >> number & 1]
            found = sum(
                bool(lane.predicates[number]) << number for number in range(7) if mask >> number & 1
            )
            lane.write(to, None if None in bits or ".B" in name else found)

        return packed
    if simple := _SIMPLE.get(base):
        wide = base == "I2F" and "U64" in parts
        getters = [_getter(text, wide) for text in operands]

        def computed(lane: _Lane) -> None:
            values = [get(lane) for get in getters]
            known = [value & MASK if not wide else value for value in values if value is not None]
            truths = [get(lane) for get in predicates]
            found = None
            if len(known) == len(values) and None not in truths:
                found = simple(parts, known, truths)
            lane.write_wide(to, found) if _width(name) == 2 else lane.write(to, found)

        return computed
    return lambda lane: _forget(each, lane)


def _from_register(operands: Sequence[str]) -> Act:
    get, mask = _getter(operands[1]), int(operands[2], 16)

    def act(lane: _Lane) -> None:
        value = get(lane)
        for number in range(7):
            if mask >> number & 1:
                lane.decide(number, None if value is None else bool(value >> number & 1))

    return act


def _address(text: str) -> Getter:
    """The address in brackets: `desc[UR4][R2.64+0x10]`, `[R1+UR4+0x8]`."""
    inside = text[text.rindex("[") + 1 : text.rindex("]")]
    getters = [_getter(part, wide=".64" in part) for part in inside.split("+")]

    def get(lane: _Lane) -> Known:
        values = [each(lane) for each in getters]
        return None if None in values else sum(values)  # type: ignore[arg-type]

    return get


def _loading(name: str, operands: Sequence[str], to: int) -> Act:
    address, words = _address(operands[0]), _width(name)

    def act(lane: _Lane) -> None:
        at = address(lane)
        for word in range(words):
            lane.write(to + word, None if at is None else lane.memory.get(at + 4 * word))

    return act


def _kept(base: str, name: str, operands: Sequence[str], written: int | None) -> Act:
    """Shared and local memory, which hold what this lane has written."""
    kind, words = base[2], _width(name)
    address = _address(next(text for text in operands if "[" in text))
    small = re.search(r"\.[US](8|16)\b", name) or "SM" in base
    source = operands[-1]

    def load(lane: _Lane) -> None:
        at = address(lane)
        for word in range(words):
            found = None if at is None or small else lane.kept.get((kind, at + 4 * word))
            if written is not None:
                lane.write(written + word, found)

    def store(lane: _Lane) -> None:
        if (at := address(lane)) is None:
            return
        for word in range(words):
            number = _number(source)
            value = lane.registers[number if number in (255, 511) else number + word]
            lane.kept[kind, at + 4 * word] = None if small else value

    return load if base.startswith("LD") else store


def _compare(how: str, one: int, other: int) -> bool:
    return {
        "LT": one < other, "LE": one <= other, "GT": one > other, "GE": one >= other, "EQ": one == other,
        "NE": one != other, "T": True, "F": False,
    }[how]  # fmt: skip


def _deciding(
    base: str,
    parts: Sequence[str],
    decided: Sequence[int],
    operands: Sequence[str],
    predicates: Sequence[Callable[[_Lane], bool | None]],
) -> Act:
    if base == "FCHK":  # numbers that a division does step by step: rare
        return lambda lane: lane.decide(decided[0], False)
    if base == "PLOP3":
        table = int(operands[0], 16)

        def looked_up(lane: _Lane) -> None:
            choices = [
                [False, True] if (value := get(lane)) is None else [value] for get in predicates
            ]
            found = {
                bool(table >> (4 * one + 2 * two + three) & 1)
                for one in choices[0] for two in choices[1] for three in choices[2]
            }  # fmt: skip
            lane.decide(decided[0], found.pop() if len(found) == 1 else None)
            for more in decided[1:]:
                lane.decide(more, None)

        return looked_up
    one, other = (_getter(text) for text in operands)
    how, unsigned, extended = parts[1], "U32" in parts, parts[-1] == "EX"
    join = _or if "OR" in parts else _and

    def compared(lane: _Lane) -> None:
        a, b = one(lane), other(lane)
        found: bool | None = None
        if a is not None and b is not None:
            a, b = (a & MASK, b & MASK) if unsigned else (_as_signed(a), _as_signed(b))
            found = _compare(how, a, b)
            if extended:
                low = predicates[1](lane)
                if how == "NE":
                    found = True if found else low
                elif a == b:
                    found = low
                elif how in ("GE", "LE"):
                    found = _compare(how, a, b)
        with_other = predicates[0](lane)
        lane.decide(decided[0], join(found, with_other))
        if len(decided) > 1:
            lane.decide(decided[1], join(None if found is None else not found, with_other))

    return compared


def _adding(
    base: str,
    parts: Sequence[str],
    decided: Sequence[int],
    to: int,
    operands: Sequence[str],
    predicates: Sequence[Callable[[_Lane], bool | None]],
) -> Act:
    """Sums and products of integers, with their carries."""
    wide, high = "WIDE" in parts, base == "IMAD" and "HI" in parts
    getters = [
        _getter(text, wide=(wide or high) and number == 2 and base == "IMAD")
        for number, text in enumerate(operands)
    ]
    signed = base == "IMAD" and "U32" not in parts

    def act(lane: _Lane) -> None:
        values = [get(lane) for get in getters]
        carries = [get(lane) for get in predicates] if "X" in parts else []
        if base == "IMAD" and 0 in values[:2]:
            values[:2] = [0, 0]
        if None in values or None in carries:
            found = None
        else:
            a, b, *more = values  # type: ignore[misc]
            carry = sum(map(bool, carries))
            if base == "IMAD":
                if wide or high:
                    a, b = (_as_signed(a), _as_signed(b)) if signed else (a & MASK, b & MASK)
                found = a * b + more[0] + carry
                found = found >> 32 if high else found
            elif base == "LEA":
                shift = more[-1] & 31
                if "SX32" in parts:
                    found = (_as_signed(a) >> (32 - shift) & MASK) + b + carry
                elif "HI" in parts:
                    found = (((more[0] & MASK) << 32 | a & MASK) >> (32 - shift) & MASK) + b + carry
                else:
                    found = (a << shift & MASK) + b + carry
            else:
                found = a + b + sum(more) + carry
        if wide:
            lane.write_wide(to, found)
        else:
            lane.write(to, found)
        for number, each in enumerate(decided):
            lane.decide(each, None if found is None else (found >> (64 if wide else 32)) > number)

    return act


def _selecting(
    to: int, operands: Sequence[str], predicates: Sequence[Callable[[_Lane], bool | None]]
) -> Act:
    one, other = (_getter(text) for text in operands)

    def act(lane: _Lane) -> None:
        which, a, b = predicates[0](lane), one(lane), other(lane)
        lane.write(to, a if which or a == b else b if which is False else None)

    return act


def _logical(decided: Sequence[int], to: int, operands: Sequence[str]) -> Act:
    getters, table = [_getter(text) for text in operands[:3]], int(operands[3], 16)

    def act(lane: _Lane) -> None:
        values = [get(lane) for get in getters]
        found, unknown = 0, 0
        for row in range(8):  # bits: where an operand is unknown, both of its values
            if table >> row & 1:
                bits = MASK
                for value, place in zip(values, (4, 2, 1), strict=True):
                    if value is not None:
                        bits &= value if row & place else ~value
                found |= bits & MASK
            else:
                bits = MASK
                for value, place in zip(values, (4, 2, 1), strict=True):
                    if value is not None:
                        bits &= value if row & place else ~value
                unknown |= bits & MASK
        result = None if found & unknown else found
        lane.write(to, result)
        for each in decided:
            lane.decide(each, None if result is None else result != 0)

    return act


def _shift(parts: list[str], values: list[int], _: list[bool]) -> int:
    low, by, high = values
    pair, by = high << 32 | low, min(by, 64)
    if "L" in parts:
        found = pair << by >> 32 if "HI" in parts else low << by
        return found & MASK
    if "HI" in parts:
        return (_as_signed(high) if "S32" in parts else high) >> min(by, 32) & MASK
    return (_as_signed(pair, 64) if "S64" in parts else pair) >> by & MASK


def _extend(parts: list[str], values: list[int], _: list[bool]) -> int:
    value, bits = values[0], values[1]
    value &= (1 << bits) - 1
    return value if "U32" in parts else _as_signed(value, bits) & MASK


def _extreme(parts: list[str], values: list[int], truths: list[bool]) -> int:
    chosen = values if "U32" in parts else [_as_signed(value) for value in values]
    return (min(chosen) if truths[0] else max(chosen)) & MASK


def _added_extreme(parts: list[str], values: list[int], truths: list[bool]) -> int:
    return _extreme(parts, [values[0] + values[1] & MASK, values[2]], truths)


def _permuted(_: list[str], values: list[int], __: list[bool]) -> int:
    octets = struct.pack("<II", values[0], values[2])
    found = 0
    for place in range(4):
        which = values[1] >> 4 * place & 15
        octet = octets[which & 7]
        found |= (octet if which < 8 else 255 * (octet >> 7)) << 8 * place
    return found


def _bits(number: float) -> int:
    return int(np.float32(number).view(np.uint32))


def _float(bits: int) -> np.float32:
    return np.uint32(bits).view(np.float32)


def _to_float(parts: list[str], values: list[int], _: list[bool]) -> int:
    unsigned = "U32" in parts or "U64" in parts
    value = values[0] if unsigned else _as_signed(values[0])
    found = np.float32(value)
    if "RP" in parts and int(found) < value:
        found = np.nextafter(found, np.float32(np.inf))
    return _bits(found)


def _to_integer(parts: list[str], values: list[int], _: list[bool]) -> int:
    bits = 64 if "U64" in parts or "S64" in parts else 32
    number = float(_float(values[0]))
    return (
        max(0, min(int(number), (1 << bits) - 1)) if number == number and abs(number) < 2**70 else 0
    )


def _approximate(parts: list[str], values: list[int], _: list[bool]) -> int | None:
    number = float(_float(values[0]))
    return _bits(1 / number) if parts[1] == "RCP" and number else None


def _first(_: list[str], values: list[int], __: list[bool]) -> int:
    return values[0]


_SIMPLE: dict[str, Callable[[list[str], list[int], list[bool]], int | None]] = {
    "MOV": _first, "R2UR": _first, "SHF": _shift, "SGXT": _extend, "VIMNMX": _extreme, "IMNMX": _extreme,
    "VIADDMNMX": _added_extreme, "PRMT": _permuted, "I2F": _to_float, "I2FP": _to_float, "F2I": _to_integer,
    "MUFU": _approximate, "IABS": lambda _, values, __: abs(_as_signed(values[0])) & MASK,
    "POPC": lambda _, values, __: values[0].bit_count(), "FLO": lambda _, values, __: values[0].bit_length() - 1 & MASK,
}  # fmt: skip
_COMPUTED = {
    *_SIMPLE, "R2P", "P2R", "STS", "STL", "LDS", "LDL", "LDG", "LDC", "ISETP", "PLOP3", "IADD3", "VIADD", "LEA", "IMAD",
    "SEL", "FSEL", "LOP3", "SHFL",
}  # fmt: skip
"""The instructions whose results are computed; those of others are unknown, whatever they read."""
