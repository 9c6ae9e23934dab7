"""The law of company: other optimizers on the same axis, and collectives of the loop, change nothing."""

import gc
from contextlib import ExitStack
from datetime import timedelta
from random import Random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

import detonation as dt
import worlds
from detonation.cluster.init import _set_timeout as set_timeout
from detonation.core.flat.tensors import digest
from detonation.core.integrity.fault_counts import Desync
from detonation.core.link.communicator import communicator_of
from detonation.core.schemes import buckets
from steps import Passing
from zoo import KINDS, TALKING, batch, built

STEPS = 5


@pytest.fixture(scope="module", autouse=True)
def small_buckets():
    """Also in the ranks, which are forks."""
    with pytest.MonkeyPatch.context() as patch, worlds.lasting():
        patch.setattr(buckets, "SMALLEST", 2**12)
        yield


class Two(nn.Module):
    """Two networks of the same shapes; a batch may leave any part of them without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.mine, self.theirs = (
            nn.ModuleList([nn.Linear(32, 96), nn.Linear(32, 64)]) for _ in range(2)
        )


def parts_of(layers, x, chance):
    """Losses of some of the layers."""
    return [
        lambda layer=layer: layer(x).square().mean() for layer in layers if chance.random() < 0.7
    ]


def trained(mesh, scheme, company, overlapped, seed=0):
    """What comes of `mine` after some steps. Gradients come in an order of their own on each rank, and some never."""
    model, rank, axis = built(Two), mesh.get_rank(), mesh["replicate"]
    optimizers = [
        dt.replicate(torch.optim.AdamW(model.mine.parameters(), lr=1e-2), model, axis, scheme)
    ]
    if company:
        optimizers.append(
            dt.replicate(torch.optim.SGD(model.theirs.parameters(), lr=0.1), model, axis, dt.full())
        )
    chances = [Random(f"{seed} {rank} {part}") for part in range(3)]
    for step in range(STEPS):
        parts = parts_of(model.mine, batch(rank, step, 32), chances[0])
        parts += parts_of(model.theirs, batch(rank, step, 32), chances[1]) if company else []
        chances[2].shuffle(parts)
        losses = [part() for part in parts]  # backward goes the other way
        with ExitStack() as stack:
            for optimizer in optimizers if overlapped else ():
                stack.enter_context(optimizer.overlap())
            if losses:
                torch.stack(losses).sum().backward()
        for group in (None, axis.get_group()) if company else ():
            told = torch.full((32,), float(step))
            dist.all_reduce(told, group=group)
            assert told.tolist() == [step * mesh.size()] * 32
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    optimizers[0].synchronize()
    return (
        digest(model.mine.parameters()),
        optimizers[0].stats.bytes_sent,
        optimizers[0].stats.refused,
    )


def alone_and_beside(mesh, names, overlapped):
    """What comes of training without company and without overlap, and of training with company."""
    return {
        name: [trained(mesh, TALKING[name], *way) for way in ((False, False), (True, overlapped))]
        for name in names
    }


@pytest.mark.parametrize(
    ("names", "overlapped"),
    [([*TALKING], True), pytest.param([*KINDS], False, marks=pytest.mark.long)],
)
def test_law_14_company_changes_nothing(names, overlapped):
    ranks = worlds.run(alone_and_beside, 2, 1, names, overlapped)
    for name in names:
        (alone, beside), (other, other_beside) = (rank[name] for rank in ranks)
        assert alone == beside == other == other_beside, name


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1.0)


def pair(axis, scheme, other=None, **options):
    """Two networks of the same shapes at zero, an optimizer for each."""
    model = built(Two)
    for parameter in model.parameters():
        parameter.data.zero_()
    first = dt.replicate(sgd(model.mine), model, axis, scheme, **options)
    return model, first, dt.replicate(sgd(model.theirs), model, axis, other or scheme)


def moved(layers):
    return sorted(
        {-value for parameter in layers.parameters() for value in parameter.flatten().tolist()}
    )


def sums(model, first, second, missing):
    """A step in which each gradient of `mine` is 1, and each of `theirs` 100; on this rank there may be none of 1."""
    with first.overlap(), second.overlap():
        for layers, gradient in ((model.mine, 1.0), (model.theirs, 100.0)):
            if layers is model.theirs or not missing:
                sum(gradient * parameter.sum() for parameter in layers.parameters()).backward()
    first.step()
    second.step()
    for optimizer in (first, second):
        optimizer.zero_grad()


def two_that_overlap(mesh, precision, passing=False):
    """What they moved in a step, and in one in which one replica has no gradient of the first."""
    axis = Passing(communicator_of(mesh["replicate"])) if passing else mesh["replicate"]
    model, first, second = pair(axis, dt.full(precision=precision))
    sums(model, first, second, missing=False)
    outcome = worlds.caught(sums, model, first, second, mesh.get_rank() == 1)
    return outcome, moved(model.mine), moved(model.theirs)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_that_overlap_on_one_axis_keep_their_gradients(precision):
    """A replica that has no gradient for the first starts the collectives of the second before those of the first."""
    assert worlds.run(two_that_overlap, 2, 1, precision) == [(("nothing", ""), [1.5], [200.0])] * 2


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_sums_of_messages_that_do_not_belong_together_are_an_error_and_move_nothing(precision):
    for rank, ((kind, text), mine, theirs) in enumerate(
        worlds.run(two_that_overlap, 2, 1, precision, True)
    ):
        assert kind == Desync.__name__, text
        assert (
            f"replica {1 - rank} added a message of another step, level or optimizer to the sum of step 1"
            in text
        )
        assert mine == [1.0] and theirs == [100.0]


def units_that_two_share(mesh, overlaps, accumulate, both, clips=False):
    """Fingerprint after three steps: the gradients of a unit of FSDP2 are views of one tensor."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(2)]
    model = dt.shard(nn.Sequential(*layers), mesh)
    optimizers = []
    for dims in (2, 1) if both else (2,):
        own = [parameter for parameter in model.parameters() if parameter.dim() == dims]
        adamw = torch.optim.AdamW(own, lr=0.02 / dims)
        optimizers.append(dt.replicate(adamw, model, mesh["replicate"], dt.loco()))
    for step in range(3):
        for micro in range(accumulate):
            torch.manual_seed(100 * step + 10 * micro + mesh.get_rank())
            with ExitStack() as stack:
                if overlaps and micro == accumulate - 1:
                    for each in optimizers:
                        stack.enter_context(each.overlap())
                model(torch.randn(4, 64)).square().mean().backward()
        if clips:
            nn.utils.clip_grad_norm_([*model.parameters()], 1e-3)
        for each in optimizers:
            each.step()
        model.zero_grad()
    return dt.fingerprint(model, mesh)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("both", [True, False])
