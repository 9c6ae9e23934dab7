"""What people train with beside an optimizer: compiled and checkpointed models, mixed precision, offload, other forms
of a base optimizer, scaled losses, tensor parallelism. `make gpu` runs this file on a GPU."""

import copy
import pickle
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import detonation as dt
import worlds
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.core.flat.tensors import digest, local
from steps import step_on
from zoo import DEVICE, SCHEMES, Plain, batch, built

pytestmark = pytest.mark.usefixtures("lasting_worlds")

ON_CPU = DEVICE.type == "cpu"
NAMES = ["full", "demo", "diloco"]


class Tied(nn.Module):
    """A model whose last layer is its first, transposed in use."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32, bias=False), nn.Linear(32, 32)])
        self.head = nn.Linear(32, 32, bias=False)
        self.head.weight = self.layers[0].weight

    def forward(self, x):  # [batch, 32] -> [batch]
        return self.head(self.layers[1](self.layers[0](x)).tanh()).square().mean(1)


class Checkpointed(Plain):
    """`Plain`, of which backward computes the activations again."""

    def forward(self, x):  # [batch, 32] -> [batch]
        hidden = checkpoint(self.layers[0], x, use_reentrant=False)
        return (
            checkpoint(lambda h: self.layers[1](h.tanh()), hidden, use_reentrant=False)
            .square()
            .mean(1)
        )


def adamw(**options):
    return partial(torch.optim.AdamW, lr=1e-2, **options)


def trained(mesh, model, scheme, base=None, called=None, overlap=True):
    """The weights of a replica after three steps of `model`, whether replicas are equal, and the bytes that were sent.

    called: computes the loss in the place of the model.
    """
    optimizer = dt.replicate(
        (base or adamw())(model.parameters()), model, mesh["replicate"], scheme
    )
    for step in range(3):
        loss = (
            (model if called is None else called)(batch(mesh.get_rank(), step, 32)).float().mean()
        )
        step_on(optimizer, loss, overlap)
        optimizer.zero_grad()
    optimizer.synchronize()
    assert all(local(p).isfinite().all() for p in model.parameters())
    return digest(model.parameters()), dt.fingerprint(model, mesh)[1], optimizer.stats.bytes_sent


def compiled_or_checkpointed(mesh, names):
    """Of each scheme: whether all ways of the same model end in the same bits, and replicas are equal."""
    backend, found = "eager" if ON_CPU else "inductor", {}
    for name in names:
        make = partial(trained, mesh, scheme=SCHEMES[name])
        plain = make(dt.shard(built(Plain), mesh))
        again = make(dt.shard(built(Checkpointed), mesh))
        model = dt.shard(built(Plain), mesh)
        whole = torch.compile(model, backend=backend)
        with warnings.catch_warnings(
            action="ignore"
        ):  # of torch about itself: dynamo looks at every attribute
            outside = trained(
                mesh, whole, SCHEMES[name], called=whole
            )  # replicate gets the compiled module
            model = dt.shard(built(Plain), mesh)
            for layer in model.layers:
                layer.compile(backend=backend)
            inside = make(model)
        exact = [again == plain, *([outside == plain, inside == plain] if ON_CPU else [])]
        found[name] = all(exact), all(each[1] for each in (plain, again, outside, inside))
    return found


def test_a_compiled_and_a_checkpointed_model_train_as_the_model_itself():
    for found in worlds.run(compiled_or_checkpointed, 2, 1, NAMES):
        assert found == dict.fromkeys(NAMES, (True, True))


def whole_step(mesh, compiled):
    """The weights after two steps of signs, of which forward, backward and step are one function."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    scheme = dt.demo(topk=2, chunk=8, precision="sign", error_feedback=False)
    base = dt.SignSGD(model.parameters(), lr=1e-3)
    optimizer = dt.replicate(base, model, mesh["replicate"], scheme)

    def step(rows):
        with optimizer.overlap():
            model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    if compiled:
        step = torch.compile(step, backend="eager")
    with warnings.catch_warnings(action="ignore"):  # of torch about itself
        for number in range(2):
            noise = torch.Generator().manual_seed(100 * number + mesh.get_rank())
            step(torch.randn(4, 8, generator=noise))
    return digest(model.parameters())


def test_a_compiled_training_step_sends_in_backward_what_the_same_step_sends():
    assert worlds.run(whole_step, 2, 1, True) == worlds.run(whole_step, 2, 1, False)


