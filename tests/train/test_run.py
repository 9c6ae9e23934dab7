"""Runs: what they leave behind, that they learn, continue exactly, and stop when the loss is lost."""

import errno
import json
import math
import tomllib

import pytest
import torch
from safetensors.torch import load_file

from detonation.checkpoint.files import disk, manifest, retention
from detonation.cluster.processes.failure import WorldError
from detonation.train.loop.fit import NonFiniteLoss
from detonation.train.output import directory, metrics
from detonation.train.recipe.optimizers import lr_factor
from detonation.train.recipe.schema import ScheduleConfig
from detonation.train.recipe.tables import from_table

FIELDS = {
    "scheme", "replicas", "shards", "num_parameters", "steps", "train_loss", "val_loss", "seconds",
    "bytes_sent_per_step", "bytes_full_sync_per_step", "reduction", "replicas_equal", "fingerprint",
}  # fmt: skip


def test_a_run_leaves_its_directory_and_learns(train, tiny, tmp_path):
    summaries = train("run", "mesh.shards=2", "train.steps=30", "train.validate_every=10")
    run = tmp_path / "run"
    summary = json.loads((run / "summary.json").read_text())
    assert summary.keys() >= FIELDS
    assert summary.items() <= summaries[0].items()
    assert len({s["fingerprint"] for s in summaries}) == 1
    assert summary["replicas_equal"] and summary["val_loss"] < 4.5 < math.log(256)
    records = metrics.read_metrics(run / "metrics.jsonl")
    assert [record.step for record in records] == list(range(1, 31))
    assert [record.step for record in records if record.val_loss is not None] == [10, 20, 30]
    assert records[0].lr > 0
    config = from_table(tomllib.loads((run / "config.toml").read_text()))
    assert config == tiny("mesh.shards=2", "train.steps=30", "train.validate_every=10")
    environment = (run / "environment.json").read_text()
    assert json.loads(environment)["packages"]["torch"]


@pytest.mark.long  # no branch of its own
def test_bytes_are_those_of_one_replica_with_all_its_shards(train):
    full = train("full", "scheme.name=full", "mesh.shards=2")[0]
    dense = 4 * full["num_parameters"]  # a ring all-reduce between two sends each element once
    assert full["bytes_full_sync_per_step"] == pytest.approx(dense, rel=1e-3)
    status = 2 * 2 * 3 * 4  # with each shard's all-reduce three fp32 numbers a replica
    assert full["bytes_sent_per_step"] == full["bytes_full_sync_per_step"] + status
    assert full["reduction"] == pytest.approx(1, rel=1e-3)
    none = train("none", "scheme.name=none")[0]
    assert (none["bytes_sent_per_step"], none["reduction"], none["replicas_equal"]) == (
        0,
        None,
        False,
    )


@pytest.mark.parametrize(
    ("world", "sets"),
    [
        pytest.param("2x1", ["optimizer.name=AdamW", "optimizer.lr=0.003"], marks=pytest.mark.long),
        pytest.param(
            "2x2",
            [
                "optimizer.name=SGD",
                "optimizer.lr=0.1",
                "optimizer.momentum=0.9",
                "scheme.name=random",
            ],
            marks=pytest.mark.long,
        ),
        ("2x2", ["scheme.name=diloco", "scheme.every=4", "model.dropout=0.1"]),
        pytest.param(
            "2x2",
            ["scheme.name=muloco", "scheme.every=2", "optimizer.name=Muon", "optimizer.lr=0.003"],
            marks=pytest.mark.long,
        ),
    ],
    ids=["demo-adamw", "random-sgd", "diloco-adamw", "muloco-muon"],
)
def test_stopped_and_resumed_equals_uninterrupted(train, tmp_path, world, sets):
    replicas, shards = world.split("x")
    sets = [*sets, f"mesh.replicas={replicas}", f"mesh.shards={shards}", "train.steps=7"]
    whole = train("whole", *sets)[0]
    stopped = train("parts", *sets, stop_after=3)[0]
    assert stopped == {
        "stopped_after": 3,
        "stopped_by": "--stop-after",
        "directory": str(tmp_path / "parts"),
    }
    assert not (tmp_path / "parts" / "summary.json").exists()
    resumed = train("parts", *sets, resume=True)[0]
    assert resumed["fingerprint"] == whole["fingerprint"]
    assert (resumed["val_loss"], resumed["bytes_sent_per_step"]) == (
        whole["val_loss"],
        whole["bytes_sent_per_step"],
    )
    curves = [
        [r.loss for r in metrics.read_metrics(tmp_path / run / "metrics.jsonl")]
        for run in ("whole", "parts")
    ]
    assert curves[0] == curves[1]


