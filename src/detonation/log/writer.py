"""`UpdateLog`: appends every update of a rank to files."""

import hashlib
import logging
import os
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from detonation.core.agreement import selftest
from detonation.core.flat.padding_rows import used_rows
from detonation.core.flat.tensors import digest
from detonation.core.link import ElasticCommunicator
from detonation.core.optim import hooks_of
from detonation.core.optimizer import Replicated, local_parameters
from detonation.core.replicator import use_rows
from detonation.log.records import LOG_VERSION, START, STEP, Copies, LogRecord, StepRecorder, noted
from detonation.whole_files import replaced

SUFFIX = ".updates"
AT_ONCE_BYTES = 1 << 16
"""Largest step that is written without a thread; starting one would need as long."""
_KEPT = 4
"""Number of recent steps that a replica keeps if it may have to continue another replica's log."""
_log = logging.getLogger("detonation")


class UpdateLog(StepRecorder):
    """Records each step's messages as all replicas received them, and the optimizer's options at
    that step.

    A checkpoint and the log after it reproduce any later step, bit for bit: see `replay`. The first
    replica writes one file per shard; on other replicas an `UpdateLog` writes nothing. A step is
    logged completely or not at all: a killed process loses its current step. A step needs the bytes
    of the messages of all replicas, compressed as they were sent.

    A thread writes a large step (of `full`, or most rounds) while the next step computes. So a
    killed process may also lose the previous step, and the messages of two steps are in host
    memory. `close` waits for the thread.

    If writing fails, as on a full disk, the log ends after its last complete step with one warning,
    and training continues. After training returned to an earlier state, a new file begins there,
    and its steps replace the recorded steps.

    Args:
        directory: For the files of this run alone; made if it is missing.
        fsync_every: Number of steps after which the log is forced to the disk. With 0 the system
            decides: nothing is lost if a process dies, and some seconds if the machine does.

    Raises:
        ValueError: At `Replicated.record`, if the optimizer has several levels.

    Example:
        >>> import tempfile, torch, detonation as dt
        >>> from detonation.cluster.network.loopback import LoopbackCommunicator
        >>> model = torch.nn.Linear(2, 1)
        >>> sgd = torch.optim.SGD(model.parameters())
        >>> optimizer = dt.replicate(sgd, model, LoopbackCommunicator(2), dt.full())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     optimizer.record(dt.UpdateLog(folder))
        ...     optimizer.step()
        ...     [path.name for path in Path(folder).iterdir()]
        ['replica0-shard0-0.updates']
    """

    reader = "the update log"

    def __init__(self, directory: Path | str, fsync_every: int = 0) -> None:
        if fsync_every < 0:
            raise ValueError(f"fsync_every is {fsync_every}, must be at least 0")
        super().__init__()
        self.directory = Path(directory)
        self._fsync_every = fsync_every
        self._file = -1
        self._length = 0
        self._closing: Callable[[], object] = lambda: None
        self._levels: object = None  # the levels with which the file began
        self._thread: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None  # the last step
        self._kept: deque[list[LogRecord]] = deque(maxlen=_KEPT)
        self._identity: dict[str, Any] = {}  # of the kept steps
        self._start: dict[str, Any] = {}  # digest of the weights before the first step

    def begin(self, optimizer: Replicated) -> None:
        """Records a digest of the weights from which a replay from the start must begin."""
        self._start = {"start": digest(optimizer.model.parameters())}
        self._optimizer = optimizer
        self._last = optimizer.step_count
        self.note(optimizer)

    def watches(self, optimizer: Replicated) -> Collection[str]:
        """The weights of this optimizer, and weights that no optimizer trains. Other optimizers
        have logs of their own.
        """
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        parameters = local_parameters(optimizer.model)
        return {name for name, p in parameters.items() if id(p) in own} | optimizer.frozen.keys()

    def end(self, what: str, optimizer: Replicated) -> None:
        """Ends a step, or a call of `synchronize`."""
        first = optimizer.coordinates.replica == 0
        may_follow = any(isinstance(axis, ElasticCommunicator) for axis, _ in optimizer.levels)
        self.records = self.records and (first or may_follow)
        messages, goes_on = self.take_messages(what, optimizer)
        if not self.records:
            return
        with self._forgiving():
            # True at the first step, and after a change of settings or of trained parameters
            another = not goes_on or optimizer.build() is not self._levels
            if not first:
                self._keep(messages, what, optimizer, another)
                return
            if another:
                self._close_file()
            if not self.records:  # the last step of that file could not be written
                return
            if self._file < 0:
                if self._kept:
                    self._write_kept(optimizer)
                first_step = optimizer.step_count - (what == "step")
                self._begin(optimizer, first_step, _settings(optimizer) | self._origin)
                self._levels = optimizer.build()
            self.add_written()
            self.add(messages, what, optimizer)
            self.note(optimizer)
            if self._fsync_every and optimizer.step_count % self._fsync_every == 0:
                self._finish()
                os.fsync(self._file)

    def _keep(self, messages: Copies, what: str, optimizer: Replicated, another: bool) -> None:
        """Keeps the last steps, because the first replica may be lost before writing them."""
        if another:
            self.flush()
            self._kept.clear()
            self._levels = optimizer.build()
            self._identity = _settings(optimizer)
        self._options = []  # each kept step contains the hooks and all options of the groups
        self._hooks = []
        self.add_written()
        self.add(messages, what, optimizer)
        self.note(optimizer)

    def _write_kept(self, optimizer: Replicated) -> None:
        """Writes the kept steps in place of the lost first replica. Steps that this replica had
        already written are equal.
        """
        self.flush()
        kept = list(self._kept)
        self._kept = deque(maxlen=_KEPT)
        end = kept[0][-1]
        self._begin(
            optimizer, end.step - (end.kind == STEP), {**self._identity, "taken_over": True}
        )
        for records in kept:
            self.hand_on(records)
        self._close_file()

    def rotate(self, oldest: int = 0) -> None:
        """Begins a new file, for example after a checkpoint. Removes files that end at or before
        step `oldest`.
        """
        self.close()
        if not self.records:
            return
        try:
            for (rank, _, path), (other, end, _) in pairwise(segments(self.directory, "")):
                if rank == other and end <= oldest:
                    path.unlink(missing_ok=True)
        except OSError as error:
            _log.warning(
                "an old file of the update log in %s stays: %s", self.directory, error.strerror
            )

    def close(self) -> None:
        """Writes all queued steps and closes the file. A later step opens a new file."""
        if self._file >= 0:
            self.take_last_writes()
        self._close_file()

    def _close_file(self) -> None:
        if self._file >= 0:
            with self._forgiving():
                self.flush()
                self._finish()
                os.fsync(self._file)
            with suppress(OSError):  # the thread has written all data, or the log is closed
                self._closing()
        self._file = -1
        if self._thread is not None:
            self._thread.shutdown()
        self._thread = None

    @contextmanager
    def _forgiving(self) -> Iterator[None]:
        """Ends the log at its last complete step if the block fails to write."""
        try:
            yield
        except OSError as error:
            self.records = False
            self.forget()
            _log.warning(
                "the update log in %s ends: %s; training goes on without it",
                self.directory,
                error.strerror,
            )
            if self._file >= 0:
                with suppress(OSError):
                    os.ftruncate(self._file, self._length)

    def _begin(self, optimizer: Replicated, first: int, settings: dict[str, Any]) -> None:
        rank = optimizer.coordinates
        about = {"version": LOG_VERSION, "first": first, "rank": rank.name, **settings}
        if not first:
            about |= self._start
        self.directory.mkdir(parents=True, exist_ok=True)
        for _, begun, later in segments(self.directory, rank.name):
            # training returned to an earlier step, and will repeat these files' steps
            if begun > first:
                later.unlink(missing_ok=True)
        path = self.directory / f"{rank.name}-{first}{SUFFIX}"
        self._file = replaced(path)
        self._closing = weakref.finalize(self, os.close, self._file)
        self._options = []
        self._length = 0
        self.hand_on([noted(START, first, about)])

    def hand_on(self, records: Sequence[LogRecord]) -> None:
        """Appends the records to the file, or keeps them if another replica writes.

        A thread appends a large step while the next step computes.
        """
        if self._file < 0:
            self._kept.append([*records])
            return
        self._finish()
        if sum(len(record.content) for record in records) <= AT_ONCE_BYTES:
            self._append(records)
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "update-log")
        self._writing = self._thread.submit(self._append, records)

    def _finish(self) -> None:
        """Waits for the thread; raises its `OSError` if it could not write."""
        if self._writing is not None:
            writing = self._writing
            self._writing = None
            writing.result()

    def _append(self, records: Sequence[LogRecord]) -> None:
        parts = [memoryview(part) for record in records for part in record.parts() if len(part)]
        while parts:
            written = os.writev(self._file, parts[:512])
            while parts and written >= len(parts[0]):
                written -= len(parts.pop(0))
            if written:
                parts[0] = parts[0][written:]
        self._length = os.lseek(self._file, 0, os.SEEK_CUR)


