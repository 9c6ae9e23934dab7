"""Saving on one rank: it copies the rank's data, writes the rank's file, and agrees with all other
ranks on the checkpoint."""

import contextlib
import errno
import json
import logging
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from detonation.checkpoint.files import retention, shard_file
from detonation.checkpoint.files.extra_values import encoded_extra
from detonation.checkpoint.files.manifest import MOST_BYTES, Manifest, file_name, versions
from detonation.checkpoint.files.shard_file import ShardSummary
from detonation.checkpoint.gather import Volumes, survey
from detonation.checkpoint.snapshot import (
    Snapshot,
    held_shards,
    run_identity,
    split_snapshot,
    take_snapshot,
)
from detonation.core.base_error import DetonationError
from detonation.core.link import Coordinates, PeerLost, TextExchange, alike
from detonation.core.optimizer import Replicated


class NotSaved(DetonationError, OSError):
    """A checkpoint was not written. The message gives the reason and the newest complete
    checkpoint.

    errno: code of the system error, if a system error was the reason. lost: True if the loss of a
    replica was the reason: the remaining replicas can save again.
    """

    def __init__(self, text: str, number: int | None = None, lost: bool = False) -> None:
        super().__init__(text)
        self.errno = number
        self.lost = lost


@contextlib.contextmanager
def failing_if_lost(step: int) -> Iterator[None]:
    """Context manager for the exchanges of a save of `step`: raises `NotSaved` on all remaining
    ranks if a replica is lost meanwhile."""
    try:
        yield
    except PeerLost as error:
        raise NotSaved(
            f"checkpoint {retention.checkpoint_name(step)} failed: {error}; the remaining replicas"
            " save the next checkpoint",
            lost=True,
        ) from error


@dataclass(frozen=True)
class SaveJob:
    """The data that one rank must write into a checkpoint, by shard.

    ranks: the number of ranks that save. bytes: approximate size of the data. identity: see
    `run_identity`. extra: the result of `encoded_extra`.
    """

    step: int
    coordinates: Coordinates
    ranks: int
    snapshots: Mapping[int, Snapshot]
    bytes: int
    alike: bool
    identity: dict[str, Any]
    extra: dict[str, Any]

    def manifest(self, reports: Sequence[Mapping[str, Any]], volumes: Volumes) -> Manifest:
        """The manifest of the checkpoint. `reports` holds what each rank reported about the files
        that it wrote."""
        replicas = self.coordinates.replicas
        shards = self.coordinates.shards
        names = [
            file_name(replica, shard) for replica in range(replicas) for shard in range(shards)
        ]
        files: dict[str, ShardSummary] = {}
        numbers: dict[str, int] = {}
        for rank, report in enumerate(reports):
            for name, summary in report["files"].items():
                files[name] = ShardSummary(*summary)
                numbers[name] = volumes.number(rank)
        directories: list[int] = []
        if not volumes.shared:
            directories = [numbers[name] for name in names]
        return Manifest(
            step=self.step,
            replicas=replicas,
            shards=shards,
            **self.identity,
            alike=self.alike,
            files={name: files[name] for name in names},
            versions=versions(),
            extra=self.extra,
            volumes=directories,
        )


def make_save_job(
    model: nn.Module, optimizer: Replicated, extra: Mapping[str, Any] | None, frozen: bool = True
) -> SaveJob:
    """Copies the state of this rank, and returns the job that writes this copy to a checkpoint.

    Raises `ValueError` for state, or for `extra`, that a checkpoint cannot hold.
    """
    values = encoded_extra(extra or {}, MOST_BYTES)
    optimizer.call_before_saving()
    snapshot = take_snapshot(model, optimizer, frozen)
    shard_file.require_types({name: tensor.dtype for name, tensor in snapshot.tensors.items()})
    own, held = held_shards(model, optimizer)
    ranks = own.replicas * own.shards
    if any(held.values()):
        ranks = dist.get_world_size()
    header_bytes = 200  # approximate bytes of the file header per tensor
    return SaveJob(
        optimizer.step_count,
        own,
        ranks,
        split_snapshot(snapshot, optimizer, held),
        sum(tensor.nbytes + header_bytes for tensor in snapshot.tensors.values()),
        alike(optimizer.levels),
        run_identity(optimizer),
        values,
    )


