"""Reads and writes safetensors files, and checks their hashes. Needs no library but torch."""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from detonation.checkpoint.files import disk
from detonation.core.base_error import DetonationError
from detonation.core.flat.tensors import octets
from detonation.whole_files import opened, reading

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
}
_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
_LONGEST_HEADER = 100_000_000
_MOST_ELEMENTS = 1 << 60
_MOST_DIMENSIONS = 64  # the largest number of dimensions of a torch tensor


class CorruptCheckpoint(DetonationError, ValueError):
    """A checkpoint is damaged, or is not a checkpoint.

    The message gives the reason, without the path.
    """


@dataclass(frozen=True)
class Entry:
    """One tensor of a file. start: offset of its bytes in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


class TensorFile:
    """The tensors of the file at `path`, each read on request.

    metadata: text values by name. entries: the tensors by key. Raises `OSError` if the file cannot
    be read or is a link, and `CorruptCheckpoint` if it is not a safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        descriptor = opened(path)
        try:
            size = os.fstat(descriptor).st_size
            length = header_length(os.pread(descriptor, 8, 0), size)
            text = os.pread(descriptor, length, 8)
        finally:
            os.close(descriptor)
        self.metadata, self.entries = tensors_in(text, size)

    def read(self, key: str, rows: slice = slice(None)) -> Tensor:
        """Reads the tensor `key`, or some `rows` of this tensor, into a new tensor.

        Raises `OSError` if reading fails, or if the file has become shorter since it was opened.
        """
        entry = self.entries[key]
        first = 0
        shape = entry.shape
        if shape:
            first, stop, _ = rows.indices(shape[0])
            shape = (max(stop - first, 0), *shape[1:])
        row_bytes = math.prod(shape[1:]) * entry.dtype.itemsize
        tensor = torch.empty(shape, dtype=entry.dtype)
        if tensor.nbytes:
            self._fill(tensor, entry.start + first * row_bytes)
        return tensor

    def _fill(self, tensor: Tensor, at: int) -> None:
        rest = octets(tensor)
        descriptor = opened(self._path)
        try:
            while rest:
                count = os.preadv(descriptor, [rest], at)
                if not count:
                    raise OSError(0, "the file became shorter while it was read", str(self._path))
                rest = rest[count:]
                at += count
        finally:
            os.close(descriptor)


def header_length(begin: bytes, size: int) -> int:
    """Length of the header of a file of `size` bytes, from its first 8 bytes.

    Raises `CorruptCheckpoint` if a header cannot have that length.
    """
    length = int.from_bytes(begin, "little")
    if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
        raise CorruptCheckpoint("the length of its header is wrong")
    return length


def tensors_in(text: bytes, size: int) -> tuple[dict[str, str], dict[str, Entry]]:
    """The metadata and the tensors that the header `text` of a file of `size` bytes describes.

    Raises `CorruptCheckpoint` if the header does not fit the file, and `ValueError` if it is no
    JSON.
    """
    header = json.loads(text)
    if not isinstance(header, dict):
        raise CorruptCheckpoint("its header is no table")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise CorruptCheckpoint("its metadata are not texts")
    return metadata, _entries(header, 8 + len(text), size)


def _entries(header: dict[str, Any], begin: int, size: int) -> dict[str, Entry]:
    """The tensors in a header. They must fill the file from `begin` to `size` without gaps."""
    found: dict[str, Entry] = {}
    ends = [(0, 0)]
    for key, value in header.items():
        if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
            raise CorruptCheckpoint(f"{key[:60]!r} is no tensor")
        dtype = _BY_NAME.get(str(value["dtype"]))
        shape = value["shape"]
        offsets = value["data_offsets"]
        if dtype is None or not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
            raise CorruptCheckpoint(f"{key[:60]!r} has no valid type, shape or offsets")
        start, end = offsets
        # torch rejects a dimension that is too large, even if another dimension is 0
        elements = math.prod(max(count, 1) for count in shape)
        if elements > _MOST_ELEMENTS or end - start != math.prod(shape) * dtype.itemsize:
            raise CorruptCheckpoint(
                f"{key[:60]!r} has {end - start} bytes, which do not match its shape and type"
            )
        found[key] = Entry(dtype, tuple(shape), begin + start)
        ends.append((start, end))
    ends.sort()
    gaps = any(end != start for (_, end), (start, _) in pairwise(ends))
    if gaps or begin + ends[-1][1] != size:
        raise CorruptCheckpoint("its tensors leave gaps, overlap, or are not all there")
    return found


def _naturals(value: Any) -> bool:
    if not isinstance(value, Sequence) or len(value) > _MOST_DIMENSIONS:
        return False
    return all(type(number) is int and 0 <= number <= _MOST_ELEMENTS for number in value)


@dataclass(frozen=True)
class ShardSummary:
    """Size and sha256 (hex) that a file must have."""

    bytes: int
    sha256: str


def write_shard(path: Path, tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> ShardSummary:
    """Writes contiguous host tensors into a safetensors file, and `rest` as JSON into its header.

    Raises `OSError` if the disk is full or fails, and `ValueError` if safetensors lacks a dtype.
    """
    return ShardSummary(*disk.write_file(path, shard_content(tensors, rest)))


def shard_fault(path: Path, expected: ShardSummary) -> str | None:
    """The fault of the file at `path`, as text; None if the file is as `expected`."""
    try:
        file = reading(path)
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"
    with file:
        status = os.fstat(file.fileno())
        if status.st_size != expected.bytes:
            return f"{path.name} has {status.st_size:,} bytes, not {expected.bytes:,}"
        try:
            same = hashlib.file_digest(file, "sha256").hexdigest() == expected.sha256
        except OSError as error:
            return f"{path.name} cannot be read ({error.strerror})"
    if same:
        return None
    return f"{path.name} is damaged: its checksum differs"


def require_types(types: Mapping[str, torch.dtype]) -> None:
    """Raises `ValueError` if safetensors lacks one of `types` (dtypes by tensor name)."""
    for name, dtype in types.items():
        if dtype not in DTYPES:
            raise ValueError(f"{name} is of type {dtype}, which safetensors does not have")


def shard_content(tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> Iterator[memoryview]:
    """Bytes of a safetensors file: header length, header, tensors.

    Tensors of wide dtypes come first, so that all tensors are aligned.
    """
    require_types({name: tensor.dtype for name, tensor in tensors.items()})
    header: dict[str, Any] = {"__metadata__": {"json": json.dumps(rest, allow_nan=False)}}
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    end = 0
    for name, tensor in ordered:
        start = end
        end += tensor.nbytes
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        if tensor.nbytes:
            yield octets(tensor)
