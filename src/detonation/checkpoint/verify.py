"""Verification of checkpoints on disk: every byte, and equal replicas. Needs no other process."""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from detonation.checkpoint.files import manifest, retention
from detonation.checkpoint.files.manifest import CorruptCheckpoint, Manifest
from detonation.checkpoint.files.reader import CheckpointReader, ShardReader
from detonation.checkpoint.files.shard_file import shard_fault

_AGREED = re.compile(r"replica\.\d+\.(?P<kind>anchor|momentum_buffer|arriving)\.(?P<parameter>.+)")


@dataclass(frozen=True)
class VerifyReport:
    """The findings about one checkpoint.

    faults: in words, empty where it is whole. differences: between replicas, in words.
    compared: the number of tensors per shard that must be equal on all replicas. uncompared: the reason where it is 0.
    """

    path: Path
    faults: list[str]
    differences: list[str]
    compared: int = 0
    uncompared: str = ""

    @property
    def good(self) -> bool:
        return not self.faults and not self.differences

    def line(self) -> str:
        """The report in one line."""
        if self.faults:
            return f"{self.path}: not whole: {'; '.join(self.faults)}"
        if self.differences:
            return f"{self.path}: whole, but replicas differ: {'; '.join(self.differences)}"
        return f"{self.path}: whole, {self.uncompared or f'replicas equal in {self.compared} tensors a shard'}"


def checkpoints(directory: Path) -> list[Path]:
    """The checkpoints under `directory`, newest first.

    Args:
        directory: a run directory, a directory of checkpoints, or one checkpoint.

    Raises:
        ValueError: there are none.
    """
    if not directory.is_dir():
        raise ValueError(f"there is no directory {directory}")
    if (directory / manifest.MANIFEST_NAME).exists():
        return [directory]
    found = retention.saved_checkpoints(directory) or retention.saved_checkpoints(directory / "checkpoints")
    if not found:
        raise ValueError(f"{directory} holds no checkpoint")
    return found


def verify(checkpoint: Path) -> VerifyReport:
    """Checks every byte of `checkpoint`, and compares bitwise the tensors that must be equal on all replicas."""
    try:
        described = manifest.read_manifest(checkpoint)
        step_in_name = retention.step_of(checkpoint)
        faults = []
        if step_in_name not in (-1, described.step):
            faults.append(f"its name is not that of step {described.step}")
        faults += [fault for name, file in described.files.items() if (fault := shard_fault(checkpoint / name, file))]
        if faults:
            return VerifyReport(checkpoint, faults, [])
        differences, compared = _compare(CheckpointReader(checkpoint, described))
    except CorruptCheckpoint as error:
        return VerifyReport(checkpoint, [str(error)], [])
    return VerifyReport(checkpoint, [], differences, compared, "" if compared else _why_uncompared(described))


def newest(directory: Path) -> tuple[Path, Manifest]:
    """The newest whole checkpoint of `directory` and its manifest. Raises `ValueError` where none is whole."""
    found = checkpoints(directory)
    for path in found:
        if not verify(path).faults:
            return path, manifest.read_manifest(path)
    raise ValueError(f"no checkpoint in {directory} is whole: {verify(found[0]).line()}")


def _why_uncompared(described: Manifest) -> str:
    if all(level["scheme"] == "none" for level in described.levels):
        return "replicas train alone"
    return "not compared, because replicas of these levels agree within a tier of the network only"


def _compare(saved: CheckpointReader) -> tuple[list[str], int]:
    """The differences between replicas where there must be none, in words, and the number of compared tensors."""
    differences, compared = [], 0
    for shard in range(saved.manifest.shards):
        first = saved.file(0, shard)
        keys = _must_agree(first, saved.manifest)
        compared = max(compared, len(keys))
        for replica in range(1, saved.manifest.replicas):
            other = saved.file(replica, shard)
            if other.keys != first.keys:
                raise CorruptCheckpoint(f"replicas 0 and {replica} have other tensors")
            unequal = [key for key in keys if not _equal(first.tensor(key), other.tensor(key))]
            if unequal:
                more = f" and {len(unequal) - 1} more" if len(unequal) > 1 else ""
                differences.append(f"{unequal[0]}{more} on replica {replica}, shard {shard} (compared with replica 0)")
    return differences, compared


def _must_agree(file: ShardReader, described: Manifest) -> list[str]:
    """The keys of a shard whose tensors must be equal on all replicas after any step."""
    if described.alike:
        return [k for k in file.keys if k.startswith("optimizer.") or (k.startswith("model.") and k in file.boxes)]
    agreed = [match for key in file.keys if (match := _AGREED.fullmatch(key))]
    anchors = Counter(match["parameter"] for match in agreed if match["kind"] == "anchor")
    # Of several levels, a level that exchanges gradients keeps its tier equal. A level that exchanges nothing, or
    # parameters, lets each member of the tier have anchors of its own.
    apart = any(level["scheme"] == "none" for level in described.levels) or max(anchors.values(), default=0) > 1
    return [] if len(described.levels) > 1 and apart else [match[0] for match in agreed]


def _equal(first: Tensor, second: Tensor) -> bool:
    """Equal bit for bit, so that NaN equals itself and 0.0 differs from -0.0."""
    same = (first.shape, first.dtype) == (second.shape, second.dtype)
    return same and torch.equal(first.view(-1).view(torch.uint8), second.view(-1).view(torch.uint8))
