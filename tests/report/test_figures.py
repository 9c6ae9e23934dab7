"""Figures: distinct colours for all eyes, thinned curves that keep their end, and no empty figure."""

import json
import math
import re
import warnings

import pytest
from matplotlib.figure import Figure

from detonation.report import figures
from detonation.report.figures import buckets, charts
from detonation.report.page import what_differs, write_page
from detonation.report.read import read_all
from made import made

BLINDNESS = {  # Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB
    "none": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "deuteranopia": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "tritanopia": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}
OKABE_ITO = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


def linear(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def times(matrix, vector):
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def oklab(rgb):
    """Ottosson (2020): a space in which distances are perceived what_differs."""
    cones = ((0.4122, 0.5363, 0.0514), (0.2119, 0.6807, 0.1074), (0.0883, 0.2817, 0.6300))
    roots = [max(0.0, value) ** (1 / 3) for value in times(cones, rgb)]
    return times(
        ((0.2105, 0.7936, -0.0041), (1.9780, -2.4286, 0.4506), (0.0259, 0.7828, -0.8087)), roots
    )


def least_distance(palette):
    seen = [
        [oklab(times(matrix, linear(colour))) for colour in palette]
        for matrix in BLINDNESS.values()
    ]
    return min(math.dist(a, b) for eye in seen for i, a in enumerate(eye) for b in eye[:i])


def contrast(colour, background):
    low, high = sorted(
        sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear(x), strict=True))
        for x in (colour, background)
    )
    return (high + 0.05) / (low + 0.05)


def test_colours_differ_for_every_eye_and_from_the_background():
    assert least_distance(figures.COLOURS) > 0.95 * least_distance(OKABE_ITO) > 0.05
    assert least_distance(figures.PART_COLOURS) > 0.15
    assert all(contrast(colour, figures.PAPER) >= 3 for colour in figures.COLOURS)


def test_a_long_curve_is_thinned_to_means_and_ends_where_it_ended():
    across, loss = buckets(
        [float(x) for x in range(1000)], [float(-x) for x in range(1000)], log=True
    )
    assert 60 <= len(across) <= 120 and across[-1] == 999 and across[0] > 0
    assert loss == sorted(loss, reverse=True)
    assert buckets([0.0, 0.0, 3.0], [1.0, 2.0, 3.0], log=True) == ([3.0], [3.0])
    assert buckets([1.0, 2.0], [5.0, 4.0], log=False) == ([1.0, 2.0], [5.0, 4.0])


def test_figures_without_content_are_left_out(tmp_path):
    def names(*directories):
        loss, costs = charts(read_all(directories))
        return [chart.name for chart in (*loss, *costs)]

    silent, sending = made(tmp_path / "none", "none", sent=0), made(tmp_path / "demo")
    assert names(silent) == ["loss-steps", "loss-seconds", "step-time"]
    virtual = made(tmp_path / "virtual", simulated=True)
    assert names(virtual) == ["loss-steps", "loss-bytes", "loss-seconds"]
    assert names(silent, sending) == ["loss-steps", "loss-bytes", "loss-seconds", "step-time"]
    third, diverged = made(tmp_path / "third", sent=3), made(tmp_path / "nan", val_loss=math.nan)
    assert "frontier" not in names(silent, sending, third, diverged)
    assert "frontier" in names(virtual, sending, third, diverged)
    note = next(
        chart.note for chart in charts(read_all([silent, sending]))[0] if chart.name == "loss-bytes"
    )
    assert note.endswith("nothing was sent: none.")


def test_the_page_shows_what_differs():
    one, other = {"a": 1, "b": {"c": True, "d": []}}, {"a": 1, "b": {"c": False, "d": []}, "e": "<"}
    assert what_differs(["first", "second"], [one, other]).rows == [
        ["b.c", "yes", "no"],
        ["e", "-", "<"],
    ]
    assert what_differs(["first", "second"], [one, one]).rows == []


def test_the_page_gives_rates_per_step_node_and_second(tmp_path):
    run = made(tmp_path / "demo")
    (run / "config.toml").write_text('[mesh]\nlink = "100mbit,5ms"\n')
    text = write_page([run]).read_text()
    assert "over an emulated link of 100mbit,5ms" in text
    for phrase in (
        "<b>x33.3</b><span>reduction",
        "<b>120.0 kB</b><span>sent per replica and step",
        "examples/s",
    ):
        assert phrase in text
    assert not re.findall(r"\d \w+ a (?:step|node|second)|sent a step", text)