def test_a_foreign_checkpoint_is_refused(train, tmp_path):
    train("run", stop_after=2)
    for sets, message in [
        (["scheme.topk=2"], r"was written with scheme \{.*'topk': 4.*: resume with the same"),
        (["model.layers=2"], r"was written with model \{.*'layers': 1.*: resume with the same"),
        (["seed=1"], "was written with seed 0, this run has 1: resume with the same"),
        (["train.steps=1"], "train.steps is 1, but 2 steps are already trained: give more"),
        (
            ["optimizer.name=SGD", "optimizer.lr=0.1"],
            "was written with optimizer AdamW, this run has SGD",
        ),
    ]:
        with pytest.raises(WorldError, match=message):
            train("run", *sets, resume=True)


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(train, tmp_path, capfd):
    whole = train("whole")[0]
    train("run", "train.checkpoint_every=2", "train.keep=2", stop_after=5)
    newest, before = retention.saved_checkpoints(tmp_path / "run" / "checkpoints")
    assert (newest.name, before.name) == ("step-000005", "step-000004")
    assert manifest.read_manifest(newest).step == 5
    path = newest / "replica1-shard0.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    capfd.readouterr()
    assert train("run", resume=True)[0]["fingerprint"] == whole["fingerprint"]
    said = capfd.readouterr().out
    fault = "replica1-shard0.safetensors is damaged: its checksum differs"
    assert f"step-000005 rejected: {fault}; using step-000004\n" in said
    assert "resumed after step 4, exactly as saved\n" in said


@pytest.mark.long  # no branch of its own
def test_a_disk_that_is_full_for_a_while_does_not_stop_a_run(train, tmp_path, capfd, monkeypatch):
    def observer(operation, path):
        if operation == "write" and path.parent.name == ".step-000004.part":
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk, "observer", observer)
    train("run", "train.checkpoint_every=2")
    said = capfd.readouterr().out
    failed = "warning: checkpoint step-000004 failed: No space left on device (need "
    assert (
        said.count(failed) == 1
        and said.count(" free); step-000002 is still whole; training goes on\n") == 1
    )
    kept = [path.name for path in retention.saved_checkpoints(tmp_path / "run" / "checkpoints")]
    assert kept == ["step-000006", "step-000002"]


def test_a_run_goes_on_in_a_world_of_another_shape_and_says_what_was_merged(train, tmp_path, capfd):
    train("run", "mesh.shards=2", stop_after=2)
    summary = train("run", "mesh.replicas=3", resume=True)[0]
    assert (summary["replicas"], summary["shards"], summary["steps"]) == (3, 1, 6) and summary[
        "replicas_equal"
    ]
    policy = "memory merged by mean; joiners start with none, its mean over the replicas is kept"
    change = "from 2 replicas x 2 shards to 3 x 1"
    said = capfd.readouterr().out
    assert (
        f"resumed after step 2, {change}: weights exact where replicas agreed, else their mean; {policy}\n"
        in said
    )


def test_when_nothing_is_whole_it_says_why(train, tmp_path):
    train("run", "train.checkpoint_every=1", stop_after=2)
    for path in retention.saved_checkpoints(tmp_path / "run" / "checkpoints"):
        (path / "manifest.json").unlink()
    with pytest.raises(
        WorldError, match=r"is whole: step-000002 rejected: manifest.json cannot be read"
    ) as refused:
        train("run", resume=True)
    assert "using" not in str(refused.value)


@pytest.mark.parametrize(
    "sets",
    [
        pytest.param([], marks=pytest.mark.long),
        ["mesh.shards=2", "train.accumulate=2"],
        pytest.param(["mesh.shards=2", "scheme.name=none"], marks=pytest.mark.long),
    ],
    ids=["2x1", "2x2", "agreed-later"],
)
def test_a_lost_loss_stops_the_run_with_its_state_saved(train, tmp_path, sets):
    sets = [*sets, "optimizer.name=SignSGD", "optimizer.lr=1e38", "schedule.warmup=0"]
    told = (
        r"^the loss is (nan|inf) at step 2 on replica 0 \(shard 0\);"
        r" the state after step 1 is saved in .*/diverged/step-000001$"
    )
    with pytest.raises(WorldError, match=told):
        train("run", *sets)
    assert manifest.read_manifest(tmp_path / "run" / "diverged" / "step-000001").step == 1
    assert [record.step for record in metrics.read_metrics(tmp_path / "run" / "metrics.jsonl")] == [
        1
    ]
    assert not (tmp_path / "run" / "summary.json").exists()
    train("until", *sets, stop_after=1)  # the step that lost it has left no trace
    lost = saved(tmp_path / "run" / "diverged" / "step-000001")
    before = saved(tmp_path / "until" / "checkpoints" / "step-000001")
    assert lost.keys() == before.keys()
    assert all(torch.equal(lost[key], before[key]) for key in before)


