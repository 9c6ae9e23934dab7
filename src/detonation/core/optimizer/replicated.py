"""`Replicated`: a torch optimizer on whose step all replicas agree."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

# torch's optimizers import it the same way; it does not import the compiler
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from detonation.core.agreement import BufferSync, StopConsensus, gates, options_of
from detonation.core.base_error import DetonationError
from detonation.core.integrity.observer import StepObserver
from detonation.core.link import Communicator, Coordinates, Level, coordinates_of, rules_of
from detonation.core.optim import BaseStep, OptimizerWrapper, evaluated, unheard
from detonation.core.optimizer import reconfigure as changes
from detonation.core.optimizer import state as states
from detonation.core.optimizer.build import Route, Settings, build_levels, compare_replicas
from detonation.core.optimizer.setup_checks import check_layout, warn_of_rounding
from detonation.core.optimizer.stats import Stats, dense_bytes_by_level, described
from detonation.core.optimizer.trained import TrainedParameters
from detonation.core.replicator import PaddingRows, Replicator, held_rows
from detonation.core.runtime import PROGRESS
from detonation.core.schemes import Scheme
from detonation.plugins import plugin

_OVERLAPPING = attrgetter("overlapping")


class Replicated(OptimizerWrapper):
    """A torch optimizer on whose step all replicas agree. `replicate` creates it.

    It shares `param_groups` and `state` with the base optimizer. All ranks may freeze, unfreeze or
    add parameters (`add_param_group`) between the same two steps. The next step makes the change
    and completes open rounds. An added parameter starts with an empty memory; a removed parameter
    loses its memory. `step_count`: number of steps.

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
        # None while replicas are bitwise equal
        self.closeness: gates.ClosenessGate | None = None
        if settings.safety.equal == "close":
            self.closeness = plugin("gates", "closeness")()
        self.base_step = BaseStep(base)
        self.model = model
        self._buffers = BufferSync(model)
        self._trained = TrainedParameters(model, base)
        # True if a loaded state dict had no replica state; the next step warns
        self.memory_lost = False
        self._routes: dict[tuple[int, int], Route] = {}
        self._padding: PaddingRows | None = None  # None if no padding row is held
        # True if `overlap` sent no gradients, because other parameters are trained now
        self._held_back = False
        self._consensus: StopConsensus | None = None
        self._by_level: list[list[Replicator]] = [[] for _ in levels]
        # None until the first step, because Accelerate replaces parameters before it
        self._replicators: list[Replicator] | None = None

    def __repr__(self) -> str:
        return f"{described(self._trained, self.levels, self.settings.intra_node)}\n{self.base}"

    @property
    def stats(self) -> Stats:
        """Bytes, waiting time and omitted contributions so far."""
        links = [
            [link for (n, _), (link, _) in self._routes.items() if n == i]
            for i in range(len(self.levels))
        ]
        clip = self.base_step.clip
        norm = None
        if clip is not None:
            norm = clip.norm
        return Stats(links, self._consensus, self.step_count, norm)

    @property
    def dense_bytes_by_level(self) -> list[int]:
        """Bytes per step and level that this rank would send with full fp32 synchronisation."""
        return dense_bytes_by_level(self._trained.by_name(), self.levels, self.settings.intra_node)

    @property
    def coordinates(self) -> Coordinates:
        """This rank's replica and shard."""
        return coordinates_of(self.levels, self._trained.everyone, self.settings.intra_node)

    @property
    def frozen(self) -> dict[str, Tensor]:
        """The weights of the model that no step currently moves, by name."""
        return self._trained.frozen

    @property
    def is_built(self) -> bool:
        """True once the levels exist, from the first step on."""
        return self._replicators is not None

    @property
    def idle(self) -> bool:
        """True if this replica skips the next step and needs no gradient; see `balance`."""
        return self._consensus is not None and self._consensus.idle(self.step_count)

    @_disable_dynamo  # torch.compile runs `step` without compiling it
    @unheard
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Runs one step of training, on all ranks at once.

        It has five phases: enter the step, exchange gradients, agree that no rank stops, move the
        weights, exchange parameters. Returns the value of `closure`, or None while this replica is
        `idle`.
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
        # the number of the current step, from its first message until the weights have moved
        halfway: int | None = None
        try:
            # 1. Enter the step with the current replicas and parameters.
            consensus, first, last = self._enter(overlapping)
            with consensus.runtime.exact_arithmetic():
                halfway = step = self.step_count
                signals = [scheme.signal for _, scheme in self.levels]
                # 2. Exchange gradients.
                for replicator in first:
                    replicator.before(step)
                # 3. Agree that no rank stops, before the weights move.
                if "gradients" in signals:
                    # the agreed update has replaced gradients that overflowed
                    self.base_step.overflow = None
                    consensus.end(step)
                # 4. Move the weights.
                if consensus.gates:
                    consensus.step_through_gates(self.base_step, step)
                else:
                    self.base_step()
                # 5. Exchange parameters, and agree again.
                for replicator in last:
                    replicator.after(step)
                if "parameters" in signals:
                    consensus.end(step)
                self.step_count = step + 1
                halfway = None
                if self.observer:
                    self.observer.end("step", self)
                if self.step_count % self._verify_every == 0:
                    self.verify()
        except BaseException as error:
            self._explain(error, halfway)
            raise
        finally:
            PROGRESS.where = "outside"
        return loss

    def _evaluated(self, closure: Callable[[], Any]) -> Any:
        """The value of `closure`; None, without a call, while this replica is `idle`."""
        if self.idle:
            return None
        return evaluated(closure)

    def _enter(
        self, overlapping: bool
    ) -> tuple[StopConsensus, list[Replicator | PaddingRows], list[Replicator]]:
        """Enters a step: builds the levels before the first step, and makes pending changes.

        Such changes are lost or new replicas, and added or removed parameters. If `overlap` has
        already sent gradients of this step, all changes wait for the next step.

        Args:
            overlapping: Whether `overlap` has sent gradients of this step.

        Returns: the consensus, the replicators that act before the weights move, with padding rows
        last, and the replicators that act afterwards.
        """
        if self.memory_lost:
            states.warn_of_lost_memory(self)
        if self._replicators is None:
            self.set_up()
        changed = self._trained.show_shards()  # before the weights move
        if self.observer:
            self.observer.enter(self)
        held_back = self._held_back
        self._held_back = False
        assert self._consensus is not None
        exactly = self._consensus.runtime.exact_arithmetic
        if self._renumbers and not overlapping:
            with exactly():
                self.renumber()
        if not (overlapping or held_back):  # with `overlap` the step has already been entered
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
        """Records that a step ended with `error`.

        An error of this replica alone, after its messages and before its weights moved, separates
        it from the other replicas: the next step raises `HalfStep`. A `DetonationError` is raised
        on all ranks.

        Args:
            halfway: The step, if its messages were sent and its weights have not moved yet.
        """
        if halfway is not None and not isinstance(error, DetonationError):
            assert self._consensus is not None
            self._consensus.half_step = (
                f"step {halfway} of this replica sent its messages and then ended by {error!r}"
            )
        PROGRESS.explain(error)

    @contextmanager
    def overlap(self, may_send: Callable[[], bool] | None = None) -> Iterator[None]:
        """Context manager in which `loss.backward()` sends gradients while it still computes other
        gradients. `step()` waits for them.

        Use it for the last backward before each step, on all replicas or none. Results equal the
        results of a step without `overlap`, bit for bit unless the network itself adds more than
        two messages. Bytes are equal except for one header per bucket. Only the innermost level
        that exchanges gradients overlaps, and not in the first step. It raises `OverlapError` if a
        gradient changes before `step()` (clipping, unscaling), after a second backward, or if
        `step()` is missing. Before the first message it calls `may_send`. If `may_send` returns
        False, nothing is sent before `step()`, and the step may be left out.
        """
        # build no levels now, because FSDP2 shows whole parameters
        if self._consensus is not None:
            self._consensus.enter_step(self.step_count)
        with ExitStack() as stack:
            if self._replicators and not any(axis.shared for axis in self._communicators):
                innermost = self._replicators[0]
                lost = self._renumbers and changes.lost_before(self.levels, self.step_count)
                if lost or self._trained.changed:  # other trained parameters need other buckets
                    self._held_back = innermost.acts_before
                else:
                    stack.enter_context(innermost.overlap(self.step_count, may_send))
            yield

    @_disable_dynamo
    @torch.no_grad()
    def verify(self) -> None:
        """Compares the tensors that must be equal on all replicas (weights, anchors, optimizer
        states): bit for bit, or by distance if replicas round differently.

        The options of the parameter groups must be equal, too. Buffers that differ, such as the
        running statistics of BatchNorm, become their mean. If tensors differ, it raises `Desync` on
        all ranks, naming parameter and replica, or repairs them, as `safety` says. Collective;
        reads all tensors once and sends 8 bytes per tensor.
        """
        if self._consensus is not None:
            # raises if other code replaced a trained parameter of the model
            self._trained.by_name()
            if self._padding:
                self._padding.agree()
            options = options_of(self.base)
            self._consensus.verify(self.build(), self.step_count, options, self.frozen)
            self._buffers(self.build())

    @_disable_dynamo
    @torch.no_grad()
    def synchronize(self) -> None:
        """Completes open rounds and updates in flight, so that all replicas hold the same weights
        and buffers. Collective. The schedule is unchanged: after a round that ended early, the next
        round ends as planned.
        """
        self.refuse_overlap()
        if self._consensus is not None:
            if self.observer:
                self._trained.show_shards()
                self.observer.enter(self)
            with self._consensus.runtime.exact_arithmetic():
                self.renumber()
                self._complete(self._consensus)

    @_disable_dynamo
    @torch.no_grad()
    def reconfigure(self, scheme: Scheme, level: int = -1) -> None:
        """Continues with other settings (topk, rate, every, ...) of a level's scheme from the next
        step on.

        Memories, anchors and momenta are kept. Open rounds are synchronized first. All ranks call
        it between the same two steps, and compare settings as at the first step. It raises
        `ValueError` for another scheme and for settings that would lose state, and
        `LargerThanDense`; the old settings then remain.
        """
        self.set_up()
        self.synchronize()
        self.levels, by_level = changes.with_scheme(
            self.levels, self._by_level, level, scheme, self.base_step, self._consensus
        )
        self._take(by_level)
        self._compare()

    def record(self, observer: StepObserver | None) -> None:
        """Attaches `observer`, such as a `detonation.UpdateLog`, to one level's agreed messages
        from the next step on; None detaches it.
        """
        if observer and len(self.levels) > 1:
            raise ValueError(
                f"one level of replication can be recorded, this optimizer has {len(self.levels)}"
            )
        self.base_step.look = None
        if observer:
            rules_of(self.levels[0][0]).refuse_log()
            self.base_step.look = partial(observer.moved, self)
        self.observer = observer
        for link, _ in self._routes.values():
            link.observe(observer)
        if observer and self.is_built and not self.step_count:
            observer.begin(self)

    def state_dict(self) -> dict[str, Any]:
        """The base optimizer's state, with the private state of this replica and shard under
        "replication".

        torch.distributed.checkpoint treats equal keys on different ranks as one tensor. So state
        that differs between replicas has a key that names the replica; under schemes that exchange
        parameters this includes the base optimizer's state. Save one file per rank. With a delay,
        all ranks call it at the same step, to receive messages in flight. Helpers of torch omit
        "replication"; see `detonation.TrainingState`.
        """
        return self.with_saving_hooks(lambda: states.to_state_dict(self))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the result of `state_dict` on this rank, with or without the "replication" part.

        Without it the replicas' memory is lost: the next step warns, unless `load_replica_state`
        was called. Raises `ValueError` for the state of another replica or shard.
        """
        self.with_loading_hooks(state_dict, lambda given: states.from_state_dict(self, given))

    def local_state(self, alone: bool = False) -> dict[str, Tensor]:
        """The private state of this replica and shard, read-only. Waits for messages in flight.

        All replicas call it at the same step, unless `alone`; see `Replicator.local_state`.
        """
        self.refuse_overlap()
        return states.local_state_of(self._replicators or [], alone)

    @torch.no_grad()
    def resume_at(self, step: int) -> None:
        """Continues after `step` steps. The caller has replaced the state of everything in `build`.

        Collective.
        """
        self.step_count = step
        if self.observer:
            self.observer.left()
        for axis in changes.renumbered_axes(self.levels):
            axis.resume_at(step)
        if self._consensus is not None:
            self._consensus.forget()
            self.build()
            self._compare(frozen=self.frozen)
            if self.closeness:
                self.verify()

    @torch.no_grad()
    def set_up(self) -> list[Replicator]:
        """Builds the levels and compares the replicas, as the first step would do.

        Collective.
        """
        if self._replicators is None:
            self.build()
            self._compare(frozen=self.frozen)
        return self.build()

    @torch.no_grad()
    def welcome(self, newcomer: bool = False) -> None:
        """Compares the replicas after another replica has joined.

        Collective; raises `Mismatch` if they differ.
        """
        changes.take_options(self.build(), self.param_groups, newcomer)
        self._compare()

    @torch.no_grad()
    def build(self, saved: Collection[str] = ()) -> list[Replicator]:
        """Builds the levels if they do not exist yet, without comparing replicas, and shows the
        shards. With `saved`, they are built for the parameters of a saved state: the next step
        changes to the currently trained parameters.
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
        """Context manager in which the levels may be built for other parameters; an error restores
        the old levels.
        """
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
        """Drops the levels and their state; the next step rebuilds them for the current weights."""
        if self.observer:
            self.observer.left()
        if self._consensus is not None:
            self._consensus.forget()
        self._by_level = [[] for _ in self.levels]
        self._replicators = None
        self._consensus = None

    def refuse_overlap(self) -> None:
        """Raises `OverlapError` between `overlap` and the step that completes it."""
        for replicator in self._replicators or []:
            replicator.refuse_overlap()

    def _begin_anew(self) -> None:
        """Makes observers start new records: old records do not name the padding rows that move."""
        self._replicators = [*self.build()]

    def _complete(self, consensus: StopConsensus) -> None:
        changes.complete(self.build(), consensus, self._buffers, self.step_count)
        if self.observer:
            self.observer.end("synchronize", self)

    def _change_trained(self, in_buckets: bool) -> None:
        """Adds and removes trained parameters before the step, on all ranks at once. Collective."""
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
        self._compare(joining, self.frozen)

    @torch.no_grad()
    def renumber(self) -> None:
        """Continues without lost replicas, or with a joined one. Collective."""
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
        """Sends the memory of replicas that leave in another optimizer's step. Collective."""
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
        """Continues with the replicators `by_level`, and returns them in one list."""
        self._by_level = by_level
        self._replicators = replicators = [each for level in by_level for each in level]
        for each in by_level[0]:
            each.innermost = True
        self._padding = held_rows(replicators, self.base_step, self._begin_anew)
        return replicators

    def _compare(
        self, joining: Collection[str] | None = None, frozen: Mapping[str, Tensor] | None = None
    ) -> None:
        """Compares the replicas. Collective.

        Replicas that round differently round each operation separately from now on. If this does
        not make them equal, a gate keeps them close.
        """
        compare = partial(
            compare_replicas,
            self._replicators or [],
            self.settings,
            self.base,
            joining,
            frozen,
            begun=self.step_count > 0,
            close=self.closeness is not None,
        )
        found = compare()
        if found and self.settings.safety.equal != "close":
            found = self._compare_rounding_singly(found, compare)
        if found and not self.closeness:
            self.closeness = plugin("gates", "closeness")()
            warn_of_rounding(found, self.coordinates, closely=True)
        if self.closeness and self._consensus:
            self.closeness.attach(self._consensus, self._replicators or [], self.step_count)

    def _compare_rounding_singly(self, found: str, compare: Callable[..., str]) -> str:
        """Compares again with operations rounded separately, and keeps this mode if the replicas
        are then equal. Collective.

        Returns: how they still round differently; empty if they are equal.
        """
        rounded_singly = self.base_step.rounds_singly
        self.base_step.round_singly()
        still = compare(again=True)
        self.base_step.round_singly(not still)
        if not (still or rounded_singly):
            warn_of_rounding(found, self.coordinates, closely=False)
        return still
