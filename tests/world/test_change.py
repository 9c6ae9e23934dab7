"""Other settings of a scheme in the middle of a run: nothing is forgotten, replicas agree, and a resumed run knows."""

import io

import pytest
import torch

import detonation as dt
import worlds
from covering import some
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.cluster.network.simulated import simulate_replicas
from detonation.core.flat.tensors import digest
from detonation.core.schemes.traffic import bytes_sent
from steps import Passing, unsent
from worlds import caught
from zoo import Plain, batch, built

pytestmark = pytest.mark.usefixtures("lasting_worlds")

ALL = {"decay": 1.0, "alpha": 1.0}
CHANGES = {
    "topk": [dt.demo(4, 16, **ALL), dt.demo(1, 16, **ALL), dt.demo(8, 16, **ALL)],
    "rate": [dt.schemes.random(rate, **ALL) for rate in (1 / 4, 1 / 16, 1 / 3)],
    "owners-stay": [dt.demo(k, 16, link="owner", **ALL) for k in (4, 2)],
    "links": [dt.demo(4, 16, link=link, **ALL) for link in ("all-gather", "owner", "all-gather")],
    "owners-move": [dt.demo(k, 16, precision="sign", link="owner", **ALL) for k in (4, 3, 1, 4)],
}
"""Schemes that forget nothing, one after another; in signs rows are dealt out in runs that depend on topk."""


def all_told(mesh):
    return {name: sent(mesh, schemes) for name, schemes in CHANGES.items()}


def sent(mesh, schemes):
    """How far weights and memories together are from all gradients (law 1), and the weights' digests (law 2)."""
    model = built(Plain)
    for parameter in model.parameters():
        parameter.data.zero_()
    optimizer = dt.replicate(
        torch.optim.SGD(model.parameters(), lr=1.0), model, mesh["replicate"], schemes[0]
    )
    given, digests = [torch.zeros_like(p) for p in model.parameters()], []
    for turn, scheme in enumerate(schemes):
        if turn:
            optimizer.reconfigure(scheme)
        for step in range(3):
            for i, parameter in enumerate(model.parameters()):
                generator = torch.Generator().manual_seed(
                    100 * (3 * turn + step) + 10 * i + mesh.get_rank()
                )
                parameter.grad = torch.randn(parameter.shape, generator=generator)
                given[i] += parameter.grad
            optimizer.step()
        digests.append(digest(model.parameters()))
    optimizer.synchronize()
    held = unsent(optimizer)
    everything = torch.cat(
        [
            (g - h + p.detach()).flatten()
            for g, h, p in zip(given, held, model.parameters(), strict=True)
        ]
    )
    torch.distributed.all_reduce(everything)
    return float(everything.abs().max()), digests


@some("replicas", [2, 4], keep=[2])
def test_law_1_nothing_is_lost_when_settings_change(replicas):
    first, *others = worlds.run(all_told, replicas, 1)
    assert {
        name: off for name, (off, _) in first.items() if off > 1e-3
    } == {}  # of sums up to 10, in fp32
    assert others == [first] * (replicas - 1)


