"""Nodes without a shared file system: each saves its own ranks, and nothing is lost."""

import queue
import re
import shutil
import threading
from collections import Counter
from functools import partial

import pytest
import torch.distributed as dist
from test_exact import BASES, advance, everything, start

import detonation as dt
import worlds
from covering import some
from detonation.checkpoint import gather, newest
from detonation.checkpoint.files import disk, manifest
from detonation.checkpoint.gather import Texts, Volumes, device_of, survey
from detonation.checkpoint.verify import load_weights, verify
from detonation.core.link.coordinates import Coordinates
from limits import LIMIT_S
from steps import together
from zoo import Plain, built

pytestmark = pytest.mark.usefixtures("lasting_worlds")

DEMO = dt.demo(topk=4, chunk=16)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def looks(mesh, folder, nodes):
    """The volumes of a world whose rank r sees `folder / nodes[r]`, and all that is left of looking."""
    model, _ = start(mesh, DEMO, BASES["AdamW"])
    found = survey(folder / nodes[dist.get_rank()], Texts(device_of(model)))
    dist.barrier()
    return found, names(folder / nodes[dist.get_rank()])


@pytest.mark.parametrize(
    ("nodes", "leaders"),
    [
        ("aaaa", (0, 0, 0, 0)),
        ("aabb", (0, 0, 2, 2)),
        ("abab", (0, 1, 0, 1)),
        ("abca", (0, 1, 2, 0)),
    ],
)
def test_who_shares_a_directory_is_found_and_nothing_stays_of_it(tmp_path, nodes, leaders):
    assert worlds.run(looks, 2, 2, tmp_path, nodes) == [(Volumes(leaders), [])] * 4


def test_a_rank_that_has_found_who_shares_its_directory_asks_the_file_system_no_more(
    tmp_path, monkeypatch
):
    """On three nodes of which two share a directory with nobody: all look in turn, until each has found its own."""
    looked = Counter()
    look = gather._lowest_seen

    def counted(directory, token, writers):
        looked[directory.name] += 1
        return look(directory, token, writers)

    monkeypatch.setattr(gather, "_lowest_seen", counted)
    told = [queue.Queue() for _ in range(3)]

    class Exchange:
        world_size = 3

        def __init__(self, rank):
            self.rank = rank

        def gather(self, text):
            for each in told:
                each.put((self.rank, text))
            barrier.wait(LIMIT_S)
            found = dict(told[self.rank].get(timeout=LIMIT_S) for _ in range(3))
            barrier.wait(LIMIT_S)
            return [found[rank] for rank in range(3)]

    barrier = threading.Barrier(3)
    ends = together(*(partial(survey, tmp_path / f"node{n}", Exchange(n)) for n in range(3)))
    assert {each.leaders for each in ends} == {(0, 1, 2)}
    assert looked["node0"] == 1


def one_cannot_make_its_directory(mesh, folder):
    (folder / "file").touch()
    directory = folder / ("file" if dist.get_rank() == 3 else "a")
    return worlds.caught(survey, directory, Texts(device_of(start(mesh, DEMO, BASES["AdamW"])[0])))


def test_a_directory_that_cannot_be_written_is_told_on_all_ranks(tmp_path):
    for name, text in worlds.run(one_cannot_make_its_directory, 2, 2, tmp_path):
        assert name == "OSError" and f"File exists, in {tmp_path}/file on " in text


def apart(mesh, folder, scheme):
    """Saves while training goes on, each replica in its own directory, and goes on in a new model."""
    own = folder / f"node{mesh['replicate'].get_local_rank()}"
    model, optimizer = start(mesh, scheme, BASES["AdamW"])
    with dt.Checkpoints(own, model, optimizer, keep=2) as checkpoints:
        for step in range(4):
            advance(model, optimizer, [step])
            checkpoints.save({"rank": dist.get_rank()})
    assert checkpoints.news() == []
    other, again = start(mesh, scheme, BASES["AdamW"])
    loaded = dt.load_checkpoint(own, other, again)
    assert (loaded.path, loaded.step, loaded.extra) == (own / "step-000004", 4, {"rank": 0})
    advance(model, optimizer, range(4, 6))
    advance(other, again, range(4, 6))
    return everything(model, optimizer) == everything(other, again)


@some("scheme", [DEMO, dt.diloco(every=3), dt.none()], keep=[DEMO], ids=lambda scheme: scheme.name)
def test_each_node_saves_its_own_ranks_and_a_run_goes_on_exactly(tmp_path, scheme):
    assert all(worlds.run(apart, 2, 2, tmp_path, scheme))
    for replica, other in ((0, 1), (1, 0)):
        folder = tmp_path / f"node{replica}"
        assert names(folder) == ["step-000003", "step-000004"], (
            "each node keeps as many as it should"
        )
        own = [f"replica{replica}-shard{shard}.safetensors" for shard in range(2)]
        assert names(folder / "step-000004") == ["manifest.json", *own]
        report = verify(folder / "step-000004")
        assert report.good and report.elsewhere == [
            f"replica{other}-shard{shard}.safetensors" for shard in range(2)
        ]
        where = f"(replica{other}-shard0.safetensors and 1 more are on other nodes)"
        alone = (
            "replicas train alone"
            if scheme.name == "none"
            else "no two replicas are here to be compared"
        )
        assert report.line().endswith(f"step-000004: whole on this node {where}, {alone}")
    manifests = [
        (tmp_path / node / "step-000004" / "manifest.json").read_bytes()
        for node in ("node0", "node1")
    ]
    assert manifests[0] == manifests[1]


