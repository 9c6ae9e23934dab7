"""The plan: predicted bytes and waits agree with links, schemes are ranked, and the advice gives reasons."""

import json
import math
import shlex
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import detonation as dt
import worlds
from detonation.cli.command import run_command as main
from detonation.cluster.network.profile import (
    SILENT_BYTES,
    SILENT_S,
    AxisProfile,
    Operation,
    Profile,
    Step,
)
from detonation.core.schemes import buckets
from detonation.core.schemes.scheme import SCHEMES, GradientScheme, register, scheme
from detonation.core.schemes.traffic import buckets_of, exchange_bytes
from detonation.link_speed import LinkSpeed
from detonation.plan.cost import Network, Work, cost
from detonation.plan.losses import Goal, trained_by
from detonation.plan.search import advise, candidate_settings, options, pairs, row
from detonation.report.terminal import plan_rows, plan_words
from detonation.train.recipe.resolve import parse_sets, read_recipe, resolve
from detonation.train.verbs.plan import count

ROOT = Path(__file__).parents[2]

SHAPES = {"w": (96, 70), "b": (70,), "scale": (1,)}
WORK = Work([SHAPES], compute_s=0.1)
SLOW = Network.of_link_speed(LinkSpeed(1e6, 0.01), 2, 1)
GOAL = Goal(2, 96 * 70 + 71)


def sends(mesh, scheme):
    """Bytes that the links of a replica count in two rounds; in a first one some fragments are not sent yet."""
    model = torch.nn.ParameterDict({name: torch.zeros(shape) for name, shape in WIDE.items()})
    optimizer = dt.replicate(
        torch.optim.SGD(model.parameters(), lr=1.0), model, mesh["replicate"], scheme
    )
    optimizer.set_up()
    first = 0
    for step in range(3 * scheme.round.every):
        with optimizer.overlap():
            sum(parameter.square().sum() for parameter in model.parameters()).backward()
        optimizer.step()
        optimizer.zero_grad()
        first = optimizer.stats.bytes_sent if step + 1 == scheme.round.every else first
    return optimizer.stats.bytes_sent - first


WIDE = {"w": (600, 140), "b": (140,), "scale": (1,)}
PLANNED = [
    dt.full(),
    dt.demo(),
    dt.demo(link="owner"),
    dt.random_sign(),
    dt.diloco(4),
    dt.schemes.streaming_diloco(8, 2),
]


@pytest.mark.parametrize("scheme", PLANNED)
@pytest.mark.parametrize(
    "smallest", [2**20, 2**13]
)  # bytes of a bucket: one for all of the model, and several
@pytest.mark.parametrize("padded", [False, True])
def test_planned_bytes_equal_the_bytes_that_links_count(scheme, smallest, padded, monkeypatch):
    monkeypatch.setattr(buckets, "SMALLEST", smallest)  # also in the ranks, which are forks
    work = Work([WIDE], 0.1, on_accelerator=padded)
    planned = cost(scheme, work, Network.of_link_speed(LinkSpeed(1e9), 2, 1)).bytes_sent
    assert (len(buckets_of(scheme, scheme.codec.layout(WIDE), 2)) > 1) == (smallest < 2**20)
    sent = worlds.run(sends, 2, 1, scheme.aligned() if padded else scheme)[0]
    assert sent == pytest.approx(2 * scheme.round.every * planned, rel=1e-9)


def test_a_step_without_overlap_is_compute_time_plus_transfer_time():
    full = cost(dt.full(), WORK, SLOW)
    numel = sum(math.prod(shape) for shape in SHAPES.values())
    sent = exchange_bytes(
        "all-reduce", dt.full(), numel, 2
    )  # among two, everything once and in two hops
    assert full.exposed_s == pytest.approx(8 * sent / 1e6 + 2 * 0.01)
    assert full.total_s == pytest.approx(0.1 + full.exposed_s)
    assert 1 - full.waiting == pytest.approx(0.1 / full.total_s)
    rounds = cost(dt.diloco(10), WORK, SLOW)
    assert rounds.exposed_s == pytest.approx(full.exposed_s / 10)
    assert cost(dt.none(), WORK, SLOW).total_s == 0.1


def test_shards_of_a_node_share_its_link():
    halves = Work([{"w": (48, 70)}] * 2, compute_s=0.1)
    whole = cost(dt.full(), Work([{"w": (96, 70)}], compute_s=0.1), SLOW)
    shared = cost(dt.full(), halves, Network.of_link_speed(LinkSpeed(1e6, 0.01), 2, 2))
    assert shared.exposed_s == pytest.approx(whole.exposed_s, rel=1e-2)  # a header each


