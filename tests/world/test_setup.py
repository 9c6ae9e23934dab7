"""Set-ups that train wrongly without a word: each gets one line that names the remedy."""

import logging
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import detonation as dt
import worlds
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.cluster.network.simulated import simulate_replicas
from detonation.core.flat.tensors import digest
from worlds import caught
from zoo import Plain, batch, built

pytestmark = pytest.mark.usefixtures("lasting_worlds")


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def advance(mesh, model, optimizer, steps=2):
    for step in range(steps):
        model(batch(mesh.get_rank(), step, 32)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def attempted(mesh, model, axis="replicate", **options):
    """The error of the first steps of `model`, and what the log says."""
    with logged() as lines:
        optimizer = dt.replicate(sgd(model), model, mesh[axis], dt.demo(), **options)
        return *caught(advance, mesh, model, optimizer), lines


class logged(logging.Handler):
    """Collects the warnings of the library."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())

    def __enter__(self):
        logging.getLogger("detonation").addHandler(self)
        return self.lines

    def __exit__(self, *_):
        logging.getLogger("detonation").removeHandler(self)


def summed(module, mesh):
    return fully_shard(module, mesh=mesh).set_force_sum_reduction_for_comms(True) or module


def spanning(mesh):
    world = init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
    node = mesh["shard"].get_group()
    right = dt.shard(built(Plain), mesh)
    parallel = parallelize_module(
        built(Plain), mesh["shard"], {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}
    )
    return {
        "hsdp": attempted(mesh, summed(built(Plain), mesh)),
        "fsdp over the world": attempted(mesh, summed(built(Plain), world)),
        "wrong axis": attempted(mesh, dt.shard(built(Plain), mesh), "shard"),
        "ddp over the world": attempted(mesh, DistributedDataParallel(built(Plain))),
        "fsdp1": attempted(
            mesh, FullyShardedDataParallel(built(Plain), node, device_id=torch.device("cpu"))
        ),
        "right": attempted(mesh, right),
        "tensor parallel": attempted(mesh, parallel),
        "tensor parallel, intra_node": attempted(mesh, parallel, intra_node=mesh["shard"]),
        "ddp": attempted(mesh, DistributedDataParallel(built(Plain), process_group=node)),
        "ddp, intra_node": attempted(
            mesh,
            DistributedDataParallel(built(Plain), process_group=node),
            intra_node=mesh["shard"],
        ),
        "plain": attempted(mesh, built(Plain)),
    }


def test_parameters_that_span_the_replicas_are_refused_and_others_are_not():
    ranks = worlds.run(spanning, 2, 2)
    expected = {
        "hsdp": "so replicas share it (by hybrid sharding (HSDP)): shard inside the replica",
        "fsdp over the world": "layers.0.weight is on ranks 0, 1, 2, 3, so replicas share it",
        "wrong axis": "(or the axis is the wrong one): shard inside the replica",
        "ddp over the world": "averages gradients over ranks 0, 1, 2, 3, which belong to several replicas",
        "tensor parallel": "layers.1.bias is held whole by the ranks",
        "fsdp1": "FullyShardedDataParallel (FSDP1) hides its shards: use FSDP2",
    }
    for found in ranks:
        for how, text in expected.items():
            assert found[how][0] == "ValueError" and text in found[how][1], (how, found[how])
            assert "\n" not in found[how][1]
        for how in found.keys() - expected:
            assert found[how][:2] == ("nothing", ""), (how, found[how])
    said = [{how for how in found if found[how][2]} for found in ranks]
    assert said == [{"ddp"}, set(), set(), set()], "one rank warns for all"
    assert 'pass intra_node=mesh["shard"]' in ranks[0]["ddp"][2][0]


def alone(mesh):
    """On 2 x 1 the wrong axis has one rank, and each rank would train by itself."""
    plain, sharded = (
        attempted(mesh, built(Plain), "shard"),
        attempted(mesh, dt.shard(built(Plain), mesh), "shard"),
    )
    return plain, sharded, attempted(mesh, dt.shard(built(Plain), mesh))


def test_an_axis_of_one_rank_in_a_larger_world_is_warned_of():
    first, second = worlds.run(alone, 2, 1)
    for *error, lines in first[:2]:
        assert error == ["nothing", ""]
        assert (
            len(lines) == 1
            and "the 2 ranks of the world train apart, in groups of one rank" in lines[0]
        )
    assert [lines for *_, lines in (first[2], *second)] == [[]] * 4
    assert [lines for *_, lines in worlds.run(alone, 1, 2)[0][2:]] == [
        []
    ]  # one replica over all ranks is as it says


def too_early(mesh):
    model = built(Plain)
    base = sgd(model)
    dt.shard(model, mesh)
    optimizer = dt.replicate(base, model, mesh["replicate"], dt.demo())
    other = built(Plain)
    early = dt.replicate(sgd(other), other, mesh["replicate"], dt.demo())
    dt.shard(other, mesh)
    bare = caught(dt.shard, built(Plain), mesh["shard"])
    return caught(advance, mesh, model, optimizer), caught(advance, mesh, other, early), bare


def test_what_was_made_before_sharding_is_told_so():
    text = (
        "4 parameters of the optimizer are not in the model, such as one of shape (64, 32): the model is sharded, "
        "but these parameters are not: make the optimizer after detonation.shard"
    )
    for *early, bare in worlds.run(too_early, 2, 2):
        for kind, said in early:
            assert kind == "ValueError" and text in said
        assert bare[0] == "ValueError" and "pass the whole mesh" in bare[1]


def wrong_arguments(mesh):
    model = built(Plain)
    base, axis = sgd(model), mesh["replicate"]
    return [
        caught(dt.replicate, base, model, axis, dt.demo),
        caught(dt.replicate, base, model, axis, "dmo"),
        caught(dt.replicate, base, model, axis, 3),
        caught(dt.replicate, base, model, axis.get_group(), dt.demo()),
        caught(dt.replicate, base, model, "replicate", dt.demo()),
        caught(dt.replicate, base, model, 2, dt.demo()),
        caught(dt.replicate, torch.optim.AdamW, model, axis, dt.demo()),
        caught(dt.replicate, model, base, axis, dt.demo()),
        caught(lambda: dt.demo(top_k=4)),
        caught(lambda: dt.replicate(base, model, levels=[])),
    ]


def test_an_argument_of_another_kind_gets_the_remedy():
    expected = [
        ("TypeError", "the scheme is the function demo: call it, demo()"),
        ("ValueError", "unknown scheme 'dmo', did you mean 'demo'?"),
        ("TypeError", "the scheme is 3, must be a scheme such as detonation.demo(), or its name"),
        (
            "TypeError",
            'the axis is a process group: pass mesh["replicate"], or DeviceMesh.from_group(group, "cuda")',
        ),
        (
            "TypeError",
            "the axis is the name 'replicate': pass the axis itself, mesh[\"replicate\"]",
        ),
        ("TypeError", "the axis is a int, must be an axis of a device mesh"),
        (
            "TypeError",
            "the optimizer is the class AdamW: make an optimizer, AdamW(model.parameters())",
        ),
        (
            "TypeError",
            "an optimizer and then its model, got Plain and SGD: replicate(optimizer, model, ...)",
        ),
        ("TypeError", "unknown argument of scheme demo 'top_k', did you mean 'topk'?"),
        (
            "ValueError",
            "levels is empty: pass an axis and a scheme, levels=[(axis, scheme), ...]",
        ),
    ]
    for outcome, (kind, text) in zip(worlds.run(wrong_arguments, 2, 1)[0], expected, strict=True):
        assert outcome[0] == kind and text in outcome[1], outcome


def test_a_scheme_goes_by_its_name():
    model = built(Plain)
    optimizer = dt.replicate(sgd(model), model, LoopbackCommunicator(), "demo")
    assert [scheme for _, scheme in optimizer.levels] == [dt.demo()]


def other_options(mesh, when):
    """The lr of replica 1 is another, from the start or after the first step."""
    model = dt.shard(built(Plain), mesh)
    safety = dt.Safety(verify_every=4)
    optimizer = dt.replicate(
        sgd(model), model, mesh["replicate"], dt.diloco(every=50), safety=safety
    )
    if when:
        advance(mesh, model, optimizer)
    optimizer.param_groups[0]["lr"] *= 1 + mesh.get_local_rank("replicate")
    with logged() as lines:
        return *caught(advance, mesh, model, optimizer, 3), optimizer.step_count, lines


def test_options_of_the_groups_are_compared_at_the_first_step():
    for kind, text, steps, _ in worlds.run(other_options, 2, 2, False):
        assert (kind, steps) == ("Mismatch", 0)
        assert "replica 1 has lr of group 0=0.2, replica 0 has lr of group 0=0.1" in text


def test_and_at_each_comparison():
    for kind, text, steps, lines in worlds.run(other_options, 2, 2, True):
        assert (kind, text) == (
            "Desync",
            "replica 1 differs from the other replicas in lr of group 0 after step 4",
        )
        assert steps == 4 and "replica 1 differs from replica 0 in lr of group 0" in lines[0]


def own_plateau(mesh, make_scheme, overlap):
    """Each replica's scheduler looks at its own loss: after two steps replica 1 halves its lr."""
    model = dt.shard(built(Plain), mesh)
    optimizer = dt.replicate(
        sgd(model), model, mesh["replicate"], make_scheme(), safety=dt.Safety(verify_every=8)
    )
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)

    def steps():
        for step in range(8):
            with optimizer.overlap() if overlap else nullcontext():
                model(batch(mesh.get_rank(), step, 32)).mean().backward()
            optimizer.step()
            plateau.step(float(step < 2) if mesh.get_local_rank("replicate") else -float(step))

    with logged() as lines:
        return *caught(steps), optimizer.step_count, lines


