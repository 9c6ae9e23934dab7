"""Buckets that leave while backward still runs: the same bits as one message after it, in one order on all ranks."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import detonation as dt
import worlds
from covering import some
from detonation.core.codec import basis
from detonation.core.flat.tensors import digest, local
from detonation.core.integrity.fault_counts import NonFiniteGradient
from detonation.core.replicator.channel import Channel
from detonation.core.replicator.overlap import OverlapError
from detonation.core.schemes import buckets
from detonation.core.schemes.traffic import message_bytes, overlapped_bytes, ring_bytes
from zoo import GRADIENT, Menagerie, Plain, batch, built

STEPS = 2
SUMMED = {"full", "full-bf16", "random", "random-odd", "striding"}  # by the network
KINDS = {
    "full",
    "demo",
    "demo-bitmap-2bit",
    "random-odd",
    "random-majority",
    "demo-owner",
    "random-sign-owner",
}
IN_SIGNS = {
    "all-gather": dt.demo(chunk=16, precision="sign", error_feedback=False),
    "owner": dt.demo(chunk=16, precision="sign", error_feedback=False, link="owner"),
}


@pytest.fixture(scope="module", autouse=True)
def small_buckets():
    """Also in the ranks, which are forks."""
    with pytest.MonkeyPatch.context() as patch, worlds.lasting():
        patch.setattr(buckets, "SMALLEST", 2**16)
        rows_alone(patch)
        yield


def rows_alone(monkeypatch):
    """With torch 2.10 the bits of a row of a product depend on how many rows there are, so on the bucket."""
    rows, waves = (
        torch.randn(count, 1000, generator=torch.Generator().manual_seed(0))
        for count in (300, 1000)
    )
    if not torch.equal(basis._product(rows[:33], waves), basis._product(rows, waves)[:33]):
        monkeypatch.setattr(basis, "_product", in_order)


def in_order(one, other):
    """`one @ other.T`, each element of which is a sum in one order."""
    total = torch.zeros(len(one), len(other))
    for column, factor in zip(one.T, other.T, strict=True):
        total += column[:, None] * factor
    return total


class Wide(Menagerie):
    """Enough parameters for several buckets of any scheme; unsharded also one that does not lie in row order."""

    def __init__(self, whole: bool) -> None:
        super().__init__(scalar=whole)
        self.wide = nn.ModuleList([nn.Linear(257, 613), nn.Linear(613, 101)])
        self.turned = nn.Parameter(torch.randn(101, 300).t() if whole else torch.randn(300, 101))

    def forward(self, x):
        wide = self.wide[1](self.wide[0](x).tanh())
        return super().forward(x) + (wide @ self.turned.t()).square().mean(1)


def start(mesh, scheme, levels=None, base=None):
    whole = mesh["shard"].size() == 1
    model = built(Wide, whole=whole)
    if not whole:
        dt.shard(model, mesh)
    base = (base or (lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9)))(model.parameters())
    axis = None if levels else mesh["replicate"]
    optimizer = dt.replicate(base, model, axis, scheme, levels=levels)
    optimizer.set_up()
    return model, optimizer


def train(model, optimizer, rank, overlapped, steps=STEPS):
    """Two micro-batches a step, the second one overlapped."""
    for step in range(steps):
        model(batch(rank, 2 * step, 257)).mean().backward()
        loss = model(batch(rank, 2 * step + 1, 257)).mean()
        with optimizer.overlap() if overlapped else nullcontext():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def outcome(model, optimizer):
    state = {key: digest([t]) for key, t in dt.replica_state(optimizer).items()}
    return digest(model.parameters()), state, optimizer.stats.bytes_sent


def compared(mesh, schemes, base=None):
    """Of each scheme: how many buckets, and whether overlapped and not came to the same."""
    result = {}
    for name, scheme in schemes.items():
        ends = []
        for overlapped in (False, True):
            model, optimizer = start(mesh, scheme, base=base)
            train(model, optimizer, mesh.get_rank(), overlapped)
            ends.append(outcome(model, optimizer))
        channel = optimizer.set_up()[0].channel
        assert ends[1][2] == STEPS * foreseen(channel) + of_missing(channel), name
        result[name] = len(channel.pipelines), ends[0][:2] == ends[1][:2]
    return result


def foreseen(channel):
    """Bytes of an overlapped step by arithmetic: those of one message."""
    scheme, layout, replicas, local = (
        channel.scheme,
        channel.layout,
        channel.link.replicas,
        channel.link.local_ranks,
    )
    overlapped = overlapped_bytes(scheme, layout, replicas, local)
    rounding = len(channel.pipelines) * replicas  # of what each rank sends of each bucket
    assert 0 <= overlapped - message_bytes(scheme, layout, replicas, local) <= rounding
    return overlapped


def of_missing(channel):
    """Bytes of the sets by which all say once that nobody used a parameter of the model."""
    octets = -(-len(channel.layout.slots) // 8 // channel.link.local_ranks)  # each sends a part
    return ring_bytes("all-gather", octets, channel.link.replicas)


@some("replicas, shards", [(1, 1), (2, 1), (3, 1), (2, 2)], keep=[(2, 2)])
def test_bucketed_equals_unbucketed_bitwise(replicas, shards):
    # three or more are summed by the network in an order that depends on where in a message a number is
    names = (
        set(GRADIENT)
        if (replicas, shards) == (2, 1)
        else KINDS - SUMMED
        if replicas == 3
        else KINDS
    )
    schemes = {name: scheme for name, scheme in GRADIENT.items() if name in names}
    for rank in worlds.run(compared, replicas, shards, schemes):
        for name, (count, same) in rank.items():
            assert same, name
            # clipping needs the norm of the whole, tiles are not cut, and rows of 1000 are few
            stays_whole = "clipped" in name or GRADIENT[name].codec.basis.tile
            assert count == 1 if stays_whole else count > 1 or name == "demo-whole", name


def signs(parameters):
    return dt.SignSGD(parameters, lr=1e-3)


def test_bucketed_equals_unbucketed_bitwise_in_signs():
    for rank in worlds.run(compared, 2, 1, IN_SIGNS, signs):
        assert all(same and count > 1 for count, same in rank.values()), rank


def in_levels(mesh):
    ends = []
    for overlapped in (False, True):
        racks = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("site", "rack"))
        tiers = [(racks["rack"], dt.full()), (racks["site"], dt.demo())]
        model, optimizer = start(mesh, None, tiers)
        train(model, optimizer, mesh.get_rank(), overlapped)
        ends.append(outcome(model, optimizer)[:2])
    return ends[0] == ends[1]


def test_the_innermost_level_overlaps():
    assert all(worlds.run(in_levels, 4, 1))


def frozen_later(mesh):
    ends = []
    for overlapped in (False, True):
        model, optimizer = start(mesh, dt.demo())
        model.wide[1].weight.requires_grad_(False)
        train(model, optimizer, mesh.get_rank(), overlapped)
        ends.append(outcome(model, optimizer)[:2])
    return ends[0] == ends[1]


def test_a_parameter_that_was_frozen_later_counts_as_zero():
    assert all(worlds.run(frozen_later, 2, 1))


def by_lanes(mesh):
    """Two ranks of a node hold all parameters whole and have the same gradients."""
    ends = []
    for scheme in (dt.full(), dt.demo(precision="sign", aggregate="majority_vote", link="owner")):
        for overlapped in (False, True):
            model = built(Wide, whole=True)
            base = torch.optim.SGD(model.parameters(), lr=1e-3)
            optimizer = dt.replicate(
                base, model, mesh["replicate"], scheme, intra_node=mesh["shard"]
            )
            optimizer.set_up()
            train(model, optimizer, mesh.get_local_rank("replicate"), overlapped)
            ends.append(outcome(model, optimizer)[:2])
        channel = optimizer.set_up()[0].channel
        assert len(channel.pipelines) > 1
        assert optimizer.stats.bytes_sent == STEPS * foreseen(channel) + of_missing(channel)
    return ends[0] == ends[1], ends[2] == ends[3]


def test_messages_by_lanes_are_cut_alike():
    assert worlds.run(by_lanes, 2, 2) == [(True, True)] * 4


def without_gradients_to_exchange(mesh):
    ends = []
    for overlapped in (False, True):
        model, optimizer = start(mesh, dt.diloco(every=2))
        train(model, optimizer, mesh.get_rank(), overlapped)
        ends.append(outcome(model, optimizer))
    return ends[0] == ends[1]


def test_a_scheme_that_exchanges_parameters_has_nothing_to_overlap():
    assert all(worlds.run(without_gradients_to_exchange, 2, 1))


class Branches(nn.Module):
    """Two layers side by side; backward goes through the one that was run last first."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 512), nn.Linear(64, 512)

    def forward(self, x, order):
        out = {name: getattr(self, name)(x).tanh() for name in order}
        return (out["first"] + out["second"]).square().mean()


