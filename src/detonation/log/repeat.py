"""Replay: plays back recorded messages, so that one process repeats the steps of an update log
without other replicas.
"""

import json
import logging
import math
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from detonation.checkpoint.gather import texts_between
from detonation.choices import first_names
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.core.agreement import members_of, take_recorded
from detonation.core.flat.layout import copy
from detonation.core.flat.tensors import digest, local, locals_of
from detonation.core.integrity.observer import PlayedMessages
from detonation.core.optim import hooks_before
from detonation.core.optimizer import Replicated, local_parameters
from detonation.log.records import (
    LOG_VERSION,
    MEMBERS,
    MESSAGE,
    START,
    STEP,
    SYNCHRONIZE,
    WRITTEN,
    DamagedLog,
    LogRecord,
    agreed_digest,
    exchanged_by,
    whole_records,
)
from detonation.log.writer import identity, round_like, segments, use_padding_of

_log = logging.getLogger("detonation")
_PRIVATE = ("residual", "server_residual", "taken", "local_steps", "start", "share_")
"""Prefixes of the state that differs between replicas."""
_NEAR = (
    "%s: %s, so replay ends near the weights of training: replay on a machine of its kind, from a"
    " later checkpoint"
)


class Player(PlayedMessages, ABC):
    """Plays back records instead of exchanging messages: one process represents all replicas.

    Raises `DamagedLog` if a record is missing.
    """

    def __init__(self) -> None:
        self._messages: dict[tuple[int, int], deque[LogRecord]] = defaultdict(deque)
        self._ends: deque[LogRecord] = deque()

    @abstractmethod
    def read(self) -> LogRecord | None:
        """Returns the next record; returns None after the last record."""

    def take(self, place: int, step: int) -> Tensor:
        """Returns the next recorded messages of `place` (channel and bucket) in step `step`."""
        # -> [bytes] uint8
        while not self._messages[place, step]:
            if not self._load():
                raise DamagedLog(
                    f"the log has no message of step {step} for channel and bucket {place}: it"
                    " is the log of another run"
                )
        content = self._messages[place, step].popleft().content
        if not self._messages[place, step]:
            del self._messages[place, step]
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)

    def find(self, place: int, step: int) -> Tensor | None:
        """Returns the next recorded messages of `place` (channel and bucket) in step `step`; None
        if the step has no messages. The record that ends the step must have been read before this
        call.
        """
        # -> [bytes] uint8
        if (place, step) in self._messages:
            return self.take(place, step)
        return None

    def next_end(self) -> LogRecord | None:
        """Returns the record that ends the next step or `synchronize` call; None after the last
        record.
        """
        while not self._ends and self._load():
            pass
        if self._ends:
            return self._ends.popleft()
        return None

    def _load(self) -> bool:
        """Reads one record. Returns False if there are no more records."""
        record = self.read()
        if record is None:
            return False
        if record.kind == MESSAGE:
            self._messages[record.place, record.step].append(record)
        else:
            self._ends.append(record)
        return True