@pytest.mark.parametrize(
    ("make_scheme", "overlap", "steps"),
    [
        (dt.demo, False, 2),
        (dt.loco, False, 2),
        (partial(dt.demo, link="owner"), False, 2),
        (partial(dt.diloco, every=2, precision="int8"), False, 3),
        (dt.demo, True, 2),
    ],
)
def test_options_that_drift_apart_are_found_in_the_next_message(make_scheme, overlap, steps):
    """Not at the next comparison, which comes after 8 steps here; and before weights move, if gradients are sent."""
    for shards in (1, 2):
        found = worlds.run(own_plateau, 2, shards, make_scheme, overlap)
        for kind, text, taken, _ in found:
            wanted = f"replica 1 differs from the other replicas in options of the parameter groups after step {steps}"
            assert (kind, text, taken) == ("Desync", wanted, steps)
        for lr, (*_, lines) in zip((0.1, 0.05), found[::shards], strict=True):
            here = f"(lr, betas, ...) than the other replicas at step {steps}; this replica has lr={lr} "
            assert lines[0].startswith(
                "replica 1 has other options of the parameter groups " + here
            )
            assert "set the same options on all replicas" in lines[0]


def test_where_the_network_adds_them_up_they_are_found_at_the_next_comparison():
    for kind, text, taken, _ in worlds.run(own_plateau, 2, 1, dt.full, False):
        assert (kind, taken) == ("Desync", 8) and "in lr of group 0 after step 8" in text


