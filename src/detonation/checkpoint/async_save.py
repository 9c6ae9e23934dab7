"""Saving while training continues: training waits only until its state has been copied to the
host.
"""

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from detonation.checkpoint.files.retention import checkpoint_name
from detonation.checkpoint.gather import Texts, device_of, elastic_axis, texts_between
from detonation.checkpoint.shard_saver import (
    NotSaved,
    SaveJob,
    ShardSaver,
    failing_if_lost,
    make_save_job,
)
from detonation.core.optimizer import Replicated
from detonation.core.runtime import PROGRESS

_log = logging.getLogger("detonation.checkpoint")
_HOST = torch.device("cpu")
# torch makes set_timeout public from version 2.14 on
_set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
SAVE_TIMEOUT_S = 300.0
"""Longest time in seconds that a save waits for another rank, in addition to the time that a slow
disk needs."""
LOWEST_BYTES_PER_S = 10e6
"""Lowest rate at which a rank is expected to write to its disk."""


class Checkpoints(AbstractContextManager["Checkpoints"]):
    """Checkpoints of one run. `save` copies the state and returns; a thread writes the copy.

    Only one save runs at a time: `save` waits until the previous save has ended. `wait` returns the
    checkpoint that a save has written, or raises the error of the save. Failures are also in the
    log and in `news`. A `with` block ends after the last save has ended, unless an exception ends
    the block.

    Args:
        directory: for the checkpoints. Without a shared file system each node has its own
            directory, with the files of the node's ranks.
        keep: how many of the newest checkpoints to keep.

    Raises:
        ValueError: `keep` is below 1.

    Example:
        >>> import tempfile, torch, torch.distributed as dist, detonation as dt
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model, mesh = torch.nn.Linear(8, 1), dt.init_mesh(replicas=1, shards=1, device="cpu")
        >>> adamw = torch.optim.AdamW(model.parameters())
        >>> optimizer = dt.replicate(adamw, model, mesh["replicate"], dt.loco())
        >>> folder = tempfile.TemporaryDirectory()
        >>> with dt.Checkpoints(folder.name, model, optimizer, keep=2) as checkpoints:
        ...     for step in range(6):
        ...         model(torch.randn(4, 8)).mean().backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...         if optimizer.step_count % 2 == 0:
        ...             checkpoints.save({"epoch": 0})
        >>> sorted(path.name for path in checkpoints.directory.iterdir())
        ['step-000004', 'step-000006']
        >>> folder.cleanup(); dt.leave()
    """

    def __init__(
        self, directory: Path | str, model: nn.Module, optimizer: Replicated, keep: int = 3
    ) -> None:
        _require_positive(keep)
        self.directory = Path(directory)
        self._keep = keep
        self._model = model
        self._optimizer = optimizer
        self._group: dist.ProcessGroup | None = None
        self._saver: ShardSaver | None = None
        self._thread: threading.Thread | None = None
        self._outcome: Path | NotSaved | None = None
        self._broken = False
        self._news: list[str] = []

    def save(self, extra: Mapping[str, Any] | None = None) -> None:
        """Starts to save the current state as the checkpoint of step `optimizer.step_count`. All
        ranks call this function between two steps.

        The argument `extra` and the errors `ValueError` and `OverlapError` are the same as in
        `save_checkpoint`.
        """
        self._join()
        elastic = elastic_axis(self._optimizer)
        try:
            with _as_saving():
                _meet(self._model, self._optimizer)
        except NotSaved as error:
            self._note_failure(error)
            return
        # make the job before the group: if making the job raises an error, no group stays open
        job = make_save_job(self._model, self._optimizer, extra)
        if elastic is None:
            self._open_group()
        if self._group is not None:
            timeout = timedelta(seconds=SAVE_TIMEOUT_S + job.bytes / LOWEST_BYTES_PER_S)
            _set_timeout(timeout, self._group)
        # make a new saver, because replicas may have joined or left since the last save
        if elastic is not None:
            self._saver = ShardSaver(self.directory, self._keep, elastic.texts())
        # daemon: the thread may wait forever for a lost rank, and must not keep the process alive
        self._saver = self._saver or ShardSaver(
            self.directory, self._keep, Texts(_HOST, self._group)
        )
        self._thread = threading.Thread(
            target=self._write, args=(self._saver, job), name="checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self) -> Path | None:
        """Waits for the running save; returns the path of the checkpoint, equal on all ranks.

        Raises:
            NotSaved: one of the ranks could not write, was too late or was lost; raised on all
                ranks.
        """
        self._join()
        outcome = self._outcome
        self._outcome = None
        if isinstance(outcome, NotSaved):
            self._news = [line for line in self._news if line != str(outcome)]
            raise outcome
        return outcome

    def news(self) -> list[str]:
        """Failures of saves since the last call, one line each. All ranks get the same lines, but
        not always in the same call.
        """
        lines = self._news
        self._news = []
        return lines

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:  # after an error, the running save may wait for ranks that have ended
            self.close()

    def close(self) -> None:
        """Waits for the running save, and closes the process group of the saves, as the end of a
        `with` block does. All ranks call this function. A later `save` opens another group.
        """
        self._join()
        if self._group is not None:
            dist.destroy_process_group(self._group)
        self._group = self._saver = None

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _open_group(self) -> None:
        """Creates the process group of the writing thread. If a failed save broke this group on any
        rank, creates another group.

        All ranks must call this function together.
        """
        if dist.get_world_size() == 1:
            return
        if self._group is not None:
            # a rank whose save succeeded learns here that the save failed on another rank
            broken = ""
            if self._broken:
                broken = "broken"
            if not any(Texts(device_of(self._model)).gather(broken)):
                return
            dist.destroy_process_group(self._group)
        # the thread needs its own group, so that its collectives do not mix with those of training
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=SAVE_TIMEOUT_S))
        # no rank may close the group while another rank still connects to it
        dist.barrier(self._group)
        self._saver = None
        self._broken = False

    def _write(self, saver: ShardSaver, job: SaveJob) -> None:
        try:
            self._outcome = saver.save(job)
        except NotSaved as error:  # `NotSaved` is raised on all ranks
            self._note_failure(error)
        # any other error, such as a timeout of gloo, is raised on this rank alone
        except Exception as error:
            self._broken = True  # after an error, gloo can use the process group no longer
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            still = "earlier checkpoints are unchanged"
            text = f"checkpoint {checkpoint_name(job.step)} failed: {reason}; {still}"
            self._note_failure(NotSaved(text, getattr(error, "errno", None)))

    def _note_failure(self, error: NotSaved) -> None:
        text = str(error)
        # make a new error: the traceback of `error` would keep the copy of the state in memory
        self._outcome = NotSaved(text, error.errno, error.lost)
        self._news.append(text)
        _log.warning("%s", text)


