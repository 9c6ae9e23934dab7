"""The records of a log, each with a checksum, and the recorder: a tape that makes them of the
messages of each step."""

import json
import logging
import os
import re
import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from detonation.core.base_error import DetonationError
from detonation.core.flat.tensors import bare_name, local, octets
from detonation.core.flat.written import WrittenWeights, first_names, weight_places
from detonation.core.integrity.observer import StepObserver
from detonation.core.optimizer.gathered import local_parameters, reshard
from detonation.core.optimizer.replicated import Replicated
from detonation.core.runtime import Readback
from detonation.whole_files import reading

LOG_VERSION = 1
_MAGIC = b"DTLG"
_HEADER = struct.Struct(
    "<4sB3xIQQI"
)  # magic, kind, place, step, bytes, checksum of all before and of the bytes
_CHECKED = struct.Struct("<4sB3xIQQ")
START, MESSAGE, STEP, SYNCHRONIZE, WRITTEN = range(5)
"""The kinds of records: how the file was begun; messages; what ends the messages of a step, or of
`synchronize`; and weights that were written between steps."""

_log = logging.getLogger("detonation")


class DamagedLog(DetonationError, ValueError):
    """A log holds something else than whole records of one run."""


@dataclass(frozen=True)
class LogRecord:
    """One record.

    place: Of messages: the channel and bucket of which they are; of weights: the number of the
    parameter in the model. step: Of messages: at which they were sent; else the number of steps
    that were taken when it was written. content: The messages, the local shard of the parameter,
    or JSON.
    """

    kind: int
    place: int
    step: int
    content: bytes | bytearray | memoryview

    @property
    def size(self) -> int:
        """Its bytes in a file."""
        return _HEADER.size + len(self.content)

    def parts(self) -> list[bytes | bytearray | memoryview]:
        head = _CHECKED.pack(_MAGIC, self.kind, self.place, self.step, len(self.content))
        return [head + struct.pack("<I", zlib.crc32(self.content, zlib.crc32(head))), self.content]

    def table(self) -> dict[str, Any]:
        found = json.loads(bytes(self.content))
        if not isinstance(found, dict):
            raise DamagedLog("a record of a log is no table")
        return found


def noted(kind: int, step: int, table: dict[str, Any]) -> LogRecord:
    return LogRecord(kind, 0, step, json.dumps(table, separators=(",", ":")).encode())


def record_of(octets: memoryview) -> tuple[LogRecord, memoryview]:
    """The record that `octets` begin with, and the octets after it.

    Raises `DamagedLog` where it is not whole.
    """
    if len(octets) >= _HEADER.size:
        magic, kind, place, step, count, checksum = _HEADER.unpack(octets[: _HEADER.size])
        content, rest = octets[_HEADER.size : _HEADER.size + count], octets[_HEADER.size + count :]
        head = zlib.crc32(octets[: _CHECKED.size])
        if magic == _MAGIC and len(content) == count and zlib.crc32(content, head) == checksum:
            return LogRecord(kind, place, step, content), rest
    raise DamagedLog("a record of a step is not whole")


def whole_records(path: Path) -> Iterator[LogRecord]:
    """Yields the records of a file up to the first that is not whole, as a crash leaves one at the
    end.

    Raises `DamagedLog` where whole records follow one that is damaged.
    """
    with reading(path) as file:
        size = os.fstat(file.fileno()).st_size
        while (record := _next(file, size)) is not None:
            yield record
        at, rest = file.tell(), memoryview(file.read())
        if any(
            _found(rest[match.start() :]) for match in re.finditer(_MAGIC, rest) if match.start()
        ):
            raise DamagedLog(
                f"{path} is damaged at byte {at:,}: whole records follow; restore it, or replay to"
                " before"
            )


def _next(file: BinaryIO, size: int) -> LogRecord | None:
    """The record where `file` stands; None, and back to where it stood, where there is no whole
    one."""
    at, head = file.tell(), file.read(_HEADER.size)
    fits = len(head) == _HEADER.size and _HEADER.unpack(head)[4] <= size - at - len(
        head
    )  # before it is read
    record = _found(memoryview(head + file.read(_HEADER.unpack(head)[4]))) if fits else None
    file.seek(at if record is None else file.tell())
    return record


def _found(octets: memoryview) -> LogRecord | None:
    """The record that `octets` begin with, if it is whole."""
    with suppress(DamagedLog):
        return record_of(octets)[0]
    return None


Copy = tuple[int, int, Readback]
"""The place, the step and the bytes of a message."""
Copies = list[Copy]


