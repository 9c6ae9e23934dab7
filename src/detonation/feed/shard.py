"""Follows one shard of training: an optimizer in one process, without other replicas, repeats the
steps that a stream brings.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from detonation.checkpoint.files.reader import Box, ShardReader
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.core.agreement import Safety, persistent_buffers
from detonation.core.flat.padding_rows import mark_used
from detonation.core.flat.tensors import local
from detonation.core.link import Axis, ElasticCommunicator
from detonation.core.optim import SignSGD
from detonation.core.optimizer import Replicated, local_parameters, replicate
from detonation.core.schemes import Scheme, scheme
from detonation.feed import shared_state
from detonation.feed.pace import NO_LIMIT, Point
from detonation.feed.stream import Joined, Stepped
from detonation.log.records import MESSAGE, SYNCHRONIZE, WRITTEN, LogRecord, Player
from detonation.log.repeat import repeat_step, show_agreed
from detonation.log.writer import identity, round_like, use_padding_of

Moment = tuple[str, int, int]
"""A moment of training: the name of this start of training, the step, and the number of
`synchronize` calls since that step.
"""


class ReceivedSteps(Player):
    """Plays back the records that a stream has received."""

    def __init__(self) -> None:
        super().__init__()
        self.records: deque[LogRecord] = deque()

    def read(self) -> LogRecord | None:
        if self.records:
            return self.records.popleft()
        return None


class ShardFollower:
    """Repeats the steps of one shard of training.

    moment: how far this shard has followed training; None before the first copy of the state.
    admits: True if training now waits for a replica that joins, and has sent everything that this
    replica needs.

    Args:
        model: The model, whole or sharded like the model of training.
        sharded: True if `model` is sharded.
        make: Creates the base optimizer. None creates one of torch or of this library, by its name.
        joins: True if this process will join as a replica. It may then round differently, provided
            that replicas may be close instead of equal.
    """

    def __init__(
        self,
        model: nn.Module,
        sharded: bool,
        make: shared_state.MakeOptimizer | None,
        joins: bool = False,
    ) -> None:
        self._model = model
        self._sharded = sharded
        self._make = make
        self._joins = joins
        self.moment: Moment | None = None
        self.admits = False
        self.about: dict[str, Any] = {}
        self.optimizer: Replicated | None = None
        self.module = model
        self.saved: ShardReader | None = None
        self._player = ReceivedSteps()
        self._norm: Tensor | None = None
        self._buffers: list[Tensor] = []

    @property
    def complete(self) -> bool:
        """True if no round can be open and no message of an earlier step is missing."""
        opens = self.optimizer is not None and self.optimizer.levels[0][1].round.stays_open
        return self.moment is not None and (not opens or self.moment[2] > 0)

    @property
    def in_flight(self) -> bool:
        """True if training has sent a message that has not arrived here yet."""
        return self.optimizer is not None and any(
            replicator.in_flight for replicator in self.optimizer.build()
        )

    def apply(self, events: Sequence[Joined | Stepped]) -> None:
        """Loads each copy of the state in `events`, and repeats each step in `events`.

        Raises `ValueError` if a state belongs to another model, and `DamagedLog` if a step is
        missing.
        """
        for event in events:
            if isinstance(event, Joined):
                self._load(event)
            elif self.optimizer is not None:
                self._repeat(event.records, self.optimizer)
            self.moment = moment_after(event, self.moment)
            self.admits = _admits(event)
        if events and self.optimizer is not None:
            show_agreed(self.optimizer)
            # `.grad` holds the last update: a joining replica must not add its gradients to it
            self.optimizer.zero_grad()

    @torch.no_grad()
    def _load(self, joined: Joined) -> None:
        about = self.about = joined.about
        saved = self.saved = ShardReader(joined.path)
        shared_state.load_weights_of(saved, self._model)
        trained = set(about["trained"])
        if self._sharded:
            self.module = self._model
        else:
            self.module = shared_state.shard_views(saved, self._model, trained)
        parameters = local_parameters(self.module)
        base = shared_state.base_optimizer(self._make, about, saved.groups, parameters)
        chosen = scheme_of_training(about)
        in_parts = about["shards"] > 1 and not self._sharded
        axis = LoopbackCommunicator(about["replicas"])
        clip = None
        if not in_parts:
            clip = about["clip"]
        safety = Safety(about["non_finite"], verify_every=0)
        options = {"seed": about["seed"], "kernels": about["kernels"]}
        self.optimizer = replicate(
            base, self.module, axis, chosen, clip=clip, safety=safety, **options
        )
        shared_state.load_shared_state(saved, self.optimizer, parameters, about["step"])
        use_padding_of(about, self.optimizer)
        if in_parts:
            shared_state.require_elementwise(base, parameters)
            if about["clip"] and not (isinstance(base, SignSGD) and base.moves_by_signs_alone):
                base.register_step_pre_hook(self._clip)
        self._require_same()
        self._player = ReceivedSteps()
        self.optimizer.record(self._player)
        self._buffers = [local(buffer) for buffer in persistent_buffers(self._model).values()]

    def _require_same(self) -> None:
        """Raises `ValueError` if this process would not repeat the steps of replica 0 bit for
        bit.
        """
        optimizer = self.optimizer
        about = self.about
        assert optimizer is not None
        for key, here in identity(optimizer).items():
            if key not in ("shards", "clip", "arguments", "optimizer") and here != about.get(key):
                raise ValueError(
                    f"{key} is {about.get(key)} in training, but {here} in this process"
                )
        may_differ = self._joins and about.get("equal", "bits") != "bits"
        if round_like(about, optimizer) != about["selftest"] and not may_differ:
            there = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
            raise ValueError(
                f"this process would round differently from training ({there}): it needs the"
                " same version of torch, the same kind of processor or accelerator, and g++ if"
                " training has it; or publish with detonation.Feed.of_weights, which any machine"
                " can follow"
            )

    def _repeat(self, records: Sequence[LogRecord], optimizer: Replicated) -> None:
        extras: dict[int, Any] = {}
        for record in records:
            if record.kind == MESSAGE and record.place >= shared_state.BUFFERS:
                extras[record.place] = record.content
            else:
                self._player.records.append(record)
        norm = extras.pop(shared_state.NORM, None)
        self._norm = None
        if norm is not None:
            self._norm = torch.frombuffer(bytearray(norm), dtype=torch.float32)[0]
        while (end := self._player.next_end()) is not None:
            repeat_step(end, optimizer)
        for place, content in extras.items():
            buffer = self._buffers[place - shared_state.BUFFERS]
            sent = torch.frombuffer(bytearray(content), dtype=buffer.dtype)
            buffer.copy_(sent.view(buffer.shape))

    def _clip(self, base: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        """Clips the gradients by their norm over all shards. Training has sent this norm."""
        if self._norm is None:
            return
        gradients = [
            p.grad for group in base.param_groups for p in group["params"] if p.grad is not None
        ]
        if gradients:
            norm = self._norm.to(gradients[0].device)
            torch._foreach_mul_(gradients, (self.about["clip"] / (norm + 1e-6)).clamp(max=1.0))


def moment_after(event: Joined | Stepped, before: Moment | None) -> Moment:
    """Returns the moment of training (see `Moment`) after `event`. `before` is the moment before
    `event`.
    """
    if isinstance(event, Joined):
        return event.about["run"], event.about["step"], event.about["synchronized"]
    # the first event of a stream is a copy of the state, so `before` is not None here
    assert before is not None
    run, _, synchronized = before
    end = event.records[-1]
    # a `Moment` does not count writes of weights, because shards may differ in the count of writes
    if end.kind == WRITTEN:
        return before
    if end.kind == SYNCHRONIZE:
        return run, end.step, synchronized + 1
    return run, end.step, 0


def _admits(event: Joined | Stepped) -> bool:
    if isinstance(event, Joined):
        return bool(event.about.get("joins"))
    end = event.records[-1]
    return end.kind == SYNCHRONIZE and "joins" in end.table()


def scheme_of_training(about: dict[str, Any]) -> Scheme:
    """Creates the scheme that training uses. Raises `ValueError` if this process has not registered
    this scheme.
    """
    name = about["scheme"]
    if ":" in name:
        raise ValueError(
            f"training uses the scheme {name}, which has no registered name: register it under a"
            " name in training and in this process"
        )
    return scheme(name, about["arguments"])


def reachable_moments(
    moment: Moment | None, inbox: Iterable[Joined | Stepped], limit: Point = NO_LIMIT
) -> list[Moment | None]:
    """Returns the moments of training that a shard can reach: its current moment, and the moment
    after each event in `inbox` up to `limit`.
    """
    found = [moment]
    for event in inbox:
        moment = moment_after(event, moment)
        if moment[1:] > limit and isinstance(event, Stepped):
            break
        found.append(moment)
    return found


@torch.no_grad()
def joined_optimizer(
    model: nn.Module,
    shards: Sequence[ShardFollower],
    make: shared_state.MakeOptimizer | None,
    axis: Axis,
    safety: Safety,
) -> Replicated:
    """Creates an optimizer over the parameters of `model` along `axis`. The optimizer continues at
    the step that `shards` have reached, and its memory of unsent values is empty.

    Collective over `axis`; see `Follower.join`.
    """
    first = shards[0]
    about = first.about
    saved = first.saved
    before = first.optimizer
    assert saved is not None and before is not None
    if len(shards) > 1 and axis.size() > 1:
        raise ValueError(
            f"training has {len(shards)} shards, but this model is whole: shard this model with"
            " detonation.shard first"
        )
    if axis.size() > 1 and any(shard.in_flight for shard in shards):
        raise ValueError(
            f"a message is in flight after step {before.step_count}, so this process cannot join"
            f" {axis.size()} replicas: join after a later step, or call synchronize() in training"
        )
    parameters = local_parameters(model)
    optimized = {name for group in saved.groups for name in group["parameters"]}
    for name, parameter in parameters.items():
        # do not change parameters that the optimizer of training does not have
        if name in optimized:
            parameter.requires_grad_(name in about["trained"])
        mark_used(parameter, name in about.get("padding", ()))
    base = shared_state.base_optimizer(make, about, saved.groups, parameters)
    for mine, group in zip(base.param_groups, before.param_groups, strict=True):
        mine |= {key: value for key, value in group.items() if key != "params"}
    for name, parameter in parameters.items():
        _join_state(base, shards, name, parameter)
    chosen = scheme_of_training(about)
    alike = {key: about[key] for key in ("clip", "balance", "seed", "kernels")}
    optimizer = replicate(base, model, axis, chosen, **alike, safety=safety)
    optimizer.run.load(before.run.known, before.run.completed)
    _hand_over(shards, optimizer, parameters)
    if isinstance(axis, ElasticCommunicator):
        optimizer.step_count = before.step_count
        optimizer.welcome(newcomer=True)
        optimizer.run.joined = optimizer.step_count
        return optimizer
    optimizer.resume_at(before.step_count)
    return optimizer


def _join_state(
    base: torch.optim.Optimizer, shards: Sequence[ShardFollower], name: str, parameter: Tensor
) -> None:
    """Copies the base optimizer's state of one parameter from all shards into `base`."""
    states = []
    for shard in shards:
        view = local_parameters(shard.module)[name]
        if shard.optimizer:
            states.append(shard.optimizer.base.state.get(view, {}))
    boxes = _boxes(shards, name)
    for key in states[0]:
        parts = [state[key] for state in states]
        base.state[parameter][key] = _whole(parts, boxes, parameter)


