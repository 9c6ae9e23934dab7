"""State that each shard keeps whole, as NorMuon's: any number of shards resumes it."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import detonation as dt
import worlds
from zoo import Plain, batch, built

pytestmark = pytest.mark.usefixtures("lasting_worlds")

FORM = {"lr": 1e-2, "coefficients": "polar_express", "muon_beta2": 0.9}


def start(mesh):
    model = dt.shard(built(Plain), mesh)
    base = dt.Muon(model.parameters(), **FORM)
    return model, dt.replicate(base, model, mesh["replicate"], dt.full())


def advance(model, optimizer, steps):
    for step in steps:
        model(batch(0, step, 32)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(tensor):
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.clone()


def held(model, optimizer):
    """Weights and states as wholes."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = whole(parameter.detach())
        for key, value in optimizer.base.state[parameter].items():
            found[f"{name} {key}"] = whole(value)
    return found


def save(mesh, folder):
    model, optimizer = start(mesh)
    advance(model, optimizer, range(3))
    dt.save_checkpoint(folder, model, optimizer)
    saved = held(model, optimizer)
    advance(model, optimizer, range(3, 5))
    return saved, held(model, optimizer)


def resume(mesh, folder):
    model, optimizer = start(mesh)
    dt.load_checkpoint(folder, model, optimizer)
    loaded = held(model, optimizer)
    advance(model, optimizer, range(3, 5))
    return loaded, held(model, optimizer)


def test_any_number_of_shards_resumes_the_state_of_rows(tmp_path):
    """And exactly, where it is the same number."""
    saved, later = worlds.run(save, 1, 2, str(tmp_path))[0]
    moments = [key for key in saved if key.endswith("second_momentum_buffer")]
    assert moments and all(saved[key].ndim == 1 and saved[key].any() for key in moments)
    for shape in ((1, 2), (1, 1), (1, 3), (2, 2)):
        for loaded, resumed in worlds.run(resume, *shape, str(tmp_path)):
            assert saved.keys() == loaded.keys()
            unlike = [key for key in saved if not torch.equal(saved[key], loaded[key])]
            assert unlike == [], shape
            if shape == (1, 2):
                assert all(torch.equal(later[key], resumed[key]) for key in later)


def by_torch(mesh, folder):
    model, optimizer = start(mesh)
    advance(model, optimizer, range(3))
    weights, state = get_state_dict(model, optimizer.base)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    saved = held(model, optimizer)
    other, again = start(mesh)
    weights, state = get_state_dict(other, again.base)
    template = {"model": weights, "optimizer": state}
    dcp.load(template, checkpoint_id=folder)
    set_state_dict(
        other,
        again.base,
        model_state_dict=template["model"],
        optim_state_dict=template["optimizer"],
    )
    loaded = held(other, again)
    return saved.keys() == loaded.keys() and all(
        torch.equal(saved[key], loaded[key]) for key in saved
    )


def test_torch_saves_and_loads_the_state_of_rows(tmp_path):
    assert worlds.run(by_torch, 1, 2, str(tmp_path)) == [True] * 2
