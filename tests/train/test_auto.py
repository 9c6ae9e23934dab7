"""`scheme.name=auto`: measured, chosen, written down, and taken again by whoever resumes."""

import itertools
import json
import logging
import shutil
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tomli_w
import torch

import detonation as dt
from commands import RECIPE, launched
from detonation.cli.command import run_command
from detonation.cluster.launch import run_local
from detonation.cluster.network.measure import Everyone
from detonation.cluster.network.profile import Operation, Step
from detonation.core.schemes import buckets
from detonation.link_speed import LinkSpeed
from detonation.plan.cost import Network, Work, cost, spelled
from detonation.plan.losses import loss_table
from detonation.plan.search import candidate_settings
from detonation.train.choice import decide
from detonation.train.choice.asked import Asked, Auto, again, settings_in
from detonation.train.loop.checks import shard_shapes
from detonation.train.recipe.resolve import Layers, parse_sets, resolve
from detonation.train.recipe.tables import from_table
from limits import LIMIT_S

SLOW = ("--link", "1mbit,1ms", "--set", "scheme.name=auto")
TUNED = {
    name: {"optimizer": {"name": "AdamW", "lr": 0.0125}}
    for name in ("demo", "random_sign", "diloco", "random")
}
LEVELS = [
    {"axis": axis, "replicas": 2, "name": name}
    for axis, name in (("rack", "full"), ("site", "auto"))
]


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """The tiny recipe as a file, with rates of its own for some schemes; links are probed for a short time."""
    monkeypatch.setattr(decide, "PROBE_S", 0.3)  # also in the ranks, which are forks
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tiny.toml"
    tables = {f"tuned.{name}.optimizer": tables["optimizer"] for name, tables in TUNED.items()}
    path.write_text(
        tomli_w.dumps(RECIPE) + "".join(f"\n[{k}]\n{tomli_w.dumps(v)}" for k, v in tables.items())
    )
    return path


def test_the_choice_stands_in_the_run_and_is_taken_again(recipe, tmp_path, capfd):
    """Ranks of a launcher choose together; others go on with that, as a run that names the scheme does."""
    out = tmp_path / "run"
    world = ["--replicas", "2", "--shards", "1"]
    train = ["train", str(recipe), *SLOW, "train.steps=4", *world, "--log", "--out", str(out)]
    ranks = launched(tmp_path / "ranks", 2, *train, "--stop-after", "2")
    assert [rank.wait() for rank in ranks] == [0, 0]
    plan, config = (
        json.loads((out / "plan.json").read_text()),
        tomllib.loads((out / "config.toml").read_text()),
    )
    assert f"auto: {plan['why']}\n" in ranks[0].stdout and "auto:" not in ranks[1].stdout
    # on such a link nothing dense is within a tenth of a step, however slow the machine
    assert config["scheme"]["name"] == plan["chosen"]["scheme"] != "full"
    assert (
        plan["budget"] == 0.1
        and plan["link"]["operations"]["all-gather"]["rate_bits_per_s"] < 1.5e6
    )
    assert len(plan["options"]) > 10 and plan["chosen"] in plan["options"]
    # all of it, the optimizer tuned for the scheme too, is the recipe under the scheme that was chosen
    overrides = {**parse_sets(["train.steps=4", "mesh.link=1mbit,1ms"]), "scheme": config["scheme"]}
    assert from_table(config).optimizer == resolve({**RECIPE, "tuned": TUNED}, overrides).optimizer

    killed = shutil.copytree(out, tmp_path / "killed", ignore=shutil.ignore_patterns("checkpoints"))
    for path, goes_on in (
        (out, "resumed after step 2, exactly as saved"),
        (killed, "no checkpoint was saved yet: "),
    ):
        assert run_command([*train[:-1], str(path), "--resume"]) == 0
        told = capfd.readouterr().out
        assert goes_on in told and "auto:" not in told
        assert tomllib.loads((path / "config.toml").read_text()) == config

    assert run_command(["train", str(out / "config.toml"), "--out", str(tmp_path / "again")]) == 0
    summaries = [
        json.loads((run / "summary.json").read_text()) for run in (out, tmp_path / "again")
    ]
    assert summaries[0]["fingerprint"] == summaries[1]["fingerprint"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["train", "--set", "scheme.name=auto", "scheme.budget=2"],
            "budget is 2, must be the share of a step that may",
        ),
        (
            ["train", "--set", "scheme.name=auto", "scheme.budget=-0.1"],
            "budget is -0.1, must be the share of a step",
        ),
        (
            ["train", "--set", "scheme.name=auto", "scheme.budgt=0.2"],
            "unknown argument of scheme auto 'budgt', did you mean 'budget'? Valid: budget",
        ),
        (["train", "--set", "scheme.name=aut"], "unknown scheme 'aut'"),
        (
            ["train", "--set", "scheme.name=auto", "--link", "100"],
            "a link is '100', must be a rate above 0",
        ),
        (
            ["train", "--set", "scheme.name=auto", "model.layers=two"],
            "model.layers is 'two', but must be a whole",
        ),
        (
            ["simulate", "--set", "scheme.name=auto"],
            "scheme auto needs a link to measure, and a simulation has none",
        ),
        (
            ["compare", "--schemes", "full,auto"],
            "compare takes schemes by name: use train for scheme auto",
        ),
    ],
)
def test_what_cannot_be_chosen_is_one_line(recipe, tmp_path, capsys, arguments, line):
    verb, *rest = arguments
    assert run_command([verb, str(recipe), *rest]) == 2
    printed = capsys.readouterr()
    assert (
        printed.out == ""
        and printed.err.startswith(f"error: {line}")
        and len(printed.err.splitlines()) == 1
    )
    assert list(tmp_path.iterdir()) == [recipe]


