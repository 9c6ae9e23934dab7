"""`make gpu GPU="law"`: rows that a call leaves are kept, and a prediction is beside them."""

import json
import time

import pytest
import torch
from benchmarks.gpu import law, law_runs
from benchmarks.gpu.common import Findings, Job
from benchmarks.gpu.law_runs import TINY, Study, TimeUp, Trained
from benchmarks.size_law import predict
from benchmarks.size_law.predict import Expected

from limits import LIMIT_S

LOSSES = {
    "AdamW, full": 2.0,
    "diloco 30": 2.1,
    "demo 4/64, sign": 2.02,
    "Muon, full": 1.8,
    "muloco 30, 2bit": 1.9,
}


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """The runs that were asked for; their losses are `LOSSES`, and no prediction is written."""
    runs = []

    def trained(job, study, case, seed, steps):
        runs.append((case.scheme, seed))
        return Trained([(steps, LOSSES[case.scheme])], 0.01, 100)

    monkeypatch.setattr(law, "trained", trained)
    monkeypatch.setattr(predict, "PATH", tmp_path / "prediction.json")
    return runs


def job_in(folder, left_s=LIMIT_S):
    findings = Findings(folder / "law.json")
    return Job(torch.device("cpu"), True, findings, time.monotonic() + left_s)


def call(folder):
    """The rows of the table and the findings of a call."""
    job = job_in(folder)
    law.measure(job)
    found = job.findings
    return [dict(zip(found.columns, row, strict=True)) for row in found.table], found


def test_a_call_leaves_a_row_per_run_and_the_losses_alone(asked, tmp_path):
    table, found = call(tmp_path)
    assert [row["run"] for row in table] == [scheme.name for scheme, _ in law.CASES]
    assert [row["found"] for row in table] == ["", "+5.0%", "+1.0%", "", "+5.6%"]
    assert all(row["predicted"] == row["within"] == "" for row in table)
    assert "No prediction is written yet" in found.notes[0]
    assert "muloco 30, 2bit +5.6% to Muon, full (n=1)" in found.headline
    kinds = [row["kind"] for row in law.rows(tmp_path / "law.rows.jsonl")]
    assert kinds == [*["timed"] * 5, "plan", *["run"] * 5]


def test_another_call_trains_what_is_missing(asked, tmp_path, monkeypatch):
    call(tmp_path)
    path = tmp_path / "law.rows.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]) + lines[-1][:50])  # the last run was torn
    asked.clear()
    table, _ = call(tmp_path)
    assert asked == [("muloco 30, 2bit", 1)] and len(table) == 5
    assert path.read_text().splitlines(keepends=True) == lines
    asked.clear()
    monkeypatch.setattr(law, "TINY_SEEDS", 2)
    call(tmp_path)
    assert asked == [(scheme.name, 2) for scheme, _ in law.CASES]


def test_what_was_timed_is_not_timed_again(asked, tmp_path):
    call(tmp_path)
    path = tmp_path / "law.rows.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:4]))  # the call was killed when it timed the last case
    asked.clear()
    call(tmp_path)
    assert asked[:2] == [("muloco 30, 2bit", 0), ("AdamW, full", 1)]


def test_a_run_ends_with_the_time_and_leaves_no_row(asked, tmp_path, monkeypatch):
    call(tmp_path)
    monkeypatch.setattr(law, "trained", law_runs.trained)
    monkeypatch.setattr(law, "TINY_SEEDS", 2)
    job = job_in(tmp_path, left_s=-1)
    law.measure(job)
    assert "AdamW, full, seed 2: the time was up after 0 of 90 steps" in job.findings.notes
    assert len(law.rows(tmp_path / "law.rows.jsonl")) == 11
    with pytest.raises(TimeUp):
        law_runs.trained(job, Study.of(job), law.case_of(*law.CASES[-1], None), 1, 90)


def test_a_run_that_would_not_end_in_time_does_not_begin(asked, tmp_path):
    call(tmp_path)
    job = job_in(tmp_path, left_s=0.5)
    job.tiny = False
    study = Study.of(job_in(tmp_path))
    plan = {"steps": 90, "step_s": dict.fromkeys(LOSSES, 0.01)}
    made = law.Call(job, study, tmp_path / "law.rows.jsonl", plan, False)
    asked.clear()
    assert not made.has_row(law.case_of(*law.CASES[0], None), 2)
    assert not asked and "is left to the next call: it needs 1 s" in job.findings.notes[0]


def test_steps_fit_into_a_call_or_into_several(monkeypatch):
    step_s = {"a": 0.01, "b": 0.03}
    assert law.steps_within(400, step_s, 10**6) == 8490  # 340 s of 0.04 s, in rounds
    monkeypatch.setenv("LAW_CALLS", "2")
    assert law.steps_within(400, step_s, 10**6) == 11310  # a run of 0.03 s a step is in one call
    assert law.steps_within(400, step_s, 600) == 600


def written(path, law_word, tokens):
    """A prediction of +0.5 % for `demo`, between 0 and +2 % for a run."""
    case = law.case_of(*law.CASES[2], None)
    cost = {"cost": 0.005, "low": 0.004, "high": 0.006, "run_low": 0.0, "run_high": 0.02}
    row = Expected(case.scheme, 2, case.to, (*case.sets, "optimizer.weight_decay=0.1"), **cost)
    row = {**row.__dict__, "law": law_word}
    text = Study.of(job_in(path.parent)).text
    facts = {"date": "2026-11-29", "text": text, "tokens_per_parameter": tokens}
    sizes = {TINY.name: {"parameters": TINY.parameters, "schemes": [row]}}
    path.write_text(json.dumps({**facts, "sizes": sizes}))


@pytest.mark.parametrize(
    "law_word, tokens, predicted, within",
    [
        ("supported", 90 * 8 * 16 / 37_152, "+0.5% [+0.0, +2.0]", "yes"),
        ("supported", 20, "+0.5% [+0.0, +2.0]", ""),
        ("refuted", 90 * 8 * 16 / 37_152, "", ""),
    ],
)
def test_a_prediction_is_beside_the_runs_and_is_tested_by_its_own_tokens(
    asked, tmp_path, law_word, tokens, predicted, within
):
    written(predict.PATH, law_word, tokens)
    table, found = call(tmp_path)
    demo = table[2]
    assert (demo["predicted"], demo["law"], demo["within"]) == (predicted, law_word, within)
    assert ("do not test it" in found.notes[0]) is (tokens == 20)
    (row,) = (
        each for each in law.rows(tmp_path / "law.rows.jsonl") if "demo" in str(each.get("sets"))
    )
    assert row["sets"][-1] == "optimizer.weight_decay=0.1"  # its settings are taken


def test_a_rate_rises_and_falls_and_replicas_share_a_batch():
    rates = [law_runs.rate(step, 200) for step in range(200)]
    assert rates[0] == 0.1 and rates[9] == 1.0 and max(rates) == 1.0
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)
    blocks = torch.arange(20, dtype=torch.uint8).view(20, 1)
    study = Study(TINY, "numbers", blocks, blocks)
    order = study.order(1)
    both = [study.batch(order, 2, replica, 2) for replica in range(2)]
    assert torch.equal(torch.cat(both), study.batch(order, 2, 0, 1))
    seen = torch.cat([study.batch(order, step, 0, 1) for step in range(5)])  # twice the text
    assert torch.equal(seen.flatten().bincount(), torch.full((20,), 2))
