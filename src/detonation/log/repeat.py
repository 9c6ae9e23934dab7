"""Replay: the steps that a log has, taken again without gradients and without other replicas."""

from pathlib import Path
from typing import Any

from torch import Tensor

from detonation.core.optimizer.replicated import Replicated
from detonation.log.playback import Playback
from detonation.log.records import STEP, DamagedLog, LogRecord


def replay(directory: Path | str, optimizer: Replicated, to: int | None = None) -> int:
    """Takes the steps that a log has from `optimizer.step_count` on; returns the number of steps taken in all.

    The weights and the state of the base optimizer that replicas agree on are then those of training, bit for bit.
    Under schemes that exchange parameters that is so where a round ends, and for what the replicas agreed on last.
    Memory private to a replica, as that of error feedback, is not in a log. Where other parameters are trained from a
    step on, replay ends before it, and goes on from a checkpoint after it.

    One process per shard replays; no other replica is needed: replicate the optimizer over a `LoopbackCommunicator`
    with as many replicas as there were, and load a checkpoint, or begin with the weights of the start. Where replicas
    were lost, or came, the log says from which step on there were others.

    Args:
        directory: Of the `UpdateLog`.
        optimizer: Made by `replicate`, with the scheme, the seed and the base optimizer of the run.
        to: The number of steps after which to stop, before the next one begins; None for the end of the log.

    Raises:
        DamagedLog: The log is damaged, or ends before `to`. The steps up to there were taken.
        ValueError: There is no log of these steps, or it is of another run.

    Example:
        >>> import tempfile, torch, detonation as dt
        >>> from detonation.cluster.network.loopback import LoopbackCommunicator
        >>> folder, weights = tempfile.TemporaryDirectory(), []
        >>> for again in (False, True):
        ...     model = torch.nn.Linear(2, 1)
        ...     with torch.no_grad():
        ...         _ = model.weight.fill_(0.5), model.bias.zero_()
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
        >>> folder.cleanup()
    """
    if to is not None and to < optimizer.step_count:
        raise ValueError(f"to is {to}, but {optimizer.step_count} steps were taken: load an earlier checkpoint")
    reader = Playback(Path(directory), optimizer, optimizer.step_count, to)
    optimizer.record(reader)
    try:
        while (end := reader.next_end()) is not None:
            repeat_step(end, optimizer)
    finally:
        optimizer.record(None)
    if to is not None and optimizer.step_count < to:
        raise DamagedLog(f"the log in {directory} ends after {optimizer.step_count} steps, not {to}")
    return optimizer.step_count


def repeat_step(end: LogRecord, optimizer: Replicated) -> None:
    """Takes the step that `end` ends again, or synchronizes again; the tape of `optimizer` plays its messages.

    Raises `DamagedLog` where it is not the next step.
    """
    groups = optimizer.param_groups
    for group, options in zip(groups, end.table().get("groups", [{}] * len(groups)), strict=True):
        group |= {key: _like(group.get(key), value) for key, value in options.items()}
    if end.kind != STEP:
        optimizer.synchronize()
        return
    if end.step != optimizer.step_count + 1:
        raise DamagedLog(f"the log goes on with step {end.step} after {optimizer.step_count} steps: a file is missing")
    optimizer.zero_grad()
    optimizer.step()


def _like(current: Any, value: Any) -> Any:
    """A recorded option, in the type that the group has."""
    if isinstance(current, Tensor):
        return current.fill_(value)
    return tuple(value) if isinstance(current, tuple) else value
