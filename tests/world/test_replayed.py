"""After a loss of all replicas, checkpoint and log are the last step on which they agreed, for as many as go on."""

import logging
import shutil

import pytest
import torch

import detonation as dt
import worlds
from covering import some
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.core.flat.tensors import digest
from detonation.log import playback
from steps import STEPS, advance, bases, started
from zoo import REGISTERED, Plain, built

pytestmark = pytest.mark.usefixtures("lasting_worlds")

SAVED = 3
USUAL = ("demo", "demo-sign", "random-sign-owner", "diloco", "streaming")
"""Error feedback, signs, owners, messages on their way, rounds, and rounds whose messages are on their way."""


def begun(mesh, name):
    model = dt.shard(built(Plain), mesh)
    optimizer = dt.replicate(
        bases(model.parameters()), model, mesh["replicate"], REGISTERED[name], clip=0.5
    )
    return model, optimizer, mesh["replicate"].get_local_rank()


def agreed(optimizer):
    return [
        (name, digest([each]))
        for r in optimizer.build()
        for name, each in sorted(r.replicated().items())
    ]


def trained(mesh, name, folder):
    """What the replicas agreed on after each step. A checkpoint is of step 3, and the log is left of those after it."""
    model, optimizer, replica = begun(mesh, name)
    log, found = dt.UpdateLog(folder / "updates"), {}
    optimizer.record(log)
    for step in range(STEPS):
        advance(model, optimizer, replica, [step])
        found[step + 1] = agreed(optimizer)
        if step + 1 == SAVED:
            dt.save_checkpoint(folder / "checkpoints", model, optimizer)
            log.rotate()
    return found


def resumed(mesh, name, folder, more=0, spoil=None, to=None):
    """The step from which a world goes on, what it agrees on there and `more` steps later, and what it warned of."""
    said = list[str]()
    logging.getLogger("detonation").addFilter(
        lambda record: said.append(record.getMessage()) or True
    )
    model, optimizer, replica = begun(mesh, name)
    loaded = dt.load_checkpoint(folder / "checkpoints", model, optimizer)
    before = digest(model.parameters())
    replaced = {} if spoil is None else spoil(replica)
    kept = {name: getattr(playback, name) for name in replaced}
    vars(playback).update(replaced)
    said.clear()
    try:
        step = dt.replay(folder / "updates", optimizer, to)
    finally:
        vars(playback).update(kept)
        logging.getLogger("detonation").filters.clear()
    assert step == optimizer.step_count and (
        step > loaded.step or digest(model.parameters()) == before
    )
    memories = [
        each.channel.memory.residual.any() for each in optimizer.build() if each.channel.memory
    ]
    assert step == loaded.step or not any(memories)
    found = agreed(optimizer)
    if more:
        optimizer.record(dt.UpdateLog(folder / "updates"))
        advance(model, optimizer, replica, range(step, step + more))
        optimizer.synchronize()
    return step, found, agreed(optimizer), said


def followed(mesh, name, folder):
    model, optimizer = started(LoopbackCommunicator(2), REGISTERED[name])
    dt.load_checkpoint(folder / "checkpoints", model, optimizer)
    return dt.replay(folder / "updates", optimizer), agreed(optimizer)


@some(
    "name, now",
    [(name, now) for now in (2, 3) for name in REGISTERED],
    keep=[(n, 2 + (n == "demo")) for n in USUAL],
)
def test_a_world_that_lost_all_replicas_goes_on_from_the_last_step_of_the_log(name, now, tmp_path):
    """Bit for bit, in as many replicas as before or more; and the log goes on, for those who follow it."""
    seen = worlds.run(trained, 2, 1, name, tmp_path)[0]
    ends = worlds.run(resumed, now, 1, name, tmp_path, 3)
    step, _, end, _ = ends[0]
    scheme = REGISTERED[name]
    assert STEPS - scheme.round.delay - scheme.round.every < step <= STEPS
    assert all(each[:3] == (step, seen[step], end) for each in ends)
    assert worlds.run(followed, 1, 1, name, tmp_path) == [(step + 3, end)]


