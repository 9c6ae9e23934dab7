"""Levels in a recipe: one [[scheme]] a tier of the network, from the innermost outwards."""

import copy
import json
import tomllib
from pathlib import Path

import pytest
import tomli_w

import detonation as dt
from detonation.cluster.init import LaunchPosition
from detonation.core.schemes import traffic
from detonation.train.loop.checkpoints import _other_batch, as_json, compare_settings
from detonation.train.loop.checks import check_config
from detonation.train.output import metrics
from detonation.train.recipe.resolve import Request, parse_sets, resolve
from detonation.train.recipe.tables import from_table, to_table

THREE_TIERS = Path(__file__).parents[2] / "recipes" / "three-tiers.toml"
BASE = {
    "model": {"name": "olmo2", "layers": 1},
    "data": {"task": "text", "source": "sotu-sample"},
    "scheme": [
        {"axis": "rack", "replicas": 2, "name": "demo", "topk": 2},
        {"axis": "site", "replicas": 3, "name": "diloco", "every": 7},
    ],
    "optimizer": {"name": "AdamW", "lr": 0.001},
    "train": {"steps": 5, "batch_size": 2},
    "mesh": {"shards": 2},
}


def said(*sets, **changed):
    return resolve({**copy.deepcopy(BASE), **changed}, parse_sets(sets))


def test_levels_are_read_and_written_as_a_list_of_schemes():
    config = said()
    assert [(level.axis, level.replicas, level.scheme.name) for level in config.levels] == [
        ("rack", 2, "demo"),
        ("site", 3, "diloco"),
    ]
    assert (config.mesh.replicas, config.mesh.shards, config.schemes) == (6, 2, "demo+diloco")
    resolved = check_config(config)
    text = tomli_w.dumps(to_table(resolved))
    assert text.count("[[scheme]]") == 2 and from_table(tomllib.loads(text)) == resolved
    assert resolved.levels[0].scheme.arguments["chunk"] == 64  # defaults are filled in


def test_set_reaches_one_level():
    assert said("scheme.site.every=3", "scheme.rack.replicas=4").levels[1].scheme.arguments == {
        "every": 3
    }
    other = said("scheme.rack.name=random", "scheme.rack.rate=0.5").levels[0]
    assert (other.axis, other.replicas, other.scheme.name, other.scheme.arguments) == (
        "rack",
        2,
        "random",
        {"rate": 0.5},
    )


@pytest.mark.parametrize(
    ("sets", "changed", "message"),
    [
        (
            ["scheme.topk=3"],
            {},
            r"the recipe has levels: name the level, as in scheme\.site\.topk=3",
        ),
        (
            ["scheme.sight.every=3"],
            {},
            r"unknown axis of a \[\[scheme\]\] 'sight', did you mean 'site'",
        ),
        (["scheme.rack.topk=65"], {}, r"topk is 65, must be from 1 to chunk \(64\)"),
        (["scheme.rack.tpk=3"], {}, r"unknown argument of scheme demo 'tpk', did you mean 'topk'"),
        (["scheme.rack.topk=x"], {}, r"scheme\.rack\.topk is 'x', but must be a whole number"),
        (["scheme.rack.replicas=0"], {}, r"scheme\.rack\.replicas is 0, but must be at least 1"),
        (
            ["scheme.rack.name=diloco", "scheme.site.name=demo"],
            {},
            "gradients before levels that exchange param",
        ),
        (["scheme=3"], {}, r"--set takes table\.key=value"),
        (["a.b.c=3"], {}, r"--set takes table\.key=value"),
        (["scheme.rack=3", "scheme.rack.topk=3"], {}, r"rack is 3, but must be set once"),
        (
            [],
            {"scheme": [{"axis": "rack", "name": "full"}]},
            r"replicas is missing in a \[\[scheme\]\]",
        ),
        ([], {"scheme": [{"axis": "rack", "replicas": 2}]}, r"name is missing in a \[\[scheme\]\]"),
        ([], {"scheme": [{"replicas": 2, "name": "full"}]}, r"axis is missing in a \[\[scheme\]\]"),
        (
            [],
            {"scheme": [{"axis": "shard", "replicas": 2, "name": "full"}]},
            r"scheme\.axis is 'shard', but",
        ),
        (
            [],
            {"scheme": [{"axis": "a", "replicas": 2, "name": "full"}] * 2},
            r"scheme\.axis is \['a', 'a'\], but",
        ),
        (
            [],
            {"scheme": []},
            r"scheme is \[\], but must be a table \[scheme\], or one \[\[scheme\]\] for each level",
        ),
        ([], {"scheme": [1]}, r"scheme is \[1\], but must be a table"),
        (["mesh.replicas=6"], {}, r"mesh\.replicas is given, but each \[\[scheme\]\] has its own"),
        (
            [],
            {"mesh": {"replicas": 6}},
            r"mesh\.replicas is given, but each \[\[scheme\]\] has its own",
        ),
        ([], {"tuned": {"demo": {}}}, r"tuned is 'given', but must be left out"),
    ],
)
def test_what_levels_cannot_be_is_named(sets, changed, message):
    with pytest.raises(ValueError, match=message):
        check_config(said(*sets, **changed))


