"""Weights that are followed through files: exact for any training, small, and whole or not at all."""

import hashlib
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.fsdp import fully_shard

import detonation as dt
from covering import some
from detonation.checkpoint.files.shard_file import DTYPES
from detonation.core.flat.tensors import digest
from detonation.feed.weights import folders, weight_follower
from detonation.feed.weights.differences import (
    changes,
    decode_difference,
    encode_difference,
    move,
    patterns_of,
    starts,
)
from detonation.feed.weights.folders import LocalFolder, RemoteFolder, WeightFile
from worlds import run

BF16 = torch.bfloat16


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Embedding(50, 16), nn.Linear(16, 33), nn.BatchNorm1d(33), nn.ReLU(), nn.Linear(33, 50)
    )


class Loop:
    """An ordinary training with AdamW, in fp32, whose bf16 weights are published."""

    def __init__(self, target, lr=1e-3, **options):
        self.model = network()
        self.adam = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.feed = dt.Feed.of_weights(self.model, target, dtype=BF16, **options)
        self.steps, self.hashes = 0, {}

    def step(self, count=1, publish=True):
        for _ in range(count):
            ids = torch.randint(0, 50, (16,), generator=torch.Generator().manual_seed(self.steps))
            nn.functional.cross_entropy(self.model(ids), ids.roll(1)).backward()
            self.adam.step()
            self.adam.zero_grad()
            self.steps += 1
            self.publish() if publish else None
        return self

    def publish(self):
        self.hashes[self.steps] = held(self.model, BF16)
        return self.feed.publish(self.steps)


def held(model, dtype=None):
    """The hash of all that a reader has: parameters and persistent buffers."""
    values = (
        each.to(dtype) if dtype and each.is_floating_point() else each
        for each in model.state_dict().values()
    )
    return digest(values)


def reader(folder, **options):
    return dt.follow(network(1).to(BF16), folder, **options)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def files(folder, kind):
    return [folder / each.name for each in WeightFile.known(names(folder)) if each.kind == kind]


def step_of(path):
    return WeightFile.known([path.name])[0].step


