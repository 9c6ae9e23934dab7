"""`replicate`: any torch optimizer, and the replicas that it shall agree with."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from detonation.core.agreement.consensus import Safety, Watch
from detonation.core.flat.layout import local
from detonation.core.integrity.fault_counts import Ledger
from detonation.core.link.communicator import Axis
from detonation.core.link.coordinates import Place, alike, place_of
from detonation.core.link.hierarchical import ways
from detonation.core.link.link import Link
from detonation.core.optim.closure import evaluated
from detonation.core.optimizer.build import Level, build, compare
from detonation.core.optimizer.reconfigure import changed
from detonation.core.replicator.base import Replicator
from detonation.core.replicator.gradient import GradientReplicator
from detonation.core.schemes.scheme import Scheme
from detonation.core.schemes.traffic import dense_bytes


def replicate(
    optimizer: Optimizer,
    model: nn.Module,
    axis: Axis | None = None,
    scheme: Scheme | None = None,
    *,
    levels: Sequence[Level] | None = None,
    lanes: DeviceMesh | None = None,
    seed: int = 0,
    kernels: bool = True,
    safety: Safety | None = None,
) -> "Replicated":
    """Makes `optimizer` train `model` together with its replicas along `axis`, as `scheme` says.

    From et al., arXiv 2502.06728. `optimizer` is any torch optimizer over parameters of `model`, sharded or not
    (FSDP2 on the mesh *inside* the node only); its own step applies what the replicas agreed on. The result is an
    optimizer that schedulers, gradient clipping and state-dict helpers take as one; it shares `param_groups` and
    `state` with `optimizer`.

    levels: instead of axis and scheme, a list of (axis, scheme) from the innermost tier of the network to the
    outermost; the output of one level is the signal of the next. Levels of gradients come before levels of parameters.
    lanes: the axis inside the node, such as mesh["shard"], where some parameters are held whole by each of its ranks
    (not sharded, or replicated DTensors) and their gradients are made equal there (by DDP, or as DTensors). Each rank
    then carries its part of what they have to say, so that it crosses `axis` once a node; sharded ones go as ever.
    seed: of the random selections; the same on all replicas. kernels: use compiled ones where they can be built (g++);
    they round differently, so all replicas must, or none.
    safety: what to do about gradients that are not finite, and about replicas that drift apart; see `Safety`.

    Collectives run at `step()` only, so all ranks must call it. At the first one the replicas compare settings,
    shapes and weights, and raise `Mismatch` where they differ; `LargerThanDense` where the scheme would send more than
    full synchronisation.
    """
    if levels is None:
        if axis is None or scheme is None:
            raise ValueError("replicate needs an axis and a scheme, or levels=[(axis, scheme), ...]")
        levels = [(axis, scheme)]
    elif axis is not None or scheme is not None:
        raise ValueError("replicate takes an axis and a scheme, or levels, not both")
    return Replicated(optimizer, model, levels, lanes, seed, kernels, safety or Safety())


class Replicated(Optimizer):
    """A torch optimizer whose step is agreed on by all replicas. Made by `replicate`."""

    def __init__(
        self,
        base: Optimizer,
        model: nn.Module,
        levels: Sequence[Level],
        lanes: DeviceMesh | None,
        seed: int,
        kernels: bool,
        safety: Safety,
    ) -> None:
        _check(base, levels)
        self.base, self.levels = base, tuple(levels)
        self.step_count = 0
        self._model, self._lanes, self.seed, self._kernels = model, lanes, seed, kernels
        self._safety = safety
        self._watch: Watch | None = None
        self._by_level: list[list[Replicator]] = [[] for _ in levels]
        self._replicators: list[Replicator] | None = None  # from the first step on: Accelerate swaps parameters before
        super().__setstate__({})  # hooks and profiling, without a second list of parameters

    # state, param_groups and defaults are the base optimizer's own, also after it replaced them in load_state_dict

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.base.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.base.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.base.defaults

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent to its replicas so far."""
        return sum(self.bytes_sent_by_level)

    @property
    def bytes_sent_by_level(self) -> list[int]:
        """The same for each of `levels`, from the innermost tier of the network to the outermost."""
        return [sum(link.bytes_sent for link in _links(level)) for level in self._by_level]

    @property
    def skipped(self) -> int:
        """Contributions of any replica left out so far, because a gradient was not finite."""
        return sum(ledger.skipped for ledger in self._ledgers())

    @property
    def skipped_by_parameter(self) -> dict[str, int]:
        """The same by the parameter whose gradient it was."""
        return dict(sum((ledger.by_parameter for ledger in self._ledgers()), Counter()))

    @property
    def refused(self) -> int:
        """Messages of any replica refused so far, because they were not what they had to be."""
        return sum(ledger.refused for ledger in self._ledgers())

    @property
    def waited_s(self) -> float:
        """Seconds that this rank's host has stood still so far because an exchange was not over."""
        return sum(link.waited_s for level in self._by_level for link in _links(level))

    @property
    def dense_bytes(self) -> int:
        """Bytes that this rank would send in one step of full fp32 synchronisation."""
        return sum(self.dense_bytes_by_level)

    @property
    def dense_bytes_by_level(self) -> list[int]:
        """The same for each of `levels`, from the innermost tier of the network to the outermost."""
        numels = [(sum(local(p).numel() for p in way.values()), n) for way, n in ways(self._parameters(), self._lanes)]
        return [sum(dense_bytes(numel, axis.size(), n) for numel, n in numels) for axis, _ in self.levels]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of training, on all ranks at once; returns what `closure` returns."""
        loss = evaluated(closure)
        if self._only_creates_state():
            self.base.step()
            return loss
        replicators = self.set_up()
        if not self._overlapping():  # otherwise the step began before backward
            self._begin()
        for replicator in replicators:
            replicator.before(self.step_count)
        self._check()
        self.base.step()
        for replicator in replicators:
            replicator.after(self.step_count)
        self._check()
        self.step_count += 1
        if self._safety.verify_every and self.step_count % self._safety.verify_every == 0:
            self.verify()
        return loss

    @contextmanager
    def overlap(self) -> Iterator[None]:
        """Within it the gradients are sent while `loss.backward()` still makes others; `step()` then waits for them.

            with optimizer.overlap():
                loss.backward()
            optimizer.step()

        For the last backward before each step (with accumulation: of the last micro-batch), on all replicas or none.
        The results are those of a step without it, bit for bit where the network itself does not add up more than two
        messages; so are the bytes, but for a header a bucket. Only the innermost level of gradients overlaps; without
        one it does nothing, and in the first step, which sets up. Gradients must not be changed between backward and
        step (clipped, unscaled), for they are on their way: that raises `OverlapError`, and so does a second backward
        within it, or no `step()` after it.
        """
        # never set up here: between forward and backward FSDP2 shows the model's whole parameters, not the sharded ones
        self._begin()
        innermost = next(iter(self._replicators or []), None)
        with innermost.overlap(self.step_count) if isinstance(innermost, GradientReplicator) else nullcontext():
            yield

    @torch.no_grad()
    def verify(self) -> None:
        """Compares what must be equal on all replicas, bit for bit: weights, anchors, states of the optimizers.

        Raises `Drift` on all ranks where something is not, with parameter and replica, or repairs it, as `safety` says.
        Collective; reads all of it once and sends 8 bytes for each tensor.
        """
        if self._watch is not None:
            with self.settled():
                self._watch.verify(self.built(), self.step_count)

    @torch.no_grad()
    def settle(self) -> None:
        """Ends rounds that are open and lands updates on their way, so that all replicas hold the same weights.

        Collective. A round that was ended early is not made up for: the next one ends when it would have.
        """
        self._refuse_overlap()
        self._begin()
        for replicator in self._replicators or []:
            replicator.settle(self.step_count)
        if self._watch is not None:
            self._watch.conclude(self.step_count)

    @torch.no_grad()
    def change(self, scheme: Scheme, level: int = -1) -> None:
        """From the next step on `level` (one of `levels`) goes by other settings of its scheme: topk, rate, every, ...

        What the replicas remember stays: memories, anchors, momenta. Rounds that are open are settled first. All ranks
        call it between the same two steps; they compare notes as at the first one. Raises `ValueError` for another
        scheme and for settings under which something would be forgotten, and `LargerThanDense`: all goes on as it was.
        """
        self.set_up()
        self.settle()
        number = range(len(self.levels))[level]
        axis, was = self.levels[number]
        old, parameters = self._by_level[number], self._parameters()
        self._by_level[number] = changed(old, was, scheme, parameters, self.base, self.seed, self._kernels)
        self.levels = (*self.levels[:number], (axis, scheme), *self.levels[number + 1 :])
        self._replicators = [replicator for made in self._by_level for replicator in made]
        compare(self._replicators, self.seed, self._kernels, self._safety)

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Within it the weights are those that the replicas agreed on last, to evaluate and to save.

        Only a scheme that looks ahead keeps others in between; the look-ahead goes on afterwards.
        """
        with torch.no_grad():
            for replicator in self._replicators or []:
                replicator.back()
        try:
            yield
        finally:
            with torch.no_grad():
                for replicator in self._replicators or []:
                    replicator.ahead()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._replicators is not None:
            raise ValueError("parameters can be added before the first step only: the replicas agreed on a layout")
        self.base.add_param_group(param_group)

    @property
    def place(self) -> Place:
        """Which replica and shard this rank is."""
        return place_of(self.levels, (p for group in self.param_groups for p in group["params"]))

    def state_dict(self) -> dict[str, Any]:
        """The base optimizer's state, and under "replication" what is private to this replica and shard.

        What differs between replicas stands under a key that names the replica, so that a tool that takes equal keys on
        different ranks for one tensor (torch.distributed.checkpoint) never mixes replicas. Under schemes that exchange
        parameters that is the base optimizer's state too. Saved to a file it is one file a rank. Helpers of
        torch.distributed.checkpoint leave "replication" out; see `detonation.TrainingState`.
        """
        saved = self.base.state_dict()
        if not alike(self.levels):
            mark = f"replica{self.place.replica}."
            saved["state"] = {
                parameter: {mark + key: value for key, value in values.items()}
                for parameter, values in saved["state"].items()
            }
        return {**saved, "replication": {self.place.name: self.replica_state()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` returned on this rank, with or without the "replication" part.

        Raises `ValueError` for the state of another replica or shard.
        """
        rest = {key: value for key, value in state_dict.items() if key != "replication"}
        mark = "" if alike(self.levels) else f"replica{self.place.replica}."
        self.base.load_state_dict({**rest, "state": {p: _own(v, mark) for p, v in rest["state"].items()}})
        if "replication" in state_dict:
            saved = state_dict["replication"]
            if self.place.name not in saved:
                odd = f"the saved state is of {', '.join(saved)}, this rank is {self.place.name}"
                raise ValueError(f"{odd}: save one file a rank, or use detonation.save_checkpoint")
            self.load_replica_state(saved[self.place.name])

    def replica_state(self) -> dict[str, Tensor]:
        """Copies of what is private to this replica and shard, by flat keys: `step`, `0.residual.<parameter>`, ..."""
        return {"step": torch.tensor(self.step_count)} | {key: t.clone() for key, t in self.private().items()}

    def private(self) -> dict[str, Tensor]:
        """What is private to this replica and shard, to read; waits for messages on their way."""
        self._refuse_overlap()
        return {
            f"{index}.{key}": tensor
            for index, replicator in enumerate(self._replicators or [])
            for key, tensor in replicator.private().named().items()
        }

    @torch.no_grad()
    def load_replica_state(self, state: Mapping[str, Tensor]) -> None:
        """Goes on from what `replica_state` returned, on all ranks at once, after the model's weights were loaded.

        Raises `ValueError` where it does not fit this model and scheme.
        """
        self._refuse_overlap()
        private = {key: tensor for key, tensor in state.items() if key != "step"}
        if private or self._replicators is not None:
            self.built()
            self._restore(private)
        self.go_on(int(state["step"]))

    @torch.no_grad()
    def go_on(self, step: int) -> None:
        """Goes on after `step` steps, the state of all that was `built` having been replaced. Collective."""
        self.step_count = step
        if self._replicators is not None:
            compare(self._replicators, self.seed, self._kernels, self._safety)
            for replicator in self._replicators:
                replicator.ahead()

    @torch.no_grad()
    def set_up(self) -> list[Replicator]:
        """Builds the levels, and compares the replicas. Collective.

        The first step does it otherwise: not earlier, because the parameters may still be swapped for sharded ones.
        """
        if self._replicators is None:
            compare(self.built(), self.seed, self._kernels, self._safety)
        return self.built()

    @torch.no_grad()
    def built(self) -> list[Replicator]:
        """The levels, made where they are not yet; the replicas are not compared."""
        if self._replicators is None:
            made = build(
                self._parameters(), self.base, self.levels, self._lanes, self.seed, self._kernels, self._safety
            )
            self._by_level, self._watch = made
            self._replicators = [replicator for level in self._by_level for replicator in level]
        return self._replicators

    def _refuse_overlap(self) -> None:
        for replicator in self._replicators or []:
            if isinstance(replicator, GradientReplicator):
                replicator.refuse_overlap()

    def _ledgers(self) -> list[Ledger]:
        if self._watch is None:
            return []
        self._watch.catch_up(self.step_count - 1)
        return self._watch.ledgers

    def _begin(self) -> None:
        if self._watch is not None:
            self._watch.begin(self.step_count)

    def _check(self) -> None:
        if self._watch is not None:
            self._watch.check(self.step_count)

    def _parameters(self) -> dict[str, Tensor]:
        """The trained parameters by name, in the model's order."""
        mine = {id(p) for group in self.param_groups for p in group["params"] if p.requires_grad}
        found: dict[str, Tensor] = {name: p for name, p in self._model.named_parameters() if id(p) in mine}
        if len(found) < len(mine):
            raise ValueError(f"{len(mine) - len(found)} parameters of the optimizer are not in the model")
        return found

    def _only_creates_state(self) -> bool:
        """torch's state-dict helpers call `step()` once on an optimizer without state, with lr 0 and zero gradients.

        That call is not a step of training: it must not communicate, count or decay.
        """
        if self._overlapping() or self.state or any(group.get("lr", 1) != 0 for group in self.param_groups):
            return False
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.requires_grad]
        return all(g is not None and not local(g).count_nonzero() for g in gradients)

    def _overlapping(self) -> bool:
        gradient_levels = [r for r in self._replicators or [] if isinstance(r, GradientReplicator)]
        return any(level.overlapping for level in gradient_levels)

    def _restore(self, saved: Mapping[str, Tensor]) -> None:
        private = self.private()
        if private.keys() != saved.keys():
            odd = sorted(private.keys() ^ saved.keys())
            raise ValueError(f"the saved state is of another model or scheme: {odd[0]} and {len(odd) - 1} more differ")
        for key, tensor in private.items():
            if tensor.shape != saved[key].shape:
                shapes = f"{tuple(saved[key].shape)}, is {tuple(tensor.shape)} here"
                raise ValueError(f"{key} was saved with shape {shapes}: another number of shards?")
        for index, replicator in enumerate(self._replicators or []):
            mine = {key.removeprefix(f"{index}."): t for key, t in saved.items() if key.startswith(f"{index}.")}
            replicator.private().load(mine)


def _links(level: Iterable[Replicator]) -> Iterable[Link]:
    return {id(replicator.channel.link): replicator.channel.link for replicator in level}.values()


def _own(values: Mapping[str, Any], mark: str) -> dict[str, Any]:
    """The state of one parameter without the `mark` of this replica."""
    if any(not key.startswith(mark) for key in values):
        raise ValueError(f"the saved optimizer state has {next(iter(values))}, not {mark}...: it is of another replica")
    return {key.removeprefix(mark): value for key, value in values.items()}


def _check(base: Optimizer, levels: Sequence[Level]) -> None:
    if isinstance(base, Replicated):
        raise ValueError("the optimizer is replicated already: pass all levels at once, levels=[(axis, scheme), ...]")
    if isinstance(base, torch.optim.LBFGS):
        raise ValueError("LBFGS evaluates the loss several times in a step, which cannot be replicated")
    check_order([scheme for _, scheme in levels])


def check_order(schemes: Sequence[Scheme]) -> None:
    """Raises `ValueError` where these cannot be levels in this order, from the innermost to the outermost."""
    signals = [scheme.signal for scheme in schemes]
    if "gradients" in signals[signals.index("parameters") :] if "parameters" in signals else False:
        raise ValueError("levels that exchange gradients come before levels that exchange parameters")
    gradients = [scheme for scheme in schemes if scheme.signal == "gradients"]
    if any(scheme.round.delay for scheme in gradients[:-1]):
        raise ValueError("only the outermost level of gradients may be delayed")
