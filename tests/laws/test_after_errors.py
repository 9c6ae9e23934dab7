"""After an error a training goes on where all load a state of before, and a replica that stepped half-way says so."""

import copy

import pytest
import torch
from torch import nn

import detonation as dt
import worlds
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.cluster.network.simulated import simulate_replicas
from detonation.core.agreement.desync import Difference, repaired
from detonation.core.flat.tensors import digest
from detonation.core.schemes import buckets
from worlds import caught
from zoo import Plain, batch, built

SCHEMES = {"demo": dt.demo(), "full": dt.full(), "diloco": dt.diloco(every=2)}


class Trained:
    """A replica that takes one step at a time."""

    def __init__(self, communicator, scheme, replica=None):
        self.replica = communicator.replica if replica is None else replica
        self.model = built(Plain)
        self.base = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.optimizer = dt.replicate(self.base, self.model, communicator, scheme)

    def step(self, poison=False):
        self.model(batch(self.replica, self.optimizer.step_count, 32)).mean().backward()
        if poison:
            next(self.model.parameters()).grad.view(-1)[0] = torch.nan
        try:
            self.optimizer.step()
        finally:
            self.optimizer.zero_grad()

    def saved(self):
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def load(self, saved):
        self.model.load_state_dict(saved[0])
        self.optimizer.load_state_dict(saved[1])


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "weights and optimizer"])
@pytest.mark.parametrize("name", SCHEMES)
def test_a_stop_is_forgotten_where_all_load_a_state_of_before(name, whole):
    def act(communicator):
        one = Trained(communicator, SCHEMES[name])
        for _ in range(4):
            one.step()
        saved = one.saved()
        ends = [
            caught(one.step, communicator.replica == 1)[0],
            caught(one.step)[0],
        ]  # of rounds the second step stops
        if not whole:
            del saved[1]["replication"]
        one.load(saved)
        for _ in range(4):
            one.step()
        one.optimizer.synchronize()
        return ends, digest(one.model.parameters())

    first, second = simulate_replicas(act, 2)
    assert "NonFiniteGradient" in first[0] and first == second


@pytest.mark.parametrize("name", ["demo", "full"])
@pytest.mark.parametrize("where", ["decoding", "the optimizer"])
def test_a_replica_that_ends_between_its_messages_and_its_weights_says_so(name, where, monkeypatch):
    def act(communicator):
        one = Trained(communicator, SCHEMES[name])
        one.step()
        saved, ends = one.saved(), []
        if communicator.replica == 1:
            part = one.optimizer.build()[0].channel.engine if where == "decoding" else one.base
            with monkeypatch.context() as patch:
                patch.setattr(part, "write" if where == "decoding" else "step", out_of_memory)
                ends += [caught(one.step)]
            ends += [caught(one.step)]
        else:
            one.step()
        one.load(saved)
        one.step()
        return ends, one.optimizer.step_count

    def out_of_memory(*_):
        raise MemoryError("no more")

    (_, first), (ends, second) = simulate_replicas(act, 2)
    assert (first, second) == (2, 2)
    assert ends[0] == ("MemoryError", "no more") and ends[1][0] == "HalfStep"
    assert ends[1][1].startswith(
        "step 1 of this replica sent its messages and then failed with MemoryError('no more')"
    )


def sent_in_vain(one, replica, what):
    """Gradients leave within overlap(), and their step fails or never comes."""
    with one.optimizer.overlap():
        loss = one.model(batch(replica, 70, 32)).mean()
        if what == "other buckets" and replica:
            loss = one.model.layers[0](batch(replica, 70, 32)).mean()  # no gradient of the others
        loss.backward()
    end = "no step"
    if what == "clipped":
        torch.nn.utils.clip_grad_norm_(one.model.parameters(), 1e-3)
        end, _ = caught(one.optimizer.step)
        assert caught(one.optimizer.state_dict)[0] == "OverlapError"
    return end


IN_VAIN = ["clipped", "no step", "other buckets"]
CUT = {"demo": dt.demo(chunk=16), "full": dt.full()}
SMALL = 2**12


@pytest.mark.parametrize("what", IN_VAIN)
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "weights and optimizer"])
@pytest.mark.parametrize("name", CUT)
def test_a_load_drops_gradients_that_were_sent_in_vain(name, whole, what, tmp_path, monkeypatch):
    """Then training, and the log of it, are as of an optimizer that has just been made."""
    monkeypatch.setattr(buckets, "SMALLEST", SMALL)

    def act(communicator):
        one = Trained(communicator, CUT[name])
        one.optimizer.record(dt.UpdateLog(tmp_path))
        for _ in range(3):
            one.step()
        saved = one.saved()
        if not whole:
            del saved[1]["replication"]
        assert len(one.optimizer.build()[0].channel.pipelines) > 1
        end = sent_in_vain(one, communicator.replica, what)
        one.optimizer.zero_grad()
        ends = []
        for each in (one, Trained(communicator, CUT[name])):
            each.load(saved)
            each.optimizer.step_count = 3
            for _ in range(3):
                each.step()
            ends.append(digest(each.model.parameters()))
        return end, ends

    first, second = simulate_replicas(act, 2)
    end, (weights, fresh) = first
    assert first == second and weights == fresh
    assert end == ("OverlapError" if what == "clipped" else "no step")
    if whole:
        again = Trained(LoopbackCommunicator(2), CUT[name])
        assert dt.replay(tmp_path, again.optimizer) == 6
        assert digest(again.model.parameters()) == weights


