"""Measurements of a run: one record per step in `metrics.jsonl`, and the lines about steps on the
terminal.
"""

import contextlib
import errno
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from detonation.report.words import duration, less_text, size_text
from detonation.train.output.directory import unwritable, write_text
from detonation.whole_files import MOST_RECORDS, json_text, opened, parse_json, read_text


@dataclass(frozen=True)
class Record:
    """The measured values of one step.

    Args:
        step: Number of the step, from 1.
        loss: Mean over all ranks. With `train.balance` it is the mean of the last round.
        lr: Learning rate of the step.
        seconds: Duration of the step, without validation.
        bytes_sent: Bytes that one replica sent, the sum over its shards.
        waited_s: Part of `seconds` that rank 0 waited for an exchange.
        step_s: Part of `seconds` in the optimizer's step, including `waited_s`.
        agreeing_s: Part of `seconds`, outside `step_s`, that rank 0 waited until the losses of all
            ranks had arrived.
        levels: `bytes_sent` over each axis.
        grad_norm: Global norm of the gradients before clipping. Only if the run clips, and only in
            steps with a printed line.
        memory: `peak_memory` of the process of rank 0, in bytes. Only in steps with a printed line.
        waits: Waiting times of replicas so far (`Waits.table`), for up to 16 replicas. Only in
            steps with a printed line.
        taking: Number of replicas that trained in this step, if this number may change.
        shard_bytes_sent: Bytes that one replica sent between its nodes since the last step.
    """

    step: int
    loss: float
    lr: float
    seconds: float
    bytes_sent: int
    waited_s: float = 0.0
    step_s: float = 0.0
    levels: dict[str, int] = field(default_factory=dict)
    val_loss: float | None = None
    val_accuracy: float | None = None
    val_bleu: float | None = None
    grad_norm: float | None = None
    memory: int | None = None
    shard_bytes_sent: int | None = None
    taking: int | None = None
    agreeing_s: float | None = None
    waits: dict[str, Any] | None = None

    def values(self) -> dict[str, Any]:
        """Returns the measured values by name. Leaves out `levels` if there is only one level."""
        found = {key: value for key, value in asdict(self).items() if value is not None}
        if len(self.levels) < 2:
            del found["levels"]
        return found

    def line(self) -> str:
        return json_text(self.values()) + "\n"


_NUMBERS = ("step", "loss", "lr", "seconds", "bytes_sent", "waited_s", "step_s")
_NUMBERS_IF_MEASURED = (
    "val_loss", "val_accuracy", "val_bleu", "grad_norm", "memory", "shard_bytes_sent", "taking",
    "agreeing_s",
)  # fmt: skip


class MetricsFile:
    """A file of records that holds only complete lines. A new file begins with `kept`, the records
    of earlier starts of the run.
    """

    def __init__(self, path: Path, kept: Sequence[Record] = ()) -> None:
        self.path = path
        write_text(path, "".join(record.line() for record in kept))
        try:
            self._file = os.fdopen(opened(path, os.O_WRONLY | os.O_APPEND), "ab", buffering=0)
        except OSError as error:
            raise unwritable(path, error) from error
        self._length = os.fstat(self._file.fileno()).st_size
        self._waiting = b""

    def write(self, record: Record) -> None:
        """Appends one line for `record`. If the disk is full, the line waits for the next call of
        `write`, and the run continues.
        """
        self._waiting += record.line().encode()
        with contextlib.suppress(OSError):
            self._append()

    def sync(self) -> None:
        """Forces the lines to the disk. A run does this before it saves a checkpoint, so that a
        crash cannot lose records of steps before the checkpoint.
        """
        with contextlib.suppress(OSError):
            os.fsync(self._file.fileno())

    @property
    def removed(self) -> bool:
        """True if the file or its directory was removed during the run."""
        return not os.fstat(self._file.fileno()).st_nlink

    def close(self) -> None:
        """Closes the file. Raises `Unwritable` if lines could not be written, or if the file was
        removed.
        """
        try:
            self._append()
            if self.removed:
                raise FileNotFoundError(errno.ENOENT, "it was removed while the run wrote it")
        except OSError as error:
            raise unwritable(self.path, error) from error
        finally:
            self._file.close()

    def _append(self) -> None:
        """Appends all waiting lines. After an error, removes what was appended, and raises the
        error.
        """
        written = 0
        try:
            while written < len(self._waiting):
                written += os.write(self._file.fileno(), self._waiting[written:])
        except OSError:
            os.ftruncate(self._file.fileno(), self._length)
            raise
        self._length += written
        self._waiting = b""