def test_the_levels_make_the_world():
    def mesh(ranks, local, *sets, **flags):
        place = LaunchPosition(0, ranks, 0, local) if ranks else None
        chosen = Request(THREE_TIERS, sets, **flags).layers(place).config().mesh
        return chosen.replicas, chosen.shards

    assert mesh(0, 0) == (8, 1)
    assert mesh(0, 0, shards=2) == (8, 2)
    assert mesh(32, 4) == (8, 4)  # the launcher's ranks that are left over are shards
    assert mesh(4, 4, "scheme.site.replicas=1") == (4, 1)
    with pytest.raises(
        ValueError, match="8 replicas x 1 shards are 8 processes, but the launcher started 12"
    ):
        mesh(12, 4)
    with pytest.raises(
        ValueError, match=r"mesh\.replicas is given, but each \[\[scheme\]\] has its own"
    ):
        mesh(0, 0, replicas=4)


def test_rounds_that_end_between_the_rounds_inside_are_refused_before_the_training():
    inner = {"axis": "rack", "replicas": 2, "name": "local_sgd", "every": 2}
    outer = {"axis": "site", "replicas": 3, "name": "diloco", "every": 7}
    with pytest.raises(ValueError, match="diloco with every=7 sends weights while replicas inside"):
        check_config(said(scheme=[inner, outer]))
    check_config(said("scheme.site.every=8", scheme=[inner, outer]))


LEVELS = [
    {"axis": "rack", "replicas": 2, "name": "full"},
    {"axis": "site", "replicas": 2, "name": "diloco", "every": 3},
]


def test_a_run_is_resumed_with_another_number_of_replicas_on_the_outermost_level():
    def compared(**changed):
        scheme = [LEVELS[0], {**LEVELS[1], **changed}]
        return compare_settings(Path("step-000004"), saved, said(scheme=scheme), "checkpoint")

    saved = as_json(to_table(said(scheme=LEVELS)))
    assert compared(replicas=1) == compared(replicas=3) == []
    with pytest.raises(ValueError, match="resume with the same scheme"):
        compared(every=4)
    inner = [{**LEVELS[0], "replicas": 4}, LEVELS[1]]
    with pytest.raises(ValueError, match="resume with the same scheme"):
        compare_settings(Path("step-000004"), saved, said(scheme=inner), "checkpoint")
    fewer = as_json(to_table(said("scheme.site.replicas=1", scheme=LEVELS)))
    assert _other_batch(saved, fewer)[0].startswith("a step has 8 examples, had 16:")


def test_a_run_of_two_levels_counts_each_and_resumes_exactly(train, tmp_path):
    """Stopped in the middle of a round of the outer level."""
    levels = {"scheme": LEVELS, "mesh": {"shards": 1}}
    whole = train("whole", "train.steps=7", tables=levels)[0]
    train("parts", "train.steps=7", tables=levels, stop_after=4)
    resumed = train("parts", "train.steps=7", tables=levels, resume=True)[0]
    assert whole["replicas_equal"] and resumed["fingerprint"] == whole["fingerprint"]
    assert resumed["levels"] == whole["levels"]
    records = metrics.read_metrics(tmp_path / "whole" / "metrics.jsonl")
    sent = traffic.exchange_bytes("all-reduce", dt.full(), whole["num_parameters"], 2)
    dense = traffic.dense_bytes(whole["num_parameters"], 2)
    assert [record.levels["rack"] for record in records] == [sent] * 7
    assert [record.levels["site"] for record in records] == [
        0,
        0,
        sent,
        0,
        0,
        sent,
        sent,
    ]  # the last one settles
    assert all(record.bytes_sent == sum(record.levels.values()) for record in records)
    rack, site = json.loads((tmp_path / "whole" / "summary.json").read_text())["levels"]
    assert (rack["bytes_sent_per_step"], rack["reduction"]) == (sent, pytest.approx(dense / sent))
    assert (site["axis"], site["scheme"], site["replicas"]) == ("site", "diloco", 2)
    assert site["bytes_sent_per_step"] == pytest.approx(3 * sent / 7)
    assert site["reduction"] == pytest.approx(7 * dense / (3 * sent))
