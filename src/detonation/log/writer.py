"""`UpdateLog`: writes every update of a rank to the end of a file."""

import hashlib
import logging
import os
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from detonation.core.agreement import selftest
from detonation.core.flat.padding_rows import used_rows
from detonation.core.flat.tensors import digest, octets
from detonation.core.link import ElasticCommunicator
from detonation.core.optim import hooks_of
from detonation.core.optimizer import Replicated, local_parameters
from detonation.core.replicator import use_rows
from detonation.log.kept import KeptSteps
from detonation.log.records import (
    LOG_VERSION,
    MESSAGE,
    START,
    STEP,
    Copies,
    LogRecord,
    StepRecorder,
    agreed_digest,
    heads,
    last_step,
    noted,
    opening,
    start_of,
)
from detonation.whole_files import make_directories, opened, replaced, sync_entries

SUFFIX = ".updates"
AT_ONCE_BYTES = 1 << 16
"""Largest number of bytes of a step that is written without a thread, because starting a thread
would take as long as writing.
"""
_log = logging.getLogger("detonation")


class UpdateLog(StepRecorder):
    """Records the messages of each step as all replicas received them, and the options of the
    optimizer at that step.

    A checkpoint and the log that was written after it reproduce any later step, bit for bit: see
    `replay`. The first replica writes one file per shard; on other replicas an `UpdateLog` writes
    nothing. Each step is logged completely or not at all, so a killed process loses its current
    step. A step needs as many bytes as the messages of all replicas, compressed as they were sent.

    A thread writes a large step (for example of `full`, or of most rounds) while the next step
    computes. So a killed process may also lose the step before the current step, and the messages
    of two steps are in host memory. `close` waits for the thread.

    If writing fails, for example on a full disk, the log ends after its last complete step. A
    warning says so once, and training continues. If training returns to an earlier state, a new
    file begins at that state. The steps in this file replace the steps that were recorded before.

    Args:
        directory: A directory for the files of this run alone; made if it is missing. If it holds
            the log of an earlier run, a run that starts at step 0 replaces this log and warns.
        fsync_every: Number of steps after which the log is forced to the disk. With 0 the system
            decides when: the end of a process then loses no logged step, but a failure of the
            machine may lose the last seconds.

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
        self._path: Path | None = None  # path of the file that was begun last
        self._length = 0
        self._closing: Callable[[], object] = lambda: None
        self._levels: object = None  # the optimizer's levels when the current file began
        self._thread: ThreadPoolExecutor | None = None
        # the write of the last step, which a thread may still execute
        self._writing: Future[None] | None = None
        self._kept = KeptSteps()
        self._begun = 0  # number of steps when this log began
        self._start: dict[str, Any] = {}  # digest of the state with which this log began

    def begin(self, optimizer: Replicated) -> None:
        """Records a digest of the weights before the first step. A replay from the start must begin
        with the same weights. If this replica has just joined, records a digest of the state that
        it has received: the log of the other replicas must lead to this state.
        """
        if optimizer.step_count and self._last >= 0:
            return  # this log has begun: the optimizer only rebuilt its levels before a first step
        self._start = {"start": digest(optimizer.model.parameters())}
        if optimizer.step_count:
            self._start = {"joined": agreed_digest(optimizer)}
        self._begun = optimizer.step_count
        self._optimizer = optimizer
        self._last = optimizer.step_count
        self.note(optimizer)

    def watches(self, optimizer: Replicated) -> Collection[str]:
        """Returns the names of the weights of this optimizer, and of weights that no replicated
        optimizer trains. Other replicated optimizers have their own logs.
        """
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        parameters = local_parameters(optimizer.model)
        return {
            name for name, p in parameters.items() if id(p) in own
        } | optimizer.unreplicated.keys()

    def end(self, what: str, optimizer: Replicated) -> None:
        """Writes the records of the step or the `synchronize` call that has just ended."""
        first = optimizer.coordinates.replica == 0
        may_follow = any(isinstance(axis, ElasticCommunicator) for axis, _ in optimizer.levels)
        self.records = self.records and (first or may_follow)
        messages, goes_on = self.take_messages(what, optimizer)
        if not self.records:
            return
        with self._forgiving():
            # A new file begins at the first step, or after training returned to an earlier step.
            # A new file also begins after a change of the scheme or of the parameters.
            another = not goes_on or optimizer.build() is not self._levels
            if not first:
                self._keep(messages, what, optimizer, another)
                return
            if another:
                self._close_file()
            if not self.records:  # closing the last file may have failed, which ends the log
                return
            if self._file < 0:
                self._open(optimizer, optimizer.step_count - (what == "step"), goes_on, another)
            self.add_written()
            self.add(messages, what, optimizer)
            self.note(optimizer)
            if self._fsync_every and optimizer.step_count % self._fsync_every == 0:
                self._finish()
                os.fsync(self._file)

    def _open(self, optimizer: Replicated, first: int, goes_on: bool, another: bool) -> None:
        """Opens a file for the records after `first` steps.

        Args:
            goes_on: True if no step is missing before the file.
            another: True if the records have other settings, or follow a gap.
        """
        if self._kept:
            self._write_kept(optimizer)
        if not (goes_on and self._continue(optimizer, first)):
            settings = _settings(optimizer) | self._origin
            earlier: list[LogRecord] = []
            if goes_on and not self._origin:
                earlier = opening(self._path_of(optimizer, first), settings)
            self._begin(optimizer, first, settings, earlier)
        elif another:
            self._change(optimizer, first)
        self._levels = optimizer.build()

    def _keep(self, messages: Copies, what: str, optimizer: Replicated, another: bool) -> None:
        """Keeps the last steps in RAM. If the first replica is lost before it has written these
        steps, this replica can write them.
        """
        if another:
            self.flush()
            if self._kept and _others_are_lost(optimizer):
                self._write_kept(optimizer)
            self._levels = optimizer.build()
            self._kept.begin(_settings(optimizer), self._origin)
        # record all options and hooks at each step: a file may begin with any of the kept steps
        self._options = []
        self._hooks = []
        self.add_written()
        self.add(messages, what, optimizer)
        self.note(optimizer)

    def _write_kept(self, optimizer: Replicated) -> None:
        """Writes the kept steps to the log in place of the first replica, which is lost. If that
        replica had already written some of these steps, the new records are equal to the old ones.
        """
        self.flush()
        first, settings, earlier, events = self._kept.take(
            lambda first: self._path_of(optimizer, first)
        )
        self._begin(optimizer, first, {**settings, "taken_over": True}, earlier)
        for records in events:
            self.hand_on(records)
        self._close_file()

    def rotate(self, oldest: int = 0) -> None:
        """Begins a new file, for example after a checkpoint. Removes files whose last step is
        `oldest` or earlier. A file whose last step is `oldest` stays if it ends with a write or a
        `synchronize` call, which a checkpoint of that step may not include.
        """
        self.close()
        if not self.records:
            return
        try:
            for (rank, _, path), (other, end, _) in pairwise(segments(self.directory, "")):
                if rank == other:
                    _remove_if_old(path, end, oldest)
        except OSError as error:
            _log.warning(
                "an old file of the update log in %s could not be removed: %s",
                self.directory,
                error.strerror,
            )

    def close(self) -> None:
        """Writes all queued steps and closes the file. A later step opens a new file."""
        if self._file >= 0:
            self.take_last_writes()
            self._write_arrived()
        elif self._kept and self._optimizer and _others_are_lost(self._optimizer):
            self.take_last_writes()
            with self._forgiving():
                self._write_kept(self._optimizer)
        self._close_file()

    def _write_arrived(self) -> None:
        """Writes the messages that a save or `state_dict` has received since the last step. A
        checkpoint contains their updates, so a later process does not receive these messages again.
        """
        with self._forgiving():
            self.flush()
            records = [
                LogRecord(MESSAGE, place, step, octets(copy.wait()))
                for steps, (place, step, copy) in self._messages
                if steps == self._last
            ]
            self.hand_on(records)

    def _close_file(self) -> None:
        if self._file >= 0:
            with self._forgiving():
                self.flush()
                self._finish()
                os.fsync(self._file)
            # an error in closing does no harm: all data are written, or the log has ended
            with suppress(OSError):
                self._closing()
        self._file = -1
        if self._thread is not None:
            self._thread.shutdown()
        self._thread = None

    @contextmanager
    def _forgiving(self) -> Iterator[None]:
        """Context manager: if a write in its block fails, the log ends after its last complete
        step.
        """
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

    def _begin(
        self,
        optimizer: Replicated,
        first: int,
        settings: dict[str, Any],
        earlier: Sequence[LogRecord],
    ) -> None:
        """Begins a file for the records after `first` steps. Replaces a file of the same name.

        earlier: Records of the replaced file that the new file keeps.
        """
        rank = writer_of(optimizer)
        about = {"version": LOG_VERSION, "first": first, "rank": rank, **settings}
        if first == self._begun:
            about |= self._start
        if not first:
            self._warn_of_earlier(rank, about.get("run", ""))
        make_directories(self.directory)
        for _, begun, later in segments(self.directory, rank):
            # remove files whose steps training will repeat, because it returned to an earlier step
            if begun > first:
                later.unlink(missing_ok=True)
        self._path = self._path_of(optimizer, first)
        self._file = replaced(self._path)
        self._closing = weakref.finalize(self, os.close, self._file)
        self._options = []
        self._length = 0
        sync_entries(self.directory)
        self.hand_on([*earlier, noted(START, first, about)])

    def _continue(self, optimizer: Replicated, first: int) -> bool:
        """Continues the last file if it begins after `first` steps, too; otherwise returns False. A
        new file would have the same name, and would replace a `synchronize` call in the last file.
        """
        if self._path != self._path_of(optimizer, first) or not self._path.exists():
            return False
        self._file = opened(self._path, os.O_WRONLY | os.O_APPEND)
        self._closing = weakref.finalize(self, os.close, self._file)
        self._length = os.lseek(self._file, 0, os.SEEK_END)
        return True

    def _change(self, optimizer: Replicated, step: int) -> None:
        """Records changed settings in the middle of a file, after the `synchronize` call that
        precedes the change.
        """
        self._options = []
        self._hooks = []
        about = {"version": LOG_VERSION, "first": step, "rank": writer_of(optimizer)}
        self.hand_on([noted(START, step, about | _settings(optimizer))])

    def _path_of(self, optimizer: Replicated, first: int) -> Path:
        return self.directory / f"{writer_of(optimizer)}-{first}{SUFFIX}"

    def _warn_of_earlier(self, rank: str, run: str) -> None:
        """Warns if this log replaces the log of another run in the same directory."""
        earlier = segments(self.directory, rank)
        step = 0
        if earlier and _run_of(earlier[-1][2]) != run:
            step = max(_end_of(begun, path) for _, begun, path in earlier)
        if step:
            _log.warning(
                "%s holds the log of an earlier run, up to step %d: it is replaced",
                self.directory,
                step,
            )

    def hand_on(self, records: Sequence[LogRecord]) -> None:
        """Writes the records to the end of the file. If another replica writes the log, keeps the
        records in RAM instead.

        A thread writes a large step while the next step computes.
        """
        if self._file < 0:
            self._kept.add(records)
            return
        self._finish()
        if sum(len(record.content) for record in records) <= AT_ONCE_BYTES:
            self._append(records)
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "update-log")
        self._writing = self._thread.submit(self._append, records)

    def _finish(self) -> None:
        """Waits until the thread has written the last step. Raises the `OSError` of the thread if
        the write failed.
        """
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


def writer_of(optimizer: Replicated) -> str:
    """Returns the name of the rank of the first replica, which writes the log of this shard."""
    return replace(optimizer.coordinates, replica=0).name


def _others_are_lost(optimizer: Replicated) -> bool:
    """True if the last exchange has found that all replicas before this one are lost."""
    axis = optimizer.levels[0][0]
    return isinstance(axis, ElasticCommunicator) and {*range(axis.replica)} <= {*axis.absent}


def _run_of(path: Path) -> str:
    """Returns the id of the run in the first record of a file; "" if there is none."""
    with suppress(OSError, ValueError):
        return str(start_of(path).get("run", ""))
    return ""


def _remove_if_old(path: Path, end: int, oldest: int) -> None:
    """Removes the file at `path`, whose last step is `end`; see `UpdateLog.rotate`. The rank of
    another shard may have removed the file already.
    """
    with suppress(FileNotFoundError):
        if end < oldest or (end == oldest and _ends_with_step(path)):
            path.unlink()


def _ends_with_step(path: Path) -> bool:
    kinds = [START, *(head[0] for head in heads(path))]
    return kinds[-1] in (START, STEP)


def _end_of(begun: int, path: Path) -> int:
    """Returns the last step in a file that begins after step `begun`."""
    with suppress(OSError):
        return max(begun, last_step(path))
    return begun


def identity(optimizer: Replicated) -> dict[str, Any]:
    """Returns the settings that must be equal in a run and in a log, so that the run can replay the
    log.

    Raises `ValueError` if the optimizer has several levels of replication.
    """
    if len(optimizer.levels) > 1:
        raise ValueError("an update log has one level of replication, not several: use one scheme")
    ((axis, scheme),) = optimizer.levels
    rank = optimizer.coordinates
    arguments = {name: str(value) for name, value in scheme.identity.items()}
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
    """Returns digests of a self-test with the scheme and the base optimizer. The digests show how
    this process rounds. They also depend on the parameter group's `options`, by default those of
    `optimizer`.
    """
    ((_, scheme),) = optimizer.levels
    found: dict[str, str] = {}
    for replicator in optimizer.build()[:1]:
        found |= selftest(scheme, replicator.channel.runtime, replicator.stepped, options)
    return found


def rounding(optimizer: Replicated) -> dict[str, Any]:
    """Returns settings for another process: whether to round each operation separately, so that it
    rounds like this process, and digests that show whether it does.
    """
    return {"rounds_singly": optimizer.base_step.rounds_singly, "selftest": arithmetic(optimizer)}


def round_like(
    about: Mapping[str, Any],
    optimizer: Replicated,
    options: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """Makes `optimizer` round as the run that `about` describes did, if this is possible. Returns
    the result of `arithmetic`.
    """
    optimizer.base_step.round_singly(about.get("rounds_singly", False))
    return arithmetic(optimizer, options)


def padding_of(optimizer: Replicated) -> dict[str, Any]:
    """Returns the names of the embeddings whose padding rows change in training. A process that
    computes no gradients cannot find these names itself.
    """
    used = used_rows(optimizer.model)
    if used:
        return {"padding": used}
    return {}


def use_padding_of(about: Mapping[str, Any], optimizer: Replicated) -> None:
    """Allows steps to change the same padding rows that changed in the run that `about`
    describes.
    """
    if names := about.get("padding"):
        use_rows(names, optimizer.build(), optimizer.base_step)


def _settings(optimizer: Replicated) -> dict[str, Any]:
    close = {"close": optimizer.closeness is not None}
    about = {**identity(optimizer), **close, **rounding(optimizer), **padding_of(optimizer)}
    if hooks := hooks_of(optimizer.base):
        about["hooks"] = hooks
    if run := optimizer.run.use():
        about["run"] = run
    return about


def segments(directory: Path, rank: str) -> list[tuple[str, int, Path]]:
    """Returns the files of an update log, in order. For each file: the rank that wrote it, the
    number of steps before it, and its path. If `rank` is "", returns the files of all ranks.
    """
    found = []
    for path in directory.glob(f"*{SUFFIX}"):
        name, _, first = path.name.removesuffix(SUFFIX).rpartition("-")
        if first.isdecimal() and rank in ("", name):
            found.append((name, int(first), path))
    return sorted(found)
