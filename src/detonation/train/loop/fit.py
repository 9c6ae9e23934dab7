"""The training loop of one rank. A step consists of forward, backward, an agreement of all ranks on
the loss and on signals to stop, and the update.
"""

import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from detonation.cluster.processes.failure import RunError
from detonation.cluster.processes.signals import Stop
from detonation.core.agreement import persistent_buffers
from detonation.core.integrity.fault_counts import BadPeer, Desync, NonFiniteGradient
from detonation.train.loop.evaluate import autocast, require_predictions, to, translate, validate
from detonation.train.loop.examples import draws, micro_batches_of_step
from detonation.train.loop.session import Session, scheduler
from detonation.train.loop.world import Alone, ElasticRanks, Gathered, rank_in_words
from detonation.train.output.metrics import Record
from detonation.wire.units import shard_bytes_sent, shard_units


class Unsafe(RunError):
    """The optimizer refuses to continue after nonfinite gradients, refused messages or a desync.

    All ranks raise this error.
    """


class NonFiniteLoss(RunError):
    """A loss is NaN or infinite. All ranks raise this error: before the update if it is the loss of
    a replica, and after the step if it is the validation loss.

    Args:
        repeats: True if a run that resumes from this state computes the same loss again.
    """

    def __init__(self, text: str, repeats: bool = True) -> None:
        self.repeats = repeats
        super().__init__(text)


class Stopped(RunError):
    """A rank received a signal to stop. All ranks raise this error after the same step, `after`."""

    def __init__(self, number: int, after: int) -> None:
        self.signal = signal.Signals(number).name
        self.after = after
        super().__init__(f"stopped by {self.signal} after step {after}")


class Outcome(NamedTuple):
    """Result of one step, on which all ranks agree.

    Args:
        loss: Mean loss over all ranks.
        asked: Number of the Unix signal that asks the run to stop; 0 if there is none.
        agreeing_s: Seconds that this rank waited for the other ranks' reports.
        lost: Error message if the loss of a replica was not finite in this round; "" otherwise.
    """

    loss: float
    asked: int
    agreeing_s: float
    lost: str = ""


def fit(
    session: Session, done: int, until: int, report: Callable[[Record], None], stop: Stop
) -> None:
    """Trains from step `done` up to step `until`. Collective.

    After the last step of the recipe the optimizer synchronizes, so that all replicas hold the same
    weights. Every rank calls `report` with the record of each step. When a signal sets `stop`, all
    ranks stop after the same step.

    Raises:
        NonFiniteLoss: On all ranks, if a loss is not finite. The state is the state before the
            step. With `balance` it is the state after the round, and for a validation loss the
            state after the step, whose record `report` does not get.
        Stopped: On all ranks, after a step in which `stop` was set on one rank.
        Unsafe: On all ranks, if the optimizer refuses to continue.
        ValueError: If the validation would have no prediction.
    """
    require_predictions(session)
    rounds = None
    undo = _Undo(session)
    if session.config.train.balance:
        rounds = UnevenRounds(session, until, undo)
    schedule = scheduler(session, done)
    meter = _Meter(session)
    for step in range(done, until):
        session.optimizer.renumber()  # the index of this rank selects the data of this rank
        meter.begin()
        undo.begin()
        with _safely(undo):
            if rounds:
                outcome = rounds.gradients(step)
            else:
                outcome = _gradients(session, step, stop)
            if step == done:
                _require_gradients(session, outcome)
            meter.computed()
            session.optimizer.step()
            session.optimizer.zero_grad()
            schedule.step()
            if rounds and rounds.ends(step):
                outcome = rounds.agreed(stop)
            if step + 1 == session.config.train.steps:
                session.optimizer.synchronize()
                session.optimizer.verify()
        meter.end(outcome, agreed_late=rounds is not None)
        held_out = _held_out(session, step + 1)
        # raise before the report, because a report may save this state as a checkpoint
        _require_finite(held_out, step + 1)
        report(meter.record(step + 1, outcome, held_out))
        _require_more(outcome, step + 1, until)


def _require_more(outcome: Outcome, step: int, until: int) -> None:
    """Raises an error if training ends after `step`, because of a loss or a signal."""
    if outcome.lost:
        # a balanced replica skips the rest of its round, so the next round has other examples
        raise NonFiniteLoss(outcome.lost, repeats=False)
    if outcome.asked and step < until:
        raise Stopped(outcome.asked, step)


def _require_finite(held_out: Mapping[str, Any], step: int) -> None:
    """Raises `NonFiniteLoss` if the validation after `step` found a loss that is not finite."""
    loss = held_out.get("val_loss", 0.0)
    if not math.isfinite(loss):
        raise NonFiniteLoss(f"the validation loss is {loss} after step {step}")