def identity(optimizer: Replicated) -> dict[str, Any]:
    """The settings in which a run and a log must be equal, so that the run can replay the log.

    Raises `ValueError` for several levels.
    """
    if len(optimizer.levels) > 1:
        raise ValueError("an update log has one level of replication, not several")
    ((axis, scheme),) = optimizer.levels
    rank = optimizer.coordinates
    arguments = {name: str(value) for name, value in scheme.arguments.items()}
    layouts = [
        (slot.name, tuple(slot.shape)) for each in optimizer.build() for slot in each.layout.slots
    ]
    digest_of_layouts = hashlib.sha256(repr(layouts).encode()).hexdigest()
    return {
        "replicas": axis.size(),
        "shards": rank.shards,
        "scheme": scheme.name,
        "arguments": arguments,
        "seed": optimizer.settings.seed,
        "clip": optimizer.settings.clip,
        "optimizer": type(optimizer.base).__name__,
        "parameters": f"{len(layouts)}, {digest_of_layouts[:16]}",
    }


def arithmetic(optimizer: Replicated, options: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Digests of a self-test with the scheme and the base optimizer. They depend on this process's
    rounding and on `options`, by default the optimizer's own.
    """
    ((_, scheme),) = optimizer.levels
    found: dict[str, str] = {}
    for replicator in optimizer.build()[:1]:
        found |= selftest(scheme, replicator.channel.runtime, replicator.stepped, options)
    return found


def rounding(optimizer: Replicated) -> dict[str, Any]:
    """Settings and digests from which another process can round like this one."""
    return {"rounds_singly": optimizer.base_step.rounds_singly, "selftest": arithmetic(optimizer)}


def round_like(
    about: Mapping[str, Any],
    optimizer: Replicated,
    options: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """Makes `optimizer` round like the run that `about` describes, if it can; returns
    `arithmetic`."""
    optimizer.base_step.round_singly(about.get("rounds_singly", False))
    return arithmetic(optimizer, options)


def padding_of(optimizer: Replicated) -> dict[str, Any]:
    """Names of the embeddings whose padding rows change. A replica without gradients cannot know
    these names.
    """
    used = used_rows(optimizer.model)
    if used:
        return {"padding": used}
    return {}


def use_padding_of(about: Mapping[str, Any], optimizer: Replicated) -> None:
    """Lets the padding rows change that changed in the run that `about` describes."""
    if names := about.get("padding"):
        use_rows(names, optimizer.build(), optimizer.base_step)


def _settings(optimizer: Replicated) -> dict[str, Any]:
    close = {"close": optimizer.closeness is not None}
    about = {**identity(optimizer), **close, **rounding(optimizer), **padding_of(optimizer)}
    if hooks := hooks_of(optimizer.base):
        about["hooks"] = hooks
    return about


def segments(directory: Path, rank: str) -> list[tuple[str, int, Path]]:
    """Files of a log, in order: the rank that wrote each, the number of steps before it, and its
    path. `rank` is "" for all ranks.
    """
    found = []
    for path in directory.glob(f"*{SUFFIX}"):
        name, _, first = path.name.removesuffix(SUFFIX).rpartition("-")
        if first.isdecimal() and rank in ("", name):
            found.append((name, int(first), path))
    return sorted(found)
