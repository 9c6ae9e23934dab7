"""Verification finds every damage, and a checkpoint from a stranger is refused in one line and runs nothing."""

import json
import os
import random
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_exact import BASES, advance, start
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import detonation as dt
import worlds
from detonation.checkpoint.files import manifest
from detonation.checkpoint.files.reader import CheckpointReader, ShardReader
from detonation.checkpoint.files.shard_file import CorruptCheckpoint, shard_fault, write_shard
from detonation.checkpoint.verify import _Comparison, checkpoints, load_weights, verify
from detonation.cli.command import run_command as main
from zoo import SCHEMES, Plain, built

pytestmark = pytest.mark.usefixtures("lasting_worlds")


def saved(mesh, folder, name):
    """Saves, loads and verifies; returns the number of pickles that were read meanwhile."""
    pickles = []
    sys.addaudithook(
        lambda event, arguments: pickles.append(arguments) if event.startswith("pickle.") else None
    )
    model, optimizer = start(mesh, SCHEMES[name], BASES["AdamW"])
    advance(model, optimizer, range(2))
    path = dt.save_checkpoint(folder, model, optimizer)
    advance(model, optimizer, range(2, 3))
    dt.load_checkpoint(folder, model, optimizer)
    report = verify(path)
    assert report.good, report.line()
    assert path.name == f"step-{report.step:06d}"
    return len(pickles)


@pytest.fixture(scope="module", params=["demo", "diloco"])
def whole(request, tmp_path_factory):
    """A whole checkpoint of 2 replicas x 2 shards, after two steps."""
    folder = tmp_path_factory.mktemp("saved")
    assert worlds.run(saved, 2, 2, folder, request.param) == [0] * 4, "no pickle is read"
    return folder / "step-000002"


@pytest.fixture
def copy(whole, tmp_path):
    """A copy of the checkpoint to change."""
    (tmp_path / whole.name).mkdir()
    for path in whole.iterdir():
        (tmp_path / whole.name / path.name).write_bytes(path.read_bytes())
    return tmp_path / whole.name


def test_a_file_is_what_safetensors_reads(whole):
    tensors = load_file(whole / "replica1-shard0.safetensors")
    assert {
        "model.layers.0.weight",
        "optimizer.layers.0.weight.exp_avg",
        "generator.cpu",
    } <= tensors.keys()


LEVELS = {
    "replicas equal in 8 tensors a shard": (dt.full(), dt.diloco(every=3)),
    "not compared, because replicas of these levels agree within a tier of the network only": (
        dt.schemes.local_sgd(every=2),
        dt.diloco(every=6),
    ),
    "replicas train alone": (dt.none(), dt.none()),
}


def reports_on_levels(mesh, folder):
    racks = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("site", "rack"))
    found = {}
    for words, (inner, outer) in LEVELS.items():
        model = built(Plain)
        base = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = dt.replicate(
            base, model, levels=[(racks["rack"], inner), (racks["site"], outer)]
        )
        advance(model, optimizer, range(4))
        found[words] = verify(dt.save_checkpoint(folder / inner.name, model, optimizer)).line()
    return found


def test_of_several_levels_the_report_names_the_comparison(tmp_path):
    for found in worlds.run(reports_on_levels, 4, 1, tmp_path):
        for words, line in found.items():
            assert line.endswith(f"step-000004: whole, {words}")


def test_every_corruption_is_found(copy):
    rng = random.Random(0)
    for _ in range(150):
        path = rng.choice(sorted(copy.iterdir()))
        content = path.read_bytes()
        damaged = bytearray(content)
        at = rng.randrange(len(content))
        how = rng.choice(["flip", "cut", "grow", "zeros", "remove"])
        if how == "flip":
            damaged[at] ^= 1 << rng.randrange(8)
        elif how == "cut":
            del damaged[at:]
        elif how == "grow":
            damaged.insert(at, 0)
        else:
            damaged[at : at + 9] = bytes(byte ^ 255 for byte in damaged[at : at + 9])
        path.unlink() if how == "remove" else path.write_bytes(damaged)
        report = verify(copy)
        assert report.faults and "\n" not in report.line(), (path.name, how, at)
        path.write_bytes(content)
    assert verify(copy).good


def test_replicas_that_differ_are_named(copy):
    described = manifest.read_manifest(copy)
    name = manifest.file_name(1, 0)
    tensors = load_file(copy / name)
    key = "model.layers.0.weight" if described.alike else "replica.0.anchor.layers.0.weight"
    tensors[key][0, 0] += 1
    rest = {"json": json.dumps(rest_of(copy / name))}
    save_file(tensors, copy / name, rest)
    sign(copy, described, name)
    report = verify(copy)
    assert report.differences == [f"{key} on replica 1, shard 0 (compared with replica 0)"]


