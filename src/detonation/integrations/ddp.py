"""`comm_hook`: a scheme as the communication hook of DistributedDataParallel, for models that are
not sharded."""

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
from detonation.core.agreement.safety import Safety
from detonation.core.optimizer.build import Settings
from detonation.core.optimizer.replicated import Replicated
from detonation.core.optimizer.setup_checks import checked_levels
from detonation.core.optimizer.state import replica_state
from detonation.core.optimizer.stats import Stats
from detonation.core.schemes.scheme import Scheme


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
    """Makes `model` exchange gradients by `scheme`, in place of its dense all-reduce.

    It registers itself as the communication hook, before the first backward. The optimizer and the
    loop stay as they are: after `backward` each `p.grad` is the update that the replicas agreed on,
    with the bits of `replicate` over the same replicas. One exchange follows each backward outside
    `no_sync`. All ranks save and load `state_dict`.

    Args:
        model: The wrapped model. Frozen and unused parameters, bf16 and autocast may be used. The
            gradient of a parameter that no rank used stays as it was, as without the hook.
        scheme: One that exchanges gradients without a delay, such as `loco()`, or its name.
        mesh: The mesh of `init_mesh` over the ranks of `model`. The ranks of a node
            (`mesh["shard"]`) average their gradients while backward computes, and each sends a part
            of their message to the other nodes. Without it every rank is a replica of its own.
        seed: Of the random selections; the same on all ranks.
        kernels: Use compiled kernels where they can be built (g++), on all ranks or none.
        safety: The reaction to gradients that are not finite, and to replicas out of sync.

    Raises:
        TypeError: The model is not wrapped in DistributedDataParallel.
        ValueError: The scheme exchanges parameters, or has a delay; the model has a hook, or
            reduces in another precision; the mesh has other ranks.
        Mismatch: In the first backward, where ranks differ in a setting or a weight.
        LargerThanDense: In the first backward, where the scheme would send more than
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
            f"comm_hook takes a DistributedDataParallel model, got {kind}: use replicate for others"
        )
    if model.mixed_precision is not None:
        raise ValueError(
            "mixed_precision of DistributedDataParallel reduces other tensors: use torch.autocast"
        )
    if model._comm_hooks:
        raise ValueError("the model has a communication hook, and can have one")
    ranks = dist.get_process_group_ranks(model.process_group)
    if mesh is None:
        axis, node = (
            DeviceMesh.from_group(model.process_group, next(model.parameters()).device.type),
            None,
        )
    else:
        if {"replicate", "shard"} - {*(mesh.mesh_dim_names or ())} or sorted(
            mesh.mesh.flatten().tolist()
        ) != ranks:
            raise ValueError(
                f'the mesh is {mesh}, must be ("replicate", "shard") over the ranks {ranks} of the'
                " model"
            )
        axis, node = mesh["replicate"], mesh["shard"]
    levels = checked_levels([(axis, scheme)])
    chosen = levels[0][1]
    if not chosen.worth_overlapping:
        raise ValueError(
            f"{chosen.name} exchanges no gradients that the same step waits for, and a hook can do"
            " nothing else: take delay=0 if it has a delay, or replicate(optimizer, model, ...)"
            " without DistributedDataParallel"
        )
    base = _NoStep(
        p for name, p in model.module.named_parameters() if name not in model.parameters_to_ignore
    )
    replicated = Replicated(
        base, model.module, levels, Settings(node, seed, kernels, safety or Safety(), None)
    )
    may_miss = model.find_unused_parameters or model.static_graph
    hook = CommHook(replicated, node, model.gradient_as_bucket_view, may_miss)
    model.register_comm_hook(None, hook.reduce)
    return hook


class CommHook:
    """The communication hook of a DistributedDataParallel model. Made by `comm_hook`.

    `replicated` exchanges the gradients of all parameters in one step, and moves no weights. The
    ranks of `node` average their gradients first. With `as_views` gradients are views of the
    buckets. `may_miss`: whether backward may leave parameters out.
    """

    def __init__(
        self, replicated: Replicated, node: DeviceMesh | None, as_views: bool, may_miss: bool
    ) -> None:
        self._replicated, self._node, self._as_views = replicated, node, as_views
        self._may_miss = may_miss
        self._arrived: list[_Bucket] = []
        self._count = sum(
            p.requires_grad for group in replicated.param_groups for p in group["params"]
        )

    @property
    def step_count(self) -> int:
        """The number of exchanges so far: of backward passes outside `no_sync`."""
        return self._replicated.step_count

    @property
    def stats(self) -> Stats:
        """Bytes, waiting, and contributions that were left out, so far; bytes within a node do not
        count."""
        return self._replicated.stats

    @property
    def dense_bytes(self) -> int:
        """Bytes that this rank would send between replicas in one step of full fp32
        synchronisation."""
        return sum(self._replicated.dense_bytes_by_level)

    def verify(self) -> None:
        """Compares the weights of all replicas, bit for bit, as every `safety.verify_every` steps.

        Collective.
        """
        self._replicated.verify()

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """The memory of this rank, under its name: every rank saves its own."""
        return {self._replicated.coordinates.name: replica_state(self._replicated)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues from the result of `state_dict` of this rank, after the model's weights were
        loaded. Collective.

        Raises `ValueError` for the state of another rank, model or scheme.
        """
        self._replicated.load_state_dict(
            {**self._replicated.base.state_dict(), "replication": state_dict}
        )

    def reduce(self, state: None, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        """Takes one bucket of gradients; with the last one, exchanges all. Called by
        DistributedDataParallel.

        The order and the content of the buckets change after the first step, those of the message
        do not.
        """
        self._arrived.append(_Bucket(bucket, self._node))
        future = self._arrived[-1].future
        # the buckets of the first step of a static graph do not say which of them is the last
        if bucket.is_last() or sum(len(each.pieces) for each in self._arrived) == self._count:
            arrived, self._arrived = self._arrived, []
            self._exchange(arrived)
        return future

    @torch.no_grad()
    def _exchange(self, arrived: list["_Bucket"]) -> None:
        """Replaces the gradients in all buckets by the update that the replicas agree on."""
        found = [
            (parameter, view, parameter.grad)
            for bucket in arrived
            for parameter, view in bucket.wait()
        ]
        used = self._used_in_node([own is not None for _, _, own in found])
        gradients = [own for _, _, own in found]
        try:
            for (parameter, view, _), is_used in zip(found, used, strict=True):
                parameter.grad = view if is_used else None
            self._replicated.step()
            gradients = [self._agreed(*each) for each in found]
        finally:
            for (parameter, _, _), gradient in zip(found, gradients, strict=True):
                parameter.grad = gradient
        for bucket in arrived:
            bucket.future.set_result(bucket.buffer)

    def _used_in_node(self, here: list[bool]) -> list[bool]:
        """Which parameters some rank of this node used, where this rank used those in `here`."""
        if self._node is None or self._node.size() == 1 or not self._may_miss:
            return here
        used = torch.tensor(here, dtype=torch.uint8, device=self._node.device_type)
        dist.all_reduce(used, dist.ReduceOp.MAX, self._node.get_group())
        return here if all(here) else [bool(each) for each in used.tolist()]

    def _agreed(self, parameter: Tensor, view: Tensor, own: Tensor | None) -> Tensor | None:
        """The gradient of `parameter` after the exchange; `own` where no rank used it.

        Shapes: any -> the same.
        """
        update = parameter.grad
        if update is None:
            return own
        if update is not view:  # this node did not use it
            view.copy_(update)
        if own is None:
            return view if self._as_views else view.clone()
        if own.data_ptr() != view.data_ptr():
            own.copy_(view)
        return own


class _Bucket:
    """One bucket of gradients, which the ranks of a node average while backward goes on."""

    def __init__(self, bucket: dist.GradBucket, node: DeviceMesh | None) -> None:  # type: ignore[name-defined]
        self.buffer = bucket.buffer()
        if self.buffer.is_sparse:
            raise ValueError("a gradient is sparse, which cannot be replicated: use sparse=False")
        self.pieces, device = (
            list(zip(bucket.parameters(), bucket.gradients(), strict=True)),
            self.buffer.device,
        )
        self.future: Future[Tensor] = Future() if device.type == "cpu" else Future(devices=[device])
        self._work = None
        if node is not None and node.size() > 1:
            self.buffer.div_(node.size())
            self._work = dist.all_reduce(self.buffer, group=node.get_group(), async_op=True)

    def wait(self) -> list[tuple[Tensor, Tensor]]:
        """Each parameter, and the part of the buffer with its gradient, laid out in memory as the
        parameter is."""
        if self._work is not None:
            self._work.wait()
        # buckets keep the memory format of a parameter that is dense, such as channels last
        dense = {
            p for p, _ in self.pieces if torch.empty_like(p, device="meta").stride() == p.stride()
        }
        return [
            (p, g.as_strided(p.size(), p.stride()) if p in dense else g) for p, g in self.pieces
        ]


class _NoStep(Optimizer):
    """Moves nothing: the caller's own optimizer steps, after backward."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        return
