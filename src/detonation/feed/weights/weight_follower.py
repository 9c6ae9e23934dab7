"""Reader of a weight feed: sets the weights of a model from the files of the feed, bit for bit."""

import hashlib
import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from detonation.checkpoint.files.shard_file import CorruptCheckpoint
from detonation.checkpoint.snapshot import weights
from detonation.choices import first_names
from detonation.core.flat.tensors import digest
from detonation.feed.token import LostFeed
from detonation.feed.weights.differences import (
    changes,
    decode_difference,
    move,
    patterns_of,
    starts,
)
from detonation.feed.weights.folders import BASE, DIFFERENCE, END, Folder, WeightFile, read_content

POLL_S = 0.1
"""Seconds between two checks for new files in the folder."""
ABSENT_LINE_S = 3.0
"""Seconds without a directory before a follower logs that it waits for the directory."""
_log = logging.getLogger("detonation.feed")


@dataclass(frozen=True)
class WeightPatch:
    """New values of some elements of one tensor, with the fields of vLLM's `CheckpointWeightPatch`.

    Three of these fields also exist in vLLM's `SparseWeightPatch`.

    name: the tensor's name in the model. indices: `[changed]` int64 in rising order, the positions
    in the flattened tensor. values: `[changed]`, the new values at these positions.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Tensor
    indices: Tensor


class WeightFollower(AbstractContextManager["WeightFollower"]):
    """Keeps the weights of a training in a model of this process, from the files of a `WeightFeed`.

    `follow` creates it. Only `update` and `patches` change the model, and only after they have
    checked a complete file.

    model: the argument of `follow`. step: the step of training; -1 before the first base (a file
    with all weights). joins: number of loaded bases. trouble: the reason why a file could not be
    used, or why there are no files; "" if all files could be used.
    """

    def __init__(self, model: nn.Module, folder: Folder) -> None:
        self.model = model
        self._folder = folder
        self._tensors = {name: each.detach() for name, each in weights(model).items()}
        if any(isinstance(each, DTensor) for each in self._tensors.values()):
            raise ValueError(
                "the model is sharded, but only a whole model can follow the files of a weight"
                " feed: give a whole model"
            )
        self._order: list[str] = []  # names of the tensors in the order of the files
        self._run = -1
        self._state = ""
        self._damaged: set[WeightFile] = set()
        self._touched: dict[str, list[Tensor]] | None = None
        self.step = -1
        self.joins = 0
        self.trouble = ""
        self._absent_line_due = time.monotonic() + ABSENT_LINE_S
        # the last message about a missing directory; "" if the directory was never missing
        self._absent = ""
        self._files()

    @property
    def behind(self) -> int:
        """Number of published steps that `update` would apply one by one."""
        here = [each for each in self._files() if each.run == self._run and each.kind == DIFFERENCE]
        return sum(each.step > self.step for each in here)

    @property
    def ended(self) -> bool:
        """True if training has ended and the model has its final weights."""
        return self._is_end(self._files())

    @property
    def fingerprint(self) -> str:
        """sha256 (hex) of the parameters. It equals `detonation.fingerprint` on a replica of one
        shard at the same step.
        """
        return hashlib.sha256(bytes.fromhex(digest(self.model.parameters()))).hexdigest()

    def update(self, to: int | None = None, wait_s: float | None = None) -> int:
        """Applies the published steps to the model; returns `step`. See `Follower.update` for the
        arguments.

        If training returned to an earlier step, the model also returns to that step. If a file is
        missing or damaged, the model keeps its weights until the next base (a file with all
        weights), and `trouble` gives the reason.

        Raises:
            LostFeed: Training ended before step `to`, or has passed it and its files are gone.
            ValueError: Training has another model.
        """
        deadline = math.inf
        if to is None or wait_s is not None:
            deadline = time.monotonic() + (wait_s or 0.0)
        while True:
            files = self._files()
            moved = self._advance(files, to)
            if self.step == to or (moved and to is None):
                return self.step
            ended = self._is_end(files)
            if to is not None:
                self._require_reachable(to, ended)
            rest_s = min(POLL_S, deadline - time.monotonic())
            if ended or rest_s <= 0:
                return self.step
            time.sleep(rest_s)

    def _require_reachable(self, to: int, ended: bool) -> None:
        """Raises `LostFeed` if no later file can bring the weights to step `to`."""
        if self.step > to:
            raise LostFeed(
                f"training was at step {self.step} already when its weights arrived, so update"
                f" cannot return to step {to}"
            )
        if ended:
            raise LostFeed(f"training has ended after {self.step} steps, before step {to}")

    def patches(self, to: int | None = None, wait_s: float | None = None) -> list[WeightPatch]:
        """Applies steps as `update` does, and returns the changed values, for a server that keeps
        its own copy of the weights.

        After a base (a file with all weights), the patches contain all values that differ from the
        model's previous values. If a server has the weights of `model` before the first call, it
        has the same weights as `model` after each call. The weights may differ after a call that
        raised an error, or if `update` was called between two calls. `follow(wait=True)` already
        changes `model`, so copy the weights to the server after `follow`. Tied weights have one
        patch, with the first of their names: the server must tie them, too.

        Example:
            >>> import tempfile
            >>> from pathlib import Path
            >>> import detonation as dt
            >>> trained, served = nn.Linear(2, 1), nn.Linear(2, 1)
            >>> folder = tempfile.TemporaryDirectory()
            >>> feed = dt.Feed.of_weights(trained, folder.name)
            >>> _ = served.load_state_dict(trained.state_dict()), feed.publish(0)
            >>> _ = trained.weight.data[0, 1].add_(1), feed.publish(1)
            >>> (patch,) = dt.follow(served, Path(folder.name), wait=False).patches(to=1)
            >>> patch.name, patch.indices.tolist(), bool(patch.values == trained.weight[0, 1])
            ('weight', [1], True)
            >>> folder.cleanup()
        """
        self._touched = {}
        try:
            self.update(to, wait_s)
        finally:
            touched = self._touched
            self._touched = None
        found = {name: torch.unique(torch.cat(parts)) for name, parts in touched.items()}
        own = [(name, self._tensors[name], at) for name, at in found.items()]
        return [
            WeightPatch(name, tuple(of.shape), of.dtype, of.reshape(-1)[at], at)
            for name, of, at in own
        ]

    def close(self) -> None:
        """Stops following training. The model keeps its weights. There is nothing to release."""

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _files(self) -> list[WeightFile]:
        """Returns the files of the feed; an empty list while the folder cannot be read."""
        try:
            names = self._folder.names()
        except OSError as error:  # a folder on another machine may be unavailable for a while
            self.trouble = f"the folder cannot be read: {error}"
            if isinstance(error, FileNotFoundError) and self.step < 0:
                self._wait_for_directory(error.filename)
            return []
        if self.trouble == self._absent:
            self.trouble = ""
        return WeightFile.known(names)

    def _wait_for_directory(self, directory: str) -> None:
        """Sets `trouble` while the directory does not exist, because no trainer has made it yet.
        Logs `trouble` once after `ABSENT_LINE_S` seconds.
        """
        self._absent = (
            f"there is no directory {directory} yet: waiting for a trainer that publishes there"
        )
        self.trouble = self._absent
        if time.monotonic() >= self._absent_line_due:
            self._absent_line_due = math.inf
            _log.warning("%s", self.trouble)

    def _is_end(self, files: Sequence[WeightFile]) -> bool:
        """True if `files` say that training has ended at the step of the model."""
        at = (self._run, self.step)
        return (
            any(each.kind == END and (each.run, each.step) == at for each in files)
            and files[-1].run == self._run
        )

    def _advance(self, files: Sequence[WeightFile], to: int | None) -> bool:
        """Applies the steps in `files` up to step `to`; returns True if the step or the run of the
        model changed.
        """
        before = self._run, self.step
        usable = [file for file in files if to is None or file.step <= to]
        run = max([self._run, *(file.run for file in usable if file.kind == BASE)])
        while True:
            rest = self._later(usable, run)
            steps = [each for each in rest if each.kind == DIFFERENCE]
            if run == self._run and all(self._take(each) for each in steps):
                break
            bases = [each for each in reversed(rest) if each.kind == BASE]
            if not any(self._take(each) for each in bases):
                break
        return (self._run, self.step) != before

    def _later(self, files: Sequence[WeightFile], run: int) -> list[WeightFile]:
        """Returns the files of `run` that are newer than the model. If the model belongs to another
        run, returns all files of `run`.
        """
        found = [each for each in files if each.run == run]
        if run != self._run:
            return found
        return [each for each in found if each.step > self.step]

    @torch.no_grad()
    def _take(self, file: WeightFile) -> bool:
        """Loads `file`, a base or a difference. Returns False if the file cannot be used."""
        if file in self._damaged:
            return False
        try:
            about, tensors = read_content(file, self._folder.read(file.name))
            if file.kind == BASE:
                self._take_base(file, about, tensors)
            elif (about.get("after"), about.get("before")) == (self.step, self._state):
                self._take_difference(file, about, tensors)
            else:
                self.trouble = f"a file between step {self.step} and {file.name} is missing"
                return False
        except CorruptCheckpoint as error:
            self._damaged.add(file)
            self.trouble = str(error)
            return False
        except OSError as error:
            # usually this follower is too far behind, and the feed has removed the old file
            self.trouble = f"{file.name} cannot be read: {error}"
            return False
        return True

    def _take_base(
        self, file: WeightFile, about: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> None:
        """Loads a base (a file with all weights). Raises `ValueError` for the base of another
        model.
        """
        odd = sorted(tensors.keys() ^ self._tensors.keys())
        if odd:
            raise ValueError(
                f"training has another model: only one of the two models has {first_names(odd)}"
            )
        for name, new in tensors.items():
            own = self._tensors[name]
            if (new.dtype, new.shape) != (own.dtype, own.shape):
                remedy = "give a model with the published types and shapes"
                if new.shape == own.shape and len({each.dtype for each in tensors.values()}) == 1:
                    remedy = f"call model.to({new.dtype}) before dt.follow"
                raise ValueError(
                    f"training publishes {name} of the model as {new.dtype} {tuple(new.shape)}, but"
                    f" {name} of this {type(self.model).__name__} is {own.dtype}"
                    f" {tuple(own.shape)}: {remedy}"
                )
        # step -1 marks a mixture of old and new weights, if an error interrupts the loop below
        self._run = self.step = -1
        for name, new in tensors.items():
            own = self._tensors[name]
            if self._touched is not None:
                published = patterns_of(new).to(own.device)
                positions, _ = changes(published, patterns_of(own))
                self._note(name, positions)
            own.copy_(new)
        self._order = list(tensors)
        self._state = str(about.get("state"))
        self._run = file.run
        self.step = file.step
        self.joins += 1

    def _take_difference(
        self, file: WeightFile, about: Mapping[str, Any], planes: Mapping[str, Tensor]
    ) -> None:
        """Applies one difference to the model. Raises `CorruptCheckpoint` if the difference is
        damaged or does not fit the weights.
        """
        begins = starts({name: self._tensors[name] for name in self._order})
        count = about.get("count")
        if type(count) is not int:
            raise CorruptCheckpoint(f"{file.name} does not say how many values changed")
        try:
            positions, deltas = decode_difference(planes, count, begins[""])
        except ValueError as error:
            raise CorruptCheckpoint(f"{file.name}: {error}") from error
        cuts = torch.searchsorted(positions, torch.tensor(list(begins.values()))).tolist()
        self._run = self.step = -1
        for name, first, last in zip(self._order, cuts, cuts[1:], strict=False):
            if first < last:
                own = positions[first:last] - begins[name]
                move(self._tensors[name], own, deltas[first:last])
                self._note(name, own)
        self._run = file.run
        self.step = file.step
        self._state = file.checksum

    def _note(self, name: str, positions: Tensor) -> None:
        """Records for `patches` which elements of the tensor `name` have changed. `positions` are
        the indices of the changed 16-bit patterns; an element of 4 bytes has two patterns.
        """
        if self._touched is not None and len(positions):
            tensor = self._tensors[name]
            elements = positions.to(tensor.device) // max(1, tensor.element_size() // 2)
            self._touched.setdefault(name, []).append(elements)
