"""Weight feed: what any training loop calls after a step, so that readers elsewhere have its
exact weights."""

import logging
import secrets
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from detonation.checkpoint.files.shard_file import require_types, shard_content
from detonation.checkpoint.snapshot import weights
from detonation.feed.weights.differences import (
    changes,
    encode_difference,
    move,
    patterns_of,
    starts,
    tensor_of,
)
from detonation.feed.weights.folders import (
    BASE,
    DIFFERENCE,
    END,
    Folder,
    LocalFolder,
    WeightFile,
    folder_at,
)

_log = logging.getLogger("detonation.feed")


class WeightFeed(AbstractContextManager["WeightFeed"]):
    """Publishes the weights of a model as files: bases, and exact differences between them. See
    `Feed.of_weights`.

    step: The last that was published; -1 before. bytes_written: Of all files. trouble: In words,
    why the last call did not write a file; "" if it wrote all.
    """

    def __init__(
        self,
        model: nn.Module,
        target: Path | str | Folder | None,
        dtype: torch.dtype | None = None,
        base_every: int | None = None,
    ) -> None:
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(
                f"dtype is {dtype}, must be a floating-point type such as torch.bfloat16"
            )
        if base_every is not None and base_every < 1:
            raise ValueError(f"base_every is {base_every}, must be at least 1")
        self._model = model
        self._dtype = dtype
        self._base_every = base_every
        if target is None:
            self._folder = None
        else:
            self._folder = folder_at(target)
        if isinstance(self._folder, LocalFolder):
            self._folder.make()
        self._run = max(
            (file.run for file in _begun(self._folder.names() if self._folder else [])), default=0
        )
        self._like: dict[str, Tensor] = {}
        self._held: dict[str, Tensor] = {}  # the patterns that readers have
        self._state = ""  # the checksum of the last difference; before, the name of the first base
        self._since = self._since_bytes = self._base_bytes = 0
        self.step = -1
        self.bytes_written = 0
        self.trouble = ""

    @torch.no_grad()
    def publish(self, step: int) -> int:
        """Writes what has changed since the last call, after `step` steps were taken; returns the
        bytes written.

        Each rank of a sharded model calls it, because the shards are gathered. Where the folder
        takes no file, as a full disk does, training goes on: a warning is logged, `trouble` says
        why, this returns 0, and the next call publishes the changes of both. Where `step` is not
        above the last one, training went back: readers get a base.

        Raises `ValueError` if `step` is negative, or a tensor has a type that safetensors lacks,
        as complex128.
        """
        if step < 0:
            raise ValueError(f"step is {step}, must be at least 0")
        tensors = weights(self._model)
        like = self._published(tensors)
        before = self.bytes_written
        if self._folder is None:
            for name, kind in like.items():
                _whole(tensors[name], kind.dtype)
            return 0
        try:
            if not self._like or step <= self.step or _layout(like) != _layout(self._like):
                self._begin(tensors, like, step, self._folder)
            else:
                self._go_on(tensors, step, self._folder)
            self.trouble = ""
        except OSError as error:
            self.trouble = f"of step {step} a file is not written: {error}"
            _log.warning("%s", self.trouble)
        return self.bytes_written - before

    def close(self, ended: bool = True) -> None:
        """Tells readers that training has come to its end, unless `ended` is false; there is
        nothing else to close."""
        if ended and self._folder is not None and self.step >= 0:
            try:
                self._write(self._folder, self._run, END, self.step, {}, {})
            except OSError as error:
                self.trouble = f"the end is not published: {error}"
                _log.warning("%s", self.trouble)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close(ended=error is None)

    def _published(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Types and shapes of what is published, without memory, in the order of a file: wide
        types come first."""
        kinds = {
            k: self._dtype if self._dtype and v.is_floating_point() else v.dtype
            for k, v in tensors.items()
        }
        require_types(kinds)
        ordered = sorted(tensors, key=lambda name: -kinds[name].itemsize)
        return {
            name: torch.empty(tensors[name].shape, dtype=kinds[name], device="meta")
            for name in ordered
        }

    def _begin(
        self, tensors: Mapping[str, Tensor], like: dict[str, Tensor], step: int, folder: Folder
    ) -> None:
        """Begins a run with a base. Where that fails, the next call does it."""
        self._like = {}
        self._held = {}
        held = {
            name: patterns_of(_whole(tensors[name], kind.dtype)).clone()
            for name, kind in like.items()
        }
        state = secrets.token_hex(
            8
        )  # another training may begin the same run at once: its differences are refused
        self._write_base(
            folder,
            self._run + 1,
            step,
            state,
            {name: tensor_of(held[name], like[name]) for name in like},
        )
        self._run += 1
        self.step = step
        self._state = state
        self._like = like
        self._held = held

    def _go_on(self, tensors: Mapping[str, Tensor], step: int, folder: Folder) -> None:
        """Writes a difference, and a base where it is time."""
        begin = starts(self._like)
        found = {}
        for name, kind in self._like.items():
            found[name] = changes(patterns_of(_whole(tensors[name], kind.dtype)), self._held[name])
        positions = torch.cat([changed.cpu() + begin[name] for name, (changed, _) in found.items()])
        deltas = torch.cat([moved.cpu() for _, moved in found.values()])
        about = {"after": self.step, "before": self._state, "count": len(positions)}
        file, size = self._write(
            folder, self._run, DIFFERENCE, step, encode_difference(positions, deltas), about
        )
        for name, (
            changed,
            moved,
        ) in found.items():  # only now: what no reader has is part of the next difference
            move(self._held[name], changed, moved)
        self.step = step
        self._state = file.checksum
        self._since += 1
        self._since_bytes += size
        if (
            self._since_bytes >= self._base_bytes
            if self._base_every is None
            else self._since >= self._base_every
        ):
            tensors = {name: tensor_of(held, self._like[name]) for name, held in self._held.items()}
            self._write_base(folder, self._run, step, self._state, tensors)

    def _write_base(
        self, folder: Folder, run: int, step: int, state: str, tensors: Mapping[str, Tensor]
    ) -> None:
        host = {name: tensor.cpu() for name, tensor in tensors.items()}
        _, self._base_bytes = self._write(folder, run, BASE, step, host, {"state": state})
        self._since = self._since_bytes = 0
        self._remove_old(folder, run)

    def _write(
        self,
        folder: Folder,
        run: int,
        kind: str,
        step: int,
        tensors: Mapping[str, Tensor],
        about: Mapping[str, Any],
    ) -> tuple[WeightFile, int]:
        content = list(shard_content(tensors, {"step": step, **about}))
        file = WeightFile.of(run, step, kind, content)
        size = sum(map(len, content))
        folder.write(file.name, content)
        self.bytes_written += size
        return file, size

    def _remove_old(self, folder: Folder, run: int) -> None:
        """Keeps the two newest bases of this run and what comes after the older: a reader of it has
        time to finish."""
        try:
            names = folder.names()
            bases = [
                file.step
                for file in WeightFile.known(names)
                if file.run == run and file.kind == BASE
            ] or [0]
            old = {
                file.name for file in _begun(names) if (file.run, file.step) < (run, bases[-2:][0])
            }
            for name in names:
                if name.removesuffix(".part") in old:
                    folder.remove(name)
        except OSError as error:
            _log.warning("old files of the weight feed stay: %s", error)


def _begun(names: Iterable[str]) -> list[WeightFile]:
    """Files among `names`, and those of which a trainer that was killed wrote a part."""
    return WeightFile.known(name.removesuffix(".part") for name in names)


def _layout(tensors: Mapping[str, Tensor]) -> list[tuple[str, torch.dtype, torch.Size]]:
    return [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]


def _whole(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Tensor in a type, whole: a collective where it is sharded.

    Shards are rounded before they travel.
    """
    cast = tensor.detach().to(dtype)
    if isinstance(cast, DTensor):
        return cast.full_tensor()
    return cast
