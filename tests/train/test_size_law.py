"""benchmarks/size_law: the grid ends, tries are equal, laws are found, and rows are whole lines."""

import json
import math
import random
from dataclasses import replace

import pytest
import torch
from benchmarks.compare.rows import Cell
from benchmarks.compare.tuning import missing
from benchmarks.size_law import fit as laws
from benchmarks.size_law import grid, optimizers, power, predict, run, sizes, table
from benchmarks.size_law.fit import Law, Point
from benchmarks.size_law.laws import figure, points
from benchmarks.size_law.laws import table as law_table

from detonation.models import build_model

PUBLISHED = Law(1.0923, 0.2342)
SIZES = {float(size.parameters): size.seeds for size in grid.SIZES}


def known(law, spread=0.0, replicas=(2, 8), sizes=SIZES, every=(30,)):
    """Points that follow a law, with a spread over seeds."""
    chance = random.Random(0)
    return [
        Point(n, r, tuple(law.log(n, r, h) + chance.gauss(0, spread) for _ in range(seeds)), h)
        for n, seeds in sizes.items()
        for r in replicas
        for h in every
    ]


@pytest.mark.parametrize("law", [PUBLISHED, Law(-0.3, 0.1), Law(0.02, -0.4)], ids=str)
def test_a_law_is_found_again(law):
    found = laws.fit(known(law))
    assert (found.a, found.size) == pytest.approx((law.a, law.size), rel=1e-5)


def test_the_length_of_rounds_is_found_again():
    found = laws.fit(known(Law(1.0, 0.2, 0.3), every=(5, 30, 100)), rounds=True)
    assert (found.a, found.size, found.every) == pytest.approx((1.0, 0.2, 0.3), rel=1e-4)


def test_the_costs_that_are_published_say_the_published_law():
    costs = {1.25e8: 0.029, 1e9: 0.018, 8e9: 0.011}  # of eight replicas, to a tenth of a percent
    found = laws.fit([Point(n, 8, (math.log1p(cost),)) for n, cost in costs.items()])
    assert found.size == pytest.approx(PUBLISHED.size, abs=0.01)
    for parameters, cost in costs.items():
        assert PUBLISHED.cost(parameters, 8) == pytest.approx(cost, abs=0.0005)
        assert found.cost(parameters, 8) == pytest.approx(cost, abs=0.0005)
    assert PUBLISHED.cost(139_840, 8) == pytest.approx(0.152, abs=0.0005)
    assert PUBLISHED.cost(139_840, 2) == pytest.approx(0.048, abs=0.0005)


def test_one_size_is_no_law():
    with pytest.raises(ValueError, match="at least two sizes"):
        laws.fit(known(PUBLISHED, sizes={1e5: 3}))


def test_an_interval_holds_the_law_and_narrows_with_the_spread():
    wide, narrow = (
        laws.interval([law.size for law in laws.draws(known(PUBLISHED, spread), count=60)])
        for spread in (0.02, 0.002)
    )
    assert wide[0] < PUBLISHED.size < wide[1]
    assert narrow[1] - narrow[0] < 0.3 * (wide[1] - wide[0])


def test_the_largest_size_supports_a_law_or_refutes_it():
    found = known(PUBLISHED, 0.005)
    assert all(each.supported for each in laws.held_out(found, count=60))
    largest = max(SIZES)
    bent = [
        replace(p, logs=tuple(3 * y for y in p.logs)) if p.parameters == largest else p
        for p in found
    ]
    assert not any(each.supported for each in laws.held_out(bent, count=60))


def test_power_grows_with_seeds_and_falls_with_the_spread():
    more = {size: 4 * seeds for size, seeds in SIZES.items()}
    one = power.exponent_error(0.01, 1.0, 8, SIZES)
    assert power.exponent_error(0.01, 1.0, 8, more) == pytest.approx(one / 2)
    assert power.exponent_error(0.02, 1.0, 8, SIZES) == pytest.approx(2 * one)
    assert power.decade_error(0.02, SIZES) * power.POWER == pytest.approx(0.026, abs=0.001)


def made_up(cell):
    """A row whose loss is lowest at a rate that falls with the root of the size."""
    settings = cell.settings
    size = next(
        each
        for each in (*grid.SIZES, grid.LARGEST)
        if str(each.hidden) == settings["model.hidden_size"]
    )
    best = 3e-3 * (size.parameters / 1e5) ** -0.5
    miss = math.log(cell.rate / best) ** 2 + 0.1 * math.log(float(settings["optimizer.ratio"]) / 9)
    cost = PUBLISHED.log(size.parameters, cell.replicas) if "diloco" in cell.method else 0.0
    noise = random.Random(str(cell.key)).gauss(0, 0.002) if cell.seed else 0.0
    loss = size.parameters**-0.05 * math.exp(0.02 * miss + cost + noise)
    row = {"val_loss": loss, "cpu_s": 60.0, "bytes_sent_per_step": 1.0, "steps": size.steps}
    return {**row, "num_parameters": size.parameters, "curve": []}


