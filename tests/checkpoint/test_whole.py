"""Checkpoints are whole or absent: after any interruption of a save, loading returns a state that was saved."""

import errno
import os
import shutil
import threading

import pytest
import torch.distributed as dist
from test_exact import BASES, advance, everything, start

import detonation as dt
import worlds
from detonation.checkpoint.files import disk
from detonation.checkpoint.save import async_save
from detonation.checkpoint.save.shard_job import NotSaved

DEMO = dt.demo(topk=4, chunk=16)


def stopped_everywhere(mesh, folder, how, first):
    """Saves after 2 steps, once for each operation of a save, and stops before that operation; the loaded states.

    first: the step of the checkpoint that exists already.
    """
    model, optimizer = start(mesh, DEMO, BASES["AdamW"])
    ends = {}
    for step in (1, 2):
        advance(model, optimizer, [step])
        ends[step] = everything(model, optimizer)
        if step == first:
            dt.save_checkpoint(folder / "before", model, optimizer)
    other, again = start(mesh, DEMO, BASES["AdamW"])
    point, reached, loaded = 0, True, []
    while reached:
        shutil.rmtree(folder / "run", ignore_errors=True)
        shutil.copytree(folder / "before", folder / "run")
        reached = (killed if how == "killed" else disk_full)(folder / "run", model, optimizer, point)
        advance(other, again, [3])  # replaces the state that was loaded last
        step = dt.load_checkpoint(folder / "run", other, again).step
        loaded.append((step, everything(other, again) == ends[step]))
        dt.save_checkpoint(folder / "run", model, optimizer, keep=1)
        left = sorted(path.name for path in (folder / "run").iterdir())
        assert left == ["step-000002"], "leftovers disturb no later save"
        point += 1
    return loaded


def killed(run, model, optimizer, point):
    """Saves in a process that ends before operation number `point`; False where there is no such operation."""
    child = os.fork()
    if child:
        return os.WEXITSTATUS(os.waitpid(child, 0)[1]) == 9
    try:
        disk.observer = after(point, lambda: os._exit(9))
        dt.save_checkpoint(run, model, optimizer, keep=1)
    finally:
        os._exit(0)


def disk_full(run, model, optimizer, point):
    """Saves where every operation from number `point` on fails; True where `NotSaved` was raised."""
    disk.observer = after(point, no_space)
    try:
        dt.save_checkpoint(run, model, optimizer, keep=1)
    except NotSaved as error:
        assert "checkpoint step-000002 failed: No space left on device (need 7" in str(error)
        return True
    finally:
        disk.observer = None
    return False


def after(point, act):
    seen = iter(range(10**9))
    return lambda operation, path: act() if next(seen) >= point else None


def no_space():
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(("how", "first"), [("killed", 1), ("killed", 2), ("disk full", 1)])
def test_a_save_stopped_at_any_point_leaves_the_previous_checkpoint_or_the_new_one(tmp_path, how, first):
    (loaded,) = worlds.run(stopped_everywhere, 1, 1, tmp_path, how, first)
    assert len(loaded) >= 25 and all(equal for _, equal in loaded)
    steps = [step for step, _ in loaded]
    assert steps == sorted(steps) and set(steps) == {first, 2}


def beside(mesh, folder):
    """Training takes two steps while the writing thread waits in the middle of its file, which is as it was copied."""
    go_on = threading.Event()
    model, optimizer = start(mesh, DEMO, BASES["AdamW"])
    checkpoints = dt.Checkpoints(folder, model, optimizer)
    advance(model, optimizer, range(2))
    copied = everything(model, optimizer)
    disk.observer = lambda operation, path: go_on.wait() if operation == "write" else None
    checkpoints.save()
    advance(model, optimizer, range(2, 4))
    absent = not (folder / "step-000002").exists()
    go_on.set()
    assert checkpoints.wait() == folder / "step-000002"
    other, again = start(mesh, DEMO, BASES["AdamW"])
    dt.load_checkpoint(folder, other, again)
    return absent and everything(other, again) == copied


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path):
    assert all(worlds.run(beside, 2, 1, tmp_path))


def one_cannot_write(mesh, folder):
    model, optimizer = start(mesh, DEMO, BASES["AdamW"])
    advance(model, optimizer, range(1))
    dt.save_checkpoint(folder, model, optimizer)
    advance(model, optimizer, range(1, 2))
    if mesh.get_rank() == 1:
        disk.observer = lambda operation, path: no_space() if operation == "write" else None
    with dt.Checkpoints(folder, model, optimizer) as checkpoints:
        checkpoints.save()
        advance(model, optimizer, range(2, 3))
    return checkpoints.news(), sorted(path.name for path in folder.iterdir())


def test_where_one_rank_cannot_write_all_ranks_know_and_nothing_is_left(tmp_path):
    for news, left in worlds.run(one_cannot_write, 2, 1, tmp_path):
        assert len(news) == 1 and news[0].startswith("checkpoint step-000002 failed: No space left on device (need ")
        assert news[0].endswith(" free); step-000001 is still whole")
        assert left == ["step-000001"]


def one_never_comes(mesh, folder):
    """The error on rank 0 while rank 1 waits in the middle of its file."""
    go_on = threading.Event()
    async_save.SAVE_TIMEOUT_S = 0.5
    model, optimizer = start(mesh, DEMO, BASES["AdamW"])
    advance(model, optimizer, range(1))
    if mesh.get_rank() == 1:
        disk.observer = lambda operation, path: go_on.wait() if operation == "write" else None
    checkpoints = dt.Checkpoints(folder, model, optimizer)
    checkpoints.save()
    name, text = worlds.caught(checkpoints.wait) if mesh.get_rank() == 0 else ("", "")
    dist.barrier()  # the ranks' own group is as it was
    go_on.set()
    return name, text


def test_a_save_waits_no_longer_than_its_timeout(tmp_path):
    (name, text), _ = worlds.run(one_never_comes, 2, 1, tmp_path)
    assert name == "RuntimeError" and "timed out" in text.lower()


def saved_names(mesh, folder):
    model, optimizer = start(mesh, DEMO, BASES["AdamW"])
    for step in range(5):
        advance(model, optimizer, [step])
        dt.save_checkpoint(folder, model, optimizer, keep=2)
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_stay(tmp_path):
    assert worlds.run(saved_names, 1, 1, tmp_path) == [["step-000004", "step-000005"]]
