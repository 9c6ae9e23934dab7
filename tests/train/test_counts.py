"""What a run goes on without is counted: by parameter, over all shards, over all its starts, and shown."""

import json
from types import SimpleNamespace

import pytest

from covering import some
from detonation.checkpoint.files import manifest, retention
from detonation.cluster.processes.failure import WorldError
from detonation.core import runtime
from detonation.core.compute import kernel_library
from detonation.core.flat.tensors import local
from detonation.report.terminal import run_rows
from detonation.train.loop.summary import NOTHING, Counts, saved_counts
from detonation.train.run import elastic_run, worker

NAME = "model.embed_tokens.weight"


@pytest.fixture
def poison(monkeypatch):
    """The gradient of one parameter is not finite on the second replica."""
    started = worker.start_session

    def poisoned(*arguments):
        session = started(*arguments)
        if session.rank // session.config.mesh.shards == 1:
            name = next(name for name, _ in session.model.named_parameters() if name.endswith(NAME))
            parameter = session.model.get_parameter(name)
            parameter.register_post_accumulate_grad_hook(lambda p: local(p.grad).mul_(float("nan")))
        return session

    monkeypatch.setattr(worker, "start_session", poisoned)


@pytest.mark.long  # no branch of its own
@some("shards", [1, 2], keep=[1])
def test_what_is_skipped_is_in_the_summary_of_a_run_that_was_resumed(
    train, tmp_path, poison, shards
):
    sets = [f"mesh.shards={shards}", "train.non_finite=skip", "train.steps=5"]
    train("run", *sets, stop_after=2)
    summaries = train("run", *sets, resume=True)
    for summary in summaries:
        ((name, count),) = summary["skipped"].items()
        assert name.endswith(NAME) and (count, summary["refused"]) == (5 * shards, 0)
    written = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (
        dict(run_rows(written))["skipped"]
        == f"{5 * shards} contributions that were not finite, of {name}"
    )
    assert "refused" not in dict(run_rows(written))
    last = manifest.read_manifest(retention.saved_checkpoints(tmp_path / "run" / "checkpoints")[0])
    assert saved_counts(last.extra) == Counts(summary["skipped"])


@pytest.mark.parametrize("late", [False, True], ids=["at-once", "late"])
def test_poison_ends_a_run_in_a_line(train, poison, monkeypatch, late):
    monkeypatch.setattr(runtime, "decides_on_device", lambda device: late)
    monkeypatch.setattr(kernel_library, "load_library", lambda: None)
    text = (
        f"^the gradient of .*{NAME} is not finite on replica 1 at step 0: lower lr, or clip; [^;]+$"
    )
    with pytest.raises(WorldError, match=text):
        train("run", "train.steps=3")


@pytest.mark.parametrize(
    "extra", [{}, {"skipped": 3, "refused": "x"}, {"skipped": {"a": "b"}, "refused": None}]
)
def test_what_a_checkpoint_says_in_other_than_numbers_counts_as_nothing(extra):
    assert saved_counts(extra) == NOTHING


ELASTIC = {
    **{"scheme": "demo", "optimizer": "AdamW", "model": "lm", "data": "text", "num_parameters": 9},
    **{"train_loss": 1.0, "val_loss": 1.0, "seconds": 1.0, "median_step_seconds": 0.1, "steps": 9},
    **{"examples_per_second": 1.0, "bytes_sent_per_step": 10.0, "bytes_full_sync_per_step": 100},
    **{"reduction": 10.0, "fingerprint": "0" * 64, "replicas": 2, "shards": 1},
    **{"replicas_equal": True, "replicas_left": 2, "losses": [], "joined": []},
}
"""The summary of an elastic run whose two replicas trained to its end."""


def test_the_table_of_an_elastic_run_says_which_replicas_were_lost_and_joined():
    rows = dict(run_rows(ELASTIC))
    assert rows["world"] == "2 replicas x 1 shards" and rows["replicas equal"] == "yes, bitwise"
    assert rows["full synchronisation"] == "100 B per step"
    losses = [{"replicas": [1]}, {"replicas": [2], "left": True}]
    changed = {"replicas_left": 1, "losses": losses, "joined": [{"replicas": [2]}]}
    rows = dict(run_rows({**ELASTIC, **changed}))
    start, end = "2 replicas x 1 shards at the start", "1 replica at the end"
    assert rows["world"] == f"{start}, {end}: 1 lost, 1 left, 1 joined"
    assert rows["full synchronisation"] == "100 B per step, with the replicas that each step had"
    assert "replicas equal" not in rows  # it has no other to be equal to


@pytest.mark.parametrize(
    "norm, words", [(0.0, ""), (0.41, ", with the unsent momentum (of norm 0.41 on this replica)")]
)
def test_the_line_of_a_lost_replica_names_momentum_only_where_there_is_some(
    norm, words, monkeypatch
):
    monkeypatch.setattr(elastic_run, "memory_norm", lambda optimizer: norm)
    monkeypatch.setattr(elastic_run.Losses, "_share", lambda self, replica: range(0))
    losses = elastic_run.Losses(
        SimpleNamespace(world=None, optimizer=None), elastic_run.SetUp("", None)
    )
    change = SimpleNamespace(replicas=[1], left=False, next_step=60, recovered_s=0.09)
    assert [*losses._lines(change)] == [
        f"lost replica 1 after step 60{words}; the other replicas continued 0.09 s after they noticed the loss"
    ]
