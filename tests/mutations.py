"""Small faults that code can have, found in its syntax tree, and a draw among them.

A fault is an operator, a comparison, a number, an axis, a count of bytes, a call or a write that is
changed. None is in an annotation, a decorator, a docstring, an assertion, the text of an error or a
line of the log. Nor is one drawn that no program can show: a pause that is left out, a strict
comparison with a clock that is not strict, twice a size where only its truth counts.
"""

import ast
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path("src/detonation")
ROOMS = ("core", "feed", "checkpoint", "cluster/survive")

SWAPPED = {
    "sign": {ast.Add: "-", ast.Sub: "+"},
    "factor": {ast.Mult: "+", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//"},
    "comparison": {
        ast.Lt: "<=",
        ast.LtE: "<",
        ast.Gt: ">=",
        ast.GtE: ">",
        ast.Eq: "!=",
        ast.NotEq: "==",
    },
    "logic": {ast.And: "or", ast.Or: "and"},
}
EXTREMES = {"min": "max", "max": "min"}
BYTES = {"nbytes", "itemsize", "element_size"}  # as attributes and as calls
AXES = {"dim", "dims", "axis"}

Position = tuple[int, int]
Change = tuple[Position, Position, str, str]
"""From where, to where, the kind of fault, and the new text."""


@dataclass(frozen=True)
class Fault:
    """The text between two columns of a line, and its replacement.

    line: from 1. start, end: in bytes, from 0. name: the file, the kind, and the line before and
    after; it has no number of a line, so that it stays when code above it changes.
    """

    path: str
    line: int
    start: int
    end: int
    kind: str
    new: str
    name: str

    @property
    def room(self) -> str:
        """The part of the package that has the file."""
        return next(room for room in ROOMS if self.path.startswith(f"{SOURCE}/{room}/"))

    def applied(self, source: str) -> str:
        """The source with the fault in it."""
        lines = source.encode().split(b"\n")
        lines[self.line - 1] = _replaced(lines[self.line - 1], self.start, self.end, self.new)
        return b"\n".join(lines).decode()


def faults(path: str, source: str) -> list[Fault]:
    """All faults that `source` can have, each once."""
    found: dict[Change, None] = {}
    for node in _code(ast.parse(source)):
        for change in _changes(node, source):
            if change[0][0] == change[1][0]:  # on one line
                found[change] = None
    named = []
    names: Counter[str] = Counter()
    for start, end, kind, new in sorted(found):
        line = _line(source, start[0])
        before = line.decode().strip()
        after = _replaced(line, start[1], end[1], new).decode().strip()
        name = f"{path.removeprefix(f'{SOURCE}/')}, {kind}: {before}  ->  {after}"
        names[name] += 1
        if names[name] > 1:
            name += f"  (number {names[name]})"
        named.append(Fault(path, *start, end[1], kind, new, name))
    return named


def drawn(root: Path, count: int, seed: int) -> list[Fault]:
    """`count` faults of the rooms below `root`, each kind equally often as far as it has so many.

    Which faults of a kind are drawn depends on their names alone: a change of the code leaves most
    of the draw as it is.
    """
    kinds: dict[str, list[Fault]] = {}
    for room in ROOMS:
        for path in sorted((root / SOURCE / room).rglob("*.py")):
            for fault in faults(path.relative_to(root).as_posix(), path.read_text()):
                kinds.setdefault(fault.kind, []).append(fault)
    for each in kinds.values():
        each.sort(key=lambda fault: hashlib.sha256(f"{seed} {fault.name}".encode()).digest())
    most = max(map(len, kinds.values()))
    turns = [each[turn] for turn in range(most) for _, each in sorted(kinds.items()) if each[turn:]]
    return turns[:count]


def _changes(node: ast.AST, source: str) -> Iterator[Change]:
    """What may be changed at a node."""
    match node:
        case ast.BinOp(left=left, op=op, right=right) if not (_text(left) or _text(right)):
            yield from _between(left, right, op, source)
        case ast.Compare(left=left, ops=[op], comparators=[right]) if not _by_clock(node):
            yield from _between(left, right, op, source)
        case ast.BoolOp(op=op, values=[left, right, *_]):
            yield from _between(left, right, op, source)
        # the operand may stand in parentheses, which are no part of it
        case ast.UnaryOp(op=ast.USub()):
            yield _start(node), _after(node, "-", source), "sign", ""
        case ast.UnaryOp(op=ast.Not()):
            yield _start(node), _after(node, "not ", source), "logic", ""
        case ast.keyword(arg=str() as name, value=ast.Constant(value=int() as axis) as value) if (
            name in AXES
        ):
            yield _start(value), _end(value), "axis", str(1 - axis if axis in (0, 1) else axis + 1)
        case ast.Constant(value=bool() as flag):
            yield _start(node), _end(node), "flag", str(not flag)
        case ast.Constant(value=int() as number):
            yield _start(node), _end(node), "number", str(number + 1)
        case ast.Attribute(attr=name) if name in BYTES and not _called(node, source):
            yield _end(node), _end(node), "bytes", " * 2"
        case ast.Call(func=ast.Attribute(attr=name)) if name in BYTES:
            yield _end(node), _end(node), "bytes", " * 2"
        case ast.Call(func=ast.Name(id=name) as called) if name in EXTREMES:
            yield _start(called), _end(called), "extreme", EXTREMES[name]
        case ast.Expr(value=ast.Call()):
            yield _start(node), _end(node), "dropped call", "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield _start(node), _end(node), "dropped write", "pass"
        case ast.AugAssign(op=ast.Add() | ast.Sub() as op, target=target, value=value):
            yield from _augmented(op, target, value, source)


def _between(left: ast.expr, right: ast.expr, op: ast.AST, source: str) -> Iterator[Change]:
    """The operator between two operands, where all are on one line."""
    for kind, swapped in SWAPPED.items():
        if type(op) in swapped and left.end_lineno == right.lineno:
            _, column = _end(left)
            gap = _line(source, right.lineno)[column : right.col_offset].decode()
            old = gap.strip("() ")
            at = column + gap.index(old)
            yield (right.lineno, at), (right.lineno, at + len(old)), kind, swapped[type(op)]


def _augmented(op: ast.AST, target: ast.expr, value: ast.expr, source: str) -> Iterator[Change]:
    """`+=` and `-=`, on one line with their operands."""
    line, column = _end(target)
    sign = "+=" if isinstance(op, ast.Add) else "-="
    at = _line(source, line).find(sign.encode(), column)
    if at >= 0 and value.lineno == line:
        yield (line, at), (line, at + 2), "sign", "-=" if sign == "+=" else "+="


def _text(node: ast.expr) -> bool:
    """True for a text or a list that is written out: another operator is a TypeError at once."""
    if isinstance(node, ast.JoinedStr | ast.List | ast.Tuple):
        return True
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def _called(node: ast.Attribute, source: str) -> bool:
    line, column = _end(node)
    return _line(source, line)[column : column + 1] == b"("


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below this one that decide what runs."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr) or _told(node):
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or _never_false(child) or _unseen(node, child):
                continue
            yield child
            if not (isinstance(child, ast.keyword) and child.arg in AXES):  # its number is an axis
                yield from _code(child)


def _never_false(node: ast.AST) -> bool:
    """True for a branch for types alone, and for `strict` of zip, which is an assertion."""
    if isinstance(node, ast.keyword):
        return node.arg == "strict"
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def _told(node: ast.AST) -> bool:
    """True for a line of the log, and for a pause."""
    match node:
        case ast.Expr(ast.Call(ast.Attribute(ast.Name("_log")))):
            return True
        case ast.Expr(ast.Call(ast.Attribute(ast.Name("time"), "sleep"))):
            return True
    return False


def _unseen(node: ast.AST, child: ast.AST) -> bool:
    """True for a child with a fault that no program can show."""
    if isinstance(node, ast.If) and child is node.test:
        return isinstance(child, ast.Attribute) and child.attr in BYTES
    return _told(child)


def _by_clock(node: ast.Compare) -> bool:
    """True for a comparison of moments, which are never equal."""
    return "monotonic" in ast.dump(node)


def _replaced(line: bytes, start: int, end: int, new: str) -> bytes:
    return line[:start] + new.encode() + line[end:]


def _line(source: str, number: int) -> bytes:
    return source.encode().split(b"\n")[number - 1]


def _start(node: ast.AST) -> Position:
    return node.lineno, node.col_offset  # type: ignore[attr-defined]


def _after(node: ast.AST, operator: str, source: str) -> Position:
    """The position after an operator with which a node begins, and after the blank of a word."""
    line, column = _start(node)
    found = _line(source, line)[column:].startswith(operator.encode())
    return line, column + len(operator if found else operator.strip())


def _end(node: ast.AST) -> Position:
    return node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]
