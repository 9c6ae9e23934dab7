"""A run that follows its link: down when it slows, back when it recovers, on all ranks at once, and after a resume."""

import dataclasses
import itertools
import json
import re
import shutil

import pytest
import tomli_w
import torch
from benchmarks.plan import adapt_replay

import detonation as dt
from commands import RECIPE
from detonation.cli.command import run_command
from detonation.cluster.launch import run_local
from detonation.cluster.network.profile import Step
from detonation.cluster.network.throttled import ThrottledCommunicator
from detonation.cluster.processes.signals import Stop
from detonation.core.schemes import buckets
from detonation.core.schemes.traffic import LargerThanDense, overlapped_bytes
from detonation.link_speed import LinkSpeed
from detonation.plan.cost import Network, Work, cost, report_s
from detonation.train.choice import adapt, decide
from detonation.train.choice.adapt import Adapter, Followed, explained
from detonation.train.loop import session
from detonation.train.loop.checks import shard_shapes
from detonation.train.loop.fit import fit
from detonation.train.loop.session import start_session
from detonation.train.output import metrics
from detonation.train.output.trackers import values
from limits import LIMIT_S

FAST, SLOW = LinkSpeed(1e8), LinkSpeed(2e5)
COMPUTE_S = 0.05


def followed(config, paces, assumed=FAST):
    """A run whose waits are those of a link of `paces`, step by step, for the rank that comes last.

    Returns for each step what it sent and the setting after it; and whether replicas ended equal.
    """
    session = start_session(config, torch.device("cpu"))
    session.optimizer.set_up()
    network = Network.of_link_speed(assumed, 2, 1)
    adapter = Adapter(session, Followed(0.1, network, COMPUTE_S, Step(0.001, 0.0)))
    steps = {config.scheme.name: Step(0.001, 0.0)}
    work = Work(shard_shapes(config), COMPUTE_S, steps, accumulate=config.train.accumulate)
    steps, lines = [], []

    def after(record):
        _, scheme = session.optimizer.levels[-1]
        pace = paces[record.step - 1]
        waited = cost(scheme, work, Network.of_link_speed(pace, 2, 1)).exposed_s
        waited += 0.3 * (session.rank == 0)  # it waits for the other, which is slower
        if scheme.round.every > 1:
            waited *= scheme.round.every * scheme.round.sends(record.step - 1)
        agreeing = report_s(scheme, work, Network.of_link_speed(pace, 2, 1)) + 0.3 * (
            session.rank == 0
        )
        told = adapter.after(dataclasses.replace(record, waited_s=waited, agreeing_s=agreeing))
        lines.extend(told)
        steps.append((record.bytes_sent, dict(session.optimizer.levels[-1][1].arguments)))

    fit(session, 0, len(paces), after, Stop())
    session.optimizer.synchronize()
    return steps, lines, session.world.fingerprint(session.model)[1]


@pytest.mark.long_cases("every")
@pytest.mark.parametrize(
    ("sets", "key", "phases"),
    [
        (
            ("scheme.name=demo", "scheme.topk=4", "scheme.chunk=64"),
            "topk",
            [(4, FAST), (4, SLOW), (32, FAST)],
        ),
        pytest.param(
            *(
                ("scheme.name=random", "scheme.rate=0.0625"),
                "rate",
                [(4, FAST), (4, SLOW), (32, FAST)],
            ),
            marks=pytest.mark.long,
        ),
        (
            ("scheme.name=diloco", "scheme.every=20"),
            "every",
            [(20, FAST), (20, LinkSpeed(3.6e6)), (60, FAST)],
        ),
    ],
    ids=["topk", "rate", "every"],
)
def test_settings_follow_the_link_down_and_back_at_the_same_step_everywhere(
    tiny, monkeypatch, sets, key, phases
):
    """From a setting whose loss was measured, and so back to it."""
    monkeypatch.setattr(adapt, "STEPS", 4)
    config = tiny(*sets, "train.steps=1000")
    paces = [pace for count, pace in phases for _ in range(count)]
    ranks = run_local(followed, 2, [config, paces], timeout_s=LIMIT_S)
    steps, lines, equal = ranks[0]
    assert equal and ranks[1][:2] == [steps, lines]
    first, slow = config.scheme.arguments[key], phases[0][0] + phases[1][0]
    chosen = [arguments[key] for _, arguments in steps]
    less = max if key == "every" else min
    assert chosen[: slow - 1] == [first] * (slow - 1) and chosen[-1] == first
    assert chosen[slow - 1] == less(chosen) != first
    rest = [
        {name: value for name, value in arguments.items() if name != key} for _, arguments in steps
    ]
    assert rest == [rest[0]] * len(rest)
    assert f"after step {slow} the link is" in lines[0] and "from now on, instead of" in lines[0]
    if key != "every":  # what is sent at the next step is what the setting says
        shapes = shard_shapes(config)[0]
        for (_, arguments), (sent, _) in itertools.pairwise(steps):
            scheme = dt.scheme(config.scheme.name, arguments)
            assert sent == overlapped_bytes(scheme, scheme.codec.layout(shapes), 2)