def test_drift_is_looked_for_by_default():
    assert dt.Safety().verify_every == 100

    def act(communicator):
        model = nn.Linear(4, 4)
        with torch.no_grad():
            model.weight.zero_(), model.bias.zero_()
        optimizer = dt.replicate(sgd(model), model, communicator, dt.full())
        for step in range(101):
            model(torch.ones(1, 4)).sum().backward()
            if (communicator.replica, step) == (1, 40):
                model.weight.data[0, 0] += 1e-3
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(
        dt.errors.Desync, match="replica 1 differs from the other replicas in weight after step 100"
    ):
        simulate_replicas(act, 2)


def test_the_optimizer_inside_is_not_stepped_alone():
    """But torch's helpers may make its state, and it is free once its replication is over."""
    model = built(Plain)
    base = torch.optim.AdamW(model.parameters())
    optimizer = dt.replicate(base, model, LoopbackCommunicator(), dt.demo())
    again = dt.replicate(base, model, LoopbackCommunicator(), dt.demo())
    get_optimizer_state_dict(model, base)
    for one in (optimizer, again):
        model(batch(0, 0, 32)).mean().backward()
        one.step()
        one.synchronize()
    with pytest.raises(
        RuntimeError,
        match=r"step\(\) of the inner AdamW was called.*call step\(\) of the optimizer that",
    ):
        base.step()
    del optimizer, again, one
    base.step()


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 8)
        self.register_buffer("own", torch.zeros(3), persistent=False)
        self.register_buffer("small", torch.ones(3, dtype=torch.int64))

    def forward(self, x):
        return self.last(self.norm(self.first(x))).square().mean(1)


