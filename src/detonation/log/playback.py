"""Reads an update log, so that recorded messages replace the messages of an exchange."""

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from detonation.choices import first_names
from detonation.core.flat.tensors import digest
from detonation.core.optim import hooks_before
from detonation.core.optimizer import Replicated
from detonation.log.records import (
    LOG_VERSION,
    MESSAGE,
    START,
    STEP,
    SYNCHRONIZE,
    WRITTEN,
    DamagedLog,
    LogRecord,
    Player,
    agreed_digest,
    heads,
    start_of,
    whole_records,
)
from detonation.log.writer import identity, round_like, segments, use_padding_of, writer_of

_log = logging.getLogger("detonation")
_NEAR = (
    "%s: %s, so replay only comes close to the weights of training: replay on a machine of the same"
    " kind, from a later checkpoint"
)


class Playback(Player):
    """Plays back the update log of one shard in `directory`: the steps after step `first`, up to
    step `to`.

    Raises `ValueError` if there is no log of this shard from `first` on. Reading a record raises
    `ValueError` if the log is of another run, and `DamagedLog` if it is damaged.
    """

    def __init__(
        self, directory: Path, optimizer: Replicated, first: int, to: int | None = None
    ) -> None:
        super().__init__()
        self._rank = writer_of(optimizer)
        self._exact = False
        self.first = first
        self.run = ""  # the id of the run in the last file that was read
        self.other = ""  # the error if the log is of another run than the loaded checkpoint
        self._to: float = math.inf
        if to is not None:
            self._to = to
        self._calls: float = math.inf
        self._is_cut = False  # True if the replay ends before the end of the log
        files = [(begun, path) for _, begun, path in segments(directory, self._rank)]
        usable = [begun for begun, _ in files if begun <= first]
        if not usable:
            known = f"there is no log of {self._rank} in {directory}"
            if files:
                known = f"the log of {self._rank} in {directory} begins after {files[0][0]} steps"
            raise ValueError(
                f"{known}, but replay would begin after step {first}: load a checkpoint from which"
                " the log continues"
            )
        self._identity = identity(optimizer)
        self._optimizer = optimizer
        ((self._axis, scheme),) = optimizer.levels
        self._delay = scheme.round.delay
        self._completed = optimizer.run.completed
        # the point that the replay has reached: a step, and the `synchronize` calls after the step
        self._at = first, self._completed or 0
        # messages that are in flight after `to` steps are recorded up to `delay` steps later
        last = max(self._to + self._delay, first)
        oldest = self._oldest_file(files[: len(usable)])
        self.files = [(begun, path) for begun, path in files if oldest <= begun <= last]
        self._records = self._read()

    def read(self) -> LogRecord | None:
        """Returns the next record that the replay needs; None after the last record."""
        return next(self._records, None)

    def next_end(self) -> LogRecord | None:
        """Returns the record that ends the next step or `synchronize` call; None after `to` steps,
        and at the end of the log.
        """
        try:
            end = super().next_end()
        except ValueError:
            # if step `to` is reached, faults of later records do no harm
            if self._optimizer.step_count < self._to:
                raise
            return None
        stop = self._to, self._calls
        if end is None or _point_after(end) > stop:
            return None
        if end.kind == WRITTEN:
            # logs of other shards may lack weights that were written after the last common point
            if self._is_cut and self._at >= stop:
                return None
            return end
        self._at = _point_after(end)
        return end

    def last_point(self) -> tuple[float, float]:
        """Returns the last point of the log: a step, and the number of `synchronize` calls since
        this step. If the log continues after step `to`, returns `to` and infinity.

        Raises `DamagedLog` if the last file is damaged.
        """
        begun, path = self.files[-1]
        ends = (record for record in whole_records(path) if record.kind in (STEP, SYNCHRONIZE))
        last: tuple[float, float] = max(map(_point_after, ends), default=(begun, 0))
        return min(last, (self._to, math.inf))

    def cut(self, step: float, calls: float) -> None:
        """Makes the replay end after step `step` and the `calls` calls of `synchronize` that follow
        it. The replay omits writes to weights after this point.
        """
        self._to = step
        self._calls = calls
        self._is_cut = True

    def reach(self) -> tuple[int, str]:
        """Finds the last step up to which the log reproduces, bit for bit, all state on which
        replicas agree.

        Returns this step, and the reason why the log ends there, as text.
        """
        step = self.first
        last = self.first
        why = ""
        self._exact = True
        try:
            while (end := self.next_end()) is not None:
                if end.kind == STEP and end.step != step + 1:
                    raise DamagedLog(
                        f"the log goes on with step {end.step} after step {step}: a file is missing"
                    )
                if end.kind == STEP:
                    require_hooks(end, self._optimizer)
                step = end.step
                if self._messages:
                    last = step
                self._messages.clear()
        except ValueError as error:
            why = str(error)
        return max(self.first, last - self._delay), why

    def _oldest_file(self, files: list[tuple[int, Path]]) -> int:
        """Returns the number of steps before the oldest file that the replay needs. All `files`
        begin after at most `first` steps. Usually the replay needs only the last of the `files`.

        The replay needs two files if the last file begins exactly after `first` steps, and training
        continued without a gap. Then the previous file may end with a write or a `synchronize` call
        that the state of the checkpoint lacks.
        """
        begun, path = files[-1]
        if begun != self.first or len(files) == 1 or start_of(path).get("state"):
            return begun
        before, path = files[-2]
        if self._lacks(path):
            return before
        return begun

    def _lacks(self, path: Path) -> bool:
        """True if the state from which the replay begins may lack a change of the weights: the file
        at `path` holds a write or a `synchronize` call after `first` steps.
        """
        lacks = False
        about = start_of(path) | {"replicas": self._identity["replicas"]}
        if self._completed is None and not self._identity.items() <= about.items():
            # the state lacks the settings of this file, so it was saved after `reconfigure`
            return False
        for kind, place, step in heads(path):
            if step == self.first and kind != STEP:
                lacks = kind == WRITTEN or not self._includes(place)
        return lacks

    def _includes(self, calls: int) -> bool:
        """True if the state from which the replay begins includes call number `calls` of
        `synchronize` after `first` steps. Returns False if this is unknown (see `RunPoint`):
        repeating a call that the state includes changes nothing.
        """
        return 0 < calls <= (self._completed or 0)

    def _read(self) -> Iterator[LogRecord]:
        """Yields the log records that the replay must repeat, because the state from which the
        replay begins does not include them. Omits the START record of each file.
        """
        for records in self._groups():
            if not self._is_included(records[-1]):
                yield from records

    def _is_included(self, end: LogRecord) -> bool:
        """True if the state from which the replay begins includes the `synchronize` call that `end`
        ends. The state then also includes the weights that were written before this call. Writing
        these weights again changes nothing.
        """
        return end.kind == SYNCHRONIZE and end.step <= self.first and self._includes(end.place)

    def _groups(self) -> Iterator[list[LogRecord]]:
        """Yields groups of records that the replay may need. A group holds the messages of a step,
        and then the record that ends the step.
        """
        counts = [begun for begun, _ in self.files[1:]]
        for (_, path), following in zip(self.files, [*counts, math.inf], strict=True):
            yield from self._groups_of(path, following)

    def _groups_of(self, path: Path, following: float) -> Iterator[list[LogRecord]]:
        """Yields the records of the file at `path` that the replay may need. The next file begins
        after `following` steps.
        """
        waiting = list[LogRecord]()  # messages wait here until the record that ends their step
        for record in self._records_of(path):
            waiting.append(record)
            if record.kind == MESSAGE:
                continue
            if record.step > following + self._delay:
                return
            if needed := self._needed(waiting, record, following):
                yield needed
            waiting = []
        # no record ends these messages: a save received them, and then the process ended
        if waiting := [each for each in waiting if each.step < following < math.inf]:
            yield waiting

    def _needed(
        self, records: list[LogRecord], end: LogRecord, following: float
    ) -> list[LogRecord]:
        """Returns those of the `records` up to `end` that the replay may need."""
        if end.step > following:
            # Training returned to an earlier step, so the next file has this step again.
            # Of this file, keep only messages that were in flight when the next file began.
            records = [each for each in records if each.step < following]
        if self._is_before_first(end):
            records = self._in_flight(records)
        return records

    def _records_of(self, path: Path) -> Iterator[LogRecord]:
        """Checks the START records of a file, and yields all other records. A second or later START
        record says that settings changed after a `synchronize` call.
        """
        for number, record in enumerate(whole_records(path)):
            if number == 0 and record.kind != START:
                raise DamagedLog(
                    f"{path} is no log of one rank: its first record must be a START record"
                )
            if record.kind == START:
                self._check(path, record, _first_options(path))
            else:
                yield record

    def _is_before_first(self, record: LogRecord) -> bool:
        """True if every state after `first` steps includes the event that `record` ends."""
        return record.step < self.first + (record.kind == STEP)

    def _in_flight(self, records: list[LogRecord]) -> list[LogRecord]:
        """Returns the messages among `records` whose update is applied after step `first`, because
        the scheme has a delay.
        """
        if self._exact:
            return []
        late = self.first - self._delay
        return [each for each in records if late <= each.step and each.kind == MESSAGE]

    def _check(self, path: Path, start: LogRecord, options: dict[str, Any]) -> None:
        """Raises `ValueError` if a file belongs to another version of the format, another run or
        another start of the run.

        Warns if this process rounds differently from training.
        """
        about = start.table()
        if about.get("version") != LOG_VERSION:
            raise ValueError(
                f"{path} is in version {about.get('version')} of the log format, but this"
                f" package reads version {LOG_VERSION}: replay with the package that wrote the log"
            )
        self._check_run(path, start.step, about)
        use_padding_of(about, self._optimizer)
        why = self._why_only_near(about, options)
        if why and self._exact:
            raise ValueError(f"{path}: {why}")
        if why:
            _log.warning(_NEAR, path, why)
        self._check_identity(path, about)
        if not why:
            self._check_state(path, start.step, about.get("state") or about.get("joined", ""))
        weights = ""
        if self.first == 0:
            weights = about.get("start", "")
        if weights and weights != digest(self._optimizer.model.parameters()):
            raise ValueError(
                f"{path} begins with other weights than this run: replay with the seed, model and"
                " init_from of the logged run"
            )

    def _check_run(self, path: Path, step: int, about: dict[str, Any]) -> None:
        """Raises `ValueError` if the first file of the replay is of another run than the loaded
        checkpoint, unless this file begins with exactly the current state of the optimizer.

        Logs of older versions hold no id of a run, and a state before the first step belongs to no
        run: in both cases nothing is checked.
        """
        self.run = str(about.get("run", ""))
        known = self._optimizer.run.known
        if not (self.first and known and self.run) or path != self.files[0][1]:
            return
        same_step = step == self._optimizer.step_count
        if self.run != known and not (
            same_step and about.get("state") == agreed_digest(self._optimizer)
        ):
            self.other = (
                f"{path} is the log of another run than the checkpoint: replay the log of its run,"
                " or move this log away to go on from the checkpoint alone"
            )
            raise ValueError(self.other)

    def _check_state(self, path: Path, step: int, state: str) -> None:
        """Raises `ValueError` if this process has taken `step` steps, and its state does not have
        the digest `state`.

        Training continued from the state with this digest after step `step`. `state` is "" if the
        file continues the previous file without a gap.
        """
        optimizer = self._optimizer
        if state and optimizer.step_count == step and state != agreed_digest(optimizer):
            raise ValueError(
                f"{path}: after step {step}, training continued with weights or optimizer state"
                " that the log does not contain, for example after a reset or a load: replay from"
                " a checkpoint that was saved after the reset or load"
            )

    def _why_only_near(self, about: dict[str, Any], options: dict[str, Any]) -> str:
        """Returns the reason why a replay can only come close to the weights of training, as text;
        "" if the replay is exact.
        """
        mine = round_like(about, self._optimizer, options)
        theirs = about.get("selftest") or mine
        odd = next((key for key in mine if theirs.get(key) != mine[key]), "")
        if odd:
            return (
                f"training rounds differently from this process ({odd} is {theirs.get(odd)} there,"
                f" {mine[odd]} here)"
            )
        if about.get("close") and (self._exact or about.get("taken_over")):
            return "one replica wrote the log, and other replicas had slightly different weights"
        return ""

    def _check_identity(self, path: Path, about: dict[str, Any]) -> None:
        """Raises `ValueError` if the file belongs to another run. Sets the number of replicas to
        that of the file.
        """
        replicas = about.get("replicas")
        # replicas leave and join an elastic run, so each file has its own number of replicas
        if type(replicas) is int and hasattr(self._axis, "next_size"):
            self._axis.next_size = replicas
            self._identity["replicas"] = replicas
        for key, now in self._identity.items():
            if about.get(key) != now:
                raise ValueError(
                    f"{path} was written with {key} {about.get(key)}, this run has {now}: replay"
                    f" with the same {key}"
                )


