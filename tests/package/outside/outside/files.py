"""A transport over files: replicas that share a folder, of a network disk, and no other network."""

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from detonation.extend import Communicator


class Files(Communicator):
    """One replica's end: it writes its messages into `folder`, and reads those of the others.

    All replicas start collectives in one order, so the number of a collective names its files.
    """

    def __init__(self, folder: str, replica: int, replicas: int) -> None:
        self.replica = replica
        self._folder = Path(folder)
        self._replicas = replicas
        self._started = 0

    def size(self) -> int:
        return self._replicas

    def all_reduce(self, values: Tensor) -> Callable[[], Tensor]:
        arriving = self.all_gather(values.contiguous().view(-1).view(torch.uint8))

        def total() -> Tensor:
            rows = arriving().view(values.dtype)
            return rows.sum(0, dtype=values.dtype).view(values.shape)  # alike on all replicas

        return total

    def all_gather(self, mine: Tensor) -> Callable[[], Tensor]:
        number = self._started
        self._started += 1
        path = self._path(number, self.replica)
        part = path.with_suffix(".part")
        part.write_bytes(mine.cpu().numpy().tobytes())
        part.rename(path)  # whole, or not there
        return lambda: torch.stack([self._read(number, r) for r in range(self._replicas)])

    def all_to_all(self, mine: Tensor) -> Callable[[], Tensor]:
        arriving = self.all_gather(mine)
        return lambda: arriving().view(self._replicas, self._replicas, -1)[:, self.replica]

    def _path(self, number: int, replica: int) -> Path:
        return self._folder / f"{number}-{replica}"

    def _read(self, number: int, replica: int) -> Tensor:
        path = self._path(number, replica)
        while not path.exists():
            time.sleep(0.001)
        return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
