"""`comm_hook` in real worlds: the bits of `replicate` over the same replicas, under every setting of DDP."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import detonation as dt
import worlds
from covering import some
from zoo import GRADIENT, KINDS, Heads

pytestmark = pytest.mark.usefixtures("own_worlds")

FEW = [name for name in GRADIENT if name in KINDS]


class Net(nn.Module):
    """Awkward parameters: channels last, bf16, tied, frozen, and one that every other step leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.body = nn.ModuleList([nn.Linear(100, 31), nn.Linear(31, 100, bias=False)])
        self.tied = nn.Linear(31, 100, bias=False)
        self.tied.weight = self.body[1].weight
        self.coarse = nn.Linear(13, 3, dtype=torch.bfloat16)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.sometimes = nn.Linear(100, 7)
        self.never = nn.Parameter(torch.ones(5))

    def forward(self, x, often=True):  # [batch, 100] -> []
        hidden = self.body[0](x).tanh()
        out = self.body[1](hidden) + self.tied(hidden.sin())
        picture = self.kernel(out[:, :75].view(-1, 3, 5, 5)).square().sum((1, 2, 3))
        small = self.coarse(x[:, :13].bfloat16()).float().sum(1) + self.frozen.sum()
        return (picture + small + (self.sometimes(x).sum(1) if often else 0)).mean()


def data(rank, step, batch=4):
    return torch.randn(batch, 100, generator=torch.Generator().manual_seed(100 * step + rank))


def net():
    torch.manual_seed(0)
    return Net()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def weights(model):
    return torch.cat([p.detach().float().reshape(-1) for p in model.parameters()])


def by_replicate(axis, scheme, steps, node=None, often=None):
    """The weights after `steps` of the same training through `replicate`, and the bytes sent."""
    plain = net()
    model = (
        plain
        if node is None
        else DistributedDataParallel(
            plain, process_group=node.get_group(), find_unused_parameters=True
        )
    )
    optimizer = dt.replicate(sgd(plain), plain, axis, scheme, intra_node=node)
    for step in range(steps):
        model(data(dist.get_rank(), step), often or step % 2 == 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(plain), optimizer.stats.bytes_sent


def by_hook(scheme, steps, mesh=None, often=None, **settings):
    model = DistributedDataParallel(
        net(), bucket_cap_mb=0.01, find_unused_parameters=not often, **settings
    )
    hook, optimizer = dt.comm_hook(model, scheme, mesh), sgd(model)
    for step in range(steps):
        model(data(dist.get_rank(), step), often or step % 2 == 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model), hook.stats.bytes_sent


def same_as_replicate(mesh, names):
    found = {}
    for name in names:
        theirs, sent = by_replicate(mesh["replicate"], GRADIENT[name], 4)
        for settings in ({}, {"gradient_as_bucket_view": True}):
            mine, bytes_sent = by_hook(GRADIENT[name], 4, **settings)
            found[name, *settings] = torch.equal(mine, theirs) and bytes_sent == sent, mine
    return found


@some("names", [FEW, [*GRADIENT]], keep=[FEW])
def test_the_bits_of_replicate_under_every_scheme(names):
    first, second = worlds.run(same_as_replicate, 2, 1, names)
    assert {key for key, (same, _) in first.items() if not same} == set()
    assert {key for key in first if not torch.equal(first[key][1], second[key][1])} == set()


def over_a_node(mesh):
    theirs, sent = by_replicate(
        mesh["replicate"], dt.demo(topk=4, chunk=16), 4, mesh["shard"], often=True
    )
    mine, bytes_sent = by_hook(dt.demo(topk=4, chunk=16), 4, mesh, often=True, static_graph=True)
    return (
        torch.equal(mine, theirs),
        bytes_sent == sent,
        mine,
    )  # DDP made other buckets after the first step


def test_the_ranks_of_a_node_average_first_and_send_each_a_part():
    ranks = worlds.run(over_a_node, 2, 2)
    assert all(same and counted for same, counted, _ in ranks)
    assert all(torch.equal(mine, ranks[0][2]) for _, _, mine in ranks)


def interrupted(mesh):
    """The weights of a run, of one that stops and goes on, and of one that goes on without the memory."""

    def started():
        model = DistributedDataParallel(
            net(), gradient_as_bucket_view=True, find_unused_parameters=True
        )
        return model, dt.comm_hook(model, dt.demo(topk=1, chunk=16)), sgd(model)

    def train(model, optimizer, steps):
        for step in steps:
            with model.no_sync():
                model(data(mesh.get_rank(), step)).backward()
            model(data(mesh.get_rank(), 100 + step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    model, hook, optimizer = started()
    train(model, optimizer, range(3))
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), hook.state_dict()])
    whole = train(model, optimizer, range(3, 6))
    found = []
    for with_memory in (True, False):
        model, hook, optimizer = started()
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        if with_memory:
            hook.load_state_dict(saved[2])
        found.append(torch.equal(train(model, optimizer, range(3, 6)), whole))
    return [
        *found,
        hook.step_count,
        worlds.caught(hook.load_state_dict, {"replica7-shard0": {}})[1],
    ]


