"""Shards on several nodes, in worlds of gloo ranks: laws of `dt.shard(..., wire=...)` through FSDP2's own hooks."""

import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import detonation as dt
import worlds
from covering import some
from detonation.core.flat.tensors import digest, local
from detonation.wire.units import mend_references, shard_units
from detonation.wire.wire import WIDTHS
from quantized import quantized_bytes
from zoo import Menagerie, Plain, batch, built

pytestmark = pytest.mark.usefixtures("lasting_worlds")

FP32 = {"weights": "fp32", "gradients": "fp32"}
WIRES = {
    "4bit": {},
    "8bit": {"weights": "8bit", "gradients": "8bit"},
    "weights": {"gradients": "fp32"},
    "gradients": {"weights": "fp32"},
    "resync": {"resync_every": 2},
}


def weight_bytes(wire, sizes, nodes, itemsize=4, exact=False):
    """Bytes that a rank sends to other nodes in one exchange of weights of `itemsize` bytes.

    `sizes` are the numbers of a rank's shard of each FSDP unit, as FSDP2 pads them. They travel `exact` in the first
    exchange and in a resync.
    """
    width = 0 if exact else WIDTHS[wire.weights]
    return (nodes - 1) * sum(
        quantized_bytes(size, width) if width else size * itemsize for size in sizes
    )


def gradient_bytes(wire, sizes, nodes):
    """Bytes that a rank sends to other nodes in one reduce-scatter of all units; 0 where torch's own carries them.

    `sizes` are those of `weight_bytes`, of trained parameters alone.
    """
    width = WIDTHS[wire.gradients]
    return (nodes - 1) * sum(quantized_bytes(size, width) for size in sizes) if width else 0


def start(mesh, kind, wire, scheme="none", **policy):
    chosen = None if wire is None else dt.shard_wire(**{"nodes": 2, **wire})
    model = dt.shard(built(kind), mesh, MixedPrecisionPolicy(**policy) if policy else None, chosen)
    base = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, dt.replicate(base, model, mesh["replicate"], dt.scheme(scheme, {}), seed=3)