@pytest.mark.parametrize(
    ("replicas", "here", "is_compared"),
    [(3, [0, 2], True), (3, [1], False), (1, [0], True), (3, [0, 1, 2], True)],
)
def test_as_many_replicas_as_are_here_are_compared(tmp_path, replicas, here, is_compared):
    """Of several at least two; one alone is equal to itself."""
    worlds.run(saved, replicas, 1, tmp_path, "demo")
    path = tmp_path / "step-000002"
    found = _Comparison(CheckpointReader(path, manifest.read_manifest(path)))
    found.compare_shards([manifest.file_name(replica, 0) for replica in here])
    assert bool(found.compared) is is_compared and not found.differences


def test_a_key_that_no_version_writes_breaks_nothing(copy):
    described = manifest.read_manifest(copy)
    for name in described.files:
        rest = {"json": json.dumps(rest_of(copy / name))}
        save_file(load_file(copy / name) | {"replica.0": torch.zeros(1)}, copy / name, rest)
    sign(copy, described, *described.files)
    assert verify(copy).good


@pytest.mark.parametrize(
    "key, dtype", [("optimizer.x", torch.float32), ("optimizer.x.y", torch.float8_e4m3fn)]
)
def test_of_close_replicas_any_key_and_any_type_is_compared(tmp_path, key, dtype):
    (checkpoint := tmp_path / "step-000001").mkdir()
    files = {}
    for replica in range(2):
        name, tensors = (
            manifest.file_name(replica, 0),
            {key: torch.full((4,), 1.0 + replica).to(dtype)},
        )
        files[name] = write_shard(checkpoint / name, tensors, REST | {"values": {"moved.x": 1.0}})
    described = manifest.Manifest(1, 2, 1, 0, "SGD", True, [{"scheme": "full"}], files, {}, {})
    (checkpoint / manifest.MANIFEST_NAME).write_text(described.dumps())
    assert verify(checkpoint).differences == [
        f"{key} on replica 1, shard 0 (compared with replica 0)"
    ]


def rest_of(path):
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return json.loads(header["__metadata__"]["json"])


def sign(checkpoint, described, *names):
    """Makes the manifest fit files that were changed, as a stranger can."""
    import hashlib

    for name in names:
        content = (checkpoint / name).read_bytes()
        described.files[name] = manifest.ShardSummary(
            len(content), hashlib.sha256(content).hexdigest()
        )
    (checkpoint / manifest.MANIFEST_NAME).write_text(described.dumps())


STRANGE = {
    "no keys": lambda t: t.clear(),
    "no files": lambda t: t.pop("files"),
    "another key": lambda t: t.update(run="rm -rf"),
    "another format": lambda t: t.update(format=1),
    "a format of text": lambda t: t.update(format="2"),
    "a step of text": lambda t: t.update(step="2"),
    "a step that is true": lambda t: t.update(step=True),
    "a step below 0": lambda t: t.update(step=-1),
    "a huge step": lambda t: t.update(step=10**30),
    "no replicas": lambda t: t.update(replicas=0),
    "a million replicas": lambda t: t.update(replicas=10**6),
    "as many as files": lambda t: t.update(replicas=4, shards=1),
    "files of a list": lambda t: t.update(files=list(t["files"])),
    "an absolute name": lambda t: rename(t, "/etc/passwd"),
    "a name with ..": lambda t: rename(t, "../replica0-shard0.safetensors"),
    "a name in a folder": lambda t: rename(t, "a/replica0-shard0.safetensors"),
    "another rank's name": lambda t: rename(t, "replica7-shard0.safetensors"),
    "a file of text": lambda t: t["files"].update(dict.fromkeys(t["files"], "here")),
    "a file without sum": lambda t: next(iter(t["files"].values())).pop("sha256"),
    "a file of -1 bytes": lambda t: next(iter(t["files"].values())).update(bytes=-1),
    "a file of 1e30 bytes": lambda t: next(iter(t["files"].values())).update(bytes=10**30),
    "a sum of 3 letters": lambda t: next(iter(t["files"].values())).update(sha256="abc"),
    "levels of text": lambda t: t.update(levels=["demo"]),
    "extra of text": lambda t: t.update(extra="x"),
    "volumes of text": lambda t: t.update(volumes="0011"),
    "a volume for one file of four": lambda t: t.update(volumes=[0]),
    "a volume below 0": lambda t: t.update(volumes=[0, 0, 0, -1]),
    "a volume that is true": lambda t: t.update(volumes=[0, 0, 0, True]),
}


