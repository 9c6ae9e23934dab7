"""Adapt: a run's setting follows its link, as its own exchanges measure it."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import detonation as dt
from detonation.cluster.network.profile import Operation, Step
from detonation.core.schemes.scheme import Scheme
from detonation.core.schemes.traffic import kind
from detonation.plan.auto import everyone
from detonation.plan.choice import check_budget, choose
from detonation.plan.cost import Network, Work, cost
from detonation.plan.search import options
from detonation.plan.spelling import spelled
from detonation.train.loop.session import Session
from detonation.train.output.metrics import Record
from detonation.train.recipe.schema import Table
from detonation.train.recipe.sizes import shard_shapes

FACTOR = 2.0
"""How many times faster or slower the link must be than thought before anything follows it."""
STEPS = 20
"""Steps after which ranks agree on what they measured; whole rounds where those are longer."""
CERTAIN_S, CERTAIN = 5e-4, 0.2
"""A difference in waiting below this, and this part of what may be waited, says nothing."""
_FURTHEST = 64.0
_MOVED: dict[str, Sequence[int | float]] = {
    "every": (5, 10, 20, 50, 100, 200, 500),
    "topk": (1, 2, 4, 8, 16, 32, 64, 128),
    "rate": tuple(1 / 2**n for n in range(1, 8)),
}
"""What is moved, the first that a scheme has, and where to."""


@dataclass(frozen=True)
class Followed:
    """What is known of the link and of a step without it. It is saved with the run, which goes on from there."""

    budget: float
    network: Network
    compute_s: float
    step: Step

    def table(self) -> Table:
        """In plain values."""
        lines = {name: [line.latency_s, line.rate_bits_per_s] for name, line in self.network.operations.items()}
        return {"budget": self.budget, "lines": lines, "compute_s": self.compute_s, "step": asdict(self.step)}

    @classmethod
    def of(cls, table: Mapping[str, Any], replicas: int, shards: int) -> "Followed":
        """What `table` made a table of, of a world of that shape. Raises `ValueError` for anything else."""
        try:
            operations = {name: Operation(latency, rate, 0.0) for name, (latency, rate) in table["lines"].items()}
            network = Network(replicas, shards, operations)
            return cls(check_budget(table["budget"]), network, float(table["compute_s"]), Step(**table["step"]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"what the checkpoint says of the link is damaged: {error!r}") from error


@dataclass(frozen=True)
class Move:
    """What was agreed on: how many times as fast the link is as was thought, and the arguments from now on."""

    times: float
    arguments: Table


class Adapter:
    """Watches how long the steps of `session` wait, and moves the setting of its scheme within a budget of waiting.

    The exchanges themselves are the measurement: the plan says how long they would wait at any rate, so how long they
    did says what the rate is. The last to come waits for the link alone, so of the replicas the one counts that waited
    least. `after` is collective where `due` says so, which is at the same steps on all ranks.
    """

    def __init__(self, session: Session, followed: Followed) -> None:
        self.followed = followed
        self._session = session
        self._first = dt.scheme(session.config.scheme.name, session.config.scheme.arguments)
        self._world = everyone(session.device)
        shapes = shard_shapes(session.config)
        steps = {self._first.name: followed.step}
        self._work = Work(shapes, followed.compute_s, steps, overlap=not session.config.train.clip)
        self._waits: list[float] = []

    def after(self, record: Record) -> list[str]:
        """Takes in one more step on all ranks, and follows the link where it has changed; what to tell people of it."""
        self._waits.append(record.waited_s)
        if not self._due(record.step):
            return []
        waits, self._waits = self._world.tell(_typical(self._waits, self._every), self._session.device), []
        decision = self._decide(waits) if self._session.rank == 0 else None
        decided = self._world.tell(decision and asdict(decision), self._session.device)[0]
        return [] if decided is None else self._follow(Move(**decided), record.step)

    @property
    def _every(self) -> int:
        return _scheme(self._session).round.every

    def _due(self, step: int) -> bool:
        interval = -(-STEPS // self._every) * self._every
        return step % interval == 0 and len(self._waits) >= max(self._every, interval // 2)

    def _decide(self, waits: Sequence[float]) -> Move | None:
        """What to do where ranks have waited that long a step; None where the link is as it was."""
        now, network, shards = _scheme(self._session), self.followed.network, self._session.config.mesh.shards
        waited = max(min(waits[shard::shards]) for shard in range(shards))
        certain = CERTAIN_S + CERTAIN * self.followed.budget * (self._work.compute_s + waited)
        times = explained(waited, lambda x: cost(now, self._work, network.faster(x)).exposed_s, certain)
        if 1 / FACTOR < times < FACTOR:
            return None
        found = options(self._settings(), self._work, network.faster(times))
        return Move(times, dict(choose(found, self.followed.budget).cost.scheme.arguments))

    def _settings(self) -> list[Scheme]:
        """Those that the run can move to: what it began with, what it has, and steps from there."""
        now = _scheme(self._session)
        key = next((key for key in _MOVED if key in now.arguments), None)
        found = {spelled(scheme): scheme for scheme in (self._first, now)}
        for value in _MOVED[key] if key else ():
            try:
                other = dt.scheme(now.name, {**self._first.arguments, str(key): value})
            except ValueError:  # beyond what the scheme can be
                continue
            if self._way(other) == self._way(now):
                found.setdefault(spelled(other), other)
        return list(found.values())

    def _way(self, scheme: Scheme) -> list[str]:
        """How messages would travel from each shard: what owners keep has no place elsewhere."""
        replicas = self._session.config.mesh.replicas
        return [kind(scheme, scheme.codec.layout(shapes).rows, replicas) for shapes in self._work.shards]

    def _follow(self, move: Move, step: int) -> list[str]:
        was = _scheme(self._session)
        self.followed = replace(self.followed, network=self.followed.network.faster(move.times))
        scheme = dt.scheme(was.name, move.arguments)
        pace = f"adapt: after step {step} the link is {move.times:.2g} times as fast as it was"
        if scheme == was:
            return [f"{pace}: {spelled(was)} stays"]
        self._session.optimizer.change(scheme)
        return [f"{pace}: {spelled(scheme)} from now on, in the place of {spelled(was)}"]


def explained(waited_s: float, predicted: Callable[[float], float], certain_s: float) -> float:
    """How many times the rate is what was thought, if it is to explain the wait; as near to 1 as it can be.

    predicted: the wait at so many times the rate. 1 where no rate explains it: then it was something else.

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


def _scheme(session: Session) -> Scheme:
    return session.optimizer.levels[-1][1]


def _typical(waits: Sequence[float], every: int) -> float:
    """Seconds waited in a step, on average over the round that is the median of all."""
    rounds = [sum(waits[start : start + every]) for start in range(0, len(waits) - every + 1, every)]
    return statistics.median(rounds) / every