def test_a_configuration_that_cannot_be_read_chooses_nothing(tmp_path):
    alone, asked = (
        SimpleNamespace(send_to_all=lambda scheme: [scheme]),
        Asked(Auto(), Layers(RECIPE, {})),
    )
    assert again(asked, tmp_path / "nowhere", alone) is None
    for text in ("[scheme", "scheme = 3", "[scheme]\ntopk = 4"):
        (tmp_path / "config.toml").write_text(text)
        assert again(asked, tmp_path, alone) is None


SIGNS = {
    "name": "demo",
    "topk": 2,
    "chunk": 32,
    "decay": 0.5,
    "precision": "sign",
    "error_feedback": False,
}


def test_what_was_measured_is_considered_as_it_was_over_a_recipe_with_other_settings():
    candidates = Asked(Auto(), Layers({**RECIPE, "scheme": SIGNS}, {})).candidates()
    measured = {
        spelled(dt.scheme(loss.scheme, loss.arguments))
        for loss in loss_table()
        if loss.scheme != "none"
    }
    assert measured <= candidates.keys() and spelled(made(SIGNS)) in candidates


def test_the_settings_of_an_option_make_it_of_a_recipe_with_other_settings():
    tuned = {"muloco": {"scheme": {"every": 3, "precision": "sign"}}}
    layers = Layers({**RECIPE, "scheme": SIGNS, "tuned": tuned}, {})
    for option in candidate_settings():
        config = layers.under(option.name, settings_in(layers, option))
        assert made({"name": option.name, **config.scheme.arguments}).arguments == option.arguments


def made(table):
    """The scheme of a recipe's table."""
    return dt.scheme(table["name"], {key: value for key, value in table.items() if key != "name"})


def test_a_busy_moment_while_one_setting_is_measured_does_not_choose_another():
    """Steps without an exchange are those of the optimizer: the same in long rounds and in short ones."""
    steps, choices = zip(
        *(run_local(searched, 1, [slow], timeout_s=LIMIT_S)[0] for slow in (1, 2, 3)), strict=True
    )
    assert all(len(set(found)) == 1 for found in steps) and len(set(choices)) == 1


def searched(slow):
    """The local steps that count, and the choice, where one measurement takes twice as long."""
    layers = Layers(
        tomllib.loads(Path("recipes/quick-lm.toml").read_text()),
        {"mesh": {"replicas": 2, "shards": 1}},
    )
    asked, measured = Asked(Auto(), layers), itertools.count(1)
    decide.optimizer_step = lambda session, everyone, config: Step(
        0.06, 0.03 * (1 + (next(measured) == slow))
    )
    config = asked.check()
    session = SimpleNamespace(device=torch.device("cpu"), config=config)
    network, work = (
        Network.of_link_speed(LinkSpeed(4e6, 0.02), 2, 1),
        Work(shard_shapes(config), 0.12, reports=True),
    )
    best, _, work = decide._search(
        0.1, asked.candidates(), session, Everyone(session.device), network, work
    )
    return [step.local_s for name, step in work.steps.items() if name.startswith("muloco")], str(
        best
    )


def test_what_others_log_is_heard_while_a_step_is_timed(monkeypatch, caplog):
    """Such as the loss of a replica; the warnings of the step itself are about a run that nobody begins."""
    log = logging.getLogger("detonation")

    def refusing(*_, **__):
        log.warning("of the step")
        with ThreadPoolExecutor(1) as pool:
            pool.submit(log.warning, "of another thread").result()
        raise ValueError

    monkeypatch.setattr("detonation.train.choice.step_times.replicate", refusing)
    layers = Layers({**RECIPE, "scheme": {"name": "auto"}}, {})
    config = next(iter(Asked(Auto(), layers).candidates().values()))
    session = SimpleNamespace(model=torch.nn.Linear(2, 2), config=config)
    assert decide.optimizer_step(session, None, config) is None
    log.warning("afterwards")
    assert [record.message for record in caplog.records] == ["of another thread", "afterwards"]


