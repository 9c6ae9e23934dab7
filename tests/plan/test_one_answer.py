"""One question gets one answer: from the table of docs/which-scheme.md, from `plan`, and from `auto`."""

from functools import cache
from pathlib import Path

import pytest

from covering import covered
from detonation.link_speed import LinkSpeed
from detonation.plan.cost import Network, Work
from detonation.plan.losses import Goal
from detonation.plan.search import options, pairs
from detonation.report.words import duration
from detonation.train.choice.asked import Asked, Auto, goal_of, trained
from detonation.train.loop.checks import shard_shapes
from detonation.train.recipe.resolve import read_layers
from detonation.train.verbs.plan import Question, count, plan

PAGE = Path(__file__).parents[2] / "docs/which-scheme.md"
SHARDS = 8
CLUSTERS = [
    (2, "10mbit,100ms", "0.1b", 0.5),
    (2, "1gbit,5ms", "1b", 1.0),
    (2, "1gbit,5ms", "8b", 2.0),
    (2, "400gbit,0.01ms", "8b", 2.0),
    (8, "100mbit,20ms", "0.1b", 0.5),
    (8, "10gbit,1ms", "1b", 1.0),
    (8, "400gbit,0.01ms", "8b", 2.0),
    (64, "10mbit,100ms", "1b", 1.0),
    (64, "10gbit,1ms", "8b", 2.0),
    (64, "400gbit,0.01ms", "8b", 2.0),
]


@cache
def asked(cluster, optimizer=None):
    replicas, link, parameters, step_s = cluster
    given = {
        "parameters": parameters,
        "link": link,
        "step_time": step_s,
        "replicas": replicas,
        "shards": SHARDS,
    }
    return plan(Question(**given, optimizer=optimizer))


def named(first):
    return f"`{first['spelled']}` with {first['optimizer']}"


def cells(cluster):
    """A row of the page."""
    replicas, link, parameters, step_s = cluster
    free, kept = asked(cluster), asked(cluster, "AdamW")
    yield from (str(replicas), link, parameters, f"{step_s:g} s")
    for found in (free, kept):
        reached = duration(found["first"]["time_to_loss_s"])
        yield f"{named(found['first'])}, {reached}{'' if found['pays'] else ', **one machine is sooner**'}"


@pytest.mark.long  # no branch of its own
def test_the_page_has_the_rows_that_the_plan_makes():
    """Else: python tests/plan/test_one_answer.py prints them."""
    missing = [row for row in rows() if row not in PAGE.read_text()]
    assert missing == []


def rows():
    return [f"| {' | '.join(cells(cluster))} |" for cluster in CLUSTERS]


@covered("cluster, optimizer", CLUSTERS, [None, "AdamW", "Muon"], ids=str)
def test_auto_in_a_loop_chooses_as_the_plan(cluster, optimizer):
    replicas, link, parameters, step_s = cluster
    network = Network.of_link_speed(LinkSpeed.parse(link), replicas, SHARDS)
    work = Work([{"all": (-(-count(parameters) // SHARDS),)}] * SHARDS, step_s)
    goal = Goal(replicas, count(parameters), optimizer=optimizer)
    first = options(pairs(goal), work, network, goal)[0]
    assert str(first) == named(asked(cluster, optimizer)["first"]).replace("`", "")


@pytest.mark.parametrize("cluster", CLUSTERS[::4], ids=str)
def test_auto_in_a_recipe_chooses_as_the_plan_of_the_recipe(cluster):
    replicas, link, _, step_s = cluster
    question = Question(
        recipe=Path("quick-lm"), link=link, step_time=step_s, replicas=replicas, shards=1
    )
    layers = read_layers(Path("quick-lm"), (), mesh={"replicas": replicas, "shards": 1})
    config = layers.under("full", {})
    work = Work(shard_shapes(config), step_s, accumulate=config.train.accumulate)
    network, goal = Network.of_link_speed(LinkSpeed.parse(link), replicas, 1), goal_of(config, work)
    among = trained(Asked(Auto(), layers).candidates()).values()
    first = options(among, work, network, goal)[0]
    assert str(first) == named(plan(question)["first"]).replace("`", "")


if __name__ == "__main__":
    print("\n".join(rows()))
