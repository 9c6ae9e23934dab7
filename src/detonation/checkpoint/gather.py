"""Texts from every rank to every rank, and volumes: the ranks that see the same directory."""

import contextlib
import logging
import os
import platform
import re
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from detonation.checkpoint.files import disk
from detonation.core.flat.tensors import local
from detonation.core.link.elastic_communicator import ElasticCommunicator, TextExchange
from detonation.core.optimizer.replicated import Replicated
from detonation.whole_files import PROBE


@dataclass(frozen=True)
class Texts:
    """Texts between all ranks of `group`, by default the default group, whose backend can send
    tensors of `device`."""

    device: torch.device
    group: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        return dist.get_world_size()

    def gather(self, text: str) -> list[str]:
        """The texts of all ranks, by rank. Collective."""
        if self.world_size == 1:
            return [text]
        content = os.fsencode(text)
        count = torch.tensor([len(content)], device=self.device)
        counts = [torch.empty_like(count) for _ in range(self.world_size)]
        dist.all_gather(counts, count, group=self.group)
        longest = max(int(c) for c in counts)
        if not longest:
            return [""] * len(counts)
        buffer = torch.frombuffer(bytearray(content.ljust(longest)), dtype=torch.uint8).to(
            self.device
        )
        rows = [torch.empty_like(buffer) for _ in counts]
        dist.all_gather(rows, buffer, group=self.group)
        return [
            os.fsdecode(bytes(row.tolist())[: int(c)]) for row, c in zip(rows, counts, strict=True)
        ]

    def broadcast(self, text: str) -> str:
        """The `text` of rank 0, on all ranks. Collective."""
        content = os.fsencode(text)
        if self.world_size == 1 or not (count := self._of_first([len(content)], torch.int64)[0]):
            return text if self.rank == 0 else ""
        # every rank needs a buffer of the same size; only that of rank 0 counts
        return os.fsdecode(bytes(self._of_first(content.ljust(count)[:count], torch.uint8)))

    def _of_first(self, values: Sequence[int], dtype: torch.dtype) -> list[int]:
        """The `values` of rank 0. Every rank has equally many."""
        tensor = torch.tensor(list(values), dtype=dtype, device=self.device)
        dist.broadcast(tensor, src=0, group=self.group)
        return tensor.tolist()


def elastic_axis(optimizer: Replicated) -> ElasticCommunicator | None:
    """The axis between the replicas of `optimizer`, if they may be lost."""
    found = (axis for axis, _ in optimizer.levels if isinstance(axis, ElasticCommunicator))
    return next(found, None)


def texts_between(model: nn.Module, optimizer: Replicated) -> TextExchange:
    """Texts between all ranks that train `model`: those of an elastic axis, or of the default
    group."""
    elastic = elastic_axis(optimizer)
    return elastic.texts() if elastic is not None else Texts(device_of(model))


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's parameters, which its process group can send from."""
    return next(local(parameter).device for parameter in model.parameters())


@dataclass(frozen=True)
class Volumes:
    """The ranks of each directory. leaders: for each rank the lowest rank that sees the same
    directory."""

    leaders: tuple[int, ...]

    @property
    def shared(self) -> bool:
        return len(set(self.leaders)) == 1

    def leads(self, rank: int) -> bool:
        """True for the rank that makes and removes directories for all ranks of its volume."""
        return self.leaders[rank] == rank

    def number(self, rank: int) -> int:
        """The volume of `rank`, counted from 0, which is that of rank 0."""
        return sorted(set(self.leaders)).index(self.leaders[rank])

    def ranks_text(self) -> str:
        """The ranks of each volume.

        >>> Volumes((0, 0, 2, 3, 2)).ranks_text()
        'ranks 0-1; ranks 2, 4; ranks 3'
        """
        members = {
            leader: [r for r, mine in enumerate(self.leaders) if mine == leader]
            for leader in self.leaders
        }
        return "; ".join(f"ranks {ranges(members[leader])}" for leader in sorted(members))


