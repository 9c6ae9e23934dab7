"""Exchanges texts between all ranks, and finds volumes: the ranks that share a directory."""

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
from detonation.core.link import ElasticCommunicator, TextExchange
from detonation.core.optimizer import Replicated
from detonation.whole_files import PROBE, make_directories


@dataclass(frozen=True)
class Texts:
    """Exchanges texts between all ranks of `group`; None is the default group.

    The backend of the group must support tensors on `device`.
    """

    device: torch.device
    group: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        return dist.get_world_size()

    def gather(self, text: str) -> list[str]:
        """Sends `text` to all ranks, and returns the texts of all ranks in rank order. All ranks
        must call this function together."""
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
        """Returns the `text` of rank 0 on all ranks. All ranks must call this function together."""
        if self.world_size == 1:
            return text
        content = os.fsencode(text)
        count = self._of_first([len(content)], torch.int64)[0]
        if not count:
            return ""
        # rank 0 sends its text; every other rank passes equally many bytes, which the text replaces
        return os.fsdecode(bytes(self._of_first(content.ljust(count)[:count], torch.uint8)))

    def _of_first(self, values: Sequence[int], dtype: torch.dtype) -> list[int]:
        """Returns the `values` of rank 0. All ranks must pass the same number of values."""
        tensor = torch.tensor(list(values), dtype=dtype, device=self.device)
        dist.broadcast(tensor, src=0, group=self.group)
        return tensor.tolist()


def elastic_axis(optimizer: Replicated) -> ElasticCommunicator | None:
    """The axis between the replicas of `optimizer`, if training survives the loss of replicas; else
    None."""
    found = (axis for axis, _ in optimizer.levels if isinstance(axis, ElasticCommunicator))
    return next(found, None)


def texts_between(model: nn.Module, optimizer: Replicated) -> TextExchange:
    """An object that exchanges texts between all ranks that train `model`. It uses the axis that
    survives the loss of replicas, if training has such an axis.
    """
    elastic = elastic_axis(optimizer)
    if elastic is not None:
        return elastic.texts()
    return Texts(device_of(model))


def device_of(model: nn.Module) -> torch.device:
    """Device of the model's parameters. The model's process group can send tensors on it."""
    return next(local(parameter).device for parameter in model.parameters())


@dataclass(frozen=True)
class Volumes:
    """The volumes of a run: a volume is a directory with the ranks that see it. leaders: for each
    rank, the lowest rank that sees the same directory.
    """

    leaders: tuple[int, ...]

    @property
    def shared(self) -> bool:
        return len(set(self.leaders)) == 1

    def leads(self, rank: int) -> bool:
        """True for the rank that creates and removes directories for all ranks of its volume."""
        return self.leaders[rank] == rank

    def number(self, rank: int) -> int:
        """Number of the volume of `rank`; rank 0 has volume 0."""
        return sorted(set(self.leaders)).index(self.leaders[rank])

    def ranks_text(self) -> str:
        """Names the ranks of each volume.

        >>> Volumes((0, 0, 2, 3, 2)).ranks_text()
        'ranks 0-1; ranks 2, 4; ranks 3'
        """
        members: dict[int, list[int]] = {leader: [] for leader in sorted(self.leaders)}
        for rank, leader in enumerate(self.leaders):
            members[leader].append(rank)
        return "; ".join(f"ranks {ranges(each)}" for each in members.values())


def survey(directory: Path, texts: TextExchange) -> Volumes:
    """Finds out which ranks share `directory`, by writing temporary files. All ranks of `texts`
    must call this function together.

    Rank 0 writes a file under a random name, and all ranks look for this file. Each rank that does
    not find the file creates `directory` and writes a file, too. Then this rank looks for rank 0's
    file again, because the cache of a network file system may have hidden a new directory.

    Raises `OSError` on all ranks, with the host and the reason, if one of them cannot write.
    """
    rank = texts.rank
    world_size = texts.world_size
    gather = texts.gather
    if world_size == 1:
        return Volumes((0,))
    token = gather(secrets.token_hex(8))[0]
    leaders = [-1] * world_size
    writers = [0]
    try:
        while -1 in leaders:
            problem = ""
            if rank in writers:
                problem = _written(_probe(directory, token, rank))
            for found in filter(None, gather(problem)):
                raise OSError(0, found)
            seen = leaders[rank]
            if seen < 0:
                seen = _lowest_seen(directory, token, [0, *writers])
            if seen < 0 and rank in writers:
                seen = rank
            leaders = [int(text) for text in gather(str(seen))]
            writers = [other for other, leader in enumerate(leaders) if leader < 0]
    finally:
        with contextlib.suppress(OSError):
            _probe(directory, token, rank).unlink()
    return Volumes(tuple(leaders))


def warn_unless_shared(directory: Path, model: nn.Module) -> Volumes:
    """Creates `directory` for a library that saves its own files, and warns if nodes do not share
    it. All ranks must call this function together.

    If nodes do not share the directory, each node has the part of DeToNATION's state that it needs,
    but not all files of the library. Raises `OSError` on all ranks if a rank cannot write there.
    """
    volumes = survey(directory, Texts(device_of(model)))
    if dist.get_rank() == 0 and not volumes.shared:
        logging.getLogger("detonation").warning(
            "%s is not one directory for all ranks (%s): before you resume a checkpoint, copy to"
            " each node the files that only other nodes have (rsync -a --ignore-existing)",
            directory,
            volumes.ranks_text(),
        )
    return volumes


class CheckpointsElsewhere:
    """Removes a library's old checkpoints on nodes that do not share rank 0's disk.

    The library itself removes checkpoints only on rank 0's disk. All ranks construct this object
    before training; the constructor warns like `warn_unless_shared`. The object removes a
    checkpoint only if rank 0 had this checkpoint and has removed it. The directory of the
    checkpoint must also contain `part`.

    named: a pattern for the names of checkpoints. part: the subdirectory that DeToNATION adds to a
    checkpoint.
    """

    def __init__(
        self, directory: Path, model: nn.Module, named: re.Pattern[str], part: str
    ) -> None:
        self._directory = directory
        self._named = named
        self._part = part
        self._texts = Texts(device_of(model))
        self._volumes = warn_unless_shared(directory, model)
        self._before = self._names()

    def follow(self) -> None:
        """Removes the checkpoints that rank 0 has removed since the last call. All ranks must call
        this function together."""
        if self._volumes.shared:
            return
        here = self._names()
        removed = self._texts.broadcast("\n".join(sorted(self._before - here))).split()
        self._before = here
        rank = self._texts.rank
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
    """Writes an empty file. Returns the reason if writing fails, else ""."""
    try:
        make_directories(path.parent)
        disk.touch(path)
    except OSError as error:
        return f"{error.strerror}, in {path.parent} on {platform.node()}"
    return ""


def _lowest_seen(directory: Path, token: str, writers: Sequence[int]) -> int:
    """The lowest of `writers` whose file this rank finds in `directory`; -1 if there is none."""
    for writer in writers:
        try:
            _probe(directory, token, writer).stat()
        except OSError:
            continue
        return writer
    return -1


def ranges(numbers: Sequence[int]) -> str:
    """Formats ascending numbers as text, and consecutive numbers as ranges.

    >>> ranges([0, 1, 2, 3, 8])
    '0-3, 8'
    """
    words = []
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        first, *rest = [number for _, number in run]
        words.append(f"{first}-{rest[-1]}" if rest else str(first))
    return ", ".join(words)
