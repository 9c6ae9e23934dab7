"""Checkpoints on disk, without other processes: their verification, and their weights as the
beginning of a run."""

import json
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import torch
from torch import Tensor, nn

from detonation.checkpoint.elastic import Elastic
from detonation.checkpoint.files import manifest, retention
from detonation.checkpoint.files.manifest import Manifest, file_name
from detonation.checkpoint.files.reader import Box, CheckpointReader, ShardReader
from detonation.checkpoint.files.shard_file import CorruptCheckpoint, TensorFile, shard_fault
from detonation.checkpoint.newest import Found
from detonation.checkpoint.snapshot import entry_of, weights
from detonation.core.flat.tensors import local
from detonation.core.link.coordinates import Coordinates
from detonation.gates.closeness import tolerance
from detonation.whole_files import read_text

_log = logging.getLogger("detonation.checkpoint")
_AGREED = re.compile(r"replica\.\d+\.(?P<kind>anchor|momentum_buffer|arriving)\.(?P<parameter>.+)")


@dataclass(frozen=True)
class VerifyReport:
    """The findings about one checkpoint.

    faults: in words, empty where it is whole. differences: between replicas, in words. apart: the
    largest distance of close replicas, as a part of the norm of a tensor; None where their bits are
    to be equal. compared: the number of tensors per shard that must be equal on all replicas.
    uncompared: the reason where it is 0. elsewhere: the files that other nodes have, which share no
    file system with this one; the faults are of the rest.
    """

    path: Path
    faults: list[str]
    differences: list[str]
    compared: int = 0
    uncompared: str = ""
    elsewhere: Sequence[str] = ()
    apart: float | None = None

    @property
    def step(self) -> int:
        """The step of the checkpoint by its name; 0 for any other name."""
        return max(retention.step_of(self.path), 0)

    @property
    def good(self) -> bool:
        return not self.faults and not self.differences

    def line(self) -> str:
        if self.faults:
            return f"{self.path}: not whole: {'; '.join(self.faults)}"
        whole = "whole"
        if self.elsewhere:
            more = f" and {len(self.elsewhere) - 1} more" if len(self.elsewhere) > 1 else ""
            whole = f"whole on this node ({self.elsewhere[0]}{more} are on other nodes)"
        if self.differences:
            return f"{self.path}: {whole}, but replicas differ: {'; '.join(self.differences)}"
        how, apart = (
            ("equal", "")
            if self.apart is None
            else ("close", f", at most {self.apart:.1e} of a norm apart")
        )
        return (
            f"{self.path}: {whole},"
            f" {self.uncompared or f'replicas {how} in {self.compared} tensors a shard{apart}'}"
        )


def checkpoints(directory: Path) -> list[Path]:
    """The checkpoints of a run, of a directory of checkpoints, or one checkpoint; newest first.

    Raises:
        ValueError: there are none.
    """
    if not directory.is_dir():
        raise ValueError(
            f"there is no directory {directory}: give that of a run, its --out, or of a checkpoint"
        )
    if (directory / manifest.MANIFEST_NAME).exists():
        return [directory]
    found = retention.saved_checkpoints(directory) or retention.saved_checkpoints(
        directory / "checkpoints"
    )
    if not found:
        raise ValueError(
            f"{directory} holds no checkpoint: give the --out of a run that has saved one"
        )
    return found


def verify(checkpoint: Path) -> VerifyReport:
    """Checks every byte of `checkpoint`, and compares bitwise, or as close ones, the tensors that
    replicas share."""
    try:
        described = manifest.read_manifest(checkpoint)
        step_in_name = retention.step_of(checkpoint)
        faults = []
        if step_in_name not in (-1, described.step):
            faults.append(f"its name is not that of step {described.step}")
        elsewhere = described.elsewhere(lambda name: (checkpoint / name).exists())
        here = {name: file for name, file in described.files.items() if name not in elsewhere}
        faults += [
            fault for name, file in here.items() if (fault := shard_fault(checkpoint / name, file))
        ]
        if faults:
            return VerifyReport(checkpoint, faults, [], elsewhere=elsewhere)
        differences, compared, apart = _compare(CheckpointReader(checkpoint, described), here)
    except CorruptCheckpoint as error:
        return VerifyReport(checkpoint, [str(error)], [])
    uncompared = "" if compared else _why_uncompared(described, here)
    return VerifyReport(
        checkpoint, [], differences, compared, uncompared, elsewhere, apart if compared else None
    )