def advance(model, optimizer, steps, width=32):
    losses = []
    for step in steps:
        loss = model(batch(dist.get_rank(), step, width)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(mesh, kind, wire, width, **policy):
    model, optimizer = start(mesh, kind, wire, **policy)
    return advance(model, optimizer, range(4), width), digest(model.parameters())


def compared(mesh):
    found = [trained(mesh, Plain, wire, 32) for wire in (None, FP32, {}, {})]
    return found, [trained(mesh, Menagerie, wire, 257) for wire in (None, FP32, {})]


@some("shards", [2, 4], keep=[4])
def test_law_6_fp32_is_fsdp2_bit_for_bit_and_others_are_deterministic(shards):
    for (plain, same, first, again), (awkward, awkward_same, other) in worlds.run(
        compared, 1, shards
    ):
        assert plain == same and awkward == awkward_same
        assert plain != first == again and awkward != other


class Seen(DefaultAllGather):
    """Digests of the outputs of another all-gather, in the order of calls."""

    def __init__(self, gather):
        self.gather, self.digests = gather, []

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.gather(output_tensor, input_tensor, group, async_op)
        self.digests.append(digest([output_tensor]))


def gathered(mesh, wire, policy):
    """Digests of the weights that each layer computed with, step by step, and bytes sent after each step."""
    model, optimizer = start(mesh, Plain, WIRES[wire], **policy)
    units, seen, counts = shard_units(model), [], [0]
    for layer, unit in zip(model.layers, units, strict=True):
        seen.append(Seen(unit.gather))
        layer.set_custom_all_gather(seen[-1])
    for step in range(4):
        advance(model, optimizer, [step])
        counts.append(dt.shard_bytes_sent(model))
    return [each.digests for each in seen], counts, [sum(unit.sizes().values()) for unit in units]


def every_gather(mesh):
    bf16 = {"param_dtype": torch.bfloat16}
    return {
        (wire, bool(policy)): gathered(mesh, wire, policy)
        for wire in WIRES
        for policy in ({}, bf16)[: 1 + (wire == "resync")]
    }


def test_laws_2_4_gathered_weights_are_equal_on_all_ranks_and_bytes_are_known():
    ranks = worlds.run(every_gather, 1, 4)
    for (name, narrow), (seen, counts, sizes) in ranks[0].items():
        assert all(other[name, narrow] == (seen, counts, sizes) for other in ranks[1:])
        wire, itemsize = dt.shard_wire(nodes=2, **WIRES[name]), 2 if narrow else 4
        for digests in seen:  # of forward and backward in turns
            assert digests[0::2] == digests[1::2] and len(set(digests)) == 4
        for step in range(4):
            exact = step == 0 or (wire.resync_every and step % wire.resync_every == 0)
            sent = weight_bytes(wire, sizes, 2, itemsize, exact) + gradient_bytes(wire, sizes, 2)
            assert counts[step + 1] - counts[step] == sent


def lost_bytes(mesh):
    """Bytes of a forward pass where nothing was stepped, of micro-batches, and under frozen parameters."""
    model, optimizer = start(mesh, Plain, {})
    advance(model, optimizer, range(2))
    found = []

    def sent(act):
        before = dt.shard_bytes_sent(model)
        act()
        found.append(dt.shard_bytes_sent(model) - before)

    def look():
        with torch.no_grad():
            model(batch(0, 9, 32))

    sent(look)  # the weights of the last step
    sent(look)  # nothing new
    sent(lambda: model(batch(0, 9, 32)).mean().backward())  # gradients alone
    optimizer.step()
    optimizer.zero_grad()
    sent(lambda: advance(model, optimizer, [3]))
    for parameter in model.layers[0].parameters():
        parameter.requires_grad_(False)
    optimizer.step()
    sent(lambda: advance(model, optimizer, [4]))
    sent(lambda: advance(model, optimizer, [5]))
    return found, [sum(unit.sizes().values()) for unit in shard_units(model)]


def test_bytes_cross_only_where_weights_or_gradients_are_new():
    for found, sizes in worlds.run(lost_bytes, 1, 2):
        wire = dt.shard_wire(nodes=2)
        weights, gradients = weight_bytes(wire, sizes, 2), gradient_bytes(wire, sizes, 2)
        assert found[:4] == [weights, 0, gradients, weights + gradients]
        last = weight_bytes(wire, sizes[:1], 2, exact=True)  # of the frozen layer
        assert found[4] == last + weight_bytes(wire, sizes[1:], 2) + gradient_bytes(
            wire, sizes[1:], 2
        )
        assert found[5] == weight_bytes(wire, sizes[1:], 2) + gradient_bytes(wire, sizes[1:], 2)


def replaced(mesh):
    """The loss after load_state_dict, and after a reference was damaged, against the model that was loaded."""
    model, optimizer = start(mesh, Plain, {})
    exact, _ = start(mesh, Plain, FP32)
    advance(model, optimizer, range(3))
    exact.load_state_dict(model.state_dict())
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()})
    losses = [each(batch(0, 1, 32)).mean().item() for each in (model, exact)]
    reference = shard_units(model)[1].gather.reference
    if dist.get_rank() == 3:
        reference[0, 5] += 1
    mend_references(model)
    held = [unit.gather.reference is not None for unit in shard_units(model)]
    losses.append(model(batch(0, 1, 32)).mean().item())
    mend_references(model)
    return losses, held, shard_units(model)[1].gather.reference is not None


def test_references_become_exact_where_weights_are_replaced_or_memory_was_damaged():
    for rank, (losses, held, mended) in enumerate(worlds.run(replaced, 1, 4)):
        assert losses[0] == losses[1] == losses[2] and mended
        # ranks 1 and 3 hold the same part of the reference; that of the second layer was damaged
        assert held == [True, rank % 2 == 0]


