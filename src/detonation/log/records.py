"""Records of an update log, each with a checksum. `StepRecorder` makes records of the messages of
training, and `Player` plays these messages back.
"""

import json
import logging
import os
import re
import struct
import zlib
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from detonation.choices import first_names
from detonation.core.agreement import members_of, recorded_options
from detonation.core.base_error import DetonationError
from detonation.core.flat.tensors import bare_name, digest, local, octets
from detonation.core.flat.written import WrittenWeights, stamp, weight_places
from detonation.core.integrity.observer import PlayedMessages, StepObserver
from detonation.core.optim import hooks_after, hooks_before
from detonation.core.optimizer import Replicated, local_parameters, reshard
from detonation.core.runtime import Readback
from detonation.whole_files import reading

LOG_VERSION = 1
_MAGIC = b"DTLG"
# The header of a record: magic, kind, place, step, count of bytes, checksum of header and content.
_HEADER = struct.Struct("<4sB3xIQQI")
_CHECKED = struct.Struct("<4sB3xIQQ")
START, MESSAGE, STEP, SYNCHRONIZE, WRITTEN = range(5)
"""Kinds of records: START holds the settings of the run: it begins each file, and is repeated if
settings change after a `synchronize` call; MESSAGE holds messages; STEP and SYNCHRONIZE end a step
or a `synchronize` call, after its messages; WRITTEN holds weights that other code wrote between
steps.
"""

MEMBERS = "$parameters"
"""Key of a text that names a group's parameters, in a record of the group's options."""

_log = logging.getLogger("detonation")


class DamagedLog(DetonationError, ValueError):
    """An update log holds damaged records, or records of another run."""


@dataclass(frozen=True)
class LogRecord:
    """One record of an update log.

    place: for messages the code of their channel and bucket; for weights the index of the parameter
    in the model; for `synchronize` calls how many there were since the last step, 0 if unknown.
    step: for messages the step that sent these messages; for other records the number of steps
    before the record. content: messages, the local shard of the parameter, or JSON.
    """

    kind: int
    place: int
    step: int
    content: bytes | bytearray | memoryview

    @property
    def size(self) -> int:
        """Number of bytes that the record needs in a file."""
        return _HEADER.size + len(self.content)

    def parts(self) -> list[bytes | bytearray | memoryview]:
        head = _CHECKED.pack(_MAGIC, self.kind, self.place, self.step, len(self.content))
        return [head + struct.pack("<I", zlib.crc32(self.content, zlib.crc32(head))), self.content]

    def table(self) -> dict[str, Any]:
        found = json.loads(bytes(self.content))
        if not isinstance(found, dict):
            raise DamagedLog("the content of a log record is no JSON table")
        return found


def noted(kind: int, step: int, table: dict[str, Any], place: int = 0) -> LogRecord:
    return LogRecord(kind, place, step, json.dumps(table, separators=(",", ":")).encode())


def record_of(octets: memoryview) -> tuple[LogRecord, memoryview]:
    """Returns the first record in `octets`, and the octets after it.

    Raises `DamagedLog` if the first record is not whole.
    """
    if len(octets) >= _HEADER.size:
        magic, kind, place, step, count, checksum = _HEADER.unpack(octets[: _HEADER.size])
        content = octets[_HEADER.size : _HEADER.size + count]
        rest = octets[_HEADER.size + count :]
        head = zlib.crc32(octets[: _CHECKED.size])
        if magic == _MAGIC and len(content) == count and zlib.crc32(content, head) == checksum:
            return LogRecord(kind, place, step, content), rest
    raise DamagedLog("a record of a step is incomplete")


def whole_records(path: Path) -> Iterator[LogRecord]:
    """Yields the records that were whole when the file was opened. Training may append records
    meanwhile, and a crash may have left an incomplete record at the end of the file.

    Raises `DamagedLog` if whole records follow a damaged one.
    """
    with reading(path) as file:
        size = os.fstat(file.fileno()).st_size
        while (record := _next(file, size)) is not None:
            yield record
        at = file.tell()
        rest = memoryview(file.read(size - at))
        starts = [match.start() for match in re.finditer(_MAGIC, rest)]
        if any(_found(rest[start:]) for start in starts if start):
            raise DamagedLog(
                f"{path} is damaged at byte {at:,}, and whole records follow: restore the file, or"
                " replay only the steps before the damage"
            )


