"""`Replicated`: a torch optimizer whose step exchanges gradients or parameters between replicas."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

# `torch._compile` does not load torch's compiler; torch's own optimizers import from it, too
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from detonation.core.agreement import BufferSync, StopConsensus, gates, options_of
from detonation.core.base_error import DetonationError
from detonation.core.integrity.observer import StepObserver
from detonation.core.link import Communicator, Coordinates, Level, coordinates_of, rules_of
from detonation.core.optim import BaseStep, OptimizerWrapper, SignSGD, evaluated, unheard
from detonation.core.optimizer import reconfigure as changes
from detonation.core.optimizer import state as states
from detonation.core.optimizer.build import (
    Route,
    Settings,
    build_levels,
    compare_replicas,
    compare_rounding_singly,
)
from detonation.core.optimizer.setup_checks import check_layout, warn_of_no_grads, warn_of_rounding
from detonation.core.optimizer.stats import Stats, dense_bytes_by_level, described
from detonation.core.optimizer.trained import TrainedParameters
from detonation.core.replicator import PaddingRows, Replicator, held_rows
from detonation.core.runtime import PROGRESS
from detonation.core.schemes import Scheme
from detonation.plugins import plugin

_OVERLAPPING = attrgetter("overlapping")


class Replicated(OptimizerWrapper):
    """A torch optimizer whose step exchanges gradients or parameters between replicas.

    `replicate` creates this optimizer. It shares `param_groups` and `state` with the base
    optimizer. Parameters may be frozen, unfrozen or added (`add_param_group`), if all ranks do so
    between the same two steps. The next step completes open rounds and makes the change. An added
    parameter starts with an empty memory of unsent values; a removed parameter loses its memory.
    `step_count` is the number of steps so far.

    Raises:
        ValueError: The parameters are on several devices, or not all in the model.

    Example:
        >>> import detonation as dt
        >>> from detonation.cluster.network.loopback import LoopbackCommunicator
        >>> model = nn.Linear(8, 1)
        >>> base = dt.SignSGD(model.parameters())
        >>> optimizer = dt.replicate(base, model, LoopbackCommunicator(), dt.random_sign())
        >>> optimizer.step()
        >>> isinstance(optimizer, dt.Replicated), optimizer.step_count, optimizer.stats.skipped
        (True, 1, 0)
    """

    def __init__(
        self, base: Optimizer, model: nn.Module, levels: Sequence[Level], settings: Settings
    ) -> None:
        super().__init__(base)
        self.levels = changes.ends_for_one(levels, self.hand_over)
        self.settings = settings
        self.step_count = 0
        self._verify_every = settings.safety.verify_every or math.inf
        self._communicators = [axis for axis, _ in levels if isinstance(axis, Communicator)]
        self._renumbers = bool(changes.renumbered_axes(self.levels))
        self.observer: StepObserver | None = None
        # the gate that keeps replicas close to each other; None if replicas must be bitwise equal
        self.closeness: gates.ClosenessGate | None = None
        if settings.safety.equal == "close":
            self.closeness = plugin("gates", "closeness")()
        self.base_step = BaseStep(base)
        self._deferred: dict[int, Any] = {}  # movements that SignSGD makes in its next step
        if isinstance(base, SignSGD):
            self._deferred = base.deferred
        self.model = model
        # options of the parameter groups at creation, before schedulers and steps change options
        self.first_options = options_of(base, {})
        self.run = states.RunPoint()
        self._buffers = BufferSync(model)
        self._trained = TrainedParameters(model, base)
        # True if a loaded state dict had no replica state; the next step logs a warning
        self.memory_lost = False
        self._routes: dict[tuple[int, int], Route] = {}
        self._padding: PaddingRows | None = None  # None if no padding row is kept unchanged
        # True if `overlap` sent no gradients because replicas or trained parameters changed
        self._held_back = False
        self._consensus: StopConsensus | None = None
        self._by_level: list[list[Replicator]] = [[] for _ in levels]
        # None until the first step, because Accelerate may still replace parameters until then
        self._replicators: list[Replicator] | None = None

    def __repr__(self) -> str:
        return f"{described(self._trained, self.levels, self.settings.intra_node)}\n{self.base}"

    @property
    def stats(self) -> Stats:
        """The bytes sent, the waiting time and the omitted contributions of replicas so far."""
        links = [
            [link for (n, _), (link, _) in self._routes.items() if n == i]
            for i in range(len(self.levels))
        ]
        return Stats(links, self._consensus, self.step_count, self.base_step.norm)

    @property
    def dense_bytes_by_level(self) -> list[int]:
        """For each level: bytes that this rank would send per step of full fp32 synchronisation."""
        return dense_bytes_by_level(self._trained.by_name(), self.levels, self.settings.intra_node)

    @property
    def coordinates(self) -> Coordinates:
        """The index of this rank's replica, and the index of this rank's shard in the replica."""
        return coordinates_of(self.levels, self._trained.everyone, self.settings.intra_node)

    @property
    def unreplicated(self) -> dict[str, Tensor]:
        """The weights of the model that no step of a replicated optimizer changes, by name."""
        return self._trained.unreplicated

    @property
    def is_built(self) -> bool:
        """True from the first step on, when the levels of replication have been built."""
        return self._replicators is not None

    @property
    def idle(self) -> bool:
        """True if `balance` makes this replica skip the next step, so that it needs no gradient."""
        return self._consensus is not None and self._consensus.idle(self.step_count)

    @_disable_dynamo  # torch.compile runs `step` without compiling it
    @unheard
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Runs one step of training. All ranks must call this method.

        The step has five phases: it makes pending changes, exchanges gradients, checks that no rank
        must stop, moves the weights, and exchanges parameters. Returns the value of `closure`, or
        None while this replica is `idle`.
        """
        loss = None
        if closure:
            loss = self._evaluated(closure)
        overlapping = any(map(_OVERLAPPING, self._replicators or []))
        without_state = not overlapping and not self.base.state
        if (
            without_state
            and not self.base.param_groups[0].get("lr")
            and states.only_creates_state()
        ):
            self.base_step(clips=False)
            return loss
        self.base_step.overflow = None
        self.base_step.lost = False
        if "grad_scale" in vars(self):
            self.base_step.overflow = self.unscale()
            self.base_step.lost = self.base_step.overflows
        PROGRESS.steps += 1
        PROGRESS.where = "inside"
        # index of the step, from its exchange of gradients until the step is complete
        halfway: int | None = None
        try:
            # 1. Begin the step; lost or new replicas and added or removed parameters take effect.
            consensus, first, last = self._enter(overlapping)
            with consensus.runtime.exact_arithmetic():
                halfway = step = self.step_count
                signals = [scheme.signal for _, scheme in self.levels]
                # 2. Exchange gradients.
                for replicator in first:
                    replicator.before(step)
                # 3. Check that no rank has a reason to stop, before the weights move.
                if "gradients" in signals:
                    # do not skip this step: the agreed update replaced gradients that overflowed
                    self.base_step.overflow = None
                    consensus.end(step)
                # 4. Move the weights.
                if consensus.gates:
                    consensus.step_through_gates(self.base_step, step)
                else:
                    self.base_step()
                # 5. Exchange parameters, and check again that no rank has a reason to stop.
                for replicator in last:
                    replicator.after(step)
                if "parameters" in signals:
                    consensus.end(step)
                self.step_count = step + 1
                self.run.completed = 0
                halfway = None
                if self.observer:
                    self.observer.end("step", self)
                if self.step_count % self._verify_every == 0:
                    self.verify()
        except BaseException as error:
            self._explain(error, halfway)
            raise
        finally:
            self._deferred.clear()  # so that SignSGD never applies a refused or skipped step
            PROGRESS.where = "outside"
        return loss

    def _evaluated(self, closure: Callable[[], Any]) -> Any:
        """Calls `closure` and returns its value. While this replica is `idle`, returns None."""
        if self.idle:
            return None
        return evaluated(closure)

    def _enter(
        self, overlapping: bool
    ) -> tuple[StopConsensus, list[Replicator | PaddingRows], list[Replicator]]:
        """Begins a step. Builds the levels before the first step, and adopts changes of replicas
        and parameters, unless `overlap` has sent gradients (`overlapping`). Returns the consensus,
        the replicators that act before the weights move (then the padding rows), and all others.
        """
        if self.memory_lost:
            states.warn_of_lost_memory(self)
        if self._replicators is None:
            self.set_up()
            warn_of_no_grads(self.base, self.coordinates)
        changed = self._trained.show_shards()  # a step must not write to gathered copies
        if self.observer:
            self.observer.enter(self)
        held_back = self._held_back
        self._held_back = False
        assert self._consensus is not None
        if self.step_count % self._verify_every == 0:
            self._consensus.compare_use(self.step_count)
        exactly = self._consensus.runtime.exact_arithmetic
        if self._renumbers and not overlapping:
            with exactly():
                self.renumber()
        if not (overlapping or held_back):  # otherwise `overlap` has already entered the step
            self._consensus.enter_step(self.step_count)
        if changed and not overlapping:
            with exactly():
                self._change_trained(in_buckets=held_back)
        replicators = self._replicators or []
        first: list[Replicator | PaddingRows] = [each for each in replicators if each.acts_before]
        if self._padding:
            self._padding.look()
            first.append(self._padding)
        last = [replicator for replicator in replicators if not replicator.acts_before]
        return self._consensus, first, last

    def _explain(self, error: BaseException, halfway: int | None) -> None:
        """Records that a step ended with `error`, or raises an error that names the cause.

        If only this replica fails during a step, the other replicas complete the step. The next
        step of this replica then raises `HalfStep`. A `DetonationError` needs no `HalfStep`,
        because all ranks raise it. `halfway` is the step that this replica began but did not
        complete, or None.
        """
        if halfway is not None and not isinstance(error, DetonationError):
            assert self._consensus is not None
            self._consensus.half_step = (
                f"step {halfway} of this replica sent its messages and then failed with {error!r}"
            )
        PROGRESS.explain(error)
        for axis in self._communicators:
            axis.explain(error)

    @contextmanager
    def overlap(self, may_send: Callable[[], bool] | None = None) -> Iterator[None]:
        """Context manager in which `loss.backward()` sends gradients while it still computes other
        gradients. `step()` waits for the sent messages.

        Use it for the last backward before each step, on all replicas or on none. The weights equal
        the weights of a step without `overlap`, bit for bit unless an all-reduce adds more than two
        messages. The number of bytes is equal, apart from rounding and padding of each bucket. Only
        the innermost level sends gradients early, and not in the first step. `OverlapError` is
        raised if a gradient changes before `step()` (by clipping or unscaling), after a second
        backward, or if `step()` is missing. `may_send` is called before the first message. If it
        returns False, no gradient is sent before `step()`, and the caller may omit the step.
        """
        # levels are not built here, because FSDP2 may show whole parameters instead of shards
        if self._consensus is not None:
            self._consensus.enter_step(self.step_count)
        with ExitStack() as stack:
            if self._replicators and not any(axis.shared for axis in self._communicators):
                innermost = self._replicators[0]
                lost = self._renumbers and changes.lost_before(self.levels, self.step_count)
                if lost or self._trained.changed:  # new replicas or parameters need new buckets
                    self._held_back = innermost.acts_before
                else:
                    stack.enter_context(innermost.overlap(self.step_count, may_send))
            yield

    @_disable_dynamo
    @torch.no_grad()
    def verify(self) -> None:
        """Compares the tensors that must be equal on all replicas (weights, anchors, optimizer
        states): bit for bit, or by distance if replicas round differently.

        The options of the parameter groups, such as lr, must be equal, too. Buffers that differ,
        such as the running statistics of BatchNorm, are set to their mean. If tensors differ,
        `safety` decides: they are repaired, or all ranks raise a `Desync` that names parameter and
        replica. Collective; reads all tensors once and sends 8 bytes per tensor.
        """
        if self._consensus is not None:
            # raises an error if other code replaced a trained parameter of the model
            parameters = self._trained.by_name()
            if self._padding:
                self._padding.agree()
            options = options_of(self.base, parameters)
            self._consensus.verify(self.build(), self.step_count, options, self._trained.frozen)
            self._buffers(self.build())

    @_disable_dynamo
    @torch.no_grad()
    def synchronize(self) -> None:
        """Completes open rounds and updates in flight, so that all replicas hold the same weights
        and buffers. Collective. The schedule of exchanges is unchanged: after a round that this
        call ended early, the next round ends at its usual step.
        """
        self.refuse_overlap()
        if self._consensus is not None:
            if self.observer:
                self._trained.show_shards()
                self.observer.enter(self)
            # no replica joins here: it would miss weights that the caller writes before the step
            exactly = self._consensus.runtime.exact_arithmetic
            with exactly(), changes.without_joining(self.levels):
                self.renumber()
                self._complete(self._consensus)

    @_disable_dynamo
    @torch.no_grad()
    def reconfigure(self, scheme: Scheme, level: int = -1) -> None:
        """Changes settings (topk, rate, every, ...) of the scheme of one level, from the next step
        on.

        Unsent values (memories), anchors and momenta are kept. Open rounds are completed first. All
        ranks call `reconfigure` between the same two steps; the replicas then compare their
        settings as at the first step. Another scheme, settings that would lose state, and rounds
        that do not fit those of other levels raise `ValueError`; settings that send more than full
        synchronisation raise `LargerThanDense`. The old settings then remain.
        """
        self.set_up()
        changes.require_order(self.levels, level, scheme)
        self.synchronize()
        self.levels, by_level = changes.with_scheme(
            self.levels, self._by_level, level, scheme, self.base_step, self._consensus
        )
        self._take(by_level)
        self._compare()

    def record(self, observer: StepObserver | None) -> None:
        """Passes all received messages to `observer`, such as a `detonation.UpdateLog`, from the
        next step on; None removes the observer. Needs an optimizer with one level of replication.
        """
        if observer and len(self.levels) > 1:
            raise ValueError(
                "only one level of replication can be recorded, but there are"
                f" {len(self.levels)}: pass one level to replicate"
            )
        self.base_step.look = None
        if observer:
            rules_of(self.levels[0][0]).refuse_log()
            self.base_step.look = partial(observer.moved, self)
        self.observer = observer
        for link, _ in self._routes.values():
            link.observe(observer)
        if observer and self.is_built and self.step_count in (0, self.run.joined):
            observer.begin(self)

    def state_dict(self) -> dict[str, Any]:
        """Returns the base optimizer's state, and the private state of this replica and shard under
        "replication".

        torch.distributed.checkpoint treats equal keys on different ranks as one tensor. So the key
        names the replica if the value differs between replicas. Under schemes that exchange
        parameters, the base optimizer's state differs, too. Save one file per rank. With a delay,
        all ranks must call `state_dict` at the same step, to receive messages in flight. The
        state-dict helpers of torch omit "replication"; see `detonation.TrainingState`.
        """
        return self.with_saving_hooks(lambda: states.to_state_dict(self))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the result of `state_dict` on this rank, with or without the "replication" part.

        Without this part, the replicas' unsent values (memory) are lost, and the next step logs a
        warning, unless `load_replica_state` was called. Raises `ValueError` for the state of
        another replica or shard.
        """
        self.with_loading_hooks(state_dict, lambda given: states.from_state_dict(self, given))

    def local_state(self) -> dict[str, Tensor]:
        """The private state of this replica and shard, read-only. Waits for messages in flight. So
        with a delay, all replicas must call this method at the same step."""
        self.refuse_overlap()
        return states.local_state_of(self._replicators or [])

    @torch.no_grad()
    def resume_at(self, step: int) -> None:
        """Continues at step number `step`, after all other state was loaded. Collective."""
        self.step_count = step
        if self.observer:
            self.observer.left()
        for axis in changes.renumbered_axes(self.levels):
            axis.resume_at(step)
        if self._consensus is not None:
            self._consensus.forget()
            self.build()
            self._compare(others=True)
            if self.closeness:
                self.verify()

    @torch.no_grad()
    def set_up(self) -> list[Replicator]:
        """Builds the levels and compares the replicas, as the first step does. Collective."""
        if self._replicators is None:
            self.build()
            self._compare(others=True)
        return self.build()

    @torch.no_grad()
    def welcome(self, newcomer: bool = False) -> None:
        """Gives a joining replica the options of the parameter groups, and compares all replicas.
        Collective; raises `Mismatch` if replicas differ.
        """
        changes.take_options(self.build(), self.param_groups, newcomer)
        self._compare()

    @torch.no_grad()
    def build(self, saved: Collection[str] = ()) -> list[Replicator]:
        """Builds the levels if they do not exist yet, without comparing replicas. Makes the model
        hold its FSDP2 shards instead of gathered copies.

        With `saved`, builds the levels for the parameters of a saved state, which have the names
        `saved`. The next step then rebuilds the levels for the parameters that are trained now.
        """
        self._trained.show_shards()
        if saved:
            parameters = self._trained.named(saved)
        else:
            parameters = None
        if self._replicators is not None and (
            not parameters or parameters.keys() == self._trained.laid_out.keys()
        ):
            return self._replicators
        return self._lay_out(parameters or self._trained.by_name())

    @contextmanager
    def levels_back_on_error(self) -> Iterator[None]:
        """Context manager whose body may build other levels; an error restores the old levels."""
        by_level = self._by_level
        consensus = self._consensus
        replicators = self._replicators
        parameters = self._trained.laid_out
        clip = self.base_step.clip
        padding = self._padding
        try:
            yield
        except BaseException:
            if self._replicators is not replicators:
                self._by_level = by_level
                self._consensus = consensus
                self._replicators = replicators
                self._padding = padding
                self._trained.lay_out(parameters)
                self.base_step.clip = clip
            raise

    def forget_levels(self) -> None:
        """Drops the levels and their state; the next step builds new levels for current weights."""
        if self.observer:
            self.observer.left()
        if self._consensus is not None:
            self._consensus.forget()
        self._by_level = [[] for _ in self.levels]
        self._replicators = None
        self._consensus = None

    def refuse_overlap(self) -> None:
        """Raises `OverlapError` if no step has used the gradients that `overlap` sent."""
        for replicator in self._replicators or []:
            replicator.refuse_overlap()

    def drop_overlap(self) -> None:
        """Drops sent gradients that no step used. All ranks call this before loading a state."""
        self._held_back = False
        for replicator in self._replicators or []:
            replicator.drop_overlap()

    def _begin_anew(self) -> None:
        """Makes observers start a new record, which also lists the padding rows that now move."""
        self._replicators = [*self.build()]

    def _complete(self, consensus: StopConsensus) -> None:
        self.build()  # weights change, so gathered copies of them must not stay
        changes.complete(self._by_level, consensus, self._buffers, self.step_count)
        self.run.complete()
        if self.observer:
            self.observer.end(changes.completion(self.levels, self.step_count), self)

    def _change_trained(self, in_buckets: bool) -> None:
        """Adds and removes trained parameters before a step, the same on all ranks. Collective."""
        before = self._trained.laid_out
        now = self._trained.by_name()
        old = self._by_level
        if self._replicators and self._consensus:
            changes.agree_on_parameters(
                before, now, self._replicators, self._consensus, self.step_count, in_buckets
            )
        self._lay_out(now)
        joining = [name for name, p in now.items() if before.get(name) is not p]
        changes.hand_over_by_name(old, self._by_level, joining)
        self._compare(joining, others=True)

    @torch.no_grad()
    def renumber(self) -> None:
        """Removes lost and leaving replicas, and adds a joining replica. Collective."""
        if not changes.lost_before(self.levels, self.step_count):
            return
        if self._consensus and changes.needs_all(self.levels, self.step_count):
            self._complete(self._consensus)
        old = self._by_level
        grown = changes.renumber(
            self.levels, self.build() if any(old) else [], self._routes.values(), self.step_count
        )
        made = self._lay_out(self._trained.laid_out)
        changes.hand_over_by_name(old, self._by_level)
        if grown and made:
            self.welcome()
        self.verify()

    @torch.no_grad()
    def hand_over(self) -> None:
        """Sends the unsent values (memories) of leaving replicas to a remaining replica. Called if
        these replicas leave while another optimizer makes a step. Collective.
        """
        if (consensus := self._consensus) is None:
            return
        with consensus.runtime.exact_arithmetic():
            self.renumber()
            if changes.opens_rounds(self.levels):
                self._complete(consensus)
            for axis in changes.renumbered_axes(self.levels):
                changes.hand_over_memory(self.build(), axis.handing_over())

    def _lay_out(self, parameters: Mapping[str, Tensor]) -> list[Replicator]:
        """Rebuilds the levels for `parameters`, with the previous links and fault counts."""
        check_layout(self._trained.model, parameters, self.levels, self.settings.intra_node)
        by_level, self._consensus = build_levels(
            parameters,
            self.model,
            self.base_step,
            self.levels,
            self.settings,
            self._routes,
        )
        replicators = self._take(by_level)
        self._trained.lay_out(parameters)
        for axis in changes.renumbered_axes(self.levels):
            axis.trains(parameters.values())
        self.record(self.observer)
        if self.closeness:
            self.closeness.attach(self._consensus, replicators, self.step_count)
        return replicators

    def _take(self, by_level: list[list[Replicator]]) -> list[Replicator]:
        self._by_level = by_level
        self._replicators = replicators = [each for level in by_level for each in level]
        for each in by_level[0]:
            each.innermost = True
        self._padding = held_rows(replicators, self.base_step, self._begin_anew)
        return replicators

    def _compare(self, joining: Collection[str] | None = None, others: bool = False) -> None:
        """Compares the settings and weights of all replicas. With `others`, also compares weights
        that no replicated optimizer trains. Collective.

        If replicas round differently, each operation of a step is rounded separately from now on.
        If replicas still round differently, a gate keeps their weights close to each other.
        """
        compare = partial(
            compare_replicas,
            self._replicators or [],
            self.settings,
            self.base,
            joining,
            self._trained.unreplicated if others else None,
            begun=self.step_count > 0,
            close=self.closeness is not None,
        )
        found = compare()
        if found and self.settings.safety.equal != "close":
            found = compare_rounding_singly(self.base_step, found, compare, self.coordinates)
        if found and not self.closeness:
            self.closeness = plugin("gates", "closeness")()
            warn_of_rounding(found, self.coordinates, closely=True)
        if self.closeness and self._consensus:
            self.closeness.attach(self._consensus, self._replicators or [], self.step_count)
        if joining is None:
            self.run.agree(self._replicators or [])
