"""`replicate`: makes any torch optimizer train together with its replicas."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from detonation.choices import checks_keywords
from detonation.core.agreement.safety import Safety
from detonation.core.link.communicator import Axis
from detonation.core.optimizer.build import Level, Settings
from detonation.core.optimizer.replicated import Replicated
from detonation.core.schemes.scheme import Scheme


@checks_keywords("argument of replicate")
def replicate(
    optimizer: Optimizer,
    model: nn.Module,
    axis: Axis | None = None,
    scheme: Scheme | None = None,
    *,
    levels: Sequence[Level] | None = None,
    intra_node: DeviceMesh | None = None,
    seed: int = 0,
    kernels: bool = True,
    safety: Safety | None = None,
) -> Replicated:
    """Makes `optimizer` train `model` together with its replicas along `axis`, by `scheme`.

    The result is an optimizer for schedulers, gradient clipping and state-dict helpers, too. Collectives run at
    `step()` only, so all ranks must call it. At the first step the replicas compare settings, shapes and weights.

    Args:
        optimizer: Any torch optimizer over parameters of `model`, sharded or not (FSDP2 on the mesh *inside* the node
            only); its own step applies the updates that the replicas agreed on.
        model: The trained model.
        axis: Between the replicas, such as mesh["replicate"].
        scheme: How the replicas communicate, such as `demo()`.
        levels: Instead of axis and scheme, a list of (axis, scheme) from the innermost tier of the network to the
            outermost; the output of one level is the signal of the next. Levels of gradients come before levels of
            parameters.
        intra_node: The axis inside the node, such as mesh["shard"], where some parameters are held whole by each of its
            ranks (not sharded, or replicated DTensors) and their gradients are made equal there (by DDP, or as
            DTensors). Each rank then sends a part of their messages, which cross `axis` once per node.
        seed: Of the random selections; the same on all replicas.
        kernels: Use compiled kernels where they can be built (g++); they round differently, so all replicas must, or
            none.
        safety: The reaction to gradients that are not finite, and to replicas out of sync.

    Returns:
        An optimizer that shares `param_groups` and `state` with `optimizer`.

    Raises:
        ValueError: The levels contradict each other, or the optimizer cannot be replicated.
        Mismatch: At the first step, where replicas differ in a setting or a weight.
        LargerThanDense: At the first step, where the scheme would send more than full synchronisation.

    Example:
        >>> import detonation as dt
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
    if levels is None:
        if axis is None or scheme is None:
            raise ValueError("replicate needs an axis and a scheme, or levels=[(axis, scheme), ...]")
        levels = [(axis, scheme)]
    elif axis is not None or scheme is not None:
        raise ValueError("replicate takes an axis and a scheme, or levels, not both")
    if isinstance(optimizer, Replicated):
        raise ValueError("the optimizer is replicated already: pass all levels at once, levels=[(axis, scheme), ...]")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS evaluates the loss several times in a step, which cannot be replicated")
    check_order([scheme for _, scheme in levels])
    return Replicated(optimizer, model, levels, Settings(intra_node, seed, kernels, safety or Safety()))


def check_order(schemes: Sequence[Scheme]) -> None:
    """Raises `ValueError` if `schemes` cannot be levels in this order, from the innermost to the outermost."""
    signals = [scheme.signal for scheme in schemes]
    if "parameters" in signals and "gradients" in signals[signals.index("parameters") :]:
        raise ValueError("levels that exchange gradients come before levels that exchange parameters")
    gradients = [scheme for scheme in schemes if scheme.signal == "gradients"]
    if any(scheme.round.delay for scheme in gradients[:-1]):
        raise ValueError("only the outermost level of gradients may be delayed")
