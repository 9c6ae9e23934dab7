"""Saving: one rank's part of making a checkpoint, and how all ranks find out whether it was made."""

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
from detonation.checkpoint.files.shard_file import File
from detonation.checkpoint.load.restore import described
from detonation.checkpoint.save.snapshot import Snapshot, take
from detonation.core.link.coordinates import Place, alike
from detonation.core.optimizer.replicated import Replicated

Gather = Callable[[str], list[str]]
"""Everyone's text, by rank; collective."""


class NotSaved(OSError):
    """A checkpoint could not be written; the text says which, why, and what is still whole."""


@dataclass(frozen=True)
class Job:
    """What one rank has to write. bytes: about how many."""

    step: int
    place: Place
    snapshot: Snapshot
    bytes: int
    alike: bool
    described: dict[str, Any]
    extra: dict[str, Any]

    def manifest(self, files: dict[str, File]) -> Manifest:
        place = self.place
        names = [file_name(replica, shard) for replica in range(place.replicas) for shard in range(place.shards)]
        return Manifest(
            step=self.step,
            replicas=place.replicas,
            shards=place.shards,
            **self.described,
            alike=self.alike,
            files={name: files[name] for name in names},
            versions=versions(),
            extra=self.extra,
        )


def job_of(model: nn.Module, optimizer: Replicated, extra: Mapping[str, Any] | None) -> Job:
    """A copy of what this rank has to write."""
    plain = json.loads(json.dumps(dict(extra or {}), allow_nan=False))
    snapshot = take(model, optimizer)
    need = shard_file.size(snapshot.tensors)
    same = alike(optimizer.levels)
    return Job(optimizer.step_count, optimizer.place, snapshot, need, same, described(optimizer), plain)


def save(directory: Path, job: Job, keep: int, gather: Gather) -> Path:
    """Writes this rank's file; the first rank makes all of them a checkpoint. Collective by `gather`.

    Raises `NotSaved` on all ranks where one of them cannot.
    """
    first = dist.get_rank() == 0
    _agree(directory, job, gather, _attempt(lambda: retention.begin(directory, job.step)) if first else {})
    place = retention.part(directory, job.step)
    reports = _agree(directory, job, gather, _attempt(lambda: _file(place, job)))
    files = {report["name"]: File(report["bytes"], report["sha256"]) for report in reports}
    finish = partial(retention.finish, directory, job.manifest(files), keep)
    _agree(directory, job, gather, _attempt(finish) if first else {})
    return directory / retention.title(job.step)


def _agree(directory: Path, job: Job, gather: Gather, mine: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Everyone's report; raises `NotSaved` on all ranks where one of them tells of a failure."""
    everyone: list[dict[str, Any]] = [json.loads(text) for text in gather(json.dumps({**mine, "need": job.bytes}))]
    failed = [report for report in everyone if "failure" in report]
    if not failed:
        return everyone
    before = [path for path in retention.candidates(directory) if retention.step_of(path) < job.step]
    free = shutil.disk_usage(directory).free if directory.is_dir() else 0
    if dist.get_rank() == 0:
        _attempt(lambda: retention.abandon(directory, job.step))
    gather("")  # nobody says so before it is cleared away
    need = sum(report["need"] for report in everyone)
    still = f"{before[0].name} is still whole" if before else "there is none before it"
    sizes = f"need {_amount(need)}, {_amount(free)} free"
    raise NotSaved(f"checkpoint {retention.title(job.step)} failed: {failed[0]['failure']} ({sizes}); {still}")


def _file(place: Path, job: Job) -> dict[str, Any]:
    if not place.is_dir():
        raise FileNotFoundError(2, "all ranks need one file system, and this one does not see what the first made")
    name = file_name(job.place.replica, job.place.shard)
    if dist.get_world_size() != job.place.replicas * job.place.shards or (place / name).exists():
        world = f"{job.place.replicas} replicas x {job.place.shards} shards"
        raise ValueError(f"{dist.get_world_size()} ranks are not {world}, each once; this one is {job.place.name}")
    return {"name": name, **asdict(shard_file.write(place / name, job.snapshot.tensors, job.snapshot.rest))}


def _attempt(write: Callable[[], object]) -> dict[str, Any]:
    """What `write` reports, or how it failed."""
    try:
        report = write()
    except (OSError, ValueError) as error:
        return {"failure": getattr(error, "strerror", None) or str(error)}
    return report if isinstance(report, dict) else {}


def _amount(count: int) -> str:
    """Bytes in words, to two digits or three: 2.1 GB."""
    unit, name = next((u, n) for u, n in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes")) if count >= u or u == 1)
    return f"{count / unit:.1f} {name}"
