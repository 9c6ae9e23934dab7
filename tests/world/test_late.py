"""What is decided on an accelerator, and reported later, is what a CPU decides at once: the same bits and counts."""

from contextlib import nullcontext

import pytest
import torch

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
BUCKETED = {"full", "demo", "demo-owner", "sign-owner"}
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
    ),
    *("random-int8-clipped", "diloco", "streaming", "sparta"),
)
SIGN_OWNER = dt.demo(chunk=16, precision="sign", error_feedback=False, link="owner")
SCHEMES = {name: TALKING[name] for name in KINDS} | {"sign-owner": SIGN_OWNER}


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
    names = SCHEMES if shards == 1 else ("full", "demo-owner")
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
    model, optimizer = start(mesh, [(mesh["replicate"], dt.demo())], dt.Safety())
    for step in range(9):
        outcome = caught(advance, mesh, model, optimizer, [step], {2})
        if outcome[0] != "nothing":
            break
        if curious and mesh.get_rank() == 0:
            dt.replica_state(optimizer)
            assert optimizer.stats.skipped == (mesh.size() == 2 and step >= 2)
    return outcome, optimizer.step_count, dt.fingerprint(model, mesh)[1]


@pytest.mark.parametrize("curious", [False, True])
@pytest.mark.parametrize("shards, after", [(1, 3), (2, 4)])
def test_a_reason_to_stop_is_known_to_all_ranks_at_the_same_later_step(shards, after, curious):
    remedy = 'lower lr, or clip; a GradScaler needs Safety(non_finite="skip")'
    text = f"the gradient of layers.1.weight is not finite on replica 1 at step 2: {remedy}"
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
