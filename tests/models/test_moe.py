"""Experts of a mixture that few tokens reach: no drift without use, no refusal after it, and equal replicas."""

import pytest
import torch

import detonation as dt
from detonation.cluster.network.simulated import simulate_replicas
from detonation.core.flat.tensors import digest
from detonation.models import build_model
from zoo import SCHEMES

EXPERTS, ALWAYS, RARE = 8, 4, 5
REPLICAS, QUIET, STEPS, LR = 4, 6, 12, 1e-3
SIZES = {
    "hidden_size": 32,
    "layers": 1,
    "heads": 2,
    "experts": EXPERTS,
    "active": 1,
    "feed_forward": 32,
}
EXACT = "demo", "random", "diloco", "full"
CODED = {"demo-sign": 2.1 * LR, "demo-owner": 2.1 * LR, "sparseloco": 0.5 * LR}
"""Schemes whose codes have none for zero, with bounds: zeros are sent as either sign by turns, zero in the mean."""


def trained(communicator, scheme, still):
    """The experts that end more than `still` from where they began, the messages refused, and the weights.

    Only the first replica uses the expert `RARE`, after `QUIET` steps, and nobody uses the last two.
    """
    torch.manual_seed(0)
    model, used = build_model("olmoe", SIZES), torch.arange(ALWAYS)

    def routed(router, inputs, output):
        logits, scores, _ = output
        return logits, scores, used[torch.arange(len(scores)) % len(used)].unsqueeze(1)

    model.get_submodule("model.layers.0.mlp.gate").register_forward_hook(routed)
    optimizer = dt.replicate(dt.SignSGD(model.parameters(), lr=LR), model, communicator, scheme)
    experts = model.get_submodule("model.layers.0.mlp.experts")
    before = {name: weight.detach().clone() for name, weight in experts.named_parameters()}
    for step in range(STEPS):
        if step >= QUIET and communicator.replica == 0:
            used = torch.tensor([*range(ALWAYS), RARE])
        generator = torch.Generator().manual_seed(100 * step + communicator.replica)
        ids = torch.randint(0, 256, (2, 16), generator=generator)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    moved = {
        expert
        for name, weight in experts.named_parameters()
        for expert in range(EXPERTS)
        if (weight[expert] - before[name][expert]).abs().max() > still
    }
    return moved, optimizer.stats.refused, digest(model.parameters())


@pytest.mark.parametrize("name", [*EXACT, *CODED])
def test_an_expert_moves_where_some_replica_used_it_and_nowhere_else(name):
    scheme, still = SCHEMES[name], CODED.get(name, 0.0)
    (moved, refused, weights), *others = simulate_replicas(
        lambda c: trained(c, scheme, still), REPLICAS
    )
    assert moved == {*range(ALWAYS), RARE} and not refused
    assert all(other == (moved, 0, weights) for other in others)


def test_the_balance_of_experts_counts_in_training_alone():
    torch.manual_seed(0)
    model, ids = build_model("olmoe", {**SIZES, "balance": 5.0}), torch.randint(0, 256, (2, 16))
    losses = []
    for training in (True, False):
        model.train(training)
        losses.append(model(input_ids=ids, labels=ids).loss.item())
    assert losses[0] > losses[1] + 4
    plain = torch.nn.functional.cross_entropy(
        model(input_ids=ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    )
    assert losses[1] == pytest.approx(plain.item())


def test_more_active_experts_than_there_are_is_an_error():
    with pytest.raises(ValueError, match="active must be from 1 to experts, which is 8, not 9"):
        build_model("olmoe", {"active": 9})
