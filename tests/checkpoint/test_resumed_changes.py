"""Checkpoints before, between and after changes of the trained parameters: exact, and good for other worlds."""

import pytest
import torch
from torch import nn

import detonation as dt
import worlds
from detonation.core.flat.tensors import digest, local
from zoo import SCHEMES, Plain, batch, built

pytestmark = pytest.mark.usefixtures("lasting_worlds")

FROZEN = {0: ["layers.0"], 2: ["layers.1.bias"], 5: []}


def freeze(model, step):
    frozen = FROZEN[max(first for first in FROZEN if first <= step)]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(name.startswith(prefix) for prefix in frozen))


def start(mesh, scheme, step=0):
    model = dt.shard(built(Plain), mesh)
    freeze(model, step)
    return model, dt.replicate(
        torch.optim.AdamW(model.parameters(), lr=1e-2), model, mesh["replicate"], scheme
    )


def advance(model, optimizer, steps):
    for step in steps:
        freeze(model, step)
        model(batch(torch.distributed.get_rank(), step, 32)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def everything(model, optimizer):
    return digest(model.parameters()), {
        key: digest([tensor]) for key, tensor in dt.replica_state(optimizer).items()
    }


def resumed(mesh, folder, names):
    same = {}
    for name in names:
        model, optimizer = start(mesh, SCHEMES[name])
        for step in range(8):
            if step in (2, 4, 6):
                dt.save_checkpoint(f"{folder}/{name}-{step}", model, optimizer)
            advance(model, optimizer, [step])
        # trained when it is loaded: what is next, what was, and something else; built before and not
        for step, now, before in ((2, 1, 0), (2, 2, 0), (4, 0, 1), (6, 2, 1)):
            other, again = start(mesh, SCHEMES[name], now)
            advance(other, again, range(before))
            freeze(other, now)
            dt.load_checkpoint(f"{folder}/{name}-{step}", other, again)
            advance(other, again, range(step, 8))
            same[name, step, now] = everything(model, optimizer) == everything(other, again)
    return same


@pytest.mark.long  # no branch of its own
@pytest.mark.parametrize(
    ("shards", "names"),
    [
        (1, ["streaming"]),
        (2, ["demo-owner"]),
        pytest.param(1, ["full", "demo-owner"], marks=pytest.mark.long),
        pytest.param(2, ["demo", "diloco"], marks=pytest.mark.long),
    ],
)
def test_a_run_whose_trained_parameters_change_goes_on_exactly(shards, names, tmp_path):
    for found in worlds.run(resumed, 2, shards, tmp_path, names):
        assert [key for key, same in found.items() if not same] == []


def with_notes(mesh, folder):
    """Options that a loop adds to a group, which the resumed run lacks or has in another kind."""
    notes = {"note": "x", "layers": ["a", "b"], "on": True, "pair": (1, "c")}
    model, optimizer = start(mesh, SCHEMES["demo"])
    advance(model, optimizer, [0])
    optimizer.param_groups[0].update(notes, mask=torch.tensor([1.0, 2.0]))
    other, again = start(mesh, SCHEMES["demo"])
    again.param_groups[0].update(on=None, pair=(3,), layers=2.0)
    with_group = dt.Checkpoints(folder, model, optimizer)
    with_group.save()
    with_group.close()
    dt.load_checkpoint(folder, other, again)
    found = again.param_groups[0]
    groups = len(torch.distributed.distributed_c10d._world.pg_map)
    with_group.save()
    with_group.close()
    closed = groups == len(torch.distributed.distributed_c10d._world.pg_map)
    return {key: found[key] for key in notes} == notes, found["mask"].tolist(), closed


def test_options_that_a_loop_adds_to_a_group_are_loaded(tmp_path):
    assert worlds.run(with_notes, 2, 1, tmp_path) == [(True, [1.0, 2.0], True)] * 2


def elastic(mesh, folder):
    """Replicas come and go, and the parameters that are trained when it is loaded are not the saved ones."""
    found = {}
    for name in ("demo", "demo-owner", "diloco"):
        if mesh.size() == 4:
            model, optimizer = start(mesh, SCHEMES[name])
            advance(model, optimizer, range(4))
            dt.save_checkpoint(f"{folder}/{name}", model, optimizer)
        else:
            model, optimizer = start(mesh, SCHEMES[name], 5)
            loaded = dt.load_checkpoint(f"{folder}/{name}", model, optimizer)
            assert "layers.1.bias" not in str(sorted(dt.replica_state(optimizer)))
            assert loaded.step == 4
            advance(model, optimizer, range(5, 8))
            assert any("layers.1.bias" in key for key in dt.replica_state(optimizer))
        optimizer.synchronize()
        found[name] = dt.fingerprint(model, mesh)[1]
        assert all(local(p).isfinite().all() for p in model.parameters())
    return found


@pytest.mark.long  # no branch of its own
def test_a_changed_run_goes_on_in_another_world(tmp_path):
    for shape in ((2, 2), (3, 1)):
        for found in worlds.run(elastic, *shape, tmp_path):
            assert found == dict.fromkeys(found, True)


class Late(Plain):
    """`Plain` with another layer, of another width, after the layers that fit."""

    def __init__(self, width=24):
        super().__init__()
        self.late = nn.Linear(32, width)

    def forward(self, x):
        return super().forward(x).mean() + self.late(x).mean()


def begun(mesh, width, steps):
    model = dt.shard(built(Late, width=width), mesh)
    base = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = dt.replicate(base, model, mesh["replicate"], SCHEMES["demo"])
    for step in range(steps):
        model(batch(torch.distributed.get_rank(), step, 32)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def all_of(model, optimizer):
    states = [local(t) for p in model.parameters() for t in optimizer.state[p].values()]
    return *everything(model, optimizer), digest(states), optimizer.step_count


def refused(mesh, folder, before):
    """What a refused load has changed, by what was wrong: in a world of the same shape, or of another one."""
    if before:
        model, optimizer = begun(mesh, 24, 3)
        dt.save_checkpoint(folder / "shape", model, optimizer)
        optimizer.param_groups[0]["eps"] = "of training"
        dt.save_checkpoint(folder / "option", model, optimizer)
        return []
    changed = []
    for kind, width in (("shape", 40), ("option", 24)):
        model, optimizer = begun(mesh, width, 2)
        was = all_of(model, optimizer)
        with pytest.raises(ValueError):
            dt.load_checkpoint(folder / kind, model, optimizer)
        if all_of(model, optimizer) != was:
            changed.append(kind)
    model, optimizer = begun(mesh, 24, 2)
    state = dt.TrainingState(*begun(mesh, 24, 3)).state_dict()
    next(iter(state["replication"].values())).popitem()
    was = all_of(model, optimizer)
    with pytest.raises(ValueError):
        dt.TrainingState(model, optimizer).load_state_dict(state)
    if all_of(model, optimizer) != was:
        changed.append("state of replicas")
    return changed


@pytest.mark.parametrize("world", [(2, 1), (2, 2), (1, 2)])
def test_a_refused_load_leaves_everything_as_it_was(world, tmp_path):
    worlds.run(refused, 2, 1, tmp_path, True)
    assert not any(worlds.run(refused, *world, tmp_path, False))
