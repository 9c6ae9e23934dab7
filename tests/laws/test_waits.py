"""The host waits for nothing in a step on an accelerator. The device `meta` plays one: nothing can be read from it."""

import threading
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import detonation as dt
from covering import some
from detonation.core import runtime
from detonation.core.codec import selection
from detonation.core.flat.written import WrittenWeights
from detonation.core.integrity.fault_counts import FaultCounts
from detonation.core.link.communicator import Communicator, HostStaging
from detonation.core.link.link import Link
from detonation.core.schemes import buckets
from detonation.wire.collectives import (
    WEIGHT_MOVES,
    BlockIntegers,
    DifferenceGather,
    ErrorFeedbackReduce,
)
from zoo import KINDS, TALKING

STEPS = 4
SCHEMES = TALKING | {
    "demo-sign-owner": dt.demo(chunk=16, precision="sign", error_feedback=False, link="owner"),
}
SOMETIMES = {
    "aten.nanmedian.default",
    "aten.fill_.Tensor",
    "aten.repeat_interleave.Tensor",
    "aten.bincount.default",
}
"""What reads on the host inside torch, on some devices or in some versions."""


class Mirror(Communicator):
    """A wire of which the other end says the same; it answers where it was asked."""

    replica = 0

    def size(self):
        return 2

    def all_reduce(self, values):
        return lambda: values + values

    def all_gather(self, mine):
        return lambda: torch.stack([mine, mine])

    def all_to_all(self, mine):
        return lambda: mine.view(2, -1)


class Devices(TorchDispatchMode):
    """No operation copies between the device and the host, sees tensors of both, or may read inside."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert str(function) not in SOMETIMES
        out = function(*args, **(kwargs or {}))
        met = [
            t.device.type for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)
        ]
        assert len(set(met)) < 2, function
        return out


class NoLists(TorchFunctionMode):
    """No tensor has a list as its index: torch makes a tensor of it on the host, copies that, and waits."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            assert not any(isinstance(part, list | range) for part in index), (
                f"a list is an index: {index}"
            )
        return function(*args, **(kwargs or {}))


@contextmanager
def watched():
    """A step in which nothing is copied between the host and the device, which `torch.tensor` would do."""
    with NoLists(), Devices():
        yield


class Posted:
    """Plays what is on its way to the host: nothing bad happened. Nobody may read it in the step that sent it."""

    step = 0

    def __init__(self, numbers):
        self._shape, self._sent, self._good = (
            numbers.shape,
            Posted.step,
            numbers.dtype == torch.bool,
        )

    def read(self):
        assert self._sent < Posted.step
        rows = [self._good] * self._shape[-1]
        return rows if len(self._shape) == 1 else [rows] * self._shape[0]


@pytest.fixture(autouse=True)
def accelerator(monkeypatch):
    """What `meta` lacks to be one: a way to the host."""
    monkeypatch.setattr(runtime, "Readback", Posted)
    for fault in ("refuse", "misplace"):  # of messages that say nothing
        monkeypatch.setattr(FaultCounts, fault, lambda *_: None)
    norm = torch.linalg.vector_norm
    if (
        norm(torch.empty(2, 1, device="meta"), dim=-1).dim() == 2
    ):  # torch 2.10, on `meta` alone, keeps what has one number

        def reduced(numbers, order=2, dim=None, keepdim=False, **more):
            found = norm(numbers, order, dim, keepdim or dim is not None, **more)
            return found if keepdim or dim is None else found.squeeze(dim)

        monkeypatch.setattr(torch.linalg, "vector_norm", reduced)
    yield
    selection._permutations.cache_clear()
    selection._choices.cache_clear()


def refused(*_, device=None, **__):
    raise AssertionError(f"a copy from the host to {device}")


def model_and_optimizer(levels, base):
    model = nn.Sequential(nn.Linear(257, 310), nn.Linear(310, 64, bias=False), nn.Linear(64, 3)).to(
        "meta"
    )
    model[2].to(torch.bfloat16)
    return model, dt.replicate(base(model.parameters()), model, levels=levels)