def in_another_process(act):
    """The exit status, as of `waitpid`, of a copy of this process that calls `act`."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(act())
        finally:
            os._exit(99)
    return os.waitpid(pid, 0)[1]


# The code of a difference.


@pytest.mark.parametrize("share", [0.0, 0.0005, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("size", [1, 7, 8, 100_003])
def test_a_difference_is_exact_at_any_share_of_changes(share, size):
    generator = torch.Generator().manual_seed(size)
    old = torch.randint(-(2**15), 2**15, (size,), generator=generator).to(torch.int16)
    moved = torch.rand(size, generator=generator) < share
    new = torch.where(
        moved, torch.randint(-(2**15), 2**15, (size,), generator=generator).to(torch.int16), old
    )
    positions, deltas = changes(new, old)
    assert positions.equal((new != old).nonzero().view(-1))
    decoded = decode_difference(encode_difference(positions, deltas), len(positions), size)
    assert all(map(torch.equal, decoded, (positions, deltas)))
    move(old, positions, deltas)
    assert old.equal(new)


@pytest.mark.parametrize("share", [0.004, 0.009, 0.023, 0.2])
def test_a_difference_is_close_to_its_entropy(share):
    numel, generator = 1_000_000, torch.Generator().manual_seed(0)
    positions = (torch.rand(numel, generator=generator) < share).nonzero().view(-1)
    deltas = (torch.randint(0, 2, positions.shape, generator=generator) * 2 - 1).to(torch.int16)
    coded = sum(each.nbytes for each in encode_difference(positions, deltas).values())
    p = torch.tensor([share, 1 - share], dtype=torch.float64)
    entropy = float(-(p * p.log2()).sum() + share) * numel / 8
    assert coded < 1.12 * entropy


@pytest.mark.parametrize(
    "dtype",
    [
        *(
            torch.float32,
            torch.float64,
            BF16,
            torch.int64,
            torch.bool,
            torch.float8_e4m3fn,
            torch.uint8,
        ),
        *(torch.complex64, torch.uint16, torch.uint32, torch.uint64),
    ],
)
@pytest.mark.parametrize("shape", [(), (0,), (3, 5)])
@pytest.mark.parametrize("transposed", [False, True])
def test_every_type_moves_by_its_bits(dtype, shape, transposed):
    def made(seed):
        tensor = (
            (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).abs().to(dtype)
        )
        return tensor.t() if transposed and len(shape) == 2 else tensor

    old, new = made(0), made(1)
    move(old, *changes(patterns_of(new), patterns_of(old)))
    assert digest([old]) == digest([new])


def test_patterns_of_several_tensors_follow_each_other_without_a_gap():
    kinds = torch.int8, BF16, torch.float32, torch.bool, torch.float64, torch.float8_e4m3fn
    tensors = {str(kind): torch.zeros(3, number + 1).to(kind) for number, kind in enumerate(kinds)}
    at = 0
    for name, start in starts(tensors | {"last": torch.zeros(0)}).items():
        assert start == at
        at += len(patterns_of(tensors[name])) if name in tensors else 0


@pytest.mark.parametrize(
    "change",
    [{"count": 3}, {"count": 1}, {"patterns": 700}, {"damage": "gaps.0"}, {"cut": "deltas.0"}],
)
def test_a_difference_that_is_none_is_refused(change):
    coded = encode_difference(torch.tensor([3, 700]), torch.tensor([1, -1], dtype=torch.int16))
    if "damage" in change:
        coded[change["damage"]][2:] = 255
    if "cut" in change:
        coded[change["cut"]] = coded[change["cut"]][:-1]
    with pytest.raises(ValueError, match="difference"):
        decode_difference(coded, change.get("count", 2), change.get("patterns", 1000))


def test_a_plane_that_grows_without_bound_takes_no_memory():
    huge = encode_difference(torch.arange(10_000_000), torch.ones(10_000_000, dtype=torch.int16))
    with pytest.raises(ValueError, match="does not have 10 bytes"):
        decode_difference(huge, 10, 1000)


# Training and readers.


@pytest.mark.long  # no branch of its own
@some("steps", [200, 2000], keep=[200])
def test_each_of_many_followed_steps_is_equal_by_hash(tmp_path, steps):
    loop = Loop(tmp_path, lr=1e-4)
    loop.step()
    follower = reader(tmp_path)
    for _ in range(steps):
        loop.step()
        assert follower.update() == loop.steps
        assert held(follower.model) == loop.hashes[loop.steps]
    assert follower.joins == 1 and not follower.trouble


def test_a_step_that_accumulates_is_one_difference(tmp_path):
    loop = Loop(tmp_path).step()
    follower = reader(tmp_path)
    for _ in range(5):
        loop.step(7, publish=False).publish()
        assert follower.update() == loop.steps
        assert held(follower.model) == loop.hashes[loop.steps]
    assert len(files(tmp_path, "difference")) == 5


@pytest.mark.parametrize("dtype", [None, BF16])
def test_weights_are_followed_in_the_type_that_they_have(tmp_path, dtype):
    model = network().to(dtype)
    sgd, feed = (
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        dt.Feed.of_weights(model, tmp_path),
    )
    follower = dt.follow(network(1).to(dtype), tmp_path, wait=False)
    for step in range(1, 6):
        model(torch.arange(16)).float().square().mean().backward()
        sgd.step()
        feed.publish(step)
        follower.update()
        assert held(follower.model) == held(model)
    assert (
        follower.fingerprint
        == hashlib.sha256(bytes.fromhex(digest(model.parameters()))).hexdigest()
    )


def test_replicated_training_is_followed_too(tmp_path):
    from detonation.cluster.network.loopback import LoopbackCommunicator

    model = nn.Linear(20, 20)
    optimizer = dt.replicate(
        torch.optim.AdamW(model.parameters()), model, LoopbackCommunicator(2), dt.loco()
    )
    feed = dt.Feed.of_weights(model, tmp_path, dtype=BF16)
    for _ in range(3):
        model(torch.ones(4, 20)).square().mean().backward()
        optimizer.step()
        feed.publish(optimizer.step_count)
    follower = dt.follow(nn.Linear(20, 20).to(BF16), tmp_path)
    assert follower.step == 3 and follower.model.weight.equal(model.weight.to(BF16))


def test_tied_weights_are_published_once(tmp_path):
    def tied():
        model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
        model[1].weight = model[0].weight
        return model

    trained = tied()
    feed = dt.Feed.of_weights(trained, tmp_path)
    feed.publish(0)
    trained[0].weight.data += 1
    feed.publish(1)
    served = dt.follow(tied(), tmp_path).model
    assert served[1].weight.equal(trained[0].weight)


def test_a_late_reader_begins_at_the_newest_base_and_old_files_go(tmp_path):
    loop = Loop(tmp_path, base_every=4).step(23)  # bases at 1, 5, 9, 13, 17, 21
    assert [step_of(each) for each in files(tmp_path, "base")] == [17, 21]
    assert [step_of(each) for each in files(tmp_path, "difference")] == [*range(17, 24)]
    follower = reader(tmp_path)
    assert follower.step == 23 and follower.joins == 1
    assert held(follower.model) == loop.hashes[23]


def test_a_base_comes_when_the_differences_have_its_bytes(tmp_path):
    loop = Loop(tmp_path, lr=1e-2)
    base = loop.step().feed.bytes_written
    loop.step(60)
    older, newest = map(step_of, files(tmp_path, "base"))
    between = [each for each in files(tmp_path, "difference") if older < step_of(each) <= newest]
    sizes = [each.stat().st_size for each in between]
    assert sum(sizes) >= base > sum(sizes[:-1])


def test_two_readers_are_at_different_steps(tmp_path):
    loop = Loop(tmp_path).step(9)
    first, second = reader(tmp_path, wait=False), reader(tmp_path, wait=False)
    assert (first.update(to=3), second.update(to=7)) == (3, 7)
    assert [held(each.model) for each in (first, second)] == [loop.hashes[3], loop.hashes[7]]
    assert (first.behind, second.behind) == (6, 2)
    assert first.update() == 9 and held(first.model) == loop.hashes[9]
    with pytest.raises(dt.errors.LostFeed, match="already"):
        first.update(to=5)


def test_the_end_is_told(tmp_path):
    loop = Loop(tmp_path).step(2)
    follower = reader(tmp_path)
    assert not follower.ended
    loop.step().feed.close()
    assert not follower.ended  # the model is not at it
    follower.update()
    assert follower.ended and follower.update(wait_s=1e9) == 3  # nothing is to come
    with pytest.raises(dt.errors.LostFeed, match="ended after 3 steps, before step 4"):
        follower.update(to=4)


@pytest.mark.parametrize("removes", [False, True])
def test_an_end_is_none_once_training_begins_anew(tmp_path, removes, monkeypatch):
    """In the same directory, whether the files of the training before are gone already or not."""
    if not removes:
        monkeypatch.setattr(LocalFolder, "remove", lambda *_: None)
    Loop(tmp_path).step(3).feed.close()
    follower = reader(tmp_path)
    assert follower.ended
    again = Loop(tmp_path).step()
    assert not follower.ended and follower.update() == 1
    assert held(follower.model) == again.hashes[1]
    again.feed.close()
    assert follower.ended


def test_a_reader_waits_for_the_first_base(tmp_path):
    with pytest.raises(dt.errors.LostFeed, match="no weights came"):
        reader(tmp_path / "nothing", timeout_s=0.01)


@pytest.mark.parametrize("again", [False, True])
def test_a_reader_goes_back_with_training(tmp_path, again):
    """Within a process, and when it begins again in the same directory."""
    loop = Loop(tmp_path).step(6)
    follower = reader(tmp_path)
    if again:
        loop = Loop(tmp_path)
    loop.steps = 2
    loop.step(2)
    assert follower.update() == 4 and held(follower.model) == loop.hashes[4]
    loop.step(4)
    assert follower.update() == 8 and held(follower.model) == loop.hashes[8]
    assert follower.joins == 2


# What goes wrong.


def test_two_trainings_that_begin_at_once_in_one_directory_are_never_mixed(tmp_path):
    for seed in range(8):
        models = [network(seed), network(seed + 100)]
        feeds = [dt.Feed.of_weights(model, tmp_path / str(seed)) for model in models]
        real = set()
        for step in range(3):
            for model, feed in zip(models, feeds, strict=True):
                feed.publish(step)
                real.add(held(model))
                model[1].weight.data += torch.randn(33, 16)
        served = network(1)
        follower = dt.follow(served, tmp_path / str(seed))
        assert held(served) in real and (follower.step == 2 or "is missing" in follower.trouble)


@pytest.mark.parametrize("fault", ["lost", "damaged", "cut", "exchanged"])
def test_a_file_that_is_lost_or_damaged_is_never_used(tmp_path, fault):
    loop = Loop(tmp_path, base_every=6).step(2)
    follower = reader(tmp_path)
    loop.step(3)
    bad, other = files(tmp_path, "difference")[1:3]  # of steps 3 and 4
    content = bytearray(bad.read_bytes())
    if fault == "damaged":
        content[len(content) // 2] ^= 1
    if fault in ("damaged", "cut"):
        bad.write_bytes(content[: -1 if fault == "cut" else None])
    if fault == "exchanged":
        bad.write_bytes(other.read_bytes())
    if fault == "lost":
        bad.unlink()
    assert follower.update() == 2 and held(follower.model) == loop.hashes[2]
    assert ("missing" if fault == "lost" else "damaged") in follower.trouble
    loop.step(3)  # a base after step 7
    assert follower.update() == 8 and held(follower.model) == loop.hashes[8]
    assert follower.joins == 2


class WithoutDifferences(LocalFolder):
    """A directory from which differences are removed after a reader has listed them."""

    def read(self, name):
        if name in {path.name for path in files(self._path, "difference")}:
            raise FileNotFoundError(name)
        return super().read(name)


def test_differences_that_go_while_they_are_read_leave_the_base_of_their_step(tmp_path):
    loop = Loop(tmp_path, base_every=6).step(1)
    follower = reader(WithoutDifferences(tmp_path))
    loop.step(6)
    assert step_of(files(tmp_path, "base")[-1]) == step_of(files(tmp_path, "difference")[-1]) == 7
    assert follower.update() == 7 and held(follower.model) == loop.hashes[7]


def test_a_damaged_base_leaves_the_older_one(tmp_path):
    loop = Loop(tmp_path, base_every=3).step(5)  # bases at 1 and 4
    newest = files(tmp_path, "base")[-1]
    newest.write_bytes(newest.read_bytes()[:-1])
    follower = reader(tmp_path)
    assert follower.step == 5 and held(follower.model) == loop.hashes[5]


def test_a_reader_that_dies_in_the_middle_leaves_nothing_behind(tmp_path):
    loop = Loop(tmp_path).step(8)
    before = names(tmp_path)

    def die():
        reader(tmp_path, wait=False).update(to=4)
        os.kill(os.getpid(), signal.SIGKILL)

    assert os.WTERMSIG(in_another_process(die)) == signal.SIGKILL
    assert names(tmp_path) == before
    assert held(reader(tmp_path).model) == loop.hashes[8]


def test_a_reader_that_is_interrupted_within_a_step_takes_a_base(tmp_path, monkeypatch):
    from detonation.feed.weights import weight_follower

    loop = Loop(tmp_path, base_every=4).step(2)
    follower = reader(tmp_path)
    loop.step()
    whole = weight_follower.move

    def interrupted(*args):
        monkeypatch.setattr(weight_follower, "move", whole)
        whole(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(weight_follower, "move", interrupted)
    with pytest.raises(KeyboardInterrupt):
        follower.update()
    assert held(follower.model) not in loop.hashes.values() and follower.step == -1
    assert follower.update() == 3 and held(follower.model) == loop.hashes[3]
    assert follower.joins == 2


class FullDisk(LocalFolder):
    full = False

    def write(self, name, content):
        if self.full:
            (self._path / f"{name}.part").write_bytes(b"a part")
            raise OSError(28, "No space left on device")
        super().write(name, content)


def test_training_goes_on_with_a_full_disk_and_the_next_difference_has_it_all(tmp_path, caplog):
    disk = FullDisk(tmp_path)
    loop = Loop(disk).step(3)
    follower = reader(tmp_path)
    disk.full = True
    loop.step(2)
    assert (
        "a file of step 5 could not be written" in loop.feed.trouble
        and "No space left" in caplog.text
    )
    assert loop.publish() == 0
    assert follower.update() == 3 and held(follower.model) == loop.hashes[3]
    disk.full = False
    loop.step()
    assert not loop.feed.trouble
    assert follower.update() == 6 and held(follower.model) == loop.hashes[6]
    assert follower.joins == 1


def test_a_disk_that_is_full_from_the_beginning_gets_its_base_later(tmp_path):
    disk = FullDisk(tmp_path)
    disk.full = True
    loop = Loop(disk).step(2)
    loop.feed.close()
    disk.full = False
    loop.step()
    assert held(reader(tmp_path).model) == loop.hashes[3]


def test_a_real_limit_of_the_disk_leaves_no_part(tmp_path):
    """`write_whole` under the limit of the kernel for the size of a file."""
    import resource

    def limited():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        return "File too large" not in Loop(tmp_path).step().feed.trouble

    assert in_another_process(limited) == 0 and not names(tmp_path)


def test_what_a_killed_trainer_wrote_in_part_goes_with_the_old_files(tmp_path, monkeypatch):
    for steps in (0, 2):  # killed in its first file, or later
        monkeypatch.undo()
        loop = Loop(tmp_path).step(steps)
        monkeypatch.setattr(os, "fsync", lambda _: os._exit(0))
        assert in_another_process(loop.step) == 0
        assert len(list(tmp_path.glob("*.part"))) == 1
    monkeypatch.undo()
    loop = Loop(tmp_path, base_every=1).step(3)
    assert [step_of(each) for each in files(tmp_path, "base")] == [2, 3] and not list(
        tmp_path.glob("*.part")
    )


@pytest.mark.parametrize(
    "other, fault",
    [
        (network(), "as torch.bfloat16"),
        (nn.Sequential(*network()[:2]).to(BF16), "another model"),
        (nn.Sequential(nn.Embedding(51, 16), *network()[1:]).to(BF16), r"\(50, 16\)"),
    ],
)
def test_another_model_is_refused(tmp_path, other, fault):
    Loop(tmp_path).step()
    before = held(other)
    with pytest.raises(ValueError, match=fault):
        dt.follow(other, tmp_path)
    assert held(other) == before


def test_parameters_of_another_dtype_are_named_with_what_to_call(tmp_path):
    """As of an adapter in fp32, which a list holds without its names; the model holds them, too."""
    held_model = network()
    adapter = nn.ParameterList(held_model.parameters())
    published = nn.ParameterList(network().parameters())
    folder = tmp_path / "adapter"
    dt.Feed.of_weights(published, folder, dtype=BF16).publish(0)
    said = re.escape(
        "training publishes 0 of the model as torch.bfloat16 (50, 16), but 0 of this ParameterList"
        " is torch.float32 (50, 16): call model.to(torch.bfloat16) before dt.follow"
    )
    with pytest.raises(ValueError, match=f"^{said}$"):
        dt.follow(adapter, folder)
    held_model.to(BF16)
    assert dt.follow(adapter, folder).step == 0
    mixed = network().to(BF16)
    mixed[0].float()
    dt.Feed.of_weights(mixed, tmp_path / "mixed").publish(0)
    with pytest.raises(ValueError, match=r"give a model with the published types and shapes$"):
        dt.follow(network().to(BF16), tmp_path / "mixed")


def test_what_cannot_be_is_said(tmp_path):
    with pytest.raises(ValueError, match=r"torch\.int8, must be a floating-point"):
        dt.Feed.of_weights(network(), tmp_path, dtype=torch.int8)
    with pytest.raises(ValueError, match="base_every is 0, must be at least 1"):
        dt.Feed.of_weights(network(), tmp_path, base_every=0)
    for step in (-1, 2.5, "3", None):
        said = re.escape(f"step is {step!r}, must be a whole number of at least 0")
        with pytest.raises(ValueError, match=said):
            dt.Feed.of_weights(network(), tmp_path).publish(step)
    with pytest.raises(ValueError, match="c is of type"):
        complex_one = nn.ParameterDict({"c": torch.zeros(2, dtype=torch.complex128)})
        dt.Feed.of_weights(complex_one, tmp_path).publish(1)
    with pytest.raises(ValueError, match="neither token nor optimizer"):
        dt.follow(network(), tmp_path, token=b"0123456789abcdef")
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        dt.Feed.of_weights(network(), tmp_path / "file" / "below")


# Receivers.


@pytest.mark.parametrize("url", ["memory://weights", "file://{}"])
def test_a_folder_of_fsspec(tmp_path, url):
    url = url.format(tmp_path / "weights")
    loop = Loop(url, base_every=5).step(2)
    follower = reader(RemoteFolder(url))
    for _ in range(12):
        loop.step()
        follower.update()
        assert held(follower.model) == loop.hashes[follower.step]
    assert follower.step == 14 and follower.joins == 1
    loop.step(10)
    assert (
        len([each for each in WeightFile.known(RemoteFolder(url).names()) if each.kind == "base"])
        == 2
    )


def test_an_error_of_a_protocol_stops_no_training(monkeypatch):
    remote = RemoteFolder("memory://refused")
    loop = Loop(remote).step()

    def refuse(*args, **kwargs):
        raise RuntimeError("the account is closed")

    with monkeypatch.context() as patch:
        for method in ("open", "ls", "cat_file"):
            patch.setattr(remote._system, method, refuse)
        assert loop.step().feed.trouble.endswith("RuntimeError: the account is closed")
        follower = reader(remote, wait=False)
        assert follower.update() == -1 and "account is closed" in follower.trouble
    loop.step()
    assert follower.update() == 3 and held(follower.model) == loop.hashes[3]


def test_a_directory_that_does_not_exist_yet_is_said_and_waited_for(tmp_path, monkeypatch, caplog):
    folder = tmp_path / "typo"
    said = f"there is no directory {folder} yet: waiting for a trainer that publishes there"
    follower = reader(folder, wait=False)
    assert follower.trouble == said and not caplog.messages
    monkeypatch.setattr(weight_follower, "ABSENT_LINE_S", 0.0)
    with pytest.raises(dt.errors.LostFeed, match=f"no weights came from .* {re.escape(said)}$"):
        reader(folder, timeout_s=0.25)
    assert caplog.messages == [said]  # one line, though it looked several times
    loop = Loop(folder).step()
    assert follower.update() == 1 and held(follower.model) == loop.hashes[1]
    assert not follower.trouble
    shutil.rmtree(folder)
    assert follower.update() == 1 and follower.trouble.startswith("the folder cannot be read")


@pytest.mark.parametrize(
    "text, remedy",
    [
        ("runs/weights", "give a folder as a Path"),
        ("{}", "give a folder as a Path"),
        ("s3://bucket/run", "as RemoteFolder('s3://bucket/run')"),
    ],
)
def test_a_folder_that_is_given_as_text_is_said(tmp_path, text, remedy):
    folder = tmp_path / "a:7000"
    folder.mkdir()
    with pytest.raises(ValueError, match=f"must be HOST:PORT.*{re.escape(remedy)}"):
        dt.follow(network(), text.format(folder))


def test_a_base_of_another_model_is_said_by_its_names(tmp_path):
    Loop(tmp_path).step()
    other = network(1).to(BF16)
    other.register_buffer("extra", torch.zeros(1))
    with pytest.raises(ValueError, match=r"only one of the two models has extra$"):
        dt.follow(other, tmp_path)
    with pytest.raises(ValueError, match=r"has 0.weight, 1.bias, 1.weight and 9 more$"):
        dt.follow(nn.Linear(1, 1), tmp_path)


def test_nothing_but_whole_files_lies_in_a_folder(tmp_path):
    Loop(tmp_path, base_every=2).step(7)
    assert {path.suffix for path in tmp_path.iterdir()} == {".safetensors"}
    assert folders.folder_at(str(tmp_path)).names()


def test_a_base_is_a_file_of_safetensors(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    loop = Loop(tmp_path).step()
    (base,) = files(tmp_path, "base")
    found = safetensors.load_file(base)
    assert {k: digest([v]) for k, v in found.items()} == {
        k: digest([v.to(BF16) if v.is_floating_point() else v])
        for k, v in loop.model.state_dict().items()
    }


class CheckpointWeightPatch(NamedTuple):
    """The fields of vLLM's."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: torch.Tensor
    indices: torch.Tensor | None


