"""The adapter: changes an argument of the run's scheme when the link becomes faster or slower.

The adapter measures the link through the exchanges of the run itself.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from detonation.cluster.init import set_timeouts
from detonation.cluster.network.measure import Everyone
from detonation.cluster.network.profile import Operation, Step
from detonation.core.schemes import Scheme, collective_for, message_bytes, scheme
from detonation.link_speed import LinkSpeed
from detonation.plan.cost import Network, Work, cost, report_s, spelled
from detonation.plan.search import check_budget, largest_within
from detonation.train.loop.checks import scheme_of, shard_shapes
from detonation.train.loop.session import Session
from detonation.train.output.metrics import Record
from detonation.train.recipe.schema import Table

FACTOR = 2.0
"""If the speed of the link changes by less than this factor, the adapter ignores the change."""
STEPS = 20
"""Smallest number of steps from one comparison of measurements to the next, rounded up to whole
rounds.
"""
CERTAIN_S = 5e-4
CERTAIN = 0.2
"""A difference between two waiting times is noise if it is below `CERTAIN_S` plus `CERTAIN` times
the budget in seconds.
"""
_FURTHEST = 64.0
_MOVED: dict[str, Sequence[int | float]] = {
    "every": (5, 10, 20, 50, 100, 200, 500),
    "topk": (1, 2, 4, 8, 16, 32, 64, 128),
    "rate": tuple(1 / 2**n for n in range(1, 8)),
}
"""Arguments of schemes that the adapter changes, with their possible values. If a scheme has
several of these arguments, the adapter changes only the first one.
"""


@dataclass(frozen=True)
class Followed:
    """State of an adapter; checkpoints contain this state.

    Args:
        budget: Part of a step that the run may spend waiting for the network.
        network: Link at the start of the run.
        compute_s: Seconds of forward and backward.
        step: Seconds of the optimizer's step, without the link.
        times: Present rate of the link, as a multiple of the rate at the start.
        later: Present latency of the link, as a multiple of the latency at the start.
    """

    budget: float
    network: Network
    compute_s: float
    step: Step
    times: float = 1.0
    later: float = 1.0

    def table(self) -> Table:
        """Returns this state as plain values that JSON can hold."""
        lines = {
            name: [line.latency_s, line.rate_bits_per_s]
            for name, line in self.network.operations.items()
        }
        return {
            "budget": self.budget,
            "lines": lines,
            "compute_s": self.compute_s,
            "step": asdict(self.step),
            "restart": self.network.restart,
            "times": self.times,
            "later": self.later,
        }

    @classmethod
    def of(cls, table: Mapping[str, Any], replicas: int, shards: int) -> "Followed":
        """Reads the state of an adapter from the result of `table()`. The run has `replicas`
        replicas with `shards` shards each. Raises `ValueError` if `table` is damaged.
        """
        try:
            operations = {
                name: Operation(latency, rate, 0.0)
                for name, (latency, rate) in table["lines"].items()
            }
            network = Network(replicas, shards, operations, float(table.get("restart", 0.0)))
            budget = check_budget(table["budget"])
            compute_s = float(table["compute_s"])
            step = Step(**table["step"])
            times = float(table.get("times", 1.0))
            later = float(table.get("later", 1.0))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"the adapter's state in the checkpoint is damaged: {error!r}"
            ) from error
        return cls(budget, network, compute_s, step, times, later)


class Adapter:
    """Changes an argument of the run's scheme so that the waiting time stays within a budget.

    The adapter measures how long ranks wait in the exchanges of the run. In each step ranks also
    exchange reports of their losses. These reports are tiny, so the wait for them shows the
    latency. The planner predicts the wait for a message at any rate of the link, so a measured wait
    shows this rate. The adapter uses the shortest wait of all replicas: the slowest replica waits
    only for the link, while each other replica waits for the slowest replica, too.
    """

    def __init__(self, session: Session, followed: Followed) -> None:
        self.followed = followed
        self._session = session
        self._first = scheme_of(session.config.levels[-1])
        self._everyone = Everyone(session.device)
        self._work = Work(
            shard_shapes(session.config),
            followed.compute_s,
            {self._first.name: followed.step},
            accumulate=session.config.train.accumulate,
        )
        self._waits: list[float] = []
        self._reports: list[float] = []
        session.waits.shown = True

    def after(self, record: Record) -> list[str]:
        """Records the waits of one step, and adapts the scheme if the link has changed. Returns the
        lines to print.

        Collective at certain steps, which are the same steps on all ranks.
        """
        self._waits.append(record.waited_s)
        self._reports.append(record.agreeing_s or 0.0)
        every = _present(self._session).round.every
        interval = -(-STEPS // every) * every
        if record.step % interval or len(self._waits) < max(every, interval // 2):
            return []
        mine = (_typical(self._waits, every), statistics.median(self._reports))
        self._waits = []
        self._reports = []
        everyone = self._everyone.send_to_all(mine)
        decision = None
        if self._session.rank == 0:
            decision = self._decide(*zip(*everyone, strict=True))
        decided = self._everyone.send_to_all(decision)[0]
        if decided is None:
            return []
        return self._follow(record.step, *decided)

    def _decide(
        self, waits: Sequence[float], reports: Sequence[float]
    ) -> tuple[float, float, Table] | None:
        """Returns the factors by which rate and latency of the link have changed, and new arguments
        for the scheme.

        Returns None if the link is unchanged.
        """
        now = _present(self._session)
        followed = self.followed
        waited = self._least(waits)
        reported = self._least(reports)
        certain = CERTAIN_S + CERTAIN * followed.budget * (self._work.compute_s + waited)
        network = followed.network.faster(followed.times, followed.later)

        def expected(times: float, later: float) -> tuple[float, float]:
            """Predicts how many seconds a rank waits for a message, and how many seconds it waits
            until all ranks have reported their training loss.
            """
            link = network.faster(times, later)
            return cost(now, self._work, link).exposed_s, report_s(now, self._work, link)

        times = 1 / followed.times
        later = 1 / followed.later
        # `w1`, `r1`: predicted at the first speed of the link. `w0`, `r0`: at its current speed.
        (w1, r1) = expected(times, later)
        (w0, r0) = expected(1.0, 1.0)
        # The link has its first speed again if `w1` and `r1` are closer to the measured waits.
        # For such a link, `_factors` might find a speed between the first and the current speed.
        apart = max(abs(w1 - w0), abs(r1 - r0))
        unexplained = max(abs(w1 - waited), abs(r1 - reported))
        returned = apart > max(certain, 2 * unexplained)
        if not returned:
            # If the predicted latency is below the noise, the waits cannot show the latency.
            shows_latency = network.seconds("all-gather", 0) > certain
            times, later = _factors(waited, reported, expected, certain, shows_latency)
        if times == later == 1.0:
            return None
        chosen = self._first
        if not returned:
            link = network.faster(times, later)
            chosen = largest_within(self._settings(), self._work, link, followed.budget)
        return times, later, dict(chosen.arguments)

    def _least(self, seconds: Sequence[float]) -> float:
        """Finds, for each shard, the shortest wait of all replicas. Returns the longest of these
        waits.
        """
        shards = self._session.config.mesh.shards
        return max(min(seconds[shard::shards]) for shard in range(shards))

    def _settings(self) -> list[Scheme]:
        """Returns the schemes to which the run can change: the first scheme of the run, the current
        scheme, and the first scheme with another value of one argument.
        """
        now = _present(self._session)
        found = {spelled(scheme): scheme for scheme in (self._first, now)}
        for key in [key for key in _MOVED if key in now.arguments][:1]:
            for value in _MOVED[key]:
                try:
                    other = scheme(now.name, {**self._first.arguments, key: value})
                except ValueError:  # skip values that the scheme does not accept
                    continue
                if self._collectives(other) == self._collectives(now):
                    found.setdefault(spelled(other), other)
        return list(found.values())

    def _collectives(self, scheme: Scheme) -> list[str]:
        """Returns the collective that each shard would use with `scheme`. The adapter never changes
        the collective, because a change would lose the residuals of the owners (the parts of
        aggregates that the owners have not sent).
        """
        replicas = self._session.config.mesh.replicas
        return [
            collective_for(scheme, scheme.codec.layout(shapes), replicas)
            for shapes in self._work.shards
        ]

    def _follow(self, step: int, times: float, later: float, arguments: Table) -> list[str]:
        was = _present(self._session)
        before = self.followed
        self.followed = replace(before, times=before.times * times, later=before.later * later)
        now = scheme(was.name, arguments)
        found = []
        if times != 1.0 or later == 1.0:
            found = [f"is {times:.2g} times as fast as it was"]
        if later != 1.0:
            found.append(f"has {later:.2g} times the latency")
        text = f"adapt: after step {step} the link {' and '.join(found)}"
        if now == was:
            return [f"{text}: {spelled(was)} stays"]
        self._session.optimizer.reconfigure(now)
        return [f"{text}: {spelled(now)} from now on, instead of {spelled(was)}"]


def _factors(
    waited: float,
    reported: float,
    expected: Callable[[float, float], tuple[float, float]],
    certain: float,
    shows_latency: bool,
) -> tuple[float, float]:
    """Returns the factors by which rate and latency of the link must have changed to explain the
    measured waits. A factor near 1 (between 1 / `FACTOR` and `FACTOR`) becomes 1.
    """
    later = 1.0
    if shows_latency:
        later = 1 / _large(explained(reported, lambda x: expected(1.0, 1 / x)[1], certain))
    times = explained(waited, lambda x: expected(x, later)[0], certain)
    # The wait for reports shows the latency, but backward may hide this wait.
    # So test whether a change of latency alone explains the wait for messages.
    if times == later == 1.0:
        later = 1 / explained(waited, lambda x: expected(1.0, 1 / x)[0], certain)
    return _large(times), _large(later)


def _large(factor: float) -> float:
    """Returns `factor`, or 1 if `factor` is so close to 1 that the adapter must not react."""
    if 1 / FACTOR < factor < FACTOR:
        return 1.0
    return factor


def explained(waited_s: float, predicted: Callable[[float], float], certain_s: float) -> float:
    """Returns the factor by which the rate of the link must have changed to explain a measured
    wait. If several factors explain the wait, returns the factor closest to 1. Returns 1 if the
    predicted wait exceeds the measured wait even on a link 64 times as fast. The smallest result is
    1/64.

    Args:
        waited_s: Measured wait.
        predicted: Function that returns the wait in seconds, if the rate changes by a given factor.
        certain_s: Differences between two waits below this number of seconds are noise.

    >>> explained(0.1, lambda times: 0.2 / times, 0.001)
    2.0
    >>> explained(0.2, lambda times: 0.2 / times, 0.001)
    1.0
    """
    direction = -1
    if waited_s < predicted(1.0):
        direction = 1
    times = 1.0
    while direction * (predicted(times) - waited_s) > certain_s:
        times *= 2 ** (direction / 4)
        if times >= _FURTHEST:
            return 1.0
        if times <= 1 / _FURTHEST:
            return times
    return round(times, 3)


def _present(session: Session) -> Scheme:
    return session.optimizer.levels[-1][1]


def _typical(waits: Sequence[float], every: int) -> float:
    """Returns the seconds that a rank waited per step in the median round."""
    starts = range(0, len(waits) - every + 1, every)
    rounds = [sum(waits[start : start + every]) for start in starts]
    return statistics.median(rounds) / every


def set_message_timeouts(session: Session) -> None:
    """Sets the timeouts of this rank. The timeouts are long enough for the rank's largest message
    at the rate `peers.lowest_bits_per_s` or, if an emulated link is slower, at the rate of that
    link.
    """
    config = session.config
    _, scheme = session.optimizer.levels[0]
    layouts = [replicator.channel.layout for replicator in session.optimizer.build()]
    sizes = [message_bytes(scheme, layout, config.mesh.replicas) for layout in layouts]
    largest = max(sizes, default=0)
    rate = config.peers.lowest_bits_per_s
    if config.mesh.link:
        rate = min(rate, LinkSpeed.parse(config.mesh.link).rate_bits_per_s)
    set_timeouts(largest, config.mesh.shards, config.peers.silence_s, rate)