def buffers(mesh):
    replica = mesh.get_local_rank("replicate")
    model = dt.shard(built(Normed), mesh)
    optimizer = dt.replicate(
        sgd(model), model, mesh["replicate"], dt.demo(), safety=dt.Safety(verify_every=3)
    )
    with logged() as lines:
        advance(mesh, model, optimizer)
        model.own += replica
        found = [model.norm.running_mean.clone(), dt.fingerprint(model, mesh)]
        optimizer.synchronize()
        found += [model.norm.running_mean.clone(), dt.fingerprint(model, mesh)]
        advance(mesh, model, optimizer, 1)
        found += [dt.fingerprint(model, mesh)[1], model.own.tolist()]
        sent = optimizer.stats.bytes_sent
        optimizer.verify()
        return found, optimizer.stats.bytes_sent - sent, lines


def statistics_of_nan(mesh):
    """The running mean after one replica met a batch that is not finite."""
    model = built(Normed)
    optimizer = dt.replicate(
        sgd(model), model, mesh["replicate"], dt.full(), safety=dt.Safety(non_finite="skip")
    )
    advance(mesh, model, optimizer)
    if mesh.get_rank() == 2:
        model.norm.running_mean.fill_(torch.nan)
    mine = model.norm.running_mean.clone()
    optimizer.synchronize()
    return mine, model.norm.running_mean


def test_statistics_that_are_not_finite_become_those_of_the_other_replicas():
    (one, found), (other, same), (poisoned, mended) = worlds.run(statistics_of_nan, 3, 1)
    assert poisoned.isnan().all() and torch.equal(found, same) and torch.equal(found, mended)
    torch.testing.assert_close(found, (one + other) / 2)


def scales_of_float8(mesh):
    """A float8 buffer after replicas with different values synchronized it."""
    model = nn.Linear(32, 8)
    values = torch.full((3,), 1.0 + mesh.get_rank())
    model.register_buffer("scale", values.to(torch.float8_e4m3fn))
    optimizer = dt.replicate(sgd(model), model, mesh["replicate"], dt.full())
    advance(mesh, model, optimizer, 1)
    optimizer.synchronize()
    return model.scale.float().tolist()


def test_buffers_of_float8_become_their_mean():
    assert worlds.run(scales_of_float8, 2, 1) == [[1.5] * 3] * 2


def test_running_statistics_become_their_mean():
    ranks = worlds.run(buffers, 2, 1)
    (first, sent, lines), (second, _, none) = ranks
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[2], (first[0] + second[0]) / 2) and torch.equal(first[2], second[2])
    for (_, before, _, after, verified, own), replica in ((first, 0), (second, 1)):
        assert before[0] == after[0] and (before[1], after[1], verified) == (False, True, True)
        assert own == [replica] * 3  # a buffer that is not saved is private
    assert sent == 0 and none == []
    assert (
        len(lines) == 1
        and "buffers differ between replicas" in lines[0]
        and "norm.running_mean" in lines[0]
    )


def foreign(mesh, scheme, how):
    """Another framework keeps the state of the optimizer, and its own keys alone."""
    model = dt.shard(built(Plain), mesh)
    optimizer = dt.replicate(
        torch.optim.AdamW(model.parameters()), model, mesh["replicate"], scheme
    )
    advance(mesh, model, optimizer)
    saved, own = get_optimizer_state_dict(model, optimizer), dt.replica_state(optimizer)
    whole = optimizer.state_dict()
    again = dt.shard(built(Plain), mesh)
    again.load_state_dict(model.state_dict())
    other = dt.replicate(torch.optim.AdamW(again.parameters()), again, mesh["replicate"], scheme)
    with logged() as lines:
        if how == "whole":
            other.load_state_dict(whole)
        else:
            set_optimizer_state_dict(again, other, saved)
        if how == "repaired":
            dt.load_replica_state(other, own)
        advance(mesh, again, other)
    return lines


@pytest.mark.parametrize("scheme", [dt.demo(), dt.diloco(every=2)], ids=lambda s: s.name)
def test_a_loaded_state_without_that_of_the_replica_is_warned_of(scheme):
    def first(how):
        return worlds.run(foreign, 2, 1, scheme, how)

    (line,), nothing = first("lost")
    assert (
        f'no part "replication": the unsent values of the replicas of {scheme.name} are lost'
        in line
    )
    assert "load_checkpoint" in line and "load_replica_state" in line
    assert [nothing, *first("repaired"), *first("whole")] == [[]] * 5
    assert worlds.run(foreign, 2, 1, dt.full(), "lost") == [[], []]