class Playback(Player):
    """Plays back the update log of one shard in `directory`: the steps after step `first`, up to
    step `to`.

    Raises `ValueError` if there is no log of this shard from `first` on. Reading a record raises
    `ValueError` if the log is of another run, and `DamagedLog` if it is damaged.
    """

    def __init__(
        self, directory: Path, optimizer: Replicated, first: int, to: int | None = None
    ) -> None:
        super().__init__()
        self._rank = replace(optimizer.coordinates, replica=0).name
        self._exact = False
        self.first = first
        self.run = ""  # the id of the run in the last file that was read
        self.other = ""  # the error if the log is of another run than the loaded checkpoint
        self._to: float = math.inf
        if to is not None:
            self._to = to
        files = [(begun, path) for _, begun, path in segments(directory, self._rank)]
        usable = [begun for begun, _ in files if begun <= first]
        if not usable:
            known = f"there is no log of {self._rank} in {directory}"
            if files:
                known = f"the log of {self._rank} in {directory} begins after {files[0][0]} steps"
            raise ValueError(
                f"{known}, but replay would begin after step {first}: load a checkpoint from which"
                " the log continues"
            )
        self._identity = identity(optimizer)
        self._optimizer = optimizer
        ((self._axis, scheme),) = optimizer.levels
        self._delay = scheme.round.delay
        # messages that are in flight after `to` steps are recorded up to `delay` steps later
        last = max(self._to + self._delay, first + 1)
        self.files = [(begun, path) for begun, path in files if usable[-1] <= begun < last]
        self._records = self._read()

    def read(self) -> LogRecord | None:
        """Returns the next record that the replay needs; None after the last record."""
        return next(self._records, None)

    def next_end(self) -> LogRecord | None:
        """Returns the record that ends the next step or `synchronize` call; None after `to` steps,
        and at the end of the log.
        """
        try:
            end = super().next_end()
        except DamagedLog:
            # if step `to` is reached, damage in later records does no harm
            if self._optimizer.step_count < self._to:
                raise
            return None
        if end is None or end.step > self._to:
            return None
        return end

    def reach(self) -> tuple[int, str]:
        """Finds the last step up to which the log reproduces, bit for bit, all state on which
        replicas agree.

        Returns this step, and the reason why the log ends there, as text.
        """
        step = self.first
        last = self.first
        why = ""
        self._exact = True
        try:
            while (end := self.next_end()) is not None:
                if end.kind == STEP and end.step != step + 1:
                    raise DamagedLog(
                        f"the log goes on with step {end.step} after step {step}: a file is missing"
                    )
                if end.kind == STEP:
                    _require_hooks(end, self._optimizer)
                step = end.step
                if self._messages:
                    last = step
                self._messages.clear()
        except ValueError as error:
            why = str(error)
        return max(self.first, last - self._delay), why

    def _read(self) -> Iterator[LogRecord]:
        """Yields all records of steps after `first`, without the START record of each file."""
        counts = [begun for begun, _ in self.files[1:]]
        for (begun, path), following in zip(self.files, [*counts, math.inf], strict=True):
            yield from self._read_file(begun, path, following)

    def _read_file(self, begun: int, path: Path, following: float) -> Iterator[LogRecord]:
        """Yields the records of the file at `path` that the replay needs. The file begins after
        `begun` steps, and the next file after `following` steps.
        """
        waiting = list[LogRecord]()  # messages wait here until the record that ends their step
        for record in self._records_of(path):
            waiting.append(record)
            if record.kind == MESSAGE:
                continue
            if record.step > following + self._delay:
                return
            if record.step > following:
                # Training returned to an earlier step, so the next file has this step again.
                # Of this file, keep only messages that were in flight when the next file began.
                waiting = [each for each in waiting if each.step < following]
            if not self._is_before_first(record, begun):
                yield from waiting
            waiting.clear()

    def _records_of(self, path: Path) -> Iterator[LogRecord]:
        """Checks the START record of a file, and yields all later records."""
        for number, record in enumerate(whole_records(path)):
            if (record.kind == START) != (number == 0):
                raise DamagedLog(
                    f"{path} is no log of one rank: only its first record must be a START record"
                )
            if record.kind == START:
                self._check(path, record, _first_options(path))
            else:
                yield record

    def _is_before_first(self, record: LogRecord, begun: int) -> bool:
        """True if the state after `first` steps already includes the step that `record` ends, so
        that the replay must skip this step.
        """
        # keep weights that were written at step `first`, perhaps after the checkpoint was saved
        if record.kind == WRITTEN:
            return record.step < self.first
        return (record.kind == STEP or begun < self.first) and record.step <= self.first

    def _check(self, path: Path, start: LogRecord, options: dict[str, Any]) -> None:
        """Raises `ValueError` if a file belongs to another version of the format, another run or
        another start of the run.

        Warns if this process rounds differently from training.
        """
        about = start.table()
        if about.get("version") != LOG_VERSION:
            raise ValueError(
                f"{path} is in version {about.get('version')} of the log format, but this"
                f" package reads version {LOG_VERSION}"
            )
        self._check_run(path, start.step, about)
        use_padding_of(about, self._optimizer)
        why = self._why_only_near(about, options)
        if why and self._exact:
            raise ValueError(f"{path}: {why}")
        if why:
            _log.warning(_NEAR, path, why)
        self._check_identity(path, about)
        if not why:
            self._check_state(path, start.step, about.get("state", ""))
        weights = ""
        if self.first == 0:
            weights = about.get("start", "")
        if weights and weights != digest(self._optimizer.model.parameters()):
            raise ValueError(
                f"{path} begins with other weights than this run: replay with the seed, model and"
                " init_from of the logged run"
            )

    def _check_run(self, path: Path, step: int, about: dict[str, Any]) -> None:
        """Raises `ValueError` if the first file of the replay is of another run than the loaded
        checkpoint, unless this file begins with exactly the current state of the optimizer.

        Logs of older versions hold no id of a run, and a state before the first step belongs to no
        run: in both cases nothing is checked.
        """
        self.run = str(about.get("run", ""))
        known = self._optimizer.run.known
        if not (self.first and known and self.run) or path != self.files[0][1]:
            return
        same_step = step == self._optimizer.step_count
        if self.run != known and not (
            same_step and about.get("state") == agreed_digest(self._optimizer)
        ):
            self.other = (
                f"{path} is the log of another run than the checkpoint: replay the log of its run,"
                " or move this log away to go on from the checkpoint alone"
            )
            raise ValueError(self.other)

    def _check_state(self, path: Path, step: int, state: str) -> None:
        """Raises `ValueError` if training continued after step `step` from a state that differs
        from the current state of this process.

        The START record of a file has no `state` if the file continues the previous file without a
        gap.
        """
        optimizer = self._optimizer
        if state and optimizer.step_count == step and state != agreed_digest(optimizer):
            raise ValueError(
                f"{path}: training went on after step {step} with weights or a state of its"
                " optimizer that do not follow from the log, as after a reset or a load: replay"
                " from a checkpoint that is saved after the reset or load"
            )

    def _why_only_near(self, about: dict[str, Any], options: dict[str, Any]) -> str:
        """Returns the reason why a replay can only come close to the weights of training, as text;
        "" if the replay is exact.
        """
        mine = round_like(about, self._optimizer, options)
        theirs = about.get("selftest") or mine
        odd = next((key for key in mine if theirs.get(key) != mine[key]), "")
        if odd:
            return (
                f"training rounds otherwise than this process ({odd} is {theirs.get(odd)} there,"
                f" {mine[odd]} here)"
            )
        if about.get("close") and (self._exact or about.get("taken_over")):
            return "it is of one replica, and the weights of the others were only close to its own"
        return ""

    def _check_identity(self, path: Path, about: dict[str, Any]) -> None:
        """Raises `ValueError` if a file belongs to another run. From now on, uses the number of
        replicas that this file names.
        """
        replicas = about.get("replicas")
        # replicas leave and join an elastic run, so each file has its own number of replicas
        if type(replicas) is int and hasattr(self._axis, "next_size"):
            self._axis.next_size = replicas
            self._identity["replicas"] = replicas
        for key, now in self._identity.items():
            if about.get(key) != now:
                raise ValueError(
                    f"{path} was written with {key} {about.get(key)}, this run has {now}: replay"
                    f" with the same {key}"
                )


