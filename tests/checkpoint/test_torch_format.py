"""torch.distributed.checkpoint takes equal keys on different ranks for one tensor, so local state has unequal keys."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_exact import BASES, advance, everything, start
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import detonation as dt
import worlds
from covering import covered
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.core.flat.tensors import digest
from zoo import SCHEMES, Plain, batch, built

pytestmark = pytest.mark.usefixtures("lasting_worlds")

CHOSEN = ["demo-owner", "streaming"]
"""Saved after 4 steps: with messages on their way, and in the middle of a round."""


def naive(mesh, folder, names):
    """The code of a user who does not know that replicas differ: one call for the model, one for the optimizer."""
    same = {}
    for name in names:
        model, optimizer = start(mesh, SCHEMES[name], BASES["AdamW"])
        advance(model, optimizer, range(4))
        before = everything(model, optimizer)
        dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=folder / name)
        other, again = start(mesh, SCHEMES[name], BASES["AdamW"])
        advance(other, again, range(5, 6))  # makes state, and other weights
        other.load_state_dict(model.state_dict())
        template = {"optimizer": again.state_dict()}
        dcp.load(template, checkpoint_id=folder / name)
        again.load_state_dict(template["optimizer"])
        same[name] = everything(other, again) == before
    return same


def by_helpers(mesh, folder, names):
    """The same through torch's helpers, which name state after parameters and leave out local state."""
    same = {}
    for name in names:
        model, optimizer = start(mesh, SCHEMES[name], BASES["AdamW"])
        advance(model, optimizer, range(4))
        _, base = get_state_dict(model, optimizer)
        dcp.save({"optimizer": base}, checkpoint_id=folder / name)
        before = everything(model, optimizer)[1]
        advance(model, optimizer, range(4, 5))
        weights, template = get_state_dict(model, optimizer)
        dcp.load({"optimizer": template}, checkpoint_id=folder / name)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=template)
        same[name] = everything(model, optimizer)[1] == before
    return same


def as_stateful(mesh, folder, names):
    same = {}
    for name in names:
        model, optimizer = start(mesh, SCHEMES[name], BASES["AdamW"])
        advance(model, optimizer, range(4))
        dcp.save({"app": dt.TrainingState(model, optimizer)}, checkpoint_id=folder / name)
        other, again = start(mesh, SCHEMES[name], BASES["AdamW"])
        dcp.load({"app": dt.TrainingState(other, again)}, checkpoint_id=folder / name)
        same[name] = everything(other, again) == everything(model, optimizer)
        advance(model, optimizer, range(4, 7))
        advance(other, again, range(4, 7))
        same[name] &= everything(other, again) == everything(model, optimizer)
    return same


@pytest.mark.filterwarnings("ignore")
@covered("name, way", CHOSEN, [naive, by_helpers, as_stateful])
def test_replicas_are_never_mixed(name, way, tmp_path):
    assert worlds.run(way, 2, 2, tmp_path, [name]) == [{name: True}] * 4


def elsewhere(mesh, folder):
    """The error of another number of replicas that loads the state of 2."""
    model, optimizer = start(mesh, SCHEMES["demo"], BASES["AdamW"])
    app = {"app": dt.TrainingState(model, optimizer)}
    if mesh.size(0) == 2:
        advance(model, optimizer, range(2))
        return dcp.save(app, checkpoint_id=folder) and ""
    try:
        dcp.load(app, checkpoint_id=folder)
    except (dcp.CheckpointException, ValueError) as error:
        return str(error)


@pytest.mark.filterwarnings("ignore")
def test_another_world_is_refused_by_name(tmp_path):
    worlds.run(elsewhere, 2, 1, tmp_path)
    assert "app.replication.replica2-shard0" in worlds.run(elsewhere, 3, 1, tmp_path)[0]
    (said,) = worlds.run(elsewhere, 1, 1, tmp_path)
    assert said.startswith(
        "the state was saved by 2 replicas x 1 shards, this run has 1 replicas x"
    )


def others_state(mesh):
    """The errors for one rank's state dict on another rank, as in a trainer that saves on rank 0 alone."""
    errors = []
    for name in ("demo", "diloco"):
        model, optimizer = start(mesh, SCHEMES[name], BASES["AdamW"])
        advance(model, optimizer, range(2))
        state = optimizer.state_dict()
        state["replication"] = {"replica9-shard0": state["replication"].popitem()[1]}
        state["state"] = {
            p: {
                key.replace(f"replica{mesh.get_local_rank(0)}.", "replica9."): value
                for key, value in values.items()
            }
            for p, values in state["state"].items()
        }
        try:
            optimizer.load_state_dict(state)
        except ValueError as error:
            errors.append(str(error))
    return errors


def test_rounds_begin_with_the_state_of_a_plain_optimizer():
    """A run that was trained without replicas goes on in rounds: the state that it saved is of all replicas."""
    model = built(Plain)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(batch(0, 0, 32)).mean().backward()
    plain.step()
    base = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dt.replicate(base, model, LoopbackCommunicator(), dt.diloco(every=4)).load_state_dict(
        plain.state_dict()
    )
    assert digest([s["exp_avg"] for s in base.state.values()]) == digest(
        [s["exp_avg"] for s in plain.state.values()]
    )


def test_the_state_of_another_replica_is_refused():
    for demo, diloco in worlds.run(others_state, 2, 1):
        assert "replica9-shard0 saved the state, but this rank is replica" in demo
        assert (
            "the saved optimizer state has replica9." in diloco
            and "so another replica saved it" in diloco
        )
