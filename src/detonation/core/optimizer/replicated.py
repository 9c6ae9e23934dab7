"""`Replicated`: a torch optimizer whose step all replicas agree on."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from detonation.core.agreement.buffers import BufferSync
from detonation.core.agreement.consensus import StopConsensus
from detonation.core.agreement.desync import options_of
from detonation.core.agreement.progress import PROGRESS
from detonation.core.flat.tensors import local
from detonation.core.link.coordinates import Coordinates, coordinates_of
from detonation.core.optim.base_step import BaseStep
from detonation.core.optim.closure import evaluated
from detonation.core.optimizer.build import Level, Settings, build_levels, compare_replicas
from detonation.core.optimizer.reconfigure import reconfigured
from detonation.core.optimizer.setup_checks import check_layout
from detonation.core.optimizer.shares_base import SharesBase
from detonation.core.optimizer.state import from_state_dict, to_state_dict, warn_of_lost_memory
from detonation.core.optimizer.stats import Stats, dense_bytes_by_level
from detonation.core.replicator.base import Replicator
from detonation.core.schemes.scheme import Scheme


class Replicated(SharesBase):
    """A torch optimizer whose step is agreed on by all replicas. Made by `replicate`.

    It shares `param_groups` and `state` with the base optimizer. `step_count` is the number of steps taken, `stats`
    holds bytes, waiting and faults.

    Raises:
        ValueError: The parameters are on several devices, or not all in the model.

    Example:
        >>> import detonation as dt
        >>> from detonation.cluster.network.loopback import LoopbackCommunicator
        >>> model = nn.Linear(8, 1)
        >>> optimizer = dt.replicate(dt.SignSGD(model.parameters()), model, LoopbackCommunicator(), dt.random(rate=1))
        >>> model(torch.ones(1, 8)).sum().backward()
        >>> optimizer.step()
        >>> isinstance(optimizer, dt.Replicated), optimizer.step_count, optimizer.stats.skipped
        (True, 1, 0)
    """

    def __init__(self, base: Optimizer, model: nn.Module, levels: Sequence[Level], settings: Settings) -> None:
        super().__init__(base)
        self.levels, self.settings = tuple(levels), settings
        self.step_count = 0
        self._base_step = BaseStep(base)
        self._model = model
        self._buffers = BufferSync(model)
        self.memory_lost = False  # until a step: a loaded state dict had no replica state, which may still come
        self._consensus: StopConsensus | None = None
        self._by_level: list[list[Replicator]] = [[] for _ in levels]
        self._replicators: list[Replicator] | None = None  # from the first step on: Accelerate swaps parameters before
        self._ends_before = any(scheme.signal == "gradients" for _, scheme in levels)
        self._ends_after = any(scheme.signal == "parameters" for _, scheme in levels)

    @property
    def stats(self) -> Stats:
        """Bytes, waiting, and contributions that were left out, so far."""
        clip = self._base_step.clip
        return Stats(self._by_level, self._consensus, self.step_count, clip.norm if clip else None)

    @property
    def dense_bytes_by_level(self) -> list[int]:
        """Bytes that this rank would send in one step of full fp32 synchronisation, for each of `levels`."""
        return dense_bytes_by_level(self._parameters(), self.levels, self.settings.intra_node)

    @property
    def coordinates(self) -> Coordinates:
        """This rank's replica and shard."""
        return coordinates_of(self.levels, (p for group in self.param_groups for p in group["params"]))

    @property
    def is_built(self) -> bool:
        """True once the levels exist: from the first step on."""
        return self._replicators is not None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step of training, on all ranks at once; returns the value of `closure`."""
        loss = evaluated(closure) if closure else None
        overlapping = any(replicator.overlapping for replicator in self._replicators or [])
        if not overlapping and not self.base.state and self._only_creates_state():
            self._base_step.unclipped()
            return loss
        if self.memory_lost:
            warn_of_lost_memory(self)
        with PROGRESS:
            replicators = self._replicators if self._replicators is not None else self.set_up()
            assert self._consensus is not None
            with self._consensus.runtime.without_autocast():
                self._agreed_step(replicators, self._consensus, overlapping)
        return loss

    def _agreed_step(self, replicators: Sequence[Replicator], consensus: StopConsensus, overlapping: bool) -> None:
        step = self.step_count
        consensus.enter_step(step, overlapping)
        for replicator in replicators:
            if replicator.acts_before:
                replicator.before(step)
        if self._ends_before:  # before the weights move
            consensus.end(step)
        consensus.step_base(self._base_step, step)
        for replicator in replicators:
            if replicator.acts_after:
                replicator.after(step)
        if self._ends_after:
            consensus.end(step)
        self.step_count += 1
        if (every := self.settings.safety.verify_every) and self.step_count % every == 0:
            self.verify()

    @contextmanager
    def overlap(self) -> Iterator[None]:
        """Context in which gradients are sent while `loss.backward()` still computes others; `step()` waits for them.

            with optimizer.overlap():
                loss.backward()
            optimizer.step()

        For the last backward before each step, on all replicas or none. The results are those of a step without it,
        bit for bit where the network itself does not add more than two messages; so are the bytes, except for one
        header per bucket. Only the innermost level of gradients overlaps, and not in the first step. A gradient that
        changes before `step()` (clipping, unscaling), a second backward, or a missing `step()` is an `OverlapError`.
        """
        # never set up here: between forward and backward FSDP2 shows the model's whole parameters, not the sharded ones
        if self._consensus is not None and self._consensus.decides_on_device:
            self._consensus.begin(self.step_count)
        with ExitStack() as stack:
            for innermost in (self._replicators or [])[:1]:
                stack.enter_context(innermost.overlap(self.step_count))
            yield

    @torch.no_grad()
    def verify(self) -> None:
        """Compares the tensors that must be equal on all replicas, bit for bit: weights, anchors, optimizer states.

        The options of the parameter groups must be equal, too. Buffers that differ, such as the running statistics of
        BatchNorm, become their mean.

        Raises `Desync` on all ranks, which names parameter and replica, or repairs the difference, according to
        `safety`. Collective; reads all of it once and sends 8 bytes per tensor.
        """
        if self._consensus is not None:
            with self.agreed_weights():
                self._consensus.verify(self.build(), self.step_count, options_of(self.param_groups))
                self._buffers(self.build())

    @torch.no_grad()
    def synchronize(self) -> None:
        """Completes open rounds and updates in flight, so that all replicas hold the same weights and buffers.

        Collective. The schedule does not change: after a round that ended early, the next one ends as planned.
        """
        self.refuse_overlap()
        if self._consensus is None:
            return
        if self._consensus.decides_on_device:
            self._consensus.begin(self.step_count)
        with self._consensus.runtime.without_autocast():
            for replicator in self.build():
                replicator.synchronize(self.step_count)
        self._buffers(self.build())
        self._consensus.conclude(self.step_count)

    @torch.no_grad()
    def reconfigure(self, scheme: Scheme, level: int = -1) -> None:
        """Continues with other settings of a level's scheme (topk, rate, every, ...) from the next step on.

        The state of the replicas stays: memories, anchors, momenta. Open rounds are synchronized first. All
        ranks call it between the same two steps; they compare settings as at the first step. Raises `ValueError` for
        another scheme and for settings that would lose state, and `LargerThanDense`; the old settings then stay.
        """
        self.set_up()
        self.synchronize()
        number = range(len(self.levels))[level]
        (axis, was), old = self.levels[number], self._by_level[number]
        self._by_level[number] = reconfigured(old, was, scheme, self._parameters(), self._base_step)
        self.levels = (*self.levels[:number], (axis, scheme), *self.levels[number + 1 :])
        self._replicators = [replicator for made in self._by_level for replicator in made]
        compare_replicas(self._replicators, self.settings, self.param_groups)

    @contextmanager
    def agreed_weights(self) -> Iterator[None]:
        """Context in which the weights are the ones that the replicas agreed on last, for evaluation and saving.

        Only a scheme with look-ahead has other weights between steps; it returns to them afterwards.
        """
        with torch.no_grad():
            for replicator in self._replicators or []:
                replicator.enter_agreed()
        try:
            yield
        finally:
            with torch.no_grad():
                for replicator in self._replicators or []:
                    replicator.leave_agreed()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._replicators is not None:
            raise ValueError("parameters can be added before the first step only: the replicas agreed on a layout")
        self.base.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The base optimizer's state, and under "replication" the state private to this replica and shard.

        State that differs between replicas has a key that names the replica, so that a tool that takes equal keys on
        different ranks for one tensor (torch.distributed.checkpoint) never mixes replicas. Under schemes that exchange
        parameters this includes the base optimizer's state. Save one file per rank. Helpers of
        torch.distributed.checkpoint leave "replication" out; see `detonation.TrainingState`.
        """
        return to_state_dict(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the result of `state_dict` on this rank, with or without the "replication" part.

        Raises `ValueError` for the state of another replica or shard.
        """
        from_state_dict(self, state_dict)

    def local_state(self) -> dict[str, Tensor]:
        """The state private to this replica and shard, to read; waits for messages in flight.

        Shapes: -> local shapes.
        """
        self.refuse_overlap()
        return {
            f"{index}.{key}": tensor
            for index, replicator in enumerate(self._replicators or [])
            for key, tensor in replicator.local_state().named().items()
        }

    @torch.no_grad()
    def resume_at(self, step: int) -> None:
        """Continues after `step` steps, the state of everything in `build` having been replaced. Collective."""
        self.step_count = step
        if self._consensus is not None and self._replicators is not None:
            self._consensus.half_step = ""
            compare_replicas(self._replicators, self.settings, self.param_groups)
            for replicator in self._replicators:
                replicator.leave_agreed()

    @torch.no_grad()
    def set_up(self) -> list[Replicator]:
        """Builds the levels, and compares the replicas. Collective.

        Otherwise the first step does this: before it, the parameters may still be swapped for sharded ones.
        """
        if self._replicators is None:
            compare_replicas(self.build(), self.settings, self.param_groups)
        return self.build()

    @torch.no_grad()
    def build(self) -> list[Replicator]:
        """Builds the levels if they do not exist yet, without a comparison of the replicas."""
        if self._replicators is None:
            parameters = self._parameters()
            check_layout(self._model, parameters, self.levels, self.settings.intra_node)
            made = build_levels(parameters, self._base_step, self.levels, self.settings)
            self._by_level, self._consensus = made
            self._replicators = [replicator for level in self._by_level for replicator in level]
        return self._replicators

    def refuse_overlap(self) -> None:
        """Raises `OverlapError` between `overlap` and the step that completes it."""
        for replicator in self._replicators or []:
            replicator.refuse_overlap()

    def _parameters(self) -> Mapping[str, Tensor]:
        """The trained parameters by name, in the model's order."""
        mine = {id(p) for group in self.param_groups for p in group["params"] if p.requires_grad}
        found = {name: p for name, p in self._model.named_parameters() if id(p) in mine}
        if len(found) < len(mine):
            raise ValueError(
                f"{len(mine) - len(found)} parameters of the optimizer are not in the model: were they made before "
                "sharding? Build the optimizer after detonation.shard"
            )
        return found

    def _only_creates_state(self) -> bool:
        """True in the call of `step()` by which torch's state-dict helpers create state: lr 0 and zero gradients.

        It is not a step of training: it must not communicate, count or decay.
        """
        groups = self.base.param_groups
        if any(group.get("lr", 1) != 0 for group in groups):
            return False
        gradients = [p.grad for group in groups for p in group["params"] if p.requires_grad]
        return all(g is not None and not local(g).count_nonzero() for g in gradients)