def test_large_models_hide_most_of_a_message_behind_backward():
    work = Work([{f"w{i}": (2**20,) for i in range(16)}], compute_s=1.0)
    network = Network.of_link_speed(LinkSpeed(1e9), 2, 1)
    behind, after = (
        cost(dt.full(), replace(work, overlap=overlap), network) for overlap in (True, False)
    )
    sent = 8 * 4 * 2**24 / 1e9
    assert after.exposed_s == pytest.approx(sent)
    assert sent / 16 < behind.exposed_s < sent / 4


def test_gradients_of_several_micro_batches_leave_during_the_last_alone():
    work = Work([{f"w{i}": (2**20,) for i in range(16)}], compute_s=1.0, accumulate=8)
    network = Network.of_link_speed(LinkSpeed(1e9), 2, 1)
    eight, last, one = (
        cost(dt.full(), each, network)
        for each in (
            work,
            replace(work, compute_s=1 / 8, accumulate=1),
            replace(work, accumulate=1),
        )
    )
    assert eight.exposed_s == last.exposed_s > 2 * one.exposed_s
    assert eight.total_s == 1.0 + eight.exposed_s


def test_the_optimizers_own_work_is_averaged_over_a_round():
    work = replace(
        WORK, steps={"diloco": Step(exchange_s=0.05, local_s=0.01), "demo": Step(0.02, 0.0)}
    )
    assert cost(dt.diloco(10), work, SLOW).step_s == pytest.approx(0.014)
    assert cost(dt.demo(), work, SLOW).step_s == 0.02


def test_betas_that_are_not_two_get_one_line(capsys):
    assert trained_by("AdamW", {"betas": []}) == "AdamW"  # as of an optimizer of one's own
    sets = ["--set", "optimizer.name=AdamW", "optimizer.lr=1", "optimizer.betas=[]"]
    assert main(["plan", "quick-lm", "--link", "1gbit", "--step-time", "1", *sets]) == 2
    assert capsys.readouterr().err.startswith(
        "error: optimizer AdamW does not accept {'betas': ()}: "
    )


def test_every_scheme_is_considered_and_nothing_larger_than_dense_is_ranked():
    everything = candidate_settings()
    assert {scheme.name for scheme in everything} == SCHEMES.keys()
    found = options([*pairs(GOAL), (dt.demo(topk=64), "AdamW")], WORK, SLOW, GOAL)
    assert {option.cost.scheme for option in found} < {*everything, dt.demo(topk=64)}
    full = next(o for o in found if o.cost.scheme == dt.full())
    assert all(option.cost.bytes_sent <= full.cost.bytes_sent for option in found)


@pytest.fixture
def registered():
    """A user's scheme, registered for one test."""

    @register
    def half_the_values(rate: float = 0.5, decay: float = 0.9) -> GradientScheme:
        """Half of the momentum, drawn at random."""
        return dt.schemes.random(rate, decay)

    yield half_the_values
    del SCHEMES["half_the_values"]


def test_a_registered_scheme_is_ranked_and_its_loss_is_unknown(registered):
    ranked = options(pairs(GOAL), WORK, SLOW, GOAL)
    option, *others = [o for o in ranked if o.cost.scheme.name == "half_the_values"]
    assert (
        not others
        and option.cost.scheme == registered()
        and option.cost.scheme.arguments["rate"] == 0.5
    )
    assert option.estimate is None and option.seconds(GOAL) is None
    assert option.cost.bytes_sent == pytest.approx(
        cost(dt.schemes.random(0.5, 0.9), WORK, SLOW).bytes_sent
    )
    described = row(option, GOAL)
    assert (
        described["spelled"] == "half_the_values()" and described["loss_source"] == "not measured"
    )
    assert plan_rows({"options": [described]})[0][5] == "not measured"


def test_advice_gives_the_reason_and_the_first_choice_on_other_links():
    advice = advise(options(pairs(GOAL), WORK, SLOW, GOAL), WORK, SLOW, GOAL)
    assert advice["first"] == advice["options"][0] and "of which waiting takes" in advice["reason"]
    assert advice["if_half_the_rate"]["seconds"] > advice["if_twice_the_rate"]["seconds"]
    assert json.loads(json.dumps(advice)) == advice
    lines = plan_words(advice)
    assert lines[0] == advice["reason"] and lines[2:-2] == advice["notes"]
    assert lines[-2].startswith("at 500 kbit/s per node: ") and lines[-1].startswith(
        "at 2 Mbit/s per node: "
    )
    assert lines[-1].endswith(" per step")