@pytest.mark.parametrize(
    ("base", "scheme", "own"),
    [
        (torch.optim.AdamW, dt.demo(), "AdamW (betas[0] is 0.9)"),
        (
            partial(torch.optim.SGD, momentum=0.5),
            dt.schemes.random(rate=1 / 2),
            "SGD (momentum is 0.5)",
        ),
        (partial(dt.Muon, momentum=0.5), dt.demo(), "Muon (momentum is 0.5)"),
        (partial(dt.Muon, momentum=0), dt.demo(), None),
        (partial(torch.optim.AdamW, betas=(0.0, 0.95)), dt.demo(), None),
        (dt.SignSGD, dt.demo(), None),
        (torch.optim.SGD, dt.demo(), None),
        (torch.optim.AdamW, dt.loco(), None),
        (torch.optim.AdamW, dt.full(), None),
        (torch.optim.AdamW, dt.diloco(), None),
    ],
)
def test_a_momentum_on_top_of_the_one_that_a_scheme_remembers_is_warned_of_once(base, scheme, own):
    lines = warned_of(base, scheme)
    assert len(lines) == (own is not None)
    assert all(
        line.startswith(f"{scheme.name} keeps its own momentum") and own in line for line in lines
    )


def cycled(mesh, base, scheme, at, momentum):
    """The lines of four steps with a scheduler that is made before step `at`."""
    model = dt.shard(built(Plain), mesh)
    safety = dt.Safety(verify_every=2)
    optimizer = dt.replicate(
        base(model.parameters()), model, mesh["replicate"], scheme, safety=safety
    )
    with logged() as lines:
        for step in range(4):
            if step == at:
                schedule = torch.optim.lr_scheduler.OneCycleLR(
                    optimizer, 0.01, 9, cycle_momentum=momentum
                )
            advance(mesh, model, optimizer, 1)
            if step >= at:
                schedule.step()
    return lines


without_momentum = partial(torch.optim.AdamW, betas=(0.0, 0.95))


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize(
    ("base", "scheme", "own"),
    [
        (without_momentum, dt.demo(), "AdamW (betas[0] is 0.9"),
        (dt.SignSGD, dt.schemes.random(rate=1 / 2), "SignSGD (momentum is 0.9"),
        (without_momentum, dt.loco(), None),
    ],
)
def test_a_scheduler_that_sets_a_momentum_is_warned_of_once(base, scheme, own, at):
    lines, nothing = worlds.run(cycled, 2, 1, base, scheme, at, True)
    assert nothing == [] and len(lines) == (own is not None)
    assert all(
        own in line and "pass cycle_momentum=False to OneCycleLR or CyclicLR" in line
        for line in lines
    )
    assert worlds.run(cycled, 2, 1, base, scheme, at, False) == [[], []]


@pytest.mark.parametrize(
    ("scheme", "kept"),
    [
        (dt.demo(precision="sign"), True),
        (dt.demo(precision="sign", error_feedback=False), False),
        (dt.demo(precision="2bit"), False),
        (dt.schemes.random(precision="sign"), False),
        (dt.random_sign(error_feedback=True), False),
        (dt.loco(precision="sign"), False),
    ],
)
def test_errors_of_selected_signs_that_stay_are_warned_of_once(scheme, kept):
    lines = warned_of(dt.SignSGD, scheme)
    assert len(lines) == kept and all("pass error_feedback=False" in line for line in lines)


def warned_of(base, scheme):
    """The lines that two replicas log when they are set up."""

    def act(communicator):
        model = nn.Linear(4, 2)
        dt.replicate(base(model.parameters(), lr=0.1), model, communicator, scheme)

    with logged() as lines:
        simulate_replicas(act, 2)
    return lines


@pytest.mark.parametrize("dtype", [torch.float16, torch.complex64])
def test_a_type_that_cannot_hold_an_update_is_refused(dtype):
    model = nn.ParameterDict({"weight": torch.ones(8, 8, dtype=dtype)})
    optimizer = dt.replicate(sgd(model), model, LoopbackCommunicator(2), dt.full())
    model["weight"].grad = torch.ones_like(model["weight"])
    with pytest.raises(ValueError, match=f"weight is {dtype}.* must be fp32, bf16 or fp64"):
        optimizer.step()


