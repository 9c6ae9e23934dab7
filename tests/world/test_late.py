"""What is decided on an accelerator, and reported later, is what a CPU decides at once: the same bits and counts."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import detonation as dt
import worlds
from covering import some
from detonation.core import runtime
from detonation.core.compute import kernel_library
from detonation.core.flat.tensors import digest, local
from detonation.core.integrity import fault_counts
from detonation.core.integrity.fault_counts import NonFiniteGradient
from detonation.core.integrity.message import HEADER_BYTES
from detonation.core.replicator.overlap import OverlapError
from detonation.core.schemes import buckets
from worlds import caught
from zoo import TALKING, Plain, batch, built

STEPS = 6
BUCKETED = {"full", "demo", "demo-owner", "late-owner"}
SKIP = dt.Safety(non_finite="skip")
KINDS = (
    *(
        "full",
        "full-bf16",
        "demo",
        "demo-tiles",
        "demo-sign",
        "demo-bitmap-2bit",
        "demo-owner",
        "random-late",
    ),
    *("random-int8-clipped", "diloco", "streaming", "sparta"),
)
LATE = dt.demo(chunk=16, precision="sign", error_feedback=False, delay=1, link="owner")
SCHEMES = {name: TALKING[name] for name in KINDS} | {"late-owner": LATE}


@pytest.fixture(scope="module", autouse=True)
def small_buckets_many_strikes_and_one_engine():
    """Also in the ranks, which are forks."""
    with pytest.MonkeyPatch.context() as patch, worlds.lasting():
        patch.setattr(
            kernel_library, "KERNEL_CHUNKS", ()
        )  # the one that accelerators have, at once and late
        patch.setattr(fault_counts, "STRIKES", 1000)
        patch.setattr(buckets, "SMALLEST", 2**12)
        yield


def start(mesh, levels, safety):
    model = dt.shard(built(Plain), mesh)
    base = torch.optim.SGD(
        model.parameters(), lr=0.1
    )  # what is not finite reaches the weights of parameter schemes
    return model, dt.replicate(base, model, levels=levels, safety=safety, kernels=False)


def advance(mesh, model, optimizer, steps, bad=(), overlapped=False):
    """Trains on; at some steps a gradient of the last rank, and what it makes of the weights, is not finite."""
    for step in steps:
        poison = torch.nan if step in bad and mesh.get_rank() == mesh.size() - 1 else 1.0
        weight = model.layers[1].weight
        hook = weight.register_post_accumulate_grad_hook(
            lambda p, by=poison: local(p.grad).mul_(by)
        )
        with optimizer.overlap() if overlapped else nullcontext():
            model(batch(mesh.get_rank(), step, 32)).mean().backward()
        hook.remove()
        optimizer.step()
        optimizer.zero_grad()


def damage(guard, at):
    """After `at` messages two leave damaged, or what is added up where the network adds."""
    count = iter(range(1000))
    seal, seal_sum = guard.seal, guard.seal_sum

    def damaged(message, status, *arguments, **options):
        octets = seal(message, status, *arguments, **options)
        for each in (
            octets if status is not None else ()
        ):  # the last run of a message begins with its header
            if next(count) in (at, at + 1):
                each[HEADER_BYTES - 1] += 1
        return octets

    def damaged_sum(digits, *arguments):
        seal_sum(digits, *arguments)
        if next(count) == at:
            digits._base[0] = torch.inf

    guard.seal, guard.seal_sum = damaged, damaged_sum


def outcome(mesh, levels, late, overlapped):
    runtime.decides_on_device = lambda device: late
    model, optimizer = start(mesh, levels, SKIP)
    channel = optimizer.build()[
        0
    ].channel  # without the comparison at the start, which is not what is tested
    if mesh.get_rank() == 0:
        damage(channel.exchange._guard, 1)
    advance(mesh, model, optimizer, range(STEPS), {1, 2, 4}, overlapped)
    optimizer.synchronize()
    state = {
        key: digest([t + 0.0]) for key, t in dt.replica_state(optimizer).items()
    }  # zeros have no sign
    counts = optimizer.stats.skipped, optimizer.stats.refused, optimizer.stats.skipped_by_parameter
    return digest(model.parameters()), state, counts, dt.fingerprint(model, mesh)[1]


def compared(mesh, schemes):
    ends = {}
    for name, scheme in schemes.items():
        for overlapped in (False, True) if name in BUCKETED else (False,):
            once, after = (
                outcome(mesh, [(mesh["replicate"], scheme)], late, overlapped)
                for late in (False, True)
            )
            ends[name, overlapped] = once == after, once[3], once[2][0] + once[2][1] > 0
    return ends


@some("replicas, shards", [(3, 1), (2, 2)], keep=[(2, 2)])
def test_late_reports_leave_the_same_bits_and_counts(replicas, shards):
    names = SCHEMES if shards == 1 else ("full", "demo-owner", "random-late")
    ranks = worlds.run(compared, replicas, shards, {name: SCHEMES[name] for name in names})
    for name in ranks[0]:
        ends = [rank[name] for rank in ranks]
        assert all(same and equal for same, equal, _ in ends), name
        assert any(counted for _, _, counted in ends), (
            name
        )  # what only an owner sees only it counts


def stopped(mesh, curious):
    """A poisoned gradient at step 2. curious: whether the first rank alone looks before all stop."""
    runtime.decides_on_device = lambda device: True
    model, optimizer = start(mesh, [(mesh["replicate"], dt.demo(delay=1))], dt.Safety())
    for step in range(9):
        outcome = caught(advance, mesh, model, optimizer, [step], {2})
        if outcome[0] != "nothing":
            break
        if curious and mesh.get_rank() == 0:
            dt.replica_state(optimizer)
            assert optimizer.stats.skipped == (mesh.size() == 2 and step >= 3)
    return outcome, optimizer.step_count, dt.fingerprint(model, mesh)[1]


@pytest.mark.parametrize("curious", [False, True])
@pytest.mark.parametrize("shards, after", [(1, 4), (2, 5)])
def test_a_reason_to_stop_is_known_to_all_ranks_at_the_same_later_step(shards, after, curious):
    # at the step where the message of step 2 lands
    remedy = 'lower lr, or clip; a GradScaler needs Safety(non_finite="skip")'
    text = f"the gradient of layers.1.weight is not finite on replica 1 at step 3: {remedy}"
    assert (
        worlds.run(stopped, 2, shards, curious)
        == [((NonFiniteGradient.__name__, text), after, True)] * 2 * shards
    )


def overwritten(mesh):
    """What no tensor's version tells, as where a GradScaler unscales, is found one step later."""
    runtime.decides_on_device = lambda device: True
    model, optimizer = start(mesh, [(mesh["replicate"], dt.demo())], dt.Safety())
    optimizer.build()
    advance(mesh, model, optimizer, range(2), overlapped=True)
    with optimizer.overlap():
        model(batch(mesh.get_rank(), 2, 32)).mean().backward()
    for parameter in model.parameters():
        local(parameter.grad).data.mul_(2)
    optimizer.step()
    optimizer.zero_grad()
    return caught(advance, mesh, model, optimizer, [3])