class _Undo:
    """Undoes the changes that forward and backward make before a loss is found to be nonfinite.
    Restores the persistent buffers of the model (such as the running statistics of BatchNorm), and
    the memory of the shard wire (compressed communication between shards).
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._has_buffers = bool(persistent_buffers(session.model))
        self._buffers: dict[str, torch.Tensor] = {}
        self._reduces = [unit.reduce for unit in shard_units(session.model) if unit.reduce]
        self._memories: list[dict[str, torch.Tensor]] = []  # one for each element of `_reduces`

    def begin(self) -> None:
        if self._has_buffers:
            self._buffers = _copies(persistent_buffers(self._session.model))
        self._memories = []
        if self._reduces and self._runs_backward_early():
            self._memories = [_copies(reduce.by_parameter()) for reduce in self._reduces]

    def restore(self) -> None:
        if self._buffers:
            buffers = persistent_buffers(self._session.model)
            for name, before in self._buffers.items():
                buffers[name].copy_(before)
        for reduce, memory in zip(self._reduces, self._memories, strict=False):
            reduce.load(memory)

    def _runs_backward_early(self) -> bool:
        """True if a backward pass of this step runs before the last loss is known."""
        return self._session.config.train.balance or len(micro_batches_of_step(self._session)) > 1


def _copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


class _Meter:
    """Measures how many seconds each step takes and how many bytes it sends."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._shard_sent = shard_bytes_sent(session.model)

    def begin(self) -> None:
        stats = self._session.optimizer.stats
        self._began = time.perf_counter()
        self._sent_before = stats.bytes_sent_by_level
        self._waited_before = stats.waited_s
        self._lr = float(self._session.optimizer.param_groups[0]["lr"])
        self._taking = _taking(self._session)

    def computed(self) -> None:
        """Records the time at which the gradients are ready and the optimizer's step begins."""
        self._computed = time.perf_counter()

    def end(self, outcome: Outcome, agreed_late: bool) -> None:
        """Records the time and the counters of bytes and waiting at the end of a step.

        Args:
            agreed_late: True if ranks exchanged their losses after the optimizer's step, as in
                `UnevenRounds`.
        """
        now = time.perf_counter()
        self._seconds = now - self._began
        self._step_s = now - self._computed
        if agreed_late:
            self._step_s -= outcome.agreeing_s
        stats = self._session.optimizer.stats
        self._waited = stats.waited_s - self._waited_before
        self._sent = stats.bytes_sent_by_level
        self._session.waits.add(self._seconds, self._waited + outcome.agreeing_s)

    def record(self, step: int, outcome: Outcome, held_out: Mapping[str, Any]) -> Record:
        """Returns the record of the finished step. The bytes in the record are sums over the shards
        of a replica. Collective.
        """
        session = self._session
        sent = [
            session.world.over_shards(after - before)
            for before, after in zip(self._sent_before, self._sent, strict=True)
        ]
        axes = [level.axis for level in session.config.levels]
        by_axis = dict(zip(axes, sent, strict=True))
        record = Record(
            step,
            outcome.loss,
            self._lr,
            self._seconds,
            sum(sent),
            self._waited,
            self._step_s,
            by_axis,
            taking=self._taking,
            **held_out,
        )
        if session.device.type == "cpu" and not isinstance(session.world, Alone):
            # Record the wait for losses on CPUs only: an accelerator computes while its host waits.
            # Do not record the waits of simulated replicas, because these share one process.
            record = replace(record, agreeing_s=outcome.agreeing_s)
        if session.config.mesh.shard_wire:
            record = replace(record, shard_bytes_sent=self._shard_bytes())
        return record

    def _shard_bytes(self) -> int:
        """Returns the bytes that a replica sent between its nodes since the last record.
        Collective.
        """
        before = self._shard_sent
        self._shard_sent = shard_bytes_sent(self._session.model)
        return self._session.world.over_shards(self._shard_sent - before)


def _held_out(session: Session, steps: int) -> dict[str, Any]:
    """Returns the metrics on held-out data after `steps` steps. Returns {} if the recipe does not
    validate after this step. Collective.
    """
    train = session.config.train
    last = steps == train.steps
    if not last and not (train.validate_every and steps % train.validate_every == 0):
        return {}
    found: dict[str, Any] = validate(session)
    if last and train.bleu_sentences:
        found |= translate(session)
    return found


def backward(session: Session, step: int) -> None:
    """Computes the gradients of one step's examples on this rank, without any exchange."""
    for loss in _losses(session, step):
        loss.backward()  # type: ignore[no-untyped-call]


def _taking(session: Session) -> int | None:
    """Returns the number of replicas that train in the next step; None if this number is
    constant.
    """
    taking = session.optimizer.stats.taking
    if taking is None and isinstance(session.world, ElasticRanks):
        return session.world.size // session.config.mesh.shards
    return taking


