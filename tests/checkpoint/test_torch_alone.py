"""Checkpoints need torch alone: a reader of our own reads what safetensors writes, and refuses what it refuses."""

import json
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from detonation.checkpoint.files import shard_file
from detonation.checkpoint.files.shard_file import (
    DTYPES,
    CorruptCheckpoint,
    TensorFile,
    write_shard,
)

OTHERS = (
    *(
        "safetensors",
        "numpy",
        "transformers",
        "huggingface_hub",
        "tokenizers",
        "datasets",
        "tyro",
        "rich",
        "tomli_w",
    ),
    *("matplotlib", "PIL", "tensorboard", "yaml", "pandas", "scipy", "psutil"),
)
"""What an environment with torch alone has not."""

ALONE = """
import sys

def hiding(finder):
    class Hiding:
        def find_spec(name, path=None, target=None):
            return None if name.partition(".")[0] in sys.argv[2:] else finder.find_spec(name, path, target)
        if hasattr(finder, "find_distributions"):  # by which torch finds gloo from 2.14 on
            find_distributions = finder.find_distributions
    return Hiding

sys.meta_path[:] = map(hiding, sys.meta_path)
import warnings
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
import torch, torch.distributed as dist
import detonation as dt
from detonation.checkpoint.verify import verify

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = dt.init_mesh(replicas=1, shards=1, device="cpu")
for name in (dt.demo(), dt.diloco(every=2)):
    model = dt.shard(torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 1)), mesh)
    optimizer = dt.replicate(torch.optim.AdamW(model.parameters()), model, mesh["replicate"], name)
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    path = dt.save_checkpoint(f"{sys.argv[1]}/{name.name}", model, optimizer)
    before = dt.fingerprint(model, mesh)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    assert dt.load_checkpoint(path.parent, model, optimizer).step == 3
    assert dt.fingerprint(model, mesh) == before and verify(path).good
dt.leave()
print("done", "numpy" in sys.modules, "safetensors" in sys.modules)
"""


def test_training_saving_loading_and_verifying_need_torch_alone(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-c", ALONE, tmp_path, *OTHERS],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout.endswith("done False False\n"), (
        ran.stderr
    )  # before it gloo of torch 2.10 says who is connected


def test_every_type_and_shape_is_read_as_safetensors_reads_it(tmp_path):
    shapes = ((), (0,), (5,), (3, 4), (2, 0, 3), (2, 3, 4))
    tensors = {
        f"{name} {shape}": torch.arange(1, 1 + torch.Size(shape).numel()).view(shape).to(dtype)
        for dtype, name in DTYPES.items()
        for shape in shapes
    }
    save_file(tensors, tmp_path / "theirs", {"json": "{}"})
    write_shard(tmp_path / "ours", tensors, {})
    for name in ("ours", "theirs"):
        file, expected = TensorFile(tmp_path / name), load_file(tmp_path / name)
        assert file.metadata == {"json": "{}"} and file.entries.keys() == expected.keys()
        for key, tensor in expected.items():
            assert equal(file.read(key), tensor), key
            if tensor.ndim:
                assert equal(file.read(key, slice(1, 3)), tensor[1:3]), key


def equal(first, second):
    bits = [tensor.reshape(-1).view(torch.uint8) for tensor in (first, second)]
    return (first.shape, first.dtype) == (second.shape, second.dtype) and torch.equal(*bits)


def file_of(path, header, data=b"\0" * 8):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(**changes):
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


LIES = {
    "no JSON": b"{",
    "a list": [],
    "a tensor of text": {"a": "x"},
    "an entry too many": {"a": entry(run="rm")},
    "an unknown type": {"a": entry(dtype="F128")},
    "a type that is a list": {"a": entry(dtype=[])},
    "a shape of text": {"a": entry(shape="22")},
    "a negative size": {"a": entry(shape=[-1, -2])},
    "a size that is true": {"a": entry(shape=[True, 2])},
    "another number of bytes": {"a": entry(shape=[3])},
    "beyond the end": {"a": entry(shape=[4], data_offsets=[0, 16])},
    "before the beginning": {"a": entry(data_offsets=[-8, 0])},
    "backwards": {"a": entry(data_offsets=[8, 0])},
    "three offsets": {"a": entry(data_offsets=[0, 4, 8])},
    "a gap": {"a": entry(shape=[1], data_offsets=[4, 8])},
    "an overlap": {"a": entry(), "b": entry()},
    "a tail": {"a": entry(shape=[1], data_offsets=[0, 4])},
    "a size that no machine has": {
        "a": entry(),
        "b": entry(shape=[0, 2**62, 2**62], data_offsets=[8, 8]),
    },
    "a size beyond all": {"a": entry(shape=[0, 2**61], data_offsets=[0, 0]), "b": entry()},
    "more dimensions than there are": {"a": entry(shape=[1] * 64 + [2])},
    "metadata of numbers": {"a": entry(), "__metadata__": {"json": 3}},
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused(tmp_path, lie):
    with pytest.raises(ValueError) as refused:
        TensorFile(file_of(tmp_path / "file", LIES[lie]))
    assert len(str(refused.value)) < 200


def test_the_product_of_a_hostile_shape_is_never_formed(tmp_path, monkeypatch):
    """Which takes half a minute for a header of 1 MB."""
    monkeypatch.setattr(shard_file.math, "prod", lambda sizes: pytest.fail("a product"))
    path = file_of(tmp_path / "file", {"a": entry(shape=[2**60] * 100_000)})
    with pytest.raises(CorruptCheckpoint, match="no valid type, shape or offsets"):
        TensorFile(path)


def test_lengths_that_lie_links_and_files_that_shrink_are_refused(tmp_path):
    for length in (0, 1, 17, 2**63):
        (tmp_path / "file").write_bytes(length.to_bytes(8, "little") + b"{}" + b" " * 14)
        with pytest.raises(CorruptCheckpoint, match="length of its header"):
            TensorFile(tmp_path / "file")
    good = file_of(tmp_path / "good", {"a": entry()})
    (tmp_path / "link").symlink_to(good)
    with pytest.raises(OSError):
        TensorFile(tmp_path / "link")
    file = TensorFile(good)
    good.write_bytes(good.read_bytes()[:-4])
    with pytest.raises(OSError, match="shorter"):
        file.read("a")


@given(content=st.binary(max_size=200))
def test_any_bytes_are_a_file_or_refused(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("any") / "file"
    for text in (content, len(content).to_bytes(8, "little") + content):
        path.write_bytes(text)
        with pytest.raises((ValueError, RecursionError)):
            TensorFile(path)
