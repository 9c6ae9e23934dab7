"""Every scheme against plain torch that says the same in a few lines. Laws 6, 7 and sharding invariance."""

import math
from functools import partial

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import detonation as dt
import worlds
from detonation.core.flat.tensors import local
from zoo import Heads, Plain, batch, built

pytestmark = pytest.mark.usefixtures("lasting_worlds")

STEPS = 10


def train(mesh, scheme, make, steps=STEPS, settle=False):
    """Full weights after training `ReferenceEngine`, by name. Never by sign: where replicas cancel, that is noise."""
    model = dt.shard(built(Plain), mesh)
    optimizer = dt.replicate(make(model.parameters()), model, mesh["replicate"], scheme)
    for step in range(steps):
        model(batch(mesh.get_rank(), step, 32)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if settle:
        optimizer.synchronize()
    return {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}


def gradients(model, ranks, step):
    """What a replica made of these ranks has as its gradient: the mean over their batches."""
    model.zero_grad()
    sum(model(batch(rank, step, 32)).mean() / len(ranks) for rank in ranks).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def close(mine, plain, **tolerance):
    for name, p in plain.items():
        torch.testing.assert_close(mine[name], p, **tolerance)


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def full_against_hsdp(mesh):
    mine = train(mesh, dt.full(), adamw)
    model = built(Plain)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)  # a 2-D mesh: torch's own hybrid sharding
    fully_shard(model, mesh=mesh)
    optimizer = adamw(model.parameters())
    for step in range(STEPS):
        model(batch(mesh.get_rank(), step, 32)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    close(
        mine, {name: p.full_tensor() for name, p in model.named_parameters()}, atol=1e-6, rtol=1e-6
    )


@pytest.mark.parametrize("replicas, shards", [(2, 1), (2, 2)])
def test_law_6_full_is_torch_hybrid_sharding(replicas, shards):
    worlds.run(full_against_hsdp, replicas, shards)


def unused_against_hsdp(mesh, make):
    """Heads that all use in turn, one that nobody uses: whether all is equal to torch's."""
    found = []
    for ours in (True, False):
        model = built(Heads)
        for part in model.children():
            fully_shard(part, mesh=mesh["shard"] if ours else mesh)
        fully_shard(model, mesh=mesh["shard"] if ours else mesh)
        optimizer = make(model.parameters())
        base = optimizer
        if ours:
            optimizer = dt.replicate(base, model, mesh["replicate"], dt.full())
        for step, heads in enumerate(["a", "a", "b", "a", "ab", "", "b"]):
            model(batch(mesh.get_rank(), step, 24), heads).backward()
            optimizer.step()
            optimizer.zero_grad()
        tensors = [local(p).detach() for p in model.parameters()]
        for parameter in model.parameters():
            state = base.state.get(parameter, {})
            tensors += [local(state[key]) for key in sorted(state)]
        found.append(tensors)
    assert len(found[0]) == len(found[1])
    return all(torch.equal(*pair) for pair in zip(*found, strict=True))


UNUSED = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("make", UNUSED.values(), ids=UNUSED)
@pytest.mark.parametrize("replicas, shards", [(2, 1), (2, 2)])
def test_law_6_full_is_hybrid_sharding_bit_for_bit_where_parameters_are_unused(
    replicas, shards, make
):
    assert all(worlds.run(unused_against_hsdp, replicas, shards, make))


def none_against_fsdp(mesh):
    mine = train(mesh, dt.none(), adamw)
    ranks = mesh.mesh[mesh.get_local_rank("replicate")].tolist()
    model = built(Plain)
    optimizer = adamw(model.parameters())
    for step in range(STEPS):
        gradients(model, ranks, step)
        optimizer.step()
    close(mine, dict(model.named_parameters()), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("replicas, shards", [(2, 1), (2, 2), (1, 2)])
def test_law_6_none_is_fsdp_alone(replicas, shards):
    worlds.run(none_against_fsdp, replicas, shards)


def one_replica(mesh):
    """With one node every lossless scheme is the plain optimizer, by the same code."""
    plain = train(mesh, dt.none(), adamw)
    close(train(mesh, dt.full(), adamw), plain, atol=0, rtol=0)
    close(train(mesh, dt.schemes.random(rate=1, decay=0), adamw), plain, atol=0, rtol=0)
    close(
        train(mesh, dt.diloco(every=2, outer_lr=1, outer_momentum=0), adamw),
        plain,
        atol=1e-6,
        rtol=1e-6,
    )


def test_law_6_one_replica_is_the_plain_optimizer():
    worlds.run(one_replica, 1, 2)


def plain_decoupled(mesh, extract, decay):
    """Decoupled momentum over replicas of one rank each; `extract(name, m, step)` is what is told."""
    model = built(Plain)
    optimizer = sgd(model.parameters())
    momenta = [
        {n: torch.zeros_like(p) for n, p in model.named_parameters()} for _ in range(mesh.size())
    ]
    for step in range(STEPS):
        sent = []
        for rank, momentum in enumerate(momenta):
            for name, g in gradients(model, [rank], step).items():
                momentum[name].mul_(decay).add_(g)
            sent.append({name: extract(name, m, step) for name, m in momentum.items()})
            for name, q in sent[-1].items():
                momentum[name].sub_(q)
        for name, p in model.named_parameters():
            p.grad = torch.stack([q[name] for q in sent]).mean(0)
        optimizer.step()
    return dict(model.named_parameters())


def plain_dct_top_k(name, m, step):
    """The 2 largest of every 16 DCT coefficients, each found by its definition."""
    n = torch.arange(16.0)
    waves = torch.stack(
        [
            torch.cos(math.pi * (n + 0.5) * k / 16) * math.sqrt((1 if k == 0 else 2) / 16)
            for k in range(16)
        ]
    )
    coefficients = m.reshape(-1, 16) @ waves.T
    smallest = coefficients.abs().sort(1, descending=True).values[:, 1:2]
    return (torch.where(coefficients.abs() >= smallest, coefficients, 0) @ waves).view_as(m)


def plain_tile_top_k(name, m, step):
    """The 5 largest of the 2-D DCT coefficients of every 16 x 16 tile; a bias is written into one line by line."""
    if m.dim() == 1:
        return plain_tile_top_k(
            name, torch.cat([m, m.new_zeros(256 - len(m))]).view(16, 16), step
        ).view(-1)[: len(m)]
    n = torch.arange(16.0)
    waves = torch.stack(
        [
            torch.cos(math.pi * (n + 0.5) * k / 16) * math.sqrt((1 if k == 0 else 2) / 16)
            for k in range(16)
        ]
    )
    sent = torch.zeros_like(m)
    for top in range(0, m.shape[0], 16):
        for left in range(0, m.shape[1], 16):
            tile = waves @ m[top : top + 16, left : left + 16] @ waves.T
            smallest = tile.abs().flatten().sort(descending=True).values[4]
            sent[top : top + 16, left : left + 16] = (
                waves.T @ torch.where(tile.abs() >= smallest, tile, 0) @ waves
            )
    return sent


def demo_against_plain(mesh, scheme, plain):
    close(train(mesh, scheme, sgd), plain_decoupled(mesh, plain, 0.9), atol=1e-6, rtol=1e-6)


def test_demo_is_the_papers_rule():
    worlds.run(demo_against_plain, 2, 1, dt.demo(topk=2, chunk=16, decay=0.9), plain_dct_top_k)


def test_demo_on_tiles_is_the_papers_rule_on_matrices():
    worlds.run(
        demo_against_plain, 2, 1, dt.demo(topk=5, chunk=16, tiles=True, decay=0.9), plain_tile_top_k
    )


def rotating_against_plain(mesh, scheme, comb):
    """Random and striding: zero what was sent, mean of the rest of the momentum at the same places."""

    def sent(name, m, step):
        rows = m.reshape(-1).clone()
        padded = torch.nn.functional.pad(rows, (0, -len(rows) % scheme.codec.selection.chunk))
        mask = comb(padded.view(-1, scheme.codec.selection.chunk), step)
        return (padded * mask.reshape(-1))[: len(rows)].view_as(m)

    close(train(mesh, scheme, sgd), plain_decoupled(mesh, sent, 0.9), atol=1e-6, rtol=1e-6)


def striding_comb(rows, step):
    return ((torch.arange(rows.shape[1]) - step) % 4 == 0).expand_as(rows)


def test_striding_is_a_comb_that_moves():
    worlds.run(
        rotating_against_plain, 2, 1, dt.schemes.striding(rate=1 / 4, decay=0.9), striding_comb
    )


def random_against_plain(mesh):
    """The subset depends on the place of a parameter in the flat: rows of 64, one parameter after the other."""
    scheme = dt.schemes.random(rate=1 / 4, decay=0.9)
    sizes = {name: p.numel() for name, p in built(Plain).named_parameters()}
    rows = {name: -(-size // 64) for name, size in sizes.items()}

    def sent(name, m, step):
        indices = scheme.codec.selection.indices(torch.zeros(sum(rows.values()), 64), step, 0)
        mask = (
            torch.zeros(sum(rows.values()), 64).scatter_(1, indices, 1.0).split(list(rows.values()))
        )
        return m * mask[list(rows).index(name)].reshape(-1)[: sizes[name]].view_as(m)

    close(train(mesh, scheme, sgd), plain_decoupled(mesh, sent, 0.9), atol=1e-6, rtol=1e-6)


def test_random_sends_the_same_fresh_subset_everywhere():
    worlds.run(random_against_plain, 2, 1)


def delay_against_plain(mesh):
    """One step of delay: the mean lands one step later."""
    scheme = dt.schemes.random(rate=1, decay=0, delay=1)
    mine = train(mesh, scheme, sgd, settle=True)
    model, here = built(Plain), {n: p.detach().clone() for n, p in built(Plain).named_parameters()}
    sent = [{n: torch.zeros_like(p) for n, p in here.items()} for _ in range(mesh.size())]
    for step in range(STEPS):
        late = sent
        model.load_state_dict(here)
        sent = [gradients(model, [rank], step) for rank in range(mesh.size())]
        here = {n: p - 0.1 * sum(q[n] for q in late) / len(late) for n, p in here.items()}
    here = {n: p - 0.1 * sum(q[n] for q in sent) / len(sent) for n, p in here.items()}
    close(mine, here, atol=1e-6, rtol=1e-5)


def test_a_delay_is_the_stated_rule():
    worlds.run(delay_against_plain, 2, 1)


def diloco_against_plain(mesh):
    mine = train(mesh, dt.diloco(every=4, outer_lr=0.7, outer_momentum=0.9), adamw, steps=12)
    models = [built(Plain) for _ in range(mesh.size())]
    inner = [adamw(model.parameters()) for model in models]
    anchor = built(Plain)
    outer = torch.optim.SGD(anchor.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for step in range(12):
        for rank, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            gradients(model, [rank], step)
            optimizer.step()
        if step % 4 == 3:
            for at, *theirs in zip(
                anchor.parameters(), *[m.parameters() for m in models], strict=True
            ):
                at.grad = torch.stack([at.detach() - p.detach() for p in theirs]).mean(0)
            outer.step()
            for model in models:
                model.load_state_dict(anchor.state_dict())
    close(mine, dict(anchor.named_parameters()), atol=1e-5, rtol=1e-5)


def test_diloco_is_the_papers_rule():
    worlds.run(diloco_against_plain, 2, 1)


def sparseloco_against_plain(mesh):
    """Top-k of error feedback + what moved, its mean taken off the anchor; fp32 so that only the rule is compared."""
    scheme = dt.schemes.sparseloco(
        every=4, topk=3, chunk=32, decay=0.9, precision="fp32", aggregate="mean"
    )
    mine = train(mesh, scheme, sgd, steps=12)
    models, anchor = (
        [built(Plain) for _ in range(mesh.size())],
        dict(built(Plain).named_parameters()),
    )
    inner = [sgd(model.parameters()) for model in models]
    errors = [{n: torch.zeros_like(p) for n, p in anchor.items()} for _ in models]
    for step in range(12):
        for rank, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            gradients(model, [rank], step)
            optimizer.step()
        if step % 4 == 3:
            sent = [{} for _ in models]
            for n, at in anchor.items():
                for model, error, tell in zip(models, errors, sent, strict=True):
                    error[n] = 0.9 * error[n] + at.detach() - model.get_parameter(n).detach()
                    rows = error[n].reshape(-1, 32)
                    least = rows.abs().sort(1, descending=True).values[:, 2:3]
                    tell[n] = torch.where(rows.abs() >= least, rows, 0).view_as(at)
                    error[n] = error[n] - tell[n]
                at.data -= sum(tell[n] for tell in sent) / len(sent)
            for model in models:
                model.load_state_dict({n: p.detach() for n, p in anchor.items()})
    close(mine, anchor, atol=1e-6, rtol=1e-5)


def test_sparseloco_is_the_papers_rule():
    worlds.run(sparseloco_against_plain, 2, 1)


def streaming_against_plain(mesh, keep):
    """torchft's schedule: every 6 / 2 steps the next of two layers lands, which left a step earlier."""
    outer = {"outer_lr": 0.5, "outer_momentum": 0.9, "precision": "fp32", "unit": "block"}
    mine = train(
        mesh,
        dt.schemes.streaming_diloco(6, fragments=2, delay=1, keep=keep, **outer),
        sgd,
        steps=16,
    )
    models, anchor = [built(Plain) for _ in range(mesh.size())], built(Plain).state_dict()
    weights, inner = (
        [dict(model.named_parameters()) for model in models],
        [sgd(m.parameters()) for m in models],
    )
    outer = {
        n: torch.optim.SGD([p], lr=0.5, momentum=0.9, nesterov=True) for n, p in anchor.items()
    }
    local_step, fragment, sent = 0, 0, {}
    for step in range(16):
        for rank, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            gradients(model, [rank], step)
            optimizer.step()
        local_step += 1
        if local_step == 3 - 1:
            sent = {
                n: anchor[n] - sum(w[n].detach() for w in weights) / 2
                for n in anchor
                if f"layers.{fragment}" in n
            }
        if local_step == 3:
            for n, moved in sent.items():
                anchor[n].grad = moved
                outer[n].step()
                for replica in weights:
                    replica[n].data = keep * replica[n].data + (1 - keep) * anchor[n]
            local_step, fragment = 0, 1 - fragment
    close(mine, weights[mesh.get_rank()], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("keep", [0.0, 0.5, 1.0])
def test_streaming_diloco_has_torchfts_schedule(keep):
    worlds.run(streaming_against_plain, 2, 1, keep)


def sparta_against_plain(mesh):
    """After every local step the columns that are due are averaged, of rows of 64, one parameter after the other."""
    scheme = dt.schemes.sparta(rate=1 / 4)
    mine = train(mesh, scheme, adamw, steps=6)
    models = [built(Plain) for _ in range(2)]
    inner, shapes = (
        [adamw(m.parameters()) for m in models],
        [p.shape for p in models[0].parameters()],
    )
    for step in range(6):
        flats = []
        for rank, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            gradients(model, [rank], step)
            optimizer.step()
            line = [p.detach().reshape(-1) for p in model.parameters()]
            flats.append(
                torch.cat([torch.nn.functional.pad(p, (0, -len(p) % 64)) for p in line]).view(
                    -1, 64
                )
            )
        due = (
            torch.zeros_like(flats[0])
            .scatter_(1, scheme.codec.selection.indices(flats[0], step, 0), 1.0)
            .bool()
        )
        for model, flat in zip(models, flats, strict=True):
            rows = torch.where(due, sum(flats) / 2, flat).split(
                [-(-s.numel() // 64) for s in shapes]
            )
            for p, part in zip(model.parameters(), rows, strict=True):
                p.data = part.reshape(-1)[: p.numel()].view(p.shape)
    close(mine, dict(models[mesh.get_rank()].named_parameters()), atol=1e-5, rtol=1e-5)


def test_sparta_is_the_stated_rule():
    worlds.run(sparta_against_plain, 2, 1)


def muloco_against_plain(mesh):
    """DiLoCo of what moved and what was not said of it before, rounded to bins that the two-bit code decodes to."""
    scheme = dt.muloco(every=3, outer_lr=0.7, outer_momentum=0.6, precision="2bit", decay=0.9)
    mine = train(mesh, scheme, sgd, steps=9)
    models, anchor = [built(Plain) for _ in range(2)], built(Plain)
    inner = [sgd(model.parameters()) for model in models]
    outer = torch.optim.SGD(anchor.parameters(), lr=0.7, momentum=0.6, nesterov=True)
    errors = [torch.zeros(sum(p.numel() for p in anchor.parameters()), 1) for _ in range(2)]
    for step in range(9):
        for rank, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            gradients(model, [rank], step)
            optimizer.step()
        if step % 3 == 2:
            said = []
            for model, error in zip(models, errors, strict=True):
                pairs = zip(anchor.parameters(), model.parameters(), strict=True)
                error.mul_(0.9).add_(torch.cat([(a - p).detach().reshape(-1, 1) for a, p in pairs]))
                code = scheme.codec.precision
                said.append(code.decode(code.encode(error), len(error), 1))
                error.sub_(said[-1])
            mean = (sum(said) / 2).split([p.numel() for p in anchor.parameters()])
            for p, part in zip(anchor.parameters(), mean, strict=True):
                p.grad = part.view(p.shape)
            outer.step()
            for model in models:
                model.load_state_dict(anchor.state_dict())
    close(mine, dict(anchor.named_parameters()), atol=1e-5, rtol=1e-4)


def test_muloco_is_diloco_with_error_feedback():
    worlds.run(muloco_against_plain, 2, 1)


def outer_degenerate_cases(mesh):
    """Without rounding error feedback has nothing to keep, and averaging with nobody changes nothing."""
    outer = {"every": 3, "outer_lr": 0.7, "outer_momentum": 0.5}
    diloco = train(mesh, dt.diloco(**outer), adamw, steps=12)
    close(
        train(mesh, dt.muloco(**outer, precision="fp32"), adamw, steps=12), diloco, atol=0, rtol=0
    )
    close(
        train(mesh, dt.schemes.sparta(), adamw), train(mesh, dt.none(), adamw), atol=1e-6, rtol=1e-6
    )


def test_law_6_one_replica_of_muloco_and_sparta():
    worlds.run(outer_degenerate_cases, 1, 2)


def sparta_of_everything(mesh):
    close(
        train(mesh, dt.schemes.sparta(rate=1), sgd),
        train(mesh, dt.full(), sgd),
        atol=1e-6,
        rtol=1e-6,
    )


def test_law_6_sparta_of_everything_is_synchronous_sgd():
    worlds.run(sparta_of_everything, 2, 2)


def diloco_every_step(mesh):
    mine = train(mesh, dt.diloco(every=1, outer_lr=1, outer_momentum=0), sgd)
    close(mine, train(mesh, dt.full(), sgd), atol=1e-6, rtol=1e-6)


def test_law_6_diloco_at_every_step_is_synchronous_sgd():
    worlds.run(diloco_every_step, 2, 2)


def flexdemo_with_equal_batches(mesh, scheme):
    """The shards of a weight of 64 x 32 hold whole rows of 16, so the same chunks are seen on any number of shards."""
    model = dt.shard(built(Plain), mesh)
    optimizer = dt.replicate(sgd(model.parameters()), model, mesh["replicate"], scheme)
    for step in range(STEPS):
        model(batch(mesh.get_local_rank("replicate"), step, 32)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.full_tensor().tolist() for name, p in model.named_parameters()}


def test_flexdemo_on_two_shards_is_demo_on_one():
    scheme = dt.demo(topk=2, chunk=16, decay=0.9)
    two = worlds.run(flexdemo_with_equal_batches, 2, 2, scheme)[0]
    one = worlds.run(flexdemo_with_equal_batches, 2, 1, scheme)[0]
    close(
        {k: torch.tensor(v) for k, v in two.items()},
        {k: torch.tensor(v) for k, v in one.items()},
        atol=1e-6,
        rtol=1e-6,
    )


def step_of(mesh, scheme, lr):
    model = dt.shard(built(Plain), mesh)
    start = {name: local(p).detach().clone() for name, p in model.named_parameters()}
    optimizer = dt.replicate(
        torch.optim.SGD(model.parameters(), lr=lr), model, mesh["replicate"], scheme
    )
    model(batch(mesh.get_rank(), 0, 32)).mean().backward()
    optimizer.step()
    return {name: local(p).detach() - start[name] for name, p in model.named_parameters()}


def lr_means_one_thing(mesh, scheme):
    once, four_times = step_of(mesh, scheme, 0.25), step_of(mesh, scheme, 1.0)
    for name, moved in once.items():
        torch.testing.assert_close(4 * moved, four_times[name], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    "scheme",
    [dt.full(), dt.demo(), dt.schemes.random(rate=1 / 4), dt.schemes.striding()],
    ids=lambda s: s.name,
)
def test_law_7_the_step_is_linear_in_lr(scheme):
    worlds.run(lr_means_one_thing, 2, 1, scheme)
