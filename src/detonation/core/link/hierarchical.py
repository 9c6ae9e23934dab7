"""Hierarchical collectives: a message that all ranks of a node hold crosses the slow link once per
node.
"""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from detonation.core.link.communicator import Communicator


class HierarchicalCommunicator(Communicator):
    """Sends one message per node. Each rank of the node sends a part over the slow link, then the
    ranks exchange the parts.

    All ranks of the node must pass the same message. The result equals the result of `inter_node`
    alone, bit for bit if only two numbers are added. (An all-reduce among more replicas may add in
    another order.)

    Args:
        inter_node: Between the nodes.
        intra_node: Between the ranks of this node.
    """

    def __init__(self, inter_node: Communicator, intra_node: Communicator) -> None:
        self._slow = inter_node
        self._fast = intra_node
        self.replica = inter_node.replica

    def size(self) -> int:
        return self._slow.size()

    def all_reduce(self, values: Tensor) -> Callable[[], Tensor]:  # [any] -> [any]
        arriving = self._slow.all_reduce(self._own_part(values.reshape(1, -1)).view(-1))

        def wait() -> Tensor:
            parts = self._fast.all_gather(arriving().view(torch.uint8))()
            return parts.view(-1).view(values.dtype)[: values.numel()].view(values.shape)

        return wait

    def all_gather(self, mine: Tensor) -> Callable[[], Tensor]:
        # [bytes] -> [replicas, bytes] uint8
        part = self._own_part(mine.view(1, -1)).view(-1)
        return self._joined(self._slow.all_gather(part), len(mine))

    def all_to_all(self, mine: Tensor) -> Callable[[], Tensor]:
        # [replicas * bytes] -> [replicas, bytes] uint8
        slices = mine.view(self.size(), -1)
        parts = self._own_part(slices).reshape(-1)
        return self._joined(self._slow.all_to_all(parts), slices.shape[1])

    def _own_part(self, lines: Tensor) -> Tensor:
        """The part of every line that this rank sends: an equal share, padded with zeros."""
        # [lines, n] -> [lines, share]
        share = -(-lines.shape[1] // self._fast.size())
        padded = torch.nn.functional.pad(lines, (0, share * self._fast.size() - lines.shape[1]))
        return padded[:, self._fast.replica * share : (self._fast.replica + 1) * share]

    def _joined(self, arriving: Callable[[], Tensor], nbytes: int) -> Callable[[], Tensor]:
        """Waits for this rank's part of every replica's message, and returns the whole messages."""
        # -> [replicas, nbytes]

        def wait() -> Tensor:
            part = arriving()  # [replicas, share]
            gathered = self._fast.all_gather(part.reshape(-1))()
            parts = gathered.view(self._fast.size(), self.size(), -1)
            return parts.transpose(0, 1).reshape(self.size(), -1)[:, :nbytes]

        return wait


def split_by_sharding(
    parameters: Mapping[str, Tensor], intra_node: DeviceMesh | None
) -> list[tuple[dict[str, Tensor], int]]:
    """Splits `parameters` into parameters that are sharded over the ranks of the node, and all
    others.

    Also returns the number of local ranks that share one message of each part: 1, or the size of
    `intra_node`.
    """
    if intra_node is None:
        return [(dict(parameters), 1)]
    others = set(dist.get_process_group_ranks(intra_node.get_group())) - {dist.get_rank()}
    sharded = {name: p for name, p in parameters.items() if is_sharded_over(p, others)}
    whole = {name: p for name, p in parameters.items() if name not in sharded}
    parts = [(sharded, 1), (whole, intra_node.size())]
    return [(part, local_ranks) for part, local_ranks in parts if part]


def is_sharded_over(parameter: Tensor, others: set[int]) -> bool:
    """True if `parameter` is sharded over any of the ranks `others`."""
    if not isinstance(parameter, DTensor):
        return False
    return any(others & ranks for ranks in sharding_ranks(parameter))


def sharding_ranks(parameter: DTensor) -> list[set[int]]:
    """For each mesh dimension over which `parameter` is sharded, the ranks in this rank's group."""
    mesh = parameter.device_mesh
    found = []
    for dim, placement in enumerate(parameter.placements):
        if not placement.is_replicate():
            found.append(set(dist.get_process_group_ranks(mesh.get_group(dim))))
    return found
