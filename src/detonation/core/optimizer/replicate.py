"""`replicate`: makes any torch optimizer train together with its replicas."""

import operator
from collections.abc import Sequence
from typing import SupportsIndex

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from detonation.choices import checks_keywords
from detonation.core.agreement import Safety
from detonation.core.link import Axis, rules_of
from detonation.core.optimizer.build import Settings
from detonation.core.optimizer.replicated import Replicated
from detonation.core.optimizer.setup_checks import (
    check_arguments,
    check_balance,
    check_options,
    checked_levels,
    warn_of_losses,
)
from detonation.core.schemes import ParameterScheme, Scheme


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
    """Makes `optimizer` train `model` together with its replicas along `axis`, by `scheme`.

    The result is an optimizer for schedulers and state-dict helpers, too. Collectives run at
    `step()` only, so all ranks must call it. At the first step the replicas compare settings,
    shapes and weights.

    Args:
        optimizer: Any torch optimizer over parameters of `model`, sharded or not (FSDP2 on the mesh
            *inside* the node only); its own step applies the updates that the replicas agreed on.
        model: The trained model.
        axis: Between the replicas, such as mesh["replicate"].
        scheme: How the replicas communicate, such as `demo()`; a name such as "demo" stands for its
            defaults.
        levels: Instead of axis and scheme, pairs of them from the innermost tier of the network to
            the outermost; the output of one level is the signal of the next. Levels of gradients
            come before levels of parameters.
        intra_node: The axis inside the node, such as mesh["shard"], where some parameters are held
            whole by each of its ranks (not sharded, or replicated DTensors) and their gradients are
            made equal there (by DDP, or as DTensors). Each rank then sends a part of their
            messages, which cross `axis` once per node.
        clip: The largest global norm of the gradients that `optimizer` steps on, above 0; None does
            not clip. It clips after the exchange, like hybrid sharding: the agreed update under a
            scheme of gradients, and the gradient of each replica under a scheme of parameters.
            torch's `clip_grad_norm_` before `step()` clips the gradient of each replica before the
            exchange.
        balance: Under a scheme of parameters, let slow replicas take fewer local steps per round,
            so that all end it together: see `Replicated.idle`. Replicas measure their local steps,
            agree on the counts at the end of each round, and their movements are averaged by
            weights that follow the counts.
        seed: Of the random selections; the same on all replicas.
        kernels: Use compiled kernels where they can be built (g++); they round differently: on all
            replicas, or none.
        safety: The reaction to gradients that are not finite, and to replicas out of sync.

    Returns:
        An optimizer that shares `param_groups` and `state` with `optimizer`.

    Raises:
        TypeError: An argument is of another kind, such as the name of an axis in the place of the
            axis.
        ValueError: The levels contradict each other, or the optimizer cannot be replicated; at the
            first step, where replicas share a sharded parameter, or ranks of a replica hold one
            whole that `intra_node` does not join.
        Mismatch: At the first step, where replicas differ in a setting or a weight.
        LargerThanDense: At the first step, where the scheme would send more than full
            synchronisation.

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
    check_order([scheme for _, scheme in checked])
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
    """The levels that the caller gave, or one level of an axis and a scheme."""
    if levels is None:
        if axis is None or scheme is None:
            raise ValueError(
                "replicate needs an axis and a scheme, or levels=[(axis, scheme), ...]"
            )
        return [(axis, scheme)]
    if axis is not None or scheme is not None:
        raise ValueError("replicate takes an axis and a scheme, or levels, not both")
    if not levels:
        raise ValueError(
            "levels is empty, must have an axis and a scheme: levels=[(axis, scheme), ...]"
        )
    return levels


def check_order(schemes: Sequence[Scheme]) -> None:
    """Raises `ValueError` if `schemes` cannot be levels in this order, from the innermost to the
    outermost."""
    signals = [scheme.signal for scheme in schemes]
    if "parameters" in signals and "gradients" in signals[signals.index("parameters") :]:
        raise ValueError(
            "levels that exchange gradients come before levels that exchange parameters"
        )
    gradients = [scheme for scheme in schemes if scheme.signal == "gradients"]
    if any(scheme.round.delay for scheme in gradients[:-1]):
        raise ValueError("only the outermost level of gradients may be delayed")
    for scheme in [scheme for scheme in schemes if isinstance(scheme, ParameterScheme)][:-1]:
        if not scheme.averages:
            raise ValueError(
                f"{scheme.name} is a level of rounds inside another one, whose moves its anchor"
                " would undo: take a scheme there that averages at once and in fp32, such as"
                " local_sgd()"
            )
