"""The training loop of one rank: a step is forward and backward, agreement on loss and signals, and
the update."""

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from detonation.cluster.processes.failure import RunError
from detonation.cluster.processes.signals import Stop
from detonation.core.integrity.fault_counts import BadPeer, Desync, NonFiniteGradient
from detonation.data import batch
from detonation.train.loop.evaluate import autocast, to, translate, validate
from detonation.train.loop.session import Session, scheduler
from detonation.train.loop.world import Alone, ElasticRanks, rank_in_words
from detonation.train.output.metrics import Record
from detonation.wire.units import shard_bytes_sent


class Unsafe(RunError):
    """The optimizer refuses to go on: non-finite gradients, refused messages or desync; raised on
    all ranks."""


class NonFiniteLoss(RunError):
    """A replica's loss is NaN or infinite; raised on all ranks, before the step that would have
    spread it."""


class Stopped(RunError):
    """A signal has asked some rank to stop; raised on all ranks at the end of the same step,
    `after` steps in all."""

    def __init__(self, number: int, after: int) -> None:
        self.signal, self.after = signal.Signals(number).name, after
        super().__init__(f"stopped by {self.signal} after step {after}")


def fit(
    session: Session, done: int, until: int, report: Callable[[Record], None], stop: Stop
) -> None:
    """Trains from `done` finished steps to `until`. Collective.

    After the last step of the recipe the optimizer synchronizes, so that all replicas hold the same
    weights. Every rank hands `report` the record of each step. Where a signal sets `stop`, all stop
    after the same step.

    Raises:
        NonFiniteLoss: On all ranks, with the weights that the step began with.
        Stopped: On all ranks, after a step in which `stop` was set on one.
        Unsafe: On all ranks, where the optimizer refuses to go on.
    """
    train = session.config.train
    rounds = UnevenRounds(session, until) if train.balance else None
    schedule, shard_sent = scheduler(session, done), shard_bytes_sent(session.model)
    for step in range(done, until):
        session.optimizer.renumber()  # before the data of the step are dealt out
        began = time.perf_counter()
        before, waited = (
            session.optimizer.stats.bytes_sent_by_level,
            session.optimizer.stats.waited_s,
        )
        lr, taking = float(session.optimizer.param_groups[0]["lr"]), _taking(session)
        with _safely():
            loss, asked, agreeing = (
                rounds.gradients(step) if rounds else _gradients(session, step, stop)
            )
            computed = time.perf_counter()
            session.optimizer.step()
            session.optimizer.zero_grad()
            schedule.step()
            if rounds and rounds.ends(step):
                loss, asked, agreeing = rounds.agreed(stop)
            if step + 1 == train.steps:
                session.optimizer.synchronize()
        seconds, step_s = time.perf_counter() - began, time.perf_counter() - computed
        step_s -= agreeing if rounds else 0.0  # rounds agree after the optimizer's step
        waited = session.optimizer.stats.waited_s - waited
        session.waits.add(seconds, waited + agreeing)
        now = session.optimizer.stats.bytes_sent_by_level
        sent = [
            session.world.over_shards(late - early) for early, late in zip(before, now, strict=True)
        ]
        held_out: dict[str, Any] = {}
        if step + 1 == train.steps or (
            train.validate_every and (step + 1) % train.validate_every == 0
        ):
            held_out = validate(session)
            if step + 1 == train.steps and train.bleu_sentences:
                held_out |= translate(session)
        levels = dict(zip((level.axis for level in session.config.levels), sent, strict=True))
        record = Record(
            step + 1,
            loss,
            lr,
            seconds,
            sum(sent),
            waited,
            step_s,
            levels,
            taking=taking,
            **held_out,
        )
        if session.device.type == "cpu" and not isinstance(session.world, Alone):
            # An accelerator computes while its host waits, and the replicas of a simulation compute
            # in turns.
            record = replace(record, agreeing_s=agreeing)
        if session.config.mesh.shard_wire:
            shard_sent, before_it = shard_bytes_sent(session.model), shard_sent
            record = replace(
                record, shard_bytes_sent=session.world.over_shards(shard_sent - before_it)
            )
        report(record)
        if asked and step + 1 < until:
            raise Stopped(asked, step + 1)


def backward(session: Session, step: int) -> None:
    """Computes the gradients of one step's examples, without any exchange."""
    for loss in _losses(session, step):
        loss.backward()  # type: ignore[no-untyped-call]


def _taking(session: Session) -> int | None:
    """The number of replicas that take the next step, where it may change."""
    taking = session.optimizer.stats.taking
    if taking is None and isinstance(session.world, ElasticRanks):
        return session.world.size // session.config.mesh.shards
    return taking