class SparseEngine:
    """Patches parameters as vLLM does: a tensor in the checkpoint's shape, in which NaN is what stays as it was."""

    def __init__(self, model):
        self.parameters, self.elements = (
            dict(model.named_parameters()) | dict(model.named_buffers()),
            0,
        )

    def apply(self, patch):
        own = self.parameters[patch.name].data
        assert (patch.shape, patch.dtype, patch.indices.dtype) == (
            own.shape,
            own.dtype,
            torch.int64,
        )
        assert patch.indices.shape == patch.values.shape
        new = (
            torch.full(patch.shape, torch.nan, dtype=patch.dtype)
            if own.is_floating_point()
            else own
        )
        new.view(-1)[patch.indices] = patch.values
        own.copy_(torch.where(new.isnan(), own, new))
        self.elements += patch.indices.numel()


def test_patches_keep_an_inference_server_at_the_weights(tmp_path):
    loop = Loop(tmp_path, lr=1e-5, base_every=10).step()
    served = network(1).to(BF16)
    engine = SparseEngine(served)
    follower = reader(tmp_path, wait=False)
    counts = []
    for steps in (0, 1, 1, 3, 30):  # the last is beyond the files that are kept: a base
        loop.step(steps)
        before = engine.elements
        for patch in follower.patches():
            engine.apply(CheckpointWeightPatch(**vars(patch)))
        counts.append(engine.elements - before)
        assert held(served) == held(follower.model) == loop.hashes[loop.steps]
    assert follower.joins == 2 and follower.patches() == []
    assert counts[1] < 0.2 * counts[0]