def rename(table, name):
    first, *rest = table["files"].items()
    table["files"] = dict([(name, first[1]), *rest])


@pytest.mark.parametrize("strange", STRANGE)
def test_a_strange_manifest_is_refused_in_one_line(copy, strange, capsys):
    table = json.loads((copy / manifest.MANIFEST_NAME).read_text())
    del table["sha256"]
    STRANGE[strange](table)
    (copy / manifest.MANIFEST_NAME).write_text(manifest._signed(table))
    with pytest.raises(CorruptCheckpoint) as refused:
        manifest.read_manifest(copy)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 200
    assert main(["verify", str(copy.parent)]) == 1
    assert "not whole: " in capsys.readouterr().out


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@pytest.mark.long  # no branch of its own
@given(st.data())
def test_any_manifest_is_read_or_refused(data):
    table = {
        "format": 2,
        "step": 1,
        "replicas": 1,
        "shards": 1,
        "seed": 0,
        "optimizer": "SGD",
        "alike": True,
        "levels": [],
        "extra": {},
    }
    table |= {"files": {manifest.file_name(0, 0): {"bytes": 1, "sha256": "0" * 64}}, "versions": {}}
    assert manifest.parse_manifest(manifest._signed(table).encode()).step == 1
    for key in data.draw(st.lists(st.sampled_from(sorted(table)), min_size=1, max_size=3)):
        table[key] = data.draw(JSON)
    try:
        manifest.parse_manifest(manifest._signed(table).encode())
    except CorruptCheckpoint as refused:
        assert "\n" not in str(refused)


@given(st.binary(max_size=60))
def test_bytes_that_are_no_manifest_are_refused(content):
    with pytest.raises(CorruptCheckpoint):
        manifest.parse_manifest(content)


def test_deep_and_large_manifests_are_refused():
    for content in (
        b"[" * 100_000,
        b"1" * 10_000,
        b'{"format": 2, "step": NaN}',
        b" " * (2**26 + 1),
    ):
        with pytest.raises(CorruptCheckpoint):
            manifest.parse_manifest(content)


HEADERS = {
    "no header": lambda h: b"",
    "a header longer than the file": lambda h: (1 << 60).to_bytes(8, "little") + b"{}",
    "sizes beyond the file": lambda h: header(
        h | {"x": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}
    ),
    "a shape that lies": lambda h: header(
        h | {"x": {"dtype": "F32", "shape": [9], "data_offsets": [0, 4]}}
    ),
    "no boxes": lambda h: header({"__metadata__": {"json": '{"values": {}}'}}),
    "boxes of text": lambda h: header(
        {"__metadata__": {"json": json.dumps(REST | {"boxes": {"x": "y"}})}}
    ),
    "a box of -1": lambda h: header(
        {"__metadata__": {"json": json.dumps(REST | {"boxes": {"x": [[1], [-1], [1]]}})}}
    ),
    "json that is none": lambda h: header({"__metadata__": {"json": "{"}}),
    "deep json": lambda h: header({"__metadata__": {"json": "[" * 100_000}}),
}
REST = {"boxes": {}, "wrapped": [], "on_host": [], "values": {}, "groups": []}


def header(table):
    text = json.dumps(table).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize("lie", HEADERS)
def test_a_file_that_lies_about_itself_is_refused(copy, lie):
    name = manifest.file_name(1, 1)
    (copy / name).write_bytes(HEADERS[lie]({"__metadata__": {"json": json.dumps(REST)}}))
    with pytest.raises(CorruptCheckpoint):
        ShardReader(copy / name)
    sign(copy, manifest.read_manifest(copy), name)
    assert not verify(copy).good


def test_who_takes_an_older_checkpoint_names_it(copy, tmp_path, capsys):
    newer = tmp_path / "step-000003"
    newer.mkdir()
    os.mkfifo(newer / "manifest.json")
    why = "step-000003 rejected: manifest.json cannot be read (it is no ordinary file)"
    said = load_weights(tmp_path, built(Plain))
    assert said == f"weights of {copy}; {why}; using step-000002"
    assert main(["export", str(tmp_path), "--out", str(tmp_path / "model")]) == 0
    assert f"warning: {why}; using step-000002\n" in capsys.readouterr().out


