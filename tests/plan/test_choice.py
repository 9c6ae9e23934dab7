"""The automatic choice: least expected loss within a budget, the same on all ranks, of links measured on the spot."""

import pytest
import torch

import detonation as dt
import worlds
from detonation.cluster.network.throttled import Emulated
from detonation.core.link.link_speed import Pace
from detonation.plan import auto, losses
from detonation.plan.choice import choose, waiting, why
from detonation.plan.cost import Network, Work
from detonation.plan.losses import Loss, expected, loss_of, near, table
from detonation.plan.search import candidates, options

WORK = Work([{"w": (600, 700), "b": (700,)}], compute_s=0.1)
PACES = [1e4, 1e6, 1e7, 1e8, 1e9, 1e11]


def found_at(rate, replicas=2):
    return options(candidates(), WORK, Network.of_pace(Pace(rate, 1e-4), replicas, 1))


@pytest.mark.parametrize("budget", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("rate", PACES)
def test_nothing_within_the_budget_is_expected_to_cost_less_loss(rate, budget):
    found = [option for option in found_at(rate) if option.cost.scheme.signal != "nothing"]
    best = choose(found_at(rate), budget)
    within = [option for option in found if waiting(option) <= budget]
    if within:
        assert waiting(best) <= budget and all(best.expected <= option.expected for option in within)
    else:
        assert all(best.cost.exposed_s <= option.cost.exposed_s for option in found)
    assert choose(list(reversed(found_at(rate))), budget).cost.scheme == best.cost.scheme


def test_what_nobody_has_measured_is_expected_to_cost_more_than_what_somebody_has():
    known, relative, strange = dt.demo(), dt.demo(topk=3), dt.slicing()
    assert loss_of(relative, 2) is None and not [loss for loss in table() if loss.scheme == "slicing"]
    assert 0 <= expected(known, 2) < expected(relative, 2) < expected(strange, 2)
    told = dt.diloco(every=20)  # measured to cost 6 % on text and 15 % on images: the worse of them counts
    assert min(loss.cost for loss in table()) < 0 < 0.1 < expected(told, 2) < expected(strange, 2)
    assert all(expected(scheme, 2) >= 0 for scheme in candidates())


def test_a_loss_counts_for_as_many_replicas_as_it_was_measured_with_or_more(monkeypatch):
    measured = [(2, 0.01, "text"), (8, 0.14, "text"), (2, 0.02, "images")]
    rows = tuple(Loss("demo", {"topk": 4}, cost, 3, recipe, 300, n, "docs/log.md") for n, cost, recipe in measured)
    monkeypatch.setattr(losses, "table", lambda: rows)
    near.cache_clear()
    found = [loss_of(dt.demo(), replicas).cost for replicas in (1, 2, 7, 8, 64)]
    told = expected(dt.demo(), 4), expected(dt.demo(), 8), expected(dt.demo(topk=3), 8)
    near.cache_clear()
    assert found == [0.02, 0.02, 0.02, 0.14, 0.14]
    assert told == (0.02, 0.14, 0.14 + losses.UNTRIED)


def test_a_fast_link_gets_full_synchronisation_and_a_slow_one_a_scheme_that_fits():
    names = [choose(found_at(rate), 0.1).cost.scheme.name for rate in PACES]
    assert names[-1] == "full" and names[0] != "full"
    assert choose(found_at(1e9, replicas=1), 0.1).cost.scheme.name == "full"


def test_the_reason_names_scheme_pace_budget_and_what_full_synchronisation_would_wait():
    found, network = found_at(1e6), Network.of_pace(Pace(1e6, 1e-4), 2, 1)
    line = why(choose(found, 0.1), found, network, 0.1)
    assert "of a step of" in line and "at 1mbit a node" in line and "budget of 10%" in line and "full() would" in line
    crawling = Network.of_pace(Pace(1e3, 1.0), 2, 1)
    lost = options(candidates(), WORK, crawling)
    alone = Network.of_pace(Pace(1e9), 1, 1)
    assert "with one node" in why(found[0], found, alone, 0.1)
    assert "none stays within the budget of 10%" in why(choose(lost, 0.1), lost, crawling, 0.1)


def measured(mesh, pace, step_seconds):
    """What `dt.auto` chooses on this rank, and whether `replicate` takes it."""
    auto.PROBE_S = 0.3
    model = dt.shard(torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.Linear(400, 300)), mesh)
    axis = Emulated(mesh["replicate"], pace)
    chosen = dt.auto(model, axis, step_seconds=step_seconds)
    optimizer = dt.replicate(torch.optim.AdamW(model.parameters(), lr=1e-3), model, axis, chosen)
    model(torch.randn(2, 300)).square().mean().backward()
    optimizer.step()
    return chosen.name, dict(chosen.arguments)


# an emulated link can only be slower than it says, and next to a step of days whatever this machine adds is nothing
@pytest.mark.parametrize(("rate", "step_seconds", "full"), [(1e12, 1e6, True), (1e6, 1.0, False)])
def test_the_library_measures_chooses_and_agrees(rate, step_seconds, full):
    everyones = worlds.run(measured, 2, 2, Pace(rate, 0.002), step_seconds)
    assert (everyones[0][0] == "full") == full and everyones == everyones[:1] * 4


def deciding(mesh, other):
    """The first rank says demo; a rank that makes something else of it is found by all."""
    device, rank = torch.device("cpu"), torch.distributed.get_rank()
    if rank == 1 and other:
        auto.scheme = lambda name, arguments: dt.full()
    mine = dt.demo(topk=3) if rank == 0 else dt.full()
    return worlds.caught(lambda: auto.decided(mine, auto.everyone(device), device) == dt.demo(topk=3))


def test_the_first_rank_decides_and_all_make_the_same_of_it():
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
def test_what_makes_no_sense_is_refused_before_anything_is_measured(arguments, line):
    with pytest.raises(ValueError, match=line):
        dt.auto(torch.nn.Linear(1, 1), None, **arguments)
