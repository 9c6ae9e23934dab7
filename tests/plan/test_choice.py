"""`dt.auto`: the least expected loss within a budget, for links that it measures, and the same choice on all ranks."""

import pytest
import torch

import detonation as dt
import worlds
from detonation.cluster.network.throttled import ThrottledCommunicator
from detonation.core.link.link_speed import LinkSpeed
from detonation.plan import auto, losses
from detonation.plan.choice import choose, waiting, why
from detonation.plan.cost import Network, Work
from detonation.plan.losses import Loss, expected, loss_of, loss_table, near
from detonation.plan.search import candidate_settings, options

WORK = Work([{"w": (600, 700), "b": (700,)}], compute_s=0.1)
RATES = [1e4, 1e6, 1e7, 1e8, 1e9, 1e11]


def ranked_at(rate, replicas=2):
    return options(candidate_settings(), WORK, Network.of_link_speed(LinkSpeed(rate, 1e-4), replicas, 1))


@pytest.mark.parametrize("budget", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("rate", RATES)
def test_nothing_within_the_budget_is_expected_to_cost_less_loss(rate, budget):
    communicating = [option for option in ranked_at(rate) if option.cost.scheme.signal != "nothing"]
    best = choose(ranked_at(rate), budget)
    within = [option for option in communicating if waiting(option) <= budget]
    if within:
        assert waiting(best) <= budget and all(best.expected <= option.expected for option in within)
    else:
        assert all(best.cost.exposed_s <= option.cost.exposed_s for option in communicating)
    assert choose(list(reversed(ranked_at(rate))), budget).cost.scheme == best.cost.scheme


def test_an_unmeasured_setting_is_expected_to_cost_more_than_a_measured_one():
    measured, relative, unknown = dt.demo(), dt.demo(topk=3), dt.slicing()
    assert loss_of(relative, 2) is None and not [loss for loss in loss_table() if loss.scheme == "slicing"]
    assert 0 <= expected(measured, 2) < expected(relative, 2) < expected(unknown, 2)
    diloco = dt.diloco(every=20)  # measured to cost 6 % on text and 15 % on images: the worse of them counts
    assert min(loss.cost for loss in loss_table()) < 0 < 0.1 < expected(diloco, 2) < expected(unknown, 2)
    assert all(expected(scheme, 2) >= 0 for scheme in candidate_settings())


def test_a_loss_counts_for_as_many_replicas_as_it_was_measured_with_or_more(monkeypatch):
    measured = [(2, 0.01, "text"), (8, 0.14, "text"), (2, 0.02, "images")]
    rows = tuple(Loss("demo", {"topk": 4}, cost, 3, recipe, 300, n, "docs/log.md") for n, cost, recipe in measured)
    monkeypatch.setattr(losses, "loss_table", lambda: rows)
    near.cache_clear()
    found = [loss_of(dt.demo(), replicas).cost for replicas in (1, 2, 7, 8, 64)]
    predicted = expected(dt.demo(), 4), expected(dt.demo(), 8), expected(dt.demo(topk=3), 8)
    near.cache_clear()
    assert found == [0.02, 0.02, 0.02, 0.14, 0.14]
    assert predicted == (0.02, 0.14, 0.14 + losses.UNTRIED)


def test_a_fast_link_gets_full_synchronisation_and_a_slow_one_a_scheme_that_fits():
    names = [choose(ranked_at(rate), 0.1).cost.scheme.name for rate in RATES]
    assert names[-1] == "full" and names[0] != "full"
    assert choose(ranked_at(1e9, replicas=1), 0.1).cost.scheme.name == "full"


def test_the_reason_names_scheme_link_budget_and_the_wait_of_full_synchronisation():
    ranked, network = ranked_at(1e6), Network.of_link_speed(LinkSpeed(1e6, 1e-4), 2, 1)
    line = why(choose(ranked, 0.1), ranked, network, 0.1)
    assert "of a step of" in line and "at 1mbit per node" in line and "budget of 10%" in line and "full() would" in line
    crawling = Network.of_link_speed(LinkSpeed(1e3, 1.0), 2, 1)
    unfit = options(candidate_settings(), WORK, crawling)
    alone = Network.of_link_speed(LinkSpeed(1e9), 1, 1)
    assert "with one node" in why(ranked[0], ranked, alone, 0.1)
    assert "none stays within the budget of 10%" in why(choose(unfit, 0.1), unfit, crawling, 0.1)


def choose_and_train(mesh, speed, step_seconds):
    """Returns the choice of `dt.auto` on this rank, after a step with it."""
    auto.PROBE_S = 0.3
    model = dt.shard(torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.Linear(400, 300)), mesh)
    axis = ThrottledCommunicator(mesh["replicate"], speed)
    chosen = dt.auto(model, axis, step_seconds=step_seconds)
    optimizer = dt.replicate(torch.optim.AdamW(model.parameters(), lr=1e-3), model, axis, chosen)
    model(torch.randn(2, 300)).square().mean().backward()
    optimizer.step()
    return chosen.name, dict(chosen.arguments)


# A throttled link can only be slower than its rate; next to a step of days the time that this machine adds is nothing.
@pytest.mark.parametrize(("rate", "step_seconds", "full"), [(1e12, 1e6, True), (1e6, 1.0, False)])
def test_the_library_measures_chooses_and_agrees(rate, step_seconds, full):
    choices = worlds.run(choose_and_train, 2, 2, LinkSpeed(rate, 0.002), step_seconds)
    assert (choices[0][0] == "full") == full and choices == choices[:1] * 4


def deciding(mesh, other):
    """Rank 0 chooses demo; with `other`, rank 1 makes another scheme of that name."""
    device, rank = torch.device("cpu"), torch.distributed.get_rank()
    if rank == 1 and other:
        auto.scheme = lambda name, arguments: dt.full()
    choice = dt.demo(topk=3) if rank == 0 else dt.full()
    return worlds.caught(lambda: auto.broadcast_choice(choice, auto.world_link(device), device) == dt.demo(topk=3))


def test_rank_0_decides_and_all_ranks_must_make_the_same_scheme():
    assert worlds.run(deciding, 2, 1, False) == [("nothing", "")] * 2
    for error, line in worlds.run(deciding, 2, 1, True):
        assert error == "Mismatch" and "replica 1 has scheme=" in line


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"step_seconds": 0.0}, "step_seconds is 0.0, must be the seconds of a step"),
        ({"step_seconds": 1.0, "budget": 0}, "budget is 0, must be a part of a step"),
        ({"step_seconds": 1.0, "budget": 10}, "budget is 10, must be a part of a step"),
        ({"step_seconds": 1.0, "budget": "a tenth"}, "budget is 'a tenth', must be a part of a step"),
    ],
)
def test_arguments_out_of_range_are_refused_before_anything_is_measured(arguments, line):
    with pytest.raises(ValueError, match=line):
        dt.auto(torch.nn.Linear(1, 1), None, **arguments)