def test_fp64_buffers_lose_no_digits():
    def act(communicator):
        model = nn.Linear(4, 1)
        torch.nn.init.ones_(model.weight)
        torch.nn.init.ones_(model.bias)
        model.register_buffer(
            "seen", torch.tensor([123456789.0 + 2 * communicator.replica], dtype=torch.float64)
        )
        optimizer = dt.replicate(sgd(model), model, communicator, dt.full())
        optimizer.step()
        optimizer.synchronize()
        return model.seen.tolist()

    assert simulate_replicas(act, 2) == [[123456790.0]] * 2


@pytest.mark.parametrize("bad", [False, True])
def test_fp64_parameters_are_looked_through_as_others_are(bad):
    def act(communicator):
        model = nn.Linear(8, 8).double()
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        optimizer = dt.replicate(
            sgd(model), model, communicator, dt.loco(), safety=dt.Safety(non_finite="skip")
        )
        model(torch.ones(1, 8).double()).sum().backward()
        if bad and communicator.replica:
            model.weight.grad[0, 0] = torch.nan
        optimizer.step()
        return optimizer.stats.skipped, bool(model.weight.isfinite().all())

    assert simulate_replicas(act, 2) == [(int(bad), True)] * 2


@pytest.mark.parametrize(
    "scheme",
    [dt.demo(), dt.diloco(every=2), dt.schemes.streaming_diloco(2, 2, 1), dt.schemes.sparta()],
)
def test_a_state_without_that_of_the_replica_leaves_the_loaded_weights_alone(scheme):
    """An anchor would put the weights of before back."""

    def act(communicator):
        model = built(Plain)
        base = dt.SignSGD(model.parameters(), lr=1e-3)
        optimizer = dt.replicate(base, model, communicator, scheme)

        def step():
            model(batch(communicator.replica, optimizer.step_count, 32)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(4):
            step()
        saved = {
            key: value for key, value in optimizer.state_dict().items() if key != "replication"
        }
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(5.0)
        optimizer.load_state_dict(saved)
        step()
        step()
        optimizer.synchronize()
        return max(float((parameter.detach() - 5).abs().max()) for parameter in model.parameters())

    assert max(simulate_replicas(act, 2)) < 0.05


def drifted_on_one_shard(mesh):
    model = dt.shard(built(Plain), mesh)
    if torch.distributed.get_rank() == 3:
        next(model.parameters()).data._local_tensor.add_(1)
    optimizer = dt.replicate(sgd(model), model, mesh["replicate"], dt.demo())
    return caught(advance, mesh, model, optimizer)


def test_what_one_shard_alone_sees_stops_all_shards():
    for name, text in worlds.run(drifted_on_one_shard, 2, 2):
        assert name == "Mismatch" and "(weights)" in text


class Held(nn.Module):
    """A layer that is trained, and one that is not."""

    def __init__(self):
        super().__init__()
        self.trained, self.frozen = nn.Linear(32, 8), nn.Linear(8, 1).requires_grad_(False)

    def forward(self, x):  # [batch, 32] -> [batch, 1]
        return self.frozen(self.trained(x))


def other_frozen(mesh):
    model = built(Held)
    with torch.no_grad():
        model.frozen.bias += mesh.get_rank()
    trained = torch.optim.SGD(model.trained.parameters(), lr=0.1)
    return caught(dt.replicate(trained, model, mesh["replicate"], dt.full()).set_up)


def other_plain(mesh):
    """Both replicas train the head alone; the body requires gradients, too, and differs."""
    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("detonation").addHandler(handler)
    model = built(Held).requires_grad_(True)
    with torch.no_grad():
        model.frozen.bias += mesh.get_rank()
    trained = torch.optim.SGD(model.trained.parameters(), lr=0.1)
    dt.replicate(trained, model, mesh["replicate"], dt.full()).set_up()
    logging.getLogger("detonation").removeHandler(handler)
    return said


def test_weights_of_no_optimizer_that_differ_are_warned_of_once():
    first, second = worlds.run(other_plain, 2, 1)
    assert len(first) == 1 and second == []
    assert first[0].startswith("replicas differ in frozen.bias, which this optimizer")


def other_rounds(mesh):
    """Another replicated optimizer trains the body, in whose open round the replicas differ."""
    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    model = built(Held).requires_grad_(True)
    optimizers = [
        dt.replicate(
            torch.optim.SGD(part.parameters(), lr=0.1), model, mesh["replicate"], dt.diloco(every=3)
        )
        for part in (model.frozen, model.trained)
    ]
    logging.getLogger("detonation").addHandler(handler)
    for optimizer in optimizers:
        model(batch(mesh.get_rank(), 0, 32)).mean().backward()
        optimizer.step()
    logging.getLogger("detonation").removeHandler(handler)
    return said, digest(model.frozen.parameters())


def test_weights_of_another_replicated_optimizer_are_its_own_to_compare():
    (said, mine), (_, other) = worlds.run(other_rounds, 2, 1)
    assert mine != other and not [line for line in said if "replicas differ" in line]


def other_freezes(mesh):
    """Another replicated optimizer trains the body, of which one replica freezes a bias for now."""
    model = built(Held).requires_grad_(True)
    body = dt.replicate(
        torch.optim.SGD(model.frozen.parameters(), lr=0.1), model, mesh["replicate"], dt.full()
    )
    if mesh.get_rank():
        model.frozen.bias.requires_grad_(False)
    head = torch.optim.SGD(model.trained.parameters(), lr=0.1)
    found = caught(dt.replicate(head, model, mesh["replicate"], dt.full()).set_up)
    return found, caught(body.set_up)


def test_weights_of_another_optimizer_that_one_replica_freezes_are_judged_alike_on_all():
    first, second = worlds.run(other_freezes, 2, 1)
    assert first == second
    assert first[1][0] == "Mismatch" and "frozen.bias (shape)" in first[1][1]


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_that_rescales_the_rows_that_it_looks_up_is_refused(kind):
    model = nn.Sequential(kind(8, 4, max_norm=1.0))
    with pytest.raises(ValueError, match=r"the embedding 0 has max_norm=1\.0"):
        dt.replicate(sgd(model), model, LoopbackCommunicator(), dt.full())


def test_arguments_of_another_kind_or_out_of_range_are_refused_in_one_line():
    model = built(Plain)

    def replicated(**options):
        return lambda: dt.replicate(sgd(model), model, LoopbackCommunicator(), dt.full(), **options)

    nan = float("nan")
    refused = {
        "outer_lr is nan": partial(dt.diloco, outer_lr=nan),
        "outer_lr is inf": partial(dt.diloco, outer_lr=float("inf")),
        "verify_every is nan": partial(dt.Safety, verify_every=nan),
        "verify_every is 2.5": partial(dt.Safety, verify_every=2.5),
        "verify_every is '5'": partial(dt.Safety, verify_every="5"),
        "chunk is -64": partial(dt.demo, chunk=-64, tiles=True),
        "resync_every of the shard wire is 2.5": partial(dt.shard_wire, resync_every=2.5),
        "nodes of the shard wire is '2'": partial(dt.shard_wire, nodes="2"),
        "link of the shard wire is 5": partial(dt.shard_wire, link=5),
        "weights of the shard wire is 4": partial(dt.shard_wire, weights=4),
        "safety is {}": replicated(safety={}),
        "safety is 'skip'": replicated(safety="skip"),
        "kernels is 'no'": replicated(kernels="no"),
        "balance is 'no'": replicated(balance="no"),
        "clip is True": replicated(clip=True),
        "rate is 5e-324": partial(dt.schemes.random, rate=5e-324),
        "rate is 1e-12": partial(dt.random_sign, rate=1e-12),
        "no error to feed back": partial(dt.loco, "fp32"),
        "pass its .item()": partial(dt.demo, topk=torch.tensor(3)),
    }
    for text, attempt in refused.items():
        kind, message = caught(attempt)
        assert kind in ("TypeError", "ValueError") and text in message and "\n" not in message, (
            text,
            message,
        )


def other_dtype(mesh):
    model = built(Plain)
    if mesh.get_rank():
        model.bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1)
    rounds = dt.replicate(
        torch.optim.SGD(model.parameters(), lr=0.1), model, mesh["replicate"], dt.diloco(every=2)
    )
    return caught(rounds.set_up)


