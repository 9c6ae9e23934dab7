"""The replicas that a run has lost, and survived: told, counted, and replaced where they wrote for all."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from detonation.cluster.survive.groups import SurvivedLoss
from detonation.feed.shared_state import memory_norm
from detonation.train.loop.session import Session
from detonation.train.loop.world import ElasticRanks
from detonation.train.output import directory
from detonation.train.recipe.schema import Table
from detonation.train.run.recorder import Recorder


class Losses:
    """The replicas that a run has lost and survived; nothing where a loss ends the run."""

    def __init__(self, session: Session) -> None:
        self._session, self._told = session, 0
        self._world = session.world if isinstance(session.world, ElasticRanks) else None
        self._lock: directory.RunDirectory | None = None
        self._losses: list[Table] = []

    def news(self, path: Path, recorder: Recorder) -> list[str]:
        """The losses since the last call, in lines. The first replica that is left takes over the run directory."""
        if self._world is None:
            return []
        if recorder.take_over():
            with contextlib.suppress(directory.InUse):  # by the lost one, which only stands still
                self._lock = directory.RunDirectory(path)
        new, self._told = self._world.changes[self._told :], len(self._world.changes)
        return [line for change in new for line in self._lines(change)]

    def _lines(self, change: SurvivedLoss) -> Iterator[str]:
        if change.came:
            yield f"replica {_numbers(change.came)} has come in before step {change.next_step + 1}"
        if change.replicas:
            norm, seconds = memory_norm(self._session.optimizer), change.recovered_s
            found = {"replicas": [*change.replicas], "last_step": change.next_step, "recovered_s": seconds}
            self._losses.append({**found, "memory_norm": norm})
            went_on = f"the others went on {seconds:.2f} s after the notice"
            lost = f"lost replica {_numbers(change.replicas)} after step {change.next_step}"
            yield f"{lost}, and its memory (here of norm {norm:.3g}); {went_on}"

    def table(self) -> Table:
        """The losses, for the summary."""
        if self._world is None:
            return {}
        return {"replicas_left": self._session.optimizer.coordinates.replicas, "losses": self._losses}

    def close(self) -> None:
        """Leaves together with the replicas that are left."""
        if self._world is not None:
            self._world.close()
        if self._lock is not None:
            self._lock.close()


def _numbers(replicas: Sequence[int]) -> str:
    return ", ".join(map(str, replicas))
