"""Writer: saves checkpoints beside training, which waits for a copy to the host and no longer."""

import logging
import threading
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from detonation.checkpoint.gather import device_of, gather
from detonation.checkpoint.save.shard_job import Job, job_of, save
from detonation.core.optimizer.replicated import Replicated

_log = logging.getLogger("detonation.checkpoint")
_HOST = torch.device("cpu")
PATIENCE_S = 300.0
"""How long a writer waits for those of other ranks that are alive; what a slow disk takes for a file comes on top."""
LOWEST_BYTES_PER_S = 10e6
"""What one rank writes a second at least."""


class Checkpoints:
    """The checkpoints of one run in `directory`, a directory that all ranks see; the newest `keep` stay.

    `save` copies the state and returns; a thread writes it. One save at a time: the next one waits for it. What became
    of a save that nobody waited for is in the log, and in `news`. As a context manager it waits at the end, unless an
    exception ends it.
    """

    def __init__(self, directory: Path | str, model: nn.Module, optimizer: Replicated, keep: int = 3) -> None:
        _require(keep)
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
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=PATIENCE_S))
        job = job_of(self._model, self._optimizer, extra)
        if self._group is not None:
            patience = timedelta(seconds=PATIENCE_S + job.bytes / LOWEST_BYTES_PER_S)
            distributed_c10d._set_pg_timeout(patience, self._group)
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
            self._news = [line for line in self._news if line != str(outcome)]
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

    def _write(self, job: Job) -> None:
        try:
            self._outcome = save(self.directory, job, self._keep, partial(gather, device=_HOST, group=self._group))
        except Exception as error:
            self._outcome = error
            self._news.append(str(error))
            _log.warning("%s", error)


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
    _require(keep)
    job = job_of(model, optimizer, extra)
    return save(Path(directory), job, keep, partial(gather, device=device_of(model)))


def _require(keep: int) -> None:
    if keep < 1:
        raise ValueError(f"keep is {keep}, must be at least 1: the newest checkpoint always stays")