def test_a_server_that_reloads_a_directory_has_the_weights(tmp_path):
    config = transformers.BertConfig(
        vocab_size=16,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
    )
    trained, served = (transformers.BertModel(config).to(BF16) for _ in range(2))
    feed = dt.Feed.of_weights(trained, tmp_path / "feed")
    feed.publish(0)
    dt.follow(served, tmp_path / "feed").update()
    served.save_pretrained(tmp_path / "served")
    reloaded = transformers.AutoModel.from_pretrained(tmp_path / "served", dtype=BF16)
    assert held(reloaded) == held(trained)


def test_patches_of_wide_elements_name_each_once(tmp_path):
    trained, served = nn.Linear(4, 4), nn.Linear(4, 4)
    feed = dt.Feed.of_weights(trained, tmp_path)
    feed.publish(0)
    follower = dt.follow(served, tmp_path)
    for step in (1, 2):
        trained.weight.data[1, 2] *= -1.7
        feed.publish(step)
    (patch,) = follower.patches()
    assert patch.name == "weight" and patch.indices.tolist() == [6]
    assert patch.values.tolist() == [trained.weight[1, 2].item()]


def test_a_difference_says_what_it_follows(tmp_path):
    Loop(tmp_path).step(2)
    headers = []
    for kind in ("base", "difference"):
        content = files(tmp_path, kind)[0].read_bytes()
        headers.append(json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]))
    base, about = (json.loads(header["__metadata__"]["json"]) for header in headers)
    header = headers[1]
    assert (about["after"], about["step"], about["before"]) == (1, 2, base["state"]) and len(
        base["state"]
    ) == 16
    assert set(header) == {
        "__metadata__",
        *(each for each in header if each.startswith(("gaps.", "deltas."))),
    }


