"""Replay: plays back recorded messages, so that one process repeats the steps of an update log
without other replicas.
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from detonation.checkpoint.gather import texts_between
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.core.agreement import members_of, take_recorded
from detonation.core.flat.layout import copy
from detonation.core.flat.tensors import local, locals_of
from detonation.core.optimizer import Replicated, local_parameters
from detonation.log.playback import Playback, require_hooks
from detonation.log.records import (
    MEMBERS,
    STEP,
    SYNCHRONIZE,
    WRITTEN,
    DamagedLog,
    LogRecord,
    exchanged_by,
    whole_records,
)
from detonation.log.writer import segments

_log = logging.getLogger("detonation")
_PRIVATE = ("residual", "server_residual", "taken", "local_steps", "start", "share_")
"""Prefixes of the state that differs between replicas."""


def replay(directory: Path | str, optimizer: Replicated, to: int | None = None) -> int:
    """Repeats the steps of an update log that follow step `optimizer.step_count`; returns the new
    number of steps.

    After the replay, the weights and the base optimizer state on which replicas agree equal those
    of training, bit for bit. With schemes that exchange parameters, replicas agree only at the end
    of a round, so replay reproduces the weights at the last end of a round. An update log does not
    contain the private memory of a replica, for example of error feedback. If the trained
    parameters changed at a step, replay ends before that step. To continue, load a checkpoint that
    was saved after that step.

    In a world of several replicas, all ranks call `replay` after `load_checkpoint`. All ranks
    repeat steps up to the last end of a round that every rank can reproduce bit for bit, and a
    warning says why they stop there. After the replay, all memories of unsent values are empty.
    With a `LoopbackCommunicator`, one process per shard represents all replicas. These processes
    must call `replay` together. If the weights of replicas were only close to each other, this
    process gets the weights of replica 0. If this process rounds differently from training, a
    warning says so, and the weights only come close to those of training.

    Args:
        directory: Directory of the `UpdateLog`.
        optimizer: Made by `replicate`, with the scheme, the seed and the base optimizer of the run.
        to: Number of steps after which to stop; None for the last point that the logs of all shards
            have.

    Raises:
        DamagedLog: In one process: the log is damaged, or ends before `to`. Earlier steps were
            repeated.
        ValueError: The log is of another run than the checkpoint. In one process also: there is no
            log of these steps, or the log has other settings. Several replicas only warn of this.

    Example:
        >>> import tempfile, torch, detonation as dt
        >>> from detonation.cluster.network.loopback import LoopbackCommunicator
        >>> folder, weights = tempfile.TemporaryDirectory(), []
        >>> for again in (False, True):
        ...     model = torch.nn.Linear(2, 1)
        ...     _ = model.load_state_dict({"weight": torch.ones(1, 2), "bias": torch.zeros(1)})
        ...     adam = torch.optim.AdamW(model.parameters())
        ...     optimizer = dt.replicate(adam, model, LoopbackCommunicator(2), dt.loco())
        ...     if again:
        ...         _ = dt.replay(folder.name, optimizer)
        ...     else:
        ...         optimizer.record(dt.UpdateLog(folder.name))
        ...         model(torch.ones(1, 2)).sum().backward()
        ...         optimizer.step()
        ...     weights.append(model.weight.detach().clone())
        >>> torch.equal(*weights), optimizer.step_count
        (True, 1)
        >>> [path.name for path in Path(folder.name).iterdir()]
        ['replica0-shard0-0.updates']
        >>> folder.cleanup()
    """
    if to is not None and to < optimizer.step_count:
        raise ValueError(
            f"replay cannot stop after step {to}, because the optimizer has already taken"
            f" {optimizer.step_count} steps: load an earlier checkpoint"
        )
    if not all(isinstance(axis, LoopbackCommunicator) for axis, _ in optimizer.levels):
        return replay_together(Path(directory), optimizer, to)[0]
    try:
        _repeat(_playback(Path(directory), optimizer, to), optimizer)
    finally:
        optimizer.record(None)
    if to is not None and optimizer.step_count < to:
        raise DamagedLog(
            f"the log in {directory} ends after step {optimizer.step_count}, before step {to}:"
            " give an earlier step"
        )
    return optimizer.step_count


def replay_together(directory: Path, optimizer: Replicated, to: int | None) -> tuple[int, str]:
    """Runs `replay` on all ranks of a world. Each rank repeats the steps on its own, up to the last
    step that all ranks can reach. After that all ranks compare their weights.

    Returns the reached step, and the reason why no further step could be repeated, as text. Raises
    `ValueError` on all ranks if the log is of another run than the checkpoint.
    """
    optimizer.set_up()
    first = optimizer.step_count
    texts = texts_between(optimizer.model, optimizer)
    alone = None
    other = ""
    try:
        alone = _alone(directory, optimizer)
        player = Playback(directory, alone, first, to)
        found = player.reach()
        other = player.other
    except (OSError, ValueError) as error:
        found = first, str(error)
    told = [json.loads(text) for text in texts.gather(json.dumps([*found, other]))]
    if other := next((text for _, _, text in told if text), ""):
        raise ValueError(other)
    goal, why, _ = min(told, key=lambda one: (one[0], not one[1]))
    if why and texts.rank == 0 and (first or segments(directory, "")):
        _log.warning("the log in %s is replayed up to step %d: %s", directory, goal, why)
    if alone and goal > first:
        _repeat(Playback(directory, alone, alone.step_count, goal), alone)
        show_agreed(alone)
        optimizer.forget_levels()
        _hand_over(alone, optimizer)
        optimizer.resume_at(goal)
        optimizer.verify()
    return optimizer.step_count, why


def _alone(directory: Path, optimizer: Replicated) -> Replicated:
    """Returns an optimizer with which one process represents all replicas of the log. The returned
    optimizer has the weights of `optimizer`, and the state on which replicas agree.
    """
    (_, path), *_ = Playback(directory, optimizer, optimizer.step_count).files
    start = next(whole_records(path), None)
    ((axis, scheme),) = optimizer.levels
    replicas = axis.size()
    if start:
        replicas = start.table()["replicas"]
    like = LoopbackCommunicator(replicas)
    alone = Replicated(optimizer.base, optimizer.model, [(like, scheme)], optimizer.settings)
    _hand_over(optimizer, alone)
    alone.step_count = optimizer.step_count
    alone.run = optimizer.run
    return alone


def _hand_over(old: Replicated, new: Replicated) -> None:
    """Copies the state that all replicas share from `old` to `new`. `new` keeps the state that
    differs between replicas.
    """
    for before, after in zip(old.build(), new.build(), strict=True):
        shared = before.local_state().named()
        state = after.local_state()
        merged = state.named()
        for key in merged:
            if not key.startswith(_PRIVATE):
                merged[key] = shared[key]
        state.load(merged)


@torch.no_grad()
def show_agreed(optimizer: Replicated) -> None:
    """Sets the weights to the last weights on which all replicas agreed."""
    for replicator in optimizer.build():
        if replicator.scheme.signal == "parameters":
            copy(locals_of(replicator.parameters), replicator.shared_weights())


def _playback(directory: Path, optimizer: Replicated, to: int | None) -> Playback:
    """Returns the log of this shard, up to step `to`. If the logs of the shards end at different
    points, all are read up to the first of these points. Collective between the shards.

    Raises `ValueError` on all shards if the log of one of them cannot be read.
    """
    if optimizer.coordinates.shards == 1:
        return Playback(directory, optimizer, optimizer.step_count, to)
    found: Playback | None = None
    point: Sequence[float] = ()
    why = ""
    try:
        found = Playback(directory, optimizer, optimizer.step_count, to)
        point = found.last_point()
    except (OSError, ValueError) as error:
        why = str(error)
    texts = texts_between(optimizer.model, optimizer)
    told = [json.loads(text) for text in texts.gather(json.dumps([point, why]))]
    if why := why or next((text for _, text in told if text), ""):
        raise DamagedLog(why)
    points = [tuple(point) for point, _ in told]
    assert found is not None
    if min(points) < max(points):
        # a killed run may have written one step more to the log of one shard
        found.cut(*min(points))
    return found


def _repeat(reader: Playback, optimizer: Replicated) -> None:
    """Repeats the steps of a log."""
    optimizer.record(reader)
    while (end := reader.next_end()) is not None:
        repeat_step(end, optimizer)
        if end.kind == SYNCHRONIZE:
            reader.drop_messages()
    optimizer.run.known = reader.run or optimizer.run.known
    # `p.grad` still holds the last update, and the next backward would add to it
    optimizer.zero_grad()


def repeat_step(end: LogRecord, optimizer: Replicated) -> None:
    """Repeats the event that the record `end` ends: a step, a `synchronize` call, or a write to a
    weight.

    The observer of `optimizer` plays back the recorded messages. Raises `DamagedLog` if `end` does
    not belong to the next step.
    """
    if end.kind == WRITTEN:
        _write_again(end, optimizer)
        return
    groups = optimizer.param_groups
    recorded = end.table().get("groups", [{}] * len(groups))
    if len(recorded) != len(groups):
        raise ValueError(
            f"after step {end.step}, training had {len(recorded)} parameter groups, but here are"
            f" {len(groups)}: make the same groups, or replay from a checkpoint that is saved after"
            " the change"
        )
    _require_members([options.pop(MEMBERS, "") for options in recorded], end.step, optimizer)
    for group, options in zip(groups, recorded, strict=True):
        take_recorded(group, options)
    if end.kind != STEP:
        optimizer.synchronize()
        return
    require_hooks(end, optimizer)
    if end.step != optimizer.step_count + 1:
        raise DamagedLog(
            f"the log goes on with step {end.step} after step {optimizer.step_count}: a file is"
            " missing"
        )
    optimizer.zero_grad()
    optimizer.step()


def _require_members(texts: Sequence[str], step: int, optimizer: Replicated) -> None:
    """Raises `ValueError` unless the parameter groups of `optimizer` hold the parameters that
    `texts` describe. A text is empty if the group is the same as in the step before.
    """
    if not any(texts):
        return
    for number, (text, own) in enumerate(
        zip(texts, members_of(optimizer.base, exchanged_by(optimizer)), strict=True)
    ):
        if text and text != own:
            raise ValueError(
                f"in step {step} of training, parameter group {number} held other parameters"
                f" ({text}) than here ({own}): give each group the same parameters, or replay from"
                " a checkpoint that is saved after the change"
            )


@torch.no_grad()
def _write_again(record: LogRecord, optimizer: Replicated) -> None:
    """Repeats a write to a weight that other code made between two steps of training."""
    parameters = [*local_parameters(optimizer.model).values()]
    own = [local(parameter.detach()) for parameter in parameters[record.place : record.place + 1]]
    if [each.nbytes for each in own] != [len(record.content)]:
        raise DamagedLog(
            f"after step {record.step}, training wrote a weight that does not fit the weight with"
            " the same index here: the log is of another model"
        )
    if record.content:  # a shard may be empty
        octets = torch.frombuffer(bytearray(record.content), dtype=torch.uint8)
        values = octets.view(own[0].dtype)
        own[0].copy_(values.view(own[0].shape))
