"""The axis between replicas: gloo from host memory beside another backend inside the node, and NCCL's own stream."""

import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import detonation as dt
import limits
import worlds
from detonation.cluster import mesh as meshes
from detonation.cluster.mesh import slow_axis_backend
from detonation.cluster.network.measure import probe_axis
from detonation.core import runtime
from detonation.core.flat.tensors import digest
from detonation.core.link import communicator
from detonation.core.link.communicator import HostStaging, ProcessGroupCommunicator
from zoo import DEVICE, KINDS, SCHEMES, Plain, batch, built

NAMES = ["full", "demo", "demo-owner", "diloco"]


def synchronize():
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


class Copies:
    """Plays an accelerator on the CPU: every message is copied to the host and back. Counts the copies."""

    def __init__(self, monkeypatch):
        self.sent, self.arrived = [], []
        to_host, to_device = HostStaging.to_host, HostStaging.to_device

        def out(staging, message):
            before = message.clone()
            host, copied = to_host(staging, message)
            self.sent.append(host.data_ptr() != message.data_ptr() or not len(host))
            assert torch.equal(host.cpu(), before.cpu())
            return host, copied

        def back(staging, host, like):
            message = to_device(staging, host, like)
            self.arrived.append(message.data_ptr() != host.data_ptr() or not message.numel())
            synchronize()
            host.fill_(7)  # the next exchange may do so
            return message

        monkeypatch.setattr(HostStaging, "has_devices", staticmethod(lambda: True))
        monkeypatch.setattr(HostStaging, "needed", lambda *_: True)
        monkeypatch.setattr(HostStaging, "to_host", out)
        monkeypatch.setattr(HostStaging, "to_device", back)


