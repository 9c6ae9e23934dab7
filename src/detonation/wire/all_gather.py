"""The all-gather of weights between nodes: quantized differences to a reference copy that all nodes hold alike."""

import logging
from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from detonation.core.link.link import Link
from detonation.wire.reduce_scatter import BlockIntegers


class WeightMoves:
    """Counts the moves of sharded weights in this process: the steps of torch optimizers, and what else is announced.

    Every rank takes the same steps, so all agree on when weights are exchanged. A tensor's own version would not do:
    a rank whose shard is empty has nothing to write to.
    """

    count = 0

    def __call__(self) -> None:
        """Announces a move, on all ranks alike."""
        self.count += 1


WEIGHT_MOVES = WeightMoves()
"""Of this process."""


@cache
def watch_optimizers() -> None:
    """Announces each step of an optimizer of sharded weights from now on.

    A model that one rank alone trains beside them is none: the other ranks would not know of an exchange.
    """
    register_optimizer_step_post_hook(_announce)


def _announce(optimizer: Optimizer, *_: object) -> None:
    if any(isinstance(parameter, DTensor) for group in optimizer.param_groups for parameter in group["params"]):
        WEIGHT_MOVES()


_log = logging.getLogger("detonation")
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class DifferenceGather(AllGather):
    """The all-gather of one FSDP unit, whose shards lie on several nodes.

    After an optimizer step each rank sends the difference between its shard and the reference to the other nodes, once.
    All ranks add the same bytes to the same reference, so their copies stay bitwise equal. The output is the
    reference, gathered inside the node; where no step was taken nothing else is sent.

    reference: `[nodes, n]`, the shards of the ranks with this rank's place in their node, as all know them; None until
    the first gather, which is exact.

    Args:
        link: Between the nodes.
        local: The ranks of this node; None for one.
        codec: Of differences; None sends the weights as they are.
        resync_every: Exchanges after which one is exact; 0 for never.
        is_trained: False where no step can move the weights; the last exchange, after they were frozen, is exact.
        version: Of this rank's weights: another number where they were written to.
    """

    def __init__(
        self,
        link: Link,
        local: dist.ProcessGroup | None,
        codec: BlockIntegers | None,
        resync_every: int,
        is_trained: Callable[[], bool],
        version: Callable[[], int],
    ) -> None:
        self._link, self._local, self._codec = link, local, codec
        self._resync_every, self._is_trained, self._version = resync_every, is_trained, version
        self.reference: Tensor | None = None
        self._exchanges = 0  # since the last exact one
        self._seen = self._seen_version = -1
        self._was_trained = False  # at the last gather
        self._warned = False
        watch_optimizers()

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        # [S * n], [n]: the input is a part of the output, which is therefore written last
        reference, trained = self.reference, self._is_trained()
        if reference is None or reference.shape[1] != len(input_tensor) or reference.dtype != input_tensor.dtype:
            reference = self.reference = self._exact(input_tensor)
        elif self._seen != WEIGHT_MOVES.count and (trained or self._was_trained):
            self._exchange(reference, input_tensor, exactly=not trained)
        elif self._seen == WEIGHT_MOVES.count and self._seen_version != self._version():
            raise RuntimeError(
                "weights were changed, and by no optimizer, so that this rank alone knows of it: call "
                "detonation.resync_weights(model) on all ranks after changing them"
            )
        self._seen, self._seen_version, self._was_trained = WEIGHT_MOVES.count, self._version(), trained
        if self._local is None:
            output_tensor.copy_(reference.view(-1))
            return
        size = self._local.size()
        gathered = reference.new_empty(size, *reference.shape)
        _all_gather_single(gathered.view(-1), reference.view(-1), group=self._local)
        output_tensor.view(len(reference), size, -1).copy_(gathered.transpose(0, 1))

    def forget(self) -> None:
        """Makes the next exchange exact: the weights were replaced."""
        self.reference = None

    def counts(self) -> Tensor:
        """The exchanges since the last exact one, and whether a step was taken since the last gather.

        Shapes: -> `[2]` int64.
        """
        return torch.tensor([self._exchanges, self._seen != WEIGHT_MOVES.count], dtype=torch.int64, device="cpu")

    def restore(self, own: Tensor, counts: Tensor) -> None:
        """Continues from a saved reference, of which `own` is this rank's part. Collective.

        Shapes: `[n]`, and `[2]` int64 as of `counts`.
        """
        self.reference = self._exact(own)
        self._exchanges, stepped = map(int, counts.tolist())
        self._seen, self._seen_version = -1 if stepped else WEIGHT_MOVES.count, self._version()
        self._was_trained = bool(stepped)

    def _exchange(self, reference: Tensor, own: Tensor, exactly: bool) -> None:
        """Brings the reference up to date, in place."""
        self._exchanges += 1
        if self._codec and not own.is_floating_point() and not self._warned:
            self._warned = True
            _log.warning("a unit with parameters of several dtypes is sent as it is: give it a mixed_precision policy")
        exactly |= self._exchanges == self._resync_every or not own.is_floating_point()
        if self._codec is None or exactly:
            reference.copy_(self._exact(own))
            return
        reference.nan_to_num_(0.0, 0.0, 0.0)  # weights that were not finite for a while must not stay so
        difference = own.float() - reference[self._link.replica].float()
        arriving = self._link.all_gather(self._codec.encode(difference))
        for row, message in zip(reference, arriving(), strict=True):
            # one node after another, so that the decoded numbers of one shard exist at a time
            row.copy_(row.float().add_(self._codec.decode(message, len(own))))
        arriving.release()

    def _exact(self, own: Tensor) -> Tensor:
        """The shards of all nodes as they are."""  # [n] -> [nodes, n]
        self._exchanges = 0
        arriving = self._link.all_gather(own.contiguous().view(torch.uint8))
        with torch.inference_mode(False):  # steps after an evaluation change it in place
            exact = arriving().clone().view(own.dtype)
        arriving.release()
        return exact
