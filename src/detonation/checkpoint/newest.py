"""Finds the newest checkpoint that is complete for all ranks, and loads it.

Each rank inspects the checkpoints in its own directory; then the ranks exchange the results.
"""

import hashlib
import json
import logging
import platform
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from detonation.checkpoint.files import retention
from detonation.checkpoint.files.manifest import (
    MANIFEST_NAME,
    Manifest,
    file_name,
    manifest_bytes,
    parse_manifest,
    versions,
)
from detonation.checkpoint.files.reader import CheckpointReader
from detonation.checkpoint.files.shard_file import CorruptCheckpoint, shard_fault
from detonation.checkpoint.gather import ranges, texts_between
from detonation.checkpoint.restore import compare_frozen, own_file, restore
from detonation.checkpoint.snapshot import FIRST_OPTIONS, held_shards
from detonation.choices import first_names
from detonation.core.agreement import options_of
from detonation.core.base_error import DetonationError
from detonation.core.link import Coordinates, TextExchange
from detonation.core.optimizer import Replicated


@dataclass(frozen=True)
class View:
    """What one rank sees of a checkpoint in its own directory.

    host: name of the rank's machine. digest: sha256 of the manifest. file: inode and change time of
    the manifest, equal on all ranks that share the file. fault: fault in the manifest, or in a file
    that this rank checks. lacks: replicas with a file that this rank needs and does not find.
    has: replicas for which this rank finds all files.
    """

    host: str
    digest: str
    file: str
    fault: str = ""
    lacks: Sequence[int] = ()
    has: Sequence[int] = ()


def candidates(directory: Path, texts: TextExchange) -> list[str]:
    """Names of the checkpoints that any rank has in its `directory`, newest first. All ranks must
    call this function together."""
    mine = json.dumps([path.name for path in retention.saved_checkpoints(directory)])
    names = {Path(name) for text in set(texts.gather(mine)) for name in json.loads(text)}
    return [path.name for path in retention.newest_first(names)]


def inspect(
    directory: Path, name: str, own: Coordinates, held: Collection[int], texts: TextExchange
) -> tuple[Path, Manifest | None, str]:
    """Checks on all ranks whether they can load the checkpoint `name`. Returns its path on this
    rank, its manifest, and the reason why a rank cannot load it ("" if all ranks can). All ranks
    must call this function together.

    held: the shards of this rank. The path can already have the final name of the checkpoint while
    another rank still sees its temporary name.
    """
    path = retention.committed(directory, name)
    manifest, view = _manifest(path)
    views = _gathered(view, texts)
    if reason := _disagreement(views):
        return path, None, reason
    assert manifest is not None
    # `step_of` returns -1 if the caller named a checkpoint whose name contains no step
    if retention.step_of(path) not in (-1, manifest.step):
        return path, None, f"its name is not that of step {manifest.step}"
    sharing = [rank for rank, other in enumerate(views) if other.file == view.file]
    view = _files(path, manifest, own, held, sharing, texts.rank)
    views = _gathered(view, texts)
    fault = next((other.fault for other in views if other.fault), "")
    return path, manifest, _absence(views, manifest, own) or fault


def _gathered(view: View, texts: TextExchange) -> list[View]:
    return [View(**json.loads(text)) for text in texts.gather(json.dumps(asdict(view)))]


def _manifest(path: Path) -> tuple[Manifest | None, View]:
    try:
        content = manifest_bytes(path)
        status = (path / MANIFEST_NAME).stat()
        digest = hashlib.sha256(content).hexdigest()
        file = f"{status.st_ino} {status.st_ctime_ns}"
        return parse_manifest(content), View(platform.node(), digest, file)
    except (CorruptCheckpoint, OSError) as error:
        return None, View(platform.node(), "", "", str(error))


def _disagreement(views: Sequence[View]) -> str:
    """The reason why not all ranks have the same complete manifest; "" if all ranks have it."""
    first = views[0]
    if all(view.fault for view in views):
        return first.fault
    if faulty := [rank for rank, view in enumerate(views) if view.fault]:
        remedy = "copy the files of all replicas there from another node"
        return f"{views[faulty[0]].fault} {_where(faulty, views)}: {remedy}"
    if other := [rank for rank, view in enumerate(views) if view.digest != first.digest]:
        return f"{MANIFEST_NAME} {_where(other, views)} is not that of rank 0 on {first.host}"
    return ""


