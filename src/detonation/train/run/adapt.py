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
    """The state of an adapter: the link, and a step without it. A checkpoint holds it for a run
    that is resumed.

    network: as it was at first; it is now `times` as fast, and its latency `later` times as long.
    """

    budget: float
    network: Network
    compute_s: float
    step: Step
    times: float = 1.0
    later: float = 1.0

    def table(self) -> Table:
        """The same in plain values."""
        lines = {
            name: [line.latency_s, line.rate_bits_per_s]
            for name, line in self.network.operations.items()
        }
        known = {
            "budget": self.budget,
            "lines": lines,
            "compute_s": self.compute_s,
            "step": asdict(self.step),
        }
        return {**known, "restart": self.network.restart, "times": self.times, "later": self.later}

    @classmethod
    def of(cls, table: Mapping[str, Any], replicas: int, shards: int) -> "Followed":
        """Reads a `table()` back, for a world of that shape.

        Raises `ValueError` for anything else.
        """
        try:
            operations = {
                name: Operation(latency, rate, 0.0)
                for name, (latency, rate) in table["lines"].items()
            }
            network = Network(replicas, shards, operations, float(table.get("restart", 0.0)))
            now = (float(table.get(key, 1.0)) for key in ("times", "later"))
            return cls(
                check_budget(table["budget"]),
                network,
                float(table["compute_s"]),
                Step(**table["step"]),
                *now,
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"what the checkpoint says of the link is damaged: {error!r}"
            ) from error


class Adapter:
    """Watches the waiting of `session`, and moves the setting of its scheme to stay within a budget
    of waiting.

    The exchanges themselves are the measurement. Reports of losses are so short that their wait is
    latency. The plan predicts the wait for a message at any rate: what is left of it gives the
    rate. The replica that comes last waits for the link alone: the least wait of all replicas
    counts. `after` is collective at steps that all ranks know.
    """

    def __init__(self, session: Session, followed: Followed) -> None:
        self.followed = followed
        self._session = session
        self._first = scheme_of(session.config.levels[-1])
        self._everyone = Everyone(session.device)
        shapes = shard_shapes(session.config)
        steps = {self._first.name: followed.step}
        self._work = Work(
            shapes, followed.compute_s, steps, accumulate=session.config.train.accumulate
        )
        self._waits: list[float] = []
        self._reports: list[float] = []

    def after(self, record: Record) -> list[str]:
        """Takes in one more step on all ranks, and follows the link where it has changed; returns
        the lines to show."""
        self._waits.append(record.waited_s)
        self._reports.append(record.agreeing_s or 0.0)
        every = _present(self._session).round.every
        interval = -(-STEPS // every) * every
        if record.step % interval or len(self._waits) < max(every, interval // 2):
            return []
        mine = _typical(self._waits, every), statistics.median(self._reports)
        self._waits, self._reports = [], []
        everyone = self._everyone.send_to_all(mine)
        decision = self._decide(*zip(*everyone, strict=True)) if self._session.rank == 0 else None
        decided = self._everyone.send_to_all(decision)[0]
        return [] if decided is None else self._follow(record.step, *decided)

    def _decide(
        self, waits: Sequence[float], reports: Sequence[float]
    ) -> tuple[float, float, Table] | None:
        """Factors of rate and latency, and the arguments of the scheme from now on; None where all
        is as it was."""
        now, followed, shards = (
            _present(self._session),
            self.followed,
            self._session.config.mesh.shards,
        )
        waited, reported = (
            max(min(of[shard::shards]) for shard in range(shards)) for of in (waits, reports)
        )
        certain = CERTAIN_S + CERTAIN * followed.budget * (self._work.compute_s + waited)
        network = followed.network.faster(followed.times, followed.later)

        def expected(times: float, later: float) -> tuple[float, float]:
            there = network.faster(times, later)
            return cost(now, self._work, there).exposed_s, report_s(now, self._work, there)

        times, later = 1 / followed.times, 1 / followed.later
        (w1, r1), (w0, r0) = expected(times, later), expected(1.0, 1.0)
        # Back at the first link, if waits are nearer to its: the nearest link that explains them is
        # only on the way.
        back = max(abs(w1 - w0), abs(r1 - r0)) > max(
            certain, 2 * abs(w1 - waited), 2 * abs(r1 - reported)
        )
        if not back:
            later = 1.0
            if (
                network.seconds("all-gather", 0) > certain
            ):  # a shorter latency is not to be told from noise
                later = explained(reported, lambda x: expected(1.0, 1 / x)[1], certain)
                later = 1.0 if 1 / FACTOR < later < FACTOR else 1 / later
            times = explained(waited, lambda x: expected(x, later)[0], certain)
            if (
                times == later == 1.0
            ):  # as where backward hides the reports, and no rate explains the wait
                later = 1 / explained(waited, lambda x: expected(1.0, 1 / x)[0], certain)
            times, later = (1.0 if 1 / FACTOR < each < FACTOR else each for each in (times, later))
        if times == later == 1.0:
            return None
        there = largest_within(
            self._settings(), self._work, network.faster(times, later), followed.budget
        )
        return times, later, dict((self._first if back else there).arguments)

    def _settings(self) -> list[Scheme]:
        """The schemes that the run can move to: its first, its present one, and the first at other
        values."""
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
        """The collective of each shard, which stays: without a memory a server residual has no
        place in another."""
        replicas = self._session.config.mesh.replicas
        return [
            collective_for(scheme, scheme.codec.layout(shapes), replicas)
            for shapes in self._work.shards
        ]

    def _follow(self, step: int, times: float, later: float, arguments: Table) -> list[str]:
        was, before = _present(self._session), self.followed
        self.followed = replace(before, times=before.times * times, later=before.later * later)
        there = scheme(was.name, arguments)
        found = [f"is {times:.2g} times as fast as it was"] if times != 1.0 or later == 1.0 else []
        found += [f"has {later:.2g} times the latency"] if later != 1.0 else []
        text = f"adapt: after step {step} the link {' and '.join(found)}"
        if there == was:
            return [f"{text}: {spelled(was)} stays"]
        self._session.optimizer.reconfigure(there)
        return [f"{text}: {spelled(there)} from now on, instead of {spelled(was)}"]


def explained(waited_s: float, predicted: Callable[[float], float], certain_s: float) -> float:
    """The factor of the rate that explains a wait, as near to 1 as possible; 1 where no rate
    explains it.

    `predicted` is the wait at a factor of the rate; a difference in waiting below `certain_s` is
    noise.

    >>> explained(0.1, lambda times: 0.2 / times, 0.001), explained(0.2, lambda times: 0.2 / times, 0.001)
    (2.0, 1.0)
    """
    towards, times = 1 if waited_s < predicted(1.0) else -1, 1.0
    while towards * (predicted(times) - waited_s) > certain_s:
        times *= 2 ** (towards / 4)
        if not 1 / _FURTHEST < times < _FURTHEST:
            return 1.0 if towards > 0 else times
    return round(times, 3)


def _present(session: Session) -> Scheme:
    return session.optimizer.levels[-1][1]


def _typical(waits: Sequence[float], every: int) -> float:
    """Seconds waited per step, on average over the median round."""
    rounds = [
        sum(waits[start : start + every]) for start in range(0, len(waits) - every + 1, every)
    ]
    return statistics.median(rounds) / every
