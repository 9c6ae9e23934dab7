"""Records of a run: each step's, the log of its updates, and the feed of its weights."""

import json
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
from detonation.log.repeat import replay_together
from detonation.log.writer import UpdateLog
from detonation.train.loop.checkpoints import compare_settings
from detonation.train.loop.session import Session, misfits
from detonation.train.loop.summary import NOTHING, Counts, portion
from detonation.train.output import directory, metrics, trackers
from detonation.train.output.screen import Screen
from detonation.train.recipe.schema import described_mesh
from detonation.train.recipe.tables import to_table

_MOST_REPLICAS = 16
"""In a line of the metrics file; the table of more would be longer than the rest of it."""


class Recorder:
    """Keeps every step's record; rank 0 also writes each down, and shows those that are due.

    `done` steps, the faults `before` and the records `kept` are of earlier starts.
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
        self._session, self._train, self._screen = session, session.config.train, screen
        self._full_sync = session.world.over_shards(sum(session.optimizer.dense_bytes_by_level))
        self.records, self._path, self._done = list(kept), path, done
        self._loggers: list[trackers.Logger] = []
        self._metrics: metrics.MetricsFile | None = None
        self._gone = False
        self._logged = len(self.records)
        screen.line(_title(session, path))
        self._portion = portion(session)
        if session.rank == 0:
            self._open(done)
            self.warn(misfits(session.config))
        screen.start(done, self._train.steps)

    def _open(self, done: int) -> None:
        """Writes from now on, after `done` steps."""
        self._metrics = metrics.MetricsFile(self._path / directory.METRICS, self.records)
        self._loggers = [self._metrics]
        opened = trackers.open_trackers(
            self._path, self._session.config, done, lambda line: self.warn([line])
        )
        self._loggers += opened
        self.show([logger.said for logger in opened if logger.said])

    def take_over(self) -> bool:
        """Writes and shows in the place of a first rank that was lost; True where this rank begins
        to."""
        if self._session.rank or self._loggers:
            return False
        self.records = self._earlier() + self.records
        done = self.records[-1].step if self.records else self._done
        self._screen.speak()  # before loggers open, which have something to say
        self._open(done)
        self._screen.start(done, self._train.steps)
        self._logged = len(self.records)
        return True

    def _earlier(self) -> list[metrics.Record]:
        """The records in the run directory of the steps before those that this rank knows, as one
        that came in does."""
        file, first = (
            self._path / directory.METRICS,
            self.records[0].step if self.records else self._done + 1,
        )
        return (
            [record for record in metrics.read_metrics(file) if record.step < first]
            if file.exists()
            else []
        )

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
            self._screen.line(
                metrics.log_line(latest, self._train.steps, self._full_sync, self._portion)
            )
            self._logged = len(self.records)
            self._warn_of_removal()

    def _warn_of_removal(self) -> None:
        """Says once that the run directory was removed under the run, and what follows."""
        if self._gone or not self._metrics or not self._metrics.removed:
            return
        self._gone = True
        self.warn(
            [
                f"{self._metrics.path} was removed while the run writes it: checkpoints go into "
                "a new directory of that name, measurements are lost, the run ends with an error"
            ]
        )

    def _measured(self) -> dict[str, Any]:
        """The measurements for which the host may wait for a device, and which are therefore not of
        every step."""
        norm, memory = self._session.optimizer.stats.grad_norm, peak_memory(self._session.device)
        waits = self._session.waits.table(most=_MOST_REPLICAS) or None
        return {
            "memory": memory,
            "grad_norm": None if norm is None else float(norm),
            "waits": waits,
        }

    def warn(self, lines: Sequence[str]) -> None:
        """Shows faults that do not stop the run."""
        for line in lines:
            self._screen.line(f"warning: {line}; training goes on")

    def show(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._screen.line(line)

    def close(self) -> None:
        """Closes the metrics file and the loggers."""
        for logger in reversed(
            self._loggers
        ):  # the metrics file last: it raises where the disk is full
            logger.close()


def _title(session: Session, path: Path) -> str:
    config, numel = (
        session.config,
        sum(parameter.numel() for parameter in session.model.parameters()),
    )
    world = described_mesh(config.mesh)
    world += f" and an emulated link of {config.mesh.link}" if config.mesh.link else ""
    model = f"{config.model.name} with {numel:,} parameters"
    optimizer = f"{config.optimizer.name} at lr {config.optimizer.lr:g}"
    return (
        f"{config.schemes} over {world}: {model} on {session.data.name}, by {optimizer}, in {path}"
    )


class Recording:
    """Logs and publishes a run, as its configuration says, under the name `run`.

    Each rank of the first replica has a feed. Where that replica is lost, those of the next one
    take its place.
    """

    def __init__(self, session: Session, path: Path, run: str = "") -> None:
        self._session, train = session, session.config.train
        self.log, self._checkpoints = (
            UpdateLog(path / directory.UPDATES),
            path / directory.CHECKPOINTS,
        )
        self._tapes: list[StepObserver] = [self.log] if train.log_updates else []
        self._feed: Feed | None = None
        self._trouble, self._run = "", run
        if train.publish and not session.optimizer.coordinates.replica:
            self._publish_first()
        if self._tapes:
            session.optimizer.record(Tapes(self._tapes))
        self._door: Admission | None = None
        if session.config.mesh.elastic and len(session.config.levels) == 1:
            self._door = Admission(session.model, session.optimizer)

    def after_step(self) -> list[str]:
        """Lets in who asks for it, and publishes in the place of a replica that was lost; returns
        lines about it."""
        if self._door is not None:
            self._door.after_step()
        publish, replica = (
            self._session.config.train.publish,
            self._session.optimizer.coordinates.replica,
        )
        if not publish or self._feed is not None or replica:
            return []
        try:
            self._publish()
        except (
            OSError
        ) as error:  # the one that was lost still has the port, or the address is of its machine
            new, self._trouble = str(error) != self._trouble, str(error)
            return [f"the weights are not published: {error}"] if new else []
        self._session.optimizer.record(Tapes(self._tapes))
        return []

    def saved(self, step: int) -> None:
        """Begins another file of the log with the checkpoint of `step`; files before the last whole
        one go."""
        whole = [
            retention.step_of(found) for found in retention.saved_checkpoints(self._checkpoints)
        ]
        self.log.rotate(max((before for before in whole if before < step), default=0))

    def close(self, ended: bool) -> None:
        """Ends the feed. ended: Whether training has come to its end."""
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
        about = {"config": to_table(config)}
        self._feed = Feed(
            self._session.model,
            self._session.optimizer,
            config.train.publish,
            about=about,
            run=self._run,
        )
        self._tapes.append(self._feed)


def replay_rest(session: Session, path: Path, log: list[int], may_start: bool) -> list[str]:
    """Takes the steps that the run's log has after the checkpoint or the start, but not the last;
    returns lines.

    Files of the `log` begin after these steps. Collective. Raises `ValueError` where, without a
    checkpoint, the log is of another run, unless it `may_start` anew.
    """
    step = session.optimizer.step_count
    if step not in log:
        return []
    was = (
        {}
        if step
        else json.loads(session.world.texts().broadcast(json.dumps(directory.config_in(path))))
    )
    lines = compare_settings(path / directory.CONFIG, was, session.config, "start") if was else []
    most = max(step, session.config.train.steps - 1)
    reached, why = replay_together(path / directory.UPDATES, session.optimizer, most)
    if why and not reached and not may_start:
        raise ValueError(
            f"cannot go on from the log: {why}; resume as the run began, or choose another --out"
        )
    line = (
        f"{reached - step} steps of the log follow: training goes on after step {reached}, with"
        " empty memories"
    )
    return [*lines, line] if reached > step else []