@pytest.fixture(scope="module")
def whole():
    """All rows of the grid."""
    done = {}
    while cells := list(missing(grid.methods(done), done)):
        done |= {cell.key: {**made_up(cell), "cell": cell} for cell in cells}
    return done


def test_the_grid_ends_and_the_first_schemes_come_first(whole):
    every = {(scheme.name, replicas) for scheme, replicas in table.EVERY}
    assert {(row["cell"].method, row["cell"].replicas) for row in whole.values()} == every
    first = {(scheme.name, replicas) for scheme, replicas in grid.FIRST}
    listed = [(each.name, each.replicas) for each in grid.methods(whole)]
    others = [number for number, each in enumerate(listed) if each not in first]
    done = [each.study for each in list(grid.methods(whole))[: others[0]]]
    assert {f"judged {size.name}" for size in grid.SIZES} <= set(done)


def test_every_size_is_judged_by_its_seeds(whole):
    seeds = {}
    for cell in (row["cell"] for row in whole.values()):
        seeds.setdefault((cell.study, cell.method, cell.replicas), set()).add(cell.seed)
    for scheme, replicas in table.EVERY:
        for size in grid.SIZES:
            own = seeds[f"judged {size.name}", scheme.name, replicas]
            assert own == set(range(1, size.seeds + 1))
    assert all(found == {0} for (study, *_), found in seeds.items() if "tuning" in study)


def test_schemes_of_an_optimizer_have_equal_tries(whole):
    tries = {}
    for cell in (row["cell"] for row in whole.values()):
        if cell.study == f"tuning {grid.TUNED.name}":
            (optimizer,) = (each for each in grid.MIDDLES if f":{each}" in " ".join(cell.sets))
            tries.setdefault(optimizer, {}).setdefault((cell.method, cell.replicas), []).append(
                cell
            )
    for each in tries.values():
        assert len({len(cells) for cells in each.values()}) == 1


def test_rounds_take_the_inner_settings_of_their_reference(whole):
    for scheme in (grid.DILOCO, grid.LONG_MULOCO):
        _, _, inner = grid.chosen(scheme.inner, 1, whole).partition(" ")
        assert set(inner.split()) < set(grid.chosen(scheme, 8, whole).split())
    assert not grid.every_setting(grid.DILOCO, 8, {})  # nothing before the reference is tuned


def test_judged_runs_take_the_rate_of_the_rule(whole):
    for size in grid.SIZES:
        (judged,) = grid.judging(size, [(grid.DILOCO, 8)], whole)
        best = 3e-3 * (size.parameters / 1e5) ** -0.5
        assert judged.rates[0] == pytest.approx(best, rel=0.03)
        assert "optimizer.ratio=1 " in judged.variants[0]  # the lowest, as the losses are made


def test_the_tables_are_complete(whole):
    text = table.table(whole)
    for scheme, replicas in table.EVERY:
        assert f"| {scheme.name} | {replicas} |" in text
    (line,) = (
        line
        for line in law_table(whole, count=5).splitlines()
        if line.startswith(f"| {grid.DILOCO.name} | 8 | AdamW")
    )
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert float(cells[5].split()[0]) == pytest.approx(PUBLISHED.size, abs=0.02)
    assert cells[-1] in ("supported", "refuted")
    assert {point.replicas for point in points(grid.DILOCO, whole)} == {2, 4, 8}


def test_a_prediction_is_written_once_and_holds_the_law(whole, tmp_path):
    path = tmp_path / "prediction.json"
    assert predict.read(path, "30M") is None
    predict.write(whole, path, count=5)
    facts, found = predict.read(path, "30M")
    assert facts["tokens_per_parameter"] == 20 and predict.read(path, "1B") is None
    by_name = {(each.scheme, each.replicas): each for each in found}
    every = {(scheme.name, replicas) for scheme, replicas in table.EVERY}
    assert set(by_name) == every
    diloco = by_name[grid.DILOCO.name, 8]
    size = sizes.PREDICTED[0]
    assert diloco.cost == pytest.approx(PUBLISHED.cost(size.parameters, 8), rel=0.2)
    assert diloco.run_low < diloco.low < diloco.cost < diloco.high < diloco.run_high
    assert diloco.to == grid.FULL.name and diloco.law in ("supported", "published")
    rate = next(each for each in diloco.sets if each.startswith("optimizer.lr="))
    assert float(rate.partition("=")[2]) == grid.rate_of(grid.DILOCO, 8, size, whole)
    assert by_name[grid.FULL.name, 1].cost is None
    assert f"| 30M | {grid.DILOCO.name} | 8 | {grid.FULL.name} |" in predict.table(path)
    with pytest.raises(ValueError, match="does not change"):
        predict.write(whole, path, count=5)
    with pytest.raises(ValueError, match="no law yet"):
        predict.write({}, tmp_path / "other.json")


