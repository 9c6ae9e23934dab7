"""Whoever meets a run on processors that round differently: followers, logs, checkpoints, newcomers, other settings.

The processors are emulated, each by a process of its own (`unlike.py`); the last bits really differ.
"""

import json

import pytest

from commands import Command, free_port, write_recipe
from covering import some
from unlike import run_unlike

BEGIN = """
import logging, os, sys, torch, torch.distributed as dist
import detonation as dt
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.core.flat.tensors import digest
rank, folder = int(sys.argv[1]), sys.argv[2]
said = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("detonation").addHandler(handler)

def model_of():
    model = torch.nn.Sequential(torch.nn.Linear(128, 70), torch.nn.ReLU(), torch.nn.Linear(70, 64))
    with torch.no_grad():
        for parameter in model.parameters():  # no generator: its numbers are rounded by the processor
            parameter.copy_((torch.arange(parameter.numel()) * 7919 % 1009 - 504).view(parameter.shape) / 2**13)
    return model

fused = "singly" not in sys.argv  # one operation, whose rounding nobody chooses: such replicas can only be close

def started(axis, scheme=None, safety=None, **levels):
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=fused)
    return model, dt.replicate(optimizer, model, axis, scheme or dt.loco(), safety=safety, **levels)

def advance(model, optimizer, steps):
    for _ in range(steps):
        generator = torch.Generator().manual_seed(100 * optimizer.step_count + rank)
        model(torch.rand(4, 128, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

def apart(tensors, others):
    with torch.no_grad():
        return max(float((a - b).norm() / b.norm()) for a, b in zip(tensors, others, strict=True))
"""

SAVED = (
    BEGIN
    + """
from detonation.checkpoint.verify import verify

def world(number, *ranks):
    if rank not in ranks:
        return None
    store = dist.FileStore(f"{folder}/store{number}", 2)
    dist.init_process_group("gloo", store=store, rank=ranks.index(rank), world_size=2)
    return dt.init_mesh(replicas=2, shards=1, device="cpu")["replicate"]

def phase(number, axis, scheme):
    model, optimizer = started(axis, scheme)
    loaded = dt.load_checkpoint(f"{folder}/{scheme.name}", model, optimizer) if number else None
    advance(model, optimizer, 6)
    optimizer.verify()
    path = dt.save_checkpoint(f"{folder}/{scheme.name}", model, optimizer)
    print(scheme.name, number, optimizer.closeness is not None, len(said), verify(path).line().partition("whole, ")[2])
    said.clear()

for number, ranks in enumerate([(0, 2), (0, 1), (0, 2)]):
    axis = world(number, *ranks)
    for scheme in (dt.loco(), dt.schemes.local_sgd(every=2)) if axis else ():
        phase(number, axis, scheme)
    if axis:
        dt.leave()
"""
)


@pytest.mark.long  # test_close.py has such checkpoints without other processors
def test_a_checkpoint_goes_from_like_processors_to_unlike_ones_and_back(tmp_path):
    """A run with equal bits is close on unlike processors, and stays so. Rounds are equal."""
    (first, _), (second, _), (third, _) = run_unlike(SAVED, [0, 1, 0], tmp_path)
    lines = [line.split(" ", 4) for line in first.splitlines()]
    assert [line[:4] for line in lines if line[0] == "loco"] == [
        ["loco", "0", "False", "0"], ["loco", "1", "True", "1"], ["loco", "2", "True", "0"],
    ]  # fmt: skip
    assert [line[1:4] for line in lines if line[0] != "loco"] == [
        [str(number), "False", "0"] for number in range(3)
    ]
    told = [line[4] for line in lines if line[0] == "loco"]
    assert told[0].startswith("replicas equal in 16 tensors") and told[1].startswith(
        "replicas close in 16 tensors"
    )
    assert told[2].startswith("replicas close in 16 tensors")
    assert [
        line.split()[3] for line in (second + third).splitlines() if line.startswith("loco")
    ] == ["0"] * 3


