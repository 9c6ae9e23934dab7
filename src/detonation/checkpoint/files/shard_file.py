"""The state of one rank as a safetensors file, hashed while it is written and checked before it is read.

safetensors' own writer does not hash: it would need the whole file in memory a second time, or a second read.
"""

import ctypes
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from detonation.checkpoint.files import disk

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


@dataclass(frozen=True)
class ShardSummary:
    """The size and sha256 (hex) that a file must have."""

    bytes: int
    sha256: str


def write_shard(path: Path, tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> ShardSummary:
    """Writes contiguous host tensors, and `rest` as JSON in the header.

    Raises:
        OSError: the disk is full or fails.
        ValueError: safetensors has no such dtype.
    """
    return ShardSummary(*disk.write_file(path, shard_content(tensors, rest)))


def shard_size(tensors: Mapping[str, Tensor]) -> int:
    """About the number of bytes that `write_shard` will need."""
    return sum(tensor.nbytes + 200 for tensor in tensors.values())


def shard_fault(path: Path, expected: ShardSummary) -> str | None:
    """The fault of the file at `path`, in words; None where it is as `expected`."""
    try:
        # a stranger's checkpoint may hold a link to elsewhere, or something whose opening never returns
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            return f"{path.name} is no ordinary file"
        if status.st_size != expected.bytes:
            return f"{path.name} has {status.st_size:,} bytes, not {expected.bytes:,}"
        try:
            same = hashlib.file_digest(file, "sha256").hexdigest() == expected.sha256
        except OSError as error:
            return f"{path.name} cannot be read ({error.strerror})"
    return None if same else f"{path.name} is damaged: its checksum differs"


def shard_content(tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> Iterator[memoryview]:
    """The bytes of a safetensors file: header length, header, tensors. Wide dtypes come first, so that all align."""
    header: dict[str, Any] = {"__metadata__": {"json": json.dumps(rest, allow_nan=False)}}
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    end = 0
    for name, tensor in ordered:
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} is of type {tensor.dtype}, which safetensors does not have")
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        if tensor.nbytes:
            yield memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
