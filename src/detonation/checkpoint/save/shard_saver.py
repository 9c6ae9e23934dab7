"""The save of one rank's file, and the agreement of all ranks that makes their files a checkpoint."""

import contextlib
import json
import logging
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from detonation.checkpoint.files import retention, shard_file
from detonation.checkpoint.files.manifest import file_name
from detonation.checkpoint.save.shard_job import NotSaved, SaveJob
from detonation.checkpoint.volumes import Volumes, survey
from detonation.core.link.elastic_communicator import PeerLost, TextExchange

_log = logging.getLogger("detonation.checkpoint")


class ShardSaver:
    """Saves the file of this rank, and with the other ranks turns the files of all into a checkpoint.

    Without a shared file system `directory` is one of its own on each node. Each then has the files of its own ranks,
    and all have the same manifest.

    Args:
        keep: how many of the newest checkpoints stay.
    """

    def __init__(self, directory: Path, keep: int, texts: TextExchange) -> None:
        self._directory, self._keep, self._texts = directory, keep, texts
        self._volumes: Volumes | None = None

    def save(self, job: SaveJob) -> Path:
        """Saves `job`. Collective; the leader of each volume makes, names and removes directories.

        All manifests are on the disk before the first of them counts, and all count before an older checkpoint goes. So
        whenever a node ends, one checkpoint is whole on all nodes.

        Raises `NotSaved` on all ranks where one of them cannot write, or is lost.
        """
        try:
            return self._saved(job)
        except PeerLost as error:
            name = retention.checkpoint_name(job.step)
            raise NotSaved(
                f"checkpoint {name} failed: {error}; the next one is of the replicas that are left"
            ) from error

    def _saved(self, job: SaveJob) -> Path:
        directory, step = self._directory, job.step
        volumes = self._volumes = self._volumes or self._survey(job)
        leads = volumes.leads(self._texts.rank)
        self._agree(job, volumes, leads, lambda: retention.begin(directory, step))
        reports = self._agree(job, volumes, True, lambda: self._write_shard(job))
        made: list[str] = []
        self._agree(job, volumes, self._texts.rank == 0, lambda: made.append(job.manifest(reports, volumes).dumps()))
        manifest = "".join(made) if volumes.shared else self._texts.broadcast("".join(made))
        self._agree(job, volumes, leads, lambda: retention.put_manifest(directory, step, manifest))
        reports = self._agree(job, volumes, leads, lambda: _commit(directory, step))
        if leads:
            common = _common([report["steps"] for report in reports if "steps" in report])
            retention.retire(directory, step, [saved for saved in common if saved <= step][: self._keep])
        return directory / retention.checkpoint_name(step)

    def _survey(self, job: SaveJob) -> Volumes:
        try:
            volumes = survey(self._directory, self._texts)
        except OSError as error:
            report = {"failure": error.strerror, "free": _free(self._directory)}
            raise self._failure(job, report, job.bytes) from error
        if not volumes.shared and self._texts.rank == 0:
            ranks = volumes.ranks_text()
            _log.warning("no shared file system: each node saves its ranks in its own %s (%s)", self._directory, ranks)
        return volumes

    def _write_shard(self, job: SaveJob) -> dict[str, Any]:
        own, world_size = job.coordinates, self._texts.world_size
        path = retention.partial_path(self._directory, job.step) / file_name(own.replica, own.shard)
        if world_size != own.replicas * own.shards or path.exists():
            world = f"{own.replicas} replicas x {own.shards} shards"
            more = ": pass intra_node where the ranks of a node hold the model whole" if own.shards == 1 else ""
            raise ValueError(f"{world_size} ranks are not {world}, each once; this one is {own.name}{more}")
        return {"name": path.name, **asdict(shard_file.write_shard(path, job.snapshot.tensors, job.snapshot.rest))}

    def _agree(
        self, job: SaveJob, volumes: Volumes, acts: bool, act: Callable[[], Mapping[str, Any] | None]
    ) -> list[dict[str, Any]]:
        """Calls `act` on the ranks that act. Returns the reports of all ranks; raises `NotSaved` where one failed."""
        report: dict[str, Any] = {"need": job.bytes}
        try:
            report |= (act() if acts else None) or {}
        except (OSError, ValueError, TypeError, RecursionError) as error:
            where = "" if volumes.shared else f" on {platform.node()}"
            text = f"{getattr(error, 'strerror', None) or error}{where}"
            report |= {"failure": text, "free": _free(self._directory)}
        reports = [json.loads(text) for text in self._texts.gather(json.dumps(report))]
        failed = next((rank for rank, report in enumerate(reports) if "failure" in report), None)
        if failed is None:
            return reports
        if volumes.leads(self._texts.rank):
            with contextlib.suppress(OSError):
                retention.abandon(self._directory, job.step)
        self._volumes = None  # a file system may have come or gone
        beside = [rank for rank, leader in enumerate(volumes.leaders) if leader == volumes.leaders[failed]]
        raise self._failure(job, reports[failed], sum(reports[rank]["need"] for rank in beside))

    def _failure(self, job: SaveJob, report: Mapping[str, Any], need: int) -> NotSaved:
        """The error, the same on all ranks. Collective, so that none raises before all have cleaned up."""
        saved = [json.loads(text) for text in self._texts.gather(json.dumps(_steps(self._directory)))]
        before = [step for step in _common(saved) if step < job.step]
        still = f"{retention.checkpoint_name(before[0])} is still whole" if before else "there is none before it"
        sizes = f"need {_amount(need)}, {_amount(report['free'])} free"
        name = retention.checkpoint_name(job.step)
        return NotSaved(f"checkpoint {name} failed: {report['failure']} ({sizes}); {still}")


def _commit(directory: Path, step: int) -> dict[str, Any]:
    retention.commit(directory, step)
    return {"steps": _steps(directory)}


def _steps(directory: Path) -> list[int]:
    return [retention.step_of(path) for path in retention.saved_checkpoints(directory)]


def _common(steps: Sequence[Sequence[int]]) -> list[int]:
    """The steps that occur in all lists, newest first."""
    return sorted(set.intersection(*map(set, steps)), reverse=True)


def _free(directory: Path) -> int:
    """The bytes that are free in `directory`; 0 where there is none."""
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return 0


def _amount(count: int) -> str:
    """A number of bytes in words: 2.1 GB."""
    unit, name = next((u, n) for u, n in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes")) if count >= u or u == 1)
    return f"{count / unit:.1f} {name}"