FOLLOWED = (
    BEGIN
    + """
import time
from pathlib import Path

import pytest
from detonation.log.records import Tapes
token, steps = b"a token for tests only", 12
address, log, files = Path(folder) / "address", Path(folder) / "log", Path(folder) / "weights"

def awaited(path):
    while not path.exists():
        time.sleep(0.01)
    return path.read_text()

def refused(call, *arguments, **options):
    try:
        call(*arguments, **options)
    except (ValueError, dt.errors.LostFeed) as error:
        return str(error)
    return "not refused"

if rank < 2:
    dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2)
    model, optimizer = started(dt.init_mesh(replicas=2, shards=1, device="cpu")["replicate"], clip=1.0)
    optimizer.set_up()
    feed = None
    if rank == 0:
        feed = dt.Feed(model, optimizer, "127.0.0.1:0", token=token)
        optimizer.record(Tapes([dt.UpdateLog(log), feed]))
        weights = dt.Feed.of_weights(model, files)
        (Path(folder) / "new").write_text(feed.address)
        (Path(folder) / "new").rename(address)
        while feed.followers < 2:  # of one kind and of the other
            time.sleep(0.01)
    else:
        print("feed", refused(dt.Feed, model, optimizer, "127.0.0.1:0", token=token))
    for step in range(steps):
        if step == 7:  # where a replay begins as well
            dt.save_checkpoint(folder + "/checkpoints", model, optimizer)
        advance(model, optimizer, 1)
        if rank == 0:
            weights.publish(step + 1)
    if rank == 0:
        optimizer.observer._tapes[0].close()
        weights.close()
        feed.close()
        (Path(folder) / "ended").write_text(digest(model.parameters()))
    optimizer.verify()
    print("weights", digest(model.parameters()))
else:
    served = model_of()
    with dt.follow(served, awaited(address), token=token, wait=False) as follower:
        said_no = refused(follower.update, to=steps)
    print("follow", said_no if said_no != "not refused" else digest(served.parameters()))
    awaited(Path(folder) / "ended")
    files_follower = dt.follow(model_of(), files)
    print("files", files_follower.step, digest(files_follower.model.parameters()))
    again, replayed = started(LoopbackCommunicator(2), clip=1.0)
    said.clear()
    dt.replay(log, replayed)
    if rank == 2:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        late, from_checkpoint = started(LoopbackCommunicator(2), clip=1.0)
        dt.load_checkpoint(folder + "/checkpoints", late, from_checkpoint)
        dt.replay(log, from_checkpoint)
        print("late", digest(late.parameters()), from_checkpoint.step_count)
    print("replay", digest(again.parameters()), apart(again.parameters(), files_follower.model.parameters()))
    print("said", *said)
"""
)


def test_what_follows_a_close_run_has_the_bits_of_replica_0_or_is_told_that_it_has_not(tmp_path):
    """A follower of its messages, its log, and its weights as files: on a processor like that of replica 0, and not.

    Replica 0 takes over nothing, so its messages alone make its weights; those of replica 1 they do not make.
    """
    outputs = [out for out, _ in run_unlike(FOLLOWED, [0, 1, 0, 1], tmp_path)]
    first, second, like, unlike = (
        dict(line.partition(" ")[::2] for line in out.splitlines()) for out in outputs
    )
    weights = first["weights"]
    assert second["weights"] != weights and second["feed"].startswith(
        "replica 1 copies parts of replica 0"
    )
    assert like["follow"] == like["replay"].split()[0] == weights and like["said"] == ""
    assert like["late"] == f"{weights} 12"
    assert unlike["follow"].startswith("this process would round differently from training")
    assert "Feed.of_weights" in unlike["follow"]
    assert like["files"] == unlike["files"] == f"12 {weights}"
    digest, apart = unlike["replay"].split()
    assert digest != weights and 0 < float(apart) < 1e-5
    assert (
        "optimizer's steps on a test vector is" in unlike["said"]
        and "replay on a machine of the same kind" in unlike["said"]
    )


