"""A reader of safetensors files that needs torch alone.

The format is the length of a header (8 bytes, little endian), the header as JSON, and the tensors one after another. A
file may be from a stranger: what the header says is compared with the size of the file before anything is allocated.
"""

import ctypes
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from detonation.checkpoint.files.manifest import CorruptCheckpoint
from detonation.checkpoint.files.shard_file import DTYPES

_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
_LONGEST_HEADER = 100_000_000
_MOST_ELEMENTS = 1 << 60


@dataclass(frozen=True)
class Entry:
    """One tensor of a file. start: of its bytes, counted from the beginning of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


class TensorFile:
    """The tensors of the file at `path`, each read when it is asked for.

    metadata: texts by name. entries: the tensors by key.

    Raises:
        OSError: it cannot be read, or `path` is a link.
        CorruptCheckpoint: it is no safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        descriptor = self._open()
        try:
            size = os.fstat(descriptor).st_size
            length = header_length(os.pread(descriptor, 8, 0), size)
            text = os.pread(descriptor, length, 8)
        finally:
            os.close(descriptor)
        self.metadata, self.entries = tensors_in(text, size)

    def read(self, key: str, rows: slice = slice(None)) -> Tensor:
        """The tensor `key`, or some `rows` of it, in memory of its own.

        Raises `OSError`, also where the file has become shorter.
        """
        entry = self.entries[key]
        first, stop, _ = rows.indices(entry.shape[0] if entry.shape else 1)
        shape = (max(stop - first, 0), *entry.shape[1:]) if entry.shape else ()
        row_bytes = math.prod(entry.shape[1:]) * entry.dtype.itemsize
        tensor = torch.empty(shape, dtype=entry.dtype)
        if tensor.nbytes:
            self._fill(tensor, entry.start + first * row_bytes)
        return tensor

    def _fill(self, tensor: Tensor, at: int) -> None:
        rest = memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
        descriptor = self._open()
        try:
            while rest:
                count = os.preadv(descriptor, [rest], at)
                if not count:
                    raise OSError(0, "it has become shorter", str(self._path))
                rest, at = rest[count:], at + count
        finally:
            os.close(descriptor)

    def _open(self) -> int:
        return os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW)


def header_length(begin: bytes, size: int) -> int:
    """The bytes of the header of a file of `size` bytes, by its first 8. Raises `CorruptCheckpoint` if it is longer."""
    length = int.from_bytes(begin, "little")
    if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
        raise CorruptCheckpoint("the length of its header is wrong")
    return length


def tensors_in(text: bytes, size: int) -> tuple[dict[str, str], dict[str, Entry]]:
    """The metadata and the tensors that the header `text` describes, of a file of `size` bytes.

    Raises `CorruptCheckpoint` where it is no header of such a file, and `ValueError` where it is no JSON.
    """
    header = json.loads(text)
    if not isinstance(header, dict):
        raise CorruptCheckpoint("its header is no table")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CorruptCheckpoint("its metadata are not texts")
    return metadata, _entries(header, 8 + len(text), size)


def _entries(header: dict[str, Any], begin: int, size: int) -> dict[str, Entry]:
    """The tensors that a header describes, which fill the file from `begin` to `size` without gaps."""
    found: dict[str, Entry] = {}
    ends = [(0, 0)]
    for key, value in header.items():
        if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
            raise CorruptCheckpoint(f"{key[:60]!r} is no tensor")
        dtype, shape, offsets = _BY_NAME.get(str(value["dtype"])), value["shape"], value["data_offsets"]
        if dtype is None or not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
            raise CorruptCheckpoint(f"{key[:60]!r} has no type, shape or place of a tensor")
        start, end = offsets
        elements = math.prod(max(count, 1) for count in shape)  # torch refuses too large ones, also beside a zero
        if elements > _MOST_ELEMENTS or end - start != math.prod(shape) * dtype.itemsize:
            raise CorruptCheckpoint(f"{key[:60]!r} has {end - start} bytes, which its shape and type do not make")
        found[key] = Entry(dtype, tuple(shape), begin + start)
        ends.append((start, end))
    ends.sort()
    gaps = any(end != start for (_, end), (start, _) in pairwise(ends))
    if gaps or begin + ends[-1][1] != size:
        raise CorruptCheckpoint("its tensors leave gaps, overlap, or are not all there")
    return found


def _naturals(value: Any) -> bool:
    return isinstance(value, Sequence) and all(type(number) is int and number >= 0 for number in value)