def test_brought_together_the_files_are_one_checkpoint_and_what_a_node_lacks_of_its_own_is_a_fault(
    tmp_path,
):
    worlds.run(apart, 2, 2, tmp_path, DEMO)
    (tmp_path / "node1/step-000004/replica1-shard1.safetensors").unlink()
    assert verify(tmp_path / "node1/step-000004").faults == [
        "replica1-shard1.safetensors is missing"
    ]
    step, together = tmp_path / "node0/step-000003", tmp_path / "all/step-000003"
    shutil.copytree(step, together)
    shutil.copytree(tmp_path / "node1/step-000003", together, dirs_exist_ok=True)
    assert verify(together).line().endswith("whole, replicas equal in 16 tensors a shard")
    for path in step.glob("*.safetensors"):
        path.unlink()
    assert len(verify(step).faults) == 4, "nothing is elsewhere where nothing is here"


def saved_apart(mesh, folder, steps):
    """Resumes from this replica's own directory, or that of the first, and saves after each of `steps`."""
    own = folder / f"node{mesh['replicate'].get_local_rank()}"
    model, optimizer = start(mesh, DEMO, BASES["AdamW"])
    if steps.start:
        source = own if own.is_dir() else folder / "node0"
        dt.load_checkpoint(source, model, optimizer)
    with dt.Checkpoints(own, model, optimizer, keep=2) as checkpoints:
        for step in steps:
            advance(model, optimizer, [step])
            checkpoints.save()
    return names(own)


def loaded_step(mesh, folder):
    return dt.load_checkpoint(folder, *start(mesh, DEMO, BASES["AdamW"])).step


def test_a_node_keeps_its_older_checkpoints_until_a_newcomer_has_as_many(tmp_path):
    """A replica joins with an empty directory, and its disk is lost after its first checkpoint."""
    alone = ["step-000002", "step-000003"]
    assert worlds.run(saved_apart, 1, 1, tmp_path, range(3)) == [alone]
    both = worlds.run(saved_apart, 2, 1, tmp_path, range(3, 4))
    assert both == [[*alone, "step-000004"], ["step-000004"]]
    shutil.copytree(tmp_path / "node0", tmp_path / "left")
    assert worlds.run(loaded_step, 1, 1, tmp_path / "left") == [3]
    after = ["step-000004", "step-000005"]
    assert worlds.run(saved_apart, 2, 1, tmp_path, range(4, 5)) == [after, after]


class Crash(BaseException):
    """The end of a node, at an operation on its disk."""


def crashed(mesh, folder, last):
    """Node 0 ends when the new checkpoint has its name, node 1 before it renames `last`; what loads afterwards."""
    own = folder / f"node{dist.get_rank()}"
    model, optimizer = start(mesh, DEMO, BASES["AdamW"])
    ends = {}
    for step in (1, 2):
        advance(model, optimizer, [step])
        ends[step] = everything(model, optimizer)
        if step == 1:
            dt.save_checkpoint(own, model, optimizer, keep=1)

    def end(operation, path):
        if (operation, path.name) == [("fsync", "node0"), ("rename", last)][dist.get_rank()]:
            raise Crash

    disk.observer = end
    with pytest.raises(Crash):
        dt.save_checkpoint(own, model, optimizer, keep=1)
    disk.observer = None
    other, again = start(mesh, DEMO, BASES["AdamW"])
    step = dt.load_checkpoint(own, other, again).step
    assert everything(other, again) == ends[step]
    advance(other, again, range(step + 1, 5))
    dt.save_checkpoint(own, other, again, keep=1)
    return step, names(own)


@pytest.mark.parametrize(("last", "step"), [("manifest.json.part", 1), (".step-000002.part", 2)])
def test_a_crash_between_the_nodes_goes_on_from_the_newest_checkpoint_of_all(tmp_path, last, step):
    assert worlds.run(crashed, 2, 1, tmp_path, last) == [(step, ["step-000004"])] * 2


def one_is_full(mesh, folder):
    """The last node cannot write its files, and then its manifest: the errors of each rank, and what is left."""
    node = dist.get_rank() // 2
    own = folder / f"node{node}"
    model, optimizer = start(mesh, DEMO, BASES["AdamW"])
    checkpoints = dt.Checkpoints(own, model, optimizer, keep=1)
    advance(model, optimizer, [0])
    checkpoints.save()
    checkpoints.wait()
    texts = []
    for place in (".safetensors", ".part"):
        advance(model, optimizer, [1])
        disk.observer = lambda operation, path, end=place: (
            full() if node and end == path.suffix else None
        )
        checkpoints.save()
        texts.append(worlds.caught(checkpoints.wait)[1])
    disk.observer = None
    return texts, names(own)