def moved(mesh):
    """Weights that an average was swapped into."""
    model, optimizer = start(mesh, Plain, {})
    advance(model, optimizer, range(2))
    model(batch(0, 1, 32))
    with torch.no_grad():
        for parameter in model.parameters():
            local(parameter).mul_(0.5)
    error = worlds.caught(model, batch(0, 1, 32))
    dt.resync_weights(model)
    model.set_reshard_after_forward(True)
    after = model(batch(0, 1, 32)).mean().item()
    exact = dt.shard(built(Plain), mesh)
    exact.load_state_dict(model.state_dict())
    return error, after == exact(batch(0, 1, 32)).mean().item()


def test_weights_that_something_else_moves_are_announced_or_an_error():
    for error, exact in worlds.run(moved, 1, 2):
        assert error[0] == "RuntimeError" and "resync_weights" in error[1]
        assert exact


def levels(mesh):
    found = {}
    for scheme in ("full", "demo", "diloco"):
        model, optimizer = start(mesh, Plain, {}, scheme)
        advance(model, optimizer, range(4))
        optimizer.synchronize()
        optimizer.verify()
        found[scheme] = dt.fingerprint(model, mesh), optimizer.stats.bytes_sent
    return found


@pytest.mark.long  # no branch of its own
def test_a_replica_on_two_nodes_is_replicated_by_any_scheme():
    for found in worlds.run(levels, 2, 2):
        for (_, equal), sent in found.values():
            assert equal and sent > 0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.rise, self.fall = nn.Linear(32, 24), nn.Linear(24, 32)

    def forward(self, x):  # [batch, 32] -> the same
        return x + self.fall(self.rise(x).tanh())


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block()])

    def forward(self, x):  # [batch, 32] -> [batch]
        return self.layers[0](x).square().mean(1)


