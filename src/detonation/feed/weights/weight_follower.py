"""The reader of a weight feed: it brings the weights of a model to a step, bit for bit, from files
alone."""

import hashlib
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
"""Seconds between two looks at a folder."""


@dataclass(frozen=True)
class WeightPatch:
    """New values of one tensor, with the fields of vLLM's `CheckpointWeightPatch`; three are its
    `SparseWeightPatch`.

    name: In the model. indices: `[changed]` int64 in rising order, of the flattened tensor. values:
    `[changed]`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Tensor
    indices: Tensor


class WeightFollower(AbstractContextManager["WeightFollower"]):
    """Holds the weights of a training in a model of this process, from the files of a `WeightFeed`.
    Made by `follow`.

    The model changes within `update` and `patches` alone, and only after all of a file has been
    checked.

    model: As it was given to `follow`. step: Of the training; -1 before the first base. joins:
    Bases that were taken. trouble: In words, why a file could not be used; "" where none was.
    """

    def __init__(self, model: nn.Module, folder: Folder) -> None:
        self.model, self._folder = model, folder
        self._tensors = {name: each.detach() for name, each in weights(model).items()}
        if any(isinstance(each, DTensor) for each in self._tensors.values()):
            raise ValueError(
                "the model is sharded: the files of a weight feed are followed in a whole one"
            )
        self._order: list[str] = []  # of the files
        self._run, self._state = -1, ""
        self._damaged: set[WeightFile] = set()
        self._touched: dict[str, list[Tensor]] | None = None
        self.step, self.joins, self.trouble = -1, 0, ""

    @property
    def behind(self) -> int:
        """Steps that are there, and that `update` would take one by one."""
        here = [each for each in self._files() if each.run == self._run and each.kind == DIFFERENCE]
        return sum(each.step > self.step for each in here)

    @property
    def ended(self) -> bool:
        """True once training has come to its end, and the model is at it."""
        return self._is_end(self._files())

    @property
    def fingerprint(self) -> str:
        """The sha256 (hex) of the parameters, as `detonation.fingerprint` makes it of a replica of
        one shard."""
        return hashlib.sha256(bytes.fromhex(digest(self.model.parameters()))).hexdigest()

    def update(self, to: int | None = None, wait_s: float | None = None) -> int:
        """Takes the steps that are there; returns `step`. The arguments are those of
        `Follower.update`.

        Where training went back to an earlier step, so does the model. A file that is missing or
        damaged is never used: the model stays where it is until the next base, and `trouble` says
        why.

        Raises:
            LostFeed: Training ended before `to`, or has passed it and its files are gone.
            ValueError: The training is of another model.
        """
        deadline = None if wait_s is None and to is not None else time.monotonic() + (wait_s or 0.0)
        while True:
            files = self._files()
            moved = self._advance(files, to)
            if self.step == to or (moved and to is None):
                return self.step
            if to is not None and self.step > to:
                raise LostFeed(
                    f"training was at step {self.step} already when its weights came, beyond {to}"
                )
            if self._is_end(files):
                if to is None:
                    return self.step
                raise LostFeed(f"training has ended after {self.step} steps, before {to}")
            rest_s = POLL_S if deadline is None else min(POLL_S, deadline - time.monotonic())
            if rest_s <= 0:
                return self.step
            time.sleep(rest_s)

    def patches(self, to: int | None = None, wait_s: float | None = None) -> list[WeightPatch]:
        """Takes steps as `update` does; returns what they have changed, for a server that has
        weights of its own.

        A base that is taken makes patches as well, of all that differs from what the model had
        before. A server that began with the same weights as `model` has the same ones after each
        call, unless an error ended one, or `update` was called between.

        Example:
            >>> import tempfile
            >>> from pathlib import Path
            >>> import detonation as dt
            >>> trained, served, folder = nn.Linear(2, 1), nn.Linear(2, 1), tempfile.TemporaryDirectory()
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
            touched, self._touched = self._touched, None
        found = {name: torch.unique(torch.cat(parts)) for name, parts in touched.items()}
        own = [(name, self._tensors[name], at) for name, at in found.items()]
        return [
            WeightPatch(name, tuple(of.shape), of.dtype, of.reshape(-1)[at], at)
            for name, of, at in own
        ]

    def close(self) -> None:
        """Follows no longer; the model stays where it is. Nothing has to be closed."""

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _files(self) -> list[WeightFile]:
        try:
            return WeightFile.known(self._folder.names())
        except OSError as error:  # a mount that is gone for a while
            self.trouble = f"the folder cannot be read: {error}"
            return []

    def _is_end(self, files: Sequence[WeightFile]) -> bool:
        at = (self._run, self.step)
        return (
            any(each.kind == END and (each.run, each.step) == at for each in files)
            and files[-1].run == self._run
        )

    def _advance(self, files: Sequence[WeightFile], to: int | None) -> bool:
        """Takes what `files` has up to step `to`; true if the weights have come to another step."""
        before = self._run, self.step
        usable = [file for file in files if to is None or file.step <= to]
        bases = [file for file in usable if file.kind == BASE]
        run = max([self._run, *(file.run for file in bases)])
        while True:
            rest = [
                each
                for each in usable
                if each.run == run and (run != self._run or each.step > self.step)
            ]
            steps = [each for each in rest if each.kind == DIFFERENCE]
            if run == self._run and all(self._take(each) for each in steps):
                break
            if not any(self._take(each) for each in reversed(rest) if each.kind == BASE):
                break
        return (self._run, self.step) != before

    @torch.no_grad()
    def _take(self, file: WeightFile) -> bool:
        """Brings the weights to the step of `file`; false where it cannot be used."""
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
        except OSError as error:  # removed meanwhile, as this reader is too far behind
            self.trouble = f"{file.name} cannot be read: {error}"
            return False
        return True

    def _take_base(
        self, file: WeightFile, about: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> None:
        odd = sorted(tensors.keys() ^ self._tensors.keys())
        if odd:
            raise ValueError(
                f"training has another model: {odd[0]} and {len(odd) - 1} more are in one of them"
                " alone"
            )
        for name, new in tensors.items():
            own = self._tensors[name]
            if (new.dtype, new.shape) != (own.dtype, own.shape):
                raise ValueError(
                    f"training publishes {name} as {new.dtype} {tuple(new.shape)}, this model has"
                    f" {own.dtype} {tuple(own.shape)}"
                )
        self._run = self.step = -1  # whoever is interrupted from here on needs a base
        for name, new in tensors.items():
            own = self._tensors[name]
            if self._touched is not None:
                self._note(name, changes(patterns_of(new).to(own.device), patterns_of(own))[0])
            own.copy_(new)
        self._order, self._state = list(tensors), str(about.get("state"))
        self._run, self.step, self.joins = file.run, file.step, self.joins + 1

    def _take_difference(
        self, file: WeightFile, about: Mapping[str, Any], planes: Mapping[str, Tensor]
    ) -> None:
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
        self._run, self.step, self._state = file.run, file.step, file.checksum

    def _note(self, name: str, positions: Tensor) -> None:
        """Keeps the elements that have these patterns, for `patches`."""
        if self._touched is not None and len(positions):
            tensor = self._tensors[name]
            elements = positions.to(tensor.device) // max(1, tensor.element_size() // 2)
            self._touched.setdefault(name, []).append(elements)
