"""Half a step, or a step of another: it is refused or forgotten, and harmless."""

import pytest
import torch

import detonation as dt
import worlds
from detonation.cluster.network.loopback import LoopbackCommunicator
from worlds import caught
from zoo import Plain, batch, built

OPERATIONS = {
    "save a checkpoint": lambda folder, model, optimizer: dt.save_checkpoint(
        folder, model, optimizer
    ),
    "read the state": lambda folder, model, optimizer: optimizer.state_dict(),
    "synchronize": lambda folder, model, optimizer: optimizer.synchronize(),
    "reconfigure": lambda folder, model, optimizer: optimizer.reconfigure(
        dt.demo(topk=2, chunk=16)
    ),
    "begin again": lambda folder, model, optimizer: optimizer.overlap().__enter__(),
}


def training(mesh):
    model = built(Plain)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, dt.replicate(base, model, mesh["replicate"], dt.demo(topk=4, chunk=16))


def stepped(mesh, folder, operation=None):
    """The weights after two steps, and what was raised where an operation is within the second."""
    model, optimizer = training(mesh)
    error = None
    for step in range(2):
        optimizer.zero_grad()
        with optimizer.overlap():
            model(batch(mesh.get_rank(), step, 32)).mean().backward()
        if step and operation:
            error = caught(operation, folder, model, optimizer)
        optimizer.step()
    return model.state_dict(), error


def half_done(mesh, folder):
    """For each operation what was raised, and whether the weights end as without it."""
    model, optimizer = training(mesh)
    model(batch(mesh.get_rank(), 7, 32)).mean().backward()
    optimizer.step()
    plain, _ = stepped(mesh, folder)
    found = {}
    for name, operation in OPERATIONS.items():
        weights, error = stepped(mesh, folder, operation)
        equal = all(torch.equal(plain[key], weight) for key, weight in weights.items())
        found[name] = (*error, equal)
    return found


@pytest.mark.usefixtures("lasting_worlds")
def test_a_half_done_step_is_not_read(tmp_path):
    (found,) = worlds.run(half_done, 1, 1, tmp_path)
    for name, (kind, text, equal) in found.items():
        assert kind == "OverlapError" and "no step() followed" in text, (name, text)
        assert equal, name


def alone(fails):
    """The weights after five steps; before four of them overlap() may fail without a gradient.

    What is trained changes, too, which a step within overlap() does not look at.
    """
    model = built(Plain)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = dt.replicate(base, model, LoopbackCommunicator(), dt.demo(topk=4, chunk=16))
    for step in range(5):
        optimizer.zero_grad()
        if step and fails:
            with pytest.raises(KeyError), optimizer.overlap():
                raise KeyError
        model.layers[0].requires_grad_(step != 3)
        model(batch(0, step, 32)).mean().backward()
        optimizer.step()
    return model.state_dict()


def test_an_overlap_that_sent_nothing_is_forgotten():
    plain = alone(False)
    for key, weight in alone(True).items():
        assert torch.equal(plain[key], weight), key


def test_a_step_of_the_optimizer_inside_is_refused():
    model = built(Plain)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = dt.replicate(base, model, LoopbackCommunicator(), dt.demo())
    for _ in range(2):
        model(batch(0, 0, 32)).mean().backward()
        optimizer.step()
        kind, text = caught(base.step)
        assert kind == "RuntimeError" and "step() of the inner SGD was called" in text