class UnevenRounds:
    """Computes the gradients of rounds in which slower replicas run fewer steps. All ranks exchange
    their losses and stop signals once per round.

    A replica whose loss is not finite skips the rest of the round. At the end of the round all
    ranks learn of nonfinite losses and of stop signals. A step reports the mean loss of all ranks
    in the previous round. In the first round, a step reports the latest loss of this rank.
    """

    def __init__(self, session: Session, until: int, undo: _Undo) -> None:
        self._session = session
        self._until = until
        self._undo = undo
        self._round = session.optimizer.levels[0][1].round
        self._loss = math.nan
        self._known = False
        self._losses: list[float] = []  # losses of this rank in the current round
        self._lost_at = 0  # the step whose loss was not finite; 0 if there is none

    def ends(self, step: int) -> bool:
        """True if `step` is the last step of a round or of the run."""
        return self._round.ends(step) or step + 1 == self._until

    def gradients(self, step: int) -> Outcome:
        """Computes the gradients of one step, unless this replica skips the step."""
        session = self._session
        if not session.optimizer.idle and not self._lost_at:
            total = 0.0
            for loss in _losses(session, step):
                loss.backward()  # type: ignore[no-untyped-call]
                total += float(loss.detach())
            if session.world.over_shards(int(not math.isfinite(total))):
                session.optimizer.zero_grad()
                self._undo.restore()
                self._lost_at = step + 1
            else:
                self._losses.append(total)
                if not self._known:
                    self._loss = total
        elif math.isnan(self._loss):  # no loss is known yet, because the run resumed within a round
            with torch.no_grad():
                self._loss = sum(float(loss) for loss in _losses(session, step))
            self._undo.restore()
        return Outcome(self._loss, asked=0, agreeing_s=0.0)

    def agreed(self, stop: Stop) -> Outcome:
        """Exchanges losses and stop signals with all ranks at the end of a round. Returns the
        outcome of the round. Collective.
        """
        own = [
            sum(self._losses),
            len(self._losses),
            self._lost_at,
            stop.number,
            *self._session.waits.own,
        ]
        began = time.perf_counter()
        report = torch.tensor(own, dtype=torch.float64, device=self._session.device)
        reports = self._session.world.all_gather(report)()
        agreeing = time.perf_counter() - began
        self._session.waits.meet([report[4:] for report in reports], self._session.world.sizes)
        lost = ""
        for rank, (_, _, lost_at, *_) in enumerate(reports):
            if lost_at:
                where = rank_in_words(rank, self._session.world.sizes)
                lost = f"the loss is not finite at step {lost_at:.0f} on {where}"
                lost += ", which trained nothing from that step on"
                break
        taken = sum(count for _, count, *_ in reports)
        if taken:
            self._loss = sum(total for total, *_ in reports) / taken
            self._known = True
        self._losses.clear()
        signals = [number for _, _, _, number, *_ in reports]
        asked = self._session.world.stopped_by(signals, stop.number)
        return Outcome(self._loss, asked, agreeing, lost)


def _gradients(session: Session, step: int, stop: Stop) -> Outcome:
    """Computes the gradients of one step, and exchanges the loss of the step with all ranks.
    Collective.

    Sent gradients cannot be taken back. So ranks wait for the losses of all ranks before they send
    the first message. They wait:

    - before backward, in the cases that `_Agreement.precedes_backward` names;
    - in backward, before the first bucket, under other schemes that exchange gradients;
    - after backward, under schemes that exchange parameters or nothing.

    With `balance`, ranks exchange losses once per round instead: see `UnevenRounds`.
    """
    losses: list[torch.Tensor] = []
    passes = len(micro_batches_of_step(session))
    for loss in _losses(session, step):
        losses.append(loss.detach())
        if len(losses) < passes:
            loss.backward()  # type: ignore[no-untyped-call]
    total = torch.stack(losses).sum().float()
    # shape [4] fp32: loss, number of a Unix signal or 0, busy and waiting seconds of the last step
    report = total.new_tensor([0.0, stop.number, *session.waits.own])
    report[0] = total
    agreement = _Agreement(session, step, stop, session.world.all_gather(report))
    _, innermost = session.optimizer.levels[0]
    sending: AbstractContextManager[None] = nullcontext()
    if innermost.signal == "gradients":
        if agreement.precedes_backward:
            agreement.conclude()
        sending = session.optimizer.overlap(agreement.finds_finite)
    with sending:
        loss.backward()  # type: ignore[no-untyped-call]
        return agreement.conclude()


