"""`comm_hook`: uses a scheme as the communication hook of DistributedDataParallel, without sharding
of the model.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from detonation.choices import checks_keywords
from detonation.core.agreement import Safety
from detonation.core.optimizer import Replicated, Settings, Stats, checked_levels, replica_state
from detonation.core.schemes import Scheme


@checks_keywords("argument of comm_hook")
def comm_hook(
    model: DistributedDataParallel,
    scheme: Scheme | str,
    mesh: DeviceMesh | None = None,
    *,
    seed: int = 0,
    kernels: bool = True,
    safety: Safety | None = None,
) -> "CommHook":
    """Makes `model` exchange its gradients by `scheme`, instead of by a dense all-reduce.

    Call this function before the first backward. The optimizer and the training loop need no
    change: after `backward`, each `p.grad` is the update on which all ranks agree. This update is
    bitwise equal to that of `replicate`. Each backward outside `no_sync` makes one exchange. Every
    rank must save and load the `state_dict` of its own hook.

    Args:
        model: Wrapped model. Frozen and unused parameters, bf16 and autocast are supported. If no
            rank uses a parameter, its gradient does not change, as without the hook.
        scheme: Scheme that exchanges gradients, such as `loco()`, or its name.
        mesh: Mesh of `init_mesh` over the ranks of `model`. The ranks of a node (`mesh["shard"]`)
            average their gradients during backward, and each of these ranks sends a part of the
            message to the other nodes. Without a mesh each rank is a replica.
        seed: Seed of random selections; equal on all ranks.
        kernels: Use compiled kernels if all ranks can build them (g++).
        safety: Reaction to gradients that are not finite, and to replicas out of sync.

    Raises:
        TypeError: The model is not wrapped in DistributedDataParallel.
        ValueError: The scheme exchanges parameters, the model already has a hook or reduces
            gradients in another precision, or the mesh has other ranks than the model.
        Mismatch: In the first backward, if ranks differ in a setting or a weight.
        LargerThanDense: In the first backward, if the scheme would send more than
            DistributedDataParallel.

    Example:
        >>> import torch.distributed as dist, detonation as dt
        >>> from torch import nn
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = DistributedDataParallel(nn.Linear(8, 1))
        >>> hook = dt.comm_hook(model, dt.demo(topk=4, chunk=8))
        >>> model(torch.ones(2, 8)).sum().backward()
        >>> hook.step_count, sorted(hook.state_dict()["replica0-shard0"])
        (1, ['0.residual.bias', '0.residual.weight', '0.usual_norm', 'step'])
        >>> dt.leave()

    Reference: Vogels et al., PowerSGD, arXiv 1905.13727 (a communication hook with a memory).
    """
    if not isinstance(model, DistributedDataParallel):
        kind = type(model).__name__
        raise TypeError(
            f"comm_hook takes a DistributedDataParallel model, got {kind}: use replicate for other"
            " models"
        )
    if model.mixed_precision is not None:
        raise ValueError(
            "mixed_precision of DistributedDataParallel averages the gradients in another dtype:"
            " leave mixed_precision out, and use torch.autocast"
        )
    if model._comm_hooks:
        raise ValueError("the model already has a communication hook: register only one hook")
    ranks = dist.get_process_group_ranks(model.process_group)
    if mesh is None:
        axis = DeviceMesh.from_group(model.process_group, next(model.parameters()).device.type)
        node = None
    else:
        missing = {"replicate", "shard"} - {*(mesh.mesh_dim_names or ())}
        if missing or sorted(mesh.mesh.flatten().tolist()) != ranks:
            raise ValueError(
                f'the mesh is {mesh}, must be ("replicate", "shard") over the ranks {ranks} of the'
                " model"
            )
        axis = mesh["replicate"]
        node = mesh["shard"]
    levels = checked_levels([(axis, scheme)])
    chosen = levels[0][1]
    if chosen.signal != "gradients":
        raise ValueError(
            f"{chosen.name} does not exchange the gradients of each step, but a communication hook"
            " must do so: use replicate(optimizer, model, ...) without DistributedDataParallel"
        )
    ignored = model.parameters_to_ignore
    base = _NoStep(p for name, p in model.module.named_parameters() if name not in ignored)
    settings = Settings(node, seed, kernels, safety or Safety(), None)
    replicated = Replicated(base, model.module, levels, settings)
    may_miss = model.find_unused_parameters or model.static_graph
    hook = CommHook(replicated, node, model.gradient_as_bucket_view, may_miss)
    model.register_comm_hook(None, hook.reduce)
    return hook


class CommHook:
    """The communication hook of a DistributedDataParallel model. `comm_hook` builds it.

    Args:
        replicated: Exchanges the gradients of all parameters in one step; changes no weights.
        node: Ranks of a node, which average their gradients first.
        as_views: Gradients are views of the buckets.
        may_miss: Backward may leave parameters without a gradient.
    """

    def __init__(
        self, replicated: Replicated, node: DeviceMesh | None, as_views: bool, may_miss: bool
    ) -> None:
        self._replicated = replicated
        self._node = node
        self._as_views = as_views
        self._may_miss = may_miss
        self._arrived: list[_Bucket] = []
        parameters = [p for group in replicated.param_groups for p in group["params"]]
        self._count = sum(p.requires_grad for p in parameters)

    @property
    def step_count(self) -> int:
        """Number of exchanges so far: one exchange per backward outside `no_sync`."""
        return self._replicated.step_count

    @property
    def stats(self) -> Stats:
        """Bytes sent between nodes, waiting time, and number of skipped contributions so far."""
        return self._replicated.stats

    @property
    def dense_bytes(self) -> int:
        """Bytes that this rank would send to other replicas in a step of full fp32
        synchronisation.
        """
        return sum(self._replicated.dense_bytes_by_level)

    def verify(self) -> None:
        """Compares the weights of all replicas bit for bit. The hook also makes this comparison
        every `safety.verify_every` steps.

        Collective.
        """
        self._replicated.verify()

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Returns this rank's memory of unsent values, under a key with the rank's name. Each rank
        must save its own memory.
        """
        return {self._replicated.coordinates.name: replica_state(self._replicated)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores the `state_dict` of this rank. Load the weights of the model before this call.
        Collective.

        Raises `ValueError` if the state belongs to another rank, model or scheme.
        """
        base = self._replicated.base.state_dict()
        self._replicated.load_state_dict({**base, "replication": state_dict})

    def reduce(
        self,
        state: None,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> Future[Tensor]:
        """Collects one bucket of gradients. After the last bucket of a backward, exchanges all
        buckets.

        DistributedDataParallel calls this method. DistributedDataParallel reorders its buckets
        after the first step, but the order of gradients in a message does not change.
        """
        self._arrived.append(_Bucket(bucket, self._node))
        future = self._arrived[-1].future
        # in the first step of a static graph, DistributedDataParallel marks no bucket as the last
        if bucket.is_last() or sum(len(each.pieces) for each in self._arrived) == self._count:
            arrived = self._arrived
            self._arrived = []
            self._exchange(arrived)
        return future

    @torch.no_grad()
    def _exchange(self, arrived: list["_Bucket"]) -> None:
        """Replaces the gradients in all buckets by the update on which all ranks agree."""
        pieces = [piece for bucket in arrived for piece in bucket.wait()]
        found = [(parameter, view, parameter.grad) for parameter, view in pieces]
        used = self._used_in_node([own is not None for _, _, own in found])
        gradients = [own for _, _, own in found]
        try:
            for (parameter, view, _), is_used in zip(found, used, strict=True):
                parameter.grad = None
                if is_used:
                    parameter.grad = view
            self._replicated.step()
            gradients = [self._agreed(*each) for each in found]
        finally:
            for (parameter, _, _), gradient in zip(found, gradients, strict=True):
                parameter.grad = gradient
        for bucket in arrived:
            bucket.future.set_result(bucket.buffer)

    def _used_in_node(self, here: list[bool]) -> list[bool]:
        """Returns, for each parameter, whether any rank of this node used the parameter. `here`
        says which parameters this rank used.
        """
        if self._node is None or self._node.size() == 1 or not self._may_miss:
            return here
        used = torch.tensor(here, dtype=torch.uint8, device=self._node.device_type)
        dist.all_reduce(used, dist.ReduceOp.MAX, self._node.get_group())
        if all(here):
            return here
        return [bool(each) for each in used.tolist()]

    def _agreed(self, parameter: Tensor, view: Tensor, own: Tensor | None) -> Tensor | None:
        """Returns the gradient of `parameter` after the exchange. If no rank used the parameter,
        returns `own`, its gradient before the exchange.
        """
        update = parameter.grad
        if update is None:
            return own
        # if no rank of this node used the parameter, its update is not in the bucket yet
        if update is not view:
            view.copy_(update)
        if own is None:
            if self._as_views:
                return view
            return view.clone()
        if own.data_ptr() != view.data_ptr():
            own.copy_(view)
        return own


class _Bucket:
    """A bucket of gradients. The ranks of a node average each bucket during backward."""

    def __init__(self, bucket: Any, node: DeviceMesh | None) -> None:
        self.buffer = bucket.buffer()
        if self.buffer.is_sparse:
            raise ValueError(
                "a gradient is sparse, which cannot be replicated: use sparse=False in embeddings"
            )
        self.pieces = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
        devices = []
        if self.buffer.device.type != "cpu":
            devices = [self.buffer.device]
        self.future: Future[Tensor] = Future(devices=devices)
        self._work = None
        if node is not None and node.size() > 1:
            self.buffer.div_(node.size())
            self._work = dist.all_reduce(self.buffer, group=node.get_group(), async_op=True)

    def wait(self) -> list[tuple[Tensor, Tensor]]:
        """Waits until the bucket holds the average of the node. Returns each parameter with its
        gradient, which is a view of the buffer of the bucket.
        """
        if self._work is not None:
            self._work.wait()
        found = []
        for parameter, gradient in self.pieces:
            # a gradient in a bucket has the strides of its parameter if that parameter is dense
            if torch.empty_like(parameter, device="meta").stride() == parameter.stride():
                gradient = gradient.as_strided(parameter.size(), parameter.stride())
            found.append((parameter, gradient))
        return found


class _NoStep(Optimizer):
    """An optimizer that changes no weights. After backward, the caller's own optimizer changes the
    weights.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        return
