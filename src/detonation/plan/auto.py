"""`auto`: measures the links of a running job, and chooses a scheme for these links."""

import hashlib
import json
import logging
from collections.abc import Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from detonation.choices import unknown
from detonation.cluster.network.measure import Everyone, probe_axis
from detonation.core.flat.tensors import local
from detonation.core.link import Axis, links_of_shards
from detonation.core.optimizer import check_arguments, local_parameters
from detonation.core.schemes import Scheme, scheme
from detonation.plan.cost import Network, Shapes, Work
from detonation.plan.losses import GOAL_STEPS, TEXT, Goal, optimizers, recipes, trained_by
from detonation.plan.search import BUDGET, check_budget, options, pairs, why

PROBE_S = 3.0
"""Approximate number of seconds for which `auto` measures the links."""

_log = logging.getLogger("detonation")


def auto(
    optimizer: Optimizer,
    model: nn.Module,
    axis: Axis,
    *,
    step_seconds: float,
    budget: float = BUDGET,
    steps: int = GOAL_STEPS,
    recipe: str = TEXT,
) -> Scheme:
    """Measures the links of `axis`. Chooses the scheme that is expected to be the first to reach
    the loss of full synchronisation.

    Collective: call it on every rank, after sharding and before `replicate`. It measures the links
    for a few seconds. Rank 0 chooses the scheme, and all ranks return this scheme. This scheme is
    the first choice of `detonation plan --optimizer`. `auto` chooses full synchronisation if it
    waits for the network for at most `budget` of a step, and if no other scheme is faster by more
    than `budget`. Otherwise `auto` chooses the scheme that is expected to reach this loss first.
    The estimates use losses that were measured with the same kind of optimizer or, without such
    losses, with AdamW. The logger "detonation" gets the reason for the choice at level INFO.

    Args:
        optimizer: Optimizer for `replicate`. An optimizer with momentum fits only schemes that
            exchange dense gradients or have rounds. `SignSGD`, and AdamW with betas=(0.0, 0.95),
            fit most schemes.
        model: Sharded model; its trained parameters set the sizes of the messages.
        axis: Axis between the replicas, such as `mesh["replicate"]` or the axis of `elastic`.
        step_seconds: Duration of a training step without the network; above 0.
        budget: Share of a step that full synchronisation may spend waiting for the network; between
            0 and 1.
        steps: Length of the training; at least 1.
        recipe: Recipe whose measured losses are used: "quick-lm" (text), "vit-fashion" (images) or
            "t5-translation" (translation).

    Returns:
        Scheme for `replicate`.

    Raises:
        ValueError: `step_seconds`, `budget` or `steps` is out of range, or no losses of `recipe`
            were measured.
        Mismatch: A rank builds another scheme from the name and arguments that rank 0 chose.

    Example:
        >>> import torch, torch.distributed as dist, detonation as dt
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = nn.Linear(8, 1)
        >>> mesh = dt.init_mesh(replicas=1, shards=1, device="cpu")
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> chosen = dt.auto(optimizer, model, mesh["replicate"], step_seconds=0.35)
        >>> chosen.name  # one replica exchanges nothing
        'full'
        >>> dt.leave()

    Reference:
        docs/networks.md compares the prediction with measurements; research/frontier.md and
        research/log.md hold the measured losses.
    """
    if not 0 < step_seconds < float("inf"):
        raise ValueError(
            f"step_seconds is {step_seconds}, must be the seconds of a step without the network,"
            " above 0"
        )
    check_budget(budget)
    if steps < 1:
        raise ValueError(
            f"steps is {steps}, must be the number of steps of the training, at least 1"
        )
    if recipe not in recipes():
        raise unknown("recipe with measured losses", recipe, recipes())
    check_arguments(optimizer, model)
    device = next(local(parameter).device for parameter in model.parameters())
    inside = [link.axis for link in links_of_shards(local_parameters(model).values())]
    everyone = Everyone(device, axis, inside)
    shards = node_shapes(model, axis, everyone)
    network = Network.of_axis(probe_axis(axis, device, PROBE_S, everyone), len(shards))
    work = Work(shards, step_seconds, overlap=False, on_accelerator=device.type != "cpu")
    trained = trained_by(type(optimizer).__name__, optimizer.defaults)
    if trained not in optimizers():
        trained = "AdamW"
    goal = Goal(axis.size(), sum(work.sizes.values()), steps, recipe, trained)
    ranked = options(pairs(goal), work, network, goal, budget)
    _log.info("auto: %s", why(ranked, network, goal, budget))
    return broadcast_choice(ranked[0].cost.scheme, everyone)


def broadcast_choice(choice: Scheme, everyone: Everyone) -> Scheme:
    """Returns the scheme that rank 0 has chosen, on every rank. Collective.

    Raises:
        Mismatch: On all ranks, if one rank builds another scheme from the same name and arguments.
    """
    name, arguments = everyone.send_to_all([choice.name, dict(choice.arguments)])[0]
    chosen = scheme(name, arguments)
    text = json.dumps([chosen.name, dict(chosen.arguments)], sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    everyone.require_same({"scheme": digest}, {"scheme": chosen.name})
    return chosen


def node_shapes(model: nn.Module, axis: Axis, everyone: Everyone) -> Sequence[Shapes]:
    """Gathers the local shapes of the trained parameters from each rank of the first replica's
    node.

    Collective.
    """
    parameters = local_parameters(model)
    shapes = {name: list(local(p).shape) for name, p in parameters.items() if p.requires_grad}
    if isinstance(axis, DeviceMesh):
        replica = axis.get_local_rank()
    else:
        replica = axis.replica
    gathered = everyone.send_to_all([replica, shapes])
    lowest = gathered[0][0]  # the first of the replicas that are not lost
    first = [shapes for number, shapes in gathered if number == lowest]
    ranks = everyone.size // axis.size()
    return [{name: tuple(shape) for name, shape in each.items()} for each in first[:ranks]]
