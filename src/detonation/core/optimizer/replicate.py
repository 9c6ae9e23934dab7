"""`replicate`: makes any torch optimizer train together with its replicas."""

import operator
from collections.abc import Sequence
from typing import SupportsIndex

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from detonation.choices import checks_keywords
from detonation.core.agreement import Safety
from detonation.core.link import Axis, placed, rules_of
from detonation.core.optimizer.build import Settings
from detonation.core.optimizer.replicated import Replicated
from detonation.core.optimizer.setup_checks import (
    check_arguments,
    check_balance,
    check_options,
    checked_levels,
    warn_of_losses,
)
from detonation.core.schemes import Scheme, check_order


@checks_keywords("argument of replicate")
def replicate(
    optimizer: Optimizer,
    model: nn.Module,
    axis: Axis | None = None,
    scheme: Scheme | str | None = None,
    *,
    levels: Sequence[tuple[Axis, Scheme | str]] | None = None,
    intra_node: DeviceMesh | None = None,
    clip: float | None = None,
    balance: bool = False,
    seed: int = 0,
    kernels: bool = True,
    safety: Safety | None = None,
) -> Replicated:
    """Makes `optimizer` train `model` together with the replicas of the model along the mesh axis
    `axis`. `scheme` defines what the replicas exchange, and when.

    The returned optimizer also works with schedulers and state-dict helpers. Its collectives run
    only in `step()`, so all ranks must call `step()`. At the first step the replicas compare their
    settings, shapes and weights.

    Args:
        optimizer: Any torch optimizer over parameters of `model`, sharded or not (FSDP2 on the mesh
            *inside* the node only); its own step applies the agreed updates.
        model: The trained model.
        axis: The axis between the replicas, such as mesh["replicate"].
        scheme: How the replicas communicate, such as `demo()`; a name such as "demo" uses the
            scheme's defaults.
        levels: Pairs of an axis and a scheme, in place of `axis` and `scheme`, from the innermost
            tier of the network to the outermost. The output of one level is the signal of the next
            level. Levels that exchange gradients come before levels that exchange parameters.
        intra_node: The axis inside the node, such as mesh["shard"]. Pass it if the ranks of a node
            hold whole parameters (unsharded, or replicated DTensors) with equal gradients (by DDP,
            or as DTensors). Each rank then sends a part of their messages, so that the messages
            cross `axis` once per node.
        clip: The largest global norm of the gradients that `optimizer` steps on, above 0; None for
            no clipping. Gradients are clipped after the exchange, like in hybrid sharding: the
            agreed update if the scheme exchanges gradients, or each replica's gradient if the
            scheme exchanges parameters. torch's `clip_grad_norm_` before `step()` clips the
            gradient of each replica before the exchange.
        balance: Under a scheme that exchanges parameters, lets slow replicas run fewer local steps
            per round, so that all replicas end the round together; see `Replicated.idle`. Replicas
            measure their local steps, agree on the counts at the end of each round, and weight
            their movements by these counts.
        seed: Seed of the random selections, equal on all replicas.
        kernels: Use compiled kernels if they can be built (g++). Kernels round differently from
            torch, so use them on all replicas or on none.
        safety: The reaction to nonfinite gradients, and to replicas that are out of sync.

    Returns:
        An optimizer that shares `param_groups` and `state` with `optimizer`.

    Raises:
        TypeError: An argument has another type, for example the name of an axis instead of the
            axis.
        ValueError: The levels contradict each other, or the optimizer cannot be replicated. Also
            raised at the first step, if replicas share a sharded parameter, or if ranks of a
            replica hold a whole parameter and `intra_node` is not given.
        Mismatch: At the first step, if replicas differ in a setting or a weight.
        LargerThanDense: At the first step, if the scheme would send more than full synchronisation.

    Example:
        >>> import torch, detonation as dt
        >>> from detonation.cluster.network.loopback import LoopbackCommunicator
        >>> model = nn.Linear(4, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = dt.replicate(sgd, model, LoopbackCommunicator(replicas=2), dt.full())
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.stats.bytes_sent > 0
        True

    Reference: From et al., FlexDeMo, arXiv 2502.06728.
    """
    levels = _given_levels(axis, scheme, levels)
    if isinstance(optimizer, Replicated):
        raise ValueError(
            "the optimizer is replicated already: pass all levels at once, levels=[(axis, scheme),"
            " ...]"
        )
    check_arguments(optimizer, model)
    check_options({"balance": balance, "kernels": kernels}, {"clip": clip}, safety)
    if not isinstance(seed, SupportsIndex):
        raise TypeError(f"seed is {seed!r}, must be a whole number, the same on all replicas")
    if clip is not None and not clip > 0:
        raise ValueError(f"clip is {clip}, must be above 0, or None for no clipping")
    checked = checked_levels(levels)
    check_order(placed(checked))
    if balance:
        check_balance([scheme for _, scheme in checked], intra_node)
    for axis, _ in checked:
        rules_of(axis).refuse(checked, optimizer, intra_node, balance)
    warn_of_losses(optimizer, checked)
    settings = Settings(
        intra_node, operator.index(seed), kernels, safety or Safety(), clip, balance
    )
    return Replicated(optimizer, model, checked, settings)


def _given_levels(
    axis: Axis | None,
    scheme: Scheme | str | None,
    levels: Sequence[tuple[Axis, Scheme | str]] | None,
) -> Sequence[tuple[Axis, Scheme | str]]:
    if levels is None:
        if axis is None or scheme is None:
            raise ValueError(
                "replicate needs an axis and a scheme: pass both, or levels=[(axis, scheme), ...]"
            )
        return [(axis, scheme)]
    if axis is not None or scheme is not None:
        raise ValueError("replicate takes an axis and a scheme, or levels: do not pass both")
    if not levels:
        raise ValueError("levels is empty: pass an axis and a scheme, levels=[(axis, scheme), ...]")
    return levels
