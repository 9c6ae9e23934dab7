"""The files of a weight feed: safetensors that hold a base or a difference, whose names have their order and checksum.

A name is `RUN-STEP-CHECKSUM.KIND.safetensors`. RUN counts the starts of the training and its returns to earlier steps;
CHECKSUM is the beginning of the sha256 of the file. No file is ever written again under the same name.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from detonation.checkpoint.files.shard_file import CorruptCheckpoint, header_length, shard_content, tensors_in

BASE, DIFFERENCE, END = "base", "difference", "end"
"""Kinds: all weights at a step; the change from the step before; and that training ended at a step."""
_NAME = re.compile(r"(\d{6})-(\d{12})-([0-9a-f]{16})\.(base|difference|end)\.safetensors")


@dataclass(frozen=True, order=True)
class WeightFile:
    """The name of a file. Files sort by run and step."""

    run: int
    step: int
    kind: str
    checksum: str

    @property
    def name(self) -> str:
        return f"{self.run:06d}-{self.step:012d}-{self.checksum}.{self.kind}.safetensors"

    @classmethod
    def of(cls, run: int, step: int, kind: str, content: Iterable[memoryview]) -> Self:
        """The name for a file with `content`."""
        return cls(run, step, kind, _checksum(content))

    @classmethod
    def known(cls, names: Iterable[str]) -> list[Self]:
        """The files among `names`, sorted; others are ignored."""
        found = filter(None, map(_NAME.fullmatch, names))
        return sorted(cls(int(m[1]), int(m[2]), m[4], m[3]) for m in found)


def file_content(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> list[memoryview]:
    """The parts of a file, which are the memory of `tensors`, contiguous and on the host."""
    return list(shard_content(tensors, about))


def read_content(file: WeightFile, content: bytearray) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Reads back the arguments of `file_content`; the tensors are views of `content`.

    Raises:
        CorruptCheckpoint: The content is another than that of which the name was made, or no such file.
    """
    if _checksum([memoryview(content)]) != file.checksum:
        raise CorruptCheckpoint(f"{file.name} is damaged: its checksum differs")
    try:
        length = header_length(bytes(content[:8]), len(content))
        metadata, entries = tensors_in(bytes(content[8 : 8 + length]), len(content))
        about = json.loads(metadata.get("json", ""))
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{file.name} is no file of a weight feed ({str(error)[:80]})") from error
    if not isinstance(about, dict) or about.get("step") != file.step:
        raise CorruptCheckpoint(f"{file.name} is not the file of its step")
    tensors = {}
    for name, entry in entries.items():
        empty = 0 in entry.shape
        flat = torch.empty(0, dtype=entry.dtype) if empty else _part(content, entry.dtype, entry.start, entry.shape)
        tensors[name] = flat.view(entry.shape)
    return about, tensors


def _part(content: bytearray, dtype: torch.dtype, start: int, shape: tuple[int, ...]) -> Tensor:
    count = torch.Size(shape).numel()
    if start % dtype.itemsize:  # a header that is no multiple of 8 bytes long
        return torch.frombuffer(content[start : start + count * dtype.itemsize], dtype=dtype)
    return torch.frombuffer(content, dtype=dtype, count=count, offset=start)


def _checksum(content: Iterable[memoryview]) -> str:
    digest = hashlib.sha256()
    for part in content:
        digest.update(part)
    return digest.hexdigest()[:16]
