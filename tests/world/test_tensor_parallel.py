"""Tensor parallelism changes no weight, also where the base optimizer reads this replica's own gradients."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import detonation as dt
import worlds
from limits import LIMIT_S

BASES = {
    "SignSGD": lambda p: dt.SignSGD(p, lr=0.01),
    "SignSGD with momentum": lambda p: dt.SignSGD(p, lr=0.01, momentum=0.9),
    "Muon": lambda p: dt.Muon(p, lr=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
}
SCHEMES = (
    lambda: dt.full(),
    lambda: dt.muloco(every=2, precision="fp32"),
    lambda: dt.none(),
)


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, tokens):
        return self.down(self.up(self.norm(self.table(tokens))).tanh())


def plan(table):
    """The norm gets sums that no rank has added, and a table that is cut by rows a whole gradient."""
    return {
        "table": table(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(),
    }


def trained(base, scheme, mesh, layout):
    torch.manual_seed(0)
    model = Layers()
    if layout:
        parallelize_module(model, mesh["tensor"], layout)
    inner = BASES[base](model.parameters())
    optimizer = dt.replicate(inner, model, mesh["replicate"], scheme, intra_node=mesh["tensor"])
    for step in range(4):
        numbers = torch.Generator().manual_seed(10 * step + mesh.get_local_rank("replicate"))
        out = model(torch.randint(0, 16, (4, 6), generator=numbers))
        whole = out.full_tensor() if isinstance(out, DTensor) else out
        whole.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    return model


def apart(_, base):
    """The largest distance between weights with and without tensor parallelism."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "tensor"))
    found = []
    for scheme in SCHEMES:
        whole = [*trained(base, scheme(), mesh, None).parameters()]
        for table in (ColwiseParallel, RowwiseParallel):
            model = trained(base, scheme(), mesh, plan(table))
            pairs = zip(model.parameters(), whole, strict=True)
            found.append(max(float((a.full_tensor() - b).detach().abs().max()) for a, b in pairs))
    return found


@pytest.mark.long_cases("SignSGD", "AdamW")
@pytest.mark.parametrize("base", BASES)
def test_tensor_parallelism_changes_no_weight(base):
    for distances in worlds.run_alone(apart, 2, 2, base):
        assert max(distances) < 1e-5, distances


class Norms(nn.Module):
    """A normalisation over the features that a rank holds: its statistics are those of this rank."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 8)
        self.batch_norm = nn.BatchNorm1d(4, affine=False)
        self.down = nn.Linear(8, 8)

    def forward(self, x):
        return self.down(self.batch_norm(self.up(self.norm(x))).tanh())


def cut(shape=(2, 2)):
    """A model whose matrices are cut over the ranks of a node, and its mesh."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "tensor"))
    torch.manual_seed(0)
    layout = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(Norms(), mesh["tensor"], layout), mesh


def replicated(parameters, model, mesh, scheme, lr=0.1, **options):
    sgd = torch.optim.SGD(parameters, lr=lr)
    return dt.replicate(sgd, model, mesh["replicate"], scheme, intra_node=mesh["tensor"], **options)


def backward(model, mesh, step):
    numbers = torch.Generator().manual_seed(10 * step + mesh.get_local_rank("replicate"))
    model(50 * torch.randn(16, 8, generator=numbers)).square().mean().backward()


def wholes(model):
    """Copies of the weights, those of cut weights of all shards."""
    parameters = (p.detach() for p in model.parameters())
    return [p.full_tensor().clone() if isinstance(p, DTensor) else p.clone() for p in parameters]


def frozen_shards(_, begins):
    """A cut weight is frozen from the first or from the third step on; then one replica's differs."""
    model, mesh = cut()
    model.up.requires_grad_(not begins)
    optimizer = replicated(
        [p for p in model.parameters() if p.requires_grad],
        model,
        mesh,
        dt.full(),
        safety=dt.Safety(on_desync="repair"),
    )
    for step in range(4):
        if step == 2:
            model.up.requires_grad_(False)
        backward(model, mesh, step)
        optimizer.step()
        optimizer.zero_grad()
    shard = model.up.weight.to_local()
    right = shard.clone()
    with torch.no_grad():
        shard += mesh.get_local_rank("replicate")
    optimizer.verify()
    return torch.equal(shard, right)


@pytest.mark.parametrize("begins", [True, False])
def test_weights_that_are_cut_over_a_node_may_be_frozen(begins):
    assert all(worlds.run_alone(frozen_shards, 2, 2, begins))


def other_shards(_):
    model, mesh = cut()
    model.requires_grad_(False)
    model.norm.requires_grad_(True)
    with torch.no_grad():
        model.up.weight.to_local()[:] += mesh.get_local_rank("replicate")
    try:
        replicated(model.norm.parameters(), model, mesh, dt.full()).set_up()
    except ValueError as error:
        return str(error)
    return ""


def test_frozen_shards_that_differ_between_replicas_are_refused_on_all_ranks():
    for text in worlds.run_alone(other_shards, 2, 2):
        assert "replica 1 local rank 0 has up.weight (shard) (frozen weights)" in text
        assert "replica 1 local rank 1 has up.weight (shard) (frozen weights)" in text


def own_statistics(_):
    """One optimizer trains only weights that all ranks of a node hold whole."""
    model, mesh = cut()
    whole = [*model.norm.parameters(), model.down.bias]
    matrices = [*model.up.parameters(), model.down.weight]
    both = [replicated(each, model, mesh, dt.full()) for each in (whole, matrices)]
    backward(model, mesh, 0)
    own = model.batch_norm.running_mean.clone()
    for optimizer in both:
        optimizer.step()
    both[0].synchronize()
    everyone = [torch.empty_like(own) for _ in range(4)]
    torch.distributed.all_gather(everyone, own)
    tensor_rank = mesh.get_local_rank("tensor")
    right = (everyone[tensor_rank] + everyone[tensor_rank + 2]) / 2
    return torch.equal(model.batch_norm.running_mean, right)


def test_statistics_of_a_rank_are_averaged_with_those_of_its_place_in_other_replicas():
    assert all(worlds.run_alone(own_statistics, 2, 2))


class Statistics(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8, affine=False)

    def forward(self, values):
        return self.norm(self.up(values)) * torch.arange(1.0, 9.0)


def averaged_in_nodes(mesh, elastic):
    """Each rank of a node has the whole model; a statistic of one rank is not finite."""
    model = Statistics()
    axis = dt.elastic(mesh, timeout_s=LIMIT_S) if elastic else mesh["replicate"]
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = dt.replicate(sgd, model, axis, dt.full(), intra_node=mesh["shard"])
    for step in range(2):
        numbers = torch.Generator().manual_seed(10 * step + dist.get_rank())
        model(torch.randn(16, 8, generator=numbers)).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=mesh.get_group("shard"))
        optimizer.step()
        optimizer.zero_grad()
        if not step and not dist.get_rank():
            model.norm.running_var[0] = torch.inf
        optimizer.synchronize()
    if elastic:
        axis.close()
    return model.norm.running_var.tolist()


@pytest.mark.parametrize("elastic", [False, True])
def test_statistics_of_one_rank_that_are_not_finite_stop_no_node(elastic):
    """The ranks of a node have other statistics, and run the same collectives for them."""
    first, second, *others = worlds.run_alone(averaged_in_nodes, 2, 2, elastic)
    assert others == [first, second]
    assert first != second and all(map(math.isfinite, first + second))