def in_mixed_precision(mesh, names):
    """bf16 in forward and backward, gradients reduced in fp32, weights and updates in fp32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = {}
    for name in names:
        model = dt.shard(built(Plain), mesh, policy)
        weights, equal, sent = trained(mesh, model, SCHEMES[name])
        full = trained(mesh, dt.shard(built(Plain), mesh), SCHEMES[name])
        assert {local(p).dtype for p in model.parameters()} == {torch.float32}
        found[name] = equal, weights != full[0], sent == full[2]
    return found


@pytest.mark.parametrize("shards", [1, 2])
def test_mixed_precision_of_fsdp_changes_the_gradients_and_nothing_of_the_exchange(shards):
    names = NAMES if shards == 1 else ["demo"]
    for found in worlds.run(in_mixed_precision, 2, shards, names):
        assert found == dict.fromkeys(names, (True, True, True))


def offloaded(mesh, names):
    """Parameters, gradients and the optimizer on the host: bit for bit as without, on a CPU."""
    found = {}
    for name in names:
        model = built(Plain)
        policy = CPUOffloadPolicy(pin_memory=not ON_CPU)
        for module in (*model.layers, model):
            fully_shard(
                module, mesh=mesh["shard"], offload_policy=policy
            ).set_force_sum_reduction_for_comms(True)
        ends = trained(mesh, model, SCHEMES[name], overlap=False)
        assert {local(p).device.type for p in model.parameters()} == {"cpu"}
        same = ends == trained(mesh, dt.shard(built(Plain), mesh), SCHEMES[name], overlap=False)
        found[name] = ends[1] and (same or not ON_CPU)
    return found


def test_parameters_that_are_offloaded_to_the_host_are_exchanged_there():
    for found in worlds.run(offloaded, 2, 1, NAMES):
        assert found == dict.fromkeys(NAMES, True)


BASES = {
    "foreach": adamw(foreach=True),
    "fused": adamw(fused=True),
    "capturable": adamw(capturable=not ON_CPU),  # torch has it on accelerators alone
    "lr of a tensor": lambda parameters: torch.optim.AdamW(
        parameters, lr=torch.tensor(1e-2), foreach=False
    ),
}


def other_forms(mesh, names):
    """Each form of a base optimizer: whether replicas are equal, and how far from the plain form it ends."""
    found = {}
    for scheme in names:
        for name, base in BASES.items():
            model = dt.shard(built(Plain), mesh)
            _, equal, _ = trained(mesh, model, SCHEMES[scheme], base)
            other = dt.shard(built(Plain), mesh)
            trained(mesh, other, SCHEMES[scheme], adamw(foreach=False))
            pairs = zip(model.parameters(), other.parameters(), strict=True)
            apart = max(float((local(a) - local(b)).detach().abs().max()) for a, b in pairs)
            found[scheme, name] = equal, apart < 1e-4
    return found


@pytest.mark.long  # no branch of its own
def test_fused_foreach_and_capturable_optimizers_end_where_plain_ones_do():
    for found in worlds.run(other_forms, 2, 1, ["demo", "diloco"]):
        assert set(found.values()) == {(True, True)}, found


def tied(mesh):
    model = dt.shard(built(Tied), mesh)
    found = trained(mesh, model, dt.demo(4, 16))
    return found[1], model.head.weight is model.layers[0].weight


@pytest.mark.parametrize("shards", [1, 2])
def test_tied_weights_stay_tied(shards):
    assert worlds.run(tied, 2, shards) == [(True, True)] * 2 * shards


def scaled(mesh, names, bad):
    """Trains under a GradScaler whose scale is a power of two; at step 1 the last rank overflows where `bad`."""
    found = {}
    for name in names:
        model = dt.shard(built(Plain), mesh)
        safety = dt.Safety(non_finite="skip")
        optimizer = dt.replicate(
            adamw()(model.parameters()), model, mesh["replicate"], SCHEMES[name], safety=safety
        )
        scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**10)
        for step in range(3):
            loss = model(batch(mesh.get_rank(), step, 32)).mean()
            if bad and step == 1 and mesh.get_rank() == 1:
                loss = loss * torch.inf
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        optimizer.synchronize()
        plain = trained(mesh, dt.shard(built(Plain), mesh), SCHEMES[name], overlap=False)
        ends = (
            digest(model.parameters()),
            dt.fingerprint(model, mesh)[1],
            optimizer.stats.bytes_sent,
        )
        found[name] = ends[1], ends == plain, optimizer.step_count, scaler.get_scale()
    return found


def test_a_grad_scaler_leaves_no_trace_where_nothing_overflows():
    for found in worlds.run(scaled, 2, 1, NAMES, False):
        assert found == dict.fromkeys(NAMES, (True, True, 3, 2.0**10))


def test_a_replica_whose_scaled_gradient_overflows_skips_no_exchange():
    """It sends an empty message: a replica that left out the step would leave the others waiting for it."""
    ranks = worlds.run(scaled, 2, 1, NAMES, True)
    for rank, found in enumerate(ranks):
        scale = 2.0**9 if rank == 1 else 2.0**10
        assert found == dict.fromkeys(NAMES, (True, False, 3, scale)), rank


@pytest.mark.parametrize("act", [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_replicated_optimizer_says_that_it_cannot_be_copied(act):
    model = nn.Linear(2, 1)
    optimizer = dt.replicate(
        dt.SignSGD(model.parameters()), model, LoopbackCommunicator(), dt.demo()
    )
    with pytest.raises(TypeError, match=r"cannot be copied or pickled: use state_dict\(\)"):
        act(optimizer)


def three_axes(mesh):
    """Tensor parallel inside, FSDP2 around it, replicas outermost; each parameter is a DTensor of two dimensions."""
    whole = init_device_mesh(
        DEVICE.type, (2, 1, 2), mesh_dim_names=("replicate", "shard", "tensor")
    )
    model = built(Plain)
    parallelize_module(
        model, whole["tensor"], {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}
    )
    fully_shard(model, mesh=whole["shard"]).set_force_sum_reduction_for_comms(True)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    optimizer = dt.replicate(
        adamw()(model.parameters()),
        model,
        whole["replicate"],
        dt.demo(4, 16),
        intra_node=whole["tensor"],
    )
    for step in range(
        3
    ):  # the ranks of a replica see the same batch: tensor parallelism splits the model alone
        model(batch(whole.get_local_rank("replicate"), step, 32)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole.get_local_rank("tensor"), digest(model.parameters())


def test_tensor_parallel_fsdp_and_replicas_in_three_dimensions():
    if not ON_CPU and torch.cuda.device_count() < 4:
        pytest.skip("four ranks of NCCL need four GPUs")
    found = worlds.run(three_axes, 2, 2)
    weights = {part: {digest for other, digest in found if other == part} for part in range(2)}
    assert all(len(each) == 1 for each in weights.values()) and weights[0] != weights[1]
