"""Waits for the ranks that this process started, and finds the root cause of their failures."""

import logging
import os
import signal
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from detonation.cluster.processes.failure import (
    ROOT_CAUSE_WAIT_S,
    Failure,
    failure_from_exit_code,
    root_cause,
)
from detonation.cluster.survive.elastic_axis import MeetingPoint
from detonation.whole_files import read_json

_POLL_S = 0.02
_LEAVING_S = 15.0
"""After a rank has ended successfully, all other ranks must end within this number of seconds. The
end of a replica that was asked to leave does not count.
"""
_log = logging.getLogger("detonation")


def failure_file(folder: Path, rank: int) -> Path:
    """Returns the path of the file to which `rank` writes its failure. The process that started
    `rank` reads this file.
    """
    return folder / f"failure-{rank}.json"


class RankExits:
    """Waits until all ranks of a world on this machine have ended. Removes each ended rank from
    `pids`, which holds the process ids by rank.

    `meeting` is the store of a run that may lose replicas, and None for other runs. The failures of
    a lost replica do not count while the other replicas continue.
    """

    def __init__(
        self, pids: dict[int, int], folder: Path, deadline: float, meeting: MeetingPoint | None
    ) -> None:
        self._pids = pids
        self._folder = folder
        self._deadline = deadline
        self._meeting = meeting
        self._failures: list[Failure] = []
        self._survived: list[Failure] = []
        # until this time, other ranks may still report the root cause
        self._cause_deadline = float("inf")
        # at this time, the launcher kills ranks that have not ended
        self._end_deadline = float("inf")

    def wait(self) -> Failure | None:
        """Waits until all ranks have ended. Returns the root cause of a failure; None if all ranks
        succeeded.
        """
        while self._pids and time.monotonic() < self._end_deadline:
            self._collect_ended()
            self._kill_left_out()
            if self._knows_cause():
                break
            if self._pids and time.monotonic() > self._deadline:
                text = (
                    f"ranks {sorted(self._pids)} did not finish in time, and the launcher ended"
                    " them"
                )
                return Failure(min(self._pids), time.time(), "TimeoutError", text, complete=True)
            time.sleep(_POLL_S)
        if self._pids and time.monotonic() >= self._end_deadline:
            _log.warning(
                "ranks %s had not ended %g s after the other ranks: the launcher kills them",
                sorted(self._pids),
                _LEAVING_S,
            )
        return self._root_cause()

    def _collect_ended(self) -> None:
        for rank, pid in list(self._pids.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._pids[rank]
                self._take(rank, os.waitstatus_to_exitcode(status))

    def _take(self, rank: int, code: int) -> None:
        """Records the exit code of `rank`. If the rank failed and the other replicas can continue,
        kills the remaining ranks of its replica.
        """
        if code:
            failure = self._failure_of(rank, code)
            of_replica: Collection[int] = ()
            if self._meeting is not None:
                of_replica = self._meeting.survives(failure)
            self._kill(of_replica)
            if of_replica:
                self._survived.append(failure)
            else:
                self._failures.append(failure)
        elif self._meeting is not None and not self._meeting.has_left(rank):
            self._end_deadline = time.monotonic() + _LEAVING_S

    def _failure_of(self, rank: int, code: int) -> Failure:
        """Returns the failure that `rank` wrote to its `failure_file`. If there is no such file,
        makes a failure from the exit code `code` of the rank.
        """
        path = failure_file(self._folder, rank)
        if path.exists():
            return Failure(**read_json(path))
        return failure_from_exit_code(rank, code)

    def _kill_left_out(self) -> None:
        """Kills the ranks of replicas that the run has removed, because a hanging process keeps
        RAM, ports and locks.
        """
        if self._meeting is not None:
            self._kill(self._meeting.left_out())

    def _kill(self, ranks: Iterable[int]) -> None:
        for rank in self._pids.keys() & set(ranks):
            os.kill(self._pids[rank], signal.SIGKILL)

    def _knows_cause(self) -> bool:
        """True if one of the failures cannot be an effect of another rank's end. Also True once the
        launcher has waited `ROOT_CAUSE_WAIT_S` seconds for such a failure.
        """
        if any(not failure.network for failure in self._failures):
            return True
        now = time.monotonic()
        if self._failures:
            self._cause_deadline = min(self._cause_deadline, now + ROOT_CAUSE_WAIT_S)
        return now > self._cause_deadline

    def _root_cause(self) -> Failure | None:
        """Returns the root cause of the failures. The failures of lost replicas count only if all
        other failures may be effects of another rank's end, such as a lost connection.
        """
        if self._failures and all(failure.network for failure in self._failures):
            return root_cause([*self._failures, *self._survived])
        return root_cause(self._failures)