def save_checkpoint(
    directory: Path | str,
    model: nn.Module,
    optimizer: Replicated,
    extra: Mapping[str, Any] | None = None,
    keep: int = 3,
    frozen: bool = True,
) -> Path:
    """Saves the state between two steps, and waits until the checkpoint is complete. All ranks must
    call this function.

    Gradients are not part of a checkpoint: save after `step()`, not between the backward passes
    that accumulate gradients for one step. If the directory holds a checkpoint of a later step, a
    warning says so once, because loading from the directory would take the later checkpoint.

    To save while training continues, use `Checkpoints`.

    Args:
        directory: for the checkpoints. Without a shared file system each node has its own
            directory, with the files of the node's ranks.
        extra: values such as a scheduler's state. Loading returns them equal in value and type.
            Allowed are numbers, texts, bytes, the containers of Python and of `collections`,
            tensors, numpy arrays, enums, dates and paths. Only the values of rank 0 are saved:
            gather values that differ between ranks first, for example with
            `torch.distributed.all_gather_object`.
        keep: how many of the newest checkpoints to keep.
        frozen: False omits the parameters that require no gradient, such as the model under a LoRA
            adapter. Loading compares these parameters with saved checksums, and keeps them.

    Returns:
        The checkpoint, `directory/step-NNNNNN`.

    Raises:
        NotSaved: one of the ranks could not write, or a replica was lost; raised on all ranks.
            Earlier checkpoints are unchanged.
        ValueError: `keep` is below 1, or a checkpoint cannot hold a value in the state or in
            `extra`; the message names the value's key.
        OverlapError: gradients were sent in `overlap`, and their step is missing.

    Example:
        >>> import tempfile, torch, torch.distributed as dist, detonation as dt
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model, mesh = torch.nn.Linear(8, 1), dt.init_mesh(replicas=1, shards=1, device="cpu")
        >>> adamw = torch.optim.AdamW(model.parameters())
        >>> optimizer = dt.replicate(adamw, model, mesh["replicate"], dt.loco())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saved = dt.save_checkpoint(folder, model, optimizer, {"epoch": 3})
        ...     sorted(file.name for file in saved.iterdir())
        ['manifest.json', 'replica0-shard0.safetensors']
        >>> dt.leave()
    """
    _require_positive(keep)
    with _as_saving():
        _meet(model, optimizer)
        job = make_save_job(model, optimizer, extra, frozen)
        return ShardSaver(Path(directory), keep, texts_between(model, optimizer)).save(job)


@contextmanager
def _as_saving() -> Iterator[None]:
    """Context manager that marks this rank as saving, so that ranks that wait for this rank can log
    why they wait."""
    PROGRESS.where = "saving"
    try:
        yield
    finally:
        PROGRESS.where = "outside"


def _meet(model: nn.Module, optimizer: Replicated) -> None:
    """Waits until all ranks have begun to save, if copying the state needs collectives over the
    links between replicas.

    Without this wait, a rank that is still in a step would mistake these collectives for messages
    of its step. Raises `NotSaved` on all remaining ranks if a replica is lost meanwhile.
    """
    late = any(scheme.round.delay for _, scheme in optimizer.levels)
    if late or not optimizer.is_built:
        with failing_if_lost(optimizer.step_count):
            texts_between(model, optimizer).gather("")


def _require_positive(keep: int) -> None:
    if keep < 1:
        raise ValueError(
            f"keep is {keep}, must be at least 1: the newest checkpoint is always kept"
        )
