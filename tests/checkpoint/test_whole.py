"""Checkpoints are whole or absent: after any interruption of a save, loading returns a state that was saved."""

import errno
import gc
import os
import re
import shutil
import stat
import threading
import weakref
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from test_exact import BASES, advance, everything, start

import detonation as dt
import worlds
from covering import covered
from detonation import whole_files
from detonation.checkpoint import async_save
from detonation.checkpoint.files import disk
from detonation.checkpoint.files.manifest import MOST_BYTES
from detonation.checkpoint.shard_saver import NotSaved, SaveJob
from detonation.train.output.directory import RunDirectory, fresh_directory
from limits import LIMIT_S

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
        reached = (killed if how == "killed" else disk_full)(
            folder / "run", model, optimizer, point
        )
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


def what_a_full_disk_needs(mesh, folder):
    """The bytes that the error names, and those of the files of a save that went well."""
    model = torch.nn.Linear(1000, 500)
    base = torch.optim.AdamW(model.parameters())
    optimizer = dt.replicate(base, model, mesh["replicate"], dt.demo())
    model(torch.ones(1, 1000)).sum().backward()
    optimizer.step()
    dt.save_checkpoint(folder / "good", model, optimizer)
    disk.observer = lambda operation, path: no_space() if operation == "write" else None
    try:
        dt.save_checkpoint(folder / "full", model, optimizer)
    except NotSaved as error:
        need = re.search(r"need ([\d.]+) MB", str(error))
    finally:
        disk.observer = None
    written = sum(path.stat().st_size for path in (folder / "good").rglob("*") if path.is_file())
    return float(need[1]), written / 1e6


def test_the_error_of_a_full_disk_names_the_bytes_of_the_files_of_all_ranks(tmp_path):
    for needed, written in worlds.run(what_a_full_disk_needs, 2, 1, tmp_path):
        assert abs(needed - written) <= 0.1


@covered("how, first", ["killed", "disk full"], [1, 2])
def test_a_save_stopped_at_any_point_leaves_the_previous_checkpoint_or_the_new_one(
    tmp_path, how, first
):
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
        assert len(news) == 1 and news[0].startswith(
            "checkpoint step-000002 failed: No space left on device (need "
        )
        assert news[0].endswith(" free); step-000001 is still whole")
        assert left == ["step-000001"]


def one_is_late(mesh, folder):
    """What each rank is told where rank 1 stood still in the middle of its file, and the checkpoint after that."""
    go_on = threading.Event()
    model, optimizer = start(mesh, DEMO, BASES["AdamW"])
    advance(model, optimizer, range(1))
    if mesh.get_rank() == 1:
        disk.observer = lambda operation, path: go_on.wait() if operation == "write" else None
    checkpoints = dt.Checkpoints(folder, model, optimizer)
    checkpoints._open_group()  # where ranks may be late
    async_save.SAVE_TIMEOUT_S = 0.5
    checkpoints.save()
    told = worlds.caught(checkpoints.wait) if mesh.get_rank() == 0 else None
    dist.barrier()  # the ranks' own group is as it was
    go_on.set()
    told, disk.observer = told or worlds.caught(checkpoints.wait), None
    async_save.SAVE_TIMEOUT_S = LIMIT_S
    advance(model, optimizer, range(1, 2))
    checkpoints.save()
    return (
        *told,
        checkpoints.wait().name,
        checkpoints.news(),
        sorted(path.name for path in folder.iterdir()),
    )


def test_a_save_waits_no_longer_than_its_timeout_and_the_next_one_is_whole(tmp_path):
    ends = worlds.run(one_is_late, 2, 1, tmp_path)
    assert "timed out" in ends[0][1].lower()
    for name, text, *after in ends:
        assert name == "NotSaved" and text.startswith(
            "checkpoint step-000001 failed: RuntimeError: "
        )
        assert text.endswith("; earlier checkpoints are unchanged") and "\n" not in text
        assert after == ["step-000002", [], ["step-000002"]]


def one_fails_alone(mesh, folder):
    """Rank 0 fails once all have agreed, so that rank 1 knows nothing of it; the checkpoint after that."""
    model, optimizer = start(mesh, DEMO, BASES["AdamW"])
    checkpoints, told = dt.Checkpoints(folder, model, optimizer, keep=1), []
    for step in range(3):
        if (step, mesh.get_rank()) == (1, 0):
            disk.observer = lambda operation, path: (
                no_memory() if path.name == "step-000001" else None
            )
        advance(model, optimizer, [step])
        checkpoints.save()
        try:
            told.append(checkpoints.wait().name)
        except NotSaved as error:
            told.append(str(error))
        disk.observer = None
    return told, checkpoints.news()


def no_memory():
    raise MemoryError("no memory")


def test_where_one_rank_fails_alone_the_next_checkpoint_is_whole(tmp_path):
    failed = (
        "checkpoint step-000002 failed: MemoryError: no memory; earlier checkpoints are unchanged"
    )
    first, second = worlds.run(one_fails_alone, 2, 1, tmp_path)
    assert first == (["step-000001", failed, "step-000003"], [])
    assert second == (["step-000001", "step-000002", "step-000003"], [])
    assert [path.name for path in tmp_path.iterdir()] == ["step-000003"]


