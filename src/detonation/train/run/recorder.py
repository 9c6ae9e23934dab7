"""The recorder of a run: every step's record, written down, sent to trackers and shown."""

from collections.abc import Sequence
from pathlib import Path

import torch

from detonation.train.loop import counts
from detonation.train.loop.session import Session
from detonation.train.output import directory, metrics, trackers
from detonation.train.output.gauges import Portion
from detonation.train.output.screen import Screen


class Recorder:
    """Keeps every step's record; rank 0 also writes each down, and shows those that are due.

    Args:
        done: Steps of earlier starts.
        before: Faults in earlier starts.
        kept: Records of earlier starts.
    """

    def __init__(
        self,
        session: Session,
        path: Path,
        screen: Screen,
        done: int,
        before: counts.Counts = counts.NOTHING,
        kept: Sequence[metrics.Record] = (),
    ) -> None:
        self.before = before
        self._train, self._screen = session.config.train, screen
        self._full_sync = session.world.over_shards(sum(session.optimizer.dense_bytes_by_level))
        self.records = list(kept)
        self._loggers: list[trackers.Logger] = []
        self._logged = len(self.records)
        screen.line(_title(session, path))
        if session.rank == 0:
            self._loggers = [metrics.MetricsFile(path / directory.METRICS, self.records)]
            self._loggers += trackers.open_trackers(path, session.config, done, lambda line: self.warn([line]))
        screen.start(done, self._train.steps, portion(session))

    def add(self, record: metrics.Record) -> None:
        """Takes in the record of one more step."""
        self.records.append(record)
        for logger in self._loggers:
            logger.write(record)
        self._screen.advance(record)
        if record.step % self._train.log_every == 0 or record.val_loss is not None:
            self._screen.line(metrics.log_line(self.records[self._logged :], self._train.steps, self._full_sync))
            self._logged = len(self.records)

    def warn(self, lines: Sequence[str]) -> None:
        """Shows faults that do not stop the run."""
        for line in lines:
            self._screen.line(f"warning: {line}; training goes on")

    def show(self, lines: Sequence[str]) -> None:
        """Shows changes in the run."""
        for line in lines:
            self._screen.line(line)

    def close(self) -> None:
        """Closes the metrics file and the loggers."""
        for logger in reversed(self._loggers):  # the metrics file last: it raises where the disk is full
            logger.close()


def _title(session: Session, path: Path) -> str:
    config, numel = session.config, sum(parameter.numel() for parameter in session.model.parameters())
    world = f"{config.mesh.replicas} replicas x {config.mesh.shards} shards"
    model = f"{config.model.name} with {numel:,} parameters"
    return f"{config.schemes} over {world}: {model} on {session.data.name}, in {path}"


def portion(session: Session) -> Portion:
    """The data in one step of all ranks together: tokens of text, or whole examples."""
    train, data = session.config.train, session.data
    examples = train.batch_size * train.accumulate * session.world_size
    if data.kind == "text":
        return Portion(examples * data.train[torch.tensor([0])]["input_ids"].shape[1], "tokens")
    return Portion(examples, "images" if data.kind == "images" else "pairs")
