"""The same batches: replicas that all see them train as one, and it must not matter how many there are, or when."""

from dataclasses import replace

import pytest
import torch

import detonation as dt
import worlds
from covering import covered
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.core.codec.basis import Identity
from detonation.core.codec.precision import PRECISIONS
from detonation.core.schemes.traffic import collective_for
from zoo import TALKING, Plain, batch, built

pytestmark = pytest.mark.usefixtures("lasting_worlds")

STEPS = 13
SHAPES = {name: parameter.shape for name, parameter in built(Plain).named_parameters()}
TOKEN = b"a token for tests only"


def without_owners(scheme):
    """`scheme` without the owners of rows: they round again, each in blocks of its own rows."""
    ways = {collective_for(scheme, scheme.codec.layout(SHAPES), replicas) for replicas in (2, 3, 4)}
    return replace(scheme, link="all-gather") if "owner" in ways else scheme


SLOW = {
    "streaming-slow": dt.schemes.streaming_diloco(every=6, fragments=2, delay=3, precision="fp32")
}
AS_THEY_ARE = TALKING | SLOW
LAW = {name: without_owners(scheme) for name, scheme in AS_THEY_ARE.items()}
FORGETFUL = [
    name for name, scheme in LAW.items() if scheme.feedback is None and scheme is AS_THEY_ARE[name]
]
SAVED = [
    "full",
    "demo",
    "diloco",
    "streaming",
    "streaming-slow",
    "sparseloco",
    "muloco-2bit",
    "sparta",
]


def started(axis, scheme, model, base=torch.optim.AdamW):
    return dt.replicate(base(model.parameters(), lr=1e-2), model, axis, scheme)


def advance(model, optimizer, steps):
    """Takes steps on the batches that all replicas see; the weights after each."""
    seen = []
    for step in steps:
        model(batch(0, step, 32)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]))
    return seen


def trained(scheme, replicas, at=STEPS, later=0):
    """The weights after each step of one of `replicas` that all see the same; of `later` from step `at` on."""
    axis, model = LoopbackCommunicator(replicas), built(Plain)
    optimizer = started(axis, scheme, model)
    seen = advance(model, optimizer, range(at))
    axis.next_size = later
    return seen + advance(model, optimizer, range(at, STEPS))


def moments(scheme):
    """The steps before which something changes: each of a round, and of those that a message is on its way."""
    return range(4, 5 + max(scheme.round.every, scheme.round.delay))


def most(scheme, *numbers):
    """The largest difference, to the movement of the run, that rounding makes between these numbers of replicas.

    The mean of R equal values is exact where R is a power of two; else it has the rounding of the numbers that are
    added. Few cosines are added up one by one, and more of them, of more messages, by a transform.
    """
    if all(number & (number - 1) == 0 for number in numbers):
        return (
            0.0
            if scheme.codec.selection.shared or isinstance(scheme.codec.basis, Identity)
            else 1e-6
        )
    return 2**-8 if scheme.codec.precision == PRECISIONS["bf16"] else 1e-5


def require_alike(found, whole, limit):
    moved = (whole[-1] - whole[0]).norm()
    for step, (one, other) in enumerate(zip(found, whole, strict=True)):
        assert (one - other).norm() <= limit * moved, step


@covered("name, left, come", LAW, [2, 3], [2, 3])
def test_law_12_a_loss_at_any_moment_changes_nothing(name, left, come):
    """Four replicas of which so many are left, and so many to which others come, until they are four."""
    scheme = LAW[name]
    for before, after, points in ((4, left, moments(scheme)), (come, 4, [8 - come])):
        whole = trained(scheme, before)
        for at in points:
            require_alike(trained(scheme, before, at, after), whole, most(scheme, before, after))


@pytest.mark.parametrize("name", FORGETFUL)
def test_law_12_a_newcomer_goes_on_as_all_do(name):
    """Where nothing is left in a memory, which a newcomer has none of, and no round is open.

    In rounds the state of the inner optimizer is each replica's own, and a newcomer has that of its first copy.
    """
    scheme, at = LAW[name], 6
    base = torch.optim.SGD if scheme.signal == "parameters" else torch.optim.AdamW
    axis, model, served = LoopbackCommunicator(2), built(Plain), built(Plain)
    optimizer = started(axis, scheme, model, base)
    feed = dt.Feed(model, optimizer, "127.0.0.1:0", token=TOKEN)
    optimizer.record(feed)
    with dt.follow(served, feed.address, token=TOKEN, wait=False) as follower:
        while not feed.followers:
            follower.update(wait_s=0.01)
        advance(model, optimizer, range(at))
        optimizer.synchronize()
        optimizer.record(None)
        feed.close()
        while not follower.ended:
            follower.update(wait_s=1)
        newcomer = follower.join(LoopbackCommunicator(4))
    found, whole = (
        advance(*each, range(at, STEPS)) for each in ((served, newcomer), (model, optimizer))
    )
    require_alike(found, whole, most(scheme, 2, 4))


def saved_at(scheme):
    return [5, 6] if scheme.round.every > 1 or scheme.round.delay else [5]


def train_and_save(mesh, folder, names):
    whole = {}
    for name in names:
        model = built(Plain)
        optimizer, seen = started(mesh["replicate"], LAW[name], model), []
        for step in range(STEPS):
            if step in saved_at(LAW[name]):
                dt.save_checkpoint(folder / name / str(step), model, optimizer)
            seen += advance(model, optimizer, [step])
        whole[name] = [weights.tolist() for weights in seen]
    return whole


def load_and_train(mesh, folder, names):
    found = {}
    for name in names:
        for at in saved_at(LAW[name]):
            model = built(Plain)
            optimizer = started(mesh["replicate"], LAW[name], model)
            assert dt.load_checkpoint(folder / name / str(at), model, optimizer).step == at
            found[name, at] = [
                weights.tolist() for weights in advance(model, optimizer, range(at, STEPS))
            ]
    return found


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4)])
def test_law_12_another_number_of_replicas_goes_on_alike(tmp_path, before, after):
    """Where it grows, of schemes without a memory: what the others have not sent is theirs, and one begins empty."""
    names = [name for name in SAVED if before > after or name in FORGETFUL]
    whole = worlds.run(train_and_save, before, 1, tmp_path, names)[0]
    for rank in worlds.run(load_and_train, after, 1, tmp_path, names):
        for (name, at), seen in rank.items():
            pairs = ([torch.tensor(each) for each in run] for run in (seen, whole[name][at:]))
            require_alike(*pairs, most(LAW[name], before, after))