def trained(levels, base, monkeypatch):
    """Some steps, of which all but the first may look at nothing on the host."""
    model, optimizer = model_and_optimizer(levels, base)
    optimizer.build()
    for step in range(STEPS):
        Posted.step = step
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        if step:
            monkeypatch.setattr(torch, "tensor", refused)
            with watched():
                optimizer.step()
        else:
            optimizer.step()
    return optimizer


def signs(parameters):
    return dt.SignSGD(parameters, lr=1e-3)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


@some("name", SCHEMES, keep=KINDS)
def test_the_host_waits_for_nothing_in_a_step(name, monkeypatch):
    trained([(Mirror(), SCHEMES[name])], signs, monkeypatch)


@pytest.mark.parametrize(
    "base", [momentum, lambda p: dt.SignSGD(p, lr=1e-3, momentum=0.9)], ids=["sgd", "signsgd"]
)
def test_the_host_waits_for_nothing_under_a_momentum(base, monkeypatch):
    trained([(Mirror(), dt.demo())], base, monkeypatch)


def test_the_host_waits_for_nothing_where_levels_tell_one_another_to_stop(monkeypatch):
    optimizer = trained(
        [(Mirror(), dt.full()), (Mirror(), dt.demo(link="owner"))], signs, monkeypatch
    )
    assert optimizer._consensus._others


@pytest.mark.parametrize("replica, nodes", [(0, 2), (1, 3), (2, 3)])
@pytest.mark.parametrize("codec", [BlockIntegers(4), BlockIntegers(8)], ids=["4bit", "8bit"])
def test_the_host_waits_for_nothing_on_a_shard_wire(codec, replica, nodes, monkeypatch):
    wire = Mirror()
    wire.replica, wire.size = replica, lambda: nodes
    wire.all_gather, wire.all_to_all = (
        lambda mine: lambda: mine.expand(nodes, -1),
        lambda mine: lambda: mine.view(nodes, -1),
    )
    reduce = ErrorFeedbackReduce(Link(wire), None, codec, lambda: {"a": 200, "b": 57})
    gather = DifferenceGather(Link(wire), None, codec, 0, lambda: True, WrittenWeights())
    shard, gradient = torch.empty(257, device="meta"), torch.empty(nodes * 257, device="meta")
    for step in range(3):
        WEIGHT_MOVES()
        if step == 1:
            monkeypatch.setattr(torch, "tensor", refused)
        with watched() if step else nullcontext():
            gather(torch.empty(nodes * 257, device="meta"), shard, None)
            reduce(shard.clone(), gradient, None, dist.ReduceOp.SUM)


class Streams:
    """What `torch.cuda` would be: streams that are in order as they are."""

    def Stream(self, device):
        return self

    def current_stream(self, device):
        return self

    def wait_stream(self, other):
        pass

    def stream(self, other):
        return nullcontext()


@pytest.mark.parametrize("name", ["full", "demo"])
def test_the_host_waits_for_nothing_while_backward_sends(name, monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda device: Streams())
    monkeypatch.setattr(buckets, "SMALLEST", 2**16)
    model, optimizer = model_and_optimizer([(Mirror(), SCHEMES[name])], signs)
    assert len(optimizer.build()[0].channel.pipelines) > 1
    for Posted.step in range(3):
        if Posted.step == 1:
            monkeypatch.setattr(torch, "tensor", refused)
        with watched() if Posted.step else nullcontext():
            loss = model[2](model[:2](torch.empty(5, 257, device="meta")).bfloat16()).mean()
            with optimizer.overlap():
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def test_each_message_leaves_once_its_copy_is_there_and_in_the_order_of_the_calls():
    """A thread waits for the copies: who hands over a message does not."""
    staging = HostStaging()
    begun = []
    copies = [threading.Event() for _ in range(3)]

    def collective(number):
        begun.append(number)
        return SimpleNamespace(wait=lambda: number)

    waits = [
        staging.start(partial(collective, number), SimpleNamespace(synchronize=copy.wait), True)
        for number, copy in enumerate(copies)
    ]
    assert begun == []
    for copy in reversed(copies):
        copy.set()
    assert [wait() for wait in waits] == begun == [0, 1, 2]