@pytest.mark.parametrize("cycle", [True, False])
@pytest.mark.parametrize("rates", [(1 / 2, 1 / 16), (1 / 16, 1 / 8)])
def test_votes_about_another_share_follow_the_rule(rates, cycle):
    """Every bit of the steps before and after the change is that of the rule in plain torch."""
    replicas, steps, size = 5, 24, 333
    schemes = [dt.random_sign(rate, decay=0.9, cycle=cycle) for rate in rates]

    def gradient(step, replica):
        return torch.randn(size, generator=torch.Generator().manual_seed(100 * step + replica))

    def act(communicator):
        model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(size))})
        optimizer = dt.replicate(
            dt.SignSGD(model.parameters(), lr=1.0), model, communicator, schemes[0]
        )
        seen = []
        for step in range(steps):
            if step == 11:
                optimizer.reconfigure(schemes[1])
            model["w"].grad = gradient(step, communicator.replica)
            optimizer.step()
            seen.append(model["w"].detach().clone())
        return torch.stack(seen)

    memories, weight, wanted = torch.zeros(replicas, size), torch.zeros(size), []
    for step in range(steps):
        selection = schemes[step >= 11].codec.selection
        rows = torch.zeros(-(-size // selection.chunk), selection.chunk)
        chosen = rows.scatter(1, selection.indices(rows, step, 0), 1.0).flatten()[:size].bool()
        memories = 0.9 * memories + torch.stack(
            [gradient(step, replica) for replica in range(replicas)]
        )
        weight -= memories.sign().sum(0).sign() * chosen
        memories[:, chosen] = 0.0
        wanted.append(weight.clone())
    assert torch.equal(simulate_replicas(act, replicas)[0], torch.stack(wanted))


def start(mesh, scheme):
    model = dt.shard(built(Plain), mesh)
    base = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, dt.replicate(base, model, mesh["replicate"], scheme)


def advance(model, optimizer, steps):
    for step in steps:
        model(batch(torch.distributed.get_rank(), step, 32)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


SETTINGS = {
    "demo": [dt.demo(4, 16), dt.demo(1, 16)],
    "diloco": [dt.diloco(every=2), dt.diloco(every=5)],
    "streaming": [
        dt.schemes.streaming_diloco(4, 2, 1, precision="fp32"),
        dt.schemes.streaming_diloco(6, 2, 1, precision="fp32"),
    ],
    "sparseloco": [dt.schemes.sparseloco(2, 8, 256), dt.schemes.sparseloco(3, 2, 256)],
}


def all_resumed(mesh):
    return {name: resumed(mesh, schemes) for name, schemes in SETTINGS.items()}


def resumed(mesh, schemes):
    """A run that changed settings, and another that goes on from its state; and what was sent afterwards."""
    model, optimizer = start(mesh, schemes[0])
    advance(model, optimizer, range(4))
    optimizer.reconfigure(schemes[1])
    assert dt.fingerprint(model, mesh)[1]  # settled
    advance(model, optimizer, range(4, 6))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    sent = optimizer.stats.bytes_sent
    advance(model, optimizer, range(6, 12))
    sent = optimizer.stats.bytes_sent - sent
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again, other = start(mesh, schemes[0])
    other.reconfigure(schemes[1])
    again.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    advance(again, other, range(6, 12))
    slots = [slot for each in optimizer.build() for slot in each.channel.layout.slots]
    layout = schemes[1].codec.layout({slot.name: slot.shape for slot in slots})
    expected = sum(bytes_sent(schemes[1], layout, 2, step) for step in range(6, 12))
    state = dt.replica_state(other)
    same = all(torch.equal(value, state[key]) for key, value in dt.replica_state(optimizer).items())
    return same, digest(again.parameters()) == digest(model.parameters()), sent, expected


def test_a_changed_run_resumes_exactly_and_sends_what_its_settings_say():
    for found in worlds.run(all_resumed, 2, 2):
        assert {
            name: exact for name, (*exact, _, _) in found.items() if exact != [True, True]
        } == {}
        assert {
            name: (sent, said) for name, (_, _, sent, said) in found.items() if sent != said
        } == {}


def before_the_first_step(mesh):
    model, optimizer = start(mesh, dt.demo(4, 16))
    optimizer.reconfigure(dt.demo(2, 16))
    advance(model, optimizer, range(2))
    plain, other = start(mesh, dt.demo(2, 16))
    advance(plain, other, range(2))
    return digest(model.parameters()) == digest(plain.parameters())


def test_settings_may_change_before_the_first_step():
    assert worlds.run(before_the_first_step, 2, 1) == [True] * 2


class BadPath(Passing):
    """A path between two replicas that flips a bit of each message for an owner."""

    def all_to_all(self, mine):
        arriving = super().all_to_all(mine)

        def wait():
            rows = arriving().clone()
            if self.replica == 0:
                rows[1, 70] ^= 1
            return rows

        return wait


def test_after_a_change_to_owners_a_reason_to_stop_is_known_to_all():
    ends = {}

    def act(communicator):
        model = built(Plain)
        base = dt.SignSGD(model.parameters(), lr=1e-3)
        optimizer = dt.replicate(
            base, model, BadPath(communicator), dt.demo(4, 16, link="all-gather")
        )

        def steps(count):
            for _ in range(count):
                model(batch(communicator.replica, optimizer.step_count, 32)).mean().backward()
                optimizer.step()
                optimizer.zero_grad()

        steps(1)
        optimizer.reconfigure(dt.demo(4, 16, link="owner"))
        ends[communicator.replica] = caught(steps, 8)[0], optimizer.step_count

    simulate_replicas(act, 3)
    assert len(set(ends.values())) == 1 and ends[0][0] == "BadPeer"


def refused(mesh):
    """What is refused leaves the run as it was."""
    model, optimizer = start(mesh, dt.demo(4, 16))
    advance(model, optimizer, range(2))
    before = digest(model.parameters())
    errors = [
        caught(optimizer.reconfigure, scheme) for scheme in (dt.schemes.random(), dt.demo(16, 16))
    ]
    advance(model, optimizer, range(2, 3))
    plain, other = start(mesh, dt.demo(4, 16))
    advance(plain, other, range(3))
    return errors, before != digest(model.parameters()) == digest(plain.parameters())


def test_what_would_forget_or_send_more_than_dense_is_refused():
    for errors, same in worlds.run(refused, 2, 1):
        lines = ["the run began with the scheme demo", "full synchronisation sends"]
        assert [name for name, _ in errors] == ["ValueError", "LargerThanDense"]
        assert all(line in text for line, (_, text) in zip(lines, errors, strict=True)) and same


def test_a_delay_stays_because_a_message_may_be_in_flight():
    model = built(Plain)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    late, prompt = (dt.schemes.streaming_diloco(every=4, delay=delay) for delay in (1, 0))
    optimizer = dt.replicate(sgd, model, LoopbackCommunicator(2), late)
    optimizer.set_up()
    with pytest.raises(ValueError, match="would lose unsent values or momentum: keep delay"):
        optimizer.reconfigure(prompt)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (dt.full(), dt.full("int8")),
        (dt.schemes.random(precision="4bit"), dt.schemes.random()),
        (dt.loco("bf16"), dt.loco("4bit")),
        (dt.diloco(every=2), dt.diloco(every=2, precision="4bit")),
    ],
    ids=["full", "random", "loco", "diloco"],
)
def test_a_precision_that_takes_another_collective_goes_on(first, then):
    def act(communicator):
        model = built(Plain)
        optimizer = dt.replicate(
            dt.SignSGD(model.parameters(), lr=1e-3), model, communicator, first
        )
        for scheme in (first, then, first):
            optimizer.reconfigure(scheme)
            for step in range(2):
                model(batch(communicator.replica, step, 32)).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return digest(model.parameters())

    one, other = simulate_replicas(act, 2)
    assert one == other
