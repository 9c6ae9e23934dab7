"""Link: one axis of the cluster. Carries tensors, starts one collective, counts its bytes; knows no algorithm."""

import json
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from detonation.core.traffic import sent

# all_gather_into_tensor was renamed; the old name warns where the new one exists
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Mismatch(ValueError):
    """Replicas were started with different settings, versions or weights."""


class Link:
    """The replicas along one mesh axis, as one of them sees it.

    bytes_sent: what this rank has handed to the network for the others, by the arithmetic of ring collectives.
    """

    def __init__(self, axis: DeviceMesh) -> None:
        if axis.ndim != 1:
            raise ValueError(f'the axis has {axis.ndim} dimensions {axis.mesh_dim_names}: pass one, mesh["replicate"]')
        self._group = axis.get_group()
        self.replicas = axis.size()
        self.replica = axis.get_local_rank()
        self.bytes_sent = 0
        # a gloo group reads host memory only: a message from an accelerator takes a detour
        self._transport = torch.device("cpu") if dist.get_backend(self._group) == "gloo" else None

    def reduce(self, values: Tensor) -> Callable[[], Tensor]:
        """Starts adding `values` up over all replicas; the waiter returns the sum, bitwise the same on each.

        `values` belongs to the link from here on.
        """
        buffer = values.to(self._transport or values.device)
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        self.bytes_sent += sent("all-reduce", buffer.nbytes, self.replicas)

        def wait() -> Tensor:
            work.wait()
            return buffer.to(values.device)

        return wait

    def gather(self, parts: Sequence[Tensor]) -> Callable[[], list[list[Tensor]]]:
        """Starts sending `parts` to all replicas as one byte buffer; the waiter returns everyone's, in replica order.

        The shapes and types of `parts` must be the same on all replicas.
        """
        device = parts[0].device
        mine = _bytes(parts).to(self._transport or device)
        all_of_them = mine.new_empty(self.replicas * len(mine))
        work = _all_gather(all_of_them, mine, group=self._group, async_op=True)
        self.bytes_sent += sent("all-gather", len(mine), self.replicas)

        def wait() -> list[list[Tensor]]:
            work.wait()
            return [_unpack(row, parts) for row in all_of_them.to(device).view(self.replicas, -1)]

        return wait

    def swap(self, slices: Sequence[Sequence[Tensor]]) -> Callable[[], list[list[Tensor]]]:
        """Starts sending `slices[r]` to replica r; the waiter returns what each has for this one, in replica order.

        The shapes and types must be the same for all slices and replicas.
        """
        device = slices[0][0].device
        mine = torch.cat([_bytes(parts) for parts in slices]).to(self._transport or device)
        theirs = torch.empty_like(mine)
        work = dist.all_to_all_single(theirs, mine, group=self._group, async_op=True)
        self.bytes_sent += len(mine) // self.replicas * (self.replicas - 1)

        def wait() -> list[list[Tensor]]:
            work.wait()
            return [_unpack(row, slices[0]) for row in theirs.to(device).view(self.replicas, -1)]

        return wait

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

    def _gather_bytes(self, content: bytes, device: torch.device) -> list[bytes]:
        counted = self.bytes_sent
        buffer = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
        rows = self.gather([buffer])()
        self.bytes_sent = counted
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