def whole_replicas(checkpoint: Path, described: Manifest) -> list[int]:
    """The replicas of which no file is on another node."""
    elsewhere = described.elsewhere(lambda name: (checkpoint / name).exists())
    names = [
        [file_name(replica, shard) for shard in range(described.shards)]
        for replica in range(described.replicas)
    ]
    return [replica for replica, files in enumerate(names) if not set(files) & set(elsewhere)]


def newest(directory: Path) -> Found:
    """The newest whole checkpoint of `directory`, and a line for each newer one that is not whole.

    Raises `ValueError` where none is whole.
    """
    paths, rejected = checkpoints(directory), list[str]()
    for path, older in zip_longest(paths, paths[1:]):
        found = verify(path)
        if not found.faults:
            return Found(path, manifest.read_manifest(path), rejected)
        alternative = f"using {older.name}" if older else "there is none before it"
        rejected.append(f"{path.name} rejected: {'; '.join(found.faults)}; {alternative}")
    raise ValueError(f"no checkpoint in {directory} is whole: {rejected[0]}")


@dataclass(frozen=True)
class WholeModel:
    """The one model that the replicas `here` of a checkpoint make.

    rejected: A line for each newer checkpoint that is not whole.
    """

    reader: CheckpointReader
    here: list[int]
    source: Elastic
    rejected: list[str]


def newest_model(directory: Path) -> WholeModel:
    """The model of the newest whole checkpoint of `directory`.

    Raises `ValueError` where none is whole, no replica is here, or the replicas trained alone.
    """
    found = newest(directory)
    path, described = found.path, found.manifest
    if described.replicas > 1 and any(level["scheme"] == "none" for level in described.levels[-1:]):
        raise ValueError(
            f"{path} is of {described.replicas} replicas that trained alone: "
            "there is no one model in it"
        )
    here = whole_replicas(path, described)
    if not here:
        raise ValueError(
            f"{path} has no replica with all its shards: copy the other nodes' files into it first"
        )
    reader = CheckpointReader(path, described)
    source = Elastic(reader, Coordinates(0, 1, 0, 1), here)
    return WholeModel(reader, here, source, found.rejected)


def _why_uncompared(described: Manifest, here: Collection[str]) -> str:
    if all(level["scheme"] == "none" for level in described.levels):
        return "replicas train alone"
    if len(here) < len(described.files):
        return "no two replicas are here to be compared"
    return "not compared, because replicas of these levels agree within a tier of the network only"


def _compare(saved: CheckpointReader, here: Collection[str]) -> tuple[list[str], int, float | None]:
    """The differences between replicas where there must be none, the number of compared tensors,
    and how far apart.

    here: the names of the files to compare.
    """
    differences, compared, apart = [], 0, None
    for shard in range(saved.manifest.shards):
        present = [
            replica
            for replica in range(saved.manifest.replicas)
            if file_name(replica, shard) in here
        ]
        if len(present) < min(2, saved.manifest.replicas):
            continue
        lowest, *others = present
        first = saved.file(lowest, shard)
        keys = _must_agree(first, saved.manifest)
        compared = max(compared, len(keys))
        for replica in others:
            other = saved.file(replica, shard)
            if _must_agree(other, saved.manifest) != keys:
                raise CorruptCheckpoint(f"replicas {lowest} and {replica} have other tensors")
            unequal = [key for key in keys if not _equal(first.tensor(key), other.tensor(key))]
            if first.moved and other.moved:
                found = [_distance(key, first, other) for key in unequal]
                apart = max([apart or 0.0, *(far for far, close in found if close)])
                unequal = [key for key, (_, close) in zip(unequal, found, strict=True) if not close]
            if unequal:
                more = f" and {len(unequal) - 1} more" if len(unequal) > 1 else ""
                differences.append(
                    f"{unequal[0]}{more} on replica {replica}, shard {shard} (compared with replica"
                    f" {lowest})"
                )
    return differences, compared, apart


def _distance(key: str, first: ShardReader, other: ShardReader) -> tuple[float, bool]:
    """The distance of two tensors as a part of their norm, and whether rounding makes as much."""
    one, two, name = first.tensor(key), other.tensor(key), _name_in_training(key)
    if one.shape != two.shape or one.dtype != two.dtype or not one.is_floating_point():
        return math.inf, False
    eps, one, two = (
        torch.finfo(one.dtype).eps,
        one.double(),
        two.double(),
    )  # float8 cannot be subtracted
    *norms, far = (float(torch.linalg.vector_norm(each)) for each in (one, two, one - two))
    moved = max(
        file.moved.get(name, min(norms)) for file in (first, other)
    )  # the unknown may have come from zero
    return far / (min(norms) or far), far <= tolerance(min(norms), moved, eps) < math.inf