def trained(mesh, scheme):
    model = dt.shard(built(Plain), mesh)
    optimizer = dt.replicate(
        torch.optim.SGD(model.parameters(), lr=0.1), model, mesh["replicate"], scheme
    )
    for step in range(4):
        with optimizer.overlap():
            model(batch(mesh.get_rank(), step, 32)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    return digest(model.parameters()), optimizer.stats.bytes_sent


def staged(mesh, names):
    """Each scheme over the axis as it is, and over gloo with every message copied to the host and back."""
    slow = dt.init_mesh(*mesh.shape, device=DEVICE.type, slow_backend="gloo")
    assert slow.get_group("replicate") is not dist.group.WORLD
    assert dist.get_backend(slow.get_group("replicate")) == "gloo"
    plain = {name: trained(mesh, SCHEMES[name]) for name in names}
    with pytest.MonkeyPatch.context() as monkeypatch:
        copies = Copies(monkeypatch)
        through = {name: trained(slow, SCHEMES[name]) for name in names}
        assert copies.sent and all(copies.sent) and copies.arrived and all(copies.arrived)
        found = probe_axis(slow["replicate"], torch.device("cpu"), budget_s=0.02)
    return plain == through, {*found.operations}, dt.fingerprint(built(Plain), slow)[1]


@pytest.mark.long_cases("1")
@pytest.mark.parametrize("shards", [1, 2])
def test_messages_through_host_memory_train_the_same_bits(shards):
    names = NAMES if shards == 1 else NAMES[1:2]
    for same, operations, equal in worlds.run_alone(staged, 2, shards, names):
        assert same and equal and operations == {"all-reduce", "all-gather", "all-to-all"}
    assert {*names} <= {*KINDS, "diloco"}


class Event:
    """An event of an accelerator that is over when the test says so."""

    def __init__(self):
        self._over, self.waited_by = threading.Event(), set()

    def end(self):
        self._over.set()

    def synchronize(self):
        self.waited_by.add(threading.get_ident())
        assert self._over.wait(limits.LIMIT_S)


def sent_while_the_device_works(mesh):
    """Three messages are handed over before any is there; the last one arrives on the host first."""
    events, started = [], []

    def recorded(device):
        events.append(Event())
        return events[-1]

    def noted(name, collective):
        def start(*tensors, **options):
            started.append(name)
            return collective(*tensors, **options)

        return start

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(HostStaging, "has_devices", staticmethod(lambda: True))
        monkeypatch.setattr(HostStaging, "needed", lambda *_: True)
        monkeypatch.setattr(communicator, "recorded", recorded)
        monkeypatch.setattr(communicator, "_all_gather", noted("gather", communicator._all_gather))
        for name in ("all_reduce", "all_to_all_single"):
            monkeypatch.setattr(dist, name, noted(name, getattr(dist, name)))
        axis = ProcessGroupCommunicator(mesh["replicate"], own=True)
        mine = torch.full((4,), axis.replica + 1, dtype=torch.uint8)
        waits = [axis.all_reduce(mine.float()), axis.all_gather(mine), axis.all_to_all(mine)]
        assert started == [] and len(events) == 3
        for event in reversed(events):
            event.end()
        arrived = [wait().tolist() for wait in waits]
        assert all(
            event.waited_by and threading.get_ident() not in event.waited_by for event in events
        )
        shared = ProcessGroupCommunicator(
            mesh["replicate"]
        )  # whose group others use, in the order of their calls
        monkeypatch.setattr(communicator, "recorded", lambda _: None)
        assert shared.all_gather(mine)().tolist() == arrived[1] and len(started) == 4
    return arrived, started


def test_a_message_on_its_way_to_the_host_keeps_nobody_waiting_and_none_overtakes():
    for replica, (arrived, started) in enumerate(
        worlds.run_alone(sent_while_the_device_works, 2, 1)
    ):
        assert arrived == [[3.0] * 4, [[1] * 4, [2] * 4], [[1] * 2, [2] * 2]], replica
        assert started == ["all_reduce", "gather", "all_to_all_single", "gather"]


def test_an_event_is_recorded_behind_the_copy_and_nothing_waits(monkeypatch):
    calls = []
    module = SimpleNamespace(
        Event=lambda: SimpleNamespace(
            record=lambda stream: calls.append(stream)
        ),  # it lacks `synchronize`
        current_stream=lambda device: f"the current one of {device}",
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert runtime.recorded(torch.device("cpu")) is None
    assert runtime.recorded(torch.device("cuda", 1)) and calls == ["the current one of cuda:1"]


def test_only_gloo_can_be_chosen(capsys):
    with pytest.raises(ValueError, match="slow_backend is 'mpi', must be 'gloo', or None"):
        dt.init_mesh(1, 1, "cpu", slow_backend="mpi")
    assert not dist.is_initialized()
    command = pytest.importorskip(
        "detonation.cli.command", exc_type=ImportError
    )  # `make gpu` has no command line
    assert command.run_command(["train", "quick-lm", "--set", "mesh.slow_backend=nccl"]) == 2
    assert """mesh.slow_backend is 'nccl', but must be "gloo" or \"\"""" in capsys.readouterr().err


class Options:
    """Plays those of NCCL, which this build of torch may lack."""

    def __init__(self, is_high_priority_stream=False):
        self.is_high_priority_stream, self._timeout = is_high_priority_stream, None


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ("cuda:nccl", "nccl"),
        ("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl"),
        ("cpu:gloo,cuda:gloo", None),
        ("cpu:gloo", None),
    ],
)
def test_nccl_gets_a_communicator_of_its_own_with_priority_where_it_carries_the_device(
    monkeypatch, config, name
):
    standin = SimpleNamespace(
        get_backend_config=lambda: config,
        get_backend=lambda: dist.Backend("gloo"),
        ProcessGroupNCCL=SimpleNamespace(Options=Options),
    )
    monkeypatch.setattr(meshes, "dist", standin)
    assert slow_axis_backend("replicate", "cpu", None) is None
    assert slow_axis_backend("replicate", "cuda", "gloo") == {"replicate": "gloo"}
    found = slow_axis_backend("replicate", "cuda", None)
    if name is None:
        assert found is None
        return
    backend, options = found["replicate"]
    assert (
        backend == name
        and options.is_high_priority_stream
        and options._timeout.total_seconds() == 1800
    )
