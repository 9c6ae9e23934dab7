"""Lanes: the ranks of a node share what all of them have to say, so that it crosses the slow link once a node."""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from detonation.core.link.communicator import Wire


class Laned:
    """A wire that carries one message a node: each rank of the node takes its part of it over, then all swap parts.

    slow: between the nodes. fast: between the ranks of this node, its lanes. What is given to it must be the same on
    all lanes; what arrives is then what `slow` alone would have brought, bit for bit where it adds two numbers only
    (an all-reduce among more may add in another order).
    """

    def __init__(self, slow: Wire, fast: Wire) -> None:
        self._slow, self._fast = slow, fast
        self.replica = slow.replica

    def size(self) -> int:
        return self._slow.size()

    def reduce(self, values: Tensor) -> Callable[[], Tensor]:
        arrived = self._slow.reduce(self._part(values.reshape(1, -1)).view(-1))

        def wait() -> Tensor:
            lanes = self._fast.gather(arrived().view(torch.uint8))()
            return lanes.view(-1).view(values.dtype)[: values.numel()].view(values.shape)

        return wait

    def gather(self, mine: Tensor) -> Callable[[], Tensor]:
        return self._joined(self._slow.gather(self._part(mine.view(1, -1)).view(-1)), len(mine))

    def swap(self, mine: Tensor) -> Callable[[], Tensor]:
        slices = mine.view(self.size(), -1)
        return self._joined(self._slow.swap(self._part(slices).reshape(-1)), slices.shape[1])

    def _part(self, lines: Tensor) -> Tensor:
        """What this lane carries of every line: an equal share, the last ones filled up with zeros."""
        share = -(-lines.shape[1] // self._fast.size())
        filled = torch.nn.functional.pad(lines, (0, share * self._fast.size() - lines.shape[1]))
        return filled[:, self._fast.replica * share : (self._fast.replica + 1) * share]

    def _joined(self, arrived: Callable[[], Tensor], nbytes: int) -> Callable[[], Tensor]:
        """Waits for this lane's part of what every replica sent, and returns the whole."""  # -> [replicas, nbytes]

        def wait() -> Tensor:
            part = arrived()  # [replicas, share]
            lanes = self._fast.gather(part.reshape(-1))().view(self._fast.size(), self.size(), -1)
            return lanes.transpose(0, 1).reshape(self.size(), -1)[:, :nbytes]

        return wait


def ways(parameters: Mapping[str, Tensor], lanes: DeviceMesh | None) -> list[tuple[dict[str, Tensor], int]]:
    """`parameters` by the way that their messages go: first those of which each lane holds a shard, then the others.

    With each goes how many lanes carry one message: 1, and as many as `lanes` has.
    """
    if lanes is None:
        return [(dict(parameters), 1)]
    split = {name: p for name, p in parameters.items() if _split(p, lanes)}
    whole = {name: p for name, p in parameters.items() if name not in split}
    return [way for way in ((split, 1), (whole, lanes.size())) if way[0]]


def _split(parameter: Tensor, lanes: DeviceMesh) -> bool:
    """Whether `parameter` is sharded over ranks that are lanes of this one."""
    if not isinstance(parameter, DTensor):
        return False
    others = set(dist.get_process_group_ranks(lanes.get_group())) - {dist.get_rank()}
    mesh = parameter.device_mesh
    sharded = [dim for dim, placement in enumerate(parameter.placements) if not placement.is_replicate()]
    return any(others & set(dist.get_process_group_ranks(mesh.get_group(dim))) for dim in sharded)
