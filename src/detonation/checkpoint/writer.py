"""Writer: saves checkpoints beside training, which waits for a copy to the host and no longer."""

import json
import logging
import platform
import shutil
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from detonation.checkpoint import shardfile, shelf
from detonation.checkpoint.manifest import Manifest, file_name
from detonation.checkpoint.restore import described
from detonation.checkpoint.shardfile import File
from detonation.checkpoint.snapshot import Snapshot, take
from detonation.checkpoint.world import gather
from detonation.core.place import Place, alike
from detonation.core.replicate import Replicated

_log = logging.getLogger("detonation")
_HOST = torch.device("cpu")


class NotSaved(OSError):
    """A checkpoint could not be written; the text says which, why, and what is still whole."""


class Checkpoints:
    """The checkpoints of one run in `directory`, a directory that all ranks see; the newest `keep` stay.

    `save` copies the state and returns; a thread writes it. One save at a time: the next one waits for it. What became
    of a save that nobody waited for is in the log, and in `news`. As a context manager it waits at the end, unless an
    exception ends it.
    """

    def __init__(self, directory: Path | str, model: nn.Module, optimizer: Replicated, keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}, must be at least 1: the newest checkpoint always stays")
        self.directory, self._keep = Path(directory), keep
        self._model, self._optimizer = model, optimizer
        self._group: dist.ProcessGroup | None = None
        self._thread: threading.Thread | None = None
        self._outcome: Path | Exception | None = None
        self._news: list[str] = []

    def save(self, extra: Mapping[str, Any] | None = None) -> None:
        """Starts saving the state between two steps, named by `optimizer.step_count`. All ranks call it.

        extra: JSON values that come back on loading, such as a scheduler's state; those of the first rank count.
        Raises `ValueError` where the state holds what a checkpoint cannot.
        """
        self._finish()
        if self._group is None and dist.get_world_size() > 1:
            # collectives of the writing thread must not mix with those of training
            self._group = dist.new_group(backend="gloo")
        job = _job(self._model, self._optimizer, extra)
        # daemon: after a failure elsewhere nobody may wait for a thread that waits for a rank that is gone
        self._thread = threading.Thread(target=self._write, args=(job,), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> Path | None:
        """Waits for the save that is on its way; returns the checkpoint, the same on all ranks.

        Raises `NotSaved` on all ranks where one of them could not write.
        """
        self._finish()
        outcome, self._outcome = self._outcome, None
        if isinstance(outcome, Exception):
            self._news.pop()
            raise outcome
        return outcome

    def news(self) -> list[str]:
        """What went wrong with saves since the last call, in lines; the same on all ranks, sooner or later."""
        lines, self._news = self._news, []
        return lines

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._finish()

    def _finish(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, job: "_Job") -> None:
        try:
            self._outcome = self._saved(job)
        except Exception as error:
            self._outcome = error
            self._news.append(str(error))
            _log.warning("%s", error)

    def _saved(self, job: "_Job") -> Path:
        """Writes this rank's file; the first rank makes all of them a checkpoint. Collective among the threads."""
        first = dist.get_rank() == 0
        self._agree(job, _attempt(lambda: shelf.begin(self.directory, job.step)) if first else {})
        place = shelf.part(self.directory, job.step)
        reports = self._agree(job, _attempt(lambda: _file(place, job)))
        if first:
            files = {report["name"]: File(report["bytes"], report["sha256"]) for report in reports}
            manifest = job.manifest(files)
        self._agree(job, _attempt(lambda: shelf.finish(self.directory, manifest, self._keep)) if first else {})
        return self.directory / shelf.title(job.step)

    def _agree(self, job: "_Job", mine: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Everyone's report; raises `NotSaved` on all ranks where one of them tells of a failure."""
        everyone: list[dict[str, Any]] = [
            json.loads(text) for text in gather(json.dumps({**mine, "need": job.bytes}), _HOST, self._group)
        ]
        failed = [report for report in everyone if "failure" in report]
        if not failed:
            return everyone
        before = [path for path in shelf.candidates(self.directory) if shelf.step_of(path) < job.step]
        free = shutil.disk_usage(self.directory).free if self.directory.is_dir() else 0
        if dist.get_rank() == 0:
            _attempt(lambda: shelf.abandon(self.directory, job.step))
        gather("", _HOST, self._group)  # nobody says so before it is cleared away
        need = sum(report["need"] for report in everyone)
        still = f"{before[0].name} is still whole" if before else "there is none before it"
        sizes = f"need {_amount(need)}, {_amount(free)} free"
        raise NotSaved(f"checkpoint {shelf.title(job.step)} failed: {failed[0]['failure']} ({sizes}); {still}")


def save_checkpoint(
    directory: Path | str,
    model: nn.Module,
    optimizer: Replicated,
    extra: Mapping[str, Any] | None = None,
    keep: int = 3,
) -> Path:
    """Saves the state between two steps to `directory/step-NNNNNN` and returns that, whole. All ranks call it.

    `Checkpoints` does the same while training goes on; arguments as there. Raises `NotSaved` on all ranks where one
    could not write; what was saved before is then as it was.
    """
    checkpoints = Checkpoints(directory, model, optimizer, keep)
    checkpoints.save(extra)
    saved = checkpoints.wait()
    assert saved is not None
    return saved


@dataclass(frozen=True)
class _Job:
    """One rank's part of a save. bytes: about how many it will write."""

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
        if sorted(files) != sorted(names):
            raise ValueError(f"ranks are {', '.join(sorted(files))}, not {place.replicas} x {place.shards}, each once")
        return Manifest(
            step=self.step,
            replicas=place.replicas,
            shards=place.shards,
            **self.described,
            alike=self.alike,
            files={name: files[name] for name in names},
            versions=_versions(),
            extra=self.extra,
        )


def _job(model: nn.Module, optimizer: Replicated, extra: Mapping[str, Any] | None) -> _Job:
    plain = json.loads(json.dumps(dict(extra or {}), allow_nan=False))
    snapshot = take(model, optimizer)
    need = shardfile.size(snapshot.tensors)
    same = alike(optimizer.levels)
    return _Job(optimizer.step_count, optimizer.place, snapshot, need, same, described(optimizer), plain)


def _file(place: Path, job: _Job) -> dict[str, Any]:
    if not place.is_dir():
        raise FileNotFoundError(2, "all ranks need one file system, and this one does not see what the first made")
    name = file_name(job.place.replica, job.place.shard)
    return {"name": name, **asdict(shardfile.write(place / name, job.snapshot.tensors, job.snapshot.rest))}


def _attempt(write: Any) -> dict[str, Any]:
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


def _versions() -> dict[str, str]:
    from detonation import __version__

    return {"detonation": __version__, "torch": torch.__version__, "python": platform.python_version()}
