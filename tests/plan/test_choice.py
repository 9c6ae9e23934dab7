"""`dt.auto`: full synchronisation within a budget, else the least time to a loss; the same choice on all ranks."""

import dataclasses

import pytest
import torch

import detonation as dt
import worlds
from detonation.cluster.network.throttled import ThrottledCommunicator
from detonation.core.link.link_speed import LinkSpeed
from detonation.plan import auto, losses
from detonation.plan.choice import largest_within, why
from detonation.plan.cost import Network, Work
from detonation.plan.losses import Loss, loss_of, near
from detonation.plan.search import candidate_settings, is_full, options, waiting
from detonation.plan.spelling import spelled

WORK = Work([{"w": (600, 700), "b": (700,)}], compute_s=0.1)
RATES = [1e4, 1e6, 1e7, 1e8, 1e9, 1e11]


def ranked_at(rate, replicas=2, budget=0.1, candidates=None):
    network = Network.of_link_speed(LinkSpeed(rate, 1e-4), replicas, 1)
    return options(candidates or candidate_settings(), WORK, network, budget)


@pytest.mark.parametrize("budget", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("rate", RATES)
def test_full_is_first_within_the_budget_else_the_least_expected_time_to_a_loss(rate, budget):
    ranked = ranked_at(rate, budget=budget)
    full = next(option for option in ranked if is_full(option))
    if waiting(full) <= budget:
        assert ranked[0] is full
    else:
        known = [option.time_to_loss_s for option in ranked if option.time_to_loss_s is not None]
        assert ranked[0].time_to_loss_s == pytest.approx(min(known), abs=1e-4)
    backwards = ranked_at(rate, budget=budget, candidates=list(reversed(candidate_settings())))
    assert [option.cost.scheme for option in backwards] == [option.cost.scheme for option in ranked]


def test_a_scheme_without_a_measured_loss_never_comes_before_one_that_has_it():
    for rate in RATES:
        known = [option.loss is not None for option in ranked_at(rate)]
        assert known == sorted(known, reverse=True) and not all(known) and any(known)


def measured(cost, interval=None, **given):
    given = {"arguments": {}, "optimizer": "SignSGD", "seeds": 3, "recipe": "text", "steps": 300, "replicas": 2} | given
    return Loss("demo", cost=cost, interval=interval, parameters=10**6, source="research/log.md", **given)


@pytest.fixture
def table(monkeypatch):
    """Replaces the measured losses."""

    def replace(*rows):
        monkeypatch.setattr(losses, "loss_table", lambda: rows)
        near.cache_clear()

    yield replace
    near.cache_clear()


def test_a_loss_costs_steps_and_a_gain_saves_none():
    def slowdown(upper):
        return measured(upper - 0.02, (upper - 0.04, upper)).slowdown

    # AdamW in full on quick-lm, seed 1: 1.6420 after 300 steps, 1.2356 after 1,200
    assert slowdown(1.6420 / 1.2356 - 1) == pytest.approx(4, rel=0.01)
    assert slowdown(0.0) == slowdown(-0.1) == 1.0 < slowdown(0.01) < slowdown(0.02)


def test_few_seeds_count_less_than_many_and_a_mean_alone_least():
    many, few, alone = measured(0.01, (0.0, 0.02)), measured(0.01, (-0.04, 0.06)), measured(0.01)
    assert many.slowdown < few.slowdown < alone.slowdown


@pytest.mark.parametrize(
    ("cost", "interval", "seeds", "verdict"),
    [
        (-0.029, (-0.0985, 0.0406), 3, "no difference seen (±7.0%)"),
        (0.1085, (0.0195, 0.1975), 3, "+10.8% ±8.9%"),
        (0.051, None, 1, "+5.1% (1 seed)"),
        (0.0, (0.0, 0.0), 3, "the baseline"),
    ],
)
def test_a_loss_is_shown_with_its_interval_and_the_size_of_its_evidence(cost, interval, seeds, verdict):
    loss = Loss("demo", {}, "SignSGD", cost, interval, seeds, "quick-lm", 590976, 300, 8, "research/log.md")
    assert loss.verdict == verdict
    text = f"on quick-lm (SignSGD, 0.6 M parameters, 8 replicas, 300 steps, {seeds} seed{'s' * (seeds > 1)})"
    assert str(loss) == f"{verdict} {text}"


def test_a_loss_counts_for_as_many_replicas_as_it_was_measured_with_or_more(table):
    tried = [(2, 0.01, "text"), (8, 0.14, "text"), (2, 0.02, "images")]
    table(*(measured(cost, arguments={"topk": 4}, replicas=n, recipe=recipe) for n, cost, recipe in tried))
    assert [loss_of(dt.demo(), replicas).cost for replicas in (1, 2, 7, 8, 64)] == [0.02, 0.02, 0.02, 0.14, 0.14]


def test_a_loss_counts_for_the_optimizer_it_was_measured_with(table):
    tried = [("SignSGD", -0.01, "text"), ("AdamW", 0.33, "text"), ("SignSGD", 0.02, "images")]
    table(*(measured(cost, optimizer=how, recipe=recipe) for how, cost, recipe in tried))
    found = [loss_of(dt.demo(), 2, how).cost for how in ("SignSGD", "AdamW", "RMSprop", None)]
    assert found == [0.02, 0.33, 0.33, 0.02]


@pytest.mark.parametrize(("short", "long"), [(0.01, 0.05), (0.05, 0.01)])
def test_of_one_model_the_longest_run_of_a_setting_counts(table, short, long):
    table(measured(short), measured(long, steps=1000))
    assert loss_of(dt.demo(), 2).steps == 1000


def test_the_nearest_number_of_replicas_counts_before_the_longest_run(table):
    table(measured(0.01, steps=1000), measured(0.05, replicas=8))
    assert [loss_of(dt.demo(), replicas).cost for replicas in (2, 8)] == [0.01, 0.05]


def test_settings_tried_with_fewer_replicas_than_others_count_no_better_than_those(table):
    table(measured(0.01, arguments={"topk": 1}), measured(0.05, arguments={"topk": 4}, replicas=8))
    assert [loss_of(dt.demo(topk=topk), 8).cost for topk in (1, 4)] == [0.05, 0.05]
    assert loss_of(dt.demo(topk=1), 2).cost == 0.01


def test_of_other_settings_those_that_send_more_do_not_count(table):
    """Rounds of 13 steps were tried with two replicas alone: with eight they do not count with rounds of 8."""

    def rounds(every, replicas, cost):
        return dataclasses.replace(measured(cost, arguments={"every": every}, replicas=replicas), scheme="muloco")

    table(rounds(13, 2, 0.04), rounds(8, 8, 0.07), rounds(23, 8, 0.2))
    found = {every: loss_of(dt.muloco(every=every), 8).cost for every in (8, 13, 23)}
    assert found == {8: 0.07, 13: 0.2, 23: 0.2}


def test_a_task_that_was_not_tried_counts_with_the_best_of_the_other_settings(table):
    wide, narrow = {"topk": 16}, {"topk": 1}
    table(
        measured(0.0, arguments=narrow),
        measured(0.01, arguments=wide),
        measured(0.09, arguments=wide, recipe="images"),
        measured(0.08, arguments={"topk": 4}, recipe="images"),
    )
    everything = [dt.demo(**wide), dt.demo(**narrow), dt.demo(topk=2)]
    assert [loss and loss.cost for loss in (loss_of(each, 2) for each in everything)] == [0.09, 0.08, None]
    assert loss_of(dt.demo(topk=2), 2) is None
    network = Network.of_link_speed(LinkSpeed(1e6, 1e-4), 2, 1)
    suffixes = {
        option.cost.scheme.arguments["topk"]: option.other_settings for option in options(everything, WORK, network)
    }
    assert suffixes == {16: "", 1: ", other settings", 2: ""}


@pytest.mark.parametrize("rate", RATES)
def test_adamw_gets_no_scheme_that_sends_a_part_of_the_coordinates(rate):
    everything = candidate_settings()
    network = Network.of_link_speed(LinkSpeed(rate, 1e-4), 2, 1)
    first = options(everything, WORK, network, 0.1, dict.fromkeys(map(spelled, everything), "AdamW"))[0].cost.scheme
    assert first.signal == "parameters" or first.codec.selection.period == 1


def test_a_fast_link_gets_full_synchronisation_and_a_slow_one_does_not():
    names = [ranked_at(rate)[0].cost.scheme.name for rate in RATES]
    assert names[-1] == "full" and names[0] != "full"
    assert ranked_at(1e9, replicas=1)[0].cost.scheme.name == "full"


@pytest.mark.parametrize("rate", RATES)
def test_the_adapter_takes_the_setting_that_sends_most_within_the_budget(rate):
    ranked = ranked_at(rate, candidates=[dt.demo(topk=topk) for topk in (1, 2, 4, 8, 16)])
    within = [option.cost.bytes_sent for option in ranked if waiting(option) <= 0.1]
    best = largest_within(ranked, 0.1)
    if within:
        assert best.cost.bytes_sent == max(within)
    else:
        assert best.cost.exposed_s == min(option.cost.exposed_s for option in ranked)


def test_the_reason_names_scheme_link_evidence_and_the_wait_of_full_synchronisation():
    ranked, network = ranked_at(1e6), Network.of_link_speed(LinkSpeed(1e6, 1e-4), 2, 1)
    line = why(ranked[0], ranked, network)
    assert "of a step of" in line and "at 1mbit per node" in line and "; full() would wait" in line
    assert "M parameters, 2 replicas, 300 steps" in line and "expected to reach a loss first" in line
    alone, fast = Network.of_link_speed(LinkSpeed(1e9), 1, 1), ranked_at(1e11)
    assert "with one node" in why(ranked[0], ranked, alone)
    assert why(fast[0], fast, network, 0.1).endswith("within the budget of 10%")


def choose_and_train(mesh, speed, step_seconds):
    """Returns the choice of `dt.auto` on this rank, after a step with it."""
    auto.PROBE_S = 0.3
    model = dt.shard(torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.Linear(400, 300)), mesh)
    axis = ThrottledCommunicator(mesh["replicate"], speed)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    chosen = dt.auto(adamw, model, axis, step_seconds=step_seconds)
    optimizer = dt.replicate(adamw, model, axis, chosen)
    model(torch.randn(2, 300)).square().mean().backward()
    optimizer.step()
    return chosen.name, dict(chosen.arguments)


# A throttled link can only be slower than its rate; next to a step of days the time that this machine adds is nothing.
@pytest.mark.parametrize(("rate", "step_seconds", "full"), [(1e12, 1e6, True), (1e6, 1.0, False)])
def test_the_library_measures_chooses_and_agrees(rate, step_seconds, full):
    choices = worlds.run(choose_and_train, 2, 2, LinkSpeed(rate, 0.002), step_seconds)
    assert (choices[0][0] == "full") == full and choices == choices[:1] * 4
    assert choices[0][0] not in ("demo", "random", "random_sign")  # which trains badly under AdamW


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
    model = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match=line):
        dt.auto(dt.SignSGD(model.parameters()), model, None, **arguments)
