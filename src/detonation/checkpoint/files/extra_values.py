"""Encodes the values that a caller saves in a checkpoint as JSON. Decoding gives values that are
equal in value and type.

A value that would not decode to an equal value is refused, and the error names its key. Plain JSON
values are written unchanged: text, booleans, integers, finite floats, None, lists, and dicts whose
keys are text. Every other value becomes a table `{"$type": name, "value": ...}`. If there is such a
value, all values are wrapped in `{"$values": 1, "extra": ...}`.
Reading a file imports no module that the file names.
"""

import base64
import enum
import json
import math
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from detonation.checkpoint.files.shard_file import CorruptCheckpoint
from detonation.core.flat.tensors import octets

VALUES_VERSION = 1
_MARK = "$values"
_EXTRA = "extra"
_TYPE = "$type"
_VALUE = "value"
_LARGEST_PLAIN = 2**63
"""Integers of this magnitude or larger are written in hexadecimal, because Python limits the number
of decimal digits of an integer.
"""
_REMEDY = (
    "give numbers, texts, bytes, lists, tuples, sets, dicts, tensors, numpy arrays, enums, dates "
    "or paths, or write it to a file of your own"
)


def encoded_extra(extra: Mapping[str, Any], most: int) -> dict[str, Any]:
    """Encodes `extra` as a JSON table of at most `most` bytes. The table shares no memory with
    `extra`.

    Raises `ValueError` with the key of a value that is too large, or that would not decode to an
    equal value.
    """
    encoder = _Encoder()
    try:
        table: dict[str, Any] = encoder.value(dict(extra), "extra")
        if encoder.tagged:
            table = {_MARK: VALUES_VERSION, _EXTRA: table}
        count = len(json.dumps({"extra": table}, indent=1))
    except RecursionError as error:
        raise ValueError(
            "extra is nested too deeply, or holds itself: give a flat table"
        ) from error
    if count > most:
        raise ValueError(
            f"extra has {count:,} bytes as JSON, more than the {most:,} that a manifest may have, "
            f"most of them under {_largest(extra)!r}: write large values to a file of your own"
        )
    return table


def decoded_extra(table: Mapping[str, Any]) -> dict[str, Any]:
    """Decodes what `encoded_extra` returned. Returns a table of an earlier version unchanged.

    Raises `CorruptCheckpoint` for any other content, and if a class or package is missing.
    """
    if _MARK not in table:
        return dict(table)
    if table[_MARK] != VALUES_VERSION or table.keys() != {_MARK, _EXTRA}:
        version = str(table[_MARK])[:20]
        raise CorruptCheckpoint(
            f"its extra has format {version}, this version reads format {VALUES_VERSION}"
        )
    try:
        extra = decoded_value(table[_EXTRA])
    except RecursionError as error:
        raise CorruptCheckpoint("its extra is nested too deeply") from error
    if not isinstance(extra, dict):
        raise CorruptCheckpoint("its extra is no table")
    return extra


def encoded_number(value: float | None) -> Any:
    """Encodes a number for a shard file. Infinity and NaN, which JSON lacks, become tables."""
    if value is None or not _is_special_float(value):
        return value
    return _Encoder().value(float(value), "")


def decoded_value(value: Any) -> Any:
    """Decodes what `encoded_number` returned, also inside lists and tables. Raises the same errors
    as `decoded_extra`."""
    if isinstance(value, list):
        return [decoded_value(each) for each in value]
    if not isinstance(value, dict):
        return value
    if _TYPE not in value:
        return {key: decoded_value(each) for key, each in value.items()}
    kind = str(value[_TYPE])[:40]
    reader = _READERS.get(kind)
    if reader is None or value.keys() != {_TYPE, _VALUE}:
        raise CorruptCheckpoint(f"it holds a value of the unknown type {kind!r}")
    try:
        return reader(value[_VALUE])
    except (CorruptCheckpoint, RecursionError):
        raise
    except (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError) as error:
        raise CorruptCheckpoint(f"it holds a damaged {kind} ({str(error)[:60]})") from error


class _Encoder:
    """Encodes one value as JSON. tagged: True if the value is or contains something that plain JSON
    does not have."""

    def __init__(self) -> None:
        self.tagged = False

    def value(self, value: Any, path: str) -> Any:
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind in (int, float) and not _is_special(value):
            return value
        if kind is list:
            return self._items(value, path)
        if kind is dict and all(map(_is_plain_key, value)):
            return {key: self.value(each, f"{path}[{key!r}]") for key, each in value.items()}
        self.tagged = True
        name, content = self._content(value, path)
        return {_TYPE: name, _VALUE: content}

    def _content(self, value: Any, path: str) -> tuple[str, Any]:
        kind = type(value)
        if kind in _LEAVES:
            return _LEAVES[kind].name, _LEAVES[kind].write(value)
        if kind in _SEQUENCES:
            return _SEQUENCES[kind], self._items(value, path)
        if kind in (dict, OrderedDict, Counter):
            return kind.__name__, self._pairs(value, path)
        if kind is deque:
            return "deque", [value.maxlen, self._items(value, path)]
        if kind is defaultdict:
            factory = value.default_factory
            name = ""
            if factory:
                name = getattr(factory, "__name__", "")
            if factory and _FACTORIES.get(name) is not factory:
                raise ValueError(f"{path} is a defaultdict of {factory!r}: give dict(...) of it")
            return "defaultdict", [name, self._pairs(value, path)]
        return _foreign(value, path)

    def _items(self, values: Iterable[Any], path: str) -> list[Any]:
        if isinstance(values, set | frozenset):
            values = sorted(values, key=repr)
        return [self.value(each, f"{path}[{i}]") for i, each in enumerate(values)]

    def _pairs(self, table: Mapping[Any, Any], path: str) -> list[list[Any]]:
        return [
            [self.value(key, f"the key {key!r} of {path}"), self.value(each, f"{path}[{key!r}]")]
            for key, each in table.items()
        ]