def test_settings_that_do_not_go_with_the_recipes_own_are_left_out():
    tables = {**RECIPE, "scheme": {"name": "auto"}, "tuned": {"demo": {"scheme": {"chunk": 8}}}}
    found = Asked(Auto(), Layers(tables, {})).candidates()
    demos = [config.scheme.arguments for name, config in found.items() if name.startswith("demo(")]
    assert {arguments["chunk"] for arguments in demos} == {
        8,
        32,
        64,
        128,
    }  # these three were measured as they are
    own = [arguments for arguments in demos if arguments["chunk"] == 8]
    assert len(own) >= 3 and {arguments.get("topk") for arguments in own} == {
        None,
        1,
        4,
    }  # 16 of 8 there are not


@pytest.mark.parametrize("setting", [{"log_updates": True}, {"publish": "127.0.0.1:0"}])
def test_a_run_whose_replicas_must_agree_is_not_offered_those_that_never_do(setting):
    tables = {**RECIPE, "scheme": {"name": "auto"}, "train": {**RECIPE["train"], **setting}}
    found = Asked(Auto(), Layers(tables, {}))
    free = Asked(Auto(), Layers({**tables, "train": RECIPE["train"]}, {}))
    assert free.candidates().keys() - found.candidates().keys() == {"none()"}
    assert found.check().scheme.name == "full"


@pytest.mark.long  # no branch of its own
def test_what_hides_a_message_is_the_last_micro_batch_of_the_run(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(buckets, "SMALLEST", 2**10)  # also in the ranks, which are forks
    monkeypatch.setattr("detonation.train.choice.asked.known_schemes", lambda: {"full": dt.full})
    monkeypatch.setattr("detonation.train.choice.asked.settings", lambda name: [{}])
    sets = [
        "--set",
        "scheme.name=auto",
        "train.accumulate=4",
        "train.batch_size=1",
        "train.steps=2",
    ]
    out = tmp_path / "run"
    assert (
        run_command(["train", str(recipe), "--link", "20mbit,1ms", *sets, "--out", str(out)]) == 0
    )
    plan, config = (
        json.loads((out / "plan.json").read_text()),
        from_table(tomllib.loads((out / "config.toml").read_text())),
    )
    lines = plan["link"]["operations"]
    network = Network(
        2, 1, {k: Operation(v["latency_s"], v["rate_bits_per_s"], 0.0) for k, v in lines.items()}
    )
    work = Work(shard_shapes(config), plan["compute_s"], accumulate=4, reports=True)
    assert plan["chosen"]["exposed_s"] == pytest.approx(cost(dt.full(), work, network).exposed_s)
    # which tells them apart unless a busy machine computes for so long that both hide all of it
    quick = Work(shard_shapes(config), 1e-3, accumulate=4, reports=True)
    one = replace(quick, accumulate=1)
    assert cost(dt.full(), quick, network).exposed_s > cost(dt.full(), one, network).exposed_s


def test_levels_name_their_schemes(tmp_path, capsys):
    path = tmp_path / "levels.toml"
    path.write_text(tomli_w.dumps({**RECIPE, "scheme": LEVELS, "mesh": {"shards": 1}}))
    assert run_command(["train", str(path)]) == 2
    assert capsys.readouterr().err == (
        "error: scheme auto needs a recipe with a single [scheme]:"
        " in each [[scheme]], set name to a scheme other than auto\n"
    )


def test_the_flags_that_a_plan_prints_take_its_first_choice(tmp_path, capsys):
    path = tmp_path / "signs.toml"
    path.write_text(tomli_w.dumps({**RECIPE, "scheme": SIGNS}))
    assert (
        run_command(["plan", str(path), "--link", "20mbit,2ms", "--step-time", "0.1", "--json"])
        == 0
    )
    printed = capsys.readouterr()
    flags = printed.err.split("to use it: --set ")[1].splitlines()[0].split()
    table = resolve(tomllib.loads(path.read_text()), parse_sets(flags)).scheme
    assert (
        made({"name": table.name, **table.arguments}).arguments
        == json.loads(printed.out)["first"]["arguments"]
    )


def test_a_recipe_that_leaves_the_choice_open_can_be_planned_for(recipe, capsys):
    plan = [
        "plan",
        str(recipe),
        "--set",
        "scheme.name=auto",
        "--link",
        "1mbit",
        "--step-time",
        "0.1",
        "--json",
    ]
    assert run_command(plan) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["first"] == found["options"][0] and found["first"]["scheme"] != "auto"


def test_a_plan_hides_messages_behind_the_last_micro_batch_alone(recipe, capsys, monkeypatch):
    monkeypatch.setattr(buckets, "SMALLEST", 2**10)
    waits = []
    for accumulate in (1, 8):
        sets = ["--set", "scheme.name=full", f"train.accumulate={accumulate}"]
        assert (
            run_command(
                ["plan", str(recipe), *sets, "--link", "20mbit", "--step-time", "0.1", "--json"]
            )
            == 0
        )
        options = json.loads(capsys.readouterr().out)["options"]
        waits.append(
            next(option["exposed_s"] for option in options if option["spelled"] == "full()")
        )
    assert waits[1] > 1.5 * waits[0] > 0
