"""Records of a run: one record per step, the update log, and the feed that publishes weights."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from detonation.checkpoint.files import retention
from detonation.cluster.devices import peak_memory
from detonation.core.integrity.observer import StepObserver
from detonation.feed.admission import Admission
from detonation.feed.publisher import Feed
from detonation.log.records import Tapes
from detonation.log.writer import UpdateLog
from detonation.train.loop.checks import misfits
from detonation.train.loop.session import Session
from detonation.train.loop.summary import (
    NOTHING,
    Counts,
    full_sync_by_level,
    full_sync_per_step,
    portion,
)
from detonation.train.output import directory, metrics, trackers
from detonation.train.output.screen import Screen
from detonation.train.recipe.schema import described_mesh, spelled_optimizer
from detonation.train.recipe.tables import to_table

_MOST_REPLICAS = 16
"""With more replicas than this, lines of the metrics file omit the table of waiting times."""


class Recorder:
    """Stores the record of each step. Rank 0 writes all records, and prints a line every
    `log_every` steps.

    Args:
        done: Steps of earlier starts.
        before: Faults counted in earlier starts.
        kept: Records of earlier starts.
    """

    def __init__(
        self,
        session: Session,
        path: Path,
        screen: Screen,
        done: int,
        before: Counts = NOTHING,
        kept: Sequence[metrics.Record] = (),
    ) -> None:
        self.before = before
        self._session = session
        self._train = session.config.train
        self._screen = screen
        self._full_sync = full_sync_by_level(session)
        self.records = list(kept)
        self._path = path
        self._done = done
        self._loggers: list[trackers.Logger] = []
        self._metrics: metrics.MetricsFile | None = None
        self._gone = self._unopened = False
        self._logged = len(self.records)
        screen.line(_title(session, path))
        self._portion = portion(session)
        if session.rank == 0:
            self._open(done)
            self.warn(misfits(session.config))
        screen.start(done, self._train.steps)

    def _open(self, done: int) -> None:
        """Opens the metrics file and the trackers, after `done` finished steps."""
        self._metrics = metrics.MetricsFile(self._path / directory.METRICS, self.records)

        def warn(line: str) -> None:
            self.warn([line])

        opened = trackers.open_trackers(self._path, self._session.config, done, warn)
        self._loggers = [self._metrics, *opened]
        self.show([logger.said for logger in opened if logger.said])

    def take_over(self) -> bool:
        """Begins to write if this rank has become rank 0. Returns True if this call begins to
        write.

        If the disk is full, warns, and tries again at later steps.
        """
        if self._session.rank or self._loggers:
            return False
        if self._unopened and len(self.records) % self._train.log_every:
            return False
        self.records = self._earlier() + self.records
        done = self._done
        if self.records:
            done = self.records[-1].step
        self._screen.speak()  # begin to print first, because trackers print lines when they open
        try:
            self._open(done)
        except directory.Unwritable as error:
            if not self._unopened:
                self.warn([str(error)])
            self._unopened = True
            return False
        self._unopened = False
        self._screen.start(done, self._train.steps)
        self._logged = len(self.records)
        return True

    def _earlier(self) -> list[metrics.Record]:
        """Returns the records in the run directory whose steps came before this replica joined."""
        file = self._path / directory.METRICS
        if not file.exists():
            return []
        first = self._done + 1
        if self.records:
            first = self.records[0].step
        return [record for record in metrics.read_metrics(file) if record.step < first]

    def add(self, record: metrics.Record) -> None:
        shown = record.step % self._train.log_every == 0 or record.val_loss is not None
        if shown and self._loggers:
            record = replace(record, **self._measured())
        self.records.append(record)
        for logger in self._loggers:
            logger.write(record)
        self._screen.advance(record)
        if shown:
            latest = self.records[self._logged :]
            dense = full_sync_per_step(self._full_sync, latest)
            line = metrics.log_line(latest, self._train.steps, dense, self._portion)
            self._screen.line(line)
            self._logged = len(self.records)
            self._warn_of_removal()

    def sync(self) -> None:
        """Forces the metrics file to the disk. Called before each save."""
        if self._metrics:
            self._metrics.sync()

    def _warn_of_removal(self) -> None:
        """Warns once if the run directory was removed during the run."""
        if self._gone or not self._metrics or not self._metrics.removed:
            return
        self._gone = True
        line = (
            f"{self._metrics.path} was removed while the run writes it: checkpoints go into "
            "a new directory of that name, measurements are lost, the run ends with an error"
        )
        self.warn([line])

    def _measured(self) -> dict[str, Any]:
        """Returns measurements that only printed steps have, because for these measurements the
        host may have to wait for the device.
        """
        norm = self._session.optimizer.stats.grad_norm
        return {
            "memory": peak_memory(self._session.device),
            "grad_norm": None if norm is None else float(norm),
            "waits": self._session.waits.table(most=_MOST_REPLICAS) or None,
        }

    def warn(self, lines: Sequence[str]) -> None:
        """Prints warnings about faults that do not stop the run."""
        for line in lines:
            self._screen.line(f"warning: {line}; training goes on")

    def show(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._screen.line(line)

    def close(self) -> None:
        """Closes the metrics file and the loggers. Raises `Unwritable` if some records could not be
        saved.
        """
        if self._unopened:
            self._open(self._done)
        # close the metrics file last, because its `close` raises an error on a full disk
        for logger in reversed(self._loggers):
            logger.close()


def _title(session: Session, path: Path) -> str:
    config = session.config
    numel = sum(parameter.numel() for parameter in session.model.parameters())
    world = described_mesh(config.mesh)
    if config.mesh.link:
        world += f" and an emulated link of {config.mesh.link}"
    model = f"{config.model.name} with {numel:,} parameters"
    optimizer = spelled_optimizer(config.optimizer)
    return (
        f"{config.schemes} over {world}: {model} on {session.data.name}, by {optimizer}, in {path}"
    )


class Recording:
    """Writes the update log and publishes the weights, if the configuration asks for this.

    Each rank of the first replica has a feed named `run`. If the first replica is lost, the next
    replica publishes the weights.
    """

    def __init__(self, session: Session, path: Path, run: str) -> None:
        self._session = session
        train = session.config.train
        self.log = UpdateLog(path / directory.UPDATES)
        self._checkpoints = path / directory.CHECKPOINTS
        self._tapes: list[StepObserver] = []
        if train.log_updates:
            self._tapes.append(self.log)
        self._feed: Feed | None = None
        self._trouble = ""
        self._run = run
        if train.publish and not session.optimizer.coordinates.replica:
            self._publish_first()
        if self._tapes:
            session.optimizer.record(Tapes(self._tapes))
        self._door: Admission | None = None
        if session.config.mesh.elastic and len(session.config.levels) == 1:
            self._door = Admission(session.model, session.optimizer)

    def after_step(self) -> list[str]:
        """Lets a waiting replica join. If the publishing replica was lost, begins to publish the
        weights. Returns warnings.
        """
        if self._door is not None:
            self._door.after_step()
        publish = self._session.config.train.publish
        replica = self._session.optimizer.coordinates.replica
        if not publish or self._feed is not None or replica:
            return []
        try:
            self._publish()
        # `train.publish` may name an address of another machine, or a port that is still in use
        except OSError as error:
            if str(error) == self._trouble:
                return []
            self._trouble = str(error)
            return [f"the weights are not published: {error}"]
        self._session.optimizer.record(Tapes(self._tapes))
        return []

    def saved(self, step: int) -> None:
        """Begins a new file of the update log at the checkpoint of `step`.

        Removes the older files that no complete checkpoint needs any more.
        """
        steps = map(retention.step_of, retention.saved_checkpoints(self._checkpoints))
        self.log.rotate(max((before for before in steps if before < step), default=0))

    def close(self, ended: bool) -> None:
        """Closes the feed. `ended` is True if training is complete."""
        if self._feed is not None:
            self._feed.close(ended=ended)

    def _publish_first(self) -> None:
        try:
            self._publish()
        except OSError as error:
            why = str(error.strerror or error).partition(" (while")[0]
            raise ValueError(f"train.publish: {why}; choose another --publish") from error

    def _publish(self) -> None:
        config = self._session.config
        self._feed = Feed(
            self._session.model,
            self._session.optimizer,
            config.train.publish,
            about={"config": to_table(config), "exported": dict(self._session.data.exported)},
            run=self._run,
        )
        self._tapes.append(self._feed)
