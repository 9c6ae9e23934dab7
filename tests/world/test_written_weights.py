"""Weights that no step trains, in worlds of ranks: frozen, or written, also of a shard wire."""

import gc
import logging
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel

import detonation as dt
import worlds
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.wire.collectives import WEIGHT_MOVES
from worlds import caught
from zoo import SCHEMES, Plain, batch, built

pytestmark = pytest.mark.usefixtures("lasting_worlds")

CHECKED = dt.Safety(verify_every=1)
KINDS = ["full", "demo", "diloco", "sparta"]


def equal(tensor):
    both = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(both, tensor.detach())
    return all(torch.equal(both[0], each) for each in both)


def frozen_after_backward(mesh, name, late):
    """A layer is frozen between a backward pass and the first step, or the one after a load."""
    model, replica = built(Plain), mesh["replicate"].get_local_rank()
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = dt.replicate(base, model, mesh["replicate"], SCHEMES[name], safety=CHECKED)
    if late:
        model(batch(replica, 9, 32)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.synchronize()
        optimizer.load_state_dict(
            base.state_dict()
        )  # as another framework does: levels are made anew
    else:
        optimizer.set_up()
        optimizer.forget_levels()
    before = model.layers[0].weight.detach().clone()
    model(batch(replica, 0, 32)).mean().backward()
    model.layers[0].requires_grad_(False)
    for step in range(3):
        model(batch(replica, step, 32)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.equal(before, model.layers[0].weight) and equal(model.layers[0].weight)


@pytest.mark.parametrize("late", [False, True], ids=["first step", "after a load"])
@pytest.mark.parametrize("name", KINDS)
def test_law_10_what_is_frozen_between_backward_and_the_first_step_stays(name, late):
    assert worlds.run(frozen_after_backward, 2, 1, name, late) == [True, True]


def frozen_differs(mesh, name, own, on_desync):
    """One replica writes a frozen weight after the first step."""
    model, replica = built(Plain), mesh["replicate"].get_local_rank()
    model.layers[0].requires_grad_(False)
    parameters = model.parameters() if own else model.layers[1].parameters()
    optimizer = dt.replicate(
        torch.optim.SGD(parameters, lr=0.1),
        model,
        mesh["replicate"],
        SCHEMES[name],
        safety=dt.Safety(verify_every=100, on_desync=on_desync),
    )
    model(batch(replica, 0, 32)).mean().backward()
    optimizer.step()
    optimizer.verify()
    with torch.no_grad():
        model.layers[0].weight[0, 0] += replica
    end = caught(optimizer.verify) if on_desync == "stop" else optimizer.verify()
    return end, equal(model.layers[0].weight)


@pytest.mark.parametrize("own", [True, False], ids=["in the optimizer", "in no optimizer"])
@pytest.mark.parametrize("name", ["demo", "diloco"])
def test_law_15_frozen_weights_that_one_replica_wrote_are_found(name, own):
    for (kind, text), same in worlds.run(frozen_differs, 2, 1, name, own, "stop"):
        assert kind == "Desync" and "layers.0.weight" in text and not same


def test_frozen_weights_that_one_replica_wrote_are_repaired():
    assert worlds.run(frozen_differs, 2, 1, "demo", True, "repair") == [(None, True)] * 2


def test_a_trained_parameter_that_was_replaced_is_an_error():
    model = built(Plain)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = dt.replicate(base, model, LoopbackCommunicator(2), dt.demo())
    optimizer.set_up()
    optimizer.verify()
    model.layers[0].weight = nn.Parameter(model.layers[0].weight.detach().clone())
    with pytest.raises(ValueError, match="1 parameters of the optimizer are not in the model"):
        optimizer.verify()


def wire_of_untrained(mesh, how):
    """How far the weights that each forward pass used are from the teacher's; or the error."""
    torch.manual_seed(0)
    student, teacher = nn.Linear(16, 16, bias=False), nn.Sequential(nn.Linear(16, 16, bias=False))
    teacher.requires_grad_(False)
    both, wire = nn.ModuleList([student, teacher]), dt.shard_wire("8bit", "8bit", nodes=2)
    dt.shard(student, mesh, wire=wire)
    dt.shard(teacher, mesh, wire=wire)
    base = torch.optim.SGD(student.parameters(), lr=0.1)
    optimizer = dt.replicate(base, both, mesh["replicate"], dt.none())
    apart = []
    for step in range(3):
        with torch.no_grad():
            used = teacher(torch.eye(16))
        teacher.reshard()
        apart.append((used.t() - teacher[0].weight.full_tensor()).abs().max().item())
        student(batch(dist.get_rank(), step, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            if how == "load":  # of a module inside a unit
                teacher[0].load_state_dict({"weight": student.weight.detach().clone()})
            else:
                teacher[0].weight.lerp_(student.weight, 0.5)
        if how == "resync":
            dt.resync_weights(teacher)
        elif how == "synchronize":
            optimizer.synchronize()
        elif how == "nothing":
            return caught(teacher, torch.eye(16))
    return apart


@pytest.mark.parametrize("how", ["load", "resync", "synchronize"])
def test_law_15_a_shard_wire_uses_what_was_written_to_a_unit_that_nobody_trains(how):
    assert worlds.run(wire_of_untrained, 1, 2, how) == [[0.0] * 3] * 2


def test_law_15_a_shard_wire_names_a_weight_that_was_written_on_this_rank_alone():
    for kind, text in worlds.run(wire_of_untrained, 1, 2, "nothing"):
        assert kind == "RuntimeError" and "0.weight" in text and "resync_weights" in text


def wire_of_assigned(mesh):
    """A write on this rank alone to a frozen weight that `load_state_dict(assign=True)` has replaced."""
    teacher = nn.Sequential(nn.Linear(16, 16, bias=False)).requires_grad_(False)
    dt.shard(teacher, mesh, wire=dt.shard_wire("8bit", "8bit", nodes=2))
    teacher(torch.eye(16))
    teacher.reshard()
    state = {"0.weight": teacher[0].weight.detach() * 0.5}
    teacher.load_state_dict(state, assign=True)
    used = teacher(torch.eye(16))
    teacher.reshard()
    same = torch.equal(used.t(), teacher[0].weight.full_tensor())
    teacher[0].weight.mul_(0.5)
    return same, caught(teacher, torch.eye(16))


def test_law_15_a_shard_wire_names_a_write_to_a_weight_that_was_assigned():
    for same, (kind, text) in worlds.run(wire_of_assigned, 1, 2):
        assert same and kind == "RuntimeError" and "0.weight" in text


def written_after_steps(mesh, bits, scheme, how):
    """How far the weights of a forward pass are from those that were written, and what was logged.

    An average takes the weights' place after a step, as for an evaluation.
    """
    logged = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("detonation").addHandler(handler)
    WEIGHT_MOVES.warned = False
    model = nn.Sequential(nn.Linear(16, 64, bias=False))
    dt.shard(model, mesh, wire=dt.shard_wire(bits, bits, nodes=2))
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = dt.replicate(base, model, mesh["replicate"], dt.scheme(scheme, {}))
    average = AveragedModel(nn.Sequential(nn.Linear(16, 64, bias=False)))
    dt.shard(average.module, mesh)
    for step in range(4):
        model(batch(dist.get_rank(), step, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    weight = model[0].weight
    with torch.no_grad():
        if how != "nothing":
            weight.copy_(average.module[0].weight)
        if how == "resync":
            dt.resync_weights(model)
        used = model(torch.eye(16))
    model.reshard()
    logging.getLogger("detonation").removeHandler(handler)
    return (used.t() - weight.full_tensor()).abs().max().item(), logged


@pytest.mark.parametrize("scheme", ["none", "diloco", "sparta"])
def test_law_15_a_shard_wire_names_what_was_written_after_a_step_and_sends_it_exactly_if_asked_to(
    scheme,
):
    """Without a write it says nothing, whatever the scheme itself writes after the base optimizer."""
    run = partial(worlds.run, written_after_steps, 1, 2)
    for apart, logged in run("4bit", scheme, "write"):
        assert apart > 0
        (text,) = logged
        assert "0.weight" in text and "after an optimizer step" in text and "resync" in text
    assert run("4bit", scheme, "resync") == [(0.0, [])] * 2
    assert run("fp32", scheme, "write") == [(0.0, [])] * 2
    assert [logged for _, logged in run("4bit", scheme, "nothing")] == [[], []]


def buffer_after(mesh, own):
    model = nn.Linear(4, 4)
    model.register_buffer("peak", torch.tensor(own[mesh["replicate"].get_local_rank()]))
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = dt.replicate(base, model, mesh["replicate"], dt.full())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.synchronize()
    return repr(model.peak.tolist())


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("own", "mean"),
    [
        ([[1.0, 5.0, -INF], [2.0, 5.0, -INF]], [1.5, 5.0, -INF]),
        ([[1.0, NAN, 3.0], [2.0, 5.0, INF]], [1.5, 5.0, 3.0]),
        ([[1.0, INF, NAN], [2.0, -INF, NAN]], [1.5, NAN, NAN]),
    ],
)
def test_each_number_of_a_buffer_becomes_the_mean_where_it_is_finite(own, mean):
    assert worlds.run(buffer_after, 2, 1, own) == [repr(mean)] * 2


def descriptors(mesh, folder):
    model = nn.Linear(4, 4)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = dt.replicate(base, model, mesh["replicate"], dt.full())
    optimizer.set_up()
    found = []
    for _ in range(3):
        with dt.Checkpoints(folder, model, optimizer, keep=1) as checkpoints:
            checkpoints.save()
        del checkpoints
        gc.collect()
        opened = [*Path("/proc/self/fd").iterdir()]
        found.append((len(opened), len(dist.distributed_c10d._world.pg_map)))
    return found


def test_checkpoints_leave_no_descriptor_and_no_process_group(tmp_path):
    for found in worlds.run(descriptors, 2, 1, tmp_path):
        (first, groups), _, (last, groups_left) = found
        assert groups == groups_left
        assert last <= first  # a thread of gloo may close the last one later