def _hand_over(
    shards: Sequence[ShardFollower], optimizer: Replicated, parameters: dict[str, Tensor]
) -> None:
    """Loads the state that all replicas share into the replicators of `optimizer`."""
    before = [shard.optimizer.build() for shard in shards if shard.optimizer is not None]
    for mine, *theirs in zip(optimizer.build(), *before, strict=True):
        if any(each.in_flight for each in theirs):
            # the update in flight is unknown here, so take the state before this update
            agreed = [each.replicated() for each in theirs]
            mine.repair(_agreed_state(shards, agreed, mine.replicated()))
        else:
            found = [each.local_state().named() for each in theirs]
            state = _shared_state(shards, found, mine.local_state().named(), parameters)
            mine.local_state().load(state)


def _agreed_state(
    shards: Sequence[ShardFollower], found: Sequence[dict[str, Tensor]], mine: dict[str, Tensor]
) -> dict[str, Tensor]:
    state = {}
    for key, tensor in mine.items():
        boxes = _boxes(shards, key.partition(" (")[0])
        state[key] = _whole([each[key] for each in found], boxes, tensor)
    return state


def _shared_state(
    shards: Sequence[ShardFollower],
    found: Sequence[dict[str, Tensor]],
    mine: dict[str, Tensor],
    parameters: dict[str, Tensor],
) -> dict[str, Tensor]:
    state = {}
    for key, tensor in mine.items():
        name = key.partition(".")[2]
        if key.startswith(shared_state.PRIVATE) or key not in found[0]:
            state[key] = tensor.clone()  # private state keeps its initial value
        elif name in parameters:
            state[key] = _whole([each[key] for each in found], _boxes(shards, name), tensor)
        else:
            state[key] = found[0][key]
    return state


def _boxes(shards: Sequence[ShardFollower], name: str) -> list[Box | None]:
    if len(shards) == 1:
        return [None]
    return [shard.saved.boxes[f"model.{name}"] for shard in shards if shard.saved is not None]


def _whole(parts: Sequence[Any], boxes: Sequence[Box | None], like: Tensor) -> Any:
    """Joins the parts of a tensor from all shards in a new tensor. If a value is not cut into
    parts, returns the value of the first shard.
    """
    first = parts[0]
    box = boxes[0]
    if not isinstance(first, Tensor):
        return first
    if box is None or not first.ndim or first.shape != box.shape:
        return first.clone()
    whole = torch.empty_strided(like.shape, like.stride(), dtype=first.dtype, device=first.device)
    for part, each in zip(parts, boxes, strict=True):
        assert each is not None
        shared_state.part_of(whole, each).copy_(part)
    return whole