class StepRecorder(StepObserver, ABC):
    """Copies the messages of each step, and hands them on as records once the host has them.

    On an accelerator the records of a step follow one step later, so that the host does not wait.
    """

    reader = "whoever reads the records"
    """In a warning."""

    def __init__(self) -> None:
        self.records = True  # false where there is nobody to record for
        self._messages: list[
            tuple[int, Copy]
        ] = []  # each with the steps that were taken when it came
        self._waiting: list[tuple[Copies, LogRecord | None]] = []  # without an end: weights
        self._late = 0  # steps whose messages are on their way to the host
        self._options: list[dict[str, Any]] = []  # of each group, as they were recorded last
        self._optimizer: Replicated | None = None  # of the last end
        self._last = -1  # steps that were taken at that end
        self._weights = WrittenWeights()
        self._watched: object = None  # the levels for which the weights were chosen
        self._numbers: dict[str, int] = {}  # of the parameters of the model, by name
        self._written: Copies = []  # the weights that were written before the step under way
        self._told = False

    @abstractmethod
    def hand_on(self, records: Sequence[LogRecord]) -> None:
        """Takes the records of one step or call of `synchronize`: its messages, and its end."""

    def watches(self, optimizer: Replicated) -> Collection[str]:
        """The names of the weights that somebody else than a step of `optimizer` may write."""
        return local_parameters(optimizer.model).keys()

    def note(self, optimizer: Replicated) -> None:
        """Takes the weights as they are now for those that were recorded."""
        if self._watched is not (levels := optimizer.build()):
            self._watched, places = levels, weight_places(optimizer.model)
            self._numbers = {name: number for number, name in enumerate(places)}
            watched = {*self.watches(optimizer)} - _moved_by_rounds(optimizer)
            self._weights.places = {n: at for n, at in places.items() if bare_name(n) in watched}
        self._weights.note()

    def enter(self, optimizer: Replicated) -> None:
        """Copies the weights that were written since the last end, before a step moves them."""
        # training that went back to an earlier state has other weights, which is no write
        goes_on = optimizer is self._optimizer and optimizer.step_count == self._last
        found = self._weights.found() if self.records and goes_on else {}
        self._written = [
            (self._numbers[name], optimizer.step_count, Readback(_copied(tensor)))
            for name, tensor in found.items()
        ]
        if found and not self._told:
            self._told = True
            size = sum(local(tensor).nbytes for tensor in found.values())
            _log.warning(
                "weights were written outside of optimizer.step(), as by a clamp or a merge: %s; "
                "%s gets them whole each time, now %s bytes",
                first_names(found),
                self.reader,
                f"{size:,}",
            )

    def add_written(self) -> None:
        """Ends the weights that were written before the step under way, ahead of its messages."""
        if self._written:
            written, self._written = self._written, []
            self._waiting.append((written, None))

    def take_last_writes(self) -> None:
        """Takes in the weights that were written after the last step, of which no step comes."""
        if self._optimizer is not None and self.records:
            reshard(self._optimizer.model)
            self.enter(self._optimizer)
            self.add_written()
            self._weights.note()  # another step may come all the same

    def received(self, place: int, step: int, message: Tensor) -> None:
        """Takes in the messages of all replicas."""
        if self.records:
            copied = message.contiguous()
            if copied.data_ptr() == message.data_ptr():
                copied = copied.clone()
            taken = self._optimizer.step_count if self._optimizer else 0
            self._messages.append((taken, (place, step, Readback(copied))))
            self._late = int(message.device.type != "cpu")

    def take_messages(self, what: str, optimizer: Replicated) -> tuple[Copies, bool]:
        """The messages of a step or call of `synchronize` that ends, and whether it follows the one
        that ended last.

        Where training went back to an earlier state in between, those that were then on their way
        are left out: the steps that are taken anew have others.
        """
        before, same = optimizer.step_count - (what == "step"), optimizer is self._optimizer
        messages = [copy for taken, copy in self._messages if taken == before or not same]
        goes_on = self._last in (-1, before)
        self._messages, self._optimizer, self._last = [], optimizer, optimizer.step_count
        return messages, goes_on

    def add(self, messages: Copies, what: str, optimizer: Replicated) -> None:
        """Ends a step, or a call of `synchronize`, to which `messages` belong."""
        kind = STEP if what == "step" else SYNCHRONIZE
        changed = self._changed(optimizer.param_groups)
        about = {"groups": changed} if kind == STEP or any(changed) else {}
        self._waiting.append((messages, noted(kind, optimizer.step_count, about)))
        self.flush(self._late)

    @property
    def waiting(self) -> int:
        """The steps that were not handed on yet."""
        return len(self._waiting)

    def flush(self, late: int = 0) -> None:
        """Hands on all steps but the last `late`."""
        while len(self._waiting) > late:
            copies, end = self._waiting.pop(0)
            kind = MESSAGE if end else WRITTEN
            records = [
                LogRecord(kind, place, step, octets(copy.wait())) for place, step, copy in copies
            ]
            self.hand_on([*records, end] if end else records)

    def forget(self) -> None:
        """Drops all that was not handed on; the next step records all options of the groups."""
        self._messages, self._waiting, self._options, self._written = [], [], [], []
        self._weights.forget()

    def _changed(self, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The options of each parameter group that were not recorded yet."""
        plain = [
            {key: _plain(value) for key, value in group.items() if key != "params"}
            for group in groups
        ]
        now = [{key: value for key, value in group.items() if _is_plain(value)} for group in plain]
        before, self._options = [*self._options, *[{}] * (len(now) - len(self._options))], now
        return [
            {k: v for k, v in mine.items() if k not in old or old[k] != v}
            for mine, old in zip(now, before, strict=True)
        ]


class Tapes(StepObserver):
    """Several tapes that take in the same messages."""

    def __init__(self, tapes: Sequence[StepObserver]) -> None:
        self._tapes = tapes

    def begin(self, optimizer: Any) -> None:
        for tape in self._tapes:
            tape.begin(optimizer)

    def enter(self, optimizer: Any) -> None:
        for tape in self._tapes:
            tape.enter(optimizer)

    def received(self, place: int, step: int, message: Tensor) -> None:
        for tape in self._tapes:
            tape.received(place, step, message)

    def end(self, what: str, optimizer: Any) -> None:
        for tape in self._tapes:
            tape.end(what, optimizer)


def _copied(tensor: Tensor) -> Tensor:
    return local(tensor.detach()).clone(memory_format=torch.contiguous_format)


def _moved_by_rounds(optimizer: Replicated) -> set[str]:
    """The weights that replicas move on their own between messages: a write is part of that."""
    return {
        slot.name
        for each in optimizer.build()
        for slot in each.layout.slots
        if each.scheme.signal == "parameters"
    }


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, Tensor) and value.numel() == 1 else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return isinstance(value, int | float | str | None) and value == value  # JSON has no NaN
