"""Volumes: the ranks that see the same directory. Nodes without a shared file system have one each."""

import contextlib
import platform
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from detonation.checkpoint.files import disk
from detonation.core.link.elastic_communicator import TextExchange


@dataclass(frozen=True)
class Volumes:
    """The ranks of each directory. leaders: for each rank the lowest rank that sees the same directory."""

    leaders: tuple[int, ...]

    @property
    def shared(self) -> bool:
        """True where all ranks see one directory."""
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
        members = {leader: [r for r, mine in enumerate(self.leaders) if mine == leader] for leader in self.leaders}
        return "; ".join(f"ranks {ranges(members[leader])}" for leader in sorted(members))


def survey(directory: Path, texts: TextExchange) -> Volumes:
    """Finds out which ranks see the same `directory`, by files that are gone afterwards. Collective by `texts`.

    Rank 0 writes a file under a random name, and all ranks look for it. Only ranks that do not see it make their
    directory and write a file, too. Then each looks again for the file of rank 0, because the cache of a network file
    system may have hidden a directory that was made a moment ago.

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
            seen = leaders[rank] if leaders[rank] >= 0 else _lowest_seen(directory, token, [0, *writers])
            leaders = [int(text) for text in gather(str(rank if seen < 0 and rank in writers else seen))]
            writers = [other for other, leader in enumerate(leaders) if leader < 0]
    finally:
        with contextlib.suppress(OSError):
            _probe(directory, token, rank).unlink()
    return Volumes(tuple(leaders))


def _probe(directory: Path, token: str, rank: int) -> Path:
    return directory / f"{disk.PROBE}{token}-{rank}"


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
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