def events_of(mesh, order, overlapped):
    """In which order gradients came and buckets left, and the weights then."""
    model = built(Branches)
    optimizer = dt.replicate(
        torch.optim.SGD(model.parameters(), lr=0.1), model, mesh["replicate"], dt.demo()
    )
    optimizer.set_up()
    events, send = [], Channel.send_bucket
    for name in ("first", "second"):
        hook = lambda _, name=name: events.append(name)  # noqa: E731
        getattr(model, name).weight.register_post_accumulate_grad_hook(hook)

    def spy(channel, transfer, pipeline, signals):
        events.append(pipeline.bucket.first)
        send(channel, transfer, pipeline, signals)

    Channel.send_bucket = spy
    try:
        loss = model(batch(mesh.get_rank(), 0, 64), order)
        with optimizer.overlap() if overlapped else nullcontext():
            loss.backward()
            events.append("backward")
        optimizer.step()
    finally:
        Channel.send_bucket = send
    return events, digest(model.parameters())


def in_two_orders(mesh):
    order = ["first", "second"][:: 1 if mesh.get_rank() == 0 else -1]
    return events_of(mesh, order, True), events_of(mesh, order, False)[1]


def test_buckets_leave_during_backward_and_in_one_order_whatever_that_of_the_hooks():
    ((early, weights), plain), ((late, _), _) = worlds.run(in_two_orders, 2, 1)
    assert weights == plain
    assert [e for e in early if e in ("first", "second")] == ["second", "first"]
    assert [e for e in late if e in ("first", "second")] == ["first", "second"]
    rows = [e for e in early if isinstance(e, int)]
    assert (
        rows == sorted(rows, reverse=True) == [e for e in late if isinstance(e, int)]
        and len(rows) == 3
    )
    first_to_leave = early.index(rows[0])
    assert (
        early.index("second") < first_to_leave < early.index("first")
    )  # before backward has made the other half
    assert late.index("second") < late.index(rows[0]) < late.index("backward")
    assert early[-1] == late[-1] == "backward"