def test_replicas_with_other_frozen_weights_or_another_dtype_are_told_apart():
    for attempt, text in (
        (other_frozen, "frozen.bias (frozen weights)"),
        (other_dtype, "torch.bfloat16"),
    ):
        for kind, message in worlds.run(attempt, 2, 1):
            assert kind == "Mismatch" and text in message


class Thin(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 1))  # shards of two rows and of one

    def forward(self, x):  # [batch, 32] -> [batch]
        return (x[:, :1] * self.weight.sum()).square().mean(1)


def thin(mesh):
    model = dt.shard(built(Thin), mesh)
    optimizer = dt.replicate(
        torch.optim.SGD(model.parameters(), lr=0.1), model, mesh["replicate"], dt.demo(1, 2)
    )
    return caught(advance, mesh, model, optimizer)


def test_a_scheme_that_is_larger_than_dense_on_one_shard_is_judged_alike_on_all():
    assert len(set(worlds.run(thin, 2, 2))) == 1


def two_optimizers(mesh):
    """Each trains a layer in rounds, and begins where the other has moved its own."""
    model = built(Plain)
    made = [
        dt.replicate(
            torch.optim.SGD(layer.parameters(), lr=0.1),
            model,
            mesh["replicate"],
            dt.diloco(every=3),
        )
        for layer in model.layers
    ]
    for step in range(4):
        for optimizer in made:
            model(batch(mesh.get_rank(), step, 32)).mean().backward()
            optimizer.step()
            model.zero_grad()
    for optimizer in made:
        optimizer.synchronize()
    return dt.fingerprint(model, mesh)[1]


