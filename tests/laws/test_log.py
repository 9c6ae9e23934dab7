"""The law of the log: checkpoint and log are any later step, bit for bit."""

import copy
import logging
import os
import shutil
import threading
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn

import detonation as dt
import worlds
from covering import some
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.cluster.network.simulated import simulate_replicas
from detonation.core.flat.tensors import digest
from detonation.log import continuity, writer
from detonation.log.records import MESSAGE, START, noted, whole_records
from detonation.train.run import log_check
from steps import STEPS, advance, bases, started
from zoo import KINDS, REGISTERED, Plain, batch, built

REPLICAS = 4


def agreed(model, optimizer):
    """What all replicas agree on: weights or anchors, and the state of the optimizer."""
    return [
        (name, digest([tensor]))
        for each in optimizer.build()
        for name, tensor in sorted(each.replicated().items())
    ]


def trained(communicator, scheme, folder):
    model, optimizer = started(communicator, scheme)
    optimizer.record(dt.UpdateLog(folder))
    advance(model, optimizer, communicator.replica, range(STEPS))
    optimizer.param_groups[0]["lr"] *= (
        2  # a schedule after the last step; updates on their way step with it
    )
    optimizer.synchronize()
    return agreed(model, optimizer), digest(model.parameters())


@pytest.mark.parametrize("name", REGISTERED)
def test_replay_is_training_for_every_scheme(name, tmp_path):
    scheme = REGISTERED[name]
    end, weights = simulate_replicas(lambda c: trained(c, scheme, tmp_path), REPLICAS)[0]
    model, optimizer = started(LoopbackCommunicator(REPLICAS), scheme)
    assert dt.replay(tmp_path, optimizer) == STEPS
    assert agreed(model, optimizer) == end and digest(model.parameters()) == weights
    assert {path.name for path in tmp_path.iterdir()} == {"replica0-shard0-0.updates"}


