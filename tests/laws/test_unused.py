"""A parameter that no replica used is left alone: weights, optimizer state and memories."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from test_follow import TOKEN, held
from test_survive import survivors

import detonation as dt
from covering import covered
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.cluster.network.simulated import simulate_replicas
from detonation.core.exchange.two_stage import TwoStage
from detonation.core.flat.tensors import digest
from detonation.core.integrity.fault_counts import Desync
from detonation.core.integrity.message import MOST_KNOWN
from detonation.core.schemes import buckets
from detonation.core.schemes.traffic import ring_bytes
from steps import unsent
from zoo import GRADIENT, HEADS, KINDS, Heads, built

REPLICAS = 2
PLAN = [
    ("ab", "b"),
    ("a", "a"),
    ("b", "b"),
    ("a", "b"),
    ("ab", "c"),
    ("", ""),
    ("a", "a"),
    ("c", "ac"),
]
"""By step, the heads that each of two replicas uses."""
OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, betas=(0.5, 0.9)),
    "sgd": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "signs": partial(dt.SignSGD, lr=1e-2, weight_decay=0.1),
    "signs with momentum": partial(dt.SignSGD, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "muon": partial(dt.Muon, lr=1e-2, weight_decay=0.1),
}
STATELESS = partial(torch.optim.SGD, lr=1e-2, weight_decay=0.1)


MODEL = built(Heads)  # threads share a random generator


def batch(replica, step):
    return torch.randn(4, 24, generator=torch.Generator().manual_seed(100 * step + replica))


def started(communicator, scheme, base=OPTIMIZERS["adamw"], **settings):
    model = built(Heads)
    return model, dt.replicate(base(model.parameters()), model, communicator, scheme, **settings)


def heads_at(step, replica):
    return PLAN[step % len(PLAN)][replica % REPLICAS]


def backward(model, step, replica):
    model(batch(replica, step), heads_at(step, replica)).backward()


def advance(model, optimizer, replica, steps, overlap=False):
    for step in steps:
        with optimizer.overlap() if overlap else nullcontext():
            backward(model, step, replica)
        optimizer.step()
        optimizer.zero_grad()


def everything(model, optimizer):
    """By part, the bits of all that a step may change."""
    (replicator,) = optimizer.build()
    memory = replicator.channel.memory
    found = {part: [] for part in HEADS}
    for name, parameter in model.named_parameters():
        part = name.partition(".")[0]
        found[part].append(digest([parameter]))
        state = optimizer.base.state.get(parameter, {})
        found[part] += [digest([state[key]]) for key in sorted(state)]
    if memory:
        named = replicator.layout.parts(memory.residual)
        for slot, residual in zip(replicator.layout.slots, named, strict=True):
            found[slot.name.partition(".")[0]].append(digest([residual]))
    return found


def used_at(step):
    return {"trunk", *"".join(PLAN[step % len(PLAN)])}


def changed_parts(communicator, scheme, base):
    """By step, the parts of which something changed, and the weights."""
    model, optimizer = started(communicator, scheme, base)
    found = []
    for step in range(len(PLAN)):
        optimizer.set_up()
        before = everything(model, optimizer)
        advance(model, optimizer, communicator.replica, [step])
        after = everything(model, optimizer)
        changed = {part for part in HEADS if before[part] != after[part]}
        found.append((changed, digest(model.parameters())))
    return found


def check_left_alone(scheme, base):
    each = simulate_replicas(lambda c: changed_parts(c, scheme, base), REPLICAS)
    assert [weights for _, weights in each[0]] == [weights for _, weights in each[1]]
    for changed in each:
        for step, (parts, _) in enumerate(changed):
            assert parts == used_at(step), step


@pytest.mark.parametrize("name", GRADIENT)
def test_law_10_what_nobody_used_is_left_alone_under_every_scheme(name):
    check_left_alone(GRADIENT[name], OPTIMIZERS["adamw"])


@pytest.mark.parametrize("base", OPTIMIZERS)
@pytest.mark.parametrize("name", ["full", "demo-sign"])
def test_law_10_and_by_every_optimizer(name, base):
    check_left_alone(GRADIENT[name], OPTIMIZERS[base])


def weights_of_full(communicator, base):
    model, optimizer = started(communicator, dt.full(), base)
    advance(model, optimizer, communicator.replica, range(len(PLAN)))
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("base", ["adamw", "sgd"])
def test_law_6_full_is_one_process_that_averages(base):
    """There a gradient is missing if no batch uses the parameter, and else a mean with zeros."""
    found = simulate_replicas(lambda c: weights_of_full(c, OPTIMIZERS[base]), REPLICAS)
    model = built(Heads)
    optimizer = OPTIMIZERS[base](model.parameters())
    for step in range(len(PLAN)):
        kept = []
        for replica in range(REPLICAS):
            backward(model, step, replica)
            kept.append([p.grad for p in model.parameters()])
            model.zero_grad()
        for parameter, *own in zip(model.parameters(), *kept, strict=True):
            present = [gradient for gradient in own if gradient is not None]
            parameter.grad = sum(present) / REPLICAS if present else None
        optimizer.step()
        model.zero_grad()
    for mine in found:
        assert all(torch.equal(*pair) for pair in zip(mine, model.parameters(), strict=True))


def with_zeros(communicator, scheme, zeros):
    """The second replica lacks gradients, or has zeros in their place; the first has all."""
    model, optimizer = started(communicator, scheme)
    for step in range(4):
        backward(model, step, communicator.replica)
        for parameter in model.parameters():
            if parameter.grad is None and (zeros or communicator.replica == 0):
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    return digest(model.parameters()), optimizer.stats.bytes_sent


@pytest.mark.parametrize("name", GRADIENT)
def test_law_10_a_missing_gradient_is_zero_where_another_replica_has_one(name):
    runs = [
        simulate_replicas(lambda c, z=zeros: with_zeros(c, GRADIENT[name], z), REPLICAS)
        for zeros in (False, True)
    ]
    assert runs[0] == runs[1]  # and not a byte is sent for it


LOSSLESS = {
    "demo": dt.demo(topk=2, chunk=16, decay=1.0),
    "demo-sign": dt.demo(topk=2, chunk=16, decay=1.0, precision="sign", error_feedback=True),
    "demo-owner": dt.demo(topk=2, chunk=64, decay=1.0, link="owner"),
    "loco": dt.loco(decay=1.0),
}


def balance_of(communicator, scheme):
    """What moved the weights, what is still to be sent, and all gradients, summed up."""
    model = built(Heads)
    begun = [p.detach().clone() for p in model.parameters()]
    base = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = dt.replicate(base, model, communicator, scheme)
    total = [torch.zeros_like(p) for p in begun]
    for step in range(2 * len(PLAN)):
        generator = torch.Generator().manual_seed(10 * step + communicator.replica)
        for name, parameter in model.named_parameters():
            gradient = torch.randn(parameter.shape, generator=generator)
            if name.partition(".")[0] in ("trunk", *heads_at(step, communicator.replica)):
                parameter.grad = gradient
        for each, parameter in zip(total, model.parameters(), strict=True):
            if parameter.grad is not None:
                each += parameter.grad
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    moved = [old - p.detach() for old, p in zip(begun, model.parameters(), strict=True)]
    return moved, unsent(optimizer), total


@pytest.mark.parametrize("name", LOSSLESS)
def test_law_1_nothing_is_lost_while_nobody_uses_a_parameter(name):
    each = simulate_replicas(lambda c: balance_of(c, LOSSLESS[name]), REPLICAS)
    for moved, *rest in zip(
        each[0][0], *(part for _, *parts in each for part in parts), strict=True
    ):
        left, total = rest[::2], rest[1::2]
        torch.testing.assert_close(REPLICAS * moved + sum(left), sum(total), atol=2e-4, rtol=1e-4)


def bytes_by_step(communicator, plan):
    model, optimizer = started(communicator, dt.full())
    sent = []
    for step, heads in enumerate(plan):
        before = optimizer.stats.bytes_sent
        model(batch(communicator.replica, step), heads[communicator.replica]).backward()
        optimizer.step()
        optimizer.zero_grad()
        sent.append(optimizer.stats.bytes_sent - before)
    return sent


def test_bits_travel_once_for_each_set_of_parameters_and_only_where_all_lack_some():
    plan = [("abcd", "abcd"), ("abcd", "a"), *[("a", "a"), ("b", "b")] * 3, ("a", "b"), ("ab", "b")]
    (sent, _) = simulate_replicas(lambda c: bytes_by_step(c, plan), REPLICAS)
    bits = ring_bytes("all-gather", -(-2 * len(HEADS) // 8), REPLICAS)
    assert [each - sent[0] for each in sent] == [0, 0, bits, bits, 0, 0, 0, 0, 0, bits]


def many_sets(communicator):
    """More sets than all remember, in an order that names those that were forgotten, too."""
    model, optimizer = started(communicator, dt.demo(topk=4, chunk=16))
    generator = torch.Generator().manual_seed(communicator.replica)
    for step in range(6 * MOST_KNOWN):
        picked = torch.randint(0, 2, (5,), generator=generator).tolist()
        model(batch(communicator.replica, step), "abcd").backward()
        for part, keep in zip(HEADS, picked, strict=True):
            for parameter in model.get_submodule(part).parameters():
                parameter.grad = parameter.grad if keep else None
        optimizer.step()
        optimizer.zero_grad()
    return digest(model.parameters()), optimizer.stats.refused


def test_replicas_agree_on_more_sets_than_they_remember():
    first, second = simulate_replicas(many_sets, REPLICAS)
    assert first == second and not first[1]


def misheard(communicator):
    """A flipped bit in the sets that the second replica receives."""
    model, optimizer = started(communicator, dt.demo(topk=4, chunk=16))
    optimizer.set_up()
    gather = communicator.all_gather

    def all_gather(mine):
        arriving = gather(mine)
        if communicator.replica == 0 or len(mine) != -(-2 * len(HEADS) // 8):
            return arriving
        return lambda: arriving() ^ 1

    communicator.all_gather = all_gather
    advance(model, optimizer, communicator.replica, range(3))


def test_replicas_that_heard_of_other_sets_stop_at_their_next_message():
    with pytest.raises(Desync, match="differs from the other replicas"):
        simulate_replicas(misheard, REPLICAS)


def overlapped(communicator, scheme, overlap):
    model, optimizer = started(communicator, scheme)
    advance(model, optimizer, communicator.replica, range(len(PLAN)), overlap)
    return digest(model.parameters()), optimizer.stats.bytes_sent if not overlap else 0


@pytest.mark.parametrize("name", [name for name in GRADIENT if name in KINDS])
def test_gradients_that_leave_in_backward_give_the_same_bits(name, monkeypatch):
    monkeypatch.setattr(buckets, "SMALLEST", 2**10)
    scheme = GRADIENT[name]
    plain = simulate_replicas(lambda c: overlapped(c, scheme, False), REPLICAS)
    early = simulate_replicas(lambda c: overlapped(c, scheme, True), REPLICAS)
    assert [weights for weights, _ in plain] == [weights for weights, _ in early]


def accumulated(communicator):
    """By step, the parts that two micro-batches moved."""
    model, optimizer = started(communicator, dt.loco())
    found = []
    for step, micro in enumerate([("a", "b"), ("a", "a"), ("c", "")]):
        before = {part: digest(model.get_submodule(part).parameters()) for part in HEADS}
        for number, heads in enumerate(micro):
            model(batch(communicator.replica, 10 * step + number), heads).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append({p for p in HEADS if before[p] != digest(model.get_submodule(p).parameters())})
    return found


def test_used_in_one_micro_batch_is_used_in_the_step():
    expected = [{"trunk", "a", "b"}, {"trunk", "a"}, {"trunk", "c"}]
    assert simulate_replicas(accumulated, REPLICAS) == [expected] * REPLICAS


def resumed(communicator, scheme, at):
    model, optimizer = started(communicator, scheme)
    advance(model, optimizer, communicator.replica, range(at))
    weights, saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    again, other = started(communicator, scheme)
    again.load_state_dict(weights)
    other.load_state_dict(saved)
    for each, its in ((model, optimizer), (again, other)):
        advance(each, its, communicator.replica, range(at, len(PLAN) + 2))
        its.synchronize()
    return digest(model.parameters()) == digest(again.parameters())


@pytest.mark.parametrize("name", GRADIENT)
def test_law_9_a_run_resumes_exactly_where_parameters_were_unused(name):
    for at in (3, 6):
        found = simulate_replicas(lambda c, n=at: resumed(c, GRADIENT[name], n), REPLICAS)
        assert found == [True] * REPLICAS


def logged(communicator, scheme, folder):
    model, optimizer = started(communicator, scheme)
    optimizer.record(dt.UpdateLog(folder))
    advance(model, optimizer, communicator.replica, range(len(PLAN)))
    optimizer.synchronize()
    return digest(model.parameters())


@pytest.mark.parametrize("name", GRADIENT)
def test_a_log_tells_what_nobody_used(name, tmp_path):
    scheme = GRADIENT[name]
    if scheme.signal == "nothing":
        pytest.skip("nothing is logged")
    weights = simulate_replicas(lambda c: logged(c, scheme, tmp_path), REPLICAS)[0]
    model, optimizer = started(LoopbackCommunicator(REPLICAS), scheme)
    assert dt.replay(tmp_path, optimizer) == len(PLAN)
    assert digest(model.parameters()) == weights


def followed(communicator, scheme):
    """By step, whether a follower that came in the middle holds the weights."""
    model, optimizer = started(communicator, scheme)
    if communicator.replica:
        advance(model, optimizer, communicator.replica, range(len(PLAN)))
        return []
    feed = dt.Feed(model, optimizer, "127.0.0.1:0", token=TOKEN)
    optimizer.record(feed)
    advance(model, optimizer, 0, range(2))
    served, seen = built(Heads), []
    with dt.follow(served, feed.address, token=TOKEN, wait=False) as follower:
        while not feed.followers:
            follower.update(wait_s=0.01)
        for step in range(2, len(PLAN)):
            advance(model, optimizer, 0, [step])
            follower.update(to=step + 1)
            seen.append(held(served) == held(model))
        feed.close()
    return seen


@pytest.mark.parametrize("name", [name for name in GRADIENT if name in KINDS])
def test_a_follower_leaves_alone_what_nobody_used(name):
    seen = simulate_replicas(lambda c: followed(c, GRADIENT[name]), REPLICAS)[0]
    assert seen == [True] * (len(PLAN) - 2)


def lost(communicator, scheme, countdown, under_way, overlap):
    """Of four replicas the last, which alone uses a head at the step in which it dies, is lost."""
    if communicator.replica == 3:
        communicator.countdown, communicator.under_way = countdown, under_way
    model = copy.deepcopy(MODEL)
    base = OPTIMIZERS["adamw"]
    safety = dt.Safety(verify_every=1)
    optimizer = dt.replicate(base(model.parameters()), model, communicator, scheme, safety=safety)
    for step in range(len(PLAN)):
        replica = communicator.replica
        heads = "d" if replica == 3 else heads_at(step, replica)
        with optimizer.overlap() if overlap else nullcontext():
            model(batch(replica, step), heads).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    return digest(model.parameters()), optimizer.step_count


@covered(
    "name, countdown, under_way",
    [name for name in GRADIENT if name in KINDS],
    [0, 1, 2],
    [False, True],
)
def test_law_2_a_replica_is_lost_while_parameters_are_unused(name, countdown, under_way):
    act = partial(
        lost,
        scheme=GRADIENT[name],
        countdown=countdown,
        under_way=under_way,
        overlap=name == "demo",
    )
    found = {*survivors(act).values()}
    assert len(found) == 1 and {steps for _, steps in found} == {len(PLAN)}


def server_rows(communicator):
    """The server residual of the rows that nobody used, before and after such a step."""
    model, optimizer = started(communicator, GRADIENT["demo-owner"])
    advance(model, optimizer, communicator.replica, range(2))
    exchange = optimizer.build()[0].channel.exchange
    assert isinstance(exchange, TwoStage)
    before = exchange.residual.clone()
    advance(model, optimizer, communicator.replica, [5])
    layout = optimizer.build()[0].layout
    lines = layout.row_numbers(range(len(layout.slots))).unsqueeze(1)
    own = exchange.owners.deal(lines, lines.new_full((1,), -1))[communicator.replica].view(-1)
    trunk = [n for n, slot in enumerate(layout.slots) if slot.name.startswith("trunk")]
    others = ~torch.isin(own, torch.tensor(trunk))
    return torch.equal(exchange.residual[others], before[others]), bool(before[others].any())


def test_an_owner_keeps_what_it_has_of_a_parameter_that_nobody_used():
    assert simulate_replicas(server_rows, REPLICAS) == [(True, True)] * REPLICAS