def test_without_memories_training_goes_on_as_if_no_replica_had_been_lost(tmp_path):
    seen = worlds.run(trained, 2, 1, "full", tmp_path)[0]
    ends = worlds.run(resumed, 2, 1, "full", tmp_path, 2, None, STEPS - 2)
    assert [end[:3] for end in ends] == [(STEPS - 2, seen[STEPS - 2], seen[STEPS])] * 2


def test_shards_replay_their_own_files(tmp_path):
    seen = worlds.run(trained, 2, 2, "demo", tmp_path)
    ends = worlds.run(resumed, 2, 2, "demo", tmp_path)
    assert [end[:2] for end in ends] == [(STEPS, each[STEPS]) for each in seen]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    return folder, worlds.run(trained, 2, 1, "demo", folder)[0]


@pytest.fixture
def copied(run, tmp_path):
    """A run of demo of its own: its folder, the last file of its log, and what replicas agreed on after each step."""
    shutil.copytree(run[0], tmp_path / "run")
    return (
        tmp_path / "run",
        tmp_path / "run" / "updates" / f"replica0-shard0-{SAVED}.updates",
        run[1],
    )


def test_a_log_that_is_torn_or_damaged_is_the_whole_steps_before(copied):
    folder, path, seen = copied
    content = path.read_bytes()
    path.write_bytes(content[: 2 * len(content) // 3])  # as of a machine that is gone
    (torn, found, _, said), other = worlds.run(resumed, 2, 1, "demo", folder)
    assert SAVED < torn < STEPS and other[:2] == (torn, found) and found == seen[torn] and not said
    damaged = bytearray(content)
    damaged[len(content) // 3] ^= 1
    path.write_bytes(damaged)
    (step, found, _, said), other = worlds.run(resumed, 2, 1, "demo", folder)
    assert SAVED < step < torn and found == seen[step] == other[1]
    (line,) = said
    assert (
        f"is replayed up to step {step}: " in line
        and f"{path} is damaged at byte" in line
        and not other[3]
    )


def test_what_lies_behind_the_last_step_that_is_asked_for_is_of_no_matter(copied):
    folder, path, seen = copied
    content = bytearray(path.read_bytes())
    content[-len(content) // 3] ^= 1
    path.write_bytes(content)
    with pytest.raises(dt.errors.DamagedLog):
        dt.replay(folder / "updates", started(LoopbackCommunicator(2), REGISTERED["demo"])[1])
    _, optimizer = started(LoopbackCommunicator(2), REGISTERED["demo"])
    assert dt.replay(folder / "updates", optimizer, to=SAVED + 2) == SAVED + 2
    assert agreed(optimizer) == seen[SAVED + 2]


def test_a_file_that_is_missing_ends_the_replay(copied):
    folder, path, seen = copied
    worlds.run(resumed, 2, 1, "demo", folder, 2)
    path.rename(path.with_name(f"replica0-shard0-{SAVED - 1}.updates"))
    shutil.copy(
        path.with_name(f"replica0-shard0-{STEPS}.updates"), path
    )  # steps 9 and 10 where step 4 should be
    (step, found, _, said), _ = worlds.run(resumed, 2, 1, "demo", folder)
    assert (
        step == SAVED
        and found == seen[SAVED]
        and "goes on with step 9 after step 3: a file is missing" in said[0]
    )


def other_arithmetic(replica):
    """On replica 1, whose processor rounds otherwise."""
    return (
        {"round_like": lambda about, optimizer, *more: {"decode of a test vector": "0"}}
        if replica
        else {}
    )


def other_files(replica):
    """On replica 1, whose node has no log."""
    return {"segments": lambda directory, rank: []} if replica else {}


@pytest.mark.parametrize(
    "spoil, why",
    [
        (other_arithmetic, "training rounds differently"),
        (other_files, "there is no log of replica0-shard0"),
    ],
)
def test_a_log_that_one_replica_cannot_replay_is_left_to_none(spoil, why, copied):
    folder, _, seen = copied
    (step, found, _, said), other = worlds.run(resumed, 2, 1, "demo", folder, 0, spoil)
    assert step == SAVED and found == seen[SAVED] and other[:2] == (step, found)
    assert len(said) == 1 and f"replayed up to step {SAVED}" in said[0] and why in said[0]


def test_without_a_log_nothing_is_done(copied):
    folder, _, seen = copied
    shutil.rmtree(folder / "checkpoints")

    def first(mesh, folder):
        model, optimizer, _ = begun(mesh, "demo")
        assert dt.load_checkpoint(folder / "checkpoints", model, optimizer) is None
        return [dt.replay(folder / name, optimizer) for name in ("nowhere", "updates")], agreed(
            optimizer
        )

    assert worlds.run_alone(first, 2, 1, folder) == [([0, STEPS], seen[STEPS])] * 2


def test_a_log_is_replayed_from_the_weights_with_which_it_begins_alone(copied):
    """From others, its steps would be those of no training."""
    folder, _, _ = copied

    def first(mesh, folder):
        said = list[str]()
        logging.getLogger("detonation").addFilter(
            lambda record: said.append(record.getMessage()) or True
        )
        model, optimizer, _ = begun(mesh, "demo")
        with torch.no_grad():
            next(model.parameters()).mul_(2)
        before = digest(model.parameters())
        assert (
            dt.replay(folder / "updates", optimizer) == 0 and digest(model.parameters()) == before
        )
        return said

    said, _ = worlds.run_alone(first, 2, 1, folder)
    assert "replica0-shard0-0.updates begins with other weights than this run" in said[-1], said
    model, optimizer = started(LoopbackCommunicator(2), REGISTERED["demo"])
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    with pytest.raises(ValueError, match="begins with other weights than this run"):
        dt.replay(folder / "updates", optimizer)


def mixed(mesh, folder):
    """Run 1 saves a checkpoint at step 5 and logs to step 9. Run 2 starts anew in the same directory, and dies at step
    7, before its first checkpoint. What a third start raises, its weights and those of the checkpoint, and the ids."""

    def start(seed):
        torch.manual_seed(seed)
        model = dt.shard(built(Plain), mesh)
        base = bases(model.parameters())
        return model, dt.replicate(base, model, mesh["replicate"], REGISTERED["full"])

    replica, ids = mesh["replicate"].get_local_rank(), []
    for run, steps in ((1, 9), (2, 7)):
        model, optimizer = start(run)
        log = dt.UpdateLog(folder / "updates")
        optimizer.record(log)
        for step in range(steps):
            advance(model, optimizer, 10 * run + replica, [step])
            if run == 1 and step == 4:
                dt.save_checkpoint(folder / "checkpoints", model, optimizer)
                saved = digest(model.parameters())
        log.close()
        ids.append(optimizer.run.use())
    model, optimizer = start(3)
    dt.load_checkpoint(folder / "checkpoints", model, optimizer)
    raised = worlds.caught(dt.replay, folder / "updates", optimizer)
    return raised, digest(model.parameters()) == saved, ids, optimizer.run.known


@pytest.mark.parametrize("shards", [1, 2])
def test_the_log_of_another_run_than_the_checkpoint_is_refused_by_all(shards, tmp_path):
    found = worlds.run(mixed, 2, shards, tmp_path)
    for raised, unchanged, ids, known in found:
        assert unchanged and ids == found[0][2] and ids[0] == known != ids[1]
        path = tmp_path / "updates" / "replica0-shard"
        assert raised[0] == "ValueError" and raised[1].startswith(str(path))
        assert " is the log of another run than the checkpoint: replay the log" in raised[1]
