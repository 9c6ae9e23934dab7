"""Poison and drift in real worlds: what one replica does wrong is named on all ranks, at the same step."""

import math

import pytest
import torch

import detonation as dt
import worlds
from detonation.core.agreement.desync import numbers_of
from detonation.core.flat.tensors import digest, local
from detonation.core.integrity.fault_counts import BadPeer, Desync, NonFiniteGradient
from detonation.core.integrity.message import HEADER_BYTES
from worlds import caught
from zoo import KINDS, SCHEMES, TALKING, Plain, batch, built

pytestmark = pytest.mark.usefixtures("lasting_worlds")

SKIP = dt.Safety(non_finite="skip")
BLOCK = "layers.1.weight"


def start(mesh, scheme, safety=None, base=None):
    model = dt.shard(built(Plain), mesh)
    optimizer = base(model.parameters()) if base else torch.optim.SGD(model.parameters(), lr=0.1)
    return model, dt.replicate(optimizer, model, mesh["replicate"], scheme, safety=safety)


def advance(mesh, model, optimizer, steps, bad=lambda step, gradient: None):
    """Trains on, `bad` having its way with a gradient of the last rank alone."""
    for step in steps:
        model(batch(mesh.get_rank(), step, 32)).mean().backward()
        if mesh.get_rank() == mesh.size() - 1:
            bad(step, local(model.layers[1].weight.grad))
        optimizer.step()
        optimizer.zero_grad()


def poison(value, at):
    return lambda step, gradient: gradient.view(-1)[3].fill_(value) if step in at else None


def stopped(mesh, value):
    """The default: an error on every rank before any weight moves, the poisoned memory as it was."""
    model, optimizer = start(mesh, dt.demo())
    advance(mesh, model, optimizer, range(2))
    weights, memory = digest(model.parameters()), dt.replica_state(optimizer)
    outcome = caught(advance, mesh, model, optimizer, range(2, 3), poison(value, {2}))
    if mesh.get_rank() == mesh.size() - 1:
        kept = {
            key: tensor
            for key, tensor in dt.replica_state(optimizer).items()
            if "usual_norm" not in key
        }
        assert all(torch.equal(tensor, memory[key]) for key, tensor in kept.items())
    return outcome, digest(model.parameters()) == weights, optimizer.stats.skipped


@pytest.mark.parametrize("value", [math.nan, -math.inf, 1e17])
def test_poison_stops_all_ranks_at_the_same_step_with_the_same_words(value):
    remedy = 'lower lr, or clip; a GradScaler needs Safety(non_finite="skip")'
    text = f"the gradient of {BLOCK} is not finite on replica 1 at step 2: {remedy}"
    outcomes = worlds.run(stopped, 2, 2, value)
    assert [outcome for outcome, _, _ in outcomes] == [(NonFiniteGradient.__name__, text)] * 4
    assert all(unmoved for _, unmoved, _ in outcomes)


def skipped(mesh):
    """Each scheme goes on without the poisoned contribution, and no part of any memory or weight is poisoned."""
    results = {}
    for name, scheme in TALKING.items():
        model, optimizer = start(mesh, scheme, SKIP)
        at = {2, 3} if scheme.signal == "gradients" else set()
        advance(mesh, model, optimizer, range(4), poison(math.nan, at))
        if scheme.signal == "parameters" and mesh.get_rank() == mesh.size() - 1:
            local(model.layers[1].weight).data.view(-1)[3] = math.nan
        before = [local(p).detach().clone() for p in model.parameters()]
        advance(mesh, model, optimizer, range(4, 9))
        optimizer.synchronize()
        clean = all(
            t.isfinite().all()
            for t in [*dt.replica_state(optimizer).values(), *map(local, model.parameters())]
        )
        moved = all(
            (local(p) != old).any() for p, old in zip(model.parameters(), before, strict=True)
        )
        results[name] = (
            bool(clean),
            bool(moved),
            dt.fingerprint(model, mesh)[1],
            optimizer.stats.skipped > 0,
        )
    return results


def test_every_scheme_skips_poison_and_goes_on_bitwise_equal():
    for rank in worlds.run(skipped, 3, 1):
        assert rank == dict.fromkeys(TALKING, (True, True, True, True))


def by_zeros(mesh):
    """A skipped contribution of `full` is one of zeros: the mean stays over all replicas."""
    model, optimizer = start(mesh, dt.full(), SKIP)
    plain = built(Plain)
    for step in range(3):
        for replica in range(2 if step != 1 else 1):
            (plain(batch(replica, step, 32)).mean() / 2).backward()
        with torch.no_grad():
            for p in plain.parameters():
                p -= 0.1 * p.grad
                p.grad = None
    advance(mesh, model, optimizer, range(3), poison(math.nan, {1}))
    for mine, reference in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), reference, atol=1e-6, rtol=1e-5)
    return optimizer.stats.skipped


def test_the_mean_stays_over_all_replicas():
    assert worlds.run(by_zeros, 2, 1) == [1, 1]


def loud(mesh):
    """A gradient that is finite, and far larger than any before it."""
    model, optimizer = start(mesh, dt.demo())
    advance(mesh, model, optimizer, range(12), poison(1e11, {3}))
    largest = max(abs(t).max().item() for t in optimizer.local_state().values())
    return optimizer.stats.refused, largest < 1e6, dt.fingerprint(model, mesh)[1]