class UnevenRounds:
    """Gradients where each replica takes the steps for which it has time, and all agree on losses
    once per round.

    A replica whose loss is not finite takes no more steps until the end of the round, where all
    hear of it; so do they of a signal to stop. The loss of a step is the mean over all ranks in the
    round before, and in the first round the latest loss of this rank.
    """

    def __init__(self, session: Session, until: int) -> None:
        self._session, self._until = session, until
        self._every = session.optimizer.levels[0][1].round.every
        self._loss, self._known = math.nan, False
        self._losses: list[float] = []  # of this rank, in this round
        self._lost_at = 0  # the number of the step whose loss was not finite

    def ends(self, step: int) -> bool:
        """True for the last step of a round or of the run."""
        return (step + 1) % self._every == 0 or step + 1 == self._until

    def gradients(self, step: int) -> tuple[float, int, float]:
        """Computes the gradients of one step's examples, unless this replica sits it out; as
        `_gradients`."""
        session = self._session
        if not session.optimizer.idle and not self._lost_at:
            total = 0.0
            for loss in _losses(session, step):
                loss.backward()  # type: ignore[no-untyped-call]
                total += float(loss.detach())
            if session.world.over_shards(int(not math.isfinite(total))):
                session.optimizer.zero_grad()
                self._lost_at = step + 1
            else:
                self._losses.append(total)
                self._loss = self._loss if self._known else total
        elif math.isnan(self._loss):  # in the middle of a round that an earlier start began
            with torch.no_grad():
                self._loss = sum(float(loss) for loss in _losses(session, step))
        return self._loss, 0, 0.0

    def agreed(self, stop: Stop) -> tuple[float, int, float]:
        """The mean loss of the round over all ranks, the signal as `_agreed` returns it, and the
        seconds of waiting."""
        own = [
            sum(self._losses),
            len(self._losses),
            self._lost_at,
            stop.number,
            *self._session.waits.own,
        ]
        began = time.perf_counter()
        reports = self._session.world.all_gather(
            torch.tensor(own, dtype=torch.float64, device=self._session.device)
        )()
        agreeing = time.perf_counter() - began
        self._session.waits.meet([report[4:] for report in reports], self._session.world.sizes)
        for rank, (_, _, lost_at, *_) in enumerate(reports):
            if lost_at:
                where = rank_in_words(rank, self._session.world.sizes)
                raise NonFiniteLoss(f"the loss is not finite at step {lost_at:.0f} on {where}")
        taken = sum(count for _, count, *_ in reports)
        if taken:
            self._loss, self._known = sum(total for total, *_ in reports) / taken, True
        self._losses.clear()
        asked = self._session.world.stopped_by(
            [number for _, _, _, number, *_ in reports], stop.number
        )
        return self._loss, asked, agreeing


def _gradients(session: Session, step: int, stop: Stop) -> tuple[float, int, float]:
    """Computes the gradients of one step's examples.

    Returns the mean loss and the signal as `_agreed` does, and the seconds for which this rank
    waited for them. Gradients that leave during backward cannot be taken back, so ranks agree on
    the loss before, otherwise during it.
    """
    losses: list[torch.Tensor] = []
    for loss in _losses(session, step):
        losses.append(loss.detach())
        if len(losses) < session.config.train.accumulate:
            loss.backward()  # type: ignore[no-untyped-call]
    total = torch.stack(losses).sum().float()
    # [4] fp32: loss, signal, seconds of the last step
    report = total.new_tensor([0.0, stop.number, *session.waits.own])
    report[0] = total
    reports = session.world.all_gather(report)
    _, innermost = session.optimizer.levels[0]
    if not innermost.worth_overlapping:
        loss.backward()  # type: ignore[no-untyped-call]
    began = time.perf_counter()
    arrived = reports()
    agreeing = time.perf_counter() - began
    session.waits.meet([seconds for _, _, *seconds in arrived], session.world.sizes)
    agreed = (
        _agreed(session, step, arrived),
        session.world.stopped_by([row[1] for row in arrived], stop.number),
    )
    if innermost.worth_overlapping:
        with session.optimizer.overlap():
            loss.backward()  # type: ignore[no-untyped-call]
    return *agreed, agreeing


def _losses(session: Session, step: int) -> Iterator[torch.Tensor]:
    """Yields the loss of each micro-batch of this rank, as a share of their mean."""
    train = session.config.train
    # Dropout is a function of seed, step and rank, so that a resumed run draws what an
    # uninterrupted one does. On a CPU its generator alone: `torch.manual_seed` queues a call, with
    # a stack trace, for each absent accelerator.
    seeded = torch.default_generator if session.device.type == "cpu" else torch
    seeded.manual_seed((session.config.seed * 1_000_003 + step) * session.world_size + session.rank)
    for micro in range(train.accumulate):
        examples = batch(
            session.data.train,
            seed=session.config.seed,
            step=step * train.accumulate + micro,
            part=session.rank,
            parts=session.world_size,
            size=train.batch_size,
        )
        with autocast(session):
            output = session.model(**to(examples, session.device))
            loss = getattr(output, "loss", None)
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                is_now = (
                    f"is {loss!r:.40}"
                    if not isinstance(loss, torch.Tensor)
                    else f"has the shape {[*loss.shape]}"
                )
                said = (
                    f"model {session.config.model.name} returns a {type(output).__name__} whose"
                    f" .loss {is_now}"
                )
                raise ValueError(f"{said}, must return .loss, a tensor of one number (and .logits)")
            loss = loss / train.accumulate
        yield loss


def _agreed(session: Session, step: int, reports: list[list[float]]) -> float:
    """The mean loss over all ranks.

    Raises `NonFiniteLoss` on all of them where the loss is not finite on one.
    """
    for rank, (value, *_) in enumerate(reports):
        if not math.isfinite(value):
            raise NonFiniteLoss(
                f"the loss is {value} at step {step + 1} on"
                f" {rank_in_words(rank, session.world.sizes)}"
            )
    return sum(value for value, *_ in reports) / len(reports)


@contextmanager
def _safely() -> Iterator[None]:
    """Turns the errors with which the optimizer refuses to go on into `Unsafe`; accelerators raise
    in backward, too."""
    try:
        yield
    except (NonFiniteGradient, BadPeer, Desync) as error:  # on all ranks at once, in the same words
        raise Unsafe(str(error)) from error