def gone_on(mesh, name, what, folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "SMALLEST", SMALL)
        return loaded_after(mesh, name, what, folder)


def loaded_after(mesh, name, what, folder):
    replica = mesh["replicate"].get_local_rank()
    one = Trained(mesh["replicate"], CUT[name], replica)
    for _ in range(3):
        one.step()
    dt.save_checkpoint(folder / name / what, one.model, one.optimizer)
    one.step()
    sent_in_vain(one, replica, what)
    ends = []
    for each in (one, Trained(mesh["replicate"], CUT[name], replica)):
        assert dt.load_checkpoint(folder / name / what, each.model, each.optimizer).step == 3
        for _ in range(3):
            each.step()
        ends.append(digest(each.model.parameters()))
    return ends


@pytest.mark.usefixtures("lasting_worlds")
@pytest.mark.parametrize("what", IN_VAIN)
@pytest.mark.parametrize("name", CUT)
def test_a_checkpoint_drops_the_gradients_of_a_step_that_failed(name, what, tmp_path):
    """Those that were sent, and all that the parameters have."""
    (one, fresh), second = worlds.run(gone_on, 2, 1, name, what, tmp_path)
    assert one == fresh and second == [one, fresh]


class AloneInTheSum:
    """The link of replica 1 after replica 0, from which the others repair, was lost."""

    replica = 1

    def all_reduce(self, mine, apart):
        return lambda: mine.clone()


def test_a_repair_whose_source_is_lost_leaves_the_weights():
    weights = torch.randn(5)
    mended = repaired(AloneInTheSum(), Difference("w", (2,), 0), weights, torch.device("cpu"))
    assert torch.equal(mended, weights)


class Own(torch.optim.Optimizer):
    """As Prodigy: an estimate of its own lies beside the options of each group."""

    def __init__(self, params, lr=1.0):
        super().__init__(params, {"lr": lr, "estimate": 1e-3})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            gradients = [p.grad for p in group["params"] if p.grad is not None]
            group["estimate"] = max(
                group["estimate"], 1e-4 * float(sum(g.abs().sum() for g in gradients))
            )
            for parameter, gradient in zip(group["params"], gradients, strict=True):
                parameter.sub_(gradient, alpha=group["lr"] * group["estimate"])


def test_what_an_optimizer_estimates_may_differ_in_local_steps_and_what_it_is_given_not():
    def act(communicator, lr):
        model = nn.Linear(4, 4, bias=False)
        nn.init.ones_(model.weight)
        safety = dt.Safety(verify_every=2)
        optimizer = dt.replicate(
            Own(model.parameters()), model, communicator, dt.diloco(every=2), safety=safety
        )
        for _ in range(4):
            model(torch.full((1, 4), 1.0 + communicator.replica)).sum().backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] = lr[communicator.replica]
        return optimizer.param_groups[0]["estimate"]

    one, other = simulate_replicas(lambda communicator: act(communicator, (1.0, 1.0)), 2)
    assert one != other
    with pytest.raises(dt.errors.Desync, match=r"lr of group 0|options of the parameter groups"):
        simulate_replicas(lambda communicator: act(communicator, (1.0, 0.5)), 2)


@pytest.mark.parametrize("name", ["demo sign", "random_sign", "loco"])
def test_a_refused_update_is_never_applied_later(name):
    """SignSGD moves weights as it decodes: a step that was refused leaves no movement behind, which would be applied
    once its first parameter is frozen."""
    schemes = {
        "demo sign": dt.demo(precision="sign", error_feedback=False),
        "random_sign": dt.random_sign(),
        "loco": dt.loco(),
    }

    def act(communicator):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
        base = dt.SignSGD(model.parameters(), lr=0.5)
        optimizer = dt.replicate(base, model, communicator, schemes[name])

        def step(number, poison=False):
            torch.manual_seed(10 * number + communicator.replica)
            for weight in model.parameters():
                if weight.requires_grad:
                    weight.grad = torch.randn(weight.shape)
            if poison:
                model[1].weight.grad[0, 0] = torch.nan
            optimizer.step()
            optimizer.zero_grad()

        step(0)
        error, _ = caught(step, 1, communicator.replica == 1)
        before = [weight.detach().clone() for weight in model.parameters()]
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(saved)
        model[0].weight.requires_grad_(False)
        step(1)
        moved = [
            (new - old).detach().abs().max()
            for new, old in zip(model.parameters(), before, strict=True)
        ]
        return error, [float(each) for each in moved]

    for error, moved in simulate_replicas(act, 2):
        assert "NonFiniteGradient" in error
        assert moved[0] == 0 and moved[1] == pytest.approx(0.5)
