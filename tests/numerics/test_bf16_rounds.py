"""Rounds of bf16 weights: a replica begins at the rounded anchor, and its movement is what it moved."""

import pytest
import torch

import detonation as dt
from detonation.cluster.network.simulated import simulate_replicas

REPLICAS, EVERY, ROUNDS, ULP = 4, 2, 20, 2.0**-7  # of bf16 in [1, 2)
SHAPE = 8, 64


def weights():
    return torch.rand(SHAPE, generator=torch.Generator().manual_seed(0)).add(1).bfloat16()


def movement(replica, step):
    """The movement of a replica in a step: an ulp or none, so that a quarter of an ulp is left in the mean."""
    generator = torch.Generator().manual_seed(1000 * step + replica)
    return torch.randint(-1, 2, SHAPE, generator=generator).mul(ULP).bfloat16()


def trained(scheme, settle=0):
    """Anchor, start (where it has one) and weights of each replica after all rounds; also, without a movement, after
    `settle` steps more and after a few rounds more."""

    def act(communicator):
        model = torch.nn.ParameterList([weights()])
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer, seen = dt.replicate(sgd, model, communicator, scheme), []
        for steps in (range(EVERY * ROUNDS), range(settle), range(12)):
            for step in steps:
                model[0].grad = movement(communicator.replica, step)
                optimizer.step()
            sgd.param_groups[0]["lr"] = 0.0
            state = {
                key.split(".")[1]: tensor.clone() for key, tensor in optimizer.local_state().items()
            }
            seen.append([state["anchor"], state.get("start"), model[0].detach().clone()])
        return seen

    return simulate_replicas(act, REPLICAS)


def ends(starts, number):
    """The weights at the end of a round of replicas that begin it at these fp32 positions, rounded."""
    found = [start.bfloat16() for start in starts]
    for step in range(number * EVERY, (number + 1) * EVERY):
        found = [end - movement(replica, step) for replica, end in enumerate(found)]
    return found


def moved(starts, number):
    pairs = zip(starts, ends(starts, number), strict=True)
    return [start.bfloat16().float() - end.float() for start, end in pairs]


def test_diloco_is_the_papers_rule_on_bf16_weights():
    anchor = torch.nn.Parameter(weights().float())
    outer = torch.optim.SGD([anchor], lr=0.7, momentum=0.5, nesterov=True)
    for number in range(ROUNDS):
        anchor.grad = torch.stack(moved([anchor.detach()] * REPLICAS, number)).mean(0)
        outer.step()
    assert (anchor - weights()).abs().max() > 4 * ULP
    for (found, _, _), *_ in trained(dt.diloco(every=EVERY, outer_lr=0.7, outer_momentum=0.5)):
        torch.testing.assert_close(found, anchor.detach(), atol=1e-5, rtol=0)


STILL = {
    "diloco": (dt.diloco(every=2, outer_momentum=0.0), 0),
    "diloco-int8": (dt.diloco(every=2, outer_momentum=0.0, precision="int8"), 0),
    "streaming": (
        dt.schemes.streaming_diloco(
            4, fragments=1, delay=1, keep=0.0, outer_momentum=0.0, precision="fp32"
        ),
        4,
    ),
    "muloco": (dt.muloco(every=2, outer_momentum=0.0, precision="int8"), 40),
    "sparseloco": (
        dt.schemes.sparseloco(
            every=2, topk=32, chunk=64, aggregate="mean", outer_lr=0.7, precision="int8"
        ),
        80,
    ),
    "sparta": (dt.schemes.sparta(rate=1 / 4), 4),
}
"""Each with the steps in which all that the replicas did arrives."""


@pytest.mark.parametrize("name", STILL)
def test_law_11_where_no_replica_moves_the_rounding_is_no_signal(name):
    """As a signal it moves the anchor by up to half an ulp, to what the weights can hold."""
    for _, before, after in trained(*STILL[name]):
        assert (after[0] - before[0]).abs().max() <= 1e-3 * ULP
        assert torch.equal(after[2], before[2])


def test_law_11_replicas_that_keep_an_ulp_of_their_own_do_not_drift():
    """An ulp that a replica keeps of its own rounds to an ulp again, and is sent again: to and fro."""
    scheme = dt.schemes.streaming_diloco(
        4, fragments=1, delay=1, keep=0.5, outer_momentum=0.0, precision="fp32"
    )
    for early, late in zip(trained(scheme, 8), trained(scheme, 120), strict=True):
        assert (late[2][0] - early[1][0]).abs().max() <= ULP
