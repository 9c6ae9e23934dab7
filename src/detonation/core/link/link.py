"""Link: one axis of the cluster. Carries tensors, starts one collective, counts its bytes; knows no algorithm."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from detonation.core.link.communicator import Axis, Group, Wire
from detonation.core.link.hierarchical import Laned
from detonation.core.schemes.traffic import sent, share


class Mismatch(ValueError):
    """Replicas were started with different settings, versions or weights."""


@dataclass(frozen=True)
class Arrived:
    """What every replica sent, in replica order. spent: says that nobody will look at it again."""

    parts: list[list[Tensor]]
    spent: Callable[[], None]


class Link:
    """The replicas along one mesh axis, as one of them sees it.

    lanes: the axis inside the node, where all its ranks have the same to say: each then carries a part of it.
    bytes_sent: what this rank has handed to the network for the others, by the arithmetic of ring collectives; over
    the axis itself, not to its lanes.
    waited_s: for how long it has stood still because an exchange was not over. Over a network library that waits on
    the device (NCCL) the host does not stand still, and what the device waits for is not in it.
    """

    def __init__(self, axis: Axis, lanes: Axis | None = None) -> None:
        slow, self._fast = _wire(axis), None if lanes is None else _wire(lanes)
        self._slow, self._wire = slow, slow if self._fast is None else Laned(slow, self._fast)
        self.replicas, self.replica = slow.size(), slow.replica
        self.lanes = 1 if self._fast is None else self._fast.size()
        self.bytes_sent = 0
        self.waited_s = 0.0

    def reduce(self, values: Tensor) -> Callable[[], Tensor]:
        """Starts adding `values` up over all replicas; the waiter returns the sum, bitwise the same on each.

        `values` belongs to the link from here on.
        """
        self.bytes_sent += sent("all-reduce", share(values.nbytes, self.lanes, values.itemsize), self.replicas)
        return self._timed(self._wire.reduce(values))

    def gather(self, parts: Sequence[Tensor]) -> "Callable[[], Arrived]":
        """Starts sending `parts` to all replicas as one byte buffer; the waiter returns everyone's.

        The shapes and types of `parts` must be the same on all replicas.
        """
        mine = _bytes(parts)
        self.bytes_sent += sent("all-gather", share(len(mine), self.lanes), self.replicas)
        arrived = self._timed(self._wire.gather(mine))

        def wait() -> Arrived:
            rows = arrived()
            return Arrived([_unpack(row, parts) for row in rows], partial(self._spent, rows))

        return wait

    def _spent(self, rows: Tensor) -> None:
        if isinstance(self._wire, Group):
            self._wire.take_back(rows)

    def swap(self, slices: Sequence[Sequence[Tensor]]) -> Callable[[], list[list[Tensor]]]:
        """Starts sending `slices[r]` to replica r; the waiter returns what each has for this one, in replica order.

        The shapes and types must be the same for all slices and replicas.
        """
        mine = torch.cat([_bytes(parts) for parts in slices])
        self.bytes_sent += share(len(mine) // self.replicas, self.lanes) * (self.replicas - 1)
        arrived = self._timed(self._wire.swap(mine))
        return lambda: [_unpack(row, slices[0]) for row in arrived()]

    def collect(self, words: Tensor) -> Tensor:
        """Everyone's `words`, of which all have equally many, in replica order. Not counted as sent.

        Lanes may differ here, where their messages must not: those of a replica are mixed into one word, so that all
        ranks learn of it.
        """  # [n] int64 -> [replicas, n]
        if self._fast is not None:
            lanes = _everyones(self._fast, words)  # [lanes, n]
            words = (lanes * torch.arange(1, 2 * len(lanes), 2, device=words.device)[:, None]).sum(0)
        return _everyones(self._slow, words)

    def tell(self, value: Any, device: torch.device) -> list[Any]:
        """Everyone's `value` (of JSON), in replica order. Not counted as sent."""
        return _told(self._slow, value, device)

    def agree(self, description: Mapping[str, str], device: torch.device, notes: Mapping[str, str]) -> None:
        """Raises `Mismatch` on every rank where descriptions differ, naming what does. Not counted as sent.

        All lanes of a replica must describe the same, too. notes: what an error shall say beside an entry of the
        description; not compared.

        Messages of different sizes would end the receiver's process inside the network library, so this comes before
        the first of them, in messages of a size that all know.
        """
        mine = [dict(description), dict(notes)]
        lanes = [mine] if self._fast is None else _told(self._fast, mine, device)
        ranks = [
            (f"replica {replica}" if self._fast is None else f"replica {replica} lane {lane}", described)
            for replica, theirs in enumerate(_told(self._slow, lanes, device))
            for lane, described in enumerate(theirs)
        ]
        differences = [difference for other in ranks[1:] for difference in _differences(ranks[0], other)]
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


def _wire(axis: Axis) -> Wire:
    return Group(axis) if isinstance(axis, DeviceMesh) else axis


def _everyones(wire: Wire, words: Tensor) -> Tensor:
    """What each end of the wire says in place of `words`."""  # [n] -> [ends, n]
    return wire.gather(words.contiguous().view(torch.uint8))().reshape(-1).view(words.dtype).view(wire.size(), -1)


def _told(wire: Wire, value: Any, device: torch.device) -> list[Any]:
    """Everyone's `value` (of JSON), in messages of sizes that all know."""

    def gather(content: bytes) -> list[bytes]:
        rows = wire.gather(torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device))()
        return [bytes(row.tolist()) for row in rows]

    mine = json.dumps(value).encode()
    sizes = gather(len(mine).to_bytes(8, "big"))
    longest = max(int.from_bytes(size, "big") for size in sizes)
    return [json.loads(text) for text in gather(mine.ljust(longest))]


def _bytes(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])


def _unpack(row: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts, start = [], 0
    for part in like:
        piece = row[start : start + part.nbytes]
        if piece.storage_offset() % part.itemsize:  # a clone starts at an aligned address
            piece = piece.clone()
        parts.append(piece.view(part.dtype).view(part.shape))
        start += part.nbytes
    return parts


_Rank = tuple[str, Sequence[Mapping[str, str]]]
"""What a rank is called, its description, and the notes to it."""


def _differences(one: _Rank, other: _Rank) -> list[str]:
    (_, (mine, _)), (_, (theirs, _)) = one, other
    return [
        f"{_said(other, key)}, {_said(one, key)}"
        for key in dict.fromkeys([*mine, *theirs])
        if mine.get(key) != theirs.get(key)
    ]


def _said(rank: _Rank, key: str) -> str:
    name, (description, notes) = rank
    note = f" ({notes[key]})" if key in notes else ""
    return f"{name} has {key}={description.get(key, 'nothing')}{note}"