def _next(file: BinaryIO, size: int) -> LogRecord | None:
    """Reads the next record. If the record is incomplete, returns None and keeps the position in
    `file`.
    """
    at = file.tell()
    head = file.read(_HEADER.size)
    record = None
    if len(head) == _HEADER.size:
        count = _HEADER.unpack(head)[4]
        # a damaged record may claim more bytes than fit into RAM
        if count <= size - at - len(head):
            record = _found(memoryview(head + file.read(count)))
    if record is None:
        file.seek(at)
    return record


def start_of(path: Path) -> dict[str, Any]:
    """Returns the content of the START record of a file; empty if the file has no whole record."""
    for record in whole_records(path):
        return record.table()
    return {}


def opening(path: Path, settings: Mapping[str, Any]) -> list[LogRecord]:
    """Returns the records of a file before its first step: settings, writes and `synchronize`
    calls. Empty if there is no such file, or if it is of another run than `settings`.
    """
    found: list[LogRecord] = []
    whole = 0
    with suppress(DamagedLog, FileNotFoundError):
        for record in whole_records(path):
            if record.kind == STEP:
                break
            found.append(record)
            if record.kind != MESSAGE:
                whole = len(found)
    if found and found[0].table().get("run") == settings.get("run", ""):
        return found[:whole]
    return []


def heads(path: Path) -> Iterator[tuple[int, int, int]]:
    """Yields kind, place and step of each record in a file, except of messages. Reads only the
    headers of the records, so this takes little time even for a large file.
    """
    with reading(path) as file:
        size = os.fstat(file.fileno()).st_size
        while len(head := file.read(_HEADER.size)) == _HEADER.size:
            magic, kind, place, step, count, _ = _HEADER.unpack(head)
            if magic != _MAGIC or count > size - file.tell():
                break
            if kind != MESSAGE:
                yield kind, place, step
            file.seek(count, os.SEEK_CUR)


def last_step(path: Path) -> int:
    """Returns the last step in a file; 0 if there is no step."""
    return max((step for _, _, step in heads(path)), default=0)


def _found(octets: memoryview) -> LogRecord | None:
    """Returns the first record in `octets`; None if this record is incomplete."""
    with suppress(DamagedLog):
        return record_of(octets)[0]
    return None


Copy = tuple[int, int, Readback]
"""Place (channel and bucket), step and bytes of a message."""
Copies = list[Copy]