def test_a_unit_of_fsdp_whose_gradients_others_use_too_overlaps_with_the_same_bits(
    both, accumulate
):
    shards = 2 if both else 1
    apart = worlds.run(units_that_two_share, 2, shards, False, accumulate, both)
    assert worlds.run(units_that_two_share, 2, shards, True, accumulate, both) == apart


@pytest.mark.parametrize("both", [True, False])
def test_a_change_of_gradients_in_a_unit_that_others_use_is_still_an_error(both):
    found = worlds.run(caught_in_unit, 2, 1, both)
    assert all(
        kind == "OverlapError" and "changed after it was sent" in text for kind, text in found
    )


def caught_in_unit(mesh, both):
    return worlds.caught(units_that_two_share, mesh, True, 1, both, True)


def groups_of(axis, count):
    """The process groups that there are while `count` optimizers have taken a step, and after them."""
    before, found = len(distributed_c10d._world.pg_map), []
    for number in range(count):
        model = nn.Linear(4, 4)
        with torch.no_grad():
            model.weight.fill_(number)
            model.bias.zero_()
        optimizer = dt.replicate(sgd(model), model, axis, dt.full())
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        found.append(len(distributed_c10d._world.pg_map) - before)
        del optimizer, model
        gc.collect()
    return found, len(distributed_c10d._world.pg_map) - before


def test_the_group_of_an_optimizer_ends_with_it():
    def act(mesh):
        return groups_of(mesh["replicate"], 5)

    assert worlds.run_alone(act, 2, 1) == [([1] * 5, 0)] * 2


def test_the_group_of_an_optimizer_needs_only_the_ranks_of_its_axis():
    """Ranks 0 and 2 train; they have made other groups before, not as many on each. The limit is that of the axis."""

    def act(mesh):
        if mesh.get_rank() == 0:
            dist.new_group([0], use_local_synchronization=True)
        if mesh.get_rank() not in (0, 2):
            return None
        axis = mesh["replicate"]
        set_timeout(timedelta(seconds=77), axis.get_group())
        model = built(Two)
        optimizer = dt.replicate(sgd(model), model, axis, dt.full())
        optimizer.step()
        (link, _) = optimizer._routes[0, 1]
        group = link._inter_node._group
        backend = group._get_backend(torch.device("cpu"))
        return (
            dist.get_process_group_ranks(group),
            backend.options._timeout.total_seconds(),
            group is axis.get_group(),
        )

    ranks = worlds.run_alone(act, 2, 2)
    assert ranks[0] == ranks[2] == ([0, 2], 77.0, False)
