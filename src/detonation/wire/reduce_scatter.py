"""The reduce-scatter of gradients between nodes: quantized with error feedback, in one all-to-all."""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from detonation.core.link.link import Link
from detonation.wire.integers import BlockIntegers

_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class ErrorFeedbackReduce(ReduceScatter):
    """The reduce-scatter of one FSDP unit, whose shards lie on several nodes.

    Gradients are summed inside the node as they are. Each rank then sends the quantized sum for each other node to the
    rank with the same place there; its own node's sum is not quantized. The rounding errors are added to the next sums.

    residual: `[nodes - 1, n]` fp32, the rounding errors for the other nodes in their order; None until the first use.

    Args:
        link: Between the nodes.
        local: The ranks of this node; None for one.
        codec: Of the sums.
        sizes: The numbers of each trained parameter in a shard, by name, in the order of messages.
    """

    def __init__(
        self, link: Link, local: dist.ProcessGroup | None, codec: BlockIntegers, sizes: Callable[[], Mapping[str, int]]
    ) -> None:
        self._link, self._local, self._codec, self._sizes = link, local, codec, sizes
        self._others = link.replicas - 1
        self.residual: Tensor | None = None
        self._laid_out: dict[str, int] = {}  # the sizes of the residual

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        # [n], [S * n]
        if op != dist.ReduceOp.SUM:
            raise ValueError(
                f"the reduce-scatter between nodes sums, it was asked for {op}: leave the divisor to FSDP2"
            )
        sums = self._summed_in_node(input_tensor.view(self._link.replicas, -1))  # [nodes, n]
        count, here = sums.shape[1], self._link.replica
        residual = self._residual_for(count, sums.device)
        # slices: an index that is a list is copied to the device, and the host waits for it
        signal = torch.cat([sums[:here], sums[here + 1 :]]).float().add_(residual)  # [nodes - 1, n]
        encoded = self._codec.encode(signal)
        for_itself = encoded.new_zeros(1, encoded.shape[1])
        arriving = self._link.all_to_all(torch.cat([encoded[:here], for_itself, encoded[here:]]))
        signal.sub_(self._codec.decode(encoded, count))
        # a gradient that is not finite is for those who receive it to refuse: the residual stays as it was
        torch.where(signal.isfinite().all(), signal, residual, out=residual)
        rows = arriving()
        total = torch.zeros(count, dtype=torch.float32, device=sums.device)
        for node in range(self._link.replicas):  # in the order of nodes: the sum depends on it
            total.add_(sums[node].float() if node == here else self._codec.decode(rows[node], count))
        output_tensor.copy_(total)

    def by_parameter(self) -> dict[str, Tensor]:
        """The residual of each parameter; empty before the first use.

        Shapes: -> `[nodes - 1, size]` fp32 each.
        """
        if self.residual is None:
            return {}
        return dict(zip(self._laid_out, torch.split(self.residual, [*self._laid_out.values()], 1), strict=True))

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Takes the place of the residual; parameters that are missing, or of another shape, begin without one.

        Shapes: as `by_parameter`; of a parameter that is frozen now, too, which may be trained again.
        """
        fitting = {name: piece for name, piece in saved.items() if len(piece) == self._others}  # sizes: at use
        self._laid_out = {name: piece.shape[1] for name, piece in fitting.items()}
        self.residual = torch.cat([*fitting.values()], 1).float() if fitting else None

    def _residual_for(self, count: int, device: torch.device) -> Tensor:
        """The residual, laid out for the parameters that are trained now."""  # -> [nodes - 1, count] fp32
        sizes = dict(self._sizes())
        if sum(sizes.values()) != count:  # before torch 2.13 a parameter without a gradient is left out
            sizes = {"": count}
        if self.residual is None or [*sizes.items()] != [*self._laid_out.items()] or self.residual.device != device:
            before = self.by_parameter()
            empty = torch.zeros(self._others, 0, dtype=torch.float32, device=device)
            pieces = [
                before[n].to(device)
                if n in before and before[n].shape[1] == size
                else empty.new_zeros(self._others, size)
                for n, size in sizes.items()
            ]
            self.residual, self._laid_out = torch.cat([empty, *pieces], 1), sizes
        return self.residual

    def _summed_in_node(self, parts: Tensor) -> Tensor:
        """The sums over the ranks of this node of what the ranks with this rank's place in their nodes own.

        Shapes: `[nodes, local * n]` -> `[nodes, n]`.
        """
        if self._local is None:
            return parts
        nodes, size = len(parts), self._local.size()
        for_each = parts.view(nodes, size, -1).transpose(0, 1).contiguous()  # [local, nodes, n]
        summed = parts.new_empty(nodes, for_each.shape[2])
        _reduce_scatter_single(summed.view(-1), for_each.view(-1), group=self._local)
        return summed