def test_gradients_that_changed_after_they_were_sent_are_refused_a_step_later():
    for kind, text in worlds.run(overwritten, 2, 1):
        assert kind == OverlapError.__name__ and text.startswith(
            "a gradient changed after it was sent"
        )


def head_of_one_row(mesh, clip, until, folder):
    """Steps of AdamW on each tensor, where rank 1 of each node has no coordinate."""
    torch.manual_seed(0)
    model = dt.shard(nn.Linear(8, 1), mesh)
    adamw = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheme = dt.loco(delay=2)
    optimizer = dt.replicate(adamw, model, mesh["replicate"], scheme, clip=clip)
    for step in range(4):
        torch.manual_seed(10 * step + mesh.get_rank())
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == until:
            dt.save_checkpoint(folder, model, optimizer)
            if step % 2:
                dt.load_checkpoint(folder, model, optimizer)
    optimizer.synchronize()
    optimizer.synchronize()  # nothing is left to apply
    return [float(state["step"]) for state in adamw.state.values()], dt.fingerprint(model, mesh)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_rank_without_coordinates_applies_as_many_late_updates_as_the_others(clip, tmp_path):
    """Without a save, with one in blank entries (step 0), with one loaded, and with one at the end."""
    plain = worlds.run_alone(head_of_one_row, 2, 2, clip, None, tmp_path)
    assert {steps for each, _ in plain for steps in each} == {6.0}
    for until in (0, 1, 2, 3):
        found = worlds.run_alone(head_of_one_row, 2, 2, clip, until, tmp_path / str(until))
        assert found == plain, until


class Headed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(64, 64)
        self.head = nn.Linear(64, 1, bias=False)  # its row is on one shard alone

    def forward(self, values):
        return self.body(values).square().mean() + self.head(values).mean()


def unused_head_of_one_row(mesh, base, folder, resumed):
    """The weights after ten steps, of which the sixth used no head, with a save after the seventh."""

    def started():
        torch.manual_seed(0)
        model = dt.shard(Headed(), mesh)
        scheme = dt.schemes.random(rate=1 / 4, delay=2)
        optimizer = base(model.parameters(), lr=0.01)
        return model, optimizer, dt.replicate(optimizer, model, mesh["replicate"], scheme, seed=3)

    def advance(model, optimizer, steps):
        for step in steps:
            torch.manual_seed(100 * step + mesh.get_rank())
            model(torch.randn(4, 64)).backward()
            if step == 5:
                model.head.weight.grad = None
            optimizer.step()
            optimizer.zero_grad()

    model, inner, optimizer = started()
    advance(model, optimizer, range(7))
    dt.save_checkpoint(folder, model, optimizer)
    if resumed:
        model, inner, optimizer = started()
        dt.load_checkpoint(folder, model, optimizer)
    advance(model, optimizer, range(7, 10))
    counts = [float(inner.state[each].get("step", -1)) for each in model.parameters()]
    return counts, dt.fingerprint(model, mesh)


@pytest.mark.parametrize("base", [dt.Muon, torch.optim.AdamW])
def test_a_resumed_rank_without_rows_leaves_out_what_was_unused_like_its_neighbours(base, tmp_path):
    """It took the head for used: Muon's collectives differed, and AdamW counted one step more."""
    plain, resumed = (
        worlds.run_alone(unused_head_of_one_row, 2, 2, base, tmp_path / str(again), again)
        for again in (False, True)
    )
    assert plain == resumed
