"""Checkpoints on disk, read by one process: verifies them, and loads their weights into a model."""

import json
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from detonation.checkpoint.elastic import Elastic
from detonation.checkpoint.files import manifest, retention
from detonation.checkpoint.files.manifest import Manifest, file_name
from detonation.checkpoint.files.reader import Box, CheckpointReader, ShardReader
from detonation.checkpoint.files.shard_file import CorruptCheckpoint, TensorFile, shard_fault
from detonation.checkpoint.newest import Found, none_whole, rejections
from detonation.checkpoint.snapshot import entry_of, weights
from detonation.choices import first_names
from detonation.core.flat.tensors import local
from detonation.core.link import Coordinates
from detonation.gates.closeness import tolerance
from detonation.whole_files import read_text

_log = logging.getLogger("detonation.checkpoint")
_AGREED = re.compile(r"replica\.\d+\.(?P<kind>anchor|momentum_buffer|arriving)\.(?P<parameter>.+)")


@dataclass(frozen=True)
class VerifyReport:
    """What the check of one checkpoint found.

    faults: faults of the files, as text; empty if the checkpoint is complete. differences:
    differences between replicas, as text. apart: for replicas that may differ by rounding, the
    largest distance between two tensors relative to their norm; None if replicas must be equal.
    compared: the number of tensors per shard that must be equal on all replicas. uncompared: the
    reason if `compared` is 0. elsewhere: the files on other nodes, which this node cannot read;
    `faults` does not cover these files.
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
        """Step in the name of the checkpoint; 0 if its name has none."""
        return max(retention.step_of(self.path), 0)

    @property
    def good(self) -> bool:
        return not self.faults and not self.differences

    def line(self) -> str:
        """Describes the findings in one line."""
        if self.faults:
            return f"{self.path}: not whole: {'; '.join(self.faults)}"
        whole = "whole"
        if self.elsewhere:
            whole = f"whole on this node ({first_names(self.elsewhere, 1)} are on other nodes)"
        if self.differences:
            return f"{self.path}: {whole}, but replicas differ: {'; '.join(self.differences)}"
        return f"{self.path}: {whole}, {self.uncompared or self._agreement()}"

    def _agreement(self) -> str:
        """Describes how close the replicas are."""
        tensors = f"{self.compared} tensors a shard"
        if self.apart is None:
            return f"replicas equal in {tensors}"
        return f"replicas close in {tensors}, at most {self.apart:.1e} of a norm apart"


def checkpoints(directory: Path) -> list[Path]:
    """Lists the checkpoints of a run or of a directory of checkpoints, newest first.

    `directory` may also be one checkpoint.

    Raises:
        ValueError: there is no checkpoint.
    """
    if not directory.is_dir():
        raise ValueError(
            f"there is no directory {directory}: give the directory of a run (its --out), or of a"
            " checkpoint"
        )
    if (directory / manifest.MANIFEST_NAME).exists():
        return [directory]
    found = retention.saved_checkpoints(directory) or retention.saved_checkpoints(
        directory / "checkpoints"
    )
    if not found:
        raise ValueError(
            f"{directory} holds no checkpoint: give the --out of a run that has saved a checkpoint"
        )
    return found


def verify(checkpoint: Path) -> VerifyReport:
    """Checks every byte of `checkpoint`, and compares the tensors that must be equal on all
    replicas.

    These tensors must be equal bit for bit, or equal up to rounding if training allowed its
    replicas to differ by rounding.
    """
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
        found = _Comparison(CheckpointReader(checkpoint, described))
        found.compare_shards(here)
    except CorruptCheckpoint as error:
        return VerifyReport(checkpoint, [str(error)], [])
    uncompared = ""
    apart = found.apart
    if not found.compared:
        uncompared = _why_uncompared(described, here)
        apart = None
    return VerifyReport(
        checkpoint, [], found.differences, found.compared, uncompared, elsewhere, apart
    )


def whole_replicas(checkpoint: Path, described: Manifest) -> list[int]:
    """Replicas whose files are all on this node."""
    elsewhere = {*described.elsewhere(lambda name: (checkpoint / name).exists())}
    whole = []
    for replica in range(described.replicas):
        files = {file_name(replica, shard) for shard in range(described.shards)}
        if not files & elsewhere:
            whole.append(replica)
    return whole


def newest(directory: Path) -> Found:
    """The newest complete checkpoint of `directory`, and a line for each newer, incomplete
    checkpoint.

    Raises `ValueError` if no checkpoint is complete.
    """
    rejected: dict[str, str] = {}
    for path in checkpoints(directory):
        found = verify(path)
        if not found.faults:
            return Found(path, manifest.read_manifest(path), rejections(rejected, path.name))
        rejected[path.name] = "; ".join(found.faults)
    raise none_whole(directory, rejected)


@dataclass(frozen=True)
class WholeModel:
    """One model, merged from those replicas of a checkpoint whose files are on this node (`here`).

    rejected: a line for each newer, incomplete checkpoint.
    """

    reader: CheckpointReader
    here: list[int]
    source: Elastic
    rejected: list[str]


def newest_model(directory: Path) -> WholeModel:
    """The model of the newest complete checkpoint of `directory`.

    Raises `ValueError` if no checkpoint is complete, if no replica has all its files on this node,
    or if the replicas trained alone.
    """
    found = newest(directory)
    path = found.path
    described = found.manifest
    if described.replicas > 1 and any(level["scheme"] == "none" for level in described.levels[-1:]):
        raise ValueError(
            f"{path} was saved by {described.replicas} replicas that trained independently: "
            "it has no common model; train with a scheme other than none"
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


class _Comparison:
    """Compares the replicas of one checkpoint, shard by shard.

    differences: differences between replicas, as text. compared: the number of tensors per shard
    that must be equal on all replicas. apart: the largest distance between replicas that may differ
    by rounding; None if the bits of the replicas were compared.
    """

    def __init__(self, saved: CheckpointReader) -> None:
        self._saved = saved
        self.differences: list[str] = []
        self.compared = 0
        self.apart: float | None = None

    def compare_shards(self, here: Collection[str]) -> None:
        """Compares, for each shard, the files of its replicas that are on this node (`here`). Skips
        a shard if only one of several replicas is on this node."""
        manifest = self._saved.manifest
        for shard in range(manifest.shards):
            present = [
                replica for replica in range(manifest.replicas) if file_name(replica, shard) in here
            ]
            if len(present) >= min(2, manifest.replicas):
                self._compare_shard(shard, present)

    def _compare_shard(self, shard: int, present: Sequence[int]) -> None:
        """Compares the first replica in `present` with each other replica in `present`."""
        lowest, *others = present
        first = self._saved.file(lowest, shard)
        keys = _must_agree(first, self._saved.manifest)
        self.compared = max(self.compared, len(keys))
        for replica in others:
            other = self._saved.file(replica, shard)
            if _must_agree(other, self._saved.manifest) != keys:
                raise CorruptCheckpoint(f"replicas {lowest} and {replica} have different tensors")
            unequal = self._unequal(keys, first, other)
            if unequal:
                self.differences.append(
                    f"{first_names(unequal, 1)} on replica {replica}, shard {shard} (compared with"
                    f" replica {lowest})"
                )

    def _unequal(self, keys: Sequence[str], first: ShardReader, other: ShardReader) -> list[str]:
        """Keys of the tensors that differ between the files of two replicas. If these replicas may
        differ by rounding, returns only keys of tensors that differ by more than rounding."""
        unequal = [key for key in keys if not _equal(first.tensor(key), other.tensor(key))]
        if not (first.moved and other.moved):
            return unequal
        self.apart = self.apart or 0.0
        too_far = []
        for key in unequal:
            far, close = _distance(key, first, other)
            if close:
                self.apart = max(self.apart, far)
            else:
                too_far.append(key)
        return too_far


def _distance(key: str, first: ShardReader, other: ShardReader) -> tuple[float, bool]:
    """The distance between the tensors `key` of two files relative to their norm, and True if
    rounding alone explains this distance."""
    one = first.tensor(key)
    two = other.tensor(key)
    if one.shape != two.shape or one.dtype != two.dtype or not one.is_floating_point():
        return math.inf, False
    eps = torch.finfo(one.dtype).eps
    one = one.double()  # torch cannot subtract float8 tensors
    two = two.double()
    *norms, far = (float(torch.linalg.vector_norm(each)) for each in (one, two, one - two))
    if not far:  # the two tensors differ only in the signs of zeros
        return 0.0, True
    least = min(norms)
    name = _name_in_training(key)
    # without a recorded movement, use the tensor's norm, as if the tensor had started at zero
    moved = max(file.moved.get(name, least) for file in (first, other))
    return far / (least or far), far <= tolerance(least, moved, eps) < math.inf


def _name_in_training(key: str) -> str:
    """Returns the name that `Replicator.replicated` gives to the tensor saved under `key`.

    >>> keys = ("model.a.b", "optimizer.a.b.step", "replica.0.anchor.a.b", "replica.0.m.a.b")
    >>> [*map(_name_in_training, keys)]
    ['a.b', 'a.b (step)', 'a.b', 'a.b (m)']
    """
    part, _, name = key.partition(".")
    if part == "optimizer":
        parameter, _, entry = name.rpartition(".")
        return f"{parameter} ({entry_of(entry)})"
    if part != "replica":
        return name
    _, kind, name = name.split(".", 2)
    if kind == "anchor":
        return name
    return f"{name} ({kind})"


def _must_agree(file: ShardReader, described: Manifest) -> list[str]:
    """Keys of tensors in a shard that must be equal on all replicas after any step."""
    if described.alike:
        return [
            k
            for k in file.keys
            if k.startswith("optimizer.") or (k.startswith("model.") and k in file.boxes)
        ]
    agreed = [match for key in file.keys if (match := _AGREED.fullmatch(key))]
    anchors = Counter(match["parameter"] for match in agreed if match["kind"] == "anchor")
    # Replicas in a tier of the network are equal if the level on this tier exchanges gradients.
    # If the level exchanges weights or nothing, these replicas differ in their anchors.
    apart = (
        any(level["scheme"] == "none" for level in described.levels)
        or max(anchors.values(), default=0) > 1
    )
    if len(described.levels) > 1 and apart:
        return []
    return [match[0] for match in agreed]


def _equal(first: Tensor, second: Tensor) -> bool:
    """True if two tensors are bitwise equal: NaN equals itself, and 0.0 differs from -0.0."""
    same = (first.shape, first.dtype) == (second.shape, second.dtype)
    return same and torch.equal(first.view(-1).view(torch.uint8), second.view(-1).view(torch.uint8))


EXPORTED = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_Read = Callable[[str, Box | None], Tensor]


@torch.no_grad()
def load_weights(directory: Path, model: nn.Module) -> str:
    """Loads weights into `model`, which may be sharded: each rank reads its own part.

    Args:
        directory: A run directory (its newest complete checkpoint is read), a checkpoint, or a
            directory with safetensors files, as `detonation export` and transformers write them.

    Returns:
        In words, the source of the weights.

    Raises:
        ValueError: `directory` has no weights, or the weights of another model.
    """
    open_weights = _saved
    if any((directory / name).is_file() for name in (EXPORTED, _INDEX)):
        open_weights = _exported
    read, words = open_weights(directory)
    for name, tensor in weights(model).items():
        box = None
        if isinstance(tensor, nn.Parameter):
            box = Box.of(tensor)
        part = read(name, box)
        if part.shape != local(tensor).shape:
            raise ValueError(
                f"{directory} has {name} with shape {tuple(part.shape)}, but this model has"
                f" {tuple(tensor.shape)}: use the saved model"
            )
        local(tensor).copy_(part)
    return words


def _saved(directory: Path) -> tuple[_Read, str]:
    """Reader of the weights in the newest complete checkpoint, and a description of their
    source.
    """
    found = newest_model(directory)
    saved = found.reader
    source = found.source
    for line in found.rejected:
        _log.warning("%s", line)

    def read(name: str, box: Box | None) -> Tensor:
        return source.agreed(f"model.{name}", box, saved.manifest.alike)

    return read, "; ".join([f"weights of {saved.path}", *found.rejected])


def _exported(directory: Path) -> tuple[_Read, str]:
    """Reader of the weights in safetensors files, and a description of their source."""
    try:
        names = [EXPORTED]
        if not (directory / EXPORTED).is_file():
            names = sorted(
                {*json.loads(read_text(directory / _INDEX, links=True))["weight_map"].values()}
            )
        # follow links, because a snapshot in Hugging Face's cache consists of links
        files = [TensorFile((directory / Path(name).name).resolve()) for name in names]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{directory} holds no weights that can be read: {error}") from error
    found = {key: file for file in files for key in file.entries}

    def read(name: str, box: Box | None) -> Tensor:
        if name not in found:
            raise ValueError(f"{directory} has no weight {name}: use the saved model")
        entry = found[name].entries[name]
        if box is None or not box.shape:
            return found[name].read(name)
        if entry.shape != box.whole:
            raise ValueError(
                f"{directory} has {name} with shape {entry.shape}, but this model has {box.whole}:"
                " use the saved model"
            )
        rows, *rest = (
            slice(start, start + size) for start, size in zip(box.offset, box.shape, strict=True)
        )
        return found[name].read(name, rows)[:, *rest]

    return read, f"weights of {directory}"