def test_one_outlier_costs_one_message_and_not_the_run():
    assert worlds.run(loud, 3, 1) == [(1, True, True)] * 3


def too_often(mesh):
    model, optimizer = start(mesh, dt.demo(), SKIP)
    outcome = caught(advance, mesh, model, optimizer, range(20), poison(math.inf, range(3, 20)))
    return outcome, optimizer.step_count


def test_skipping_ends_after_ten_in_a_row_on_all_ranks():
    text = (
        f"the gradient of {BLOCK} is not finite on replica 1 at step 13 "
        "for the 11th time in a row: lower lr, or clip"
    )
    assert worlds.run(too_often, 2, 2) == [((NonFiniteGradient.__name__, text), 13)] * 4


def damaging(mesh, scheme):
    """The last rank's messages are damaged after they were sealed: all refuse them, three times, then all stop."""
    model, optimizer = start(mesh, scheme)
    advance(mesh, model, optimizer, range(2))
    if mesh.get_rank() == mesh.size() - 1:
        guard = optimizer.build()[0].channel.exchange._guard
        seal = guard.seal

        def damaged(*arguments, **options):
            octets = seal(*arguments, **options)
            octets[:, HEADER_BYTES - 1] += 1
            return octets

        guard.seal = damaged
    outcome = caught(advance, mesh, model, optimizer, range(2, 9))
    return outcome, optimizer.step_count, dt.fingerprint(model, mesh)[1]


@pytest.mark.parametrize(
    "scheme", [dt.demo(link="all-gather"), dt.random_sign(link="all-gather")], ids=lambda s: s.name
)
def test_damaged_messages_are_refused_by_all_and_their_sender_named(scheme):
    text = "3 messages of replica 2 were refused, the last at step 4: read the reasons in the log"
    assert worlds.run(damaging, 3, 1, scheme) == [((BadPeer.__name__, text), 4, True)] * 3


def test_damage_that_only_owners_see_stops_all():
    outcomes = worlds.run(damaging, 3, 1, dt.demo(link="owner"))
    assert len({outcome for outcome, _, _ in outcomes}) == 1
    assert (
        outcomes[0][0][0] == BadPeer.__name__
        and "messages of replica 2 were refused" in outcomes[0][0][1]
    )


def drifting(mesh, scheme, safety, what):
    """One number of one replica becomes another: in the weights, or in the optimizer's state."""
    model, optimizer = start(mesh, scheme, safety, lambda p: torch.optim.AdamW(p, lr=1e-3))
    advance(mesh, model, optimizer, range(2))
    if mesh.get_local_rank("replicate") == 1 and mesh.get_local_rank("shard") == 0:
        if what == "anchor":
            part = optimizer.build()[0]._anchor.flat
        else:
            part = (
                local(model.layers[0].weight)
                if what == "weights"
                else local(optimizer.state[model.layers[0].weight]["exp_avg"])
            )
        part.data.view(-1)[5] += 1e-6
    outcome = caught(advance, mesh, model, optimizer, range(2, 4))
    optimizer.synchronize()
    return outcome, optimizer.step_count, dt.fingerprint(model, mesh)[1]


VERIFY = dt.Safety(verify_every=2)
REPAIR = dt.Safety(verify_every=2, on_desync="repair")


@pytest.mark.long_cases("weights")
@pytest.mark.parametrize("what", ["weights", "state"])
def test_drift_is_found_and_named_on_all_ranks(what):
    text = "replica 1 differs from the other replicas in layers.0.weight after step 4"
    outcomes = worlds.run(drifting, 3, 2, dt.demo(), VERIFY, what)
    assert outcomes == [((Desync.__name__, text), 4, False)] * 6


@pytest.mark.parametrize(
    "scheme, what",
    [(dt.demo(), "weights"), (dt.demo(), "state"), (dt.diloco(every=2), "anchor")],
    ids=["weights", "state", "anchor"],
)
@pytest.mark.parametrize("replicas", [2, 3])
def test_drift_is_repaired(scheme, what, replicas):
    assert (
        worlds.run(drifting, replicas, 1, scheme, REPAIR, what)
        == [(("nothing", ""), 4, True)] * replicas
    )


def test_what_a_scheduler_keeps_in_the_groups_is_no_option():
    """A newcomer may build its scheduler earlier or later than the others: its messages must not differ by it."""
    alone, scheduled = (torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))]) for _ in range(2))
    torch.optim.lr_scheduler.LinearLR(scheduled, start_factor=1.0)
    read = [numbers_of(each)(each.param_groups[0]) for each in (alone, scheduled)]
    assert "initial_lr" in scheduled.param_groups[0] and read[0] == read[1]


def quiet(mesh, names):
    """Schemes pass the comparison after each step: what must be equal is."""
    for name in names:
        model, optimizer = start(mesh, SCHEMES[name], dt.Safety(verify_every=1))
        advance(mesh, model, optimizer, range(5))
        sent = optimizer.stats.bytes_sent
        optimizer.verify()
        assert optimizer.stats.bytes_sent == sent and (
            optimizer.stats.skipped,
            optimizer.stats.refused,
        ) == (0, 0)
    return True


@pytest.mark.parametrize(
    ("shards", "names"), [(1, TALKING), pytest.param(2, KINDS, marks=pytest.mark.long)]
)
def test_what_must_be_equal_is_for_every_scheme(shards, names):
    assert all(worlds.run(quiet, 2, shards, list(names)))