def full():
    raise OSError(28, "No space left on device")


def test_a_node_that_cannot_write_leaves_the_last_checkpoint_on_all(tmp_path):
    for texts, left in worlds.run(one_is_full, 2, 2, tmp_path):
        assert left == ["step-000001"]
        for step, text in enumerate(texts, 2):
            assert text.startswith(
                f"checkpoint step-00000{step} failed: No space left on device on "
            )
            assert text.endswith("; step-000001 is still whole")


def exchanged(mesh, folder):
    """The errors after the nodes were started in another order, with an empty node, and in another world."""
    node = dist.get_rank() // 2
    model, optimizer = start(mesh, DEMO, BASES["AdamW"])
    advance(model, optimizer, [0])
    dt.save_checkpoint(folder / f"node{node}", model, optimizer)
    wide = dt.init_mesh(4, 1, "cpu")
    errors = [
        worlds.caught(dt.load_checkpoint, folder / f"node{1 - node}", model, optimizer),
        worlds.caught(
            dt.load_checkpoint, folder / ("empty" if node else "node0"), model, optimizer
        ),
        worlds.caught(
            dt.load_checkpoint, folder / f"node{node}", *start(wide, DEMO, BASES["AdamW"])
        ),
    ]
    dist.barrier()
    if dist.get_rank() == 0:
        for one, other in (("node0", "node1"), ("node1", "node0")):
            shutil.copytree(
                folder / one / "step-000001", folder / other / "step-000001", dirs_exist_ok=True
            )
    dist.barrier()
    for swapped in (node, 1 - node):
        dt.load_checkpoint(folder / f"node{swapped}", model, optimizer)
    return errors, dt.load_checkpoint(
        folder / f"node{node}", *start(wide, DEMO, BASES["AdamW"])
    ).merged


def test_what_is_where_is_told_and_files_that_were_brought_there_load(tmp_path):
    host = r"on [^ ]+"
    swapped = rf"replica 0 is needed {host} \(ranks 0-1\), and is only {host} \(ranks 2-3\); replica 1 is needed {host}"
    other = (
        rf"replica 0 is needed {host} \(ranks 2-3\), and is only {host} \(ranks 0-1\)"
        ".*resume as 4 x 1, copy all replicas' files"
    )
    for errors, merged in worlds.run(exchanged, 2, 2, tmp_path):
        assert [name for name, _ in errors] == ["NoCheckpoint"] * 3
        first, empty, wide = [text for _, text in errors]
        assert (
            re.search(swapped, first)
            and "start the nodes in the same order as in the saved run, or copy the missing files"
            in first
        )
        assert re.search(
            rf"manifest.json cannot be read \(No such file or directory\) {host} \(ranks 2-3\): "
            "copy the files of all replicas there from another node",
            empty,
        )
        assert re.search(other, wide)
        assert merged.startswith("from 2 replicas x 2 shards to 4 x 1: ")


SECOND, FIRST = "replica 1 is needed on ", "replica 0 is needed on "
VIEWS = {
    "all have all": ([], [0, 1], [], [0, 1], ""),
    "each has its own": ([], [0], [], [1], ""),
    "nobody has one": ([1], [0], [1], [0], f"{SECOND}a, b (ranks 0-1), and is on no node"),
    "one lacks it": ([], [0, 1], [1], [0], f"{SECOND}b (rank 1), and is only on a (rank 0)"),
    "exchanged": ([0], [1], [1], [0], f"{FIRST}a (rank 0), and is only on b (rank 1); {SECOND}b"),
}
"""What each of two hosts lacks and has, and what is told."""


@pytest.mark.parametrize("volumes", [False, True])
def test_a_replica_that_a_node_needs_and_lacks_is_named_with_who_has_it(volumes):
    """Unless all ranks see one directory, in which it is missing: that is a fault of the files."""
    for kind in VIEWS:
        require_named(kind, volumes)


def require_named(kind, volumes):
    *of_two, told = VIEWS[kind]
    views = [
        newest.View(host, "", "", "", lacks, has)
        for host, lacks, has in zip("ab", of_two[::2], of_two[1::2], strict=True)
    ]
    files = {manifest.file_name(replica, 0): manifest.ShardSummary(1, "") for replica in (0, 1)}
    described = manifest.Manifest(
        1, 2, 1, 0, "SGD", True, [], files, {}, {}, [0, 1] if volumes else []
    )
    found = newest._absence(views, described, Coordinates(0, 2, 0, 1))
    one_directory = not volumes and of_two[1] == of_two[3]
    if not told or one_directory:
        assert found == ""
    else:
        assert found.startswith(told)
        assert (
            "start the nodes in the same order as in the saved run, or copy the missing files"
            in found
        )


def test_a_node_loads_weights_from_the_replica_whose_files_it_has(tmp_path):
    worlds.run(apart, 2, 1, tmp_path, DEMO)
    for node in ("node0", "node1"):
        model = built(Plain)
        told = load_weights(tmp_path / node, model)
        assert node in told and any(parameter.any() for parameter in model.parameters())