@pytest.mark.long  # the bits themselves are in test_unlike_processors.py
def test_what_follows_a_run_of_singly_rounded_steps_has_its_bits_on_any_processor(tmp_path):
    outputs = [out for out, _ in run_unlike(FOLLOWED, [0, 1, 0, 1], tmp_path, "singly")]
    first, second, like, unlike = (
        dict(line.partition(" ")[::2] for line in out.splitlines()) for out in outputs
    )
    weights = first["weights"]
    assert second["weights"] == weights and second["feed"] == "not refused"
    for each in (like, unlike):
        assert each["follow"] == weights and each["files"] == f"12 {weights}"
        assert each["replay"] == f"{weights} 0.0" and each["said"] == ""
    assert like["late"] == f"{weights} 12"


NEWCOMERS = (
    BEGIN
    + """
from torch.distributed import TCPStore
from detonation.cluster.survive import groups, membership
from limits import LIMIT_S
membership.CONFIRM_S = membership.ARRIVE_S = groups.FORM_S = LIMIT_S  # nobody is lost because this machine is slow
token, equal, last = b"a token for tests only", sys.argv[3], 4  # steps after each that came in
members = 2
import time
port = os.path.join(folder, "port")
if rank == 0:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with open(port + "-new", "w") as file:
        file.write(str(store.port))
    os.rename(port + "-new", port)
else:
    while not os.path.exists(port):
        time.sleep(0.01)
    store = TCPStore("127.0.0.1", int(open(port).read()), wait_for_workers=False)
safety = dt.Safety(verify_every=1, equal=equal)
coming = len(sys.argv[4])  # newcomers, one after another

def came(number):
    return os.path.exists(os.path.join(folder, f"came-{number}"))

if rank < members:
    axis = dt.elastic(replica=rank, replicas=members, store=store, silence_s=LIMIT_S)
    model, optimizer = started(axis, safety=safety)
else:
    while rank > members and not came(rank - 1):
        time.sleep(0.01)
    model = model_of()
    with torch.no_grad():
        [parameter.zero_() for parameter in model.parameters()]
    try:
        optimizer, axis = dt.admitted(model, dt.Guest(store, silence_s=LIMIT_S), token=token, safety=safety)
    except ValueError as error:
        print("refused", error)
        open(os.path.join(folder, f"came-{rank}"), "w").close()
        while not os.path.exists(os.path.join(folder, "over")):
            time.sleep(0.01)
        sys.exit()
door = dt.Admission(model, optimizer, token=token)
sizes, end = [axis.size()], None
while end is None or optimizer.step_count < end:
    advance(model, optimizer, 1)
    door.after_step()
    sizes += [axis.size()] if axis.size() != sizes[-1] else []
    if rank >= members and not came(rank):
        open(os.path.join(folder, f"came-{rank}"), "w").close()
    # all agree when to end: once all have come in or were refused
    ready = torch.tensor([came(members + coming - 1)], dtype=torch.uint8)
    rows = axis.all_gather(ready)()
    if end is None and bool(rows.all()):
        end = optimizer.step_count + last
optimizer.verify()
print("closeness", optimizer.closeness is not None, sizes[-1], *(text[:40] for text in said if "round" in text))
before = [p.detach().clone() for p in model.parameters()]
sent = [axis.all_gather(torch.cat([p.view(-1) for p in before]).view(torch.uint8))()]
rows = sent[0].view(axis.size(), -1).view(torch.float32)
print("apart", apart(rows, [rows[0]] * len(rows)), optimizer.step_count)
if optimizer.closeness:
    optimizer.reconfigure(dt.loco(decay=0.9))
    advance(model, optimizer, 3)
    optimizer.verify()
    print("reconfigured", optimizer.closeness is not None, sum("round" in text for text in said))
if rank == 0:
    open(os.path.join(folder, "over"), "w").close()
axis.close()
"""
)


@some("kinds", [[0, 0, 1], [0, 0, 1, 2, 0]], keep=[[0, 0, 1]])
def test_newcomers_of_other_kinds_join_a_run_with_equal_bits_and_a_close_one(kinds, tmp_path):
    """The first makes it close, with one warning; the second is of another kind again, the third like replica 0."""
    said = run_unlike(NEWCOMERS, kinds, tmp_path, "auto", "123"[: len(kinds) - 2])
    lines = [dict(line.partition(" ")[::2] for line in out.splitlines()) for out, _ in said]
    assert [each["closeness"][:6] for each in lines] == [f"True {len(kinds)}"] * len(kinds), lines
    assert [each["closeness"].count("replicas round differently") for each in lines] == [1] + [
        0
    ] * (len(kinds) - 1)
    assert [each["reconfigured"] for each in lines] == ["True 1"] + ["True 0"] * (len(kinds) - 1)
    far, steps = lines[0]["apart"].split()
    assert 0 < float(far) < 1e-5 and len({each["apart"].split()[1] for each in lines}) == 1, (
        far,
        steps,
    )


