"""The tapes of a run: its log of updates, and the feed of its weights, in the first replica that is left."""

import secrets
from pathlib import Path

from detonation.checkpoint.files import retention
from detonation.core.integrity.tape import Tape
from detonation.feed.admission import Admission
from detonation.feed.publisher import Feed
from detonation.log.step_recorder import Tapes
from detonation.log.writer import UpdateLog
from detonation.train.loop.session import Session
from detonation.train.output import directory
from detonation.train.recipe.tables import to_table
from detonation.train.run.elastic_run import own_address


class Recording:
    """Logs and publishes a run, as its configuration says. Collective: all ranks construct it.

    Each rank of the first replica has a feed. Where that replica is lost, those of the next one take its place.

    Args:
        came_later: This replica came in while others trained; the rest is not collective then.
    """

    def __init__(self, session: Session, path: Path, came_later: bool = False) -> None:
        self._session, train = session, session.config.train
        self._log, self._checkpoints = UpdateLog(path / directory.UPDATES), path / directory.CHECKPOINTS
        self._tapes: list[Tape] = [self._log] if train.log_updates else []
        self._feed: Feed | None = None
        self._trouble = ""
        self._run = ""
        if train.publish and not came_later:
            self._run = session.world.texts().broadcast(secrets.token_hex(8))
        if train.publish and not session.optimizer.coordinates.replica:
            self._publish()
        if self._tapes:
            session.optimizer.record(Tapes(self._tapes))
        self._door: Admission | None = None
        if session.config.mesh.elastic:
            self._door = Admission(session.model, session.optimizer, own_address())

    def after_step(self) -> list[str]:
        """Lets in who asks for it, and publishes in the place of a replica that was lost; returns lines about it."""
        if self._door is not None:
            self._door.after_step()
        publish, replica = self._session.config.train.publish, self._session.optimizer.coordinates.replica
        if not publish or self._feed is not None or replica:
            return []
        try:
            self._publish()
        except OSError as error:  # the one that was lost still has the port, or the address is of its machine
            new, self._trouble = str(error) != self._trouble, str(error)
            return [f"the weights are not published: {error}"] if new else []
        self._session.optimizer.record(Tapes(self._tapes))
        return []

    def saved(self, step: int) -> None:
        """Begins another file of the log with the checkpoint of `step`; files before the last whole one go."""
        whole = [retention.step_of(found) for found in retention.saved_checkpoints(self._checkpoints)]
        self._log.rotate(max((before for before in whole if before < step), default=0))

    def close(self, ended: bool) -> None:
        """Ends the feed. ended: Whether training has come to its end."""
        if self._feed is not None:
            self._feed.close(ended=ended)

    def close_log(self) -> None:
        """Writes what is left of the log."""
        self._log.close()

    def _publish(self) -> None:
        config = self._session.config
        about = {"config": to_table(config)}
        self._feed = Feed(
            self._session.model, self._session.optimizer, config.train.publish, about=about, run=self._run
        )
        self._tapes.append(self._feed)
