"""`FabricReplicaStrategy` in a real world of 2 x 2 ranks: exact resume, batches, and what is refused."""

import argparse
import logging
import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import detonation as dt
import worlds

fabric_of_lightning = pytest.importorskip("lightning.fabric")
from lightning.fabric.strategies import ModelParallelStrategy  # noqa: E402

from detonation.integrations.fabric import FabricReplicaStrategy  # noqa: E402


def launched(scheme, strategy=None, **options):
    rank = torch.distributed.get_rank()
    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4, "GROUP_RANK": 0}
    os.environ |= {name: str(value) for name, value in world.items()} | {"TORCHELASTIC_RUN_ID": "test"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # where nobody listens: the group is there
    strategy = strategy or FabricReplicaStrategy(scheme, 2, 2, clip=1.0)
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


def scheduled(fabric, state):
    """The state with a schedule, which is 1 / (1 + steps)."""
    return state | {"schedule": torch.optim.lr_scheduler.LambdaLR(state["optimizer"], lambda step: 1 / (1 + step))}


def schedules(mesh, folder):
    fabric, state = launched("loco")
    state = scheduled(fabric, state)
    for _ in range(3):
        train(fabric, state, state["step"] + 1)
        state["schedule"].step()
    fabric.save(Path(folder, "scheduled"), state)
    after, again = launched("loco")
    again = scheduled(after, again)
    schedule = again["schedule"]
    after.load(Path(folder, "scheduled"), again)
    fabric.save(Path(folder, "unreadable"), state | {"arguments": argparse.Namespace(lr=1.0)})
    return {
        "is the caller's": again["schedule"] is schedule,
        "epoch": schedule.last_epoch,
        "rate": (again["optimizer"].param_groups[0]["lr"], state["optimizer"].param_groups[0]["lr"]),
        "no model": worlds.caught(lambda: fabric.save(Path(folder, "other"), {"step": 3})),
        "two models": worlds.caught(lambda: fabric.save(Path(folder, "other"), state | {"second": nn.Linear(1, 1)})),
        "unreadable": worlds.caught(lambda: after.load(Path(folder, "unreadable"), again)),
    }


def test_a_schedule_goes_on_in_place_and_what_rank_0_cannot_read_ends_all_ranks(tmp_path):
    for found in worlds.run_alone(schedules, 2, 2, str(tmp_path)):
        assert found["is the caller's"] and found["epoch"] == 3
        assert found["rate"] == (pytest.approx(1e-2 / 4), pytest.approx(1e-2 / 4))
        assert found["no model"] == (
            "ValueError",
            "the state has no model, must have the one that fabric.setup returned",
        )
        assert (
            found["two models"][0] == "ValueError" and "has models under model, second, must" in found["two models"][1]
        )
        assert found["unreadable"][0] == "ValueError" and "meta.pt cannot be loaded" in found["unreadable"][1]


def of_another_strategy(mesh, folder):
    """What Lightning's own strategy saved, in one whose replicas exchange parameters: weights, states and schedule."""
    theirs = ModelParallelStrategy(lambda m, axes: fully_shard(m, mesh=axes["data_parallel"]), 4, 1)
    fabric, state = launched(None, theirs)
    state = scheduled(fabric, state)
    train(fabric, state, 2)
    state["schedule"].step()
    fabric.save(Path(folder, "theirs"), state)
    whole = [p.full_tensor() for p in state["model"].parameters()]
    moments = [state["optimizer"].state[p]["exp_avg"].full_tensor() for p in state["model"].parameters()]
    lines = []
    logging.getLogger("detonation").addHandler(handler := logging.Handler())
    handler.emit = lambda record: lines.append(record.getMessage())
    after, again = launched(dt.diloco(every=3))
    again = scheduled(after, again)
    after.load(Path(folder, "theirs"), again)
    (optimizer,), parameters = after.strategy.replicated, list(again["model"].parameters())
    same = [torch.equal(p.full_tensor(), was) for p, was in zip(parameters, whole, strict=True)]
    same += [
        torch.equal(optimizer.state[p]["exp_avg"].full_tensor(), m) for p, m in zip(parameters, moments, strict=True)
    ]
    train(after, again, 5)
    optimizer.synchronize()
    return same, again["schedule"].last_epoch, lines, dt.fingerprint(again["model"], mesh)[1]


def test_a_checkpoint_of_another_strategy_loads_with_a_warning_under_a_scheme_of_parameters(tmp_path):
    ranks = worlds.run_alone(of_another_strategy, 2, 2, str(tmp_path))
    assert all(all(same) and epoch == 1 and agreed for same, epoch, _, agreed in ranks)
    assert any('no part "replication"' in line for line in ranks[0][2])


def several_models(mesh, folder):
    """A second model is set up after the first one and its optimizer, and another before the optimizer of a third."""
    fabric, state = launched("loco")
    fabric.setup(nn.Linear(16, 4))
    train(fabric, state, 2)
    fabric.save(Path(folder), state)
    whole = train(fabric, state, 3)[1]
    third = fabric.setup(nn.Linear(16, 4))
    fabric.setup(nn.Linear(16, 4))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(third.parameters()))
    fabric.backward(third(torch.ones(1, 16)).square().mean())
    optimizer.step()
    fabric.load(Path(folder), state)
    return torch.equal(train(fabric, state, 3)[1], whole), fabric.strategy.replicated[-1].step_count


def test_each_optimizer_finds_its_model_among_several(tmp_path):
    assert worlds.run_alone(several_models, 2, 2, str(tmp_path)) == [(True, 1)] * 4
