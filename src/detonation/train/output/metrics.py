"""The measurements of a run: one record per step in `metrics.jsonl`, and the same in words for
people."""

import contextlib
import errno
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from detonation.report.words import duration, less_text, size_text
from detonation.train.output.directory import unwritable, write_text
from detonation.whole_files import MOST_RECORDS, opened, read_text


@dataclass(frozen=True)
class Record:
    """One step.

    Args:
        loss: The mean over all ranks.
        seconds: The duration of the step, without validation.
        bytes_sent: By one replica, all its shards together.
        waited_s: The part of `seconds` in which rank 0 waited for an exchange.
        step_s: The part spent in the optimizer's step, `waited_s` included.
        agreeing_s: The part, outside `step_s`, in which rank 0 waited for the losses of all: for
            the slowest one.
        levels: `bytes_sent` over each axis.
        grad_norm: The global norm before clipping, where the run clips; measured where a line is
            shown, as is `memory`.
        memory: The bytes that the process of rank 0 has held at most, see `peak_memory`.
        waits: Who has waited for whom, `Waits.table`; where a line is shown, of up to 16 replicas.
        setting: The scheme from the next step on, where it changes.
        taking: The replicas that took this step, where their number may change: slow ones sit steps
            out, and `loss` is then that of the last round; or replicas may be lost, and come.
        shard_bytes_sent: By one replica between the nodes that its shards lie on, since the last
            step.
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
    setting: str | None = None
    shard_bytes_sent: int | None = None
    taking: int | None = None
    agreeing_s: float | None = None
    waits: dict[str, Any] | None = None

    def values(self) -> dict[str, Any]:
        """The values by name, without those that were not measured, and without `levels` where
        there is only one."""
        found = {key: value for key, value in asdict(self).items() if value is not None}
        if len(self.levels) < 2:
            del found["levels"]
        return found

    def line(self) -> str:
        return json.dumps(self.values()) + "\n"


class MetricsFile:
    """Records in a file, each line whole or absent: those `kept` of an earlier start, then those
    that are written."""

    def __init__(self, path: Path, kept: Sequence[Record] = ()) -> None:
        self.path = path
        write_text(
            path, "".join(record.line() for record in kept)
        )  # it replaces a file: whole or not at all
        try:
            self._file = os.fdopen(opened(path, os.O_WRONLY | os.O_APPEND), "ab", buffering=0)
        except OSError as error:
            raise unwritable(path, error) from error
        self._length = os.fstat(self._file.fileno()).st_size
        self._waiting = b""

    def write(self, record: Record) -> None:
        """Appends one line.

        While the disk is full the line waits for the next one: no run should stop for it.
        """
        self._waiting += record.line().encode()
        with contextlib.suppress(OSError):
            self._append()

    @property
    def removed(self) -> bool:
        """True where the file has lost its name, as where its directory was removed."""
        return not os.fstat(self._file.fileno()).st_nlink

    def close(self) -> None:
        """Closes the file.

        Raises `Unwritable` when lines still wait, or the file was removed meanwhile.
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
        """Appends the waiting lines, or removes the part that was written."""
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
    """The records of a metrics file, as far as its lines are whole."""
    return parse_metrics(read_text(path, errors="replace", most=MOST_RECORDS))[0]


def parse_metrics(text: str) -> tuple[list[Record], int]:
    """The records of the content of a metrics file, and the number of its damaged lines, as a loss
    of power leaves."""
    found = [_record(line) for line in text.split("\n") if line]
    return [record for record in found if record is not None], found.count(None)


def _record(line: str) -> Record | None:
    """The record of a line; None where it is damaged."""
    try:
        record = Record(**json.loads(line))
    except (ValueError, TypeError):  # no JSON, or no record
        return None
    measured = (record.step, record.loss, record.lr, record.seconds, record.bytes_sent)
    return record if all(isinstance(value, int | float) for value in measured) else None


def reduction(sent: float, full: float) -> float | None:
    """The bytes of full synchronisation over those sent; None when nothing was sent."""
    return full / sent if sent else None


@dataclass(frozen=True)
class Portion:
    """The data that one replica takes in in one step: `count` of `unit`, such as 4096 tokens.

    `replicas` take a step whose record does not say how many.
    """

    count: int
    unit: str
    replicas: int = 1

    def times(self, records: Sequence[Record]) -> int:
        """How often a replica took in this portion in these steps.

        >>> steps = [Record(1, 2.0, 0.1, 0.5, 0), Record(2, 2.0, 0.1, 0.5, 0, taking=2)]
        >>> Portion(4096, "tokens", replicas=3).times(steps)
        5
        """
        return sum(self.replicas if record.taking is None else record.taking for record in records)

    def per_second(self, records: Sequence[Record]) -> str:
        """The speed of all replicas together in these steps.

        >>> steps = [Record(1, 2.0, 0.1, seconds=0.5, bytes_sent=0), Record(2, 2.0, 0.1, seconds=0.5, bytes_sent=0)]
        >>> Portion(4096, "tokens").per_second(steps), Portion(4, "images").per_second(steps)
        ('8,192 tokens/s', '8 images/s')
        """
        speed = self.count * self.times(records) / sum(record.seconds for record in records)
        return f"{f'{speed:,.0f}' if speed >= 100 else f'{speed:.3g}'} {self.unit}/s"


def log_line(records: Sequence[Record], steps: int, full_sync: int, portion: Portion) -> str:
    """One line about `records`, the steps since the last such line: latest loss and lr, mean bytes
    and mean time."""
    last, count = records[-1], len(records)
    sent = sum(record.bytes_sent for record in records) / count
    seconds = sum(record.seconds for record in records) / count
    less = less_text(reduction(sent, full_sync))
    width = len(str(steps))
    text = f"step {last.step:{width}}/{steps}  loss {last.loss:.4f}  lr {last.lr:.2e}"
    text += "" if last.grad_norm is None else f"  grad norm {last.grad_norm:.3g}"
    text += f"  sent {size_text(sent)}/step ({less})" if sent else "  sent nothing"
    text += f"  {duration(seconds)}/step  {portion.per_second(records)}"
    text += "" if last.memory is None else f"  {size_text(last.memory)}"
    text += "" if last.val_loss is None else f"  validation {last.val_loss:.4f}"
    return f"{text}  {duration(seconds * (steps - last.step))} left" if last.step < steps else text
