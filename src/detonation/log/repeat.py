"""Replay: tapes that play back what was recorded, and the steps that a log has, taken again without
other replicas."""

import json
import logging
import math
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from detonation.checkpoint.gather import texts_between
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.core.flat.layout import copy
from detonation.core.flat.tensors import digest, local, locals_of
from detonation.core.integrity.message import Tape
from detonation.core.optimizer.gathered import local_parameters
from detonation.core.optimizer.reconfigure import like_option
from detonation.core.optimizer.replicated import Replicated
from detonation.log.records import (
    LOG_VERSION,
    MESSAGE,
    START,
    STEP,
    WRITTEN,
    DamagedLog,
    LogRecord,
    whole_records,
)
from detonation.log.writer import identity, round_like, segments, use_padding_of

_log = logging.getLogger("detonation")
_PRIVATE = ("residual", "server_residual", "taken", "local_steps", "start", "share_")
"""How the kinds of state begin that are one replica's own."""
_NEAR = (
    "%s: %s, so replay ends near the weights of training: replay on a machine of its kind, from a"
    " later checkpoint"
)


class Player(Tape, ABC):
    """Plays back records in the place of an exchange: one process is all replicas.

    `DamagedLog` where some lack.
    """

    plays = True

    def __init__(self) -> None:
        self._messages: dict[tuple[int, int], deque[LogRecord]] = defaultdict(deque)
        self._ends: deque[LogRecord] = deque()

    @abstractmethod
    def read(self) -> LogRecord | None:
        """The next record; None where there is none."""

    def take(self, place: int, step: int) -> Tensor:
        """The next messages of a place."""  # -> [bytes] uint8
        while not self._messages[place, step]:
            if not self._load():
                raise DamagedLog(
                    f"the record of step {step} has no message of place {place}: it is of"
                    " another run"
                )
        content = self._messages[place, step].popleft().content
        if not self._messages[place, step]:
            del self._messages[place, step]
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)

    def find(self, place: int, step: int) -> Tensor | None:
        """The same, of a step whose end was read; None if it has none."""  # -> [bytes] uint8
        return self.take(place, step) if (place, step) in self._messages else None

    def next_end(self) -> LogRecord | None:
        """The end of the next step or call of `synchronize`; None where there is no other record."""
        while not self._ends and self._load():
            pass
        return self._ends.popleft() if self._ends else None

    def _load(self) -> bool:
        record = self.read()
        if record is None:
            return False
        if record.kind == MESSAGE:
            self._messages[record.place, record.step].append(record)
        else:
            self._ends.append(record)
        return True


