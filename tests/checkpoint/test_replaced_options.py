"""Options of the optimizer that a checkpoint replaces are told, and no ordinary resume is."""

from unittest.mock import patch

import pytest
import torch.distributed as dist
from test_exact import advance
from test_library import Lines
from torch.optim import SGD, lr_scheduler

import detonation as dt
import worlds
from detonation.checkpoint import snapshot
from zoo import Plain, built

pytestmark = pytest.mark.usefixtures("lasting_worlds")


def start(mesh, base, **options):
    model = dt.shard(built(Plain), mesh)
    made = base(model.parameters(), **options)
    return model, dt.replicate(made, model, mesh["replicate"], dt.full())


def warned(lines):
    return [text for level, text in lines.taken() if level == "WARNING"]


def other_options(mesh, folder):
    """The warnings of two loads with other options, and the options that count then."""
    lines = Lines()
    model, optimizer = start(mesh, dt.Muon, lr=1e-2, momentum=0.9)
    advance(model, optimizer, [0])
    dt.save_checkpoint(folder, model, optimizer)
    said = []
    others = {"lr": 5e-3, "momentum": 0.9, "coefficients": "polar_express", "muon_beta2": 0.95}
    for options in ({**others, "eps": 1e-6}, {"lr": 1e-2, "momentum": 0.8}):
        other, again = start(mesh, dt.Muon, **options)
        lines.taken()
        dt.load_checkpoint(folder, other, again)
        said.append(warned(lines))
        group = again.param_groups[0]
        assert (group["lr"], group["momentum"], group["muon_beta2"]) == (1e-2, 0.9, None)
    return said


def test_options_that_a_checkpoint_replaces_are_told_on_rank_0(tmp_path):
    (many, one), other = worlds.run(other_options, 2, 1, tmp_path)
    assert other == [[], []]
    path = tmp_path / "step-000001"
    end = "the saved values count now: to change them, set optimizer.param_groups after the load"
    assert many == [
        f"{path} replaced options of the optimizer: lr of group 0 (saved 0.01, given 0.005), eps of"
        " group 0 (saved 1e-08, given 1e-06), coefficients of group 0 (saved jordan, given"
        f" polar_express) and 1 more; {end}"
    ]
    assert one == [
        f"{path} replaced options of the optimizer: momentum of group 0 (saved 0.9, given 0.8);"
        f" {end}"
    ]


def by_hand(optimizer):
    def step(at):
        optimizer.param_groups[0].update(lr=0.1 / (2 + at), weight_decay=0.01 * at)

    return step


def plateau(optimizer):
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    return lambda at: schedule.step(1.0)


def cosine(optimizer):
    schedule = lr_scheduler.CosineAnnealingLR(optimizer, 9)
    return lambda at: schedule.step()


def one_cycle(optimizer):
    """It sets the momentum, too."""
    schedule = lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=9)
    return lambda at: schedule.step()


WAYS = [by_hand, plateau, cosine, one_cycle]


def ordinary(mesh, folder):
    """The warnings of loads by programs that save and resume, with each way to change an option."""
    lines = Lines()
    said = {}
    for way in WAYS:
        place = folder / way.__name__
        model, optimizer = start(mesh, SGD, lr=0.1, momentum=0.9)
        schedule = way(optimizer)
        for step in range(3):
            advance(model, optimizer, [step])
            schedule(step)
            dt.save_checkpoint(place, model, optimizer)
        lines.taken()
        for early in (True, False):
            other, again = start(mesh, SGD, lr=0.1, momentum=0.9)
            if early:
                schedule = way(again)
            dt.load_checkpoint(place, other, again)
            if not early:
                schedule = way(again)
            advance(other, again, [3])
            schedule(3)
            dt.load_checkpoint(place / "step-000002", other, again)  # back to an earlier step
            dist.barrier()
        said[way.__name__] = warned(lines)
    return said


def test_an_ordinary_resume_tells_nothing(tmp_path):
    quiet = {way.__name__: [] for way in WAYS}
    assert worlds.run(ordinary, 2, 1, tmp_path) == [quiet, quiet]


def of_before(mesh, folder):
    """The warnings of a load from a version that did not save what its run was given."""
    lines = Lines()
    model, optimizer = start(mesh, SGD, lr=0.1)
    advance(model, optimizer, [0])
    with patch.object(snapshot, "FIRST_OPTIONS", "unknown"):
        dt.save_checkpoint(folder, model, optimizer)
    other, again = start(mesh, SGD, lr=0.2)
    lines.taken()
    dt.load_checkpoint(folder, other, again)
    return warned(lines)


def test_a_checkpoint_of_before_loads_and_tells_nothing(tmp_path):
    assert worlds.run(of_before, 1, 1, tmp_path) == [[]]
