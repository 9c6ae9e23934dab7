"""Verify: are checkpoints on disk whole, and do the replicas in them hold the same. Needs no other process."""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from detonation.checkpoint.files import manifest, retention
from detonation.checkpoint.files.manifest import Manifest, Untrustworthy
from detonation.checkpoint.files.reader import File, Saved
from detonation.checkpoint.files.shard_file import fault

_AGREED = re.compile(r"replica\.\d+\.(?P<kind>anchor|momentum_buffer|arriving)\.(?P<parameter>.+)")


@dataclass(frozen=True)
class Verdict:
    """What was found of one checkpoint: `faults` in words, none if it is whole; `differences` between replicas.

    compared: how many tensors of each shard had to be equal on all replicas; uncompared: where there are none, why.
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
        """The verdict in words."""
        if self.faults:
            return f"{self.path}: not whole: {'; '.join(self.faults)}"
        if self.differences:
            return f"{self.path}: whole, but replicas differ: {'; '.join(self.differences)}"
        return f"{self.path}: whole, {self.uncompared or f'replicas equal in {self.compared} tensors a shard'}"


def checkpoints(directory: Path) -> list[Path]:
    """The checkpoints of a run directory, of a directory of checkpoints, or the one that `directory` is; newest first.

    Raises `ValueError` where there are none.
    """
    if not directory.is_dir():
        raise ValueError(f"there is no directory {directory}")
    if (directory / manifest.NAME).exists():
        return [directory]
    found = retention.candidates(directory) or retention.candidates(directory / "checkpoints")
    if not found:
        raise ValueError(f"{directory} holds no checkpoint")
    return found


def verify(checkpoint: Path) -> Verdict:
    """Checks every byte of `checkpoint`, and where replicas must agree compares them bitwise."""
    try:
        said = manifest.read(checkpoint)
        named = retention.step_of(checkpoint)
        faults = [f"its name is not that of step {said.step}"] if named not in (-1, said.step) else []
        faults += [found for name, file in said.files.items() if (found := fault(checkpoint / name, file))]
        if faults:
            return Verdict(checkpoint, faults, [])
        differences, compared = _compare(Saved(checkpoint, said))
    except Untrustworthy as error:
        return Verdict(checkpoint, [str(error)], [])
    return Verdict(checkpoint, [], differences, compared, "" if compared else _uncompared(said))


def newest(directory: Path) -> tuple[Path, Manifest]:
    """The newest checkpoint of `directory` of which every byte is right. Raises `ValueError` where none is."""
    found = checkpoints(directory)
    for path in found:
        if not verify(path).faults:
            return path, manifest.read(path)
    raise ValueError(f"no checkpoint in {directory} is whole: {verify(found[0]).line()}")


def _uncompared(said: Manifest) -> str:
    """Why nothing of the replicas was compared."""
    if all(level["scheme"] == "none" for level in said.levels):
        return "replicas train alone"
    return "not compared, because replicas of these levels agree within a tier of the network only"


def _compare(saved: Saved) -> tuple[list[str], int]:
    """Which tensors differ between replicas that should not, in words, and how many of a shard were compared."""
    differences, compared = [], 0
    for shard in range(saved.manifest.shards):
        first = saved.file(0, shard)
        keys = _must_agree(first, saved.manifest)
        compared = max(compared, len(keys))
        for replica in range(1, saved.manifest.replicas):
            other = saved.file(replica, shard)
            if other.keys != first.keys:
                raise Untrustworthy(f"replicas 0 and {replica} have other tensors")
            odd = [key for key in keys if not _equal(first.tensor(key), other.tensor(key))]
            if odd:
                more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
                differences.append(f"{odd[0]}{more} on replica {replica}, shard {shard} (compared with replica 0)")
    return differences, compared


def _must_agree(file: File, said: Manifest) -> list[str]:
    """The keys of a shard under which all replicas must hold the same after any step."""
    if said.alike:
        return [k for k in file.keys if k.startswith("optimizer.") or (k.startswith("model.") and k in file.boxes)]
    agreed = [match for key in file.keys if (match := _AGREED.fullmatch(key))]
    anchors = Counter(match["parameter"] for match in agreed if match["kind"] == "anchor")
    # of several levels, those that exchange gradients keep a tier equal; one that exchanges nothing, or parameters
    # of its own, lets each member of the tier have other anchors
    apart = any(level["scheme"] == "none" for level in said.levels) or max(anchors.values(), default=0) > 1
    return [] if len(said.levels) > 1 and apart else [match[0] for match in agreed]


def _equal(first: Tensor, second: Tensor) -> bool:
    """Bit for bit."""
    same = (first.shape, first.dtype) == (second.shape, second.dtype)
    return same and torch.equal(first.view(-1).view(torch.uint8), second.view(-1).view(torch.uint8))