@pytest.mark.long
def test_where_bits_must_be_equal_a_newcomer_of_another_kind_is_refused_and_the_others_train_on(
    tmp_path,
):
    said = run_unlike(NEWCOMERS, [0, 0, 1], tmp_path, "bits", "1")
    first, second, newcomer = (
        dict(line.partition(" ")[::2] for line in out.splitlines()) for out, _ in said
    )
    assert newcomer["refused"].startswith("this process would round differently from training")
    assert first == second and first["closeness"] == "False 2" and first["apart"].startswith("0.0 ")


LEVELS = (
    BEGIN
    + """
from torch.distributed.device_mesh import DeviceMesh
dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 4), rank=rank, world_size=4)
mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("site", "rack"))
for outer in (dt.loco(), dt.diloco(every=3)):
    model = model_of()
    base = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    levels = [(mesh["rack"], dt.loco()), (mesh["site"], outer)]
    optimizer = dt.replicate(base, model, levels=levels, safety=dt.Safety(verify_every=2))
    advance(model, optimizer, 9)
    optimizer.synchronize()
    optimizer.verify()
    weights = torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])
    of_all = [torch.empty_like(weights) for _ in range(4)]
    dist.all_gather(of_all, weights)
    print(outer.name, optimizer.closeness is not None, apart(of_all, [of_all[0]] * 4))
dt.leave()
"""
)


@pytest.mark.long
def test_several_levels_of_unlike_processors_train_close(tmp_path):
    """Two kinds inside each site, and three kinds among the sites."""
    for out, _ in run_unlike(LEVELS, [0, 1, 0, 2], tmp_path):
        lines = [line.split() for line in out.splitlines()]
        assert [line[:2] for line in lines] == [["loco", "True"], ["diloco", "True"]]
        assert all(0 < float(apart) < 1e-5 for *_, apart in lines)


COMMAND = """
import os, sys
from detonation.cli.command import run_command
rank, port, recipe, begin, out, *more = sys.argv[1:]
os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
world = "--replicas", "2", "--shards", "1", "--checkpoint-every", "3"
sys.exit(run_command(["train", recipe, "--out", out, "--init-from", begin, *world, *more]))
"""


@pytest.mark.long
def test_a_run_says_how_far_its_replicas_are_apart_and_its_checkpoints_are_good(tmp_path):
    recipe = write_recipe(tmp_path / "tiny.toml")
    begin = Command(
        tmp_path / "begin", "train", recipe, "--out", tmp_path / "begin" / "run", "--steps", 1
    )
    assert begin.wait() == 0, begin.errors
    out = tmp_path / "run"
    fused = "optimizer.fused=true"
    (said, warned), _ = run_unlike(
        COMMAND, [0, 1], free_port(), recipe, tmp_path / "begin" / "run", out, "--set", fused
    )
    summary = json.loads((out / "summary.json").read_text())
    assert not summary["replicas_equal"] and 0 < summary["replicas_apart"] < 1e-5
    assert f"close, {summary['replicas_apart']:.1e} of a norm apart" in said
    assert (said + warned).count("replicas round differently") == 1
    verified = Command(tmp_path / "verified", "verify", out)
    assert verified.wait() == 0, verified.errors
    assert "whole, replicas close in " in verified.stdout and " of a norm apart" in verified.stdout
    like = tmp_path / "like"
    (said, warned), _ = run_unlike(
        COMMAND, [0, 1], free_port(), recipe, tmp_path / "begin" / "run", like
    )
    assert json.loads((like / "summary.json").read_text())["replicas_equal"]
    assert (said + warned).count("is now rounded separately") == 1
