"""The data that one rank has to save, and the manifest that describes the files of all."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from detonation.checkpoint.files import shard_file
from detonation.checkpoint.files.manifest import MOST_BYTES, Manifest, file_name, versions
from detonation.checkpoint.files.shard_file import ShardSummary
from detonation.checkpoint.rank_state import run_identity
from detonation.checkpoint.save.snapshot import Snapshot, take_snapshot
from detonation.checkpoint.volumes import Volumes
from detonation.core.base_error import DetonationError
from detonation.core.link.coordinates import Coordinates, alike
from detonation.core.optimizer.replicated import Replicated


class NotSaved(DetonationError, OSError):
    """A checkpoint could not be written. The message names it, the reason, and what is still whole."""


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

    def manifest(self, reports: Sequence[Mapping[str, Any]], volumes: Volumes) -> Manifest:
        """The manifest for the files that the ranks have reported, by rank."""
        replicas, shards = self.coordinates.replicas, self.coordinates.shards
        names = [file_name(replica, shard) for replica in range(replicas) for shard in range(shards)]
        files = {report["name"]: ShardSummary(report["bytes"], report["sha256"]) for report in reports}
        numbers = {report["name"]: volumes.number(rank) for rank, report in enumerate(reports)}
        return Manifest(
            step=self.step,
            replicas=replicas,
            shards=shards,
            **self.identity,
            alike=self.alike,
            files={name: files[name] for name in names},
            versions=versions(),
            extra=self.extra,
            volumes=[] if volumes.shared else [numbers[name] for name in names],
        )


def make_save_job(
    model: nn.Module, optimizer: Replicated, extra: Mapping[str, Any] | None, frozen: bool = True
) -> SaveJob:
    """Copies the state of this rank. Raises `ValueError` for state, or for `extra`, that a checkpoint cannot hold."""
    copied_extra = _copied(dict(extra or {}))
    snapshot = take_snapshot(model, optimizer, frozen)
    return SaveJob(
        optimizer.step_count,
        optimizer.coordinates,
        snapshot,
        shard_file.shard_size(snapshot.tensors),
        alike(optimizer.levels),
        run_identity(optimizer),
        copied_extra,
    )


def _copied(extra: dict[str, Any]) -> dict[str, Any]:
    """A copy of `extra` by way of JSON. Raises `ValueError` where a manifest cannot hold it."""
    try:
        text = json.dumps({"extra": extra}, indent=1, allow_nan=False)  # as in the manifest
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"extra must hold JSON values: {error}") from error
    if len(text) > MOST_BYTES:
        more = f"more than the {MOST_BYTES:,} that a manifest may have"
        raise ValueError(f"extra has {len(text):,} bytes as JSON, {more}: write large values to a file of your own")
    copied: dict[str, Any] = json.loads(text)["extra"]
    return copied