class StepRecorder(StepObserver, ABC):
    """Copies the messages of each step, and passes the copies to `hand_on` as records.

    If an accelerator trains, the recorder passes the records one step later, so that the host does
    not wait for the accelerator.
    """

    reader = "the reader of the records"
    """Name of the reader of the records, for a warning."""

    def __init__(self) -> None:
        self.records = True  # False if nobody reads the records
        # messages of the current step, each with the optimizer's step count when it arrived
        self._messages: list[tuple[int, Copy]] = []
        # queue of steps: messages and the record that ends their step, or written weights and None
        self._waiting: list[tuple[Copies, LogRecord | None]] = []
        # number of steps that stay queued: 1 if copies from an accelerator end in the next step
        self._late = 0
        self._options: list[dict[str, Any]] = []  # the last recorded options of each group
        self._members: list[tuple[int, ...]] = []  # ids of each group's parameters
        self._texts: list[str] = []  # for each group, a text that names its parameters
        # the optimizer of the last recorded step or `synchronize`
        self._optimizer: Replicated | None = None
        self._last = -1  # number of steps at the last record that ends a step
        self._weights = WrittenWeights()
        self._watched: object = None  # the optimizer's levels when the watched weights were chosen
        self._numbers: dict[str, int] = {}  # indices of the model's parameters, by name
        self._written: Copies = []  # weights that other code wrote before the current step
        self._warned = False
        # names of the hooks that run before a step of the base optimizer, as last recorded
        self._hooks: list[str] = []
        self._warned_of: list[str] = []  # the hooks that the last warning named
        # True if `moved` has already marked the weights of this step as recorded
        self._moved = False
        # For each entry of the base optimizer's state, a stamp that changes when code writes to it.
        # The stamps are taken when a step has been recorded; None before the first record.
        self._state: dict[Any, Any] | None = None
        self._left = False  # True if training does not continue from the last recorded step
        # digest of the state from which training continues after a load or a reset
        self._origin: dict[str, str] = {}

    @abstractmethod
    def hand_on(self, records: Sequence[LogRecord]) -> None:
        """Receives the records of one step or of one `synchronize` call: first the messages, and
        then the record that ends the step or the call.
        """

    def watches(self, optimizer: Replicated) -> Collection[str]:
        """Returns the names of the weights to watch. If code outside of `optimizer`'s steps writes
        one of these weights, the weight is recorded.
        """
        return local_parameters(optimizer.model).keys()

    def note(self, optimizer: Replicated) -> None:
        """Marks the current weights as recorded, so that only later writes to weights are found."""
        if self._watched is not (levels := optimizer.build()):
            self._watched = levels
            places = weight_places(optimizer.model)
            self._numbers = {name: number for number, name in enumerate(places)}
            watched = {*self.watches(optimizer)} - _moved_by_rounds(optimizer)
            self._weights.places = {n: at for n, at in places.items() if bare_name(n) in watched}
        if not self._moved:
            self._take_stamps(optimizer)
        self._moved = False

    def moved(self, optimizer: Replicated) -> None:
        """Marks the current weights as recorded, after the base optimizer's step and before the
        hooks that follow it. So if these hooks write weights, the new weights are found and
        recorded.
        """
        if self.records and self._watched is not None and hooks_after(optimizer.base):
            self._take_stamps(optimizer)
            self._moved = True

    def _take_stamps(self, optimizer: Replicated) -> None:
        self._weights.note()
        self._state = _state_stamps(optimizer)

    def left(self) -> None:
        self._left = self._last >= 0

    def enter(self, optimizer: Replicated) -> None:
        """Copies the weights that other code has written since the last recorded step, before the
        next step changes them.

        Records do not contain changes that other code makes to the state of the base optimizer.
        After such a change the next step starts a new file, as if training had returned to an
        earlier state.
        """
        goes_on = optimizer is self._optimizer and optimizer.step_count == self._last
        if self.records and self._state is not None and goes_on:
            self._left |= self._state != _state_stamps(optimizer)
        goes_on &= not self._left
        self._origin = {}
        if self.records and not goes_on and optimizer.step_count:
            self._origin = {"state": agreed_digest(optimizer)}
        found = {}
        if self.records and goes_on:
            found = self._weights.found()
        self._written = [
            (self._numbers[name], optimizer.step_count, Readback(_copied(tensor)))
            for name, tensor in found.items()
        ]
        if found and not self._warned:
            self._warned = True
            size = sum(local(tensor).nbytes for tensor in found.values())
            _log.warning(
                "code outside of optimizer.step() wrote weights, for example to clamp them: %s; "
                "%s gets these weights in full each time, now %s bytes",
                first_names(found),
                self.reader,
                f"{size:,}",
            )

    def add_written(self) -> None:
        """Queues the weights that other code wrote before the current step, ahead of the messages
        of this step.
        """
        if self._written:
            written = self._written
            self._written = []
            self._waiting.append((written, None))

    def take_last_writes(self) -> None:
        """Queues the weights that other code wrote after the last step."""
        if self._optimizer is not None and self.records:
            reshard(self._optimizer.model)
            self.enter(self._optimizer)
            self.add_written()
            self._weights.note()  # more steps may follow, and must not record these weights again

    def received(self, place: int, step: int, message: Tensor) -> None:
        """Copies the messages of all replicas for the record of this step."""
        if self.records:
            copied = message.contiguous()
            if copied.data_ptr() == message.data_ptr():
                copied = copied.clone()
            steps = 0
            if self._optimizer:
                steps = self._optimizer.step_count
            self._messages.append((steps, (place, step, Readback(copied))))
            self._late = int(message.device.type != "cpu")

    def take_messages(self, what: str, optimizer: Replicated) -> tuple[Copies, bool]:
        """Returns the messages of the step or `synchronize` call that ends now. Also returns
        whether this step or call follows the last record without a gap.

        If training returned to an earlier state, this method drops messages that were in flight,
        because the repeated steps send other messages.
        """
        before = optimizer.step_count - (what == "step")
        same = optimizer is self._optimizer
        messages = [copy for steps, copy in self._messages if steps == before or not same]
        goes_on = self._last in (-1, before) and not self._left
        self._left = False
        self._messages = []
        self._optimizer = optimizer
        self._last = optimizer.step_count
        return messages, goes_on

    def add(self, messages: Copies, what: str, optimizer: Replicated) -> None:
        """Queues the records of a step or of a `synchronize` call with its `messages`."""
        kind = SYNCHRONIZE
        if what == "step":
            kind = STEP
        changed = self._changed(optimizer, kind)
        about: dict[str, Any] = {}
        if what == "join":
            about["joins"] = True
        if kind == STEP or any(changed):
            about["groups"] = changed
        hooks = hooks_before(optimizer.base)
        if hooks != self._hooks:
            self._hooks = about["hooks"] = hooks
            self._warn_of_hooks(hooks)
        completed = 0
        if kind == SYNCHRONIZE:
            completed = optimizer.run.completed or 0
        self._waiting.append((messages, noted(kind, optimizer.step_count, about, completed)))
        self.flush(self._late)

    @property
    def waiting(self) -> int:
        """Number of queued steps."""
        return len(self._waiting)

    def flush(self, late: int = 0) -> None:
        """Passes the records of queued steps to `hand_on`, except the records of the last `late`
        steps.
        """
        while len(self._waiting) > late:
            copies, end = self._waiting.pop(0)
            kind = WRITTEN
            if end:
                kind = MESSAGE
            records = [
                LogRecord(kind, place, step, octets(copy.wait())) for place, step, copy in copies
            ]
            if end:
                records.append(end)
            self.hand_on(records)

    def forget(self) -> None:
        """Drops all queued steps. After this, the next step records all options of all parameter
        groups.
        """
        self._messages = []
        self._waiting = []
        self._options = []
        self._hooks = []
        self._written = []
        self._weights.forget()
        self._state = None

    def _warn_of_hooks(self, hooks: list[str]) -> None:
        """Warns once about each new list of hooks that run before steps of the base optimizer,
        because such hooks may change gradients, and these changes are not recorded.
        """
        if hooks and hooks != self._warned_of:
            self._warned_of = hooks
            _log.warning(
                "%s does not get changes by hooks that run before steps of the base optimizer:"
                " %s; register these hooks on the replicated optimizer, or also on the base"
                " optimizers of replays and followers",
                self.reader,
                first_names(hooks),
            )

    def _changed(self, optimizer: Replicated, kind: int) -> list[dict[str, Any]]:
        """Returns, for each parameter group, the options that have changed since the group was last
        recorded. A `synchronize` call does not record added groups, because only the next step
        begins to train them.
        """
        before = self._options
        groups = optimizer.param_groups
        if before and kind == SYNCHRONIZE:
            groups = groups[: len(before)]
        members = [tuple(map(id, group["params"])) for group in groups]
        if not before or members != self._members:
            self._members = members
            self._texts = members_of(optimizer.base, exchanged_by(optimizer))[: len(groups)]
        self._options = [
            {**recorded_options(group), MEMBERS: text}
            for group, text in zip(groups, self._texts, strict=True)
        ]
        changed = []
        for number, now in enumerate(self._options):
            old: dict[str, Any] = {}
            if number < len(before):
                old = before[number]
            new = {key: value for key, value in now.items() if key not in old or old[key] != value}
            changed.append(new)
        return changed


