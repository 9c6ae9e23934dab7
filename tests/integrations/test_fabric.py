"""`FabricReplicaStrategy` in a real world of 2 x 2 ranks: exact resume, batches, and what is refused."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import detonation as dt
import worlds

fabric_of_lightning = pytest.importorskip("lightning.fabric")
from detonation.integrations.fabric import FabricReplicaStrategy  # noqa: E402


def launched(scheme, **options):
    rank = torch.distributed.get_rank()
    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4, "GROUP_RANK": 0}
    os.environ |= {name: str(value) for name, value in world.items()} | {"TORCHELASTIC_RUN_ID": "test"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # where nobody listens: the group is there
    strategy = FabricReplicaStrategy(scheme, 2, 2, clip=1.0)
    fabric = fabric_of_lightning.Fabric(accelerator="cpu", devices=4, strategy=strategy, **options)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    model = fabric.setup(nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.2), nn.Linear(32, 4)))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    return fabric, {"model": model, "optimizer": optimizer, "step": 0}


def train(fabric, state, steps):
    data = TensorDataset(*(torch.randn(256, n, generator=torch.Generator().manual_seed(n)) for n in (16, 4)))
    seen = []
    for x, y in list(fabric.setup_dataloaders(DataLoader(data, batch_size=8)))[state["step"] : steps]:
        seen.append(float(x.sum()))
        fabric.backward((state["model"](x) - y).square().mean())
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["step"] += 1
    return seen, torch.cat([p.detach().to_local().reshape(-1) for p in state["model"].parameters()])


def resumed(mesh, folder):
    found = []
    for name, scheme in {"demo": dt.demo(topk=4, chunk=16), "diloco": dt.diloco(every=3)}.items():
        fabric, state = launched(scheme, precision="bf16-mixed")
        train(fabric, state, 4)
        fabric.save(Path(folder, name), state)
        seen, whole = train(fabric, state, 8)
        after, again = launched(scheme, precision="bf16-mixed")
        rest = after.load(Path(folder, name), again)
        steps = again["step"]
        found.append((torch.equal(train(after, again, 8)[1], whole), rest, steps, seen))
        (optimizer,), sent = after.strategy.replicated, [each.strategy.bytes_sent for each in (fabric, after)]
        optimizer.synchronize()
        found[-1] += (dt.fingerprint(again["model"], mesh)[1], 0 < sent[0] == sent[1])
    refusals = [
        worlds.caught(lambda: fabric.clip_gradients(state["model"], state["optimizer"], max_norm=1.0))[1],
        worlds.caught(lambda: fabric.clip_gradients(state["model"], state["optimizer"], clip_val=1.0))[1],
        worlds.caught(lambda: fabric.save(Path(folder, "other"), state, filter={"model": lambda *_: True}))[1],
    ]
    return found, refusals


def test_resume_is_bitwise_and_each_rank_sees_its_own_batches(tmp_path):
    ranks = worlds.run_alone(resumed, 2, 2, str(tmp_path))
    for found, refusals in ranks:
        assert all(case[:3] == (True, {}, 4) and case[4:] == (True, True) for case in found)
        assert all("clip=1.0" in text for text in refusals[:2]) and "not supported" in refusals[2]
    assert len({batch for found, _ in ranks for batch in found[0][3]}) == 4 * 4
