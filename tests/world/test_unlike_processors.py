"""Replicas on processors of different kinds, with and without compiled kernels, train together: to the last bit with
every optimizer whose operations can be rounded one by one, otherwise close.

One of every kind of arithmetic. `STEPS=200 python -m pytest tests/world/test_unlike_processors.py` trains every scheme
of the zoo, so many steps under each.
"""

import os

from unlike import run_unlike
from zoo import KINDS as SOME
from zoo import TALKING

NAMES = (
    [*TALKING]
    if "STEPS" in os.environ
    else [*SOME, "demo-tiles", "random-int8-clipped", "random-majority"]
)
RANK = """
import os, sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
import detonation as dt
from detonation.cluster.network.simulated import simulate_replicas
from detonation.core.codec.basis import Identity
from detonation.core.flat.tensors import digest
from zoo import GRADIENT, TALKING
rank, folder, steps = int(sys.argv[1]), sys.argv[2], int(os.environ.get("STEPS", "3"))
torch.set_num_threads(1 + rank % 2)
dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 3), rank=rank, world_size=3)
mesh, pair = dt.init_mesh(replicas=3, shards=1, device="cpu"), DeviceMesh("cpu", [0, 2], mesh_dim_names=("pair",))

def numbers(shape, seed=0):  # no generator: its numbers are rounded by the processor
    return ((torch.arange(shape.numel()) * 7919 + seed * 104729) % 1009 - 504).view(shape) / 2**13

def built():
    model = torch.nn.Sequential(torch.nn.Linear(128, 70), torch.nn.ReLU(), torch.nn.Linear(70, 64))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(numbers(parameter.shape))
    return model

def told(axis, scheme, replica):  # with gradients that no processor rounds
    model = built()
    optimizer = dt.replicate(dt.SignSGD(model.parameters(), lr=1e-3, weight_decay=0.1), model, axis, scheme, clip=1.0)
    for step in range(steps):
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = numbers(parameter.shape, 1 + 3 * (100 * step + number) + replica)
        optimizer.step()
    optimizer.synchronize()
    return digest(model.parameters())

def train(axis, scheme, base, **arguments):
    model = built()
    optimizer = base(model.parameters(), lr=1e-3, weight_decay=0.1, **arguments)
    optimizer = dt.replicate(optimizer, model, axis, scheme, kernels=rank == 0, clip=1.0)
    optimizer.set_up()
    unlike = scheme.signal == "gradients" and axis.size() == 3 and base is not dt.SignSGD
    fused = bool(arguments.get("fused")) and axis.size() == 3
    assert (unlike and not fused) == optimizer.base_step.rounds_singly, (scheme.name, base)
    assert fused == (optimizer.closeness is not None), (scheme.name, base)
    for step in range(steps):
        model(torch.randn(4, 128)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    optimizer.verify()
    return digest(model.parameters()), optimizer.build()[0].channel.engine.name

for name, scheme in [(name, TALKING[name]) for name in sys.argv[3:]]:  # inner optimizers of a round step by themselves
    end, engine = train(mesh["replicate"], scheme, *([dt.SignSGD] if name in GRADIENT else [torch.optim.AdamW]))
    print(name, end)
    assert name != "demo" or engine.startswith("native") == (rank == 0), engine
    if name in GRADIENT and type(scheme.codec.basis) is Identity and not scheme.codec.summable:
        # senders may round local steps and transforms as they like, and gloo adds in an order of its own
        here = simulate_replicas(lambda each: told(each, scheme, each.replica), 3)
        assert {told(mesh["replicate"], scheme, rank)} == {*here}, name
model = torch.nn.Linear(200, 130)
torch.nn.init.constant_(model.weight, 0.5), torch.nn.init.constant_(model.bias, 0.5)
base = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
try:
    dt.replicate(base, model, mesh["replicate"], dt.demo(), safety=dt.Safety(equal="bits")).step()
    refused = "nothing"
except ValueError as error:
    refused = str(error)
print("refused", "optimizer's steps on a test vector" in refused and "engine=" in refused)
sent = [name for name in sys.argv[3:] if name in GRADIENT]
for name, scheme in [(name, GRADIENT[name]) for name in (sent if "STEPS" in os.environ else sent[:4])]:
    print(name + "+AdamW", train(mesh["replicate"], scheme, torch.optim.AdamW)[0])
print("loco+Muon", train(mesh["replicate"], dt.loco(), dt.Muon)[0])
print("loco+SGD", train(mesh["replicate"], dt.loco(), torch.optim.SGD, momentum=0.9)[0])
train(mesh["replicate"], dt.loco(), torch.optim.AdamW, fused=True)  # close, and verified so
if rank != 1:  # with fused multiply-add
    print("AdamW", train(pair, dt.demo(), torch.optim.AdamW, fused=True)[0])
    print("SGD", train(pair, dt.full(), torch.optim.SGD, momentum=0.9, nesterov=True)[0])
    print("SignSGD", train(pair, dt.schemes.random(rate=1 / 4), dt.SignSGD, momentum=0.9)[0])
print("kind", torch.backends.cpu.get_cpu_capability())
dt.leave()
"""


def test_schemes_train_to_the_last_bit_on_processors_of_three_kinds(tmp_path):
    """All optimizers, whose steps are rounded singly where they must be. AdamW in one fused operation is alike among
    those with AVX2; among all it is close, or refused where bits must be equal. With equal gradients and SignSGD the
    weights are those of a world of one kind, under schemes that send what they select as it is."""
    said = run_unlike(
        RANK, [0, 1, 2], tmp_path, *NAMES
    )  # all but the first run without compiled kernels
    first, second, third = (dict(line.split() for line in out.splitlines()) for out, _ in said)
    kinds = [each.pop("kind") for each in (first, second, third)]
    assert kinds[1] == "DEFAULT" and kinds[2] in (
        "AVX2",
        "DEFAULT",
    )  # where the processor has no more
    assert (
        first == third
        and {*first} - {*second} == {"AdamW", "SGD", "SignSGD"}
        and {*NAMES} < {*second}
    )
    assert second.items() <= first.items() and {"demo+AdamW", "loco+Muon", "loco+SGD"} < {*second}
    assert first["refused"] == "True"