def wrongly(mesh):
    """What each wrong use raises, in a world of one replica, where nobody waits for what never comes."""

    def clipped(model, optimizer):
        with optimizer.overlap():
            model(x).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()

    def unscaled(model, optimizer):
        with optimizer.overlap():
            model(x).mean().backward()
        grads = [local(p.grad) for p in model.parameters() if p.grad is not None]
        torch._amp_foreach_non_finite_check_and_unscale_(grads, torch.zeros(1), torch.tensor(0.5))
        optimizer.step()

    def scaled(model, optimizer):
        scaler = torch.amp.GradScaler("cpu")
        with optimizer.overlap():
            scaler.scale(model(x).mean()).backward()
        scaler.step(optimizer)

    def left_out(model, optimizer):
        """The scale is so large that every gradient overflows."""
        scaler = torch.amp.GradScaler("cpu", init_scale=1e38)
        for _ in range(2):
            with optimizer.overlap():
                scaler.scale(1e3 * model(x).mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    def twice(model, optimizer):
        loss = model(x).mean()
        with optimizer.overlap():
            loss.backward(retain_graph=True)
            loss.backward()

    def skipped(model, optimizer):
        with optimizer.overlap():
            model(x).mean().backward()
        optimizer.zero_grad()
        with optimizer.overlap():
            model(x).mean().backward()

    def saved(model, optimizer):
        with optimizer.overlap():
            model(x).mean().backward()
        optimizer.state_dict()

    def synchronized(model, optimizer):
        with optimizer.overlap():
            model(x).mean().backward()
        optimizer.synchronize()

    def forgotten(model, optimizer):
        with optimizer.overlap():
            model(x).mean().backward()
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()

    x, errors = batch(0, 0, 257), []
    for wrong in (
        clipped,
        unscaled,
        scaled,
        twice,
        skipped,
        left_out,
        saved,
        synchronized,
        forgotten,
    ):
        model, optimizer = start(mesh, dt.demo())
        with pytest.raises(OverlapError) as caught:
            wrong(model, optimizer)
        errors.append(str(caught.value))
    return errors


@pytest.mark.long_cases("2")
@pytest.mark.parametrize("shards", [1, 2])
def test_gradients_on_their_way_cannot_be_changed_doubled_or_forgotten(shards):
    for rank in worlds.run(wrongly, 1, shards):
        clipped, unscaled, scaled, twice, skipped, left_out, saved, synchronized, forgotten = rank
        for changed in (clipped, unscaled, scaled, left_out, forgotten):
            assert (
                "changed after it was sent within overlap(): clip by replicate(clip=...); to unscale or"
                in changed
            )
        assert "computed twice within overlap(): put only the last backward before step()" in twice
        for half_done in (skipped, saved, synchronized):
            assert "overlap() began at step 0, but no step() followed: call step()" in half_done


def by_ddp(mesh):
    """DDP makes the gradients of a node equal: before the step in time, but after the hooks of an overlap."""
    sent = []
    for overlapped in (False, True):
        model = built(Plain)
        wrapped = DistributedDataParallel(model, process_group=mesh.get_group("shard"))
        base = torch.optim.SGD(model.parameters(), lr=1e-3)
        optimizer = dt.replicate(base, model, mesh["replicate"], dt.demo(chunk=16))
        optimizer.set_up()
        with optimizer.overlap() if overlapped else nullcontext():
            wrapped(batch(mesh.get_rank(), 0, 32)).mean().backward()
        sent.append(worlds.caught(optimizer.step))
    return sent


def test_ddp_inside_the_node_goes_without_overlap_and_is_refused_with_it():
    for plain, overlapped in worlds.run(by_ddp, 2, 2):
        assert plain == ("nothing", "")
        assert (
            overlapped[0] == "OverlapError"
            and "changed after it was sent within overlap()" in overlapped[1]
        )


def not_finite(mesh):
    """A gradient that is not finite ends in an error of the step, and no part of it is in the memory."""
    results = []
    for name in (
        "wide.1.weight",
        "wide.0.weight",
    ):  # in the bucket that leaves first, and in a later one
        model, optimizer = start(mesh, dt.schemes.random(rate=1 / 4))
        model.get_parameter(name).register_hook(lambda g: g * torch.nan)
        with optimizer.overlap():
            model(batch(mesh.get_rank(), 0, 257)).mean().backward()
        with pytest.raises(
            NonFiniteGradient, match=f"the gradient of {name} is not finite on replica"
        ):
            optimizer.step()
        residual = optimizer.set_up()[0].channel.memory.residual
        results.append((bool(residual.isfinite().all()), bool(residual.any())))
    return results


def test_what_is_not_finite_is_found_before_it_reaches_the_memory():
    # the buckets without it have left as ever
    assert worlds.run(not_finite, 2, 1) == [[(True, True), (True, True)]] * 2


def interrupted(mesh):
    """An error in backward before anything left leaves no trace."""
    model, optimizer = start(mesh, dt.demo())
    with pytest.raises(ZeroDivisionError), optimizer.overlap():
        raise ZeroDivisionError
    train(model, optimizer, mesh.get_rank(), True, steps=1)
    return optimizer.step_count


def test_an_interruption_before_the_first_bucket_is_none():
    assert worlds.run(interrupted, 2, 1) == [1, 1]