def tensor_parallel(mesh, wire):
    """Losses, and the numbers of a rank's shard, as the unit reckons them and as FSDP2 sends them."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replicate", "shard", "tensor"))
    model = built(Wide)
    parallelize_module(
        model.layers[0], mesh["tensor"], {"rise": ColwiseParallel(), "fall": RowwiseParallel()}
    )
    dt.shard(model, mesh, wire=dt.shard_wire(nodes=2, **wire))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        loss = model(batch(mesh.get_local_rank("shard"), step, 32)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    (unit,) = shard_units(model)
    return losses, sum(unit.sizes().values()), unit.gather.reference.shape[1]


def test_shards_on_several_nodes_may_be_tensor_parallel_too():
    exact, coarse = (worlds.run_alone(tensor_parallel, 1, 4, wire) for wire in (FP32, {}))
    for (losses, reckoned, sent), (near, *_) in zip(exact, coarse, strict=True):
        assert reckoned == sent
        assert losses[0] == near[0] and losses[1:] != near[1:]
        assert near == pytest.approx(losses, rel=0.05)


def loss_of(model):
    return model(batch(0, 1, 32)).mean().item()


def references_after(mesh, disturb):
    """The loss with the gathered weights after `disturb(model)` and a step, and with the shards as they are."""
    model, optimizer = start(mesh, Plain, {})
    exact, _ = start(mesh, Plain, FP32)
    advance(model, optimizer, range(3))
    disturb(model)
    advance(model, optimizer, [9])
    exact.load_state_dict(model.state_dict())
    return loss_of(model), loss_of(exact)


def freeze(model):
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with torch.no_grad():
        found = loss_of(model)
        exact = dt.shard(built(Plain), model.layers[0].weight.device_mesh._get_root_mesh())
        exact.load_state_dict(model.state_dict())
        assert found == loss_of(exact)
    for parameter in model.parameters():
        parameter.requires_grad_(True)


def step_elsewhere(model):
    """One rank alone trains another model, and the weights of this one stay where they are."""
    loss_of(model)
    sent = dt.shard_bytes_sent(model)
    if dist.get_rank() == 0:
        other = nn.Linear(2, 2)
        other(torch.ones(1, 2)).sum().backward()
        torch.optim.SGD(other.parameters(), lr=0.1).step()
    loss_of(model)
    assert dt.shard_bytes_sent(model) == sent


def lose_finiteness(model):
    """A round of weights that are not finite, which are then put back."""
    weights = {name: local(parameter).clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        local(model.layers[0].weight).fill_(torch.nan)
    mend_references(model)  # announces a move
    loss_of(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local(parameter).copy_(weights[name])
    for _ in range(4):  # differences get smaller
        mend_references(model)
        loss_of(model)


def evaluate_in_inference_mode(model):
    dt.resync_weights(model)
    with torch.inference_mode():
        loss_of(model)


def take_weights_of_the_first(model):
    loss_of(model)
    with torch.no_grad():
        for parameter in model.parameters():
            local(parameter).add_(0.1)
    dt.same_weights(model, model.layers[0].weight.device_mesh._get_root_mesh()["replicate"])


@pytest.mark.parametrize(
    "disturb",
    [
        freeze,
        step_elsewhere,
        lose_finiteness,
        evaluate_in_inference_mode,
        take_weights_of_the_first,
    ],
)
def test_gathered_weights_stay_those_of_the_shards(disturb):
    for found, exact in worlds.run(references_after, 1, 2, disturb):
        assert found == pytest.approx(exact, rel=1e-2)


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(32, 32)
        self.narrow = nn.Linear(32, 32, dtype=torch.bfloat16).requires_grad_(False)

    def forward(self, x):  # [batch, 32] -> [batch]
        return self.narrow(self.wide(x).tanh().bfloat16()).float().square().mean(1)


def of_two_dtypes(mesh):
    model = dt.shard(built(Mixed), mesh, wire=dt.shard_wire(gradients="fp32", nodes=2))
    heard = []
    log = logging.getLogger("detonation")
    log.addFilter(lambda record: heard.append(record.getMessage()) or True)
    for _ in range(2):
        model(batch(0, 1, 32)).mean().backward()
        mend_references(model)
    log.filters.clear()
    return heard


def test_a_unit_of_two_dtypes_is_sent_as_it_is_and_says_so():
    for heard in worlds.run(of_two_dtypes, 1, 2):
        assert [one for one in heard if "several dtypes" in one]


def mistakes(mesh):
    narrow = dt.shard_wire(nodes=3), dt.shard_wire()
    return [worlds.caught(dt.shard, built(Plain), mesh, None, wire) for wire in narrow]


def test_mistakes_name_the_remedy():
    for found in worlds.run(mistakes, 1, 2):
        assert [kind for kind, _ in found] == ["ValueError"] * 2
        assert "cannot be divided equally among 3 nodes" in found[0][1] and "nodes=" in found[1][1]
    for arguments, word in (
        ({"weights": "3bit"}, "4bit, 8bit, fp32"),
        ({"nodes": 1}, "at least 2"),
        ({"resync_every": -1}, "at least 0"),
        ({"weights": "fp32", "resync_every": 5}, "leave resync_every out"),
    ):
        with pytest.raises(ValueError, match=word):
            dt.shard_wire(**arguments)


def apart(mesh):
    return worlds.caught(start, mesh, Plain, {"weights": "8bit"} if dist.get_rank() else {})


def test_wires_that_differ_between_nodes_are_refused():
    for kind, text in worlds.run_alone(apart, 1, 2):
        assert kind == "Mismatch" and "shard wire" in text


def unsent(model):
    """The gradients that no node has sent, of each parameter, as a whole."""
    found = {}
    for unit in shard_units(model):
        for name, piece in (unit.reduce.by_parameter() if unit.reduce else {}).items():
            pieces = [torch.empty_like(piece) for _ in range(dist.get_world_size())]
            dist.all_gather(pieces, piece)
            ranks, nodes = len(pieces), len(piece) + 1
            rows = []
            for owner in range(ranks):
                at, place = divmod(owner, ranks // nodes)
                others = [node for node in range(nodes) if node != at]
                rows.append(
                    sum(pieces[n * (ranks // nodes) + place][at - (at > n)] for n in others)
                )
            found[name] = torch.cat(rows)[: unit.parameters[name].numel()] / ranks
    return found


def saved(mesh, folder):
    model, optimizer = start(mesh, Plain, {"resync_every": 4})
    advance(model, optimizer, range(3))
    dt.save_checkpoint(folder, model, optimizer)
    there = unsent(model)
    losses = advance(model, optimizer, range(3, 6))
    other, again = start(mesh, Plain, {"resync_every": 4})
    advance(other, again, range(1))
    dt.load_checkpoint(folder, other, again)
    return (
        there,
        losses,
        advance(other, again, range(3, 6)),
        digest(model.parameters()) == digest(other.parameters()),
    )


def loaded(mesh, folder, nodes):
    model, optimizer = start(mesh, Plain, {"nodes": nodes})
    done = dt.load_checkpoint(folder, model, optimizer)
    found = unsent(model)
    plain, alone = start(mesh, Plain, None)
    return (
        done.merged,
        found,
        advance(model, optimizer, [3]),
        dt.load_checkpoint(folder, plain, alone).merged,
    )


def test_law_9_a_run_resumes_exactly_and_in_another_world_nothing_unsent_is_lost(tmp_path):
    ranks = worlds.run(saved, 1, 4, str(tmp_path))
    for _, losses, again, same in ranks:
        assert losses == again and same
    there = ranks[0][0]
    for nodes in (2, 3):  # of three nodes, the next is not the one before
        for how, found, _, plain in worlds.run(loaded, 1, nodes, str(tmp_path), nodes):
            assert "4 shards" in how and "dropped" in plain
            for name, tensor in there.items():
                assert tensor.abs().max() > 0
                assert torch.allclose(found[name], tensor, atol=1e-7), name


def partly_frozen(mesh, folder):
    """Losses of a run and of one that resumes it from a checkpoint without the frozen weights."""

    def made():
        model, _ = start(mesh, Plain, {})
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in ("layers.0.weight", "layers.1.bias"))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return model, dt.replicate(
            torch.optim.AdamW(trained, lr=1e-2), model, mesh["replicate"], dt.none()
        )

    model, optimizer = made()
    advance(model, optimizer, range(3))
    dt.save_checkpoint(folder, model, optimizer, frozen=False)
    losses = advance(model, optimizer, range(3, 6))
    other, again = made()
    dt.load_checkpoint(folder, other, again)
    return losses, advance(other, again, range(3, 6))


def frozen_for_a_while(mesh, folder):
    """The residual of a layer that is frozen when a checkpoint is written, before and after it was loaded."""
    model, optimizer = start(mesh, Plain, {})
    advance(model, optimizer, range(3))
    model.layers[0].requires_grad_(False)
    before = unsent(model)
    dt.save_checkpoint(folder, model, optimizer)
    other, again = start(mesh, Plain, {})
    other.layers[0].requires_grad_(False)
    dt.load_checkpoint(folder, other, again)
    return before, unsent(other)


def test_what_a_frozen_layer_has_not_sent_is_kept(tmp_path):
    for before, after in worlds.run(frozen_for_a_while, 1, 2, str(tmp_path)):
        assert before.keys() == after.keys() and all(
            torch.equal(before[name], after[name]) for name in before
        )


def test_a_checkpoint_without_frozen_weights_resumes_exactly(tmp_path):
    for losses, again in worlds.run(partly_frozen, 1, 2, str(tmp_path)):
        assert losses == again


def test_the_wire_of_a_recipe():
    from detonation.train.recipe.schema import MeshConfig

    wire = MeshConfig(1, 4, "100mbit", shard_nodes=2, shard_weights="4bit").shard_wire
    assert wire == dt.shard_wire("4bit", "fp32", 2, link="100mbit")
    with pytest.raises(ValueError, match=r"mesh\.shard_weights"):
        MeshConfig(1, 4, shard_weights="4bit")
    with pytest.raises(ValueError, match=r"mesh\.shard_nodes"):
        MeshConfig(1, 4, shard_nodes=3)
    with pytest.raises(ValueError, match="precision of weights"):
        MeshConfig(1, 4, shard_nodes=2, shard_weights="2bit")


def test_a_model_without_a_wire_has_sent_nothing():
    assert dt.shard_bytes_sent(nn.Linear(2, 2)) == 0
