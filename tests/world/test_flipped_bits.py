"""One bit of one replica's memory flips in mid-run: who notices, when, and what is lost; see reliability.md."""

import os
import re
import subprocess
import sys

import pytest
import torch

import detonation as dt
from detonation.cluster.network.simulated import simulate_replicas
from detonation.core.flat.tensors import digest
from limits import LIMIT_S
from zoo import Plain, batch, built

SCHEMES = {
    "full": dt.full(),
    "demo": dt.demo(topk=4, chunk=16, link="all-gather"),
    "owner": dt.demo(topk=4, chunk=16, precision="sign", link="owner"),
    "diloco": dt.diloco(every=3),
    "sparseloco": dt.schemes.sparseloco(every=2, topk=8, chunk=256, link="all-gather"),
}
LOW, HIGH = 3, 30
"""The eighth of a unit in the last place, and the exponent: 0.1 becomes 3e37."""
VICTIM, FLIPPED, EVERY, STEPS = 1, 5, 4, 16

COMPARED = r"Desync: replica 1 differs from the other replicas in [\w.]+ after step 8"
NOT_FINITE = r"NonFiniteGradient: the change of [\w.]+ is not finite on replica 1 at step 5: lower lr, or clip"
REFUSED = r"BadPeer: 3 messages of replica 1 were refused, the last at step [79]: read the reasons in the log"
NOBODY = "nothing"
FORGOTTEN = (
    "(nothing)"  # the victim's memory, after one message of it was refused; owners do not tell it
)

REACTIONS = [
    *[(scheme, state, bit, COMPARED) for scheme in ("full", "demo", "owner") for state in ("weight", "momentum")
      for bit in (LOW, HIGH)],
    *[(scheme, state, LOW, NOBODY) for scheme in ("diloco", "sparseloco") for state in ("weight", "momentum")],
    *[(scheme, state, HIGH, NOT_FINITE) for scheme in ("diloco", "sparseloco") for state in ("weight", "momentum")],
    *[(scheme, "residual", LOW, NOBODY) for scheme in ("demo", "owner", "sparseloco")],
    *[(scheme, "residual", HIGH, FORGOTTEN) for scheme in ("demo", "sparseloco")],
    ("owner", "residual", HIGH, REFUSED),
    ("owner", "server_residual", LOW, NOBODY),
    ("owner", "server_residual", HIGH, REFUSED),
    *[(scheme, "anchor", LOW, COMPARED) for scheme in ("diloco", "sparseloco")],
    *[(scheme, "anchor", HIGH, NOT_FINITE) for scheme in ("diloco", "sparseloco")],
    *[("diloco", "momentum_buffer", bit, COMPARED) for bit in (LOW, HIGH)],
]  # fmt: skip


def state_of(model, optimizer, name):
    weight = model.layers[0].weight
    if name in ("weight", "momentum"):
        return weight if name == "weight" else optimizer.state[weight]["exp_avg"]
    states = [replicator.local_state() for replicator in optimizer.build()]
    return next(
        found[name] for state in states for found in (state.flats, state.others) if name in found
    )


def flip(tensor, bit):
    """Flips a bit of the largest number."""
    words = tensor.detach().view(-1).view(torch.int32)
    words[int(tensor.detach().abs().view(-1).argmax())] ^= 1 << bit


def trained(scheme, state="", bit=0):
    """What ends the run of three replicas, the same for all, and the weights of each."""

    def act(communicator):
        model = built(Plain)
        base = torch.optim.AdamW(model.parameters(), lr=1e-3)
        safety = dt.Safety(verify_every=EVERY)
        optimizer = dt.replicate(base, model, communicator, scheme, seed=3, safety=safety)
        reaction = NOBODY
        try:
            for step in range(STEPS):
                if state and step == FLIPPED and communicator.replica == VICTIM:
                    flip(state_of(model, optimizer, state), bit)
                model(batch(communicator.replica, step, 32)).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            optimizer.synchronize()
        except Exception as error:
            reaction = f"{type(error).__name__}: {error}"
        return reaction, [parameter.detach() for parameter in model.parameters()]

    reactions, weights = zip(*simulate_replicas(act, 3), strict=True)
    assert len(set(reactions)) == 1, "all replicas react alike"
    return reactions[0], weights


@pytest.fixture(scope="module")
def undisturbed():
    """The weights of the run without a fault, by scheme."""
    return {name: trained(scheme)[1][0] for name, scheme in SCHEMES.items()}


@pytest.mark.parametrize(("name", "state", "bit", "reaction"), REACTIONS)
def test_a_flipped_bit_is_noticed_or_stays_as_small_as_it_was(
    name, state, bit, reaction, undisturbed
):
    found, weights = trained(SCHEMES[name], state, bit)
    assert re.fullmatch(reaction, found)
    if found == NOBODY:
        assert len({digest(each) for each in weights}) == 1, "the replicas stay equal"
        for mine, whole in zip(weights[0], undisturbed[name], strict=True):
            torch.testing.assert_close(
                mine, whole, rtol=0, atol=1e-2 if reaction == FORGOTTEN else 2e-3
            )


UNLIKE = """
import sys, torch, torch.distributed as dist
import detonation as dt
rank, folder, threads = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
torch.set_num_threads(threads)
dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2)
mesh, ends = dt.init_mesh(replicas=2, shards=1, device="cpu"), []
for scheme in (dt.demo(), dt.random_sign(), dt.diloco(every=2)):
    torch.manual_seed(0)
    model = dt.shard(torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 64)), mesh)
    base = torch.optim.AdamW(model.parameters(), lr=1e-3)
    try:
        optimizer = dt.replicate(base, model, mesh["replicate"], scheme, safety=dt.Safety(equal="bits"))
        for step in range(4):
            model(torch.randn(8, 512)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(dt.fingerprint(model, mesh)[1])
    except ValueError as error:
        ends.append("optimizer's steps on a test vector" in str(error))
print(all(ends), len(ends), torch.backends.cpu.get_cpu_capability())
dt.leave()
"""


@pytest.mark.long  # test_unlike_processors.py has the processors and the threads
def test_ranks_with_other_processors_and_threads_agree_or_are_refused_at_the_start(tmp_path):
    """A processor without fused multiply-add rounds lerp, addcmul and add otherwise than one that has it."""
    ranks = []
    for rank, (capability, threads) in enumerate([("", 1), ("default", 4)]):
        env = {"ATEN_CPU_CAPABILITY": capability} if capability else {}
        command = [sys.executable, "-c", UNLIKE, str(rank), str(tmp_path), str(threads)]
        ranks.append(
            subprocess.Popen(command, env={**os.environ, **env}, stdout=subprocess.PIPE, text=True)
        )
    said = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert said[0].startswith("True 3 ") and said[1] == "True 3 DEFAULT\n"
