"""One rank's part of a save, and the exchange by which all ranks learn whether the checkpoint is whole."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from detonation.checkpoint.files import retention, shard_file
from detonation.checkpoint.files.manifest import Manifest, file_name, versions
from detonation.checkpoint.files.shard_file import ShardSummary
from detonation.checkpoint.rank_state import run_identity
from detonation.checkpoint.save.snapshot import Snapshot, take_snapshot
from detonation.core.errors import DetonationError
from detonation.core.link.coordinates import Coordinates, alike
from detonation.core.optimizer.replicated import Replicated

GatherText = Callable[[str], list[str]]
"""All-gathers a text: the texts of all ranks, by rank."""


class NotSaved(DetonationError, OSError):
    """A checkpoint could not be written. The message names it, the reason, and the checkpoint that is still whole."""


@dataclass(frozen=True)
class SaveJob:
    """The data that one rank has to write. bytes: about its size. identity: see `run_identity`."""

    step: int
    coordinates: Coordinates
    snapshot: Snapshot
    bytes: int
    alike: bool
    identity: dict[str, Any]
    extra: dict[str, Any]

    def manifest(self, files: dict[str, ShardSummary]) -> Manifest:
        replicas, shards = self.coordinates.replicas, self.coordinates.shards
        names = [file_name(replica, shard) for replica in range(replicas) for shard in range(shards)]
        return Manifest(
            step=self.step,
            replicas=replicas,
            shards=shards,
            **self.identity,
            alike=self.alike,
            files={name: files[name] for name in names},
            versions=versions(),
            extra=self.extra,
        )


def make_save_job(model: nn.Module, optimizer: Replicated, extra: Mapping[str, Any] | None) -> SaveJob:
    """Copies the state of this rank. Raises `ValueError` for state, or for `extra`, that a checkpoint cannot hold."""
    copied_extra = json.loads(json.dumps(dict(extra or {}), allow_nan=False))
    snapshot = take_snapshot(model, optimizer)
    return SaveJob(
        optimizer.step_count,
        optimizer.coordinates,
        snapshot,
        shard_file.shard_size(snapshot.tensors),
        alike(optimizer.levels),
        run_identity(optimizer),
        copied_extra,
    )


def save_shard(directory: Path, job: SaveJob, keep: int, gather: GatherText) -> Path:
    """Writes this rank's file; rank 0 then turns the files of all ranks into a checkpoint. Collective by `gather`.

    Raises `NotSaved` on all ranks where one of them cannot write.
    """
    first = dist.get_rank() == 0
    _agree(directory, job, gather, _attempt(lambda: retention.begin(directory, job.step)) if first else {})
    folder = retention.partial_path(directory, job.step)
    reports = _agree(directory, job, gather, _attempt(lambda: _write_shard(folder, job)))
    files = {report["name"]: ShardSummary(report["bytes"], report["sha256"]) for report in reports}
    finish = partial(retention.finish, directory, job.manifest(files), keep)
    _agree(directory, job, gather, _attempt(finish) if first else {})
    return directory / retention.checkpoint_name(job.step)


def _agree(directory: Path, job: SaveJob, gather: GatherText, report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Gathers the reports of all ranks; raises `NotSaved` on all ranks where one report has a failure."""
    reports: list[dict[str, Any]] = [json.loads(text) for text in gather(json.dumps({**report, "need": job.bytes}))]
    failed = [report for report in reports if "failure" in report]
    if not failed:
        return reports
    before = [path for path in retention.saved_checkpoints(directory) if retention.step_of(path) < job.step]
    free = shutil.disk_usage(directory).free if directory.is_dir() else 0
    if dist.get_rank() == 0:
        _attempt(lambda: retention.abandon(directory, job.step))
    gather("")  # no rank raises before the partial directory is removed
    need = sum(report["need"] for report in reports)
    still = f"{before[0].name} is still whole" if before else "there is none before it"
    sizes = f"need {_amount(need)}, {_amount(free)} free"
    name = retention.checkpoint_name(job.step)
    raise NotSaved(f"checkpoint {name} failed: {failed[0]['failure']} ({sizes}); {still}")


def _write_shard(folder: Path, job: SaveJob) -> dict[str, Any]:
    if not folder.is_dir():
        raise FileNotFoundError(2, "all ranks need one file system, and this one does not see what the first made")
    own, world_size = job.coordinates, dist.get_world_size()
    name = file_name(own.replica, own.shard)
    if world_size != own.replicas * own.shards or (folder / name).exists():
        world = f"{own.replicas} replicas x {own.shards} shards"
        raise ValueError(f"{world_size} ranks are not {world}, each once; this one is {own.name}")
    return {"name": name, **asdict(shard_file.write_shard(folder / name, job.snapshot.tensors, job.snapshot.rest))}


def _attempt(write: Callable[[], object]) -> dict[str, Any]:
    """The report of `write`, or its failure."""
    try:
        report = write()
    except (OSError, ValueError) as error:
        return {"failure": getattr(error, "strerror", None) or str(error)}
    return report if isinstance(report, dict) else {}


def _amount(count: int) -> str:
    """A number of bytes in words: 2.1 GB."""
    unit, name = next((u, n) for u, n in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes")) if count >= u or u == 1)
    return f"{count / unit:.1f} {name}"