def fails(mesh, folder, act):
    """What a save tells that `act` ends, and whether its copy of the state is still in memory."""
    model, optimizer = start(mesh, DEMO, BASES["AdamW"])
    copies, make = [], async_save.make_save_job

    def noted(*arguments):
        job = make(*arguments)
        copies.extend(weakref.ref(tensor) for tensor in job.snapshots[0].tensors.values())
        return job

    async_save.make_save_job = noted
    disk.observer = lambda operation, path: act() if operation == "write" else None
    checkpoints = dt.Checkpoints(folder, model, optimizer)
    checkpoints.save()
    checkpoints._join()
    gc.collect()
    return checkpoints.news(), len(copies) > 0, any(copy() is not None for copy in copies)


def test_a_save_that_fails_leaves_no_copy_of_the_state_in_memory(tmp_path):
    for act, said in ((no_space, "No space left on device"), (no_memory, "MemoryError: no memory")):
        (((line,), taken, held),) = worlds.run(fails, 1, 1, tmp_path, act)
        assert said in line and taken and not held


def without_a_manifest(mesh, folder):
    """What each rank is told where rank 0 cannot make the manifest, or nobody could read it."""
    model, optimizer = start(mesh, DEMO, BASES["AdamW"])
    advance(model, optimizer, range(1))
    dt.save_checkpoint(folder, model, optimizer)
    advance(model, optimizer, range(1, 2))

    def save(extra=None):
        return worlds.caught(lambda: dt.save_checkpoint(folder, model, optimizer, extra, keep=1))

    told, manifest = [save({"x": "a" * (MOST_BYTES - 50)})], SaveJob.manifest
    for error in (TypeError("no JSON"), RecursionError("too deep")):
        SaveJob.manifest = Mock(side_effect=error) if mesh.get_rank() == 0 else manifest
        told.append(save())
    return told, sorted(path.name for path in folder.iterdir())


def test_where_no_manifest_can_be_made_all_ranks_know_and_nothing_is_retired(tmp_path):
    for told, left in worlds.run(without_a_manifest, 2, 1, tmp_path):
        assert {name for name, _ in told} == {"NotSaved"} and left == ["step-000001"]
        reasons = [
            text.removeprefix("checkpoint step-000002 failed: ").partition(";")[0]
            for _, text in told
        ]
        assert reasons[1:] == ["no JSON", "too deep"]
        assert (
            reasons[0].startswith("manifest.json would have 67,1")
            and "at most 67,108,864" in reasons[0]
        )


def beside_leftovers(mesh, folder):
    model, optimizer = start(mesh, DEMO, BASES["AdamW"])
    advance(model, optimizer, range(1))
    return dt.save_checkpoint(folder, model, optimizer).name


def test_leftovers_that_this_user_cannot_remove_disturb_no_save(tmp_path, monkeypatch):
    probe, entry = (
        tmp_path / f"{whole_files.PROBE}0-0",
        tmp_path / ".step-000100.gone" / "manifest.json",
    )
    probe.touch()
    entry.parent.mkdir()
    entry.touch()
    (tmp_path / ".step-000101.gone").symlink_to(entry.parent)
    unlink = Path.unlink

    def of_another_user(path, missing_ok=False):
        if path in (probe, entry) or path.is_symlink():
            raise PermissionError(errno.EPERM, "Operation not permitted")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", of_another_user)
    assert worlds.run(beside_leftovers, 2, 1, tmp_path) == ["step-000001"] * 2


def test_a_file_system_that_syncs_no_directories_takes_a_checkpoint(tmp_path, monkeypatch):
    sync = os.fsync

    def of_files_alone(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", of_files_alone)
    assert worlds.run(beside_leftovers, 1, 1, tmp_path) == ["step-000001"]


def synced_entries(mesh, folder):
    """Trains in new directories; the entries that were in a directory when this rank synced it."""
    synced, sync = set(), os.fsync

    def noted(descriptor):
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.is_dir():
            synced.update(path.iterdir())
        sync(descriptor)

    os.fsync = noted
    run = fresh_directory(str(folder / "new" / f"rank{mesh.get_rank()}"))
    model, optimizer = start(mesh, DEMO, BASES["AdamW"])
    with closing(RunDirectory(run / "out")), closing(dt.UpdateLog(folder / "updates")) as log:
        optimizer.record(log)
        advance(model, optimizer, range(1))
        dt.save_checkpoint(folder / "saved" / "checkpoints", model, optimizer)
        log.rotate()
        advance(model, optimizer, range(1, 2))
    os.fsync = sync
    return synced


@pytest.mark.parametrize("replicas", [1, 2])
def test_directories_and_logs_that_are_made_outlive_a_loss_of_power(tmp_path, replicas):
    synced = set().union(*worlds.run(synced_entries, replicas, 1, tmp_path))
    made = {path for path in tmp_path.rglob("*") if path.is_dir() or path.suffix == ".updates"}
    assert made - synced == set() and len(made) == 7 + 2 * replicas


def saved_names(mesh, folder):
    model, optimizer = start(mesh, DEMO, BASES["AdamW"])
    for step in range(5):
        advance(model, optimizer, [step])
        dt.save_checkpoint(folder, model, optimizer, keep=2)
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_stay(tmp_path):
    assert worlds.run(saved_names, 1, 1, tmp_path) == [["step-000004", "step-000005"]]