class Playback(Player):
    """Plays back the log of one shard in `directory`, after `first` and up to `to` steps, in the
    place of an exchange.

    Raises `ValueError` where there is no log of this shard from there on or it is of another run,
    later `DamagedLog`.
    """

    def __init__(
        self, directory: Path, optimizer: Replicated, first: int, to: int | None = None
    ) -> None:
        super().__init__()
        self._rank, self._exact = replace(optimizer.coordinates, replica=0).name, False
        self.first, self._to = first, math.inf if to is None else to
        files = [(begun, path) for _, begun, path in segments(directory, self._rank)]
        usable = [begun for begun, _ in files if begun <= first]
        if not usable:
            known = (
                f"the log of {self._rank} in {directory} begins after {files[0][0]} steps"
                if files
                else ""
            )
            none = f"there is no log of {self._rank} in {directory}"
            raise ValueError(
                f"{known or none}, and replay would begin after {first}: it needs a checkpoint"
                " between"
            )
        self._identity, self._optimizer = identity(optimizer), optimizer
        ((self._axis, scheme),) = optimizer.levels
        self._delay = scheme.round.delay
        last = max(
            self._to + self._delay, first + 1
        )  # whose messages are on their way after `to` steps
        self.files = [(begun, path) for begun, path in files if usable[-1] <= begun < last]
        self._records = self._read()

    def read(self) -> LogRecord | None:
        """The next record of a step or call of `synchronize` up to `to`."""
        return next(self._records, None)

    def next_end(self) -> LogRecord | None:
        """The end of the next step or call of `synchronize`; None after `to` steps, and at the end
        of the log."""
        try:
            end = super().next_end()
        except DamagedLog:
            if self._optimizer.step_count < self._to:  # else the damage is behind them
                raise
            return None
        return None if end is None or end.step > self._to else end

    def reach(self) -> tuple[int, str]:
        """The last step up to which the log has all that replicas agreed on, bit for bit, and why
        it is the last."""
        step, last, why, self._exact = self.first, self.first, "", True
        try:
            while (end := self.next_end()) is not None:
                if end.kind == STEP and end.step != step + 1:
                    raise DamagedLog(
                        f"it goes on with step {end.step} after {step}: a file is missing"
                    )
                step, last = end.step, end.step if self._messages else last
                self._messages.clear()
        except ValueError as error:
            why = str(error)
        return max(self.first, last - self._delay), why

    def _read(self) -> Iterator[LogRecord]:
        """All records from `first` on but those that begin files."""
        counts = [begun for begun, _ in self.files[1:]]
        for (begun, path), following in zip(self.files, [*counts, math.inf], strict=True):
            waiting = list[LogRecord]()  # until the end of their step
            for number, record in enumerate(whole_records(path)):
                if (record.kind == START) != (number == 0):
                    raise DamagedLog(f"{path} is no log of one rank")
                if record.kind == START:
                    self._check(path, record)
                    continue
                waiting.append(record)
                if record.kind == MESSAGE:
                    continue
                if record.step > following + self._delay:
                    break
                if (
                    record.step > following
                ):  # training went back, and wrote the rest anew but for what was on its way
                    waiting = [each for each in waiting if each.step < following]
                known = (
                    record.step <= self.first
                    if record.kind == STEP or begun < self.first
                    else False
                )
                if record.kind == WRITTEN:  # maybe after the checkpoint from which this goes on
                    known = record.step < self.first
                yield from waiting if not known else ()
                waiting.clear()

    def _check(self, path: Path, start: LogRecord) -> None:
        about = start.table()
        if about.get("version") != LOG_VERSION:
            raise ValueError(
                f"{path} is in version {about.get('version')} of the format, here it is"
                f" {LOG_VERSION}"
            )
        use_padding_of(about, self._optimizer)
        mine = round_like(about, self._optimizer)
        theirs, why = about.get("selftest") or mine, ""
        if odd := next((key for key in mine if theirs.get(key) != mine[key]), ""):
            why = (
                f"training rounds otherwise than this process ({odd} is {theirs.get(odd)} there,"
                f" {mine[odd]} here)"
            )
        elif about.get("close") and (self._exact or about.get("taken_over")):
            why = "it is of one of several replicas, whose weights were close to its own"
        if why and self._exact:
            raise ValueError(f"{path}: {why}")
        if why:
            _log.warning(_NEAR, path, why)
        replicas = about.get("replicas")
        if type(replicas) is int and hasattr(
            self._axis, "next_size"
        ):  # some were lost, or came, before the next step
            self._axis.next_size = self._identity["replicas"] = replicas
        for key, now in self._identity.items():
            if about.get(key) != now:
                raise ValueError(
                    f"{path} was written with {key} {about.get(key)}, this run has {now}"
                )
        weights = about.get("start", "") if self.first == 0 else ""
        if weights and weights != digest(self._optimizer.model.parameters()):
            raise ValueError(
                f"{path} begins with other weights than this run: another seed, model or init_from"
            )


def replay(directory: Path | str, optimizer: Replicated, to: int | None = None) -> int:
    """Takes the steps that a log has from `optimizer.step_count` on; returns the number of steps
    taken in all.

    The weights and the state of the base optimizer that replicas agree on are then those of
    training, bit for bit. Under schemes that exchange parameters that is so where a round ends, and
    for what the replicas agreed on last. Memory private to a replica, as that of error feedback, is
    not in a log. Where other parameters are trained from a step on, replay ends before it, and goes
    on from a checkpoint after it.

    All ranks of a world call it after `load_checkpoint`. The last step is then the last that all
    can take bit for bit, the end of a round; memories are empty, and a warning says why no further.
    Over a `LoopbackCommunicator` one process per shard stands for all replicas, as many as there
    were; of close ones it has the weights of replica 0. If it rounds otherwise than training did,
    it comes near and warns.

    Args:
        directory: Of the `UpdateLog`.
        optimizer: Made by `replicate`, with the scheme, the seed and the base optimizer of the run.
        to: The number of steps after which to stop, before the next one begins; None for the end of
            the log.

    Raises:
        DamagedLog: The log is damaged, or ends before `to`. The steps up to there were taken.
        ValueError: There is no log of these steps, or it is of another run. A world raises neither,
            but warns.

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
        >>> torch.equal(*weights), optimizer.step_count, [path.name for path in Path(folder.name).iterdir()]
        (True, 1, ['replica0-shard0-0.updates'])
        >>> folder.cleanup()
    """
    if to is not None and to < optimizer.step_count:
        raise ValueError(
            f"to is {to}, but {optimizer.step_count} steps were taken: load an earlier checkpoint"
        )
    if not all(isinstance(axis, LoopbackCommunicator) for axis, _ in optimizer.levels):
        return replay_together(Path(directory), optimizer, to)[0]
    try:
        _repeat(Path(directory), optimizer, to)
    finally:
        optimizer.record(None)
    if to is not None and optimizer.step_count < to:
        raise DamagedLog(
            f"the log in {directory} ends after {optimizer.step_count} steps, not {to}"
        )
    return optimizer.step_count


