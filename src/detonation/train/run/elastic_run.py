"""Elastic runs: checks at the start, replicas that join during training, and replicas that are
lost.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from detonation.cluster.processes.failure import describe, is_network_error
from detonation.cluster.processes.refusal import Preparation
from detonation.cluster.quorum.store import refuse_replica
from detonation.cluster.survive.agreement import ReplicaLost, in_words
from detonation.cluster.survive.groups import SurvivedLoss
from detonation.cluster.survive.surviving import SurvivingCommunicator
from detonation.feed.shared_state import memory_norm
from detonation.train.loop.session import Session
from detonation.train.loop.world import ElasticRanks
from detonation.train.output import directory
from detonation.train.recipe.schema import Table
from detonation.train.run.recorder import Recorder


class SetUpError(ValueError):
    """This replica of an elastic run cannot start."""


class SetUp:
    """The set-up of this replica of an elastic run. If the set-up fails, `watched` reports the
    failure to all replicas, and the run ends. After the set-up, a failure ends only this replica.

    The other replicas read the failure in the store of their axis. Before that store exists, they
    read the failure at the address at which replicas meet; see `refusal`.
    """

    def __init__(self, task_meet: str, replica: int | None) -> None:
        self._meet = task_meet
        self._replica = replica
        self._start: Preparation | None = None
        self.is_done = False

    def met(self, axis: SurvivingCommunicator) -> None:
        """Records that all replicas of the run have met on `axis`."""
        self._start = axis.host.membership.start
        self._start.begin()

    def done(self) -> None:
        """Records that this replica is ready to train."""
        if self._start is not None:
            self._start.prepared()
        self.is_done = True

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Context manager that reports failures of this replica to the other replicas until `done`
        is called. Raises `SetUpError` for a failure.

        Failures that other replicas caused pass through unchanged, and so does a `ValueError`.
        """
        try:
            yield
        except Exception as error:
            from_others = isinstance(error, TimeoutError | ReplicaLost) or is_network_error(error)
            if self.is_done or from_others:
                raise
            self._tell(describe(error))
            if isinstance(error, ValueError) or self._start is None:
                raise
            raise SetUpError(describe(error)) from error

    def _tell(self, reason: str) -> None:
        if self._start is not None:
            self._start.refuse(reason)
        elif self._replica is not None and self._meet:
            refuse_replica(self._meet, self._replica, reason)


class Losses:
    """Handles lost replicas of an elastic run: reports them, counts them, and lets the first
    remaining replica write the run directory.
    """

    def __init__(self, session: Session, set_up: SetUp) -> None:
        self._session = session
        self._told = 0
        self.set_up = set_up
        self._world: ElasticRanks | None = None
        self._members: Sequence[int] = ()  # the replicas that took part in the last reported step
        self._latest: list[str] = []
        if isinstance(session.world, ElasticRanks):
            self._world = session.world
        self._lock: directory.RunDirectory | None = None
        self._losses: list[Table] = []
        self._joined: list[Table] = []

    def news(self, path: Path, recorder: Recorder) -> list[str]:
        """Returns warnings about the replicas that were lost since the last call. Prints a line
        about each replica that has joined since then.

        If the replica that wrote the run directory is lost, the first remaining replica writes it
        from now on.
        """
        if self._world is None:
            return []
        took_over = recorder.take_over()
        if took_over:
            # continue without the lock of the run directory, which a lost replica may still hold
            with contextlib.suppress(directory.InUse):
                self._lock = directory.RunDirectory(path)
        new = self._world.losses[self._told :]
        self._told = len(self._world.losses)
        for change in new:
            self._note_joined(change, recorder)
        lines = [line for change in new for line in self._lines(change)]
        self._members = self._world.members
        if took_over:  # this rank did not print its last lines, because it was not rank 0
            lines = lines or self._latest
        self._latest = lines or self._latest
        return lines

    def came_in(self, step: int) -> str:
        """Describes how this new replica joined the run after `step`."""
        assert self._world is not None
        own = self._session.optimizer.coordinates
        number = self._world.members[own.replica]
        self._joined.append({"replicas": [number], "last_step": step})
        return f"came in after step {step}, as replica {number}; {own.replicas} replicas train"

    def _note_joined(self, change: SurvivedLoss, recorder: Recorder) -> None:
        if change.came:
            self._joined.append({"replicas": [*change.came], "last_step": change.next_step})
            recorder.show([f"{in_words(change.came)} joined after step {change.next_step}"])

    def _lines(self, change: SurvivedLoss) -> Iterator[str]:
        if not change.replicas:
            return
        norm = memory_norm(self._session.optimizer)
        seconds = change.recovered_s
        names = in_words(change.replicas)
        found = {
            "replicas": [*change.replicas],
            "last_step": change.next_step,
            "recovered_s": seconds,
        }
        if change.left:
            self._losses.append({**found, "left": True})
            yield (
                f"{names} left after step {change.next_step}, as asked; the other replicas have"
                " its unsent momentum"
            )
            return
        shares = [share for share in map(self._share, change.replicas) if share]
        examples = [[share.start, share.stop - 1] for share in shares]
        self._losses.append({**found, "memory_norm": norm, "examples": examples})
        line = f"lost {names} after step {change.next_step}"
        if norm:  # the norm is 0 under schemes that send everything, such as `full`
            line += f", with the unsent momentum (of norm {norm:.3g} on this replica)"
        line += f"; the other replicas continued {seconds:.2f} s after they noticed the loss"
        if shares:
            line += f"; step {change.next_step} may lack its {examples_in_words(shares)}"
        yield line

    def _share(self, replica: int) -> range:
        """Returns the positions of the examples that a lost replica computed in its last step."""
        assert self._world is not None
        members = self._world.members
        if replica not in members:  # `members` lacks the lost replica: use the earlier list
            members = self._members
        train = self._session.config.train
        return self._world.share_of(replica, members, train.batch_size * train.accumulate)

    def table(self) -> Table:
        if self._world is None:
            return {}
        return {
            "replicas_left": self._session.optimizer.coordinates.replicas,
            "losses": self._losses,
            "joined": self._joined,
        }

    def close(self, has_left: bool) -> None:
        """Leaves the run together with the other replicas. Does not contact them if this replica
        `has_left` the run at an earlier step.
        """
        if self._world is not None and not has_left:
            self._world.close()
        if self._lock is not None:
            self._lock.close()


def examples_in_words(shares: Sequence[range]) -> str:
    """Describes the examples in `shares`, of which none is empty.

    >>> examples_in_words([range(2, 3)]), examples_in_words([range(2), range(4, 5)])
    ('example 2', 'examples 0 to 1 and 4')
    """
    noun = "example"
    if sum(map(len, shares)) > 1:
        noun = "examples"
    ends = [dict.fromkeys((share.start, share.stop - 1)) for share in shares]
    return f"{noun} {' and '.join(' to '.join(map(str, each)) for each in ends)}"