def _name_in_training(key: str) -> str:
    """The name of a saved tensor in `Replicator.replicated`.

    >>> [*map(_name_in_training, ("model.a.b", "optimizer.a.b.step", "replica.0.anchor.a.b", "replica.0.m.a.b"))]
    ['a.b', 'a.b (step)', 'a.b', 'a.b (m)']
    """
    part, _, name = key.partition(".")
    if part == "optimizer":
        parameter, _, entry = name.rpartition(".")
        return f"{parameter} ({entry_of(entry)})"
    _, kind, name = name.split(".", 2) if part == "replica" else ("", "anchor", name)
    return name if kind == "anchor" else f"{name} ({kind})"


def _must_agree(file: ShardReader, described: Manifest) -> list[str]:
    """The keys of a shard whose tensors must be equal on all replicas after any step."""
    if described.alike:
        return [
            k
            for k in file.keys
            if k.startswith("optimizer.") or (k.startswith("model.") and k in file.boxes)
        ]
    agreed = [match for key in file.keys if (match := _AGREED.fullmatch(key))]
    anchors = Counter(match["parameter"] for match in agreed if match["kind"] == "anchor")
    # Of several levels, a level that exchanges gradients keeps its tier equal. A level that
    # exchanges nothing, or parameters, lets each member of the tier have anchors of its own.
    apart = (
        any(level["scheme"] == "none" for level in described.levels)
        or max(anchors.values(), default=0) > 1
    )
    return [] if len(described.levels) > 1 and apart else [match[0] for match in agreed]


def _equal(first: Tensor, second: Tensor) -> bool:
    """Equal bit for bit, so that NaN equals itself and 0.0 differs from -0.0."""
    same = (first.shape, first.dtype) == (second.shape, second.dtype)
    return same and torch.equal(first.view(-1).view(torch.uint8), second.view(-1).view(torch.uint8))


EXPORTED = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_Read = Callable[[str, Box | None], Tensor]


@torch.no_grad()
def load_weights(directory: Path, model: nn.Module) -> str:
    """Puts weights into `model`, which may be sharded: this rank reads its own part of them.

    Args:
        directory: A run directory or a checkpoint, of which the newest whole one counts, or a
            directory with safetensors files, as `detonation export` and transformers write them.

    Returns:
        In words, where they are from.

    Raises:
        ValueError: There are none, or they are of another model.
    """
    is_exported = any((directory / name).is_file() for name in (EXPORTED, _INDEX))
    read, words = _exported(directory) if is_exported else _saved(directory)
    for name, tensor in weights(model).items():
        part = read(name, Box.of(tensor) if isinstance(tensor, nn.Parameter) else None)
        if part.shape != local(tensor).shape:
            raise ValueError(
                f"{directory} has {name} as {tuple(part.shape)}, not {tuple(tensor.shape)}: another"
                " model"
            )
        local(tensor).copy_(part)
    return words


def _saved(directory: Path) -> tuple[_Read, str]:
    found = newest_model(directory)
    saved, source = found.reader, found.source
    for line in found.rejected:
        _log.warning("%s", line)

    def read(name: str, box: Box | None) -> Tensor:
        return source.agreed(f"model.{name}", box, saved.manifest.alike)

    return read, "; ".join([f"weights of {saved.path}", *found.rejected])


def _exported(directory: Path) -> tuple[_Read, str]:
    try:
        names = [EXPORTED]
        if not (directory / EXPORTED).is_file():
            names = sorted(
                {*json.loads(read_text(directory / _INDEX, links=True))["weight_map"].values()}
            )
        # a snapshot in the cache of Hugging Face consists of links
        files = [TensorFile((directory / Path(name).name).resolve()) for name in names]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{directory} holds no weights that can be read: {error}") from error
    found = {key: file for file in files for key in file.entries}

    def read(name: str, box: Box | None) -> Tensor:
        if name not in found:
            raise ValueError(f"{directory} has no {name}: it is of another model")
        entry = found[name].entries[name]
        if box is None or not box.shape:
            return found[name].read(name)
        if entry.shape != box.whole:
            raise ValueError(
                f"{directory} has {name} as {entry.shape}, not {box.whole}: it is of another model"
            )
        rows, *rest = (
            slice(start, start + size) for start, size in zip(box.offset, box.shape, strict=True)
        )
        return found[name].read(name, rows)[:, *rest]

    return read, f"weights of {directory}"