def test_the_flags_of_the_first_choice_are_a_recipe_of_it():
    first = [(dt.demo(topk=1, precision="sign", error_feedback=False), "SignSGD")]
    advice = advise(options(first, WORK, SLOW, GOAL), WORK, SLOW, GOAL)
    flags = "--set scheme.name=demo scheme.topk=1 scheme.precision=sign scheme.error_feedback=false"
    assert plan_words(advice)[1] == f"to use it: {flags}"


ASK = ["--link", "100mbit,20ms", "--step-time", "0.35", "--replicas", "16", "--parameters", "1.2b"]


def test_the_verb_ranks_schemes_for_a_given_link(capsys):
    assert main(["plan", *ASK, "--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert (
        found["parameters"] == count("1.2b")
        and found["replicas"] == 16
        and found["after_steps"] == 1000
    )
    assert {option["scheme"] for option in found["options"]} == SCHEMES.keys()
    assert found["reason"] in " ".join(printed.err.split())
    assert (
        "optimizer.name=Muon optimizer.momentum=0.9" in printed.err
        and "optimizer.lr" not in printed.err.split("to use it: ")[1].splitlines()[0]
    )


def test_a_person_reads_a_sentence_five_rows_of_six_columns_and_the_flags(capsys):
    assert main(["plan", *ASK]) == 0
    lines = capsys.readouterr().out.splitlines()
    flags = next(line for line in lines if line.startswith("to use it: --set scheme.name="))
    assert all(len(line) <= 100 for line in lines if line != flags)
    (heads,) = [line for line in lines if line.startswith("┃")]
    assert heads.count("┃") == 7
    cells = [
        [cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")
    ]
    rows = [row for row in cells if row[1]]
    assert len(rows) == 5 and rows[-1][0] == "full() with AdamW" and rows[-1][-1] == "the baseline"
    assert main(["plan", *ASK, "--all"]) == 0
    everything = capsys.readouterr().out
    assert "state per rank" in everything and len(everything.splitlines()) > 100


@pytest.mark.parametrize(
    "asked", [["1gbit,5ms", "AdamW"], ["1gbit,5ms", "Muon"], ["1mbit,100ms", "SignSGD"]]
)
def test_the_flags_of_a_plan_for_no_recipe_are_its_first_choice_in_any_recipe(capsys, asked):
    """Whatever the recipe has tuned for that scheme."""
    question = [
        "plan",
        "--parameters",
        "1b",
        "--step-time",
        "1",
        "--link",
        asked[0],
        "--optimizer",
        asked[1],
        "--json",
    ]
    assert main(question) == 0
    printed = capsys.readouterr()
    flags = shlex.split(printed.err.split("to use it: --set ")[1].splitlines()[0])
    recipes = [
        recipe
        for recipe in map(read_recipe, ROOT.glob("recipes/*.toml"))
        if isinstance(recipe["scheme"], dict)
    ]
    taken = [resolve(recipe, parse_sets([*flags, "optimizer.lr=1"])).scheme for recipe in recipes]
    first = json.loads(printed.out)["first"]
    assert [scheme(table.name, table.arguments).arguments for table in taken] == 9 * [
        first["arguments"]
    ]


RATES = "the first choice was measured with optimizer.lr=0.001 optimizer.embedding_lr_ratio=30: tune both"
HAS = " for your model, because the recipe has AdamW at lr 0.003"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--parameters", "140k", "--steps", "300"], f"{RATES} for your model"),
        (["quick-lm"], RATES + HAS),
        (["quick-lm", "--set", "optimizer.embedding_lr_ratio=30"], None),
    ],
)
def test_rates_of_a_measurement_are_named_where_the_flags_do_not_set_them(capsys, asked, said):
    """The losses are of two learning rates; a recipe that has one does not reach them."""
    work = ["--link", "1gbit,5ms", "--step-time", "1"]
    ask = ["plan", *asked, *work, "--optimizer", "AdamW", "--json"]
    assert main(ask) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["first"]["optimizer_settings"]["embedding_lr_ratio"] == 30
    assert [note for note in found["notes"] if note.startswith("the first choice was")] == [
        said
    ] * bool(said)