def _first_options(path: Path) -> dict[str, Any]:
    """Returns the options of the first parameter group at the first step of a file. The self-test
    of rounding in training used these options; a scheduler may have changed them later.
    """
    for record in whole_records(path):
        if record.kind in (STEP, SYNCHRONIZE):
            first = [*record.table().get("groups", []), {}][0]
            return {key: value for key, value in first.items() if not key.startswith("$")}
    return {}


def replay(directory: Path | str, optimizer: Replicated, to: int | None = None) -> int:
    """Repeats the steps of an update log that follow step `optimizer.step_count`; returns the new
    number of steps.

    After the replay, the weights and the base optimizer state on which replicas agree equal those
    of training, bit for bit. Schemes that exchange parameters agree only at the end of a round, so
    replay reproduces the weights of the last such end. An update log does not contain the private
    memory of a replica, for example of error feedback. If the trained parameters changed at a step,
    replay ends before that step. To continue, load a checkpoint that was saved after that step.

    In a world of several replicas, all ranks call `replay` after `load_checkpoint`. All ranks
    repeat steps up to the last end of a round that every rank can reproduce bit for bit, and a
    warning says why they stop there. After the replay, all memories of unsent values are empty.
    With a `LoopbackCommunicator`, one process per shard represents all replicas. If the weights of
    replicas were only close to each other, this process gets the weights of replica 0. If this
    process rounds differently from training, a warning says so, and the weights only come close to
    those of training.

    Args:
        directory: Directory of the `UpdateLog`.
        optimizer: Made by `replicate`, with the scheme, the seed and the base optimizer of the run.
        to: Number of steps after which to stop; None for the end of the log.

    Raises:
        DamagedLog: In one process: the log is damaged, or ends before `to`. The steps before were
            repeated.
        ValueError: The log is of another run than the checkpoint. In one process also: there is no
            log of these steps, or it is of a run with other settings; a world only warns of these.

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
        _repeat(Path(directory), optimizer, to)
    finally:
        optimizer.record(None)
    if to is not None and optimizer.step_count < to:
        raise DamagedLog(
            f"the log in {directory} ends after step {optimizer.step_count}, before step {to}"
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
        _repeat(directory, alone, goal)
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


def _repeat(directory: Path, optimizer: Replicated, to: int | None) -> None:
    """Repeats the steps of a log up to step `to`."""
    reader = Playback(directory, optimizer, optimizer.step_count, to)
    optimizer.record(reader)
    while (end := reader.next_end()) is not None:
        repeat_step(end, optimizer)
    optimizer.run.known = reader.run or optimizer.run.known
    # the gradients still hold the last update, to which the next backward would add
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
    _require_members([options.pop(MEMBERS, "") for options in recorded], end.step, optimizer)
    for group, options in zip(groups, recorded, strict=True):
        take_recorded(group, options)
    if end.kind != STEP:
        optimizer.synchronize()
        return
    _require_hooks(end, optimizer)
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


def _require_hooks(end: LogRecord, optimizer: Replicated) -> None:
    """Raises `ValueError` if the base optimizer of the logged training ran hooks before its step,
    and the base optimizer of `optimizer` has no hooks with the names of these hooks.

    end: the record that ends the step. It lists the names of the hooks only if they have changed
    since the record before. Logs of earlier versions do not have these names.
    """
    here = {name.rpartition(".")[2] for name in hooks_before(optimizer.base)}
    recorded = end.table().get("hooks", ())
    lacks = [name for name in recorded if name.rpartition(".")[2] not in here]
    if lacks:
        raise ValueError(
            f"training ran hooks before step {end.step} of its base optimizer, which may change"
            f" gradients: {first_names(lacks)}; register hooks of these names on optimizer.base"
        )


@torch.no_grad()
def _write_again(record: LogRecord, optimizer: Replicated) -> None:
    """Repeats the write of other code to a weight between two steps of training."""
    parameters = [*local_parameters(optimizer.model).values()]
    own = [local(parameter.detach()) for parameter in parameters[record.place : record.place + 1]]
    if [each.nbytes for each in own] != [len(record.content)]:
        raise DamagedLog(
            f"after step {record.step}, training wrote a weight that does not fit the weight at its"
            " place here: the log is of another model"
        )
    if record.content:  # a shard may be empty
        octets = torch.frombuffer(bytearray(record.content), dtype=torch.uint8)
        values = octets.view(own[0].dtype)
        own[0].copy_(values.view(own[0].shape))