def test_a_refuted_law_leaves_the_published_one(whole):
    """The rows follow the published law, so both say the same of another size."""
    (fitted,) = (
        each
        for each in predict._costs(whole, 5)
        if (each.scheme, each.replicas) == (grid.DILOCO, 8)
    )
    size = sizes.PREDICTED[0]
    found = predict._at(size, replace(fitted, verdict="refuted"), whole)
    assert found.law == "published"
    assert found.cost == pytest.approx(PUBLISHED.cost(size.parameters, 8), rel=0.1)
    assert found.run_low < found.low < found.cost < found.high < found.run_high


def test_sizes_count_the_parameters_of_the_model():
    for size in (*grid.SIZES, grid.LARGEST, *sizes.PREDICTED):
        settings = {"hidden_size": size.hidden, "feed_forward": size.feed_forward}
        with torch.device("meta"):
            made = build_model("olmo2", {**settings, "heads": sizes.HEADS})
        assert sum(parameter.numel() for parameter in made.parameters()) == size.parameters


def test_the_figure_is_drawn(whole, tmp_path):
    figure(whole, tmp_path / "law")
    assert "law of Charles et al., 8 replicas" in (tmp_path / "law.svg").read_text()


def test_batches_and_steps_fit_replicas_and_rounds():
    for scheme, replicas in table.EVERY:
        for size in (*grid.SIZES, grid.LARGEST):
            assert size.batch % 8 == 0
            assert size.steps % 30 == 0
            assert (
                grid.method(scheme, replicas, size, (1e-3,), (scheme.own[0],)).seeds == size.seeds
            )


def test_rows_are_whole_lines(tmp_path):
    row = {"recipe": "r", "sets": ["a=1"], "replicas": 1, "total": 8, "method": "AdamW, full"}
    run.append(tmp_path, {**row, "seed": 1})
    with (tmp_path / "adamw-full.jsonl").open("a") as file:
        file.write('{"seed": 2, "torn')
    assert [key[-1] for key in run.rows(tmp_path)] == [1]
    run.append(tmp_path, {**row, "seed": 3})
    lines = (tmp_path / "adamw-full.jsonl").read_text().splitlines()
    assert [json.loads(line)["seed"] for line in lines] == [1, 3]


def test_a_run_has_the_mean_of_its_last_losses(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "made_by", lambda: {"commit": "c"})
    sets = (
        "data.task=text data.source=sotu-sample data.context=16 model.hidden_size=16 "
        "model.layers=1 model.heads=2 model.feed_forward=16 train.steps=4 schedule.warmup=1 "
        "train.validate_every=1 train.validation_batches=1 scheme.name=demo scheme.precision=sign "
        "scheme.error_feedback=false optimizer.lr=0.01 optimizer.ratio=3 "
        "optimizer.name=benchmarks.size_law.optimizers:signsgd"
    )
    cell = Cell("test", "demo", grid.RECIPE, tuple(sets.split()), 2, 4, seed=1)
    run.run_cell(cell, tmp_path / "results", tmp_path / "scratch")
    (row,) = run.rows(tmp_path / "results").values()
    assert len(row["curve"]) == 4
    assert row["val_loss"] == pytest.approx(sum(loss for _, loss in row["curve"][1:]) / 3, abs=1e-5)
    assert (row["commit"], row["replicas_equal"], row["tokens"]) == ("c", True, 4 * 4 * 128)
    assert not list((tmp_path / "scratch").iterdir())


def test_tables_and_norms_have_a_rate_of_their_own():
    model = torch.nn.Sequential(
        torch.nn.Embedding(4, 3), torch.nn.Linear(3, 3), torch.nn.Linear(3, 4, bias=False)
    )
    for made in (optimizers.adamw, optimizers.muon, optimizers.signsgd):
        matrices, rest = made([{"params": list(model.parameters())}], 0.1, 3).param_groups
        assert [tuple(p.shape) for p in matrices["params"]] == [(3, 3)]
        assert [tuple(p.shape) for p in rest["params"]] == [(4, 3), (3,), (4, 3)]
        assert (matrices["lr"], rest["lr"]) == pytest.approx((0.1, 0.3))