def test_a_loaded_state_goes_on_exactly_and_no_sync_accumulates():
    for exact, without_memory, steps, refusal in worlds.run(interrupted, 2, 1):
        assert exact and not without_memory
        assert steps == 3  # one for each backward outside no_sync
        assert "replica7-shard0" in refusal


def accumulated(mesh):
    """Two micro-batches under `no_sync`, and the one batch that they make."""
    found = []
    for parts in (1, 2):
        model = DistributedDataParallel(nn.Linear(8, 4))
        with torch.no_grad():
            model.module.weight.fill_(0.5)
        hook = dt.comm_hook(model, "demo")
        for step in range(2):
            batch = torch.arange(32.0).view(4, 8).add(step + mesh.get_rank()).chunk(parts)
            for part in batch[:-1]:
                with model.no_sync():
                    (model(part).sum() / 4).backward()
            (model(batch[-1]).sum() / 4).backward()
            found.append(model.module.weight.grad.clone())
            model.zero_grad()
        found.append(hook.step_count)
    return found


def test_micro_batches_are_one_message():
    first, second, steps, same_first, same_second, same_steps = worlds.run(accumulated, 2, 1)[0]
    torch.testing.assert_close([first, second], [same_first, same_second])
    assert steps == same_steps == 2


class Skipping(nn.Module):
    """Uses its second part where it is told to."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x, use):
        return self.second(self.first(x)) if use else self.first(x)


def unused(mesh):
    """The gradients of a part that is used in the first step alone, by how they are kept."""
    found = {}
    for as_views in (False, True):
        for to_none in (True, False):
            torch.manual_seed(0)
            model = DistributedDataParallel(
                Skipping(), find_unused_parameters=True, gradient_as_bucket_view=as_views
            )
            dt.comm_hook(model, dt.demo(topk=1, chunk=16, decay=1.0))
            found[as_views, to_none] = []
            for step in range(3):
                model(data(mesh.get_rank(), step)[:, :16], step == 0).square().mean().backward()
                gradient = model.module.second.weight.grad
                found[as_views, to_none].append(None if gradient is None else gradient.clone())
                model.zero_grad(set_to_none=to_none)
    return found


def decayed(mesh):
    """The weight that no rank uses after steps of AdamW: by the hook, and by `replicate`."""
    found = []
    for hooked in (True, False):
        plain = net()
        adam = torch.optim.AdamW(plain.parameters(), lr=0.1, weight_decay=0.5)
        model = DistributedDataParallel(plain, find_unused_parameters=True) if hooked else plain
        kept = (
            dt.comm_hook(model, dt.full())
            if hooked
            else dt.replicate(adam, plain, mesh["replicate"], dt.full())
        )
        for step in range(2):
            model(data(dist.get_rank(), step)).backward()
            (adam if hooked else kept).step()
            adam.zero_grad()
        found.append(plain.never.tolist())
    return found


def test_a_parameter_that_no_rank_uses_is_left_alone_as_under_replicate():
    for found in worlds.run(decayed, 2, 1):
        assert found == [[1.0] * 5] * 2


def test_an_unused_parameter_has_no_gradient_and_zeros_that_were_kept_are_one():
    for found in worlds.run(unused, 2, 1):
        for as_views in (False, True):
            first, *later = found[as_views, True]
            assert first.any() and later == [None, None]
            assert all(gradient.any() for gradient in found[as_views, False])  # of the memory


def against_ddp(mesh, node, as_views):
    """Heads that ranks use in turn: whether the weights are those of DDP alone."""
    plan = [("a", "a"), ("ab", "b"), ("b", "b"), ("", "a"), ("a", "b"), ("c", "")]
    found = []
    for hooked in (True, False):
        torch.manual_seed(0)
        model = DistributedDataParallel(
            Heads(), find_unused_parameters=True, gradient_as_bucket_view=as_views
        )
        if hooked:
            dt.comm_hook(model, dt.full(), mesh if node else None)
        adam = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        for step, heads in enumerate(plan):
            rank = dist.get_rank()
            model(data(rank, step)[:, :24], heads[rank % 2]).backward()
            adam.step()
            adam.zero_grad()
        found.append(weights(model))
    return torch.equal(*found) if dist.get_world_size() == 2 else torch.allclose(*found, atol=1e-6)


@pytest.mark.parametrize("as_views", [False, True])
@pytest.mark.parametrize("node", [False, True])
def test_full_is_ddp_alone_where_parameters_are_unused(node, as_views):
    assert all(worlds.run(against_ddp, *((2, 2) if node else (2, 1)), node, as_views))


def faulty(mesh):
    model = DistributedDataParallel(net(), find_unused_parameters=True)
    hook = dt.comm_hook(model, dt.demo(topk=1, chunk=16))
    batch = data(mesh.get_rank(), 0)
    if mesh.get_rank() == 1:
        batch[0, 0] = torch.nan
    return worlds.caught(model(batch).backward), hook.stats.bytes_sent > 0


def test_a_gradient_that_is_not_finite_ends_backward_on_all_ranks_and_is_named():
    for (kind, text), sent in worlds.run_alone(faulty, 2, 1):
        assert kind == "NonFiniteGradient" and "on replica 1" in text and "kernel.weight" in text
        assert sent


def refused(mesh):
    model = DistributedDataParallel(nn.Linear(8, 1))
    other = DistributedDataParallel(nn.Linear(8, 1))
    dt.comm_hook(other, "demo")
    sparse = DistributedDataParallel(nn.Embedding(8, 4, sparse=True))
    dt.comm_hook(sparse, "demo")
    mixed = DistributedDataParallel(nn.Linear(8, 1))
    mixed.mixed_precision = object()
    return {
        "plain": worlds.caught(dt.comm_hook, model.module, "demo"),
        "parameters": worlds.caught(dt.comm_hook, model, dt.diloco()),
        "nothing": worlds.caught(dt.comm_hook, model, "none"),
        "function": worlds.caught(dt.comm_hook, model, dt.demo),
        "twice": worlds.caught(dt.comm_hook, other, "demo"),
        "mesh": worlds.caught(dt.comm_hook, model, "demo", mesh["replicate"]),
        "mixed": worlds.caught(dt.comm_hook, mixed, "demo"),
        "sparse": worlds.caught(sparse(torch.tensor([1, 2])).sum().backward),
        "keyword": worlds.caught(lambda: dt.comm_hook(model, "demo", topk=2)),
    }


def test_what_a_hook_cannot_do_is_refused_in_one_line():
    found = worlds.run_alone(refused, 2, 1)[0]
    expected = {
        "plain": ("TypeError", "DistributedDataParallel model, got Linear: use replicate"),
        "parameters": ("ValueError", "diloco does not exchange the gradients of each step"),
        "nothing": ("ValueError", "none does not exchange the gradients"),
        "function": ("TypeError", "call it, demo()"),
        "twice": ("ValueError", "has a communication hook"),
        "mesh": ("ValueError", 'must be ("replicate", "shard") over the ranks [0, 1]'),
        "mixed": ("ValueError", "use torch.autocast"),
        "sparse": ("ValueError", "use sparse=False"),
        "keyword": ("TypeError", "'topk'"),
    }
    assert found.keys() == expected.keys()
    for name, (kind, text) in expected.items():
        assert found[name][0] == kind and text in found[name][1], (name, found[name])
        assert "\n" not in found[name][1]
