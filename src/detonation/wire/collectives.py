"""Two collectives between the nodes of a replica. One is an all-gather of weights: ranks send the
quantized differences between their weights and the reference, a copy of the weights that is equal
on all nodes. The other is an all-to-all of quantized gradients with error feedback.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import ClassVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from detonation.choices import first_names
from detonation.core.compute.bitpack import pack, packed_bytes, unpack
from detonation.core.flat.written import WrittenWeights
from detonation.core.link import Link
from detonation.core.runtime import decides_on_device
from detonation.core.schemes import ALIGNMENT
from detonation.wire.wire import BLOCK


@dataclass(frozen=True)
class BlockIntegers:
    """Encodes numbers in 4 or 8 bits. In a block of 128 numbers, the encoded levels are evenly
    spaced between minus and plus the largest magnitude of the block. One more code marks a number
    that was not sent.

    A message consists of packed integers, followed by the bf16 scales of its blocks. The last block
    is padded with zeros. On an accelerator the message is padded to a multiple of `ALIGNMENT`
    bytes. A block with a nonfinite number decodes to nonfinite numbers. The encoding is an odd
    function, as for every precision; see `codec.precision`.
    """

    width: int
    block: ClassVar[int] = BLOCK

    @property
    def largest(self) -> int:
        return (1 << self.width - 1) - 1

    def encode(
        self, values: Tensor, places: Tensor | None = None, marked: Tensor | None = None
    ) -> Tensor:
        """Quantizes each line (last dimension) of `values`. `places` are positions in a line. If
        `marked` is True for a position, the number at this position is encoded as not sent.
        """
        # shapes: values [..., n] fp32, places and marked [m] -> [..., bytes of whole blocks] uint8
        missing = -values.shape[-1] % self.block
        if missing:
            lines = pad(values, (0, missing))
        else:
            lines = values.contiguous()
        blocks = lines.view(*lines.shape[:-1], -1, self.block)  # shape [..., blocks, block]
        largest = torch.maximum(blocks.amax(-1), blocks.amin(-1).neg_())  # shape [..., blocks]
        scales = (largest / self.largest).to(torch.bfloat16)
        # Division by a scale of 0 would give infinity, so the smallest normal number replaces 0.
        # The code of a NaN is undefined, so the bit mask below keeps this code within its own bits.
        normal = scales.float().clamp_(min=torch.finfo(torch.float32).tiny)
        per_step = normal.reciprocal_().unsqueeze(-1)
        codes = (blocks * per_step).round_().clamp_(-self.largest, self.largest)
        codes.add_(self.largest + 1)
        whole = codes.to(torch.uint8).bitwise_and_((1 << self.width) - 1).flatten(-2)
        if places is not None and marked is not None:
            whole[..., places] = whole[..., places].masked_fill(marked, 0)
        packed = pack(whole, self.width)
        return _aligned(torch.cat([packed, scales.view(torch.uint8)], -1))

    def decode(self, encoded: Tensor, count: int, places: Tensor | None = None) -> Tensor:
        """Decodes messages of `count` numbers each. `places` are the positions of numbers that may
        be marked as not sent; a marked number becomes 0.
        """
        # shapes: encoded [..., bytes] uint8, places [m] int64 -> [..., count] fp32
        blocks = -(-count // self.block)
        split = packed_bytes(blocks * self.block, self.width)
        codes = self._codes(encoded, count).sub_(self.largest + 1)
        if places is not None:
            some = codes[..., places]
            codes[..., places] = some.masked_fill(some == -self.largest - 1, 0.0)
        # shape of the scales: [..., blocks, 1]
        scales = (
            encoded[..., split : split + 2 * blocks]
            .contiguous()
            .view(torch.bfloat16)
            .float()
            .unsqueeze(-1)
        )
        return (
            codes.view(*codes.shape[:-1], blocks, self.block).mul_(scales).flatten(-2)[..., :count]
        )

    def marked(self, encoded: Tensor, count: int, places: Tensor) -> Tensor:
        """Returns which numbers each message in `encoded` marks as not sent: one bool for each
        position in `places`. Each message has `count` numbers.
        """
        # shapes: encoded [..., bytes] uint8, places [m] int64 -> [..., m] bool
        return self._codes(encoded, count)[..., places] == 0

    def _codes(self, encoded: Tensor, count: int) -> Tensor:
        # shapes: encoded [..., bytes] uint8 -> [..., numbers of whole blocks] fp32
        numbers = -(-count // self.block) * self.block
        split = packed_bytes(numbers, self.width)
        return unpack(encoded[..., :split], numbers, self.width, torch.float32)


def _aligned(octets: Tensor) -> Tensor:
    """On an accelerator, pads messages to the alignment of a gathered buffer; see `ALIGNMENT`."""
    # shapes: [..., bytes] -> [..., bytes and padding]
    missing = -octets.shape[-1] % ALIGNMENT
    if missing and decides_on_device(octets.device):
        return pad(octets, (0, missing))
    return octets


_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class ErrorFeedbackReduce(DefaultAllocMixin, ReduceScatter):
    """The reduce-scatter of the gradients of one FSDP unit whose shards are on several nodes.

    Gradients are first summed inside the node, without quantization. After that, each rank sends a
    quantized sum to the rank with the same local rank on each other node. The sum for its own node
    is not quantized. Rounding errors are added to the next sums.

    A message marks each parameter that no rank of the sending node used: the parameter's first
    number gets the code for a number that was not sent. If no rank of the replica used a parameter,
    the parameter's residual stays unchanged.

    lacks: the parameters without a gradient on this rank; FSDP2 passes zeros as gradients of these
    parameters to the next call of this object. unused: the parameters in `lacks` that no rank of
    the replica used, set by each call. residual: `[nodes - 1, n]` fp32, the rounding errors for
    each other node, in node order; None before the first use. local: the process group of this
    node; None if the node has one rank. sizes: the number of elements of each trained parameter in
    a shard, in the order of messages.
    """

    def __init__(
        self,
        link: Link,
        local: dist.ProcessGroup | None,
        codec: BlockIntegers,
        sizes: Callable[[], Mapping[str, int]],
    ) -> None:
        self._link = link
        self._local = local
        self._codec = codec
        self._sizes = sizes
        self._others = link.replicas - 1
        self.lacks: Sequence[str] = ()
        self.unused: set[str] = set()
        self.residual: Tensor | None = None
        self._places: tuple[dict[str, int], Tensor | None] = ({}, None)
        self._laid_out: dict[str, int] = {}  # number of elements per parameter in the residual

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        # shapes: output_tensor [n], input_tensor [S * n] for S shards
        if op != dist.ReduceOp.SUM:
            raise ValueError(
                f"the reduce-scatter between nodes can only sum, but FSDP2 asked for {op}:"
                " leave the gradient divisor to FSDP2"
            )
        parts = input_tensor.view(self._link.replicas, -1)
        places = self._first_numbers(parts)
        # shapes: sums [nodes, n], unused [parameters]
        sums, unused = self._summed_in_node(parts, places)
        count = sums.shape[1]
        here = self._link.replica
        residual = self._residual_for(count, sums.device)
        before = residual.clone() if self.lacks else residual
        # use slices: a list of indices would be copied to the device and block the host
        others = torch.cat([sums[:here], sums[here + 1 :]])
        signal = others.float().add_(residual)  # shape [nodes - 1, n]
        encoded = self._codec.encode(signal, places, unused)
        for_itself = encoded.new_zeros(1, encoded.shape[1])
        sent = torch.cat([encoded[:here], for_itself, encoded[here:]])
        arriving = self._link.all_to_all(sent)
        signal.sub_(self._codec.decode(encoded, count, places))
        # Nonfinite gradients leave the residual unchanged; the receivers refuse such gradients.
        torch.where(signal.isfinite().all(), signal, residual, out=residual)
        (rows,), _ = self._link.wait([arriving])
        total = torch.zeros(count, dtype=torch.float32, device=sums.device)
        # the nodes are added in a fixed order, because the order of a sum changes its bits
        for node in range(self._link.replicas):
            if node == here:
                total.add_(sums[node].float())
            else:
                total.add_(self._codec.decode(rows[node], count, places))
        self.unused = set()
        if self.lacks and places is not None and unused is not None:
            received = torch.cat([rows[:here], rows[here + 1 :]])
            everywhere = self._codec.marked(received, count, places).all(0) & unused
            self._leave(everywhere.tolist(), before, total)
        output_tensor.copy_(total)

    def _leave(self, unused: Sequence[bool], before: Tensor, total: Tensor) -> None:
        """Restores the residual from `before` for each parameter that no rank of the replica used.
        Also sets the sum of this parameter's gradients to zero.
        """
        assert self.residual is not None
        end = 0
        for (name, size), is_unused in zip(self._laid_out.items(), unused, strict=True):
            end += size
            if is_unused:
                self.unused.add(name)
                self.residual[:, end - size : end] = before[:, end - size : end]
                total[end - size : end] = 0.0

    def _first_numbers(self, parts: Tensor) -> Tensor | None:
        """Returns the position at which each parameter begins in a shard; None if torch omits some
        parameters from the message.
        """
        # shapes: parts [nodes, local * n] -> [parameters] int64
        sizes = dict(self._sizes())
        local = self._local.size() if self._local is not None else 1
        if not all(sizes.values()) or sum(sizes.values()) * local != parts.shape[1]:
            return None
        known, places = self._places
        if places is None or known != sizes or places.device != parts.device:
            ends = list(accumulate(sizes.values()))
            places = torch.tensor([0, *ends[:-1]], dtype=torch.int64, device=parts.device)
            self._places = sizes, places
        return places

    def by_parameter(self) -> dict[str, Tensor]:
        """Returns the residual of each parameter; nothing before the first use."""
        # shape of each residual: [nodes - 1, size] fp32
        if self.residual is None:
            return {}
        return dict(
            zip(
                self._laid_out,
                torch.split(self.residual, [*self._laid_out.values()], 1),
                strict=True,
            )
        )

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Replaces the residual by `saved`. A parameter that is missing in `saved`, or has another
        shape there, starts with a residual of zero.

        Shapes: as `by_parameter`. `saved` may contain parameters that are frozen now, because they
        may be trained again.
        """
        # only the number of nodes is checked here, because `_residual_for` checks the sizes
        fitting = {name: piece for name, piece in saved.items() if len(piece) == self._others}
        self._laid_out = {name: piece.shape[1] for name, piece in fitting.items()}
        self.residual = None
        if fitting:
            self.residual = torch.cat([*fitting.values()], 1).float()

    def _residual_for(self, count: int, device: torch.device) -> Tensor:
        """Returns the residual in the layout of the parameters that are trained now."""
        # shape of the result: [nodes - 1, count] fp32
        sizes = dict(self._sizes())
        if sum(sizes.values()) != count:
            # before torch 2.13, FSDP2 omits a parameter without a gradient from the message
            sizes = {"": count}
        if (
            self.residual is None
            or [*sizes.items()] != [*self._laid_out.items()]
            or self.residual.device != device
        ):
            before = self.by_parameter()
            empty = torch.zeros(self._others, 0, dtype=torch.float32, device=device)
            pieces = [empty]
            for name, size in sizes.items():
                if name in before and before[name].shape[1] == size:
                    pieces.append(before[name].to(device))
                else:
                    pieces.append(empty.new_zeros(self._others, size))
            self.residual = torch.cat(pieces, 1)
            self._laid_out = sizes
        return self.residual

    def _summed_in_node(self, parts: Tensor, places: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Sums gradients over the ranks of this node. This rank gets one sum for each node: that
        for the rank with the same local rank on that node. Also returns which parameters no rank of
        this node used.
        """
        # shapes: [nodes, local * n], [parameters] int64 -> [nodes, n], [parameters] bool
        unused = None
        used = parts.new_ones(0)
        if places is not None:
            used = parts.new_ones(len(places))
            for number, name in enumerate(self._places[0]):
                if name in self.lacks:
                    used[number] = 0
            unused = used == 0
        if self._local is None:
            return parts, unused
        nodes = len(parts)
        size = self._local.size()
        count = parts.shape[1] // size
        lines = parts.view(nodes, size, -1).transpose(0, 1)  # shape [local, nodes, n]
        for_each = torch.cat([lines, used.expand(size, nodes, -1)], 2)
        summed = parts.new_empty(nodes, for_each.shape[2])
        _reduce_scatter_single(summed.view(-1), for_each.view(-1), group=self._local)
        if unused is not None:
            unused = summed[0, count:] == 0
        return summed[:, :count], unused


class WeightMoves:
    """Counts the changes of sharded weights in this process. Every rank counts the same changes.

    A tensor's own version counter would miss a change on a rank whose shard is empty.
    """

    def __init__(self) -> None:
        self.count = 0
        self.gathers = WeakSet["DifferenceGather"]()
        self.warned = False  # True after a warning about writes outside of optimizer steps

    def __call__(self) -> None:
        """Counts a change of the weights. All ranks must count the same changes."""
        self.count += 1
        for gather in self.gathers:
            gather.note_step()


WEIGHT_MOVES = WeightMoves()
"""The counter of weight changes in this process."""


@cache
def watch_optimizers() -> None:
    """From now on, counts each optimizer step on sharded weights as a change of the weights.

    Steps on an unsharded model are not counted. A single rank may train such a model, and the other
    ranks would not know of its steps.
    """
    register_optimizer_step_post_hook(_announce)


def _announce(optimizer: Optimizer, *_: object) -> None:
    if any(
        isinstance(parameter, DTensor)
        for group in optimizer.param_groups
        for parameter in group["params"]
    ):
        WEIGHT_MOVES()


_log = logging.getLogger("detonation")
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class DifferenceGather(DefaultAllocMixin, AllGather):
    """The all-gather of the weights of one FSDP unit whose shards are on several nodes.

    All nodes hold equal copies of a reference: the weights as they were last gathered. Once after
    each optimizer step, a rank sends the difference between its shard and the reference to the
    other nodes. All ranks add the same differences to the reference, so the copies stay bitwise
    equal. The output is the reference, gathered inside the node. Without a step since the last
    gather, no message leaves the node.

    reference: `[nodes, n]`, the shards of all ranks with the same local rank, equal on all nodes;
    None until the first gather, which is exact.

    Args:
        codec: Codec of the differences; None sends unquantized weights.
        resync_every: Number of exchanges from one exact exchange to the next; 0 for never.
        is_trained: Returns False if no step can move the weights. After weights were frozen, one
            last exchange is exact.
        weights: Finds the weights of this rank that were written since the last gather.
    """

    def __init__(
        self,
        link: Link,
        local: dist.ProcessGroup | None,
        codec: BlockIntegers | None,
        resync_every: int,
        is_trained: Callable[[], bool],
        weights: WrittenWeights,
    ) -> None:
        self._link = link
        self._local = local
        self._codec = codec
        self._resync_every = resync_every
        self._is_trained = is_trained
        self.weights = weights
        self.reference: Tensor | None = None
        self._exchanges = 0  # exchanges since the last exact exchange
        self._seen = -1
        self._was_trained = False  # what `is_trained` returned at the last gather
        self._warned = False
        WEIGHT_MOVES.gathers.add(self)
        watch_optimizers()

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        # output [S * n], input [n]: the input is a part of the output, so write the output last
        reference = self.reference
        trained = self._is_trained()
        if (
            reference is None
            or reference.shape[1] != len(input_tensor)
            or reference.dtype != input_tensor.dtype
        ):
            reference = self.reference = self._exact(input_tensor)
        elif self._seen != WEIGHT_MOVES.count and (trained or self._was_trained):
            self._exchange(reference, input_tensor, exactly=not trained)
        elif written := self.weights.found():
            raise RuntimeError(
                "weights were changed without an optimizer step, which the other ranks cannot see: "
                f"{first_names(written)}; call detonation.resync_weights(model) on all ranks after "
                "such a change"
            )
        self._seen = WEIGHT_MOVES.count
        self._was_trained = trained
        self.weights.note()
        if self._local is None:
            output_tensor.copy_(reference.view(-1))
            return
        size = self._local.size()
        gathered = reference.new_empty(size, *reference.shape)
        _all_gather_single(gathered.view(-1), reference.view(-1), group=self._local)
        output_tensor.view(len(reference), size, -1).copy_(gathered.transpose(0, 1))

    def note_step(self) -> None:
        """Records that an optimizer step has just written the weights, if some of them are
        trained.
        """
        if self._is_trained():
            self.weights.note()

    def forget(self) -> None:
        """Makes the next exchange of weights exact, because the weights were replaced."""
        self.reference = None

    def counts(self) -> Tensor:
        """Returns two counts: the exchanges since the last exact exchange, and 1 if the weights
        changed after the last gather, else 0.
        """
        # shape of the result: [2] int64
        return torch.tensor(
            [self._exchanges, self._seen != WEIGHT_MOVES.count], dtype=torch.int64, device="cpu"
        )

    def restore(self, own: Tensor, counts: Tensor) -> None:
        """Restores a saved reference: the weights as they were last gathered. `own` is this rank's
        part of the reference. Collective.
        """
        # shapes: own [n], counts [2] int64 (a result of the method `counts`)
        self.reference = self._exact(own)
        self._exchanges, stepped = map(int, counts.tolist())
        self._seen = WEIGHT_MOVES.count
        if stepped:
            self._seen = -1
        self._was_trained = bool(stepped)
        self.weights.note()

    def _exchange(self, reference: Tensor, own: Tensor, exactly: bool) -> None:
        """Exchanges between nodes how the weights changed since the last gather, and adds these
        changes to `reference` in place.
        """
        self._exchanges += 1
        if self._codec and not own.is_floating_point() and not self._warned:
            self._warned = True
            _log.warning(
                "a module whose parameters have several dtypes is sent without compression:"
                " give fully_shard a mixed_precision policy"
            )
        exactly |= self._exchanges == self._resync_every or not own.is_floating_point()
        if self._codec is None or exactly:
            reference.copy_(self._exact(own))
            return
        if not WEIGHT_MOVES.warned and (written := self.weights.found()):
            WEIGHT_MOVES.warned = True
            _log.warning(
                "weights were changed after an optimizer step: %s; other ranks get these changes "
                "rounded, as they get the step. To send exact weights, call "
                "detonation.resync_weights(model) on all ranks after the change",
                first_names(written),
            )
        # replace nonfinite numbers, which would stay in `reference` even if the weights recover
        reference.nan_to_num_(0.0, 0.0, 0.0)
        difference = own.float() - reference[self._link.replica].float()
        (arrived,), _ = self._link.wait([self._link.all_gather(self._codec.encode(difference))])
        for row, message in zip(reference, arrived, strict=True):
            # decode one node at a time, so that only one decoded shard is in memory
            row.copy_(row.float().add_(self._codec.decode(message, len(own))))
        self._link.recycle(arrived)

    def _exact(self, own: Tensor) -> Tensor:
        """Gathers the unquantized shards of all nodes."""  # shapes: [n] -> [nodes, n]
        self._exchanges = 0
        (arrived,), _ = self._link.wait(
            [self._link.all_gather(_aligned(own.contiguous().view(torch.uint8)))]
        )
        # switch inference mode off: training after an evaluation changes this tensor in place
        with torch.inference_mode(False):
            exact = (
                arrived[:, : own.nbytes]
                .clone(memory_format=torch.contiguous_format)
                .view(own.dtype)
            )
        self._link.recycle(arrived)
        return exact