def test_publishing_needs_no_folder_on_other_ranks():
    feed = dt.Feed.of_weights(network(), None)
    assert feed.publish(1) == 0 and feed.step == -1
    feed.close()


def test_a_path_is_made(tmp_path):
    feed = dt.Feed.of_weights(network(), str(tmp_path / "a" / "b"))
    assert feed.publish(0) > 0 and len(list(Path(tmp_path, "a", "b").iterdir())) == 1


READER = Path(__file__).parents[2] / "examples" / "read_weights.py"


def test_a_reader_of_torch_alone_has_the_same_weights(tmp_path):
    assert "detonation" not in re.findall(
        r"^(?:import|from) (\w+)", READER.read_text(), re.MULTILINE
    )
    loop = Loop(tmp_path, base_every=6).step(10)
    step, found = runpy.run_path(str(READER))["newest"](tmp_path)
    assert step == 10
    assert digest(found[name] for name in loop.model.state_dict()) == loop.hashes[10]
    done = subprocess.run(
        [sys.executable, READER, tmp_path], capture_output=True, text=True, check=True
    )
    assert (
        done.stdout
        == f"step 10, {sum(map(torch.numel, found.values())):,} values, sha256 {digest(found.values())}\n"
    )
    damaged = files(tmp_path, "base")[-1]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(ValueError, match="damaged"):
        runpy.run_path(str(READER))["newest"](tmp_path)


