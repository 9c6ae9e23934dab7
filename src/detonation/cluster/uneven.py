"""Replicas with different numbers of ranks: they shard a parameter at different rows, so they
exchange the parameter in pieces.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from detonation.core.agreement import rounds_by_place
from detonation.core.flat.tensors import Piece, local
from detonation.core.link import Axis, Communicator, communicator_of, require_same, send_to_all
from detonation.core.schemes import GradientScheme, Scheme

Pieces = dict[str, Tensor]
Owners = tuple[int, ...]
"""The ranks that hold one piece of a parameter: one rank in each replica."""


class UnevenAxis(Communicator):
    """The mesh axis between replicas with different numbers of ranks.

    Each parameter is cut at all rows at which any replica cuts it into shards. In each replica, one
    rank holds the piece between two neighbouring cuts. The ranks that hold the same piece, one in
    each replica, form a process group. So each rank sends only rows of its own shard. If the cuts
    of large nodes include the cuts of small nodes, messages are as large as between large nodes
    alone.

    Args:
        nodes: Ranks of each replica, in order; the ranks of a replica are neighbours.
        shard: Axis inside this rank's node.
        backend: Backend of the slow link, or a tuple of the backend and its options; None for the
            backend of the default group.
    """

    shared = True  # so gradients are sent in the optimizer's `step` only, not during backward

    def __init__(self, nodes: Sequence[Sequence[int]], shard: DeviceMesh, backend: Any) -> None:
        self._nodes = nodes
        self._shard = shard
        self._device = torch.device(shard.device_type)
        self._backend = backend
        self._options = None
        if isinstance(backend, tuple):
            self._backend, self._options = backend
        self._rank = dist.get_rank()
        self._world = _world(shard.device_type)
        self.replica = next(number for number, ranks in enumerate(nodes) if self._rank in ranks)
        self._groups: dict[Owners, DeviceMesh | None] = {}

    def size(self) -> int:
        return len(self._nodes)

    def cut(self, parameters: Mapping[str, Tensor]) -> dict[Owners, Pieces]:
        """Cuts all `parameters` into pieces. Returns, for each group of ranks, the pieces that
        these ranks hold; the groups are sorted. Pieces may be empty. A group that does not contain
        this rank has no pieces here.
        """
        runs = {name: self._runs(parameter.shape[0]) for name, parameter in parameters.items()}
        everyone = {ranks for run in runs.values() for ranks in run}
        parts: dict[Owners, Pieces] = {}
        for ranks in sorted(everyone):
            parts[ranks] = {}
            if self._rank not in ranks:
                continue
            for name, parameter in parameters.items():
                parts[ranks][name] = self._piece(parameter, ranks, runs[name])
        return parts

    def divide(self, parameters: Mapping[str, Tensor]) -> list[tuple[int, DeviceMesh, Pieces]]:
        """Returns this rank's pieces of `parameters`, with the axis on which each of them is
        exchanged; see `communicator.divided`. Collective.

        Raises `ValueError` on all ranks if a rank does not shard a parameter by its first dimension
        over its node, or if a rank has no rows at all. Raises `Mismatch` if shapes differ.
        """
        problems = send_to_all(self._world, self._problem(parameters), self._device)
        for problem in filter(None, problems):
            raise ValueError(problem)
        shapes = {f"{name} (shape)": str(tuple(p.shape)) for name, p in parameters.items()}
        require_same(self._world, None, shapes, self._device, {})
        parts = self.cut(parameters)
        owners = {rank for ranks in parts for rank in ranks}
        idle = {rank for node in self._nodes for rank in node} - owners
        if idle:
            raise ValueError(
                f"rank {min(idle)} has no row of any trained parameter: start fewer ranks on its"
                " node"
            )
        timeout = self._shard.get_group()._get_backend(self._device).options._timeout
        for ranks in parts:
            if ranks in self._groups:
                continue
            group = dist.new_group(list(ranks), timeout, self._backend, self._options)
            self._groups[ranks] = None
            if self._rank in ranks:
                self._groups[ranks] = DeviceMesh.from_group(group, self._device.type)
        numbers = {ranks: number for number, ranks in enumerate(self._groups)}
        found = []
        for ranks, part in parts.items():
            on = self._groups[ranks]
            if on is not None:
                found.append((numbers[ranks], on, part))
        return found

    def broadcast(self, parameters: Mapping[str, Tensor], buffers: Sequence[Tensor]) -> None:
        """Copies the weights and buffers of the first replica to all other replicas, in place.
        Tensors that are not sharded come from the first rank of that replica.
        """
        sharded = {name: p for name, p in parameters.items() if isinstance(p, DTensor)}
        whole = [p for name, p in parameters.items() if name not in sharded]
        for tensor in (*whole, *buffers):
            dist.broadcast(tensor, 0)
        if not sharded:
            return
        for _, on, pieces in self.divide(sharded):
            group = on.get_group()
            first = dist.get_global_rank(group, 0)
            for piece in pieces.values():
                if piece.numel():
                    dist.broadcast(piece, first, group)

    def norms(self, parameters: Mapping[str, Tensor]) -> list[tuple[list[Communicator], Pieces]]:
        """Returns all pieces of `parameters` for `Clip`, which clips gradients. All ranks return
        the pieces in the same order. A piece that only other ranks hold is an empty tensor here.
        """
        empty = local(next(iter(parameters.values())))[:0].detach()
        parts = self.cut(parameters).items()
        every = {}
        for ranks, part in parts:
            for name in parameters:
                every[f"{ranks} {name}"] = part.get(name, empty)
        return [([communicator_of(self._shard)], every)]

    def refuse(
        self,
        levels: Sequence[tuple[Axis, Scheme]],
        base: Optimizer,
        intra_node: DeviceMesh | None,
        balance: bool,
    ) -> None:
        """Raises `ValueError` for options that do not work yet if replicas have different numbers
        of ranks.
        """
        gradients = [scheme for _, scheme in levels if isinstance(scheme, GradientScheme)]
        kinds = {(local(p).device, p.dtype) for group in base.param_groups for p in group["params"]}
        odd = []
        for device, dtype in kinds:
            if gradients and device.type != "meta" and rounds_by_place(base, dtype, device):
                odd.append(str(dtype))
        if odd:
            what = f"{type(base).__name__} of {', '.join(odd)}"
            raise self._refusal(
                what,
                "its result depends on how the rows are divided among ranks; take SignSGD, or"
                " AdamW",
            )
        if intra_node is not None:
            raise self._refusal("intra_node", "shard the model inside each node")
        if balance:
            raise self._refusal("balance=True", "give slow nodes fewer examples per step")
        if any(axis is not self for axis, _ in levels):
            raise self._refusal("levels on several axes", "take one axis")

    def _refusal(self, what: str, remedy: str) -> ValueError:
        return ValueError(
            f"{self._sizes} do not support {what}: {remedy}, or start equally many ranks on"
            " each node"
        )

    def refuse_log(self) -> None:
        raise ValueError(
            "a run whose nodes have different numbers of ranks can neither record updates nor"
            " publish weights: start equally many ranks on each node"
        )

    def all_gather(self, mine: Tensor) -> Any:
        """Always raises `ValueError`, because no process group has all ranks of the axis."""
        raise ValueError(
            f"the axis joins {self._sizes}, which only `replicate` supports: start equally many"
            " ranks on each node"
        )

    def all_reduce(self, values: Tensor) -> Any:
        """Always raises `ValueError`, because no process group has all ranks of the axis."""
        return self.all_gather(values)

    def all_to_all(self, mine: Tensor) -> Any:
        """Always raises `ValueError`, because no process group has all ranks of the axis."""
        return self.all_gather(mine)

    @property
    def _sizes(self) -> str:
        return f"nodes of {[len(ranks) for ranks in self._nodes]} ranks"

    def _runs(self, rows: int) -> dict[Owners, tuple[int, int]]:
        """Returns the first row and the end row of each piece of a sharded parameter with `rows`
        rows. The key of a piece is the tuple of the ranks that hold this piece, one rank in each
        replica.
        """
        each = [max(1, -(-rows // len(ranks))) for ranks in self._nodes]
        cuts = {min(rows, cut) for size in each for cut in range(0, rows + size, size)}
        return {
            tuple(ranks[first // size] for ranks, size in zip(self._nodes, each, strict=True)): (
                first,
                end,
            )
            for first, end in pairwise(sorted(cuts))
        }

    def _piece(
        self, parameter: Tensor, ranks: Owners, run: Mapping[Owners, tuple[int, int]]
    ) -> Piece:
        rows = parameter.shape[0]
        node = self._nodes[self.replica]
        first, end = run.get(ranks, (rows, rows))
        begin = first
        if first < end:
            begin = node.index(self._rank) * -(-rows // len(node))
        largest = -(-rows // max(map(len, self._nodes)))
        piece = Piece.of(parameter, ranks, first, slice(first - begin, end - begin), largest)
        piece.cut = self.cut
        return piece

    def _problem(self, parameters: Mapping[str, Tensor]) -> str:
        """Returns the fault in this rank's parameters as text; "" if there is none."""
        node = [*self._nodes[self.replica]]
        for name, parameter in parameters.items():
            cut = parameter.ndim > 0 and len(node) == 1
            if isinstance(parameter, DTensor):
                ranks = parameter.device_mesh.mesh.flatten().tolist()
                cut = ranks == node and parameter.placements == (Shard(0),)
            if not cut:
                remedy = 'fully_shard(model, mesh=mesh["shard"]) or detonation.shard(model, mesh)'
                return (
                    f"{name} is not cut by its first dimension over the ranks {node} of a node:"
                    f" call {remedy}"
                )
        return ""


