"""The law of rounds: it carries what was measured of AdamW in rounds to other sizes and replicas, and nothing else."""

import math

import pytest

import detonation as dt
from detonation import schemes
from detonation.plan import law, losses
from detonation.plan.law import carried, cost_of_rounds
from detonation.plan.losses import Goal, estimate, loss_table, relative

ROUNDS = dt.muloco(30, precision="2bit", outer_lr=1, outer_momentum=0)
STREAMING = schemes.streaming_diloco(every=30, delay=5, keep=0.0)


def found(scheme=STREAMING, optimizer="AdamW", parameters=139_840, replicas=8, steps=3000):
    return estimate(scheme, optimizer, Goal(replicas, parameters, steps))


def measured_rounds():
    """Each measurement of AdamW in dense rounds of 30 steps, with its cost to full synchronisation."""
    full = {
        row.task: row.losses for row in loss_table() if row.is_full and row.optimizer == "AdamW"
    }
    rows = [row for row in loss_table() if row.has_law and row.arguments["every"] == 30]
    return [(row, relative(row.losses, full[row.task])[0]) for row in rows]


def test_at_its_own_size_and_replicas_a_measurement_stays_as_it_is():
    cost, interval = carried(0.19, (0.1, 0.3), 1.0, (8, 8))
    assert (cost, *interval) == pytest.approx((0.19, 0.1, 0.3), rel=1e-9)
    here = found()
    assert here.kind == "measured" and "law" not in here.evidence
    assert here.cost == pytest.approx(0.142, abs=1e-3)


@pytest.mark.parametrize("replicas", [2, 4, 8])
@pytest.mark.parametrize("parameters", [35e6, 550e6, 2.4e9])
def test_where_others_fitted_the_law_its_cost_is_within_the_interval(parameters, replicas):
    """Our rows are of a model 250 to 17,000 times smaller."""
    for scheme in (ROUNDS, STREAMING):
        carried_there = found(scheme, parameters=int(parameters), replicas=replicas)
        low, high = carried_there.interval
        assert carried_there.kind == "law" and not carried_there.beyond
        assert low < cost_of_rounds(parameters, replicas) < high < 0.2


def test_the_exponents_of_the_interval_are_those_between_our_rows_and_the_law():
    """What each measurement of 30 steps needs to reach the law at its smallest size."""
    needed = []
    for row, cost in measured_rounds():
        there = math.log1p(cost_of_rounds(law.SIZES[0], row.replicas))
        times = math.log(law.SIZES[0] / row.parameters)
        needed.append(math.log(math.log1p(cost) / there) / times)
    assert len(needed) >= 5 and law.EXPONENTS[0] <= min(needed) + 0.001
    assert max(needed) <= law.EXPONENTS[1] and min(needed) < law.EXPONENT < max(needed)


def test_the_cost_grows_with_replicas_as_much_more_than_the_law_as_was_measured():
    by_count = {
        row.replicas: math.log1p(cost) for row, cost in measured_rounds() if row.scheme == "muloco"
    }
    more = by_count[8] / by_count[2] / (math.log(8) / math.log(2))
    assert 1 < more ** (1 / 2) <= law.STEEPER


@pytest.mark.parametrize("replicas", [2, 8, 64])
def test_the_larger_the_model_the_smaller_the_cost(replicas):
    sizes = [10**exponent for exponent in range(6, 12)]
    every = [found(parameters=size, replicas=replicas) for size in sizes]
    costs = [each.cost for each in every]
    assert costs == sorted(costs, reverse=True) and costs[-1] > 0
    highs = [each.interval[1] for each in every]
    assert highs == sorted(highs, reverse=True)


def test_the_more_replicas_the_higher_the_cost():
    ends = [found(parameters=10**9, replicas=count).interval[1] for count in (8, 16, 64)]
    assert ends == sorted(ends)


def test_beyond_the_law_the_evidence_says_so():
    inside, larger, wider = (
        found(parameters=size, replicas=count)
        for size, count in ((10**9, 8), (8 * 10**9, 8), (10**9, 64))
    )
    assert [each.beyond for each in (inside, larger, wider)] == [False, True, True]
    assert "its cost follows the law of rounds" in inside.evidence
    assert inside.evidence.endswith("up to 8 replicas")
    assert larger.evidence.endswith("up to 8 replicas: this run exceeds that")


@pytest.mark.parametrize(
    ("scheme", "optimizer"),
    [
        (dt.muloco(30, precision="2bit", outer_lr=0.7, outer_momentum=0.9), "Muon"),
        (schemes.sparseloco(every=30, outer_lr=1.5), "AdamW"),
        (schemes.streaming_diloco(every=300, delay=5, keep=0.0), "AdamW"),
        (dt.demo(precision="sign", error_feedback=False), "SignSGD"),
    ],
)
def test_what_nobody_has_fitted_a_law_to_keeps_its_cost(scheme, optimizer):
    """Another optimizer, a part of the coordinates, longer rounds, or an exchange at every step."""
    near, large = (found(scheme, optimizer, parameters=size) for size in (139_840, 10**10))
    assert near.kind == large.kind == "measured" and near.cost == large.cost
    assert large.interval[1] > near.interval[1]


def test_losses_of_images_have_no_law_of_text():
    rows = [row for row in loss_table() if row.arguments.get("every", 1) != 1]
    assert (
        {row.recipe for row in rows if row.has_law} == {losses.TEXT} != {row.recipe for row in rows}
    )