NEAR, FAR = LinkSpeed(1e8, 0.02), LinkSpeed(1e8, 0.2)


@pytest.mark.parametrize(
    ("sets", "key", "steps"),
    [
        (("scheme.name=demo", "scheme.topk=4", "scheme.chunk=64"), "topk", 16),
        (("scheme.name=diloco",), "every", 205),
    ],
    ids=["topk", "every"],
)
def test_a_latency_that_grows_is_not_taken_for_a_slow_rate(tiny, monkeypatch, sets, key, steps):
    """Fewer bytes gain nothing then, and longer rounds do; and the estimate comes back with the link."""
    monkeypatch.setattr(adapt, "STEPS", 4)
    config = tiny(*sets, *(["scheme.every=5"] if key == "every" else []), "train.steps=1000")
    due = 5 if key == "every" else 4
    paces = [NEAR] * due + [FAR] * due + [NEAR] * (steps - 2 * due)
    taken, lines, equal = run_local(followed, 2, [config, paces, NEAR], timeout_s=LIMIT_S)[0]
    assert equal and len(lines) == 2 and not any("times as fast" in line for line in lines)
    grown, shrunk = (
        float(re.search(r"the link has (\S+) times the latency", line)[1]) for line in lines
    )
    assert 8 < grown < 12.5 and 0.08 < shrunk < 0.2  # where backward hides it, no more is seen
    first, far = (taken[step][1][key] for step in (0, 2 * due - 1))
    assert far > first if key == "every" else far >= first


def test_a_link_that_has_come_back_brings_back_the_setting_that_the_run_began_with():
    """The nearest link that explains a wait is not the one that came back: waits of long rounds are near to noise."""
    ends = run_local(replayed, 1, [], timeout_s=LIMIT_S)[0]
    assert all(end == first for first, end in ends) and len({first for first, _ in ends}) > 1


def replayed():
    cases = [*adapt_replay.LINKS, *adapt_replay.FARTHER]
    return [adapt_replay.adapted(adapt_replay.clocks(links, 0.1)())[-1] for links in cases]


@pytest.mark.long  # no branch of its own
def test_a_link_that_stays_is_not_found_slow_because_the_last_micro_batch_hides_little(
    tiny, monkeypatch
):
    monkeypatch.setattr(adapt, "STEPS", 4)
    monkeypatch.setattr(buckets, "SMALLEST", 2**10)  # also in the ranks, which are forks
    config = tiny(
        "scheme.name=demo",
        "scheme.topk=4",
        "scheme.chunk=64",
        "train.accumulate=8",
        "train.steps=1000",
    )
    _, lines, equal = run_local(
        followed, 2, [config, [LinkSpeed(3e6)] * 8, LinkSpeed(3e6)], timeout_s=LIMIT_S
    )[0]
    assert equal and not lines


def test_a_move_keeps_law_5_and_what_owners_keep(tiny):
    """On four replicas nothing that would send more than dense, or travel another way, is looked at."""
    config = tiny("scheme.name=demo", "mesh.replicas=4")
    found = run_local(settings, 4, [config], timeout_s=LIMIT_S)[0]
    assert len(found) >= 3 and all(found)


def settings(config):
    """For each setting that the run could move to, whether the optimizer takes it."""
    session = start_session(config, torch.device("cpu"))
    adapter = Adapter(
        session, Followed(0.1, Network.of_link_speed(FAST, 4, 1), COMPUTE_S, Step(0.001, 0.0))
    )
    taken = []
    for scheme in adapter._settings():
        try:
            session.optimizer.reconfigure(scheme)
            taken.append(True)
        except LargerThanDense:
            continue
        except ValueError:
            taken.append(False)
    return taken


@pytest.mark.parametrize(
    ("waited", "times"),
    [(0.2, 1.0), (0.2005, 1.0), (0.1, 2.0), (0.4, 0.5), (0.001, 45.255), (100.0, 1 / 64)],
)
def test_the_rate_that_explains_a_wait_is_as_near_as_it_can_be(waited, times):
    assert explained(waited, lambda x: 0.001 + 0.2 / x, 0.005) == pytest.approx(times, rel=0.2)


def test_a_wait_that_no_rate_explains_changes_nothing():
    assert explained(0.001, lambda x: 0.1 + 0.001 / x, 0.005) == 1.0


