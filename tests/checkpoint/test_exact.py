"""A run that is stopped and resumed in a world of the same shape equals the uninterrupted run, bit for bit."""

import pytest
import torch

import detonation as dt
import worlds
from covering import covered, some
from detonation.checkpoint.verify import verify
from detonation.core.flat.tensors import digest
from zoo import KINDS, SCHEMES, Menagerie, Plain, batch, built

pytestmark = pytest.mark.usefixtures("lasting_worlds")

BASES = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "SignSGD": lambda params: dt.SignSGD(params, lr=1e-3, momentum=0.5, weight_decay=0.1),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3),
}


def start(mesh, scheme, base, kind=Plain):
    model = dt.shard(built(kind), mesh)
    return model, dt.replicate(base(model.parameters()), model, mesh["replicate"], scheme, seed=3)


def advance(model, optimizer, steps, width=32):
    rank = torch.distributed.get_rank()
    for step in steps:
        model(batch(rank, step, width)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def everything(model, optimizer):
    """Digests of the whole state of a rank: weights, base optimizer, local state."""
    local_state = dt.replica_state(optimizer)
    base = [
        {k: digest([v]) for k, v in sorted(optimizer.base.state[p].items())}
        for p in model.parameters()
    ]
    return [digest(model.parameters()), base, {key: digest([t]) for key, t in local_state.items()}]


def resumed(mesh, folder, schemes, base, kind, width):
    """By scheme, True where a run goes on exactly. Saved after 4 steps: in mid-round, with messages on their way."""
    same, base = {}, BASES[base]
    for name, scheme in schemes.items():
        model, optimizer = start(mesh, scheme, base, kind)
        with dt.Checkpoints(f"{folder}/{name}", model, optimizer) as checkpoints:
            advance(model, optimizer, range(4), width)
            checkpoints.save({"name": name})
            advance(model, optimizer, range(4, 7), width)  # while the checkpoint is written
        report = verify(folder / name / "step-000004")
        assert report.good, report.line()
        other, again = start(mesh, scheme, base, kind)
        advance(other, again, range(2), width)  # state from before loading leaves no trace
        loaded = dt.load_checkpoint(f"{folder}/{name}", other, again)
        advance(other, again, range(4, 7), width)
        same[name] = (loaded.step, loaded.extra) == (4, {"name": name})
        same[name] &= everything(model, optimizer) == everything(other, again)
    return same


@covered("name, base", SCHEMES, BASES)
def test_every_scheme_with_every_optimizer_goes_on_exactly(name, base, tmp_path):
    ends = worlds.run(resumed, 2, 1, tmp_path, {name: SCHEMES[name]}, base, Plain, 32)
    assert ends == [{name: True}] * 2


@pytest.mark.long_cases("demo-owner")
@some("name", KINDS, keep=["demo-owner", "streaming", "muloco-2bit"])
def test_shards_go_on_exactly(name, tmp_path):
    """Shards do not depend on the optimizer, so one optimizer with state of its own stands for all."""
    ends = worlds.run(resumed, 2, 2, tmp_path, {name: SCHEMES[name]}, "AdamW", Plain, 32)
    assert ends == [{name: True}] * 4


@pytest.mark.long_cases("demo")
@pytest.mark.parametrize("name", ["demo", "diloco"])
def test_awkward_parameters_go_on_exactly(name, tmp_path):
    ends = worlds.run(resumed, 2, 2, tmp_path, {name: SCHEMES[name]}, "AdamW", Menagerie, 257)
    assert ends == [{name: True}] * 4


def scheduled(mesh, folder, fresh):
    """A rate that is a tensor, and a scheduler, which is made before the save and after the load."""
    model = dt.shard(built(Plain), mesh)
    base = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), foreach=False)
    optimizer = dt.replicate(base, model, mesh["replicate"], dt.loco())
    if fresh:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        advance(model, optimizer, range(2))
        scheduler.step()
        dt.save_checkpoint(folder, model, optimizer)
    else:
        dt.load_checkpoint(folder, model, optimizer)
    (group,) = optimizer.param_groups
    return float(group["lr"]), float(group["initial_lr"])


def with_another_rate(mesh, folder):
    """Saved with a rate that is a tensor, and resumed with a number."""
    rates = []
    for rate in (torch.tensor(0.25), 0.5):
        model = built(Plain)
        base = torch.optim.SGD(model.parameters(), lr=rate)
        optimizer = dt.replicate(base, model, mesh["replicate"], dt.full())
        (dt.load_checkpoint if rates else dt.save_checkpoint)(folder, model, optimizer)
        rates.append(optimizer.param_groups[0]["lr"])
    return type(rates[1]).__name__, rates[1]


def test_a_rate_that_was_a_tensor_is_the_number_that_it_is_now(tmp_path):
    assert worlds.run(with_another_rate, 1, 1, tmp_path) == [("float", 0.25)]


def test_a_rate_that_is_a_tensor_comes_back_before_its_scheduler(tmp_path):
    before = worlds.run(scheduled, 2, 1, tmp_path, True)
    assert (
        before == worlds.run(scheduled, 2, 1, tmp_path, False) == [pytest.approx((5e-3, 1e-2))] * 2
    )


def with_an_unused_layer(mesh, folder):
    """Weights of a run that was saved with a message without a layer in flight, and of its resume."""
    ends = []
    for resumes in (False, True):
        model, optimizer = two_layers(mesh)
        for number in range(8):
            if number == 4:
                dt.save_checkpoint(folder, model, optimizer)
            if number == 4 and resumes:
                model, optimizer = two_layers(mesh)
                dt.load_checkpoint(folder, model, optimizer)
            hidden = model[0](batch(torch.distributed.get_rank(), number, 16))
            if number % 4 != 3:
                hidden = model[1](hidden)
            hidden.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        ends.append(digest(model.parameters()))
    return ends


def two_layers(mesh):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    base = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    scheme = dt.demo(topk=4, chunk=16)
    return model, dt.replicate(base, model, mesh["replicate"], scheme)


def test_law_10_what_nobody_used_is_left_alone_by_a_run_that_was_saved_meanwhile(tmp_path):
    for plain, resumed in worlds.run(with_an_unused_layer, 2, 1, tmp_path):
        assert plain == resumed
