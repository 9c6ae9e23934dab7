"""Adapter: the setting of a run's scheme follows its link, which the run's own exchanges measure."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from detonation.cluster.network.measure import Everyone
from detonation.cluster.network.profile import Operation, Step
from detonation.core.schemes.registry import scheme
from detonation.core.schemes.scheme import Scheme
from detonation.core.schemes.traffic import collective_for
from detonation.plan.cost import Network, Work, cost, report_s, spelled
from detonation.plan.search import check_budget, largest_within
from detonation.train.loop.session import Session, scheme_of, shard_shapes
from detonation.train.output.metrics import Record
from detonation.train.recipe.schema import Table

FACTOR = 2.0
"""How many times faster or slower the link must be than assumed before the setting follows it."""
STEPS = 20
"""Steps between agreements on the measurements; whole rounds where those are longer."""
CERTAIN_S, CERTAIN = 5e-4, 0.2
"""A difference in waiting below `CERTAIN_S` plus this part of the budget is noise."""
_FURTHEST = 64.0
_MOVED: dict[str, Sequence[int | float]] = {
    "every": (5, 10, 20, 50, 100, 200, 500),
    "topk": (1, 2, 4, 8, 16, 32, 64, 128),
    "rate": tuple(1 / 2**n for n in range(1, 8)),
}
"""The arguments that are moved, the first that a scheme has, and their values."""


@dataclass(frozen=True)
class Followed:
    """The state of an adapter: the link, and a step without it. A checkpoint holds it for a run that is resumed."""

    budget: float
    network: Network
    compute_s: float
    step: Step

    def table(self) -> Table:
        """The same in plain values."""
        lines = {name: [line.latency_s, line.rate_bits_per_s] for name, line in self.network.operations.items()}
        known = {"budget": self.budget, "lines": lines, "compute_s": self.compute_s, "step": asdict(self.step)}
        return {**known, "restart": self.network.restart}

    @classmethod
    def of(cls, table: Mapping[str, Any], replicas: int, shards: int) -> "Followed":
        """Reads a `table()` back, for a world of that shape. Raises `ValueError` for anything else."""
        try:
            operations = {name: Operation(latency, rate, 0.0) for name, (latency, rate) in table["lines"].items()}
            network = Network(replicas, shards, operations, float(table.get("restart", 0.0)))
            return cls(check_budget(table["budget"]), network, float(table["compute_s"]), Step(**table["step"]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"what the checkpoint says of the link is damaged: {error!r}") from error


@dataclass(frozen=True)
class SettingChange:
    """A decision of rank 0: the link is `times` as fast as assumed, its latency `later` times as long; and what to do.

    arguments: Those of the scheme from now on.
    """

    times: float
    later: float
    arguments: Table


class Adapter:
    """Watches the waiting of `session`, and moves the setting of its scheme to stay within a budget of waiting.

    The exchanges themselves are the measurement. Reports of losses are so short that their wait is latency. The plan
    predicts the wait for a message at any rate: what is left of it gives the rate. The replica that comes last waits
    for the link alone: the least wait of all replicas counts. `after` is collective at steps that all ranks know.
    """

    def __init__(self, session: Session, followed: Followed) -> None:
        self.followed = followed
        self._session = session
        self._first = scheme_of(session.config.levels[-1])
        self._everyone = Everyone(session.device)
        shapes = shard_shapes(session.config)
        steps = {self._first.name: followed.step}
        self._work = Work(shapes, followed.compute_s, steps, accumulate=session.config.train.accumulate)
        self._waits: list[float] = []
        self._reports: list[float] = []

    def after(self, record: Record) -> list[str]:
        """Takes in one more step on all ranks, and follows the link where it has changed; returns the lines to show."""
        self._waits.append(record.waited_s)
        self._reports.append(record.agreeing_s or 0.0)
        if not self._due(record.step):
            return []
        mine = _typical(self._waits, self._every), statistics.median(self._reports)
        self._waits, self._reports = [], []
        everyone = self._everyone.send_to_all(mine)
        decision = self._decide(*zip(*everyone, strict=True)) if self._session.rank == 0 else None
        decided = self._everyone.send_to_all(decision and asdict(decision))[0]
        return [] if decided is None else self._follow(SettingChange(**decided), record.step)

    @property
    def _every(self) -> int:
        return _present(self._session).round.every

    def _due(self, step: int) -> bool:
        interval = -(-STEPS // self._every) * self._every
        return step % interval == 0 and len(self._waits) >= max(self._every, interval // 2)

    def _decide(self, waits: Sequence[float], reports: Sequence[float]) -> SettingChange | None:
        """The decision for these waits per step; None where the link is as it was."""
        now, network, shards = _present(self._session), self.followed.network, self._session.config.mesh.shards
        waited, reported = (max(min(of[shard::shards]) for shard in range(shards)) for of in (waits, reports))
        certain = CERTAIN_S + CERTAIN * self.followed.budget * (self._work.compute_s + waited)

        def exposed(times: float, later: float) -> float:
            return cost(now, self._work, network.faster(times, later)).exposed_s

        later = 1.0
        if network.seconds("all-gather", 0) > certain:  # a shorter latency is not to be told from noise
            later = explained(reported, lambda x: report_s(now, self._work, network.faster(1.0, 1 / x)), certain)
            later = 1.0 if 1 / FACTOR < later < FACTOR else 1 / later
        times = explained(waited, lambda x: exposed(x, later), certain)
        if times == later == 1.0:  # as where backward hides the reports, and no rate explains the wait
            later = 1 / explained(waited, lambda x: exposed(1.0, 1 / x), certain)
        times, later = (1.0 if 1 / FACTOR < found < FACTOR else found for found in (times, later))
        if times == later == 1.0:
            return None
        there = largest_within(self._settings(), self._work, network.faster(times, later), self.followed.budget)
        return SettingChange(times, later, dict(there.arguments))

    def _settings(self) -> list[Scheme]:
        """The schemes that the run can move to: its first, its present one, and the first at other values."""
        now = _present(self._session)
        key = next((key for key in _MOVED if key in now.arguments), None)
        found = {spelled(scheme): scheme for scheme in (self._first, now)}
        for value in _MOVED[key] if key else ():
            try:
                other = scheme(now.name, {**self._first.arguments, str(key): value})
            except ValueError:  # out of the range of the scheme
                continue
            if self._way(other) == self._way(now):
                found.setdefault(spelled(other), other)
        return list(found.values())

    def _way(self, scheme: Scheme) -> list[str]:
        """The collective of each shard, which stays: without a memory a server residual has no place in another."""
        replicas = self._session.config.mesh.replicas
        return [collective_for(scheme, scheme.codec.layout(shapes), replicas) for shapes in self._work.shards]

    def _follow(self, move: SettingChange, step: int) -> list[str]:
        was = _present(self._session)
        self.followed = replace(self.followed, network=self.followed.network.faster(move.times, move.later))
        there = scheme(was.name, move.arguments)
        found = [f"is {move.times:.2g} times as fast as it was"] if move.times != 1.0 or move.later == 1.0 else []
        found += [f"has {move.later:.2g} times the latency"] if move.later != 1.0 else []
        text = f"adapt: after step {step} the link {' and '.join(found)}"
        if there == was:
            return [f"{text}: {spelled(was)} stays"]
        self._session.optimizer.reconfigure(there)
        return [f"{text}: {spelled(there)} from now on, instead of {spelled(was)}"]


def explained(waited_s: float, predicted: Callable[[float], float], certain_s: float) -> float:
    """The factor of the rate that explains a wait, as near to 1 as possible; 1 where no rate explains it.

    `predicted` is the wait at a factor of the rate; a difference in waiting below `certain_s` is noise.

    >>> explained(0.1, lambda times: 0.2 / times, 0.001), explained(0.2, lambda times: 0.2 / times, 0.001)
    (2.0, 1.0)
    """
    if abs(waited_s - predicted(1.0)) <= certain_s:
        return 1.0
    faster, times = waited_s < predicted(1.0), 1.0
    while 1 / _FURTHEST < times < _FURTHEST:
        times *= 2**0.25 if faster else 0.5**0.25
        off = predicted(times) - waited_s
        if (off if faster else -off) <= certain_s:
            return round(times, 3)
    return 1.0 if faster else times


def _present(session: Session) -> Scheme:
    return session.optimizer.levels[-1][1]


def _typical(waits: Sequence[float], every: int) -> float:
    """Seconds waited per step, on average over the median round."""
    rounds = [sum(waits[start : start + every]) for start in range(0, len(waits) - every + 1, every)]
    return statistics.median(rounds) / every