_OF_SIZE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, 0)
"""Numbers of the system errors for which the text of `NotSaved` shows how many bytes are needed and
how many are free. 0 is an error without a number."""
_log = logging.getLogger("detonation.checkpoint")


class ShardSaver:
    """Saves this rank's file, and with the other ranks combines all files into a checkpoint.

    Without a shared file system each node has its own `directory`, with the files of its ranks and
    the same manifest.

    keep: number of newest checkpoints to keep. An older checkpoint is removed when all nodes have
    `keep` newer checkpoints.
    """

    def __init__(self, directory: Path, keep: int, texts: TextExchange) -> None:
        self._directory = directory
        self._keep = keep
        self._texts = texts
        self._volumes: Volumes | None = None

    def save(self, job: SaveJob) -> Path:
        """Saves `job`. All ranks must call this function together. One rank of each volume (the
        ranks that share a directory) creates, renames and removes directories.

        All manifests are on disk before the first directory is renamed, and all directories are
        renamed before an older checkpoint is removed. So one checkpoint is complete on all nodes,
        even if a node fails at any moment.

        Raises `NotSaved` on all ranks if one of them cannot write, or is lost.
        """
        with failing_if_lost(job.step):
            return self._saved(job)

    def _saved(self, job: SaveJob) -> Path:
        directory = self._directory
        step = job.step
        volumes = self._volumes = self._volumes or self._survey(job)
        leads = volumes.leads(self._texts.rank)
        agree = partial(self._agree, job, volumes)
        agree(leads, lambda: retention.begin(directory, step))
        reports = agree(True, lambda: self._write_shard(job))
        made: list[str] = []
        agree(
            self._texts.rank == 0,
            lambda: made.append(job.manifest(reports, volumes).dumps()),
        )
        manifest = "".join(made)
        if not volumes.shared:
            manifest = self._texts.broadcast(manifest)
        agree(leads, lambda: retention.put_manifest(directory, step, manifest))
        reports = agree(leads, lambda: _commit(directory, step))
        if leads:
            common = _common([report["steps"] for report in reports if "steps" in report])
            if self._texts.rank == 0:
                _warn_of_later(directory, step, common)
            kept = [saved for saved in common if saved <= step][: self._keep]
            # remove none while a node that joined late has fewer than `keep` checkpoints
            if len(kept) == self._keep:
                retention.retire(directory, kept[-1])
        return directory / retention.checkpoint_name(step)

    def _survey(self, job: SaveJob) -> Volumes:
        try:
            volumes = survey(self._directory, self._texts)
        except OSError as error:
            report = {
                "failure": error.strerror,
                "errno": error.errno,
                "free": _free(self._directory),
            }
            raise self._failure(job, report, job.bytes) from error
        if not volumes.shared and self._texts.rank == 0:
            ranks = volumes.ranks_text()
            _log.warning(
                "no shared file system: each node saves its ranks in its own %s (%s)",
                self._directory,
                ranks,
            )
        return volumes

    def _write_shard(self, job: SaveJob) -> dict[str, Any]:
        own = job.coordinates
        world_size = self._texts.world_size
        folder = retention.partial_path(self._directory, job.step)
        paths = {
            folder / file_name(own.replica, shard): each for shard, each in job.snapshots.items()
        }
        if world_size != job.ranks or any(path.exists() for path in paths):
            world = f"{own.replicas} replicas x {own.shards} shards"
            more = (
                "; stages of a pipeline cannot be saved in this way: save the states of model and"
                " base optimizer, and replica_state(optimizer), on each rank yourself"
            )
            if own.shards == 1:
                more = f": pass intra_node if each rank of a node holds the whole model{more}"
            raise ValueError(
                f"{world_size} ranks save a state of {world}, but exactly one rank must save each"
                f" shard; this rank is {own.name}{more}"
            )
        done = {
            p.name: shard_file.write_shard(p, each.tensors, each.rest) for p, each in paths.items()
        }
        return {"files": {name: [summary.bytes, summary.sha256] for name, summary in done.items()}}

    def _agree(
        self,
        job: SaveJob,
        volumes: Volumes,
        acts: bool,
        act: Callable[[], Mapping[str, Any] | None],
    ) -> list[dict[str, Any]]:
        """Calls `act` on ranks where `acts` is True, and returns the reports of all ranks. All
        ranks must call this function together.

        Raises `NotSaved` on all ranks if `act` failed on any rank.
        """
        report: dict[str, Any] = {"need": job.bytes}
        try:
            if acts:
                report |= act() or {}
        except (OSError, ValueError, TypeError, RecursionError) as error:
            where = ""
            if not volumes.shared:
                where = f" on {platform.node()}"
            text = f"{getattr(error, 'strerror', None) or error}{where}"
            report["failure"] = text
            if isinstance(error, OSError):
                report |= {"errno": error.errno, "free": _free(self._directory)}
        reports = [json.loads(text) for text in self._texts.gather(json.dumps(report))]
        failed = next((rank for rank, report in enumerate(reports) if "failure" in report), None)
        if failed is None:
            return reports
        if volumes.leads(self._texts.rank):
            with contextlib.suppress(OSError):
                retention.abandon(self._directory, job.step)
        # the next save finds out again which ranks share a directory: mounts may have changed
        self._volumes = None
        full = volumes.leaders[failed]
        needs = [
            report["need"] for rank, report in enumerate(reports) if volumes.leaders[rank] == full
        ]
        raise self._failure(job, reports[failed], sum(needs))

    def _failure(self, job: SaveJob, report: Mapping[str, Any], need: int) -> NotSaved:
        """Creates the error for a failed save, with the same text on all ranks.

        All ranks must call this function together, so that no rank raises the error before all
        ranks have cleaned up.
        """
        saved = [
            json.loads(text) for text in self._texts.gather(json.dumps(_steps(self._directory)))
        ]
        before = [step for step in _common(saved) if step < job.step]
        still = "there is no earlier checkpoint"
        if before:
            still = f"{retention.checkpoint_name(before[0])} is still whole"
        sizes = ""
        if report.get("errno") in _OF_SIZE:
            sizes = f" (need {_amount(need)}, {_amount(report['free'])} free)"
        name = retention.checkpoint_name(job.step)
        return NotSaved(
            f"checkpoint {name} failed: {report['failure']}{sizes}; {still}", report.get("errno")
        )


