"""Checks how the user sets up training. Each error message is one line that names the mistake and
its remedy.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from detonation.choices import first_names
from detonation.core.agreement import Safety
from detonation.core.codec import Sign
from detonation.core.link import (
    Axis,
    Communicator,
    Coordinates,
    Level,
    is_sharded_over,
    sharding_ranks,
)
from detonation.core.schemes import GradientScheme, ParameterScheme, Scheme
from detonation.core.schemes import scheme as scheme_named

_log = logging.getLogger("detonation")
_INSIDE = 'fully_shard(model, mesh=mesh["shard"]) or detonation.shard(model, mesh)'


def check_arguments(optimizer: object, model: object) -> None:
    """Raises `TypeError` unless the arguments of `replicate` are an optimizer and a model, and
    `ValueError` if this optimizer or model cannot be replicated."""
    if isinstance(optimizer, type):
        raise TypeError(
            f"the optimizer is the class {(n := optimizer.__name__)}: make an optimizer,"
            f" {n}(model.parameters())"
        )
    if not (hasattr(optimizer, "param_groups") and isinstance(model, nn.Module)):
        kinds = f"got {type(optimizer).__name__} and {type(model).__name__}"
        raise TypeError(
            f"replicate takes an optimizer and then its model, {kinds}: replicate(optimizer, model,"
            " ...)"
        )
    if isinstance(optimizer, LBFGS):
        raise ValueError(
            "LBFGS evaluates the loss several times in a step, which cannot be replicated: take"
            " another optimizer"
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            _check_embedding(name, module)


def _check_embedding(name: str, module: nn.Embedding | nn.EmbeddingBag) -> None:
    if module.max_norm is not None:
        raise ValueError(
            f"the embedding {name} has max_norm={module.max_norm}, so forward rescales the rows"
            " that this replica looks up, and replicas would differ: use max_norm=None"
        )
    if module.sparse and module.weight.requires_grad and isinstance(module.weight, DTensor):
        raise ValueError(
            f"the gradient of {name}.weight is sparse, which cannot be replicated: use sparse=False"
        )


def check_options(
    switches: Mapping[str, object], numbers: Mapping[str, object], safety: object
) -> None:
    """Raises `TypeError` unless each value of `switches` is a bool, each value of `numbers` is a
    number or None, and `safety` is a `Safety` or None.
    """
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}, must be True or False")
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float | None):
            raise TypeError(f"{name} is {value!r}, must be a number, or None")
    if not isinstance(safety, Safety | None):
        raise TypeError(
            f"safety is {safety!r}, must be a detonation.Safety, such as Safety(non_finite='skip')"
        )


def checked_levels(levels: Iterable[tuple[Axis, Scheme | str]]) -> list[Level]:
    """Checks the types in `levels`, and returns the levels with each scheme name replaced by the
    scheme.

    Raises:
        TypeError: An axis is neither a mesh axis nor a communicator, or a scheme is neither a
            `Scheme` nor a name.
        ValueError: No scheme has this name.
    """
    return [(_checked_axis(axis), _checked_scheme(scheme)) for axis, scheme in levels]


def _checked_axis(axis: object) -> Axis:
    if isinstance(axis, str):
        raise TypeError(f'the axis is the name {axis!r}: pass the axis itself, mesh["{axis}"]')
    if isinstance(axis, dist.ProcessGroup):
        raise TypeError(
            'the axis is a process group: pass mesh["replicate"], or DeviceMesh.from_group(group,'
            ' "cuda")'
        )
    if not isinstance(axis, DeviceMesh | Communicator):
        raise TypeError(
            f"the axis is a {type(axis).__name__}, must be an axis of a device mesh,"
            ' mesh["replicate"], or a subclass of detonation.extend.Communicator'
        )
    return axis


def _checked_scheme(scheme: object) -> Scheme:
    if isinstance(scheme, str):
        return scheme_named(scheme)
    if isinstance(scheme, Scheme):
        return scheme
    if callable(scheme):
        name = getattr(scheme, "__name__", repr(scheme))
        raise TypeError(f"the scheme is the function {name}: call it, {name}()")
    raise TypeError(
        f"the scheme is {scheme!r}, must be a scheme such as detonation.demo(), or its name"
    )


def check_balance(schemes: Sequence[Scheme], intra_node: DeviceMesh | None) -> None:
    """Raises `ValueError` if `schemes` do not support `balance`, which lets replicas run different
    numbers of local steps.
    """
    if len(schemes) > 1 or not isinstance(schemes[0], ParameterScheme):
        names = "+".join(scheme.name for scheme in schemes)
        raise ValueError(
            "balance=True needs a single level whose scheme has rounds, such as diloco(), but this"
            f" run uses {names}: pass balance=False, or use such a scheme"
        )
    if schemes[0].round.every == 1:
        raise ValueError(
            f"balance=True needs rounds of several steps, but {schemes[0].name} has every=1:"
            " set every to at least 2"
        )
    if schemes[0].resume_from == "sent":
        raise ValueError(
            f"balance=True is not for {schemes[0].name}, which averages only the sent coordinates"
            " of the weights: pass balance=False"
        )
    if intra_node is not None:
        raise ValueError(
            "balance=True does not work with intra_node: leave intra_node out, and shard the"
            " model inside the node"
        )


def warn_of_losses(optimizer: Optimizer, levels: Sequence[Level]) -> None:
    """Logs a warning, on one replica, about two set-ups that make the loss far higher
    (docs/findings.md).

    The first set-up is a second momentum, see `warn_of_second_momentum`. In the second set-up, a
    scheme sends only signs of its top-k values, and error feedback keeps the rounding errors in the
    memory of unsent values. These errors are as large as the values themselves, so top-k selects
    them again.
    """
    warn_of_second_momentum(optimizer, levels)
    for _, scheme in levels if _is_first(levels) else ():
        if not isinstance(scheme, GradientScheme):
            continue
        kept = scheme.feedback is not None and scheme.feedback.error_feedback
        if kept and isinstance(scheme.codec.precision, Sign) and not scheme.codec.selection.shared:
            _log.warning(
                "%s keeps the rounding errors of its signs, which are as large as its values"
                " and make the loss far higher: pass error_feedback=False",
                scheme.name,
            )


def warn_of_second_momentum(
    optimizer: Optimizer, levels: Sequence[Level], since: bool = False
) -> None:
    """Logs a warning once, on one replica, if the optimizer uses a momentum in addition to the
    momentum of the scheme.

    The scheme removes sent coordinates from its own momentum in the same step. A second momentum in
    the optimizer spreads the sent coordinates over many later steps.

    Args:
        since: True if the optimizer had no momentum when it was replicated. OneCycleLR and CyclicLR
            set a momentum later.
    """
    sparse = [
        scheme
        for _, scheme in levels
        if isinstance(scheme, GradientScheme)
        and scheme.feedback is not None
        and scheme.codec.selection.period != 1
    ]
    own = next(filter(None, map(_own_momentum, optimizer.param_groups)), "")
    if not sparse or not own or optimizer in _warned:
        return
    _warned.add(optimizer)
    remedy = (
        "set the optimizer's momentum to 0, for Adam by betas=(0.0, 0.95), or use"
        " detonation.loco(), which needs no such change"
    )
    if since:
        remedy = (
            "pass cycle_momentum=False to OneCycleLR or CyclicLR, which set it after replicate"
            " was called"
        )
    if _is_first(levels):
        _log.warning(
            "%s keeps its own momentum, and the additional momentum of %s (%s) makes the loss"
            " far higher: %s",
            sparse[0].name,
            type(optimizer).__name__,
            own,
            remedy,
        )


def warn_of_rounding(found: str, here: Coordinates, closely: bool) -> None:
    """Logs a warning on the first rank. It says how replicas round differently (`found`), and how
    training continues.
    """
    if (here.replica, here.shard) == (0, 0):
        _log.warning(_CLOSE if closely else _SINGLY, found)


def warn_of_others(names: Sequence[str]) -> None:
    """Logs a warning that replicas differ in the weights `names`. These weights require a gradient,
    but this optimizer does not train them.
    """
    if names:
        _log.warning(
            "replicas differ in %s, which this optimizer does not train: if no other optimizer"
            " trains them, freeze them with requires_grad_(False), and start from equal weights"
            " (same_weights)",
            first_names(names),
        )


def warn_of_no_grads(optimizer: Optimizer, here: Coordinates) -> None:
    """Logs a warning on the first rank if no parameter has a gradient in the first step."""
    graded = any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
    if (here.replica, here.shard) == (0, 0) and not graded:
        _log.warning(
            "no parameter has a gradient in the first step, so the step moves nothing: call"
            " backward() before step(). A model that FSDP2 shards must return tensors, or tuples,"
            " dicts or dataclasses of tensors, because FSDP2 finds no tensors in other objects"
        )


_CLOSE = (
    "replicas round differently, so their weights stay close, but not equal to the last bit:"
    " %s. Each step makes a part of the weights equal to those of replica 0; pass"
    ' Safety(equal="bits") to refuse such replicas'
)
_SINGLY = (
    "replicas round differently: %s. Each operation of the optimizer's steps is now rounded"
    " separately, which takes longer and keeps the replicas equal to the last bit; pass"
    ' Safety(equal="close") to use torch\'s own steps'
)
_warned: WeakSet[Optimizer | nn.Module] = WeakSet()


def _is_first(levels: Sequence[Level]) -> bool:
    axis = levels[0][0]
    return (dist.get_rank() if isinstance(axis, DeviceMesh) else axis.replica) == 0


def _own_momentum(group: Mapping[str, Any]) -> str:
    """Returns the momentum setting of a parameter group as text, such as "momentum is 0.9"; returns
    "" without a momentum.

    A group of Muon has both `momentum` and `betas`. Then only `momentum` is read. Muon uses `betas`
    for few parameters, and these parameters trained better with a momentum than without.
    """
    name, value = (
        ("momentum", group["momentum"])
        if "momentum" in group
        else ("betas[0]", group.get("betas", (0,))[0])
    )
    if value:
        return f"{name} is {value:g}"
    return ""


def check_layout(
    model: nn.Module,
    parameters: Mapping[str, Tensor],
    levels: Sequence[Level],
    intra_node: DeviceMesh | None,
) -> None:
    """Raises `ValueError` if a parameter is sharded or averaged over several replicas of `levels`,
    or if a wrapper hides how the parameters are sharded.

    Replicas that share such a parameter would exchange its whole gradient over the slow link, in
    addition to the messages of the scheme. The function also logs a warning if no axis joins this
    rank to other replicas, and if an FSDP2 policy has no `reduce_dtype`.
    """
    if _is_first(levels):
        _warn_of_reduce_dtype(model, parameters)
    axes = [axis for axis, _ in levels if isinstance(axis, DeviceMesh)]
    if not axes:
        return
    for axis in axes:
        if axis.ndim > 1:
            names = f"{axis.ndim} dimensions {axis.mesh_dim_names}"
            raise ValueError(f'the axis has {names}, must have one: pass mesh["replicate"]')
    ranks = {rank for axis in axes for rank in axis.mesh.flatten().tolist()}
    others = ranks - {dist.get_rank()}
    for module in model.modules():
        _check_wrapper(module, others, intra_node)
    for name, parameter in parameters.items():
        _check_parameter(name, parameter, others)
    if any(scheme.signal != "nothing" for _, scheme in levels):
        _check_whole(parameters, intra_node)
    _warn_alone(axes, parameters)


def _warn_of_reduce_dtype(model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
    """Logs a warning once, on rank 0, if the mixed-precision policy of FSDP2 has no `reduce_dtype`.
    The version of torch then determines the dtype in which FSDP2 adds gradients.

    From version 2.15 on, torch uses the dtype of the parameter instead of `param_dtype`.
    """
    units: Any = [module for module in model.modules() if isinstance(module, FSDPModule)]
    policies = [unit._get_fsdp_state()._mp_policy for unit in units]
    narrow = {policy.param_dtype for policy in policies if policy.reduce_dtype is None} - {None}
    sharded = [each for each in parameters.values() if isinstance(each, DTensor)]
    # if a parameter has only one shard, FSDP2 adds no gradients, so `reduce_dtype` has no effect
    dtypes = {each.dtype for each in sharded if each.device_mesh.size() > 1} - narrow
    if narrow and dtypes and model not in _warned and dist.get_rank() == 0:
        _warned.add(model)
        _log.warning(
            "a policy of FSDP2 names no reduce_dtype: inside the node torch adds gradients in"
            " %s before version 2.15 (%d bytes per parameter), and from 2.15 on in the dtype of"
            " the parameters (%d bytes): pass reduce_dtype=torch.float32 to MixedPrecisionPolicy",
            ", ".join(map(str, narrow)),
            min(dtype.itemsize for dtype in narrow),
            max(dtype.itemsize for dtype in dtypes),
        )


def _check_wrapper(module: nn.Module, others: set[int], intra_node: DeviceMesh | None) -> None:
    """Raises `ValueError` if `module` is a wrapper that hides the shards of parameters, or that
    averages gradients over the ranks `others`, which belong to other replicas.
    """
    if isinstance(module, FullyShardedDataParallel):
        raise ValueError(f"FullyShardedDataParallel (FSDP1) hides its shards: use FSDP2, {_INSIDE}")
    if isinstance(module, DistributedDataParallel):
        _check_averaged(module, others, intra_node)


def _check_parameter(name: str, parameter: Tensor, others: set[int]) -> None:
    """Raises `ValueError` if `parameter` is on the meta device, or is sharded over the ranks
    `others`, which belong to other replicas.
    """
    if parameter.device.type == "meta":
        raise ValueError(
            f"{name} is on the meta device, and has no weights yet: call"
            " model.to_empty(device=...), initialise the weights, and call"
            ' detonation.same_weights(model, mesh["replicate"])'
        )
    if not isinstance(parameter, DTensor):
        return
    ranks = parameter.device_mesh.mesh.flatten().tolist()
    if others.isdisjoint(ranks):
        return
    if parameter.device_mesh.ndim > 1:
        cause = "by hybrid sharding (HSDP)"
    else:
        cause = "or the axis is the wrong one"
    raise ValueError(
        f"{name} is on ranks {_listed(ranks)}, so replicas share it ({cause}): shard inside the "
        f'replica, {_INSIDE}, and pass the axis between replicas, mesh["replicate"]'
    )


def _check_whole(parameters: Mapping[str, Tensor], intra_node: DeviceMesh | None) -> None:
    """Raises `ValueError` if several ranks of a replica hold the same whole parameter but
    `intra_node` is not given.

    Without `intra_node`, each rank would send its own messages for this parameter, and the ranks'
    copies of the parameter would diverge.
    """
    if intra_node is not None:
        joined = set(dist.get_process_group_ranks(intra_node.get_group()))
    else:
        joined = set()
    sharded = {name: p for name, p in parameters.items() if isinstance(p, DTensor)}
    axes = {
        frozenset(ranks): name
        for name, p in sharded.items()
        for ranks in sharding_ranks(p)
        if len(ranks) > 1
    }
    for ranks, example in axes.items():
        others = {*ranks} - {dist.get_rank()}
        for name, parameter in parameters.items():
            if not others <= joined and not is_sharded_over(parameter, others):
                raise ValueError(
                    f"{name} is held whole by the ranks {_listed(sorted(ranks))}, over which"
                    f" {example} is sharded: shard {name}, too (dt.shard(model, mesh), or"
                    " fully_shard at the root); or, if its gradient is equal on these ranks, as"
                    ' under tensor parallelism, pass replicate(..., intra_node=mesh["tensor"])'
                )


def _check_averaged(
    module: DistributedDataParallel, others: set[int], intra_node: DeviceMesh | None
) -> None:
    ranks = dist.get_process_group_ranks(module.process_group)
    if others & set(ranks):
        raise ValueError(
            f"DistributedDataParallel averages gradients over ranks {_listed(ranks)}, which belong"
            " to several replicas: pass the plain model, whose gradients the scheme exchanges, or"
            " call comm_hook(model, scheme) in place of replicate, or pass the process group inside"
            ' the node to DistributedDataParallel, and intra_node=mesh["shard"] to replicate'
        )
    if intra_node is None and len(ranks) > 1 and dist.get_rank() == 0:
        _log.warning(
            "DistributedDataParallel makes the ranks of a node equal, and each rank sends the"
            ' same messages: pass intra_node=mesh["shard"] to send the messages over the slow'
            " link only once per node"
        )


def _warn_alone(axes: Sequence[DeviceMesh], parameters: Mapping[str, Tensor]) -> None:
    world = dist.get_world_size()
    shards = max(
        (p.device_mesh.size() for p in parameters.values() if isinstance(p, DTensor)), default=1
    )
    if all(axis.size() == 1 for axis in axes) and shards < world and dist.get_rank() == 0:
        if shards == 1:
            one = "one rank"
        else:
            one = f"{shards} ranks"
        _log.warning(
            "the axis joins no other replica, so the %d ranks of the world train apart, in groups"
            ' of %s: pass the axis between replicas, mesh["replicate"]',
            world,
            one,
        )


def _listed(ranks: Sequence[int]) -> str:
    first = ", ".join(map(str, ranks[:8]))
    if len(ranks) > 8:
        return f"{first}, ... ({len(ranks)} in all)"
    return first