def replay_together(directory: Path, optimizer: Replicated, to: int | None) -> tuple[int, str]:
    """`replay` on all ranks of a world: each takes the steps alone, up to the last that all can;
    then all compare.

    Also returns why not more.
    """
    optimizer.set_up()
    first, texts, alone = optimizer.step_count, texts_between(optimizer.model, optimizer), None
    try:
        alone = _alone(directory, optimizer)
        found = Playback(directory, alone, first, to).reach()
    except (OSError, ValueError) as error:
        found = first, str(error)
    goal, why = min(
        map(json.loads, texts.gather(json.dumps(found))), key=lambda told: (told[0], not told[1])
    )
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
    """One replica in the place of all that wrote the log, on the weights and with the agreed state
    of `optimizer`."""
    (_, path), *_ = Playback(directory, optimizer, optimizer.step_count).files
    start, ((axis, scheme),) = next(whole_records(path), None), optimizer.levels
    like = LoopbackCommunicator(start.table()["replicas"] if start else axis.size())
    alone = Replicated(optimizer.base, optimizer.model, [(like, scheme)], optimizer.settings)
    _hand_over(optimizer, alone)
    alone.step_count = optimizer.step_count
    return alone


def _hand_over(old: Replicated, new: Replicated) -> None:
    """Gives `new` the state that all replicas share; its own memory stays."""
    for before, after in zip(old.build(), new.build(), strict=True):
        shared, state = before.local_state().named(), after.local_state()
        state.load(
            {
                key: own if key.startswith(_PRIVATE) else shared[key]
                for key, own in state.named().items()
            }
        )


@torch.no_grad()
def show_agreed(optimizer: Replicated) -> None:
    """Moves the weights to those that the replicas agreed on last."""
    for replicator in optimizer.build():
        if replicator.scheme.signal == "parameters":
            copy(locals_of(replicator.parameters), replicator.shared_weights())


def _repeat(directory: Path, optimizer: Replicated, to: int | None) -> None:
    optimizer.record(reader := Playback(directory, optimizer, optimizer.step_count, to))
    while (end := reader.next_end()) is not None:
        repeat_step(end, optimizer)
    optimizer.zero_grad()  # which has the last update, and backward would add to it


def repeat_step(end: LogRecord, optimizer: Replicated) -> None:
    """Takes the step that `end` ends again, or synchronizes or writes a weight again; the tape of
    `optimizer` plays its messages.

    Raises `DamagedLog` where it is not the next step.
    """
    if end.kind == WRITTEN:
        _write_again(end, optimizer)
        return
    groups = optimizer.param_groups
    for group, options in zip(groups, end.table().get("groups", [{}] * len(groups)), strict=True):
        group |= {key: like_option(group.get(key), value) for key, value in options.items()}
    if end.kind != STEP:
        optimizer.synchronize()
        return
    if end.step != optimizer.step_count + 1:
        raise DamagedLog(
            f"the log goes on with step {end.step} after {optimizer.step_count} steps: a file is"
            " missing"
        )
    optimizer.zero_grad()
    optimizer.step()


@torch.no_grad()
def _write_again(record: LogRecord, optimizer: Replicated) -> None:
    """Writes a weight that training wrote between two steps."""
    parameters = [*local_parameters(optimizer.model).values()]
    own = [local(parameter.detach()) for parameter in parameters[record.place : record.place + 1]]
    if [each.nbytes for each in own] != [len(record.content)]:
        raise DamagedLog(
            f"the record of a weight written after step {record.step} fits no weight here: it is "
            "of another model"
        )
    for each in own if record.content else ():
        octets = torch.frombuffer(bytearray(record.content), dtype=torch.uint8)
        each.copy_(octets.view(each.dtype).view(each.shape))
