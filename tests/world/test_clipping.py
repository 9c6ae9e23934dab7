"""Clipping means one thing: after the exchange, by the global norm, as hybrid sharding clips."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.debug import CommDebugMode

import detonation as dt
import worlds
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.cluster.network.simulated import simulate_replicas
from detonation.core.agreement.clipping import Clip
from detonation.core.compute.scatter_sum import square_root
from detonation.core.flat.tensors import digest
from steps import step_on
from worlds import caught
from zoo import SCHEMES, Plain, batch, built

pytestmark = pytest.mark.usefixtures("lasting_worlds")

CLIP = 0.01
STEPS = 12


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def advance(mesh, model, optimizer, steps, overlap=False):
    norms = []
    for step in steps:
        loss = model(batch(mesh.get_rank(), step, 32)).mean()
        step_on(optimizer, loss, overlap)
        norms.append(float(optimizer.stats.grad_norm))
        optimizer.zero_grad()
    return norms


def start(mesh, scheme, base=adamw, **options):
    model = dt.shard(built(Plain), mesh)
    return model, dt.replicate(
        base(model.parameters()), model, mesh["replicate"], scheme, **options
    )


def against_hsdp(mesh, base):
    model, optimizer = start(mesh, dt.full(), base, clip=CLIP)
    norms = advance(mesh, model, optimizer, range(STEPS))
    hybrid = built(Plain)
    for module in (*hybrid.layers, hybrid):
        fully_shard(module, mesh=mesh).set_force_sum_reduction_for_comms(True)
    stepped, theirs = base(hybrid.parameters()), []
    for step in range(STEPS):
        hybrid(batch(mesh.get_rank(), step, 32)).mean().backward()
        with (
            pytest.MonkeyPatch.context() as patch
        ):  # torch's root is rounded correctly, but by MKL on AVX-512
            patch.setattr(
                _NormPartial, "_post_reduce_transform", lambda _, squares: square_root(squares)
            )
            theirs.append(float(nn.utils.clip_grad_norm_(hybrid.parameters(), CLIP).full_tensor()))
        stepped.step()
        stepped.zero_grad()
    assert min(norms) > CLIP and norms == theirs
    return digest(model.parameters()) == digest(hybrid.parameters())


@pytest.mark.parametrize("base", [adamw, sgd])
def test_law_6_full_clips_as_hybrid_sharding_does_bit_for_bit(base):
    assert worlds.run(against_hsdp, 2, 2, base) == [True] * 4


def collectives(mesh):
    """Of a step without clipping and with it, and of the local step of a round."""
    found = []
    for scheme, clip in (
        (dt.demo(), None),
        (dt.demo(), CLIP),
        (dt.diloco(every=9), None),
        (dt.diloco(every=9), CLIP),
    ):
        model, optimizer = start(mesh, scheme, clip=clip, safety=dt.Safety(verify_every=0))
        model(batch(mesh.get_rank(), 0, 32)).mean().backward()
        optimizer.step()
        with CommDebugMode() as seen:
            optimizer.step()
        found.append(seen.get_total_counts())
    return found


def test_clipping_costs_one_collective_over_the_shards_and_none_when_off():
    for plain, clipped, local_step, clipped_local_step in worlds.run(collectives, 2, 2):
        assert (clipped - plain, local_step, clipped_local_step) == (1, 0, 1)


def overlapping(mesh, names):
    """With overlap the bits are those of a step without it."""
    found = {}
    for name in names:
        ends = []
        for overlap in (False, True):
            model, optimizer = start(mesh, SCHEMES[name], sgd, clip=CLIP)
            ends.append(
                (advance(mesh, model, optimizer, range(STEPS), overlap), digest(model.parameters()))
            )
        found[name] = ends[0] == ends[1]
    return found


@pytest.mark.long  # no branch of its own
def test_clipping_does_not_forbid_overlap():
    names = ["full", "demo", "random-sign"]
    assert worlds.run(overlapping, 2, 2, names) == [dict.fromkeys(names, True)] * 4


def on_two_axes(mesh):
    """A matrix sharded over both axes of a node, one over the second, one held whole: the norm of all of them."""
    torch.manual_seed(0)
    placements = [(Shard(0), Shard(1)), (Replicate(), Shard(0)), (Replicate(), Replicate())]
    whole = [torch.randn(8, 8), torch.randn(5, 3), torch.randn(7)]
    parameters = {}
    for number, (tensor, placed) in enumerate(zip(whole, placements, strict=True)):
        parameter = nn.Parameter(distribute_tensor(torch.zeros_like(tensor), mesh, placed))
        parameter.grad = distribute_tensor(tensor.clone(), mesh, placed)
        parameters[str(number)] = parameter
    clip = Clip(parameters, torch.optim.SGD(parameters.values()), max_norm=1.0)
    clip()
    expected = torch.nn.utils.get_total_norm(whole)
    for tensor, parameter in zip(whole, parameters.values(), strict=True):
        assert isinstance(parameter.grad, DTensor)
        torch.testing.assert_close(parameter.grad.full_tensor(), tensor / expected)
    return float(clip.norm), float(expected)


def test_the_norm_is_over_all_axes_that_shard_a_parameter_and_counts_copies_once():
    for norm, expected in worlds.run(on_two_axes, 2, 2):
        assert norm == pytest.approx(expected, rel=1e-6)


def on_two_levels(mesh):
    """Both axes join replicas: the clipped gradient is that of all four, after the last level."""
    model, plain = built(Plain), built(Plain)
    levels = [(mesh["shard"], dt.full()), (mesh["replicate"], dt.full())]
    optimizer = dt.replicate(sgd(model.parameters()), model, levels=levels, clip=CLIP)
    norms = advance(mesh, model, optimizer, range(2))
    stepped = sgd(plain.parameters())
    for step, norm in enumerate(norms):
        stepped.zero_grad()
        (sum(plain(batch(rank, step, 32)).mean() for rank in range(4)) / 4).backward()
        assert norm == pytest.approx(
            float(nn.utils.clip_grad_norm_(plain.parameters(), CLIP)), rel=1e-5
        )
        stepped.step()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5)
    return digest(model.parameters())


def test_several_levels_clip_once_after_the_last():
    assert len(set(worlds.run(on_two_levels, 2, 2))) == 1


def trained(scheme, base, clip, settle=False):
    """Of two simulated replicas: the gradients after each step, the norms, and a digest of the weights."""

    def act(communicator):
        model = built(Plain)
        optimizer = dt.replicate(base(model.parameters()), model, communicator, scheme, clip=clip)
        steps, norms = [], []
        for step in range(4):
            model(batch(communicator.replica, step, 32)).mean().backward()
            optimizer.step()
            steps.append([p.grad.clone() for p in model.parameters()])
            norms.append(optimizer.stats.grad_norm)
            optimizer.zero_grad()
        if settle:
            optimizer.synchronize()
        return steps, norms, digest(model.parameters())

    return simulate_replicas(act, 2)


@pytest.mark.parametrize("name", SCHEMES)
def test_law_2_every_scheme_clips_the_gradient_of_the_base_optimizer(name):
    """The first step scales the agreed update (or the gradient of each replica) to the norm; replicas agree."""
    scheme = SCHEMES[name]
    plain, clipped = trained(scheme, sgd, None), trained(scheme, sgd, 1e-4, settle=True)
    measured = trained(scheme, sgd, float("inf"))
    for replica in range(2):
        steps, norms, _ = clipped[replica]
        expected = nn.utils.get_total_norm(plain[replica][0][0])
        assert norms[0] == expected
        scale = (1e-4 / (expected + 1e-6)).clamp(max=1.0)
        for mine, theirs in zip(steps[0], plain[replica][0][0], strict=True):
            assert torch.equal(mine, theirs * scale)
        for after in steps:
            assert nn.utils.get_total_norm(after) <= 1.0001e-4
        assert measured[replica][2] == plain[replica][2]  # infinity scales nothing
    if scheme.signal == "nothing":
        return
    assert clipped[0][2] == clipped[1][2]
    if scheme.signal == "gradients":
        assert all(
            torch.equal(one, other) for one, other in zip(clipped[0][1], clipped[1][1], strict=True)
        )


def test_a_sign_is_a_sign_clipped_or_not():
    """SignSGD without momentum takes the update straight from the messages, and nothing is computed for clipping."""
    scheme = dt.demo(topk=4, chunk=64)
    plain, clipped = trained(scheme, dt.SignSGD, None), trained(scheme, dt.SignSGD, 1e-6)
    assert plain[0][2] == clipped[0][2] and clipped[0][1] == [None] * 4

    def with_momentum(params):
        return dt.SignSGD(params, momentum=0.9)

    assert all(norm > 0 for norm in trained(scheme, with_momentum, 1e-6)[0][1])


def other_clip(mesh):
    model, optimizer = start(mesh, dt.demo(), clip=1.0 + mesh.get_local_rank("replicate"))
    model(batch(0, 0, 32)).mean().backward()
    return caught(optimizer.step)


def test_replicas_that_clip_differently_are_refused():
    for kind, text in worlds.run(other_clip, 2, 1):
        assert kind == "Mismatch" and "replica 1 has clip=2.0, replica 0 has clip=1.0" in text


@pytest.mark.parametrize("clip", [0, -1.0, float("nan")])
def test_a_norm_that_is_none_is_refused(clip):
    model = built(Plain)
    with pytest.raises(ValueError, match=r"clip is .*, must be above 0"):
        dt.replicate(sgd(model.parameters()), model, LoopbackCommunicator(), dt.full(), clip=clip)
