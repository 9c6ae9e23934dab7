"""Predictions from data sheets: launches, bytes and bandwidth, and nothing that nobody can check by hand."""

import json
import sys
from pathlib import Path

import pytest

import detonation as dt
from detonation.cli.command import run_command as main
from detonation.cluster.network.profile import AxisProfile, Compute, Operation, Profile, Step
from detonation.core.link.link_speed import LinkSpeed
from detonation.plan.cost import Network, Work, cost
from detonation.plan.data_sheets import DEVICES, predicted_steps, step_counts

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import device_steps

NUMEL = {"OLMo2-1B": 1_484_916_736, "OLMo2-7B": 7_298_617_344}
WIDE = Network.of_link_speed(LinkSpeed(400e9, 10e-6), 8, 8)


def test_the_models_are_the_published_ones():
    """Layers of attention with four norms and of a gated feed-forward, embeddings that are not tied."""
    for name, (width, layers, inner) in {"OLMo2-1B": (2048, 16, 8192), "OLMo2-7B": (4096, 32, 11008)}.items():
        layer = 4 * width**2 + 3 * width * inner + 4 * width
        assert layers * layer + 2 * 100_352 * width + width == NUMEL[name] == device_steps.MODELS[name]


@pytest.mark.parametrize("model", NUMEL)
@pytest.mark.parametrize("name", ["none", "full", "demo", "random_sign"])
def test_a_step_on_8_x_8_h100_is_bytes_over_bandwidth_or_launches_on_the_host(model, name):
    local = NUMEL[model] // 8
    launches, nbytes, *_ = json.loads(Path(dt.__file__).with_name("plan").joinpath("device_steps.json").read_text())[
        "8"
    ][name]
    by_hand = max(launches * 5e-6, nbytes * local / (0.85 * 3.35e12))
    steps = predicted_steps(DEVICES["h100"], [{"all": (local,)}] * 8, replicas=8)
    assert steps[name] == Step(by_hand, by_hand)
    work = Work([{"all": (local,)}] * 8, compute_s=0.5, steps=steps)
    scheme = {"none": dt.none, "full": dt.full, "demo": dt.demo, "random_sign": dt.random_sign}[name]()
    assert cost(scheme, work, WIDE).step_s == by_hand
    assert 0.002 < by_hand < 0.1  # never less than the floor of AdamW's 28 bytes at the sheet's rate, nor absurd
    assert by_hand > (28 if name in ("none", "full") else 20) * local / 3.35e12


def test_small_models_are_bound_by_the_host_and_rounds_are_averaged():
    small = predicted_steps(DEVICES["b200"], [{"all": (1000,)}], replicas=2)
    counts = step_counts(2)["diloco"]
    assert small["diloco"] == Step(5e-6 * counts.launches, 5e-6 * counts.local_launches)
    every = cost(
        dt.diloco(every=10), Work([{"all": (10**9,)}], 1.0, small), Network.of_link_speed(LinkSpeed(1e9), 2, 1)
    )
    assert every.step_s == pytest.approx(0.1 * small["diloco"].exchange_s + 0.9 * small["diloco"].local_s)


def test_the_nearest_number_of_replicas_is_taken_and_more_messages_cost_more():
    assert step_counts(3) == step_counts(1) == step_counts(2) and step_counts(64) == step_counts(8)
    assert step_counts(8)["demo"].bytes_per_parameter > step_counts(2)["demo"].bytes_per_parameter


def test_the_table_is_about_what_the_code_does():
    """Else: python benchmarks/device_steps.py > src/detonation/plan/device_steps.json"""
    counted = list(device_steps.counted(dt.demo(), 2))
    assert counted == pytest.approx(list(vars(step_counts(2)["demo"]).values()), rel=0.25)


ASKED = ["plan", "--parameters", "1.48b", "--link", "25gbit", "--step-time", "0.5"]


def test_the_verb_predicts_the_step_and_says_from_what(capsys):
    seconds = []
    for device in (["--device", "H100"], ["--device", "rtx4090"], []):
        assert main([*ASKED, *device, "--json"]) == 0
        printed = capsys.readouterr()
        found = json.loads(printed.out)
        seconds.append(next(o["seconds"] for o in found["options"] if o["spelled"] == "none()"))
        assert ("predicted for the" in printed.err) == bool(device)
    h100, slower, without = seconds
    assert slower > h100 > without == 0.5
    assert h100 == pytest.approx(0.5 + 52 * 1.48e9 / (0.85 * 3.35e12))


def test_a_device_that_is_unknown_or_would_be_ignored_is_refused(capsys, tmp_path):
    assert main([*ASKED, "--device", "h99"]) == 2
    assert "unknown device 'h99'" in capsys.readouterr().err
    operations = {name: Operation(1e-3, 1e9, 0.0) for name in ("all-reduce", "all-gather", "all-to-all")}
    compute = Compute("quick-lm", 10, 0.5, 0.0, {})
    profile = Profile(2, 2, "gloo", {"replicate": AxisProfile(2, 2, operations)}, compute, {})
    profile.write(tmp_path / "profile.json")
    asked = ["plan", "--parameters", "10", "--profile", str(tmp_path / "profile.json"), "--device", "h100"]
    assert main(asked) == 2
    assert "has measured the optimizer's step: leave out --device h100" in capsys.readouterr().err
