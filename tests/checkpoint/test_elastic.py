"""Elastic loading: another number of shards or replicas. Weights are exact, and all that is still unsent is kept."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import detonation as dt
import worlds
from covering import some
from detonation.checkpoint import snapshot
from detonation.checkpoint.elastic import Elastic, memory_sources
from detonation.checkpoint.files.reader import Box
from detonation.checkpoint.verify import verify
from detonation.core.flat.tensors import digest, local
from detonation.core.link import Coordinates
from worlds import caught
from zoo import SCHEMES, Menagerie, Plain, batch, built

pytestmark = pytest.mark.usefixtures("lasting_worlds")

CHAIN = [(2, 2), (2, 4), (2, 1), (4, 1), (2, 1), (3, 1)]
"""Replicas x shards, one world after the other: shards 2 -> 4 -> 1, then replicas 2 -> 4 -> 2 -> 3."""
SHORT = [(3, 1), (2, 2), (3, 1)]
"""Both fewer and more of each."""
SAVED = [0, 4, 6, 8, 10, 12, 14]
"""The steps after which worlds are saved: in the middle of rounds, and with messages on their way."""
CHOSEN = ["demo", "demo-owner", "demo-tiles-64-sign", "sparseloco", "streaming"]


def start(mesh, scheme, kind):
    model = dt.shard(built(kind), mesh)
    base = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, dt.replicate(base, model, mesh["replicate"], scheme)


def advance(model, optimizer, steps, width):
    for step in steps:
        model(batch(dist.get_rank(), step, width)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(parameter, tensor):
    """A tensor that is sharded like `parameter`, as a whole, in float64."""
    if local(parameter) is parameter:
        return tensor.double()
    mesh, placements = parameter.device_mesh, parameter.placements
    sharded = type(parameter.data).from_local(
        tensor, mesh, placements, shape=parameter.shape, stride=parameter.stride()
    )
    return sharded.full_tensor().double()


def held(mesh, model, optimizer):
    """The state that must survive: the means over the replicas of weights, moments and residuals, each as a whole."""
    found = {}
    for name, parameter in model.named_parameters():
        found[f"weight {name}"] = whole(parameter, local(parameter.detach()))
        for key, value in optimizer.base.state.get(parameter, {}).items():
            found[f"{key} {name}"] = (
                whole(parameter, local(value)) if value.ndim else value.double()
            )
    for level, replicator in enumerate(optimizer.set_up()):
        channel, state = replicator.channel, replicator.local_state().named()
        residuals = (
            server_residuals(channel, state["server_residual"])
            if "server_residual" in state
            else [0] * len(channel.layout.slots)
        )
        for slot, rest in zip(channel.layout.slots, residuals, strict=True):
            parameter = model.get_parameter(slot.name)
            for kind in ("residual", "anchor", "momentum_buffer", "update0", "update1", "arriving"):
                if f"{kind}.{slot.name}" in state:
                    tensor = state[f"{kind}.{slot.name}"]
                    found[f"{level}.{kind} {slot.name}"] = whole(
                        parameter, tensor + rest if kind == "residual" else tensor
                    )
    group = mesh.get_group("replicate")
    for tensor in found.values():
        dist.all_reduce(tensor, group=group)
        tensor /= mesh["replicate"].size()
    return found


def server_residuals(channel, own_rows):
    """The server residuals of all owners, in the coordinates of the parameters."""
    gathered = [torch.empty_like(own_rows) for _ in range(channel.link.replicas)]
    dist.all_gather(gathered, own_rows, group=channel.link._communicator._group)
    codec = channel.engine.codec
    rows = channel.exchange.owners.collect(gathered)
    return channel.layout.parts(codec.basis.inverse(rows))


def one_world(mesh, folder, names, kind, width, turn):
    """Loads the checkpoint of the world before, compares the state with its state, trains on and saves."""
    differences = {}
    for name in names:
        model, optimizer = start(mesh, SCHEMES[name], kind)
        if turn:
            loaded = dt.load_checkpoint(f"{folder}/{name}", model, optimizer)
            assert (
                loaded.step == SAVED[turn]
                and f"to {mesh.size(0)} x {mesh.size(1)}" in loaded.merged
            )
            before = torch.load(f"{folder}/{name}.held", weights_only=True)
            differences[name] = relative_differences(before, held(mesh, model, optimizer))
        advance(model, optimizer, range(SAVED[turn], SAVED[turn + 1]), width)
        now = held(mesh, model, optimizer)
        dt.save_checkpoint(f"{folder}/{name}", model, optimizer)
        if dist.get_rank() == 0:
            torch.save(now, f"{folder}/{name}.held")
    return differences


def relative_differences(before, now):
    """The largest difference of each kind, relative to the norm."""
    assert before.keys() == now.keys()
    shares = {}
    for key, tensor in before.items():
        kind = key.split()[0]
        share = float((tensor - now[key]).norm() / tensor.norm().clamp(min=1e-30))
        shares[kind] = max(share, shares.get(kind, 0.0))
    return shares


def exactly(name, kind):
    """True where replicas agree bitwise between any two steps, so that not a bit may change."""
    local_state = SCHEMES[name].signal == "parameters"
    return not (
        kind.endswith("residual") or (local_state and kind in ("weight", "exp_avg", "exp_avg_sq"))
    )


CHAINS = {
    "plain": (Plain, 32, CHOSEN, SHORT),
    "awkward": (Menagerie, 257, ["demo-owner"], [(2, 2), (1, 3), (3, 1)]),
    "six worlds": (Plain, 32, CHOSEN, CHAIN),
}


@pytest.mark.long_cases("awkward")
@some("way", CHAINS, keep=["plain", "awkward"])
def test_shards_and_replicas_come_and_go_and_nothing_unsent_is_lost(tmp_path, way):
    kind, width, names, chain = CHAINS[way]
    for turn, (replicas, shards) in enumerate(chain):
        for rank in worlds.run(one_world, replicas, shards, tmp_path, names, kind, width, turn):
            for name, shares in rank.items():
                wrong = {k: s for k, s in shares.items() if s > (0 if exactly(name, k) else 1e-6)}
                assert not wrong, f"{name} in a world of {replicas} x {shards}"


def memories(mesh, folder):
    """The memory of each replica: saved by 2 replicas, and loaded by 3."""
    model, optimizer = start(mesh, dt.demo(topk=4, chunk=16), Plain)
    if mesh.size(0) == 2:
        advance(model, optimizer, range(3), 32)
        dt.save_checkpoint(folder, model, optimizer)
    else:
        dt.load_checkpoint(folder, model, optimizer)
    return {k: v.tolist() for k, v in dt.replica_state(optimizer).items() if "residual" in k}


def test_a_joiner_starts_with_zero_and_the_others_make_up_for_it(tmp_path):
    two, three = worlds.run(memories, 2, 1, tmp_path), worlds.run(memories, 3, 1, tmp_path)
    for key in two[0]:
        before, after = ([torch.tensor(rank[key]) for rank in world] for world in (two, three))
        assert torch.equal(after[2], torch.zeros_like(after[2]))
        torch.testing.assert_close(
            after[:2], [tensor * 3 / 2 for tensor in before], rtol=1e-6, atol=0
        )


def resized(mesh, before, after):
    model, optimizer = start(mesh, dt.demo(topk=4, chunk=16), Plain)
    if before is None:
        advance(model, optimizer, range(3), 32)
    else:
        dt.load_checkpoint(before, model, optimizer)
    dt.save_checkpoint(after, model, optimizer)
    return {k: v.tolist() for k, v in dt.replica_state(optimizer).items() if "residual" in k}


def test_the_last_replica_goes_on_with_the_mean_of_the_memories(tmp_path):
    first, second, third = (tmp_path / name for name in "abc")
    two = worlds.run(resized, 2, 1, None, first)
    (one,) = worlds.run(resized, 1, 1, first, second)
    again = worlds.run(resized, 2, 1, second, third)
    for key, alone in one.items():
        before, after = ([torch.tensor(rank[key]) for rank in world] for world in (two, again))
        torch.testing.assert_close(torch.tensor(alone), sum(before) / 2, rtol=1e-6, atol=1e-7)
        assert torch.tensor(alone).any()
        torch.testing.assert_close(after[0], 2 * torch.tensor(alone), rtol=1e-6, atol=0)
        assert not after[1].any()


@pytest.mark.parametrize("before", range(1, 8))
@pytest.mark.parametrize("now", range(1, 8))
def test_every_memory_goes_to_exactly_one_replica(before, now):
    assert sorted(i for j in range(now) for i in memory_sources(j, before, now)) == list(
        range(before)
    )


def alone(mesh, folder):
    model, optimizer = start(mesh, dt.none(), Plain)
    if mesh.size(0) == 2:
        return str(dt.save_checkpoint(folder, model, optimizer))
    try:
        dt.load_checkpoint(folder, model, optimizer)
    except ValueError as error:
        return str(error)


def test_replicas_without_an_exchange_cannot_be_merged(tmp_path):
    worlds.run(alone, 2, 1, tmp_path)
    (line,) = worlds.run(alone, 1, 1, tmp_path)
    assert (
        "was saved by 2 replicas, not 1: the scheme exchanges nothing, so the replicas have no common"
        in line
    )


class Normed(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 8))


def with_buffers(mesh, folder):
    model, optimizer = start(mesh, dt.loco(), Normed)
    if mesh.size() == 2:
        advance(model, optimizer, range(3), 32)
        own = model[1].running_mean.clone()
        dt.save_checkpoint(folder, model, optimizer)
    else:
        dt.load_checkpoint(folder, model, optimizer)
        own = model[1].running_mean.clone()
    return own, int(model[1].num_batches_tracked)


def test_buffers_become_their_mean_in_a_world_of_another_shape(tmp_path):
    (first, _), (second, _) = worlds.run(with_buffers, 2, 1, tmp_path)
    assert not torch.equal(first, second)
    for replicas, shards in ((1, 1), (2, 2)):
        for mean, batches in worlds.run(with_buffers, replicas, shards, tmp_path):
            torch.testing.assert_close(mean, (first + second) / 2)
            assert batches == 3


def whole_on_each_rank(mesh, folder, fresh):
    """Ranks of a node that hold the model whole; (weights, memory) of each."""
    model, axis = built(Plain), mesh["shard"] if mesh.size(1) > 1 else None
    base = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = dt.replicate(
        base, model, mesh["replicate"], dt.demo(topk=4, chunk=16), intra_node=axis
    )
    if fresh:
        for step in range(3):  # the ranks of a node have the same gradient, as after an average
            model(batch(mesh.get_local_rank("replicate"), step, 32)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        dt.save_checkpoint(folder, model, optimizer)
        merged = ""
    else:
        merged = dt.load_checkpoint(folder, model, optimizer).merged
    kept = [t.clone() for k, t in dt.replica_state(optimizer).items() if "residual" in k]
    return (
        optimizer.coordinates.name,
        merged,
        [p.detach().clone() for p in model.parameters()],
        kept,
    )


def test_a_model_that_each_rank_of_a_node_holds_whole_is_saved_and_loaded(tmp_path):
    saved = worlds.run(whole_on_each_rank, 2, 2, tmp_path, True)
    assert [name for name, *_ in saved] == [f"replica{r}-shard{s}" for r in (0, 1) for s in (0, 1)]
    again = worlds.run(whole_on_each_rank, 2, 2, tmp_path, False)
    assert {merged for _, merged, *_ in again} == {"exactly as saved"}
    alone = worlds.run(whole_on_each_rank, 2, 1, tmp_path, False)
    for (_, _, weights, memory), before in [
        *zip(again, saved, strict=True),
        *zip(alone, saved[::2], strict=True),
    ]:
        assert all(map(torch.equal, weights, before[2])) and all(
            map(torch.equal, memory, before[3])
        )


def one_matrix(mesh, folder):
    """Of a single row: with two shards one has all of it, and only there owners have something to own."""
    torch.manual_seed(0)
    model = dt.shard(nn.Linear(4096, 1, bias=False), mesh)
    base = torch.optim.SGD(model.parameters(), lr=1e-6)
    optimizer = dt.replicate(base, model, mesh["replicate"], dt.loco("sign"))
    if mesh.size(1) == 2:
        for step in range(4):
            model(batch(mesh.get_local_rank("replicate"), step, 4096)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        dt.save_checkpoint(folder, model, optimizer)
    else:
        dt.load_checkpoint(folder, model, optimizer)
    return {
        key: float(t.square().sum())
        for key, t in dt.replica_state(optimizer).items()
        if "residual" in key
    }


def test_server_residuals_of_one_shard_alone_are_not_dropped(tmp_path):
    before = worlds.run(one_matrix, 3, 2, tmp_path)[::2]
    assert all(kept["0.server_residual"] > 0 for kept in before)
    for kept, now in zip(before, worlds.run(one_matrix, 3, 1, tmp_path), strict=True):
        assert now == pytest.approx(
            kept, rel=1e-2
        )  # but for rows that fill the last owner's share up


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.common = nn.Linear(32, 8)
        self.experts = nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 1)])

    def forward(self, x, expert):
        return self.experts[expert](self.common(x))


def with_experts(mesh, folder):
    """The base optimizer's state by parameter; the first replica uses one expert, the second one both."""
    model, optimizer = start(mesh, dt.diloco(every=4), Experts)
    replica = mesh.get_local_rank("replicate")
    if mesh.size(0) == 2 and mesh.size(1) == 1:
        for step in range(3):
            model(batch(replica, step, 32), replica and step % 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        report = verify(dt.save_checkpoint(folder, model, optimizer))
        assert report.good and report.compared == 12, report.line()
    else:
        dt.load_checkpoint(folder, model, optimizer)
    return {
        name: {
            key: whole(p, local(t)) if t.ndim else t
            for key, t in optimizer.base.state.get(p, {}).items()
        }
        for name, p in model.named_parameters()
    }


def test_optimizer_state_that_some_replicas_lack_is_the_mean_of_the_others(tmp_path):
    first, second = worlds.run(with_experts, 2, 1, tmp_path)
    assert not first["experts.1.weight"] and second["experts.1.weight"]["step"] == 1
    for shape in ((1, 1), (3, 1), (2, 2)):
        for found in worlds.run(with_experts, *shape, tmp_path):
            for name, state in found.items():
                having = [saved[name] for saved in (first, second) if saved[name]]
                for key in ("step", "exp_avg", "exp_avg_sq"):
                    mean = torch.stack([saved[key].double() for saved in having]).mean(0)
                    torch.testing.assert_close(state[key].double(), mean)


class Cut(nn.Module):
    """A matrix over two ranks, by rows or by columns."""

    def __init__(self, mesh, dim):
        super().__init__()
        self.weight = nn.Parameter(
            distribute_tensor(torch.arange(16.0).view(4, 4), mesh["shard"], [Shard(dim)])
        )

    def forward(self, x):
        return (x @ self.weight.T).full_tensor()


def cut_otherwise(mesh, folder):
    written, read = (Cut(mesh, dim) for dim in (0, 1))
    for model, act in (written, dt.save_checkpoint), (read, dt.load_checkpoint):
        base = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = dt.replicate(base, model, mesh["replicate"], dt.full())
        found = caught(act, folder, model, optimizer)
    return found


def test_as_many_shards_that_are_cut_otherwise_are_refused(tmp_path):
    for kind, text in worlds.run(cut_otherwise, 2, 2, str(tmp_path)):
        assert kind == "ValueError" and "weight was sharded differently" in text


class RowMeans(torch.optim.SGD):
    """An optimizer that keeps numbers of its own shard, which have no parameter's shape."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["rows"] = local(parameter.detach())[:, :1].mean(1)[:1].clone()
        return super().step(closure)


def of_one_shard(mesh, folder, save):
    model = dt.shard(built(Plain), mesh)
    for parameter in [*model.parameters()]:
        parameter.requires_grad_(parameter.ndim > 1)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = dt.replicate(RowMeans(trained, lr=0.1), model, mesh["replicate"], dt.full())
    if save:
        model(batch(mesh.get_local_rank("replicate"), 0, 32)).mean().backward()
        optimizer.step()
        dt.save_checkpoint(folder, model, optimizer)
        return [local(optimizer.state[parameter]["rows"]) for parameter in trained]
    error = caught(dt.load_checkpoint, folder, model, optimizer)
    return error, [optimizer.state[parameter].get("rows") for parameter in trained]


def test_state_of_one_shard_alone_stays_on_it_or_is_refused(tmp_path):
    saved = worlds.run(of_one_shard, 2, 2, str(tmp_path), True)
    for shard, ((kind, _), rows) in enumerate(worlds.run(of_one_shard, 1, 2, str(tmp_path), False)):
        assert kind == "nothing" and all(
            torch.equal(*pair) for pair in zip(rows, saved[shard], strict=True)
        )
    for (kind, text), _ in worlds.run(of_one_shard, 2, 1, str(tmp_path), False):
        assert kind == "ValueError" and "differs between shards: resume with 2 shards" in text


def other_base(mesh, folder):
    """A replica resumes beside other frozen weights; an earlier version saved no checksum of these."""
    model = built(Plain)
    model.layers[0].requires_grad_(False)
    trained = torch.optim.SGD(model.layers[1].parameters(), lr=0.1)
    optimizer = dt.replicate(trained, model, mesh["replicate"], dt.full())
    with patch.object(snapshot, "FROZEN", "ignored."):
        dt.save_checkpoint(folder, model, optimizer, frozen=False)
    with torch.no_grad():
        model.layers[0].weight += mesh.get_rank()
    return caught(dt.load_checkpoint, folder, model, optimizer)


def test_frozen_weights_are_compared_after_a_load(tmp_path):
    for kind, text in worlds.run(other_base, 2, 1, str(tmp_path)):
        assert kind == "Mismatch" and "layers.0.weight (frozen weights)" in text


class Close:
    """A checkpoint of two replicas that were close to each other, and not equal."""

    manifest = SimpleNamespace(replicas=2, shards=1)

    def file(self, replica, shard):
        return SimpleNamespace(moved={"weight": 1.0})

    def part(self, replica, key, box):
        return torch.full(box.shape, 1.0 + replica)


@pytest.mark.parametrize("now", [1, 2, 3, 4])
def test_replicas_that_were_close_begin_equal_in_a_world_of_another_shape(now):
    """Of several weights that differ a little all of them get the same."""
    box = Box((3,), (0,), (3,))
    for replica in range(now):
        elastic = Elastic(Close(), Coordinates(replica, now, 0, 1))
        assert elastic.agreed("weight", box, alike=True).tolist() == [1.0] * 3


def on_levels(mesh, shape, schemes, shards=1):
    """A model on racks x nodes x shards, with one scheme in a rack and one between racks."""
    names = ("rack", "node", "shard")
    racks = init_device_mesh("cpu", (*shape, shards), mesh_dim_names=names)
    model = built(Plain)
    if shards > 1:
        fully_shard(model, mesh=racks["shard"])
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    levels = [(racks["node"], schemes[0]), (racks["rack"], schemes[1])]
    return model, dt.replicate(sgd, model, levels=levels)


TIERS = (dt.full(), dt.demo(topk=4, chunk=16))


def saved_on_levels(mesh, folder, shape, schemes):
    model, optimizer = on_levels(mesh, shape, schemes)
    advance(model, optimizer, range(3), 32)
    return dt.save_checkpoint(folder, model, optimizer)


def loaded_on_levels(mesh, folder, shapes):
    """What is said, and whether the weights stay as they were where the load is refused."""
    found = []
    for shape in shapes:
        model, optimizer = on_levels(mesh, shape, TIERS)
        before = digest(model.parameters())
        kind, text = caught(dt.load_checkpoint, folder, model, optimizer)
        found.append((kind, text, before == digest(model.parameters())))
    return found


def test_levels_of_other_sizes_are_refused(tmp_path):
    """Replicas of a rack would get memories that differ, and drift apart."""
    path = worlds.run(saved_on_levels, 4, 1, tmp_path, (2, 2), TIERS)[0]
    said = f"{path} was saved with levels of [2, 2] replicas, innermost first, this run has levels"
    remedy = "resume with levels of [2, 2] replicas"
    of_four = worlds.run(loaded_on_levels, 4, 1, tmp_path, [(4, 1), (1, 4), (2, 2)])
    of_two = worlds.run(loaded_on_levels, 2, 1, tmp_path, [(2, 1)])
    for found, sizes in ((of_four, ([1, 4], [4, 1])), (of_two, ([1, 2],))):
        refused = [("ValueError", f"{said} of {now}: {remedy}", True) for now in sizes]
        assert [rank[:2] for rank in found] == [refused] * len(found)
    assert [rank[2][0] for rank in of_four] == ["nothing"] * 4


def memories_on_levels(mesh, folder, shape):
    """The memory between racks, of a world that saves or of one that loads."""
    model, optimizer = on_levels(mesh, shape, TIERS)
    return outer_memories(folder, model, optimizer, saves=shape == (2, 2))


def outer_memories(folder, model, optimizer, saves):
    if saves:
        advance(model, optimizer, range(3), 32)
        dt.save_checkpoint(folder, model, optimizer)
    else:
        dt.load_checkpoint(folder, model, optimizer)
    state = optimizer.set_up()[-1].local_state().named()
    return torch.cat([value.flatten() for key, value in state.items() if "residual" in key])


@pytest.mark.parametrize("racks", [1, 3])
def test_another_number_of_racks_loads_and_nodes_of_a_rack_have_equal_memories(tmp_path, racks):
    saved = worlds.run(memories_on_levels, 4, 1, tmp_path, (2, 2))
    loaded = worlds.run(memories_on_levels, 2 * racks, 1, tmp_path, (racks, 2))
    assert saved[0].count_nonzero() and not torch.equal(saved[0], saved[2])
    for rack in range(racks):
        assert torch.equal(loaded[2 * rack], loaded[2 * rack + 1])
    # the mean over the racks is kept
    torch.testing.assert_close(sum(loaded) / racks, sum(saved) / 2)


def memories_in_three_tiers(mesh, folder, sites):
    names = ("site", "rack", "node")
    tiers = init_device_mesh("cpu", (sites, 1, 2), mesh_dim_names=names)
    model = built(Plain)
    schemes = {"node": dt.full(), "rack": dt.full(), "site": TIERS[1]}
    levels = [(tiers[name], scheme) for name, scheme in schemes.items()]
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    return outer_memories(folder, model, dt.replicate(sgd, model, levels=levels), saves=sites == 2)


def test_a_site_alone_loads_what_two_sites_with_one_rack_each_saved(tmp_path):
    saved = worlds.run(memories_in_three_tiers, 4, 1, tmp_path, 2)
    one, other = worlds.run(memories_in_three_tiers, 2, 1, tmp_path, 1)
    assert torch.equal(one, other)
    torch.testing.assert_close(one, (saved[0] + saved[2]) / 2)


def without_sizes(mesh, folder, shape):
    with patch.object(snapshot, "LEVEL_SIZES", "unknown"):
        saved_on_levels(mesh, folder, shape, TIERS)
    model, optimizer = on_levels(mesh, shape, TIERS)
    return dt.load_checkpoint(folder, model, optimizer).merged


def test_levels_saved_without_their_sizes_need_as_many_replicas(tmp_path):
    said = (
        "exactly as saved; an older version saved it without the sizes of its levels: not compared"
    )
    assert worlds.run(without_sizes, 2, 1, tmp_path, (2, 1)) == [said] * 2
    refused = worlds.run(loaded_on_levels, 4, 1, tmp_path, [(2, 2)])
    for ((kind, text, same),) in refused:
        assert kind == "ValueError" and same
        assert "by 2 replicas on levels of unknown sizes, not by 4: resume with" in text


def on_one_axis(mesh, folder):
    model = built(Plain)
    levels = [(mesh["replicate"], scheme) for scheme in (dt.schemes.sparta(1 / 4), dt.diloco(4))]
    optimizer = dt.replicate(torch.optim.SGD(model.parameters(), lr=0.1), model, levels=levels)
    if mesh.size() == 2:
        advance(model, optimizer, range(3), 32)
        dt.save_checkpoint(folder, model, optimizer)
        return ""
    return dt.load_checkpoint(folder, model, optimizer).merged


def test_levels_on_one_axis_are_merged(tmp_path):
    worlds.run(on_one_axis, 2, 1, tmp_path)
    assert all("from 2 replicas" in merged for merged in worlds.run(on_one_axis, 3, 1, tmp_path))


OWNERS = dt.demo(topk=4, chunk=16, link="owner")


def residuals_of(optimizer):
    """The server residuals of both levels, and the memories as whole tensors."""
    found = {}
    for level, replicator in enumerate(optimizer.set_up()):
        channel, state = replicator.channel, replicator.local_state().named()
        parts = server_residuals(channel, state["server_residual"])
        for slot, part in zip(channel.layout.slots, parts, strict=True):
            parameter = replicator.parameters[slot.name]
            found[f"{level} {slot.name}"] = whole(parameter, part).tolist()
            memory = whole(parameter, state[f"residual.{slot.name}"])
            found[f"{level} memory {slot.name}"] = memory.tolist()
    return found


def through_owners(mesh, folder, shards):
    model, optimizer = on_levels(mesh, (2, 2), (OWNERS, OWNERS), shards)
    if shards == 1:
        advance(model, optimizer, range(3), 32)
        dt.save_checkpoint(folder, model, optimizer)
    else:
        dt.load_checkpoint(folder, model, optimizer)
    return residuals_of(optimizer)


def test_owners_of_each_level_keep_their_residuals_in_other_shards(tmp_path):
    one = worlds.run(through_owners, 4, 1, tmp_path, 1)
    two = worlds.run(through_owners, 8, 1, tmp_path, 2)
    for rank, now in enumerate(two):
        before = one[rank // 2]
        assert before.keys() == now.keys()
        for key, values in before.items():
            torch.testing.assert_close(
                torch.tensor(now[key]), torch.tensor(values), atol=1e-6, rtol=0
            )