def test_what_a_shell_would_expand_is_quoted(capsys):
    assert main(["plan", *ASK, "--optimizer", "AdamW without momentum"]) == 0
    assert " 'optimizer.betas=[0.0,0.95]'\n" in capsys.readouterr().out


@pytest.mark.parametrize("rate", [1e6, 2e6])
def test_more_examples_are_a_whole_number_that_brings_the_wait_to_a_half(rate):
    """The number is for train.accumulate; 1 would help nobody."""
    network = Network.of_link_speed(LinkSpeed(rate, 0.01), 2, 1)
    advice = advise(options([(dt.full(), "AdamW")], WORK, network, GOAL), WORK, network, GOAL)
    (note,) = [note for note in advice["notes"] if note.startswith("more work per step: ")]
    times, first = int(note.split("with ")[1].split()[0]), advice["first"]
    assert times - 1 < first["exposed_s"] / (first["compute_s"] + first["step_s"]) <= times


def test_an_optimizer_that_stays_is_what_everything_is_compared_with(capsys):
    assert main(["plan", *ASK, "--optimizer", "Muon", "--steps", "300", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["baseline"] == "full() with Muon" and found["after_steps"] == 300
    assert {option["optimizer"] for option in found["options"]} == {"Muon"}
    (full,) = [option for option in found["options"] if option["spelled"] == "full()"]
    assert full["loss_interval"] == [0.0, 0.0]


@pytest.mark.parametrize("given", ["profile", "link"])
def test_one_node_has_no_rate_in_the_plan(capsys, tmp_path, given):
    """And JSON no Infinity."""
    Profile(1, 2, "gloo", {"replicate": AxisProfile(1, 2, {})}).write(tmp_path / "profile.json")
    arguments = [
        "--parameters",
        "1m",
        "--profile",
        str(tmp_path / "profile.json"),
        "--step-time",
        "1",
    ]
    if given == "link":
        arguments[2:4] = ["--link", "1gbit", "--replicas", "1"]
    assert main(["plan", *arguments, "--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out, parse_constant=pytest.fail)
    assert found["rate_bits_per_s"] is None and "per node: " not in printed.err
    assert found["reason"] in " ".join(printed.err.split()) and found["pays"] is None


OF_TWO = {"format": 1, **asdict(Profile(2, 2, "gloo", {"replicate": AxisProfile(2, 2, {})}))}


@pytest.mark.parametrize(
    ("profile", "arguments", "line"),
    [
        (
            OF_TWO,
            ["--replicas", "16"],
            "--replicas is 16, but profile.json was measured with 2: measure again with",
        ),
        (
            OF_TWO,
            ["--shards", "8"],
            "--shards is 8, but profile.json was measured with 2: measure again with",
        ),
        (
            OF_TWO,
            [],
            "plan needs --step-time, the seconds of forward and backward, or a profile of the recipe",
        ),
        (
            OF_TWO | {"format": 2},
            [],
            "profile.json has format 2, but this version reads 1: measure again",
        ),
        (
            OF_TWO,
            ["--link", "1gbit"],
            "plan needs --profile (made by detonation probe) or --link RATE[,LATENCY]: give exactly",
        ),
    ],
)
def test_a_profile_of_another_world_gets_one_line(
    capsys, monkeypatch, tmp_path, profile, arguments, line
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    assert main(["plan", "--parameters", "1b", "--profile", "profile.json", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {line}") and len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "plan needs either a recipe or --parameters"),
        (
            ["--parameters", "1b"],
            "plan needs --profile (made by detonation probe) or --link RATE[,LATENCY]: give exactly",
        ),
        (["--parameters", "1b", "--link", "100"], "a link is '100', must be a rate above 0"),
        (["--parameters", "1b", "--link", "0mbit"], "a link is '0mbit', must be a rate above 0"),
        (["--parameters", "1b", "--link=-1mbit"], "a link is '-1mbit', must be a rate above 0"),
        (
            ["--parameters", "1b", "--link", "1gbit"],
            "plan needs --step-time, the seconds of forward and backward,",
        ),
        (
            ["--parameters", "many", "--link", "1gbit", "--step-time", "1"],
            "--parameters is 'many', but must be a number",
        ),
        (
            ["--parameters", "1b", "--link", "1gbit", "--step-time", "-1"],
            "--step-time is -1.0, but must be above 0",
        ),
        (
            ["--parameters", "1b", "--link", "1gbit", "--step-time", "1", "--replicas", "0"],
            "--replicas is 0, but must",
        ),
        (
            ["--parameters", "1b", "--link", "1gbit", "--step-time", "1", "--steps", "0"],
            "--steps is 0, but must be from 1 to 1,000,000,000,000",
        ),
        (
            ["--parameters", "1b", "--link", "1gbit", "--step-time", "1e308"],
            "--step-time is 1e+308, but must be above 0 and at most 1,000,000 seconds",
        ),
        (
            ["--parameters", "1b", "--link", "1gbit", "--step-time", "1", "--replicas", "1" * 400],
            f"--replicas is {'1' * 400}, but must be from 1 to 100,000",
        ),
        (
            ["--parameters", "1b", "--link", "1gbit", "--step-time", "1", "--optimizer", "Adam"],
            "unknown --optimizer 'Adam', did you mean 'AdamW'? Valid: AdamW, ",
        ),
        (["--parameters", "1b", "--profile", "nowhere.json"], "nowhere.json is no network profile"),
        (
            [str(ROOT / "recipes/three-tiers.toml"), "--link", "1gbit", "--step-time", "1"],
            "scheme is 'full+demo+diloco', but must be one level",
        ),
    ],
)
def test_bad_questions_get_one_line(capsys, arguments, line):
    assert main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {line}") and len(error.splitlines()) == 1


def slow_start_s(nbytes, rate, round_trip, window):
    """The reference: seconds until `nbytes` are sent in windows that double with each round trip."""
    seconds = 0.0
    while nbytes > window and window < rate * round_trip:
        seconds, nbytes, window = seconds + round_trip, nbytes - window, 2 * window
    return seconds + nbytes / rate


@pytest.mark.parametrize("nbytes", [10**4, 5 * 10**4, 660_000, 10**8])
@pytest.mark.parametrize(
    ("mbit", "round_trip"), [(20, 0.04), (100, 0.1), (10, 0.2), (10_000, 1e-4)]
)
def test_a_message_after_a_long_silence_takes_as_much_longer_as_slow_start(
    mbit, round_trip, nbytes
):
    line = Operation(round_trip, 1e6 * mbit, 0.0)
    network = Network(2, 1, {"all-to-all": line, "all-gather": line}, restart=1.0)
    rate = 1e6 * mbit / 8
    reference = slow_start_s(nbytes, rate, round_trip, 14480) - nbytes / rate
    longer = network.seconds("all-gather", nbytes, 600.0) - network.seconds("all-gather", nbytes)
    assert longer == pytest.approx(reference, abs=round_trip)
    assert network.seconds("all-gather", nbytes, 0.1) == network.seconds("all-gather", nbytes)
    assert 0 <= network.restart_s(nbytes, 1.0) <= network.restart_s(nbytes, 600.0)


def test_a_probe_that_found_silence_free_is_believed():
    line = Operation(0.1, 1e8, 0.0)
    lines = {"all-to-all": line, "all-gather": line}
    free, full = (
        Network.of_axis(AxisProfile(2, 1, lines, (), seconds), 1) for seconds in (0.0, 10.0)
    )
    assert (free.restart, full.restart) == (0.0, 1.0)
    expected = full.restart_s(SILENT_BYTES, SILENT_S)
    half = Network.of_axis(AxisProfile(2, 1, lines, (), expected / 2), 1)
    assert half.restart == pytest.approx(0.5)


def test_a_step_of_the_trainer_waits_for_reports_of_the_loss(monkeypatch):
    """Behind a backward pass, up to its first message; and once more where owners have refused something."""
    network = Network.of_link_speed(LinkSpeed(1e9, 0.1), 2, 1)
    plain, reporting = (replace(WORK, compute_s=0.09, reports=each) for each in (False, True))

    def more(scheme):
        return cost(scheme, reporting, network).exposed_s - cost(scheme, plain, network).exposed_s

    assert more(dt.full()) == more(dt.demo()) == pytest.approx(0.1 - 0.06)
    assert more(dt.demo(link="owner")) == pytest.approx(0.2 - 0.06)
    assert more(dt.diloco(10)) == pytest.approx(0.1 - 0.06)
    wide = replace(reporting, shards=[WIDE])
    monkeypatch.setattr(buckets, "SMALLEST", 2**13)
    count = len(buckets_of(dt.demo(), dt.demo().codec.layout(WIDE), 2))
    assert count > 1
    without = cost(dt.demo(), replace(wide, reports=False), network).exposed_s
    shown = cost(dt.demo(), wide, network).exposed_s - without
    assert 0.1 - 0.06 < 0.1 - 0.06 / count * 1.5 <= shown < 0.1