def _files(
    path: Path,
    manifest: Manifest,
    own: Coordinates,
    held: Collection[int],
    sharing: Sequence[int],
    rank: int,
) -> View:
    """Checks the files of a checkpoint that this rank must read.

    If each rank must read all files, the ranks that share a directory (`sharing`) divide the checks
    among themselves.
    """
    present = {file.name for file in path.glob("*.safetensors")}
    replicas = range(manifest.replicas)
    shards = range(manifest.shards)
    has = [r for r in replicas if all(file_name(r, shard) in present for shard in shards)]
    if (manifest.replicas, manifest.shards) == (own.replicas, own.shards):
        checked = [file_name(own.replica, shard) for shard in held]
        lacks = [own.replica]
        if present.issuperset(checked):
            lacks = []
    else:
        checked = list(manifest.files)[sharing.index(rank) :: len(sharing)]
        lacks = [replica for replica in replicas if replica not in has]
    faults = [shard_fault(path / name, manifest.files[name]) for name in checked]
    fault = next(filter(None, faults), "")
    return View(platform.node(), "", "", fault, lacks, has)


def _absence(views: Sequence[View], manifest: Manifest, own: Coordinates) -> str:
    """Describes which replicas' files are missing on nodes that need them, and gives a remedy.

    Returns "" if no such file is missing. Also returns "" if all ranks see the same files, because
    then a missing file is a fault of the checkpoint.
    """
    if not manifest.volumes and all(view.has == views[0].has for view in views):
        return ""
    texts = []
    for replica in sorted({replica for view in views for replica in view.lacks}):
        need = [rank for rank, view in enumerate(views) if replica in view.lacks]
        have = [rank for rank, view in enumerate(views) if replica in view.has]
        there = "on no node"
        if have:
            there = f"only {_where(have, views)}"
        texts.append(f"replica {replica} is needed {_where(need, views)}, and is {there}")
    if not texts:
        return ""
    if (manifest.replicas, manifest.shards) == (own.replicas, own.shards):
        remedy = "start the nodes in the same order as in the saved run, or copy the missing files"
    else:
        remedy = (
            f"to resume as {own.replicas} x {own.shards}, copy all replicas' files to each node"
        )
    return f"{'; '.join(texts[:4])}: {remedy}"


def _where(ranks: Sequence[int], views: Sequence[View]) -> str:
    hosts = ", ".join(dict.fromkeys(views[rank].host for rank in ranks))
    return f"on {hosts} (rank{'s' * (len(ranks) > 1)} {ranges(ranks)})"


_LONGEST = 600
_log = logging.getLogger("detonation.checkpoint")


class NoCheckpoint(DetonationError, ValueError):
    """Checkpoints exist, but none of them is complete; or the one checkpoint that the caller named
    is missing or not complete.
    """