def test_only_ordinary_files_are_opened(copy, tmp_path):
    name = manifest.file_name(0, 0)
    expected = manifest.read_manifest(copy).files[name]
    (tmp_path / "outside").write_bytes((copy / name).read_bytes())
    (copy / name).unlink()
    (copy / name).symlink_to(tmp_path / "outside")
    assert "cannot be read" in shard_fault(copy / name, expected)
    (copy / name).unlink()
    os.mkfifo(copy / name)
    assert "is no ordinary file" in shard_fault(copy / name, expected)
    (copy / manifest.MANIFEST_NAME).unlink()
    (copy / manifest.MANIFEST_NAME).symlink_to("/dev/zero")
    with pytest.raises(CorruptCheckpoint, match=r"it is a link, which is not followed"):
        manifest.read_manifest(copy)


@pytest.mark.parametrize("parts", [1, 2])
def test_weights_are_loaded_from_a_snapshot_in_the_cache_of_hugging_face(tmp_path, parts):
    """Which consists of links."""
    blobs, snapshot, trained, model = (
        tmp_path / "blobs",
        tmp_path / "snapshots" / "5f3e",
        nn.Linear(4, 3),
        nn.Linear(4, 3),
    )
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    tensors = dict(trained.state_dict())
    names = (
        [f"model-{part}.safetensors" for part in tensors] if parts == 2 else ["model.safetensors"]
    )
    for name, content in zip(
        names, [{key: tensors[key]} for key in tensors] if parts == 2 else [tensors], strict=True
    ):
        save_file(content, blobs / name[::-1])
        (snapshot / name).symlink_to(f"../../blobs/{name[::-1]}")
    if parts == 2:
        index = json.dumps({"weight_map": dict(zip(tensors, names, strict=True))})
        (snapshot / "model.safetensors.index.json").write_text(index)
    load_weights(snapshot, model)
    assert torch.equal(model.weight, trained.weight) and torch.equal(model.bias, trained.bias)
    (blobs / names[0][::-1]).unlink()
    (blobs / names[0][::-1]).symlink_to(snapshot / names[0])
    with pytest.raises(ValueError, match="holds no"):
        load_weights(snapshot, model)


def test_the_verb(whole, copy, capsys):
    assert main(["verify", str(whole.parent)]) == 0
    assert "step-000002: whole, replicas equal in " in capsys.readouterr().out
    (copy / "replica0-shard1.safetensors").write_bytes(b"")
    assert main(["verify", str(copy), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (
        not found["good"]
        and "replica0-shard1.safetensors has 0 bytes" in found["checkpoints"][0]["faults"][0]
    )
    assert main(["verify", str(Path(copy).parent / "nowhere")]) == 2
    assert "there is no directory" in capsys.readouterr().err
    assert checkpoints(copy.parent) == [copy]


LIES = {
    "an option of text": lambda rest: rest["groups"][0]["options"].update(lr="1"),
    "an option of another length": lambda rest: rest["groups"][0]["options"].update(betas=[0.9]),
    "options of a list": lambda rest: rest["groups"][0].update(options=[]),
    "a group of text": lambda rest: rest.update(groups=["x"]),
    "no groups": lambda rest: rest.update(groups=[]),
    "state of text": lambda rest: rest["values"].update({"optimizer.layers.0.weight.step": "x"}),
}


def loaded(mesh, path):
    """The error on each rank for a checkpoint whose files lie under right checksums."""
    model, optimizer = start(mesh, SCHEMES["demo"], BASES["AdamW"])
    errors = {}
    for lie, change in LIES.items():
        if mesh.get_rank() == 0:
            folder = path.parent / lie / path.name
            folder.mkdir(parents=True)
            described = manifest.read_manifest(path)
            for name in described.files:
                rest = rest_of(path / name)
                change(rest)
                save_file(load_file(path / name), folder / name, {"json": json.dumps(rest)})
            sign(folder, described, *described.files)
        try:
            dt.load_checkpoint(path.parent / lie, model, optimizer)
            errors[lie] = "nothing"
        except ValueError as error:
            errors[lie] = str(error)
    return errors


@pytest.mark.parametrize("whole", ["demo"], indirect=True)
@pytest.mark.parametrize("shards", [1, 2], ids=["elastic", "same"])
def test_lies_that_would_break_the_optimizer_later_are_refused_by_all_ranks(copy, shards):
    first, *others = worlds.run(loaded, 2, shards, copy)
    assert all(errors == first for errors in others)
    for lie, error in first.items():
        assert error != "nothing" and "\n" not in error and len(error) < 700, (lie, error)