def sharded(mesh, name, folder):
    scheme = REGISTERED[name]
    model = dt.shard(built(Plain), mesh)
    optimizer = dt.replicate(bases(model.parameters()), model, mesh["replicate"], scheme)
    log = dt.UpdateLog(folder / "updates", fsync_every=2)
    optimizer.record(log)
    advance(model, optimizer, mesh.get_rank(), range(3))
    dt.save_checkpoint(folder / "checkpoints", model, optimizer)
    log.rotate()
    with optimizer.overlap():
        model(batch(mesh.get_rank(), 3, 32)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    advance(model, optimizer, mesh.get_rank(), range(4, STEPS))
    optimizer.synchronize()
    log.close()
    return digest(model.parameters())


def replayed(mesh, name, folder):
    """One replica of two shards in the place of two, from the checkpoint."""
    scheme = REGISTERED[name]
    model = dt.shard(built(Plain), mesh)
    optimizer = dt.replicate(bases(model.parameters()), model, LoopbackCommunicator(2), scheme)
    dt.load_checkpoint(folder / "checkpoints", model, optimizer)
    assert dt.replay(folder / "updates", optimizer) == STEPS
    return digest(model.parameters())


@pytest.mark.long_cases("demo", "random")
@pytest.mark.parametrize("name", ["demo", "random", "diloco"])
def test_a_replica_of_shards_replays_from_a_checkpoint(name, tmp_path):
    first = worlds.run(sharded, 2, 2, name, tmp_path)[:2]
    assert worlds.run(replayed, 1, 2, name, tmp_path) == first
    files = sorted(path.name for path in (tmp_path / "updates").iterdir())
    assert files == [
        f"replica0-shard{shard}-{steps}.updates" for shard in (0, 1) for steps in (0, 3)
    ]


def unequally_long(mesh, name, folder, writes):
    """Replays the logs of two shards; that of the second lacks the ends of 0 to 3 events.

    writes: weights are written between the last step and `synchronize`.

    Returns for each of these numbers the step, and after which events its state is that of training.
    """

    def begun():
        model = dt.shard(built(Plain), mesh)
        axis = LoopbackCommunicator(2)
        return model, dt.replicate(bases(model.parameters()), model, axis, REGISTERED[name])

    model, optimizer = begun()
    log, states, found = dt.UpdateLog(folder), [], []
    optimizer.record(log)
    for step in range(STEPS):
        advance(model, optimizer, 0, [step])
        states.append(agreed(model, optimizer))
    if writes:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
    optimizer.synchronize()
    states.append(agreed(model, optimizer))
    log.close()
    path = folder / f"replica0-shard{mesh.get_rank()}-0.updates"
    for lacking in range(4):
        if lacking and mesh.get_rank() == 1:
            records = [*whole_records(path)]
            events = [number for number, record in enumerate(records) if record.kind != MESSAGE]
            os.truncate(path, sum(record.size for record in records[: events[-1]]))
        dist.barrier()
        model, optimizer = begun()
        step = dt.replay(folder, optimizer)
        now = agreed(model, optimizer)
        found.append((step, [number for number, state in enumerate(states, 1) if state == now]))
    return found


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("name", ["demo", "diloco"])
def test_shards_whose_logs_end_apart_replay_to_the_last_point_that_all_logs_have(
    name, writes, tmp_path
):
    """A kill may leave one log with a step, a write or a `synchronize` call more; shards of two steps are no model."""
    events = 1  # after the last step
    if writes and name == "demo":  # diloco exchanges the written weights at the end of the round
        events += len([*Plain().parameters()])
    for found in worlds.run(unequally_long, 1, 2, name, tmp_path, writes):
        for lacking, (step, points) in enumerate(found):
            expected = STEPS + 1
            if lacking:
                expected = STEPS - max(0, lacking - events)
            assert step == min(STEPS, expected)
            assert expected in points, (lacking, found)


@pytest.fixture
def log(tmp_path):
    """A log of eight steps of demo, and the weights after each."""
    model, optimizer = started(LoopbackCommunicator(2), dt.demo())
    optimizer.record(dt.UpdateLog(tmp_path))
    weights = [digest(model.parameters())]
    for step in range(STEPS):
        advance(model, optimizer, 0, [step])
        weights.append(digest(model.parameters()))
    return next(tmp_path.iterdir()), weights


def test_a_log_that_was_cut_off_anywhere_is_the_steps_before(log):
    path, weights = log
    content, seen = path.read_bytes(), set()
    for end in range(len(content), 0, -997):
        path.write_bytes(content[:end])
        model, optimizer = started(LoopbackCommunicator(2), dt.demo())
        assert digest(model.parameters()) == weights[0]
        steps = dt.replay(path.parent, optimizer)
        assert digest(model.parameters()) == weights[steps] and steps == optimizer.step_count
        seen.add(steps)
    assert seen == {*range(STEPS + 1)}


def test_a_step_in_between(log):
    path, weights = log
    model, optimizer = started(LoopbackCommunicator(2), dt.demo())
    assert dt.replay(path.parent, optimizer, to=5) == 5 and digest(model.parameters()) == weights[5]
    assert (
        dt.replay(path.parent, optimizer) == STEPS and digest(model.parameters()) == weights[STEPS]
    )
    with pytest.raises(dt.errors.DamagedLog, match="ends after step 8, before step 20"):
        dt.replay(path.parent, optimizer, to=20)
    with pytest.raises(
        ValueError, match="after step 3, because the optimizer has already taken 8 steps"
    ):
        dt.replay(path.parent, optimizer, to=3)


def test_damage_is_told_of(log):
    path, _ = log
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    _, optimizer = started(LoopbackCommunicator(2), dt.demo())
    with pytest.raises(dt.errors.DamagedLog, match="is damaged at byte"):
        dt.replay(path.parent, optimizer)


def test_what_training_appends_to_a_log_while_it_is_read_is_no_damage(log):
    """A reader has what was whole when it opened the file: not the rest of a step that was being written then."""
    path, _ = log
    content = path.read_bytes()
    records = [*whole_records(path)]
    early = sum(record.size for record in records[:5])
    path.write_bytes(content[: early + 9])
    reader = whole_records(path)
    found = [next(reader)]
    path.write_bytes(content)
    assert [*found, *reader] == records[:5]

    damaged = bytearray(content)
    damaged[early - 1] ^= 1
    path.write_bytes(damaged)
    reader = whole_records(path)
    next(reader)
    path.write_bytes(damaged + content)
    with pytest.raises(dt.errors.DamagedLog, match="is damaged at byte"):
        list(reader)


def test_a_log_that_grows_while_it_is_checked_has_no_torn_end(log, monkeypatch):
    path, _ = log
    content = path.read_bytes()
    path.write_bytes(content[:-1000])

    def grown(path):
        path.write_bytes(content)
        return whole_records(path)

    monkeypatch.setattr(continuity, "whole_records", grown)
    assert [(file.last, file.torn) for file in continuity.log_files(path.parent)] == [(STEPS, 0)]


def test_steps_that_a_run_takes_while_its_log_is_read_are_not_missing(log, monkeypatch):
    path, _ = log
    measured = [STEPS]

    def read(folder):
        measured[0] += STEPS
        return continuity.log_files(path.parent)

    config = {"train": {"log_updates": True}}
    monkeypatch.setattr(log_check.directory, "config_in", lambda run: config)
    monkeypatch.setattr(log_check, "_measured", lambda metrics: (measured[0], []))
    monkeypatch.setattr(log_check, "log_files", read)
    assert log_check.checked_log(path.parent, saved=0)[1] == []


def test_a_log_of_another_run_is_refused(log):
    path, _ = log
    for other, named in ((dt.demo(topk=2), "arguments"), (dt.schemes.random(), "scheme")):
        _, optimizer = started(LoopbackCommunicator(2), other)
        with pytest.raises(ValueError, match=f"was written with {named}"):
            dt.replay(path.parent, optimizer)
    _, optimizer = started(LoopbackCommunicator(2), dt.demo())
    with pytest.raises(ValueError, match="there is no log of replica0-shard0 in"):
        dt.replay(path.parent / "nowhere", optimizer)


def logged(mesh, folder, seed, steps, save=0, log="updates"):
    """A run of its own, which logs to `folder`, and saves a checkpoint after `save` steps."""
    model = built(Plain)
    base = bases(model.parameters())
    optimizer = dt.replicate(base, model, mesh["replicate"], dt.demo())
    updates = dt.UpdateLog(folder / log)
    optimizer.record(updates)
    for step in range(steps):
        advance(model, optimizer, seed, [step])
        if step + 1 == save:
            dt.save_checkpoint(folder / "checkpoints", model, optimizer)
    updates.close()
    return optimizer.run.use(), digest(model.parameters())


def resumed(folder, log="updates", steps=0):
    """One process in place of the replica of `logged`: what replay raised, the step, the id of the run, the weights."""
    model = built(Plain)
    base = bases(model.parameters())
    optimizer = dt.replicate(base, model, LoopbackCommunicator(1), dt.demo())
    dt.load_checkpoint(folder / "checkpoints", model, optimizer)
    raised = worlds.caught(dt.replay, folder / log, optimizer)
    if steps:
        optimizer.record(dt.UpdateLog(folder / log))
        advance(model, optimizer, 0, range(optimizer.step_count, optimizer.step_count + steps))
        optimizer.observer.close()
    return raised, optimizer.step_count, optimizer.run.use(), digest(model.parameters())


def runs(mesh, folder):
    first = logged(mesh, folder, 0, 6, 3)
    other = logged(mesh, folder, 1, 5, log="other")
    own = resumed(folder)
    foreign = resumed(folder, "other")
    longer = resumed(folder, steps=2)
    again = resumed(folder)
    for path in (folder / "updates").iterdir():
        without_id(path)
    older = resumed(folder)
    return first, other, own, foreign, longer, again, older


def without_id(path):
    """As a version of before runs had ids wrote the file."""
    start, *rest = [
        replace(record, content=bytes(record.content)) for record in whole_records(path)
    ]
    table = start.table()
    del table["run"]
    parts = [part for each in (noted(START, start.step, table), *rest) for part in each.parts()]
    path.write_bytes(b"".join(map(bytes, parts)))


def test_a_log_and_a_checkpoint_of_two_runs_are_not_mixed(tmp_path):
    """The id of a run is in its checkpoints and logs, and goes on with it; what has none is accepted."""
    (found,) = worlds.run(runs, 1, 1, tmp_path)
    (run, weights), (other, _), own, foreign, longer, again, older = found
    assert run != other
    assert own == (("nothing", ""), 6, run, weights)
    assert foreign[0][0] == "ValueError" and foreign[1:3] == (3, run)
    assert "is the log of another run than the checkpoint" in foreign[0][1]
    assert longer[:3] == (("nothing", ""), 8, run) and again == longer
    assert older == longer


def test_a_log_that_replaces_the_log_of_another_run_says_so(tmp_path, caplog):
    for seed, steps in ((0, 5), (1, 3)):
        model, optimizer = started(LoopbackCommunicator(2), dt.demo())
        log = dt.UpdateLog(tmp_path)
        optimizer.record(log)
        start = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        advance(model, optimizer, seed, range(steps))
        log.close()
        optimizer.load_state_dict(start[1])
        advance(model, optimizer, seed, range(steps))  # the same run, again from its start
        log.close()
    lines = [text for text in caplog.messages if "earlier run" in text]
    assert lines == [f"{tmp_path} holds the log of an earlier run, up to step 5: it is replaced"]


def test_a_run_that_was_resumed_writes_its_steps_anew(tmp_path):
    scheme = dt.demo()
    model, optimizer = started(LoopbackCommunicator(2), scheme)
    optimizer.record(dt.UpdateLog(tmp_path / "updates"))
    advance(model, optimizer, 0, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    advance(model, optimizer, 0, range(3, 5))
    model, optimizer = started(LoopbackCommunicator(2), scheme)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    optimizer.record(dt.UpdateLog(tmp_path / "updates"))
    advance(model, optimizer, 1, range(3, STEPS))  # on other data
    again, replaying = started(LoopbackCommunicator(2), scheme)
    assert dt.replay(tmp_path / "updates", replaying) == STEPS
    assert digest(again.parameters()) == digest(model.parameters())


@some(
    "name, before",
    product(REGISTERED, [5, 7]),
    keep=[(name, (5, 7)[at % 2]) for at, name in enumerate(REGISTERED) if name in KINDS]
    + [("demo", 5), ("demo", 7)],
)
def test_replay_takes_the_steps_of_a_training_that_went_back(name, before, tmp_path):
    """In the same process, by two steps and by four; from the beginning, and from the state to which it went back."""
    model, optimizer = started(LoopbackCommunicator(2), REGISTERED[name])
    optimizer.record(dt.UpdateLog(tmp_path))
    advance(model, optimizer, 0, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    advance(model, optimizer, 0, range(3, before))
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(copy.deepcopy(saved[1]))
    advance(model, optimizer, 1, range(3, STEPS))  # on other data
    optimizer.synchronize()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"replica0-shard0-{n}.updates" for n in (0, 3)
    ]
    for state in (None, saved):
        again, replaying = started(LoopbackCommunicator(2), REGISTERED[name])
        if state:
            again.load_state_dict(state[0])
            replaying.load_state_dict(state[1])
        assert dt.replay(tmp_path, replaying) == STEPS
        assert agreed(again, replaying) == agreed(model, optimizer)


def test_files_of_steps_that_training_went_back_from_are_removed(tmp_path):
    model, optimizer = started(LoopbackCommunicator(2), dt.full())
    log, states = dt.UpdateLog(tmp_path), []
    optimizer.record(log)
    for step in range(7):
        states.append(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
        advance(model, optimizer, 0, [step])
        if step % 3 == 2:
            log.rotate()
    model.load_state_dict(states[3][0])
    optimizer.load_state_dict(states[3][1])
    advance(model, optimizer, 1, range(3, STEPS))
    again, replaying = started(LoopbackCommunicator(2), dt.full())
    assert dt.replay(tmp_path, replaying) == STEPS and digest(again.parameters()) == digest(
        model.parameters()
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"replica0-shard0-{n}.updates" for n in (0, 3)
    ]


def test_a_log_goes_from_one_optimizer_to_another(tmp_path):
    """As where a loop makes its optimizer anew; the log then begins another file."""
    log, saved = dt.UpdateLog(tmp_path), None
    for data, steps in ((0, range(5)), (1, range(3, STEPS))):
        model, optimizer = started(LoopbackCommunicator(2), dt.demo())
        if saved:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        optimizer.record(log)
        for step in steps:
            advance(model, optimizer, data, [step])
            saved = (
                copy.deepcopy((model.state_dict(), optimizer.state_dict())) if step == 2 else saved
            )
    again, replaying = started(LoopbackCommunicator(2), dt.demo())
    assert dt.replay(tmp_path, replaying) == STEPS and digest(again.parameters()) == digest(
        model.parameters()
    )


def test_other_parameters_begin_another_file_and_end_a_replay(tmp_path):
    model, optimizer = started(LoopbackCommunicator(2), dt.demo())
    optimizer.record(dt.UpdateLog(tmp_path))
    advance(model, optimizer, 0, range(2))
    next(model.parameters()).requires_grad_(False)
    before = digest(model.parameters())
    for step in range(2, 4):
        model(batch(0, step, 32)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"replica0-shard0-{n}.updates" for n in (0, 2)
    ]
    again, replaying = started(LoopbackCommunicator(2), dt.demo())
    assert dt.replay(tmp_path, replaying, to=2) == 2 and digest(again.parameters()) == before
    with pytest.raises(ValueError, match="was written with parameters"):
        dt.replay(tmp_path, replaying)


def test_rotating_removes_what_checkpoints_have(tmp_path):
    model, optimizer = started(LoopbackCommunicator(2), dt.demo())
    log = dt.UpdateLog(tmp_path)
    optimizer.record(log)
    for step in range(6):
        advance(model, optimizer, 0, [step])
        if step % 2:
            log.rotate(oldest=step - 1)
    advance(model, optimizer, 0, [6])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"replica0-shard0-{steps}.updates" for steps in (4, 6)
    ]
    with pytest.raises(
        ValueError, match="begins after 4 steps, but replay would begin after step 0"
    ):
        dt.replay(tmp_path, started(LoopbackCommunicator(2), dt.demo())[1])


def test_a_file_that_another_shard_has_removed_does_not_keep_the_other_old_files(
    tmp_path, monkeypatch, caplog
):
    model, optimizer = started(LoopbackCommunicator(2), dt.demo())
    log = dt.UpdateLog(tmp_path)
    optimizer.record(log)
    for step in range(3):
        advance(model, optimizer, 0, [step])
        log.rotate()
    for path in list(tmp_path.iterdir()):
        shutil.copy(path, tmp_path / path.name.replace("shard0", "shard1"))
    listed = writer.segments(tmp_path, "")
    (tmp_path / "replica0-shard0-1.updates").unlink()
    monkeypatch.setattr(writer, "segments", lambda *given: listed)
    log.rotate(oldest=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"replica0-shard{shard}-2.updates" for shard in (0, 1)
    ]
    assert "could not be removed" not in caplog.text


def test_old_files_that_cannot_be_removed_stay_and_do_not_end_the_run(
    tmp_path, monkeypatch, caplog
):
    model, optimizer = started(LoopbackCommunicator(2), dt.demo())
    log, close = dt.UpdateLog(tmp_path), os.close
    optimizer.record(log)
    for step in range(3):
        advance(model, optimizer, 0, [step])
        log.rotate()

    def stale(*arguments, **options):
        raise OSError(116, "Stale file handle")

    def closes(descriptor):
        close(descriptor)
        stale()

    advance(model, optimizer, 0, [3])
    with monkeypatch.context() as patch:
        patch.setattr(writer.Path, "unlink", stale)
        patch.setattr(writer.os, "close", closes)
        log.rotate(oldest=3)
    assert (
        f"an old file of the update log in {tmp_path} could not be removed: Stale file handle"
        in caplog.text
    )
    advance(model, optimizer, 0, [4])
    assert dt.replay(tmp_path, started(LoopbackCommunicator(2), dt.demo())[1]) == 5


@contextmanager
def full_disk(monkeypatch):
    """Context in which a write stops after five bytes."""
    write = os.writev

    def full(descriptor, parts):
        write(descriptor, [parts[0][:5]])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", full)
        yield


def test_a_full_disk_ends_the_log_and_not_the_run(tmp_path, monkeypatch, caplog):
    model, optimizer = started(LoopbackCommunicator(2), dt.demo())
    optimizer.record(dt.UpdateLog(tmp_path))
    advance(model, optimizer, 0, range(2))
    kept = digest(model.parameters())

    caplog.clear()  # of the advice about AdamW's momentum
    with full_disk(monkeypatch), caplog.at_level(logging.WARNING, "detonation"):
        advance(model, optimizer, 0, range(2, 4))
    advance(model, optimizer, 0, range(4, 5))
    assert [record.message for record in caplog.records] == [
        f"the update log in {tmp_path} ends: No space left on device; training goes on without it"
    ]
    again, replaying = started(LoopbackCommunicator(2), dt.demo())
    assert dt.replay(tmp_path, replaying) == 2 and digest(again.parameters()) == kept
    assert len(list(whole_records(next(tmp_path.iterdir())))) == 5


def test_a_large_step_is_written_while_the_next_one_computes(tmp_path, monkeypatch):
    """Reading a log while its step is under way finds the steps before; what is written does not change under it."""
    monkeypatch.setattr(writer, "AT_ONCE_BYTES", 0)
    model, optimizer = started(LoopbackCommunicator(2), dt.full())
    log = dt.UpdateLog(tmp_path)
    optimizer.record(log)
    may_write, write = threading.Event(), os.writev
    advance(model, optimizer, 0, range(2))
    log._finish()  # the thread has written these steps before its writes are held up
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", lambda *given: may_write.wait() and write(*given))
        advance(model, optimizer, 0, range(2, 3))  # returns before it is written
        assert not may_write.is_set()
        model(batch(0, 3, 32)).mean().backward()
        threading.Timer(0, may_write.set).start()
        optimizer.step()  # waits for the step before
        optimizer.zero_grad()
    advance(model, optimizer, 0, range(4, STEPS))
    log.close()
    again, replaying = started(LoopbackCommunicator(2), dt.full())
    assert dt.replay(tmp_path, replaying) == STEPS
    assert digest(again.parameters()) == digest(model.parameters())


def test_a_full_disk_under_the_thread_ends_the_log_too(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(writer, "AT_ONCE_BYTES", 0)
    model, optimizer = started(LoopbackCommunicator(2), dt.full())
    log = dt.UpdateLog(tmp_path)
    optimizer.record(log)
    advance(model, optimizer, 0, range(2))
    kept = digest(model.parameters())
    log.close()

    with full_disk(monkeypatch), caplog.at_level(logging.WARNING, "detonation"):
        advance(model, optimizer, 0, range(2, 3))
        log.close()  # as a checkpoint does
    advance(model, optimizer, 0, range(3, STEPS))
    log.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    again, replaying = started(LoopbackCommunicator(2), dt.full())
    assert dt.replay(tmp_path, replaying) == 2 and digest(again.parameters()) == kept


def test_several_levels_are_refused(tmp_path):
    model = nn.Linear(4, 4)
    levels = [(LoopbackCommunicator(2), dt.full()), (LoopbackCommunicator(2), dt.demo())]
    optimizer = dt.replicate(torch.optim.SGD(model.parameters(), lr=0.1), model, levels=levels)
    with pytest.raises(
        ValueError, match="only one level of replication can be recorded, but there are 2"
    ):
        optimizer.record(dt.UpdateLog(tmp_path))  # on all ranks, and before anything moves
