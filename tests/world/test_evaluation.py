"""An evaluation at any moment of training changes nothing that follows, and what is read or written is what the model
computes with: FSDP2 keeps gathered copies of the root's parameters after a forward pass without a backward pass."""

from itertools import product

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import detonation as dt
import worlds
from covering import some
from detonation.checkpoint.snapshot import weights
from detonation.core.flat.tensors import digest
from steps import bases
from zoo import DEVICE, KINDS, SCHEMES, Menagerie, Plain, batch, built

pytestmark = pytest.mark.usefixtures("lasting_worlds")

STEPS = 5


@torch.no_grad()
def outputs(model, width):
    """What this rank computes for a batch that all ranks share."""
    model.eval()
    found = model(batch(77, 77, width))
    model.train()
    return digest([found])


def train(optimizer, model, rank, width, evaluates, read=lambda: None):
    for step in range(STEPS):
        loss = model(batch(rank, step, width)).mean()
        if evaluates and step == 2:
            outputs(model, width)
        loss.backward()
        if evaluates and step in (1, 3):
            outputs(model, width)
        optimizer.step()
        optimizer.zero_grad()
        if not evaluates:
            continue
        outputs(model, width)
        if step in (1, 3):
            model(batch(rank, 99, width)).mean()  # with a graph, which nobody follows backward
        if step == 3:
            read()


def trained(mesh, scheme, model, evaluates, width):
    """The weights of this rank after training, whether replicas hold and compute the same once synchronized."""
    optimizer = dt.replicate(bases(model.parameters()), model, mesh["replicate"], scheme)
    train(optimizer, model, mesh.get_rank(), width, evaluates, lambda: dt.fingerprint(model, mesh))
    if evaluates:
        outputs(model, width)
    own = digest(weights(model).values())
    if evaluates:
        outputs(model, width)
    optimizer.synchronize()
    computed = outputs(model, width)
    _, equal = dt.fingerprint(model, mesh)
    return own, digest(weights(model).values()), equal, computed


def awkward(mesh):
    return dt.shard(built(Menagerie), mesh)


def kept(mesh):
    """All units stay gathered after forward."""
    model = built(Plain)
    for unit in (*model.layers, model):
        fully_shard(
            unit, mesh=mesh["shard"], reshard_after_forward=False
        ).set_force_sum_reduction_for_comms(True)
    return model


def in_bf16(mesh):
    first, last = built(Plain).layers
    return dt.shard(
        nn.Sequential(first, nn.Tanh(), last, nn.Tanh()),
        mesh,
        MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, output_dtype=torch.float32
        ),
    )


def roots(mesh):
    """Two roots in one model, one of which is sharded as a whole."""
    last = built(Plain)
    model = nn.Sequential(nn.Linear(32, 32, device=DEVICE), last)
    for part in model:
        dt.shard(part, mesh)
    return model


def whole(mesh):
    return built(Plain)


MODELS = {"awkward": awkward, "kept": kept, "bf16": in_bf16, "roots": roots, "whole": whole}


def law(mesh, name, kind):
    width = 257 if kind == "awkward" else 32
    return [
        trained(mesh, SCHEMES[name], MODELS[kind](mesh), evaluates, width)
        for evaluates in (False, True)
    ]


FEWEST = "whole"
"""The kind whose world has the fewest ranks: every scheme is evaluated in it or, if it is one of
every kind of scheme, in a sharded world."""
OTHERS = [kind for kind in MODELS if kind != FEWEST]
SHARDED = {name: OTHERS[number % 4] for number, name in enumerate(KINDS)}
ONCE = [(name, SHARDED.get(name, FEWEST)) for name in SCHEMES]


@some("name, kind", product(SCHEMES, MODELS), keep=ONCE)
def test_law_13_evaluation_changes_nothing(name, kind):
    ends = worlds.run(law, *((2, 1) if kind == "whole" else (2, 2)), name, kind)
    assert all(without == with_evaluations for without, with_evaluations in ends)
    if SCHEMES[name].signal != "nothing":
        assert {equal for (_, _, equal, _), _ in ends} == {True}
        assert len({computed for (*_, computed), _ in ends}) == 1
