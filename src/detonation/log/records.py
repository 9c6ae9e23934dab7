"""The records of a log: a header with a checksum, and bytes. Half a record at the end of a file is no record."""

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from detonation.core.base_error import DetonationError

LOG_VERSION = 1
_MAGIC = b"DTLG"
_HEADER = struct.Struct("<4sB3xIQQI")  # magic, kind, place, step, bytes, checksum of all before and of the bytes
_CHECKED = struct.Struct("<4sB3xIQQ")
START, MESSAGE, STEP, SYNCHRONIZE = range(4)
"""The kinds of records: how the file was begun; messages; and what ends the messages of a step, or of `synchronize`."""


class DamagedLog(DetonationError, ValueError):
    """A log holds something else than whole records of one run."""


@dataclass(frozen=True)
class LogRecord:
    """One record.

    Args:
        place: Of messages: the channel and bucket of which they are.
        step: Of messages: at which they were sent; else the number of steps that were taken when it was written.
        content: The messages, or JSON.
    """

    kind: int
    place: int
    step: int
    content: bytes | bytearray | memoryview

    def parts(self) -> list[bytes | bytearray | memoryview]:
        """The bytes of the record."""
        head = _CHECKED.pack(_MAGIC, self.kind, self.place, self.step, len(self.content))
        return [head + struct.pack("<I", zlib.crc32(self.content, zlib.crc32(head))), self.content]

    def table(self) -> dict[str, Any]:
        """The content as JSON."""
        found = json.loads(bytes(self.content))
        if not isinstance(found, dict):
            raise DamagedLog("a record of a log is no table")
        return found


def noted(kind: int, step: int, table: dict[str, Any]) -> LogRecord:
    """A record with JSON."""
    return LogRecord(kind, 0, step, json.dumps(table, separators=(",", ":")).encode())


def record_of(octets: memoryview) -> tuple[LogRecord, memoryview]:
    """The record that `octets` begin with, and the octets after it. Raises `DamagedLog` where it is not whole."""
    if len(octets) >= _HEADER.size:
        magic, kind, place, step, count, checksum = _HEADER.unpack(octets[: _HEADER.size])
        content, rest = octets[_HEADER.size : _HEADER.size + count], octets[_HEADER.size + count :]
        head = zlib.crc32(octets[: _CHECKED.size])
        if magic == _MAGIC and len(content) == count and zlib.crc32(content, head) == checksum:
            return LogRecord(kind, place, step, content), rest
    raise DamagedLog("a record of a step is not whole")


def whole_records(path: Path) -> Iterator[LogRecord]:
    """Yields the records of a file up to the first that is not whole, as a crash leaves one at the end.

    Raises `DamagedLog` where whole records follow one that is damaged.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        while (record := _next(file, size)) is not None:
            yield record
        at = file.tell()
        if _another(file, at):
            raise DamagedLog(f"{path} is damaged at byte {at:,}: whole records follow; restore it, or replay to before")


def _next(file: BinaryIO, size: int) -> LogRecord | None:
    """The record where `file` stands; None, and back to where it stood, where there is no whole one."""
    at = file.tell()
    head = file.read(_HEADER.size)
    if len(head) == _HEADER.size:
        magic, kind, place, step, count, checksum = _HEADER.unpack(head)
        if magic == _MAGIC and count <= size - at - _HEADER.size:  # before anything is allocated
            content = file.read(count)
            if len(content) == count and zlib.crc32(content, zlib.crc32(head[: _CHECKED.size])) == checksum:
                return LogRecord(kind, place, step, content)
    file.seek(at)
    return None


def _another(file: BinaryIO, at: int) -> bool:
    """True if a whole record begins after `at`."""
    size = file.seek(0, 2)
    file.seek(at)
    rest = file.read()
    found = rest.find(_MAGIC, 1)
    while found >= 0:
        file.seek(at + found)
        if _next(file, size) is not None:
            return True
        found = rest.find(_MAGIC, found + 1)
    return False