@dataclass
class _Agreement:
    """Exchanges the losses of one step, and Unix signals that ask to stop, between all ranks.
    Determines the outcome of the step.

    Args:
        arriving: Function that waits for the reports of all ranks, and returns them. The first
            value of a report is a loss.
    """

    session: Session
    step: int
    stop: Stop
    arriving: Gathered
    waited_s: float = 0.0
    outcome: Outcome | None = None
    arrived: list[list[Any]] | None = None

    def reports(self) -> list[list[Any]]:
        """Waits until the reports of all ranks (losses and Unix signals) have arrived. Returns the
        reports in rank order.
        """
        # A cached property has a lock, which would block the threads of other simulated replicas.
        if self.arrived is None:
            began = time.perf_counter()
            self.arrived = self.arriving()
            self.waited_s = time.perf_counter() - began
        return self.arrived

    @property
    def precedes_backward(self) -> bool:
        """True if all ranks must exchange their losses before backward. There are two possible
        reasons: backward changes the memory of the shard wire (compressed communication between
        shards), or an elastic run finds lost replicas in the exchange of losses.
        """
        is_elastic = isinstance(self.session.world, ElasticRanks)
        return is_elastic or bool(self.session.config.mesh.shard_wire)

    def finds_finite(self) -> bool:
        return all(math.isfinite(loss) for loss, *_ in self.reports())

    def conclude(self) -> Outcome:
        """Returns the outcome of the step. Raises `NonFiniteLoss` if the loss of any rank is not
        finite.
        """
        if self.outcome is None:
            session = self.session
            reports = self.reports()
            session.waits.meet([seconds for _, _, *seconds in reports], session.world.sizes)
            mean = _mean_loss(session, self.step, reports)
            asked = session.world.stopped_by([row[1] for row in reports], self.stop.number)
            self.outcome = Outcome(mean, asked, self.waited_s)
        return self.outcome


def _losses(session: Session, step: int) -> Iterator[torch.Tensor]:
    """Yields the loss of each micro-batch of this rank.

    The losses are scaled so that their sum, averaged over all ranks, is the mean loss of the step.
    """
    batches = session.config.train.accumulate * session.world.parts
    _seed_dropout(session, step)
    for examples, weight in draws(session, step):
        with autocast(session):
            output = session.model(**to(examples, session.device))
            loss = _loss_of(output, session.config.model.name)
            if weight != 1:
                loss = loss * weight
            loss = loss / (batches / session.world_size)
        yield loss


def _seed_dropout(session: Session, step: int) -> None:
    """Makes dropout depend only on seed, step and rank, so that a resumed run repeats the same
    dropout.
    """
    seed = (session.config.seed * 1_000_003 + step) * session.world_size + session.rank
    if session.device.type == "cpu":
        # For absent accelerators, `torch.manual_seed` would store a stack trace at each call.
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def _loss_of(output: Any, model: str) -> torch.Tensor:
    """Returns the loss in the output of a model. Raises `ValueError` unless the loss is a tensor of
    one number.
    """
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss
    if isinstance(loss, torch.Tensor):
        wrong = f"has the shape {[*loss.shape]}"
    else:
        wrong = f"is {loss!r:.40}"
    raise ValueError(
        f"model {model} returns a {type(output).__name__} whose .loss {wrong}: "
        "return an object with .loss (a one-element tensor) and .logits"
    )


def _require_gradients(session: Session, outcome: Outcome) -> None:
    """Raises `ValueError` if backward has computed no gradient at all, although the loss is finite.

    FSDP2 looks for tensors in the output of a model. If it finds none there, it never computes the
    gradients of the shards.
    """
    groups = session.optimizer.param_groups
    graded = [each for group in groups for each in group["params"] if each.grad is not None]
    if math.isfinite(outcome.loss) and not (graded or session.optimizer.idle):
        raise ValueError(
            f"no weight of model {session.config.model.name} got a gradient: return the loss in a"
            " dataclass, a named tuple or a dict, because FSDP2 finds no tensors in other objects"
        )


def _mean_loss(session: Session, step: int, reports: list[list[float]]) -> float:
    """Returns the mean loss over all ranks. Raises `NonFiniteLoss` if the loss of a rank is not
    finite.
    """
    for rank, (value, *_) in enumerate(reports):
        if not math.isfinite(value):
            where = rank_in_words(rank, session.world.sizes)
            raise NonFiniteLoss(f"the loss is {value} at step {step + 1} on {where}")
    return sum(value for value, *_ in reports) / len(reports)


@contextmanager
def _safely(undo: _Undo) -> Iterator[None]:
    """Context manager for a step. Raises `Unsafe` if the optimizer refuses to continue. If a loss
    is not finite, restores the state before the step.

    All ranks raise the same error.
    """
    try:
        yield
    except NonFiniteLoss:
        undo.restore()
        raise
    except (NonFiniteGradient, BadPeer, Desync) as error:
        raise Unsafe(str(error)) from error
