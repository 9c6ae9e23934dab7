"""benchmarks/long_rounds: an interrupted run equals one that was not, and what has run does not run again."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from benchmarks.compare import queue
from benchmarks.compare.rows import Cell
from benchmarks.compare.tuning import Method, missing
from benchmarks.long_rounds import run as one_run
from benchmarks.long_rounds import table as tables

from covering import some

STEPS = 6
TINY = "data.source=sotu-sample data.context=16 model.hidden_size=16 model.layers=1 model.heads=2 model.feed_forward=16"
TRAIN = f"{TINY} train.steps={STEPS} train.validate_every=2 train.validation_batches=1 schedule.warmup=1"
ROUNDS = "scheme.outer_lr=0.7 scheme.outer_momentum=0.5"
MULOCO = "scheme.name=muloco scheme.precision=2bit scheme.aggregate=mean scheme.every=2 optimizer.name=Muon"
SCHEMES = {
    "in flight": f"scheme.name=streaming_diloco scheme.every=4 scheme.delay=2 {ROUNDS} optimizer.name=AdamW",
    "error feedback": f"{MULOCO} {ROUNDS}",
    "sparse": "scheme.name=sparseloco scheme.every=2 optimizer.name=AdamW",
    "longer rounds": f"{MULOCO} {ROUNDS} later:4:scheme.every=1",
    "orthogonal": f"{MULOCO} {ROUNDS} later:0:orthogonal_movement",
    "low rank": f"{MULOCO} {ROUNDS} scheme.precision=fp32 later:0:low_rank",
}


def cell(name, replicas=2, lr=0.01):
    sets = f"{TRAIN} {SCHEMES[name]} optimizer.lr={lr}"
    return Cell("test", name, "recipes/quick-lm.toml", tuple(sets.split()), replicas, 4, seed=0)


@pytest.fixture(autouse=True)
def few_held_out(monkeypatch):
    monkeypatch.setattr(one_run, "MOST", 8)


class Killed(Exception):
    pass


@pytest.mark.long  # no branch of its own
@some("name", SCHEMES, keep=["in flight", "longer rounds"])
def test_an_interrupted_run_equals_one_that_was_not(name, tmp_path, monkeypatch):
    whole = one_run.train(cell(name), tmp_path / "whole", every=STEPS)
    saved, count = one_run.save, []

    def killed_in_the_second_segment(scratch, state):
        if count:
            raise Killed
        count.append(state.done)
        saved(scratch, state)

    with monkeypatch.context() as patched:
        patched.setattr(one_run, "save", killed_in_the_second_segment)
        with pytest.raises(Killed):
            one_run.train(cell(name), tmp_path / "parts", every=3)
    resumed = one_run.train(cell(name), tmp_path / "parts", every=3)
    assert count == [3]
    assert dataclasses.replace(one_run.load(tmp_path / "parts"), replicas=()).done == STEPS
    for key in whole.keys() - {"cpu_s"}:
        assert resumed[key] == whole[key], key
    ends = [one_run.load(tmp_path / each).replicas for each in ("parts", "whole")]
    for mine, theirs in zip(*ends, strict=True):
        assert all(mine[key].equal(theirs[key]) for key in mine.keys() | theirs.keys())
    assert whole["replicas_equal"]
    assert [step for step, _ in whole["curve"]] == [2, 4, 6]


def test_thin_factors_have_the_bytes_of_two_bits_and_come_near_a_matrix_that_is_thin():
    factors = torch.randn(64, 3), torch.randn(3, 192)
    matrix = factors[0] @ factors[1]
    sent = one_run.thin(matrix)
    assert torch.linalg.matrix_rank(sent) <= 6 == 64 * 192 // (8 * (64 + 192))
    torch.testing.assert_close(sent, matrix, rtol=0.02, atol=0.1)
    assert torch.linalg.matrix_rank(one_run.thin(torch.randn(64, 192))) == 6


def test_what_a_thin_product_leaves_out_waits_in_the_memory():
    optimizer = SimpleNamespace(set_up=lambda: [replicator])
    memory, sent = torch.randn(8, 8), []
    replicator = SimpleNamespace(
        channel=SimpleNamespace(pipelines=[0], memory=SimpleNamespace(residual=memory)),
        layout=SimpleNamespace(views=lambda flat: [flat]),
        _movement=lambda: moved.clone(),
    )
    replicator._send = lambda: (sent.append(memory + replicator._movement()), memory.zero_())
    one_run.low_rank(optimizer)
    for _ in range(3):
        moved = torch.randn(8, 8)
        whole = memory + moved
        replicator._send()
        assert torch.linalg.matrix_rank(sent[-1], atol=1e-4) == 1
        torch.testing.assert_close(sent[-1] + memory, whole)


def test_what_diverges_is_a_row_and_not_an_error(tmp_path):
    assert one_run.train(cell("sparse", lr=1e30), tmp_path, every=3)["val_loss"] is None


@pytest.mark.long  # no branch of its own
def test_a_second_call_runs_the_next_and_skips_what_is_there(tmp_path):
    results, scratch, count = tmp_path / "results", tmp_path / "scratch", []

    def grid(done):
        sets = f"{TRAIN} {SCHEMES['sparse']}"
        yield Method(
            "test",
            "sparse",
            "recipes/quick-lm.toml",
            sets,
            (0.005, 0.01, 0.02),
            4,
            2,
            1,
            ("seed=0",),
        )

    def run(one, *where):
        count.append(one)
        one_run.run_cell(one, *where)

    first = queue.run_missing(grid, results, scratch, limit=1, run=run)
    assert [path.stem for path in results.iterdir()] == [queue.file_name(each) for each in first]
    row = json.loads(next(results.iterdir()).read_text())
    assert {
        "val_loss",
        "curve",
        "bytes_sent_per_step",
        "cpu_s",
        "torch",
        "processor",
        "commit",
    } <= row.keys()
    rest = queue.run_missing(grid, results, scratch, run=run)
    assert [each.seed for each in (*first, *rest)] == [0, 0, 0, 1], (
        "three tries of tuning, and a judging seed"
    )
    assert queue.run_missing(grid, results, scratch, run=run) == []
    assert len(count) == len(set(count)) == 4
    assert not [path for path in scratch.iterdir() if path.is_dir()], (
        "states of finished runs are gone"
    )
    assert "4 runs" in queue.status(grid, results)


def test_a_run_that_another_process_trains_is_left_to_it(tmp_path):
    only = Method(
        "test", "sparse", "recipes/quick-lm.toml", f"{TRAIN} {SCHEMES['sparse']}", (0.01,), 4, 2, 1
    )
    with queue._claimed(tmp_path, queue.file_name(only.judging({})[1])) as mine:
        assert mine
        assert (
            queue.run_missing(lambda done: iter([only]), tmp_path / "results", tmp_path, run=None)
            == []
        )


def test_a_single_setting_is_judged_without_a_try():
    only = Method(
        "test", "sparse", "recipes/quick-lm.toml", f"{TRAIN} {SCHEMES['sparse']}", (0.01,), 4, 2
    )
    assert [each.seed for each in missing([only], {})] == [1, 2, 3]


RATES = 0.005, 0.01, 0.02


def made_row(cell, loss):
    measured = {
        "num_parameters": 1000,
        "steps": STEPS,
        "bytes_sent_per_step": 250.0,
        "cpu_s": 6.0 * cell.replicas,
    }
    return {**dataclasses.asdict(cell), "val_loss": loss, **measured}


def reference(name, total=8, seeds=3):
    sets = f"{TRAIN} scheme.name=full optimizer.name={name.split(',')[0]}"
    return Method(
        "references",
        name,
        "recipes/quick-lm.toml",
        sets,
        RATES,
        total,
        1,
        seeds,
        ("schedule.floor=0.1",),
    )


@pytest.mark.long  # no branch of its own
def test_the_table_says_how_many_seeds_stand_behind_a_loss(monkeypatch):
    monkeypatch.setattr(tables, "reference", reference)
    sets, outer = f"{TRAIN} {MULOCO}", ("scheme.outer_lr=1.0 scheme.outer_momentum=0.0",)
    ours = [
        Method("test", name, "recipes/quick-lm.toml", f"{sets} {more}", RATES, 8, 8, 3, outer)
        for name, more in (
            ("judged", ""),
            ("tuned", "scheme.decay=0.5"),
            ("once", "scheme.decay=0.0"),
        )
    ]
    done = {}
    for method, losses in (
        (reference(tables.ADAMW), (2.0, 2.0, 2.0, 2.0)),
        (reference(tables.MUON), (1.0, 1.0, 1.0, 1.0)),
        (ours[0], (1.3, 1.1, 1.2, 1.1)),
        (ours[1], (1.5,)),
        (ours[2], (1.5, 1.2)),
    ):
        low, middle, high = method.tried({})
        judged = [dataclasses.replace(middle, seed=seed) for seed in range(len(losses))]
        for cell, loss in zip([low, high, *judged], (9.0, 9.0, *losses), strict=True):
            done[cell.key] = made_row(cell, loss)
    grid = [reference(tables.ADAMW), reference(tables.MUON), *ours]
    lines = [
        line.strip("| ").split(" | ")
        for line in tables.table(lambda rows: iter(grid), done).splitlines()[2:]
    ]
    found = {(line[0], line[1]): line for line in lines}
    assert [found[name, "8"][5] for name in ("judged", "tuned", "once")] == ["3", "tuning", "1"]
    assert found["judged", "8"][8].startswith("+13.3 [")
    assert found["judged", "8"][7].startswith("-43.3 [")
    assert [found[name, "8"][8] for name in ("tuned", "once")] == ["+50.0", "+20.0"], (
        "no interval below three seeds"
    )
    assert found["judged", "8"][9] == "0.2500"
    muon = [found["Muon, full", replicas] for replicas in ("1", "2", "8")]
    assert [line[8] for line in muon] == ["", "", ""], "a reference is not compared with itself"
    seconds = [[float(each) for each in line[10:]] for line in (*muon, found["judged", "8"])]
    assert seconds[0] == [6.0] * 6, "one worker waits for nobody"
    assert seconds[2][1] > seconds[2][0] > seconds[3][0], (
        "100 ms cost more than 5, and each step more than each round"
    )
