"""Steps of whole matrices in a sharded model: for each matrix, one rank of the node computes the
step for all ranks.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from detonation.core.flat.tensors import local

GROUP_BYTES = 2**26
"""Size of a group of matrices that is sent together, in bytes per rank. Three groups are in memory
at a time.
"""


class MatrixStep(Protocol):
    """An optimizer's step on one matrix, in parts. Only the part `whole` needs the whole matrix.

    Attributes:
        matrix: The parameter, [rows, columns].
        dtype: The dtype of the tensors that `before` and `whole` return.
        noted: Number of notes (fp32 numbers about the whole matrix): 0, or one for each row.
    """

    matrix: Tensor
    dtype: torch.dtype
    noted: int

    def before(self) -> Tensor:
        """Returns the input of `whole`, sharded like the matrix. Every rank calls this method."""

    def whole(self, given: Tensor) -> tuple[Tensor, Tensor]:
        """Computes the step from the whole tensor `given`, whose shards `before` returned. Returns
        the result of the step, in the same shape, and the notes (`noted` numbers about the whole
        matrix).
        """

    def divisors(self, notes: Tensor) -> Tensor:
        """Computes one number for each row from the `notes` of `whole`, and returns the numbers as
        `[rows, 1]`. The rows of the result of `whole` must be divided by them. Every rank calls
        this method if `noted` is above 0.
        """

    def after(self, result: Tensor) -> None:
        """Moves this rank's shard of the matrix. `result` is this rank's shard of the result of
        `whole`, after each row was divided by its number in `divisors`. Every rank calls this
        method.
        """


def take(steps: Iterable[MatrixStep]) -> None:
    """Runs `steps`, each on one matrix, in any order. Collective over the ranks of a node.

    The resulting bits do not depend on the number of shards. If a matrix is sharded over one axis,
    one rank, its owner, gathers the shards that `before` returns. The owner computes the step and
    sends shards of the result back. Matrices are sent in groups, with two collectives per group.
    While one group is computed, shards of the groups before and after it are in flight. If a matrix
    is sharded over several axes, every rank gathers the shards and computes the step.
    """
    groups: dict[Any, list[_Sharded]] = {}
    for step in steps:
        axes = _axes(step.matrix)
        if not axes:
            step.after(_divided(step, *step.whole(local(step.before()))))
        elif len(axes) == 1 and type(axes[0][1]) is Shard:
            sharded = _Sharded.of(step, *axes[0])
            groups.setdefault((sharded.group, local(step.matrix).device), []).append(sharded)
        else:
            _take_on_every_rank(step)
    for mine in groups.values():
        _take_by_owners(mine)


def owners_of(costs: Sequence[int], ranks: int) -> list[int]:
    """Returns the owner of each matrix (the rank that computes its step). A matrix goes to the rank
    with the least work so far.
    """
    load = [0] * ranks
    owners = []
    for cost in costs:
        owners.append(load.index(min(load)))
        load[owners[-1]] += cost
    return owners


def operations(shape: Sequence[int]) -> int:
    """Returns the number of operations of one Muon iteration: the Gram matrix of a matrix, the
    square of the Gram matrix, and the product of their weighted sum with the matrix.
    """
    short, long = sorted(shape)
    return 4 * short * short * long + 2 * short**3


def _axes(matrix: Tensor) -> list[tuple[int, Any]]:
    """Returns the mesh axes over which a matrix is split, each with its placement."""
    if not isinstance(matrix, DTensor):
        return []
    return [
        (axis, placement)
        for axis, placement in enumerate(matrix.placements)
        if matrix.device_mesh.size(axis) > 1 and not placement.is_replicate()
    ]


def _divided(step: MatrixStep, result: Tensor, notes: Tensor, rows: slice = slice(None)) -> Tensor:
    """Divides `result`, which has the given `rows` of the whole matrix, by the `divisors` of these
    rows. If the step makes no notes, returns `result` unchanged.
    """
    if not step.noted:
        return result
    return result / step.divisors(notes)[rows]


def _take_on_every_rank(step: MatrixStep) -> None:
    given = step.before()
    assert isinstance(given, DTensor)
    whole = _divided(step, *step.whole(given.full_tensor()))
    shards = distribute_tensor(whole, given.device_mesh, given.placements, src_data_rank=None)
    step.after(local(shards))


@dataclass(frozen=True)
class _Sharded:
    """The step of a matrix that is sharded in one dimension.

    Attributes:
        group: The ranks that hold shards.
        dim: The sharded dimension.
        sizes: Sizes of the shards in the sharded dimension, by rank.
    """

    step: MatrixStep
    group: dist.ProcessGroup
    dim: int
    sizes: list[int]

    @classmethod
    def of(cls, step: MatrixStep, axis: int, placement: Shard) -> "_Sharded":
        matrix = step.matrix
        assert isinstance(matrix, DTensor)
        ranks = matrix.device_mesh.size(axis)
        size = matrix.shape[placement.dim]
        each = -(-size // ranks)
        sizes = [max(0, min(each, size - each * rank)) for rank in range(ranks)]
        return cls(step, matrix.device_mesh.get_group(axis), placement.dim, sizes)

    @property
    def cost(self) -> int:
        return operations(self.step.matrix.shape)

    def nbytes(self, rank: int) -> int:
        """Returns the number of bytes of the shard of `rank`."""
        return self.sizes[rank] * self.step.matrix.shape[1 - self.dim] * self.step.dtype.itemsize

    def shard(self, content: Tensor, rank: int) -> Tensor:
        """Makes the shard of `rank` from its bytes."""
        shape = [*self.step.matrix.shape]
        shape[self.dim] = self.sizes[rank]
        return _from_bytes(content, self.step.dtype).view(shape)

    def rows(self, rank: int) -> slice:
        """Returns the rows of the matrix that `rank` holds, wholly or in part."""
        if self.dim:
            return slice(None)
        first = sum(self.sizes[:rank])
        return slice(first, first + self.sizes[rank])


def _take_by_owners(steps: list[_Sharded]) -> None:
    """Runs the steps on matrices that are sharded over the same ranks."""
    steps.sort(key=lambda step: -step.cost)
    computed: _Group | None = None
    # the next group is transferred while this group is computed
    for current, _ in pairwise(chain(_groups(steps), [None])):
        assert current is not None
        current.compute()
        if computed is not None:
            computed.finish()
        computed = current
    assert computed is not None
    computed.finish()


def _groups(steps: Sequence[_Sharded]) -> Iterator["_Group"]:
    """Yields the matrices in groups, one group after the other. The transfer of a group starts when
    the group is made. Every group but the last has at least `GROUP_BYTES` per rank, and at least as
    many matrices as there are ranks.
    """
    ranks = len(steps[0].sizes)
    owners = owners_of([step.cost for step in steps], ranks)
    first = 0
    nbytes = 0
    for number, step in enumerate(steps):
        if nbytes >= GROUP_BYTES * ranks and number - first >= ranks:
            yield _Group(steps[first:number], owners[first:number])
            first = number
            nbytes = 0
        nbytes += step.step.matrix.numel() * step.step.dtype.itemsize
    yield _Group(steps[first:], owners[first:])


class _Group:
    """Matrices that are sent together. The constructor sends their shards to their owners."""

    def __init__(self, steps: Sequence[_Sharded], owners: Sequence[int]) -> None:
        self._group = steps[0].group
        self._device = local(steps[0].step.matrix).device
        self._rank = dist.get_rank(self._group)
        self._owned: list[list[_Sharded]] = [[] for _ in steps[0].sizes]
        for step, owner in zip(steps, owners, strict=True):
            self._owned[owner].append(step)
        self._mine = self._owned[self._rank]
        sent = []
        for its in self._owned:
            sent.append([_to_bytes(local(each.step.before())) for each in its])
        sizes = [[each.nbytes(rank) for each in self._mine] for rank in range(len(self._owned))]
        self._send(sent, sizes)

    def compute(self) -> None:
        """Computes the matrices that this rank owns, and sends back shards of the results."""
        received = self._received()
        shards = [
            [each.shard(next(received), rank) for each in self._mine]
            for rank in range(len(self._owned))
        ]
        sent: list[list[Tensor]] = [[] for _ in self._owned]
        for each, *parts in zip(self._mine, *shards, strict=True):
            # `cat` makes a new, aligned tensor: a matrix's address may change the bits of products
            result, notes = each.step.whole(torch.cat(parts, each.dim))
            for pieces, shard in zip(sent, torch.split(result, each.sizes, each.dim), strict=True):
                pieces.extend((_to_bytes(shard), _to_bytes(notes)))
        sizes = [
            [size for each in its for size in (each.nbytes(self._rank), 4 * each.step.noted)]
            for its in self._owned
        ]
        self._send(sent, sizes)

    def finish(self) -> None:
        """Receives shards of the results, and moves all matrices of this group."""
        received = self._received()
        for each in chain.from_iterable(self._owned):
            shard = each.shard(next(received), self._rank)
            notes = _from_bytes(next(received), torch.float32)
            each.step.after(_divided(each.step, shard, notes, each.rows(self._rank)))

    def _send(self, sent: list[list[Tensor]], sizes: list[list[int]]) -> None:
        """Starts to send bytes to each rank, and to receive tensors of `sizes` bytes from each
        rank.
        """
        empty = torch.empty(0, dtype=torch.uint8, device=self._device)
        message = torch.cat([empty, *chain.from_iterable(sent)])
        self._sizes = [*chain.from_iterable(sizes)]
        self._buffer = empty.new_empty(sum(self._sizes))
        self._work: Any = dist.all_to_all_single(
            self._buffer,
            message,
            [sum(each) for each in sizes],
            [sum(map(len, pieces)) for pieces in sent],
            group=self._group,
            async_op=True,
        )

    def _received(self) -> Iterator[Tensor]:
        """Waits for the transfer, and returns the tensors from all ranks, in the order of the
        ranks.
        """
        self._work.wait()
        return iter(torch.split(self._buffer, self._sizes))


def _to_bytes(tensor: Tensor) -> Tensor:
    # a contiguous tensor of one number may have any stride, which `view` rejects
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8)


def _from_bytes(content: Tensor, dtype: torch.dtype) -> Tensor:
    return content.clone().view(dtype)  # `content` may begin at any byte, but a copy is aligned