class OfEveryShape(nn.Module):
    """Buffers of one type: a scalar, an empty one, and one of three elements."""

    def __init__(self, dtype, value):
        super().__init__()
        self.weight = nn.Parameter(torch.full((3, 3), value, dtype=BF16))
        for shape in ((), (0, 2), (3,)):
            self.register_buffer(f"of_{len(shape)}", torch.full(shape, value).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPES.get)
def test_a_reader_of_torch_alone_has_buffers_of_every_type(tmp_path, dtype, monkeypatch, capsys):
    trained = OfEveryShape(dtype, 0.0)
    feed = dt.Feed.of_weights(trained, tmp_path)
    feed.publish(1)
    trained.load_state_dict(OfEveryShape(dtype, 1.0).state_dict())
    feed.publish(2)
    served = dt.follow(OfEveryShape(dtype, 0.0), tmp_path).model.state_dict()
    monkeypatch.setattr(sys, "argv", [str(READER), str(tmp_path)])
    found = runpy.run_path(str(READER), run_name="__main__")["weights"]
    assert found.keys() == served.keys()
    for name, own in served.items():
        assert (found[name].dtype, found[name].shape) == (own.dtype, own.shape)
    assert digest(found[name] for name in served) == held(trained) == digest(served.values())
    assert capsys.readouterr().out == f"step 2, 13 values, sha256 {digest(found.values())}\n"


def sharded_training(mesh, folder):
    """The hash of the whole weights after three steps of a model that FSDP2 shards."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    fully_shard(model, mesh=mesh["shard"])
    adam = torch.optim.AdamW(model.parameters())
    feed = dt.Feed.of_weights(model, None if mesh.get_rank() else folder, dtype=BF16)
    for step in range(3):
        model(torch.ones(2, 6)).square().mean().backward()
        adam.step()
        adam.zero_grad()
        feed.publish(step)
    return digest([each.full_tensor().bfloat16() for each in model.parameters()])


def test_a_sharded_model_is_published_whole(tmp_path):
    expected, _ = run(sharded_training, 1, 2, tmp_path)
    served = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).to(BF16)
    assert dt.follow(served, tmp_path).step == 2 and digest(served.parameters()) == expected
    assert len(files(tmp_path, "difference")) == 2