def _is_plain_key(key: Any) -> bool:
    return type(key) is str and not key.startswith("$")


def _is_special_float(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _is_special(value: Any) -> bool:
    return _is_special_float(value) or (isinstance(value, int) and abs(value) >= _LARGEST_PLAIN)


def _largest(extra: Mapping[str, Any]) -> str:
    def length(name: str) -> int:
        encoded = _Encoder().value(extra[name], "")
        return len(json.dumps(encoded))

    return max(extra, key=length)


@dataclass(frozen=True)
class _Leaf:
    """Writes and reads a value that contains no other values, under the type `name`."""

    name: str
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


def _text_of(content: Any) -> str:
    if not isinstance(content, str):
        raise TypeError("bytes, floats, paths and types must be saved as text")
    return content


def _base64(content: bytes | bytearray | memoryview) -> str:
    return base64.b64encode(content).decode()


def _octets(text: Any) -> bytes:
    return base64.b64decode(_text_of(text), validate=True)


def _iso(value: datetime | time) -> list[Any]:
    return [value.isoformat(), value.fold]


def _of_iso(kind: Any) -> Callable[[Any], Any]:
    return lambda content: kind.fromisoformat(content[0]).replace(fold=content[1])


def _delta(value: timedelta) -> list[int]:
    return [value.days, value.seconds, value.microseconds]


def _kind_of_tensor(name: Any) -> torch.dtype:
    found = vars(torch).get(_text_of(name))
    if not isinstance(found, torch.dtype):
        raise TypeError("the saved dtype must be one of torch, such as 'float32'")
    return found


def _name_of_kind(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


_LEAVES: dict[type, _Leaf] = {
    int: _Leaf("int", hex, lambda text: int(text, 16)),
    float: _Leaf("float", repr, lambda text: float(_text_of(text))),
    complex: _Leaf("complex", repr, lambda text: complex(_text_of(text))),
    bytes: _Leaf("bytes", _base64, _octets),
    bytearray: _Leaf("bytearray", _base64, lambda text: bytearray(_octets(text))),
    datetime: _Leaf("datetime", _iso, _of_iso(datetime)),
    date: _Leaf("date", date.isoformat, date.fromisoformat),
    time: _Leaf("time", _iso, _of_iso(time)),
    timedelta: _Leaf("timedelta", _delta, lambda parts: timedelta(*parts)),
    timezone: _Leaf(
        "timezone",
        lambda zone: _delta(zone.utcoffset(None)),
        lambda parts: timezone(timedelta(*parts)),
    ),
    type(Path()): _Leaf("Path", str, lambda text: Path(_text_of(text))),
    PurePosixPath: _Leaf("PurePosixPath", str, lambda text: PurePosixPath(_text_of(text))),
    PureWindowsPath: _Leaf("PureWindowsPath", str, lambda text: PureWindowsPath(_text_of(text))),
    torch.dtype: _Leaf("torch.dtype", _name_of_kind, _kind_of_tensor),
    torch.device: _Leaf("torch.device", str, lambda text: torch.device(_text_of(text))),
    torch.Size: _Leaf("torch.Size", list, lambda shape: torch.Size(shape)),
}
_SEQUENCES: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset"}
_FACTORIES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (bool, bytes, dict, float, frozenset, int, list, set, str, tuple, Counter, deque)
}


def _foreign(value: Any, path: str) -> tuple[str, Any]:
    """The type name and the encoded content of a tensor, an array or an enum.

    Raises `ValueError` for any other value.
    """
    if type(value) is Tensor:
        return "torch.Tensor", _written_tensor(value, path)
    if isinstance(value, enum.Enum):
        return "enum", _written_enum(value, path)
    numpy = sys.modules.get("numpy")
    if numpy is not None and (type(value) is numpy.ndarray or isinstance(value, numpy.generic)):
        array = numpy.asarray(value)
        if not _is_simple(array.dtype, numpy):
            raise ValueError(
                f"{path} is of numpy's type {array.dtype}, which is not saved: {_REMEDY}"
            )
        name = "numpy.generic"
        if type(value) is numpy.ndarray:
            name = "numpy.ndarray"
        return name, [array.dtype.str, list(array.shape), _base64(array.tobytes())]
    if isinstance(value, DTensor):
        remedy = "give full_tensor() of it, or keep it in the model or optimizer"
        raise ValueError(f"{path} is a DTensor, of which this rank has a part: {remedy}")
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    shown = ""
    if isinstance(value, str | int | float | tuple):
        shown = repr(value)[:60]
    raise ValueError(
        f"{path} is {shown or 'a value'} of type {kind}, which is not saved: {_REMEDY}"
    )


def _written_tensor(tensor: Tensor, path: str) -> list[Any]:
    if tensor.requires_grad:
        raise ValueError(f"{path} is a tensor that requires a gradient: give detach() of it")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        what = f"a tensor of {tensor.layout}"
        if tensor.is_quantized:
            what = "a quantized tensor"
        if tensor.is_meta:
            what = "a tensor without memory (meta)"
        raise ValueError(f"{path} is {what}: give a dense tensor, or leave it out")
    host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return [_name_of_kind(host.dtype), list(host.shape), _base64(octets(host))]


def _read_tensor(content: Any) -> Tensor:
    name, shape, text = content
    kind = _kind_of_tensor(name)
    raw = _octets(text)
    if not all(type(size) is int and size >= 0 for size in shape) or len(shape) > 64:
        raise ValueError("the tensor's shape must be at most 64 whole numbers")
    if math.prod(shape) * kind.itemsize != len(raw):
        raise ValueError("the bytes of the tensor do not match its shape and type")
    tensor = torch.empty(shape, dtype=kind)
    octets(tensor)[:] = raw
    return tensor


def _is_simple(kind: Any, numpy: Any) -> bool:
    """True if numpy can rebuild the dtype `kind` from its text, such as "<f4", and if its values
    contain no Python objects, fields or subarrays.
    """
    try:
        named = numpy.dtype(kind.str) == kind
    except TypeError:
        return False
    return bool(named and not kind.hasobject and kind.names is None and kind.subdtype is None)


def _read_array(content: Any) -> Any:
    try:
        import numpy
    except ImportError as error:
        raise CorruptCheckpoint(
            "extra holds an array of numpy: install numpy to load it"
        ) from error
    name, shape, text = content
    kind = numpy.dtype(_text_of(name))
    raw = _octets(text)
    if not _is_simple(kind, numpy) or math.prod(shape) * kind.itemsize != len(raw):
        raise ValueError("the bytes of the array do not match its shape and type")
    return numpy.ndarray(tuple(shape), kind, raw).copy()


def _written_enum(value: enum.Enum, path: str) -> list[Any]:
    kind = type(value)
    found = _enum_class(kind.__module__, kind.__qualname__)
    if found is not kind:
        raise ValueError(
            f"{path} is an enum that its module does not have as {kind.__qualname__}: give its"
            " value"
        )
    name = value.name
    if isinstance(value, enum.Flag) and name not in kind.__members__:
        return [kind.__module__, kind.__qualname__, int(value.value)]
    return [kind.__module__, kind.__qualname__, name]


def _read_enum(content: Any) -> enum.Enum:
    module, name, member = content
    found = _enum_class(_text_of(module), _text_of(name))
    if found is None:
        where = f"{module[:80]}.{name[:80]}"
        raise CorruptCheckpoint(
            f"extra holds a member of the enum {where}: import {module[:80]} before you load"
        )
    if type(member) is int and issubclass(found, enum.Flag):
        return found(member)
    return found.__members__[_text_of(member)]


def _enum_class(module: str, name: str) -> type[enum.Enum] | None:
    """Finds an enum class in a module that is already imported, because reading a file must not
    import modules. None if there is no such class."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    if isinstance(found, type) and issubclass(found, enum.Enum):
        return found
    return None


def _values(content: Any) -> list[Any]:
    if not isinstance(content, list):
        raise TypeError("a tuple, set or dict must be saved as a JSON list")
    return [decoded_value(each) for each in content]


def _pairs_of(content: Any) -> list[tuple[Any, Any]]:
    return [(key, each) for key, each in map(_values, content)]


def _counter(content: Any) -> Counter[Any]:
    found = Counter[Any]()
    found.update(dict(_pairs_of(content)))
    return found


def _default(content: Any) -> defaultdict[Any, Any]:
    name, pairs = content
    return defaultdict(_FACTORIES[name] if name else None, _pairs_of(pairs))


def _deque(content: Any) -> deque[Any]:
    most, items = content
    return deque(_values(items), most)


_READERS: dict[str, Callable[[Any], Any]] = {
    **{leaf.name: leaf.read for leaf in _LEAVES.values()},
    "tuple": lambda content: tuple(_values(content)),
    "set": lambda content: set(_values(content)),
    "frozenset": lambda content: frozenset(_values(content)),
    "dict": lambda content: dict(_pairs_of(content)),
    "OrderedDict": lambda content: OrderedDict(_pairs_of(content)),
    "Counter": _counter,
    "deque": _deque,
    "defaultdict": _default,
    "torch.Tensor": _read_tensor,
    "numpy.ndarray": _read_array,
    "numpy.generic": lambda content: _read_array(content)[()],
    "enum": _read_enum,
}