def exchanged_by(optimizer: Replicated) -> dict[str, Tensor]:
    """Returns the parameters that the replicas of `optimizer` exchange, by name."""
    return {name: p for each in optimizer.build() for name, p in each.parameters.items()}


class Player(PlayedMessages, ABC):
    """Plays back records instead of exchanging messages: one process represents all replicas.

    Raises `DamagedLog` if a record is missing.
    """

    def __init__(self) -> None:
        self._messages: dict[tuple[int, int], deque[LogRecord]] = defaultdict(deque)
        self._ends: deque[LogRecord] = deque()

    @abstractmethod
    def read(self) -> LogRecord | None:
        """Returns the next record; returns None after the last record."""

    def take(self, place: int, step: int) -> Tensor:
        """Returns the next recorded messages of `place` (channel and bucket) in step `step`."""
        # -> [bytes] uint8
        while not self._messages[place, step]:
            if not self._load():
                raise DamagedLog(
                    f"the log has no message of step {step} for channel and bucket {place}: it"
                    " is the log of another run, or a process ended before it received that"
                    " message: replay from a later checkpoint"
                )
        content = self._messages[place, step].popleft().content
        if not self._messages[place, step]:
            del self._messages[place, step]
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)

    def find(self, place: int, step: int) -> Tensor | None:
        """Returns the next recorded messages of `place` (channel and bucket) in step `step`; None
        if the step has no messages. The record that ends the step must have been read before this
        call.
        """
        # -> [bytes] uint8
        if (place, step) in self._messages:
            return self.take(place, step)
        return None

    def next_end(self) -> LogRecord | None:
        """Returns the record that ends the next step or `synchronize` call; None after the last
        record.
        """
        while not self._ends and self._load():
            pass
        if self._ends:
            return self._ends.popleft()
        return None

    def drop_messages(self) -> None:
        """Drops the messages that were read but not used. They belong to a `synchronize` call whose
        result the state already includes. After the call no update is in flight.
        """
        self._messages.clear()

    def _load(self) -> bool:
        """Reads one record. Returns False if there are no more records."""
        record = self.read()
        if record is None:
            return False
        if record.kind == MESSAGE:
            self._messages[record.place, record.step].append(record)
        else:
            self._ends.append(record)
        return True


