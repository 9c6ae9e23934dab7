"""Hierarchical collectives: if all ranks of a node hold the same message, the message crosses the
slow link between nodes only once.
"""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from detonation.core.link.communicator import Communicator


class HierarchicalCommunicator(Communicator):
    """Sends one message per node over the slow link. Each rank of the node sends and receives only
    a part of the message. Then the ranks of the node exchange the received parts.

    All ranks of the node must pass the same message. The result of a collective equals the result
    of the same collective of `inter_node` alone. Only an all-reduce of more than two replicas may
    differ in the last bits, because it may add the values in another order.

    Args:
        inter_node: Communicator between the nodes.
        intra_node: Communicator between the ranks of this node.
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
        # shapes: [bytes] -> [replicas, bytes] uint8
        part = self._own_part(mine.view(1, -1)).view(-1)
        return self._joined(self._slow.all_gather(part), len(mine))

    def all_to_all(self, mine: Tensor) -> Callable[[], Tensor]:
        # shapes: [replicas * bytes] -> [replicas, bytes] uint8
        slices = mine.view(self.size(), -1)
        parts = self._own_part(slices).reshape(-1)
        return self._joined(self._slow.all_to_all(parts), slices.shape[1])

    def _own_part(self, lines: Tensor) -> Tensor:
        """Returns the part of every message that this rank sends. `lines` has one message per row.
        The parts of all ranks have the same size; zeros pad the last part."""
        # shapes: [messages, n] -> [messages, size of a part]
        share = -(-lines.shape[1] // self._fast.size())
        padded = torch.nn.functional.pad(lines, (0, share * self._fast.size() - lines.shape[1]))
        return padded[:, self._fast.replica * share : (self._fast.replica + 1) * share]

    def _joined(self, arriving: Callable[[], Tensor], nbytes: int) -> Callable[[], Tensor]:
        """Returns a function that waits for this rank's part of every replica's message, gathers
        the parts of all ranks of the node, and returns the whole messages."""
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
    """Splits `parameters` into two parts: parameters that are sharded over the ranks of the node,
    and parameters that each rank of the node holds whole.

    Also returns, for each part, the number of ranks of the node that have the same message: 1 for
    sharded parameters, and the size of `intra_node` for whole parameters.
    """
    if intra_node is None:
        return [(dict(parameters), 1)]
    others = set(dist.get_process_group_ranks(intra_node.get_group())) - {dist.get_rank()}
    sharded = {name: p for name, p in parameters.items() if is_sharded_over(p, others)}
    whole = {name: p for name, p in parameters.items() if name not in sharded}
    parts = [(sharded, 1), (whole, intra_node.size())]
    return [(part, local_ranks) for part, local_ranks in parts if part]


def is_sharded_over(parameter: Tensor, others: set[int]) -> bool:
    """True if any of the ranks `others` holds another shard of `parameter`."""
    if not isinstance(parameter, DTensor):
        return False
    return any(others & ranks for ranks in sharding_ranks(parameter))


def sharding_ranks(parameter: DTensor) -> list[set[int]]:
    """Returns one set of ranks for each mesh dimension over which `parameter` is sharded: the ranks
    that hold the shards of this dimension, this rank included.
    """
    mesh = parameter.device_mesh
    found = []
    for dim, placement in enumerate(parameter.placements):
        if not placement.is_replicate():
            found.append(set(dist.get_process_group_ranks(mesh.get_group(dim))))
    return found