def read_metrics(path: Path) -> list[Record]:
    """Returns the records of a metrics file, without its damaged lines."""
    return parse_metrics(read_text(path, errors="replace", most=MOST_RECORDS))[0]


def parse_metrics(text: str) -> tuple[list[Record], int]:
    """Returns the records in the text of a metrics file, and the number of damaged lines.

    A power loss can damage lines.
    """
    found = [_record(line) for line in text.split("\n") if line]
    return [record for record in found if record is not None], found.count(None)


def _record(line: str) -> Record | None:
    try:
        values = parse_json(line)
        # a balanced run may not know the loss of its first steps, and JSON has no NaN
        if values.get("loss", 0.0) is None:
            values["loss"] = math.nan
        record = Record(**values)
    except (ValueError, TypeError, AttributeError):
        return None
    if all(_is_number(getattr(record, name)) for name in _NUMBERS) and _others_fit(record):
        return record
    return None


def _others_fit(record: Record) -> bool:
    """True if the optional values of the record have the right types."""
    numbers = [getattr(record, name) for name in _NUMBERS_IF_MEASURED]
    if not all(value is None or _is_number(value) for value in numbers):
        return False
    if not isinstance(record.levels, dict) or not all(map(_is_number, record.levels.values())):
        return False
    return isinstance(record.waits, dict | None)


def _is_number(value: object) -> bool:
    """True if `value` is a float, or an integer of at most 64 bits."""
    if isinstance(value, int):
        return abs(value) < 1 << 63
    return isinstance(value, float)


def reduction(sent: float, full: float) -> float | None:
    """Returns the bytes of full synchronisation divided by the bytes that were sent; None if no
    bytes were sent.
    """
    if sent:
        return full / sent
    return None


@dataclass(frozen=True)
class Portion:
    """The data that one replica processes in one step: `count` of `unit`, such as 4096 tokens.

    Args:
        replicas: Number of replicas that train in a step, unless the record of the step holds
            another number.
        constant: True if a step always has `replicas` portions, even if fewer or more replicas
            train in it.
    """

    count: int
    unit: str
    replicas: int = 1
    constant: bool = False

    def times(self, records: Sequence[Record]) -> int:
        """Returns the number of portions that all replicas together processed in the steps of
        `records`.

        >>> steps = [Record(1, 2.0, 0.1, 0.5, 0), Record(2, 2.0, 0.1, 0.5, 0, taking=2)]
        >>> Portion(4096, "tokens", replicas=3).times(steps)
        5
        """
        default = self.replicas
        if self.constant:
            return default * len(records)
        return sum(default if record.taking is None else record.taking for record in records)

    def per_second(self, records: Sequence[Record]) -> str:
        """Returns the throughput of all replicas together in the steps of `records`, as text.

        >>> steps = [Record(1, 2.0, 0.1, seconds=0.5, bytes_sent=0)]
        >>> Portion(4096, "tokens").per_second(steps), Portion(4, "images").per_second(steps)
        ('8,192 tokens/s', '8 images/s')
        """
        speed = self.count * self.times(records) / sum(record.seconds for record in records)
        if speed >= 100:
            return f"{speed:,.0f} {self.unit}/s"
        return f"{speed:.3g} {self.unit}/s"


def log_line(records: Sequence[Record], steps: int, full_sync: int, portion: Portion) -> str:
    """Returns a line about `records`, the steps since the last printed line. The line holds the
    last loss and lr, and the mean bytes and the mean time per step.
    """
    last = records[-1]
    count = len(records)
    sent = sum(record.bytes_sent for record in records) / count
    seconds = sum(record.seconds for record in records) / count
    width = len(str(steps))
    parts = [f"step {last.step:{width}}/{steps}", f"loss {last.loss:.4f}", f"lr {last.lr:.2e}"]
    if last.grad_norm is not None:
        parts.append(f"grad norm {last.grad_norm:.3g}")
    if sent:
        parts.append(f"sent {size_text(sent)}/step ({less_text(reduction(sent, full_sync))})")
    else:
        parts.append("sent nothing")
    parts += [f"{duration(seconds)}/step", portion.per_second(records)]
    if last.memory is not None:
        parts.append(size_text(last.memory))
    if last.val_loss is not None:
        parts.append(f"validation {last.val_loss:.4f}")
    if last.step < steps:
        parts.append(f"{duration(seconds * (steps - last.step))} left")
    return "  ".join(parts)
