"""The weight feed: any training loop calls the feed after a step, and readers get the exact weights
of that step.
"""

import logging
import secrets
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from numbers import Integral
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
    """Publishes the weights of a model as files: bases (all weights), and exact differences between
    steps. See `Feed.of_weights`.

    step: the last published step; -1 if no step was published. bytes_written: bytes of all written
    files. trouble: the reason why the last call did not write a file; "" if it wrote all files.
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
        self._folder: Folder | None = None
        self._run = 0
        if target is not None:
            self._folder = folder_at(target)
            if isinstance(self._folder, LocalFolder):
                self._folder.make()
            self._run = max((file.run for file in _begun(self._folder.names())), default=0)
        self._like: dict[str, Tensor] = {}
        self._held: dict[str, Tensor] = {}  # bit patterns of the weights that were last published
        # the checksum of the last difference; a random text before the first difference of a run
        self._state = ""
        self._since = self._since_bytes = self._base_bytes = 0
        self.step = -1
        self.bytes_written = 0
        self.trouble = ""

    @torch.no_grad()
    def publish(self, step: int) -> int:
        """Writes the changes since the last call, after `step` steps of training. Returns the
        number of written bytes.

        Each rank of a sharded model must call this method, because the shards are gathered. If
        writing fails, for example on a full disk, training continues: this call logs a warning,
        sets `trouble` and returns 0, and the next call publishes all changes. If `step` is not
        above the last published step, training returned to an earlier state, and readers get a new
        base.

        Raises `ValueError` if `step` is no integer or is negative, or if safetensors lacks the type
        of a tensor, such as complex128.
        """
        if not isinstance(step, Integral) or step < 0:
            raise ValueError(f"step is {step!r}, must be a whole number of at least 0")
        step = int(step)  # `json` cannot encode integers of NumPy
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
            self.trouble = f"a file of step {step} could not be written: {error}"
            _log.warning("%s", self.trouble)
        return self.bytes_written - before

    def close(self, ended: bool = True) -> None:
        """Announces to readers that training has ended. Does nothing if `ended` is False."""
        if ended and self._folder is not None and self.step >= 0:
            try:
                self._write(self._folder, self._run, END, self.step, {}, {})
            except OSError as error:
                self.trouble = f"the end of training could not be published: {error}"
                _log.warning("%s", self.trouble)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close(ended=error is None)

    def _published(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the published tensors by name, on the meta device: their dtypes and shapes
        without values. Their order is the order in the files: wide dtypes first.
        """
        kinds = {}
        for name, tensor in tensors.items():
            kinds[name] = tensor.dtype
            if self._dtype is not None and tensor.is_floating_point():
                kinds[name] = self._dtype
        require_types(kinds)
        ordered = sorted(tensors, key=lambda name: -kinds[name].itemsize)
        return {
            name: torch.empty(tensors[name].shape, dtype=kinds[name], device="meta")
            for name in ordered
        }

    def _begin(
        self, tensors: Mapping[str, Tensor], like: dict[str, Tensor], step: int, folder: Folder
    ) -> None:
        """Begins a new run of files with a base. If the base cannot be written, the next call of
        `publish` tries again.
        """
        self._like = {}
        self._held = {}
        held = {
            name: patterns_of(_whole(tensors[name], kind.dtype)).clone()
            for name, kind in like.items()
        }
        # Another trainer may write to this folder now, with an equal run number in its file names.
        # The random `state` in this base lets readers reject the differences of the other trainer.
        state = secrets.token_hex(8)
        base = {name: tensor_of(held[name], like[name]) for name in like}
        self._write_base(folder, self._run + 1, step, state, base)
        self._run += 1
        self.step = step
        self._state = state
        self._like = like
        self._held = held

    def _go_on(self, tensors: Mapping[str, Tensor], step: int, folder: Folder) -> None:
        """Writes a difference, and after it a new base if enough differences have accumulated."""
        begin = starts(self._like)
        found = {}
        for name, kind in self._like.items():
            now = patterns_of(_whole(tensors[name], kind.dtype))
            found[name] = changes(now, self._held[name])
        positions = torch.cat([changed.cpu() + begin[name] for name, (changed, _) in found.items()])
        deltas = torch.cat([moved.cpu() for _, moved in found.values()])
        about = {"after": self.step, "before": self._state, "count": len(positions)}
        file, size = self._write(
            folder, self._run, DIFFERENCE, step, encode_difference(positions, deltas), about
        )
        # after a failed write `_held` is unchanged, so the next difference includes these changes
        for name, (changed, moved) in found.items():
            move(self._held[name], changed, moved)
        self.step = step
        self._state = file.checksum
        self._since += 1
        self._since_bytes += size
        if self._base_every is None:
            due = self._since_bytes >= self._base_bytes
        else:
            due = self._since >= self._base_every
        if due:
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
        """Removes the files before the second newest base of this run. The second newest base
        stays, so that a reader that has begun to read this base has time to finish.
        """
        try:
            names = folder.names()
            files = WeightFile.known(names)
            bases = [file.step for file in files if file.run == run and file.kind == BASE]
            first = (run, min(bases[-2:], default=0))
            old = {file.name for file in _begun(names) if (file.run, file.step) < first}
            for name in names:
                if name.removesuffix(".part") in old:
                    folder.remove(name)
        except OSError as error:
            _log.warning("old files of the weight feed could not be removed: %s", error)


def _begun(names: Iterable[str]) -> list[WeightFile]:
    """Returns the weight files among `names`, including incomplete files of a trainer that was
    killed.
    """
    return WeightFile.known(name.removesuffix(".part") for name in names)


def _layout(tensors: Mapping[str, Tensor]) -> list[tuple[str, torch.dtype, torch.Size]]:
    return [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]


def _whole(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the whole `tensor`, converted to `dtype`. Collective if `tensor` is sharded.

    Shards are converted before they are gathered.
    """
    cast = tensor.detach().to(dtype)
    if isinstance(cast, DTensor):
        return cast.full_tensor()
    return cast