def test_a_lost_loss_pushes_no_checkpoint_out(train, tmp_path):
    kept = ["schedule.name=constant", "train.checkpoint_every=1", "train.keep=1"]
    wild = [*kept, "optimizer.name=SignSGD", "optimizer.lr=1e38"]
    checkpoints = tmp_path / "run" / "checkpoints"
    train("run", *kept, "optimizer.name=SignSGD", "optimizer.lr=1e-3", stop_after=1)
    with pytest.raises(WorldError, match=r"; --resume goes on from .*/checkpoints/step-000001$"):
        train("run", *wild, "train.validate_every=2", resume=True)
    assert [path.name for path in checkpoints.iterdir()] == ["step-000001"]
    with pytest.raises(WorldError, match=r"; remove .*/checkpoints/step-000002 before --resume"):
        train("run", *wild, resume=True)


def test_a_lost_validation_loss_ends_the_run_as_one_of_a_replica_does(train, tmp_path):
    sets = ["optimizer.name=SignSGD", "optimizer.lr=1e38", "schedule.warmup=0", "train.steps=1"]
    with pytest.raises(
        WorldError, match=r"^the validation loss is (nan|inf) after step 1; "
    ) as lost:
        train("run", *sets)
    assert lost.value.failure.kind == NonFiniteLoss.__name__
    assert not (tmp_path / "run" / "summary.json").exists()


def test_numbers_that_are_not_finite_are_null_in_the_files_of_a_run(tmp_path):
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    record = metrics.Record(1, math.nan, 0.1, 1.0, 8, val_loss=math.inf, waits={"own": [-math.inf]})
    written = json.loads(record.line(), parse_constant=refuse)
    assert (written["loss"], written["val_loss"], written["waits"]) == (None, None, {"own": [None]})
    (again,), damaged = metrics.parse_metrics(record.line())
    assert math.isnan(again.loss) and again.val_loss is None and not damaged
    directory.write_json(tmp_path / "summary.json", {"train_loss": math.nan})
    text = (tmp_path / "summary.json").read_text()
    assert json.loads(text, parse_constant=refuse) == {"train_loss": None}


def saved(checkpoint):
    """What every rank has saved, but for its generator, which is seeded anew in each step."""
    files = {file.stem: load_file(file) for file in checkpoint.glob("*.safetensors")}
    return {
        (f, key): t
        for f, tensors in files.items()
        for key, t in tensors.items()
        if "generator" not in key
    }


def test_larger_than_full_synchronisation_is_refused_before_anything_is_written(train, tmp_path):
    with pytest.raises(
        WorldError, match=r"would send [\d,]+ bytes .* full synchronisation sends [\d,]+"
    ):
        train("run", "scheme.topk=32")
    assert not (tmp_path / "run").exists()


@pytest.mark.long  # no branch of its own
def test_accumulation_clipping_and_bf16_train(train):
    summary = train("run", "train.accumulate=2", "train.clip=1.0", "train.autocast=bf16")[0]
    assert summary["replicas_equal"] and summary["train_loss"] < 5.7


def test_one_replica_and_one_shard_are_a_run_too(train):
    summary = train("run", "mesh.replicas=1")[0]
    assert (
        summary["bytes_full_sync_per_step"],
        summary["reduction"],
        summary["replicas_equal"],
    ) == (0, None, True)


@pytest.mark.parametrize("name", ["constant", "cosine", "linear"])
@pytest.mark.parametrize("warmup", [0, 1, 4, 10])
def test_the_schedule_starts_above_zero_and_ends_at_its_floor(name, warmup):
    factor = lr_factor(ScheduleConfig(name, warmup, floor=0.1), 10)
    factors = [factor(step) for step in range(10)]
    assert factors[0] > 0 and max(factors) == pytest.approx(1)
    if warmup < 9:
        assert factors[-1] == pytest.approx(1 if name == "constant" else 0.1)
    assert factors[: max(warmup, 1)] == sorted(factors[: max(warmup, 1)])


@pytest.mark.long  # no branch of its own
def test_an_emulated_link_changes_the_waiting_alone(train, tmp_path):
    fast, slow = (
        train(out, *sets)[0] for out, sets in {"fast": [], "slow": ["mesh.link=2mbit,10ms"]}.items()
    )
    assert (
        slow["fingerprint"] == fast["fingerprint"]
        and slow["bytes_sent_per_step"] == fast["bytes_sent_per_step"]
    )
    for record in metrics.read_metrics(tmp_path / "slow" / "metrics.jsonl"):
        assert (
            record.seconds >= 8 * record.bytes_sent / 2e6 + 0.01
        )  # the message leaves and arrives within the step
        assert record.seconds >= record.step_s >= record.waited_s > 0
