"""The probe measures the link that it is given; each pair once; profiles are read as they were written."""

import io
from dataclasses import asdict, replace

import pytest
import torch

import worlds
from detonation.cluster.network import measure
from detonation.cluster.network.profile import AxisProfile, LinkSample, Operation, Profile, Sample
from detonation.cluster.network.throttled import ThrottledCommunicator
from detonation.link_speed import LinkSpeed
from detonation.report.terminal import show_profile

pytestmark = pytest.mark.usefixtures("lasting_worlds")


def probed(mesh, speed):
    axis = mesh["replicate"]
    return measure.probe_axis(
        ThrottledCommunicator(axis, speed) if speed else axis, torch.device("cpu"), budget_s=2.0
    )


def shortly_probed(mesh, speed):
    return measure.probe_axis(
        ThrottledCommunicator(mesh["replicate"], speed), torch.device("cpu"), budget_s=0.1
    )


def test_a_probe_measures_a_throttled_link():
    """20 Mbit/s per node, two ranks per node: each rank sees half at most, and the latency of the collective's hops."""
    found = worlds.run(probed, 2, 2, LinkSpeed(2e7, 0.02))[0]
    assert (found.size, found.per_node) == (2, 2) and found.pairs == ()
    assert set(found.operations) == {"all-reduce", "all-gather", "all-to-all"}
    for name, hops in {"all-reduce": 2, "all-gather": 1, "all-to-all": 1}.items():
        operation = found.operations[name]
        assert len(operation.samples) >= 2
        for sample in operation.samples:  # under any load, a message takes its time on the link
            assert sample.seconds >= 0.02 * hops + 8 * sample.bytes_sent / 2e7


def test_a_probe_goes_on_until_a_size_shows_the_rate():
    """Over 50 ms a message of 4 KiB, where it ended before, tells nothing of a rate."""
    found = worlds.run(shortly_probed, 2, 1, LinkSpeed(2e7, 0.05))[0]
    short, *_, long = found.operations["all-reduce"].samples
    assert long.seconds > 1.5 * short.seconds
    assert all(
        operation.rate_bits_per_s < 3e7 for operation in found.operations.values()
    )  # which is known from there
    assert found.silence_s >= 0


def test_operations_that_ended_at_small_messages_have_the_rate_of_the_one_that_did_not():
    """Where two sizes are noisy, their difference tells nothing of a message ten times as long."""
    long = measure.fit_line([Sample(n, 0.1 + n / 1e6, 0.0) for n in (1000, 16000, 256000)])
    noisy = measure.fit_line([Sample(1000, 0.05, 0.0), Sample(16000, 0.15, 0.0)])
    found = measure.of_one_link({"all-reduce": long, "all-gather": noisy})
    assert found["all-reduce"] == long and found["all-gather"].samples == noisy.samples
    assert noisy.rate_bits_per_s < 0.2 * 8e6 and found[
        "all-gather"
    ].rate_bits_per_s == pytest.approx(8e6, rel=0.2)
    near = measure.fit_line([*noisy.samples, Sample(128000, 0.4, 0.0)])
    assert measure.of_one_link({"all-reduce": long, "all-gather": near})["all-gather"] == near


def test_every_pair_of_three_or_more_is_measured_once():
    found = worlds.run(probed, 4, 1, None)[0]
    assert [(p.first, p.second) for p in found.pairs] == [
        (0, 1),
        (0, 2),
        (0, 3),
        (1, 2),
        (1, 3),
        (2, 3),
    ]


def test_the_fit_is_the_line_through_the_samples():
    samples = [Sample(n, 0.003 + 8 * n / 1e8, 0.0) for n in (1000, 4000, 64000, 10**6)]
    line = measure.fit_line(samples)
    assert line.latency_s == pytest.approx(0.003) and line.rate_bits_per_s == pytest.approx(1e8)
    assert line.spread == pytest.approx(0, abs=1e-9)


def test_a_fit_of_noise_stays_a_link():
    falling = measure.fit_line([Sample(1000, 0.01, 0.0), Sample(4000, 0.009, 0.0)])
    below_zero = measure.fit_line([Sample(1000, 0.0001, 0.0), Sample(2000, 0.01, 0.0)])
    for line in (falling, below_zero):
        assert line.latency_s >= 0 and line.rate_bits_per_s > 0


GATHER = Operation(0.001, 1e8, 0.1, [Sample(10, 0.1, 0.0)])
PROFILE = Profile(
    2,
    1,
    "gloo",
    {"replicate": AxisProfile(2, 1, {"all-gather": GATHER}, [LinkSample(0, 1, 0.1, 1e6)])},
)


def test_a_profile_is_read_as_it_was_written(tmp_path):
    PROFILE.write(tmp_path / "profile.json")
    assert Profile.read(tmp_path / "profile.json") == PROFILE


def test_a_profile_of_an_older_version_is_read():
    table = asdict(PROFILE)
    del table["axes"]["replicate"]["silence_s"]
    for key in ("median_s", "slowest_s"):
        del table["axes"]["replicate"]["operations"]["all-gather"]["samples"][0][key]
    assert Profile.of(table) == PROFILE


def test_the_jitter_of_short_messages_is_told_in_time():
    shortest = Sample(10, 0.002, 8.87, median_s=0.0002, slowest_s=0.009)
    gather = replace(GATHER, samples=[shortest])
    profile = replace(PROFILE, axes={"replicate": AxisProfile(2, 1, {"all-gather": gather}, [])})
    stream = io.StringIO()
    show_profile(asdict(profile), stream)
    text = " ".join(stream.getvalue().split())
    assert "the median of the shortest messages takes 0.2 ms, the slowest 9 ms" in text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "is no network profile"),
        ("[]", "has format None"),
        ('{"format": 2}', "has format 2, but this version reads 1: measure again"),
        ('{"format": 1}', "is damaged"),
        ('{"format": 1, "axes": {"a": 3}, "compute": null}', "is damaged"),
    ],
)
def test_another_file_is_no_profile(tmp_path, text, complaint):
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=complaint):
        Profile.read(path)