_warned: set[Path] = set()
"""Directories that `_warn_of_later` has warned of."""


def _warn_of_later(directory: Path, step: int, saved: Sequence[int]) -> None:
    """Warns once per directory and process if one of the `saved` checkpoints has a later step than
    `step`. Such a checkpoint is from an earlier run, or from this run before it returned to an
    earlier step.
    """
    place = directory.absolute()
    if place in _warned or max(saved, default=step) <= step:
        return
    _warned.add(place)
    _log.warning(
        "%s in %s is later than the checkpoint of step %d, which was saved now: a resume would load"
        " the later checkpoint; remove it, or save in another directory",
        retention.checkpoint_name(max(saved)),
        directory,
        step,
    )


def _commit(directory: Path, step: int) -> dict[str, Any]:
    retention.commit(directory, step)
    return {"steps": _steps(directory)}


def _steps(directory: Path) -> list[int]:
    return [retention.step_of(path) for path in retention.saved_checkpoints(directory)]


def _common(steps: Sequence[Sequence[int]]) -> list[int]:
    return sorted(set.intersection(*map(set, steps)), reverse=True)


def _free(directory: Path) -> int:
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return 0


def _amount(count: int) -> str:
    """Formats a number of bytes: 2.1 GB."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count:.1f} bytes"
