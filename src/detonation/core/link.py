"""Link: one axis of the cluster. Carries tensors, starts one collective, counts its bytes; knows no algorithm."""

import json
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from detonation.core.traffic import sent
from detonation.core.wire import Axis, Group, Wire


class Mismatch(ValueError):
    """Replicas were started with different settings, versions or weights."""


class Link:
    """The replicas along one mesh axis, as one of them sees it.

    bytes_sent: what this rank has handed to the network for the others, by the arithmetic of ring collectives.
    waited_s: for how long it has stood still because an exchange was not over. Over a network library that waits on
    the device (NCCL) the host does not stand still, and what the device waits for is not in it.
    """

    def __init__(self, axis: Axis) -> None:
        self._wire: Wire = Group(axis) if isinstance(axis, DeviceMesh) else axis
        self.replicas, self.replica = self._wire.size(), self._wire.replica
        self.bytes_sent = 0
        self.waited_s = 0.0

    def reduce(self, values: Tensor) -> Callable[[], Tensor]:
        """Starts adding `values` up over all replicas; the waiter returns the sum, bitwise the same on each.

        `values` belongs to the link from here on.
        """
        self.bytes_sent += sent("all-reduce", values.nbytes, self.replicas)
        return self._timed(self._wire.reduce(values))

    def gather(self, parts: Sequence[Tensor]) -> Callable[[], list[list[Tensor]]]:
        """Starts sending `parts` to all replicas as one byte buffer; the waiter returns everyone's, in replica order.

        The shapes and types of `parts` must be the same on all replicas.
        """
        mine = _bytes(parts)
        self.bytes_sent += sent("all-gather", len(mine), self.replicas)
        arrived = self._timed(self._wire.gather(mine))
        return lambda: [_unpack(row, parts) for row in arrived()]

    def swap(self, slices: Sequence[Sequence[Tensor]]) -> Callable[[], list[list[Tensor]]]:
        """Starts sending `slices[r]` to replica r; the waiter returns what each has for this one, in replica order.

        The shapes and types must be the same for all slices and replicas.
        """
        mine = torch.cat([_bytes(parts) for parts in slices])
        self.bytes_sent += len(mine) // self.replicas * (self.replicas - 1)
        arrived = self._timed(self._wire.swap(mine))
        return lambda: [_unpack(row, slices[0]) for row in arrived()]

    def agree(self, description: Mapping[str, str], device: torch.device) -> None:
        """Raises `Mismatch` on every replica where their descriptions differ, naming what does. Not counted as sent.

        Messages of different sizes would end the receiver's process inside the network library, so this comes before
        the first of them, in messages of a size that all know.
        """
        mine = json.dumps(description).encode()
        sizes = self._gather_bytes(len(mine).to_bytes(8, "big"), device)
        longest = max(int.from_bytes(size, "big") for size in sizes)
        texts = self._gather_bytes(mine.ljust(longest), device)
        described = [json.loads(text) for text in texts]
        differences = [d for other in range(1, self.replicas) for d in _differences(described, other)]
        if differences:
            more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
            remedy = ". Start all with the same settings, versions and weights (detonation.shard makes weights equal)"
            raise Mismatch("replicas differ: " + "; ".join(differences[:3]) + more + remedy)

    def _timed(self, wait: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def timed() -> Tensor:
            began = time.perf_counter()
            arrived = wait()
            self.waited_s += time.perf_counter() - began
            return arrived

        return timed

    def _gather_bytes(self, content: bytes, device: torch.device) -> list[bytes]:
        counted, waited = self.bytes_sent, self.waited_s
        buffer = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
        rows = self.gather([buffer])()
        self.bytes_sent, self.waited_s = counted, waited
        return [bytes(row[0].tolist()) for row in rows]


def _bytes(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])


def _unpack(row: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts, start = [], 0
    for part in like:
        piece = row[start : start + part.nbytes]
        parts.append(piece.clone().view(part.dtype).view(part.shape))  # a clone starts at an aligned address
        start += part.nbytes
    return parts


def _differences(described: Sequence[Mapping[str, str]], other: int) -> list[str]:
    first, second = described[0], described[other]
    return [
        f"replica {other} has {key}={second.get(key, 'nothing')}, replica 0 has {key}={first.get(key, 'nothing')}"
        for key in dict.fromkeys([*first, *second])
        if first.get(key) != second.get(key)
    ]