def survey(directory: Path, texts: TextExchange) -> Volumes:
    """Finds out which ranks see the same `directory`, by files that are gone afterwards. Collective
    by `texts`.

    Rank 0 writes a file under a random name, and all ranks look for it. Only ranks that do not see
    it make their directory and write a file, too. Then each looks again for the file of rank 0,
    because the cache of a network file system may have hidden a directory that was made a moment
    ago.

    Raises `OSError` on all ranks where one cannot write, with the host and the reason.
    """
    rank, world_size, gather = texts.rank, texts.world_size, texts.gather
    if world_size == 1:
        return Volumes((0,))
    token = gather(secrets.token_hex(8))[0]
    leaders, writers = [-1] * world_size, [0]
    try:
        while -1 in leaders:
            problem = _written(_probe(directory, token, rank)) if rank in writers else ""
            if first := next((text for text in gather(problem) if text), ""):
                raise OSError(0, first)
            seen = (
                leaders[rank]
                if leaders[rank] >= 0
                else _lowest_seen(directory, token, [0, *writers])
            )
            leaders = [
                int(text) for text in gather(str(rank if seen < 0 and rank in writers else seen))
            ]
            writers = [other for other, leader in enumerate(leaders) if leader < 0]
    finally:
        with contextlib.suppress(OSError):
            _probe(directory, token, rank).unlink()
    return Volumes(tuple(leaders))


def warn_unless_shared(directory: Path, model: nn.Module) -> Volumes:
    """Makes `directory` for a library that saves files of its own, and warns where nodes do not
    share it. Collective.

    Each node has its own part of our state. The library's own part is missing somewhere, which it
    says when it resumes. Raises `OSError` on all ranks where one cannot write there.
    """
    volumes = survey(directory, Texts(device_of(model)))
    if dist.get_rank() == 0 and not volumes.shared:
        logging.getLogger("detonation").warning(
            "%s is not one directory for all ranks (%s): before a checkpoint is resumed, copy to"
            " each node what it lacks from the others (rsync -a --ignore-existing)",
            directory,
            volumes.ranks_text(),
        )
    return volumes


class CheckpointsElsewhere:
    """The checkpoints of a library on disks of other nodes, of which it removes old ones on that of
    rank 0 alone.

    All ranks make it before training, with the line of `warn_unless_shared`. Only what rank 0 had
    and has no more is removed, on each other disk once, and only where it holds our `part`. named:
    What checkpoints are called.
    """

    def __init__(
        self, directory: Path, model: nn.Module, named: re.Pattern[str], part: str
    ) -> None:
        self._directory, self._named, self._part = directory, named, part
        self._texts, self._volumes = Texts(device_of(model)), warn_unless_shared(directory, model)
        self._before = self._names()

    def follow(self) -> None:
        """Removes elsewhere what rank 0 has removed since the last call. Collective."""
        if self._volumes.shared:
            return
        here = self._names()
        removed = self._texts.broadcast("\n".join(sorted(self._before - here))).split()
        self._before, rank = here, self._texts.rank
        if self._volumes.number(rank) and self._volumes.leads(rank):
            for name in here.intersection(removed):
                if (self._directory / name / self._part).is_dir():
                    shutil.rmtree(self._directory / name, ignore_errors=True)

    def _names(self) -> set[str]:
        found = (
            each for each in self._directory.iterdir() if each.is_dir() and not each.is_symlink()
        )
        return {each.name for each in found if self._named.fullmatch(each.name)}


def _probe(directory: Path, token: str, rank: int) -> Path:
    return directory / f"{PROBE}{token}-{rank}"


def _written(path: Path) -> str:
    """Writes an empty file; the reason where it cannot."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        disk.touch(path)
    except OSError as error:
        return f"{error.strerror}, in {path.parent} on {platform.node()}"
    return ""


def _lowest_seen(directory: Path, token: str, writers: Sequence[int]) -> int:
    """The lowest of `writers` whose file is in `directory` here; -1 where there is none."""
    for writer in writers:
        try:
            _probe(directory, token, writer).stat()
        except OSError:
            continue
        return writer
    return -1


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers with runs drawn together.

    >>> ranges([0, 1, 2, 3, 8])
    '0-3, 8'
    """
    runs = [
        [number for _, number in run]
        for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