@dataclass(frozen=True)
class Found:
    """A complete checkpoint. rejected: one line for each newer checkpoint, with its fault."""

    path: Path
    manifest: Manifest
    rejected: list[str]


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was loaded.

    step: the step after which the checkpoint was saved. extra: the values saved with it, equal in
    value and type; tensors are on the host. merged: in words, how the state of the saved replicas
    and shards was merged into the state of this run.
    """

    path: Path
    step: int
    extra: dict[str, Any]
    merged: str


def load_checkpoint(
    directory: Path | str, model: nn.Module, optimizer: Replicated
) -> Loaded | None:
    """Loads the newest complete checkpoint of `directory` into `model` and `optimizer`. All ranks
    must call this function.

    `directory` may also be one checkpoint, such as the path that `save_checkpoint` returned: then
    exactly this checkpoint is loaded. If there are later checkpoints, remove these, or save in
    another directory.

    Call this function after `replicate` and before the first step. If the saved run had the
    same numbers of replicas and shards, training continues bit for bit as if it had not been
    interrupted. Otherwise weights on which all replicas agreed are exact, and the memories of
    unsent values are merged as `detonation.checkpoint.elastic` describes. Incomplete checkpoints
    are skipped; the log gives the reason for each. Gradients are dropped: after an error they
    belong to the step that failed.

    Returns:
        The path, step and `extra` of the checkpoint. None if `directory` holds no checkpoint or
        does not exist; the log says so (level INFO).

    Raises:
        NoCheckpoint: no checkpoint is complete for all ranks, or the checkpoint that `directory`
            names is missing or not complete. If nodes share no file system, the message names the
            missing files, the host that needs them and the host that has them.
        ValueError: the checkpoint was saved with another model, optimizer, scheme or seed, or with
            other frozen weights, which the checkpoint omits.

    Example:
        >>> import tempfile, torch, torch.distributed as dist, detonation as dt
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model, mesh = torch.nn.Linear(8, 1), dt.init_mesh(replicas=1, shards=1, device="cpu")
        >>> adamw = torch.optim.AdamW(model.parameters())
        >>> optimizer = dt.replicate(adamw, model, mesh["replicate"], dt.loco())
        >>> folder = tempfile.TemporaryDirectory()
        >>> dt.load_checkpoint(folder.name, model, optimizer)  # nothing to load yet
        >>> path = dt.save_checkpoint(folder.name, model, optimizer, {"epoch": 3})
        >>> loaded = dt.load_checkpoint(folder.name, model, optimizer)
        >>> loaded.step, loaded.extra, loaded.merged
        (0, {'epoch': 3}, 'exactly as saved')
        >>> folder.cleanup(); dt.leave()
    """
    path = Path(directory)
    found = find_named(path, model, optimizer) or find(path, model, optimizer)
    if found is None:
        if texts_between(model, optimizer).rank == 0:
            _log.info("no checkpoint in %s: training starts from the beginning", path)
        return None
    return load_found(found, model, optimizer)


def find_named(path: Path, model: nn.Module, optimizer: Replicated) -> Found | None:
    """Finds the checkpoint that `path` names; None if `path` is a directory of checkpoints. All
    ranks must call this function together.

    Raises `NoCheckpoint` if the checkpoint is not complete for all ranks.
    """
    texts = texts_between(model, optimizer)
    named = ""
    if retention.is_checkpoint(path):
        named = "named"
    # without a shared file system, `path` may be a checkpoint on some nodes only
    if candidates(path, texts) or not any(texts.gather(named)):
        return None
    own, held = held_shards(model, optimizer)
    found, manifest, reason = inspect(path.parent, path.name, own, held, texts)
    if manifest is not None and not reason:
        return Found(found, manifest, [])
    others = [name for name in candidates(path.parent, texts) if name != path.name]
    remedy = f"{path.parent} holds no other checkpoint"
    if others:
        remedy = f"give another checkpoint: {path.parent} holds {first_names(others)}"
    raise NoCheckpoint(f"{path} is no whole checkpoint: {reason}; {remedy}")


def find(
    directory: Path, model: nn.Module, optimizer: Replicated, most: int | None = None
) -> Found | None:
    """Finds the newest checkpoint of `directory` that is complete for all ranks, at step `most` or
    before; None if there is no checkpoint. All ranks must call this function together.

    Raises `NoCheckpoint` if there are checkpoints, but none of them is complete.
    """
    texts = texts_between(model, optimizer)
    rejected: dict[str, str] = {}
    names = [
        name
        for name in candidates(directory, texts)
        if most is None or retention.step_of(Path(name)) <= most
    ]
    own, held = held_shards(model, optimizer)
    for name in names:
        path, manifest, reason = inspect(directory, name, own, held, texts)
        if manifest is not None and not reason:
            return Found(path, manifest, rejections(rejected, name))
        rejected[name] = reason
    if rejected:
        raise none_whole(directory, rejected)
    return None


def rejections(rejected: Mapping[str, str], used: str) -> list[str]:
    """One line for each checkpoint in `rejected` (reasons by name). `used` is the checkpoint that
    is loaded instead.
    """
    return [f"{name} rejected: {reason}; using {used}" for name, reason in rejected.items()]


def none_whole(directory: Path, rejected: Mapping[str, str]) -> NoCheckpoint:
    """The error for a `directory` in which all checkpoints were `rejected`. It gives the reason for
    the newest checkpoint."""
    name, reason = next(iter(rejected.items()))
    return NoCheckpoint(f"no checkpoint in {directory} is whole: {name} rejected: {reason}")


def load_found(found: Found, model: nn.Module, optimizer: Replicated) -> Loaded:
    """Loads the checkpoint `found` into `model` and `optimizer`. All ranks must call this function
    together.

    Gradients are dropped, because they belong to a step after the loaded state. Raises `ValueError`
    on all ranks if the checkpoint does not fit this run. In that case no state has changed, but
    gradients that `overlap` has sent no longer count as sent.
    """
    optimizer.drop_overlap()
    texts = texts_between(model, optimizer)
    saved = CheckpointReader(found.path, found.manifest)
    with _refused_together(found, texts):  # a frozen weight may differ on a single rank
        uncompared = compare_frozen(saved, model, optimizer)
    with _refused_together(found, texts):
        extra = found.manifest.given
        begun = optimizer.step_count > 0
        given = options_of(optimizer.base, {})
        merged, complete = restore(saved, model, optimizer)
    with _refused_together(found, texts):
        merged += uncompared + complete() + _other_versions(found.manifest)
        replaced = _replaced(given, saved, model, optimizer)
    optimizer.resume_at(found.manifest.step)
    optimizer.zero_grad()
    optimizer.call_after_loading()
    for line in found.rejected:
        _log.warning("%s", line)
    if replaced and not begun and texts.rank == 0:
        _log.warning(
            "%s replaced options of the optimizer: %s; the saved values count now: to change them,"
            " set optimizer.param_groups after the load",
            found.path,
            first_names(replaced),
        )
    _log.info("%s: %s", found.path, merged)
    return Loaded(found.path, found.manifest.step, extra, merged)


_SCHEDULED = {"lr": "initial_lr", "momentum": "max_momentum", "betas": "max_momentum"}
"""Options that schedulers set, each with the key that such a scheduler adds to a group."""


def _replaced(
    given: Mapping[str, str], saved: CheckpointReader, model: nn.Module, optimizer: Replicated
) -> list[str]:
    """Describes the options that this run gave to its optimizer (`given`) and that loading replaced
    by saved options.

    An option is left out if the saved run was given the same value. In that case the training loop
    of the saved run changed the option later, and the loop of this run may do so, too.
    """
    first = own_file(saved, held_shards(model, optimizer)[0]).values.get(FIRST_OPTIONS)
    if not isinstance(first, dict):
        return []  # an earlier version wrote the checkpoint
    now = options_of(optimizer.base, {})
    found = []
    for name, value in given.items():
        key, _, group = name.partition(" ")
        by_scheduler = f"{_SCHEDULED.get(key)} {group}" in now
        if key not in optimizer.defaults or by_scheduler:
            continue
        loaded = now.get(name, value)
        if value not in (loaded, first.get(name, value)):
            found.append(f"{name} (saved {loaded}, given {value})")
    return found


@contextmanager
def _refused_together(found: Found, texts: TextExchange) -> Iterator[None]:
    """Context manager: if the `with` block raises an error on any rank, all ranks raise
    `ValueError` with the text of this error. All ranks must enter the block together.
    """
    problem = ""
    try:
        yield
    except Exception as error:
        problem = f"{found.path} cannot be loaded: {error!r}"
        if isinstance(error, ValueError):
            problem = str(error)
        problem = problem.split("\n")[0][:_LONGEST]
    for text in texts.gather(problem):
        if text:
            raise ValueError(text)


def _other_versions(manifest: Manifest) -> str:
    """A warning if other versions of the software wrote the checkpoint; else ""."""
    current = versions()
    other = [
        f"{name} {str(was)[:20]!r}"
        for name, was in manifest.versions.items()
        if current.get(name) != was
    ]
    if other:
        return f"; written with {', '.join(other[:3])}: last bits may differ from now on"
    return ""