def private_head(mesh):
    """A layer that a plain optimizer trains, on each replica for itself."""
    model = built(Plain)
    trained = torch.optim.SGD(model.layers[0].parameters(), lr=0.1)
    with torch.no_grad():
        model.layers[1].bias += mesh.get_rank()
    return caught(dt.replicate(trained, model, mesh["replicate"], dt.full()).set_up)[0]


def test_what_another_optimizer_trains_is_not_frozen():
    assert all(worlds.run(two_optimizers, 2, 1))
    assert worlds.run(private_head, 2, 1) == ["nothing", "nothing"]


def from_the_meta_device(mesh):
    """A step before there are weights, with those of each rank, and with equal ones."""
    with torch.device("meta"):
        model = Plain()
    dt.shard(model, mesh)
    early = caught(dt.replicate(sgd(model), model, mesh["replicate"], dt.loco()).step)
    model.to_empty(device=mesh.device_type)
    torch.manual_seed(mesh.get_local_rank("replicate"))
    for parameter in model.parameters():
        nn.init.normal_(parameter.detach().to_local())
    apart = caught(
        advance, mesh, model, dt.replicate(sgd(model), model, mesh["replicate"], dt.loco())
    )
    dt.same_weights(model, mesh["replicate"])
    return (
        early,
        apart,
        caught(advance, mesh, model, dt.replicate(sgd(model), model, mesh["replicate"], dt.loco())),
    )


class Stage(nn.Module):
    """A module that only holds others: it has no forward."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)


class Nested(nn.Module):
    """Layers in lists of lists, of dicts and of modules without a forward."""

    def __init__(self):
        super().__init__()
        pairs = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        named = nn.ModuleDict({"one": nn.Linear(8, 8), "more": nn.ModuleList([nn.Linear(8, 8)])})
        own = nn.ParameterList([torch.ones(8)])
        self.stages = nn.ModuleList([pairs, named, Stage(), own, nn.Linear(8, 8)])

    def forward(self, x):
        pairs, named, stage, own, last = self.stages
        for layer in (*pairs, named["one"], *named["more"], stage.inner):
            x = layer(x)
        return last(x * own[0])


def of_nested_lists(mesh):
    """The parts of the model that became units, after a forward and a backward pass."""
    model = dt.shard(Nested(), mesh)
    model(torch.ones(2, 8)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    return [name for name, part in model.named_modules() if isinstance(part, FSDPModule)]


def test_nested_lists_of_layers_are_sharded_by_layer():
    layers = ["0.0", "0.1", "1.one", "1.more.0", "2.inner", "4"]
    assert worlds.run(of_nested_lists, 1, 1) == [["", *(f"stages.{name}" for name in layers)]]


def test_weights_that_are_made_after_sharding_must_be_made_equal():
    for early, apart, equal in worlds.run(from_the_meta_device, 2, 2):
        assert (
            early[0] == "ValueError"
            and "layers.0.weight is on the meta device, and has no weights yet" in early[1]
        )
        assert apart[0] == "Mismatch" and "call detonation.same_weights(model, axis)" in apart[1]
        assert equal == ("nothing", "")