def test_what_a_checkpoint_says_of_the_link_is_read_back_or_refused():
    known = Followed(0.1, Network.of_link_speed(FAST, 2, 1), COMPUTE_S, Step(0.001, 0.0))
    assert Followed.of(json.loads(json.dumps(known.table())), 2, 1) == known
    for damage in (
        {"lines": 3},
        {"lines": {"all-gather": [1, None, 3]}},
        {"budget": "all"},
        {"step": {"a": 1}},
    ):
        with pytest.raises(ValueError, match="damaged"):
            Followed.of({**known.table(), **damage}, 2, 1)


def test_trackers_get_numbers_alone():
    record = metrics.Record(2, 1.0, 0.1, 0.5, 100, setting="demo(topk=1)")
    assert "setting" not in values(record) and '"setting": "demo(topk=1)"' in record.line()


class Slowing(ThrottledCommunicator):
    """A link that is slow from its twentieth exchange on, where it is the second of its process: that of the run."""

    made = 0

    def __init__(self, *arguments):
        super().__init__(*arguments)
        Slowing.made += 1
        self._slows = Slowing.made == 2

    def leave(self, *message):
        if self._slows and self._started == 20:
            self.speed = LinkSpeed(1e6)
        return super().leave(*message)


def test_a_run_over_a_link_that_slows_down_moves_writes_it_down_and_resumes_with_it(
    tmp_path, monkeypatch, capfd
):
    """An emulated link is never faster than it says, so it is found to be slow on any machine."""
    monkeypatch.setattr(session, "ThrottledCommunicator", Slowing)
    monkeypatch.setattr(decide, "PROBE_S", 0.3)
    monkeypatch.setattr(adapt, "STEPS", 2)
    monkeypatch.setattr("detonation.train.choice.asked.known_schemes", lambda: {"demo": dt.demo})
    monkeypatch.setattr("detonation.train.choice.asked.settings", lambda name: [{}])
    path, out = tmp_path / "tiny.toml", tmp_path / "run"
    path.write_text(tomli_w.dumps({**RECIPE, "scheme": {"name": "demo", "topk": 8, "chunk": 32}}))
    train = ["train", str(path), "--link", "1gbit", "--out", str(out)]
    sets = [
        "--set",
        "scheme.name=auto",
        "scheme.adapt=true",
        "train.steps=40",
        "train.validation_batches=1",
    ]
    assert run_command([*train, *sets, "--stop-after", "24"]) == 0
    told = capfd.readouterr().out
    records = metrics.read_metrics(out / "metrics.jsonl")
    moves = [record for record in records if record.setting]
    assert moves and told.count("adapt: after step") == len(moves)
    last, lowest = records[-1], moves[-1]
    assert last.bytes_sent < records[0].bytes_sent and lowest.setting.startswith("demo(topk=")
    capfd.readouterr()
    assert run_command([*train, *sets, "--resume", "--stop-after", "25"]) == 0
    after = metrics.read_metrics(out / "metrics.jsonl")[24]
    assert after.bytes_sent == last.bytes_sent
    saved = json.loads((out / "checkpoints" / "step-000025" / "manifest.json").read_text())
    assert saved["extra"]["followed"]["budget"] == 0.1
    capfd.readouterr()
    assert run_command([*train, *sets, "--resume", "--json"]) == 0
    last = [
        record.setting for record in metrics.read_metrics(out / "metrics.jsonl") if record.setting
    ][-1]
    assert json.loads(capfd.readouterr().out)["adapted_to"] == last


@pytest.mark.long  # no branch of its own
def test_a_run_that_is_started_again_before_its_first_checkpoint_chooses_and_adapts_again(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr(decide, "PROBE_S", 0.3)
    monkeypatch.setattr("detonation.train.choice.asked.known_schemes", lambda: {"demo": dt.demo})
    monkeypatch.setattr("detonation.train.choice.asked.settings", lambda name: [{}])
    path, out = tmp_path / "tiny.toml", tmp_path / "run"
    path.write_text(tomli_w.dumps(RECIPE))
    sets = ["--set", "scheme.name=auto", "scheme.adapt=true"]
    train = ["train", str(path), "--link", "100mbit", "--out", str(out), *sets]
    assert run_command([*train, "--stop-after", "2"]) == 0
    shutil.rmtree(out / "checkpoints")  # as where it was killed before there was one
    capfd.readouterr()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert run_command(train) == 0
    told = capfd.readouterr().out
    assert (
        "no checkpoint was saved yet" in told
        and "\nauto: demo(" in f"\n{told}"
        and "adapt:" not in told
    )
    saved = json.loads((out / "checkpoints" / "step-000006" / "manifest.json").read_text())
    assert saved["extra"]["followed"]["budget"] == 0.1