class UnevenMesh:
    """The mesh that `init_mesh` returns for replicas with different numbers of ranks. It has the
    axes "replicate" and "shard".
    """

    mesh_dim_names = ("replicate", "shard")

    def __init__(self, sizes: Sequence[int], device_type: str, backend: Any) -> None:
        ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
        nodes = [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        groups = [dist.new_group(list(ranks)) for ranks in nodes]
        group = next(
            group for group, ranks in zip(groups, nodes, strict=True) if dist.get_rank() in ranks
        )
        self.device_type = device_type
        self.size = lambda: ends[-1]
        self.get_rank = dist.get_rank
        shard = DeviceMesh.from_group(group, device_type, mesh_dim_names=("shard",))
        self._axes = {"shard": shard, "replicate": UnevenAxis(nodes, shard, backend)}

    def __getitem__(self, name: str) -> Any:
        return self._axes[name]

    def get_group(self, name: str) -> dist.ProcessGroup:
        return self[name].get_group()  # type: ignore[no-any-return]


def sizes_of_nodes(mine: int, device: torch.device) -> list[int]:
    """Returns the number of ranks of each node. `mine` is the number of ranks on this rank's node.
    Collective over the default process group.

    Raises `ValueError` unless the ranks of a node have consecutive numbers.
    """
    found = send_to_all(_world(device.type), mine, device)
    sizes = list[int]()
    while (at := sum(sizes)) < len(found):
        sizes.append(found[at])
        if found[at : at + sizes[-1]] != [sizes[-1]] * sizes[-1]:
            raise ValueError(
                f"LOCAL_WORLD_SIZE by rank is {found}, but the ranks of a node must have"
                " consecutive numbers: number the ranks node by node"
            )
    return sizes


def _world(device_type: str) -> Communicator:
    group = dist.group.WORLD
    assert group is not None
    return communicator_of(DeviceMesh.from_group(group, device_type))