def texts(axes):
    return [text.get_text() for text in axes.texts]


def with_waits(path, agreeing_s):
    """A run in which rank 0 waited for the losses of others."""
    lines = [json.loads(line) for line in (made(path) / "metrics.jsonl").read_text().splitlines()]
    text = "".join(json.dumps(line | {"agreeing_s": agreeing_s}) + "\n" for line in lines)
    (path / "metrics.jsonl").write_text(text)
    return path


def test_waiting_for_the_slowest_replica_is_a_part_of_its_own_and_no_compute(tmp_path):
    """Of 100 ms a step 10 ms are for the network, 10 ms the optimizer's, and 60 ms for the slowest."""
    (run,) = read_all([with_waits(tmp_path / "slow", 0.06)])
    (chart,) = [chart for chart in charts([run])[1] if chart.name == "step-time"]
    assert [key.text for key in chart.keys][2:] == [
        "waiting for the slowest replica",
        "waiting for the network",
    ]
    axes = Figure().add_subplot()
    chart.draw(axes)
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([0.02, 0.01, 0.06, 0.01])
    assert "100 ms, 70% waiting" in texts(axes)


def test_a_run_from_before_it_was_measured_has_the_other_parts(tmp_path):
    (run,) = read_all([made(tmp_path / "old")])
    (chart,) = [chart for chart in charts([run])[1] if chart.name == "step-time"]
    assert [key.text for key in chart.keys][1:] == [
        "encode, decode, update",
        "waiting for the network",
    ]
    assert chart.keys[2].colour == figures.PART_COLOURS[3]
    axes = Figure().add_subplot()
    chart.draw(axes)
    assert "100 ms, 10% waiting" in texts(axes)


def test_the_frontier_joins_runs_with_the_lowest_loss_at_their_bytes(tmp_path):
    sizes = {
        "sign": (1_000, 3.0),
        "demo": (10_000, 2.5),
        "worse": (20_000, 2.7),
        "full": (100_000, 2.4),
    }
    runs = [made(tmp_path / name, sent=sent, val_loss=loss) for name, (sent, loss) in sizes.items()]
    chart = next(chart for chart in charts(read_all(runs))[0] if chart.name == "frontier")
    axes = Figure().add_subplot()
    chart.draw(axes)
    line, *points = axes.lines
    assert line.get_xydata().tolist() == [[*sizes[name]] for name in ("sign", "demo", "full")]
    assert [point.get_xydata().tolist() for point in points] == [
        [[*size]] for size in sizes.values()
    ]
    assert [text.get_text() for text in axes.texts] == ["4 s"] * 4 and axes.get_xscale() == "log"


@pytest.mark.parametrize("factor", [1.0, 1e-4, 300.0])
@pytest.mark.parametrize("ratio", [1.2, 5.0, 40.0, 1e4], ids=lambda ratio: f"x{ratio:g}")
def test_no_label_is_outside_the_figure_or_mathematical(tmp_path, monkeypatch, factor, ratio):
    """Losses and bytes of three runs that differ by a factor, a little and much."""
    shown = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: shown.append(figure))
    spread = [1.0, math.sqrt(ratio), ratio]
    runs = [
        made(tmp_path / str(i), sent=int(1000 * x), val_loss=factor * x)
        for i, x in enumerate(spread)
    ]
    for chart in charts(read_all(runs))[0]:
        chart.image()
    for figure in shown:
        (axes,) = figure.axes
        figure.draw_without_rendering()
        label = axes.yaxis.label.get_window_extent()
        low, high = axes.get_ylim()
        ticks = zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)
        inside = [text for tick, text in ticks if low <= tick <= high]
        assert label.x0 >= 0 and inside, axes.get_ylabel()
        assert all(label.x1 <= text.get_window_extent().x0 for text in inside)
        ticks = [*axes.get_xticklabels("both"), *axes.get_yticklabels("both")]
        assert not any("$" in text.get_text() for text in ticks)


def test_a_name_with_signs_that_the_font_lacks_is_drawn_without_a_warning():
    chart = figures.Chart("loss", "\u6a21\u578b", "", [], lambda axes: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chart.image().startswith("data:image/png")