def _point_after(end: LogRecord) -> tuple[int, int]:
    """Returns the point of training after the record `end`: the number of steps, and the number of
    `synchronize` calls since the last step. This number is 0 if `end` does not end a call.
    """
    return end.step, end.place * (end.kind == SYNCHRONIZE)


def _first_options(path: Path) -> dict[str, Any]:
    """Returns the options of the first parameter group at the first step of a file. The self-test
    of rounding in training used these options; a scheduler may have changed them later.
    """
    for record in whole_records(path):
        if record.kind in (STEP, SYNCHRONIZE):
            first = [*record.table().get("groups", []), {}][0]
            return {key: value for key, value in first.items() if not key.startswith("$")}
    return {}


def require_hooks(end: LogRecord, optimizer: Replicated) -> None:
    """Raises `ValueError` if the logged training ran hooks before steps of its base optimizer, and
    the base optimizer of `optimizer` has no hooks with the same names.

    end: the record that ends the step. The record lists the names of hooks only if they have
    changed since the previous record. Logs of earlier versions do not list these names.
    """
    here = {name.rpartition(".")[2] for name in hooks_before(optimizer.base)}
    recorded = end.table().get("hooks", ())
    lacks = [name for name in recorded if name.rpartition(".")[2] not in here]
    if lacks:
        raise ValueError(
            f"before step {end.step}, the logged training ran hooks of its base optimizer that may"
            f" change gradients: {first_names(lacks)}; register functions with these names by"
            " optimizer.base.register_step_pre_hook"
        )