class Tapes(StepObserver):
    """Passes the messages of training to several observers."""

    def __init__(self, tapes: Sequence[StepObserver]) -> None:
        self._tapes = tapes

    def begin(self, optimizer: Any) -> None:
        for tape in self._tapes:
            tape.begin(optimizer)

    def left(self) -> None:
        for tape in self._tapes:
            tape.left()

    def enter(self, optimizer: Any) -> None:
        for tape in self._tapes:
            tape.enter(optimizer)

    def moved(self, optimizer: Any) -> None:
        for tape in self._tapes:
            tape.moved(optimizer)

    def received(self, place: int, step: int, message: Tensor) -> None:
        for tape in self._tapes:
            tape.received(place, step, message)

    def end(self, what: str, optimizer: Any) -> None:
        for tape in self._tapes:
            tape.end(what, optimizer)


def agreed_digest(optimizer: Replicated) -> str:
    """Returns a digest of the state of this shard on which replicas agree between steps: weights
    and base optimizer state or, under a scheme with rounds, the anchor and the outer optimizer's
    state.
    """
    found = [each.replicated() for each in optimizer.build()]
    return digest(tensor for mine in found for _, tensor in sorted(mine.items()))


def _state_stamps(optimizer: Replicated) -> dict[Any, Any]:
    """Returns stamps that change if code writes to the state of the base optimizer or replaces it.

    Under a scheme with rounds, each replica has its own state of the base optimizer. This state is
    not recorded, so there are no stamps of it.
    """
    if any(each.scheme.signal == "parameters" for each in optimizer.build()):
        return {}
    return {
        (id(owner), key): stamp(value) if isinstance(value, Tensor) else value
        for owner, entries in optimizer.base.state.items()
        if isinstance(entries, dict)
        for key, value in entries.items()
    }


def _copied(tensor: Tensor) -> Tensor:
    return local(tensor.detach()).clone(memory_format=torch.contiguous_format)


def _moved_by_rounds(optimizer: Replicated) -> set[str]:
    """Returns the names of the weights that each replica changes on its own between two messages.
    If other code writes to these weights, the write is not recorded.
    """
    found = set()
    for each in optimizer.build():
        if each.scheme.signal == "parameters":
            found |= {slot.name for slot in each.layout.slots}
    return found
