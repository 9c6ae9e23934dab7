"""What torch's own tools expect of an optimizer, and what a wrong start gets."""

import copy
import io
import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import detonation as dt
import worlds
from detonation.cluster.network.simulated import simulate_replicas
from detonation.core.flat.tensors import digest, local
from detonation.core.integrity.fault_counts import NonFiniteGradient
from detonation.core.link.link import Mismatch
from detonation.core.schemes.traffic import LargerThanDense
from worlds import caught
from zoo import KINDS, SCHEMES, Padded, Plain, batch, built

pytestmark = pytest.mark.usefixtures("lasting_worlds")

BASES = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "SignSGD": lambda params: dt.SignSGD(params, lr=1e-3, momentum=0.5, weight_decay=0.1),
    "SignSGD-plain": lambda params: dt.SignSGD(params, lr=1e-3),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3),
}


def start(mesh, scheme=None, base="AdamW", seed=0):
    model = dt.shard(built(Plain), mesh)
    base_optimizer = BASES[base](model.parameters())
    return model, dt.replicate(
        base_optimizer, model, mesh["replicate"], scheme or dt.demo(), seed=seed
    )


def advance(model, optimizer, steps):
    rank = torch.distributed.get_rank()
    for step in steps:
        model(batch(rank, step, 32)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(model):
    return digest(model.parameters())


def tools(mesh):
    """A scheduler, clipping, a closure, accumulation, hooks and groups at once, twice the same."""
    ends = []
    for _ in range(2):
        model = dt.shard(built(Plain), mesh)
        first, *others = model.parameters()
        base = torch.optim.AdamW(
            [{"params": others}, {"params": [first], "lr": 1e-2}], lr=1e-3, weight_decay=0.1
        )
        optimizer = dt.replicate(base, model, mesh["replicate"], dt.demo())
        assert (
            isinstance(optimizer, torch.optim.Optimizer)
            and optimizer.param_groups is base.param_groups
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        seen = []
        optimizer.register_step_post_hook(lambda *_, seen=seen: seen.append(1))

        def closure(model=model, optimizer=optimizer, schedule=schedule):
            optimizer.zero_grad()
            for part in range(2):
                loss = model(batch(mesh.get_rank(), 10 * schedule.last_epoch + part, 32)).mean() / 2
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            return float(loss.detach())

        for _ in range(3):
            assert optimizer.step(closure) > 0
            schedule.step()
        assert seen == [1, 1, 1] and [g["lr"] for g in optimizer.param_groups] == [
            1e-3 / 4,
            1e-2 / 4,
        ]
        assert "AdamW (\n" in repr(optimizer) and "lr: 0.00025" in repr(optimizer)
        ends.append(weights(model))
    assert ends[0] == ends[1]
    return dt.fingerprint(model, mesh)[1]


def test_schedulers_clipping_closures_accumulation_hooks_and_groups():
    assert all(worlds.run(tools, 2, 2))


def helpers(mesh, base):
    """torch's state-dict helpers call step() on an optimizer without state: not a step of training."""
    model, optimizer = start(mesh, base=base)
    before = weights(model)
    saved = get_optimizer_state_dict(model, optimizer)
    assert (optimizer.step_count, optimizer.stats.bytes_sent, weights(model)) == (0, 0, before)
    assert dt.replica_state(optimizer).keys() == {"step"}
    set_optimizer_state_dict(model, optimizer, saved)
    assert (optimizer.step_count, optimizer.stats.bytes_sent) == (0, 0)
    advance(model, optimizer, range(3))
    untouched, plain = start(mesh, base=base)
    get_optimizer_state_dict(
        untouched, plain.base
    )  # what the helper does to a plain optimizer: AdamW counts it
    advance(untouched, plain, range(3))
    assert weights(model) == weights(untouched)
    saved = get_optimizer_state_dict(model, optimizer)
    assert (
        optimizer.step_count == 3 and "layers.0.weight" in saved["state"]
    ) or not optimizer.state
    return True


@pytest.mark.parametrize("base", BASES)
def test_state_dict_helpers_do_not_train(base):
    assert all(worlds.run(helpers, 2, 2, base))


def warm_up_from_zero(mesh):
    """A first step with lr 0 and real gradients is a step: its momentum counts."""
    model, optimizer = start(mesh)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    advance(model, optimizer, range(1))
    schedule.step()
    assert optimizer.step_count == 1 and any(
        k.startswith("0.residual") for k in dt.replica_state(optimizer)
    )
    return True


def test_a_first_step_at_lr_zero_counts():
    assert all(worlds.run(warm_up_from_zero, 2, 1))


class Accelerated:
    """An optimizer as Accelerate wraps it."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, closure=None):
        self.optimizer.step(closure)


def silent_at_zero(mesh, base, wrapped):
    """lr 0 at the first step, and zero gradients on one replica, whose last shard has no row of a parameter."""
    model = built(Plain)
    model.layers[1] = nn.Linear(64, 1)
    for parameter in model.layers[0].parameters():
        parameter.requires_grad_(False)
    dt.shard(model, mesh)
    optimizer = dt.replicate(BASES[base](model.parameters()), model, mesh["replicate"], dt.full())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 3)
    stepping = Accelerated(optimizer) if wrapped else optimizer
    for step in range(3):
        model(batch(mesh.get_rank(), step, 32)).mean().backward()
        if step == 0 and mesh.get_local_rank("replicate") == 1:
            for parameter in model.layers[1].parameters():
                local(parameter.grad).zero_()
        stepping.step()
        schedule.step()
        optimizer.zero_grad()
    return optimizer.step_count, dt.fingerprint(model, mesh)[1]


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("base", ["AdamW", "SGD", "SignSGD-plain"])
def test_every_rank_takes_a_first_step_at_lr_zero_whatever_its_gradients(base, wrapped):
    assert worlds.run(silent_at_zero, 2, 2, base, wrapped) == [(3, True)] * 4


class Counting(torch.optim.Optimizer):
    """An optimizer of another library, whose state nobody knows beforehand."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["steps"] = self.state[parameter].get("steps", 0) + 1
                parameter.data -= 0.1 * parameter.grad + 0.01


def evaluated(mesh, folder, keeps):
    """Everything that looks for the shards finds them where an evaluation has left the whole parameters."""

    def fresh():
        model = built(Plain)
        for layer in model.layers:
            torch.distributed.fsdp.fully_shard(
                layer, mesh=mesh["shard"], reshard_after_forward=not keeps
            )
        torch.distributed.fsdp.fully_shard(
            model, mesh=mesh["shard"], reshard_after_forward=not keeps
        )
        return model, dt.replicate(
            torch.optim.AdamW(model.parameters()), model, mesh["replicate"], dt.demo(4, 16)
        )

    def evaluate(model):
        with torch.no_grad():
            model(batch(0, 0, 32))

    model, optimizer = fresh()
    evaluate(model)
    dense = optimizer.dense_bytes_by_level
    evaluate(model)
    optimizer.set_up()
    advance(model, optimizer, range(2))
    evaluate(model)
    assert optimizer.dense_bytes_by_level == dense
    evaluate(model)
    optimizer.reconfigure(dt.demo(2, 16))
    evaluate(model)
    dt.save_checkpoint(folder, model, optimizer)
    other, again = fresh()
    again.reconfigure(dt.demo(2, 16))
    evaluate(other)
    dt.load_checkpoint(folder, other, again)
    for m, o in ((model, optimizer), (other, again)):
        loss = m(batch(mesh.get_rank(), 2, 32)).mean()
        assert o.dense_bytes_by_level == dense  # also between forward and backward
        loss.backward()
        evaluate(m)
        o.step()
        o.zero_grad()
        advance(m, o, range(3, 5))
    return weights(model) == weights(other), dt.fingerprint(model, mesh)[1]


@pytest.mark.parametrize("keeps", [False, True], ids=["", "gathered"])
def test_an_evaluation_at_any_time_hides_no_parameter(keeps, tmp_path):
    assert worlds.run(evaluated, 2, 2, tmp_path, keeps) == [(True, True)] * 4


def resumed(mesh, base, names):
    """Law 9: private state saved per rank resumes exactly, also in the middle of a round."""
    results = {}
    for name in names:
        scheme = SCHEMES[name]
        model, optimizer = start(mesh, scheme, base)
        advance(model, optimizer, range(4))
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        advance(model, optimizer, range(4, 9))
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        again, other = start(mesh, scheme, base)
        again.load_state_dict(saved["model"])
        other.load_state_dict(saved["optimizer"])
        advance(again, other, range(4, 9))
        same = [
            torch.equal(v, dt.replica_state(other)[k])
            for k, v in dt.replica_state(optimizer).items()
        ]
        results[name] = weights(again) == weights(model) and all(same)
    return results


@pytest.mark.parametrize(("shards", "names"), [(1, KINDS), (2, ["demo", "demo-owner", "diloco"])])
def test_law_9_private_state_resumes_exactly(shards, names):
    """By state_dict and torch.save; tests/checkpoint takes every scheme, through checkpoints."""
    assert (
        worlds.run(resumed, 2, shards, "AdamW", list(names))
        == [dict.fromkeys(names, True)] * 2 * shards
    )


def test_resuming_after_synchronizing_leaves_no_trace():
    """Weights that decay move even without an update."""

    def act(communicator, how):
        def made():
            model = built(Plain)
            base = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
            return model, dt.replicate(base, model, communicator, dt.diloco(every=4))

        model, optimizer = made()
        for step in range(6):
            model(batch(communicator.replica, step, 32)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:
                optimizer.synchronize()
                if how == "resumed":
                    saved, own = copy.deepcopy(model.state_dict()), dt.replica_state(optimizer)
                    model, optimizer = made()
                    model.load_state_dict(saved)
                    dt.load_replica_state(optimizer, own)
        optimizer.synchronize()
        return weights(model)

    plain, resumed = (simulate_replicas(partial(act, how=how), 2) for how in ("", "resumed"))
    assert plain == resumed


def settled_twice(mesh):
    model, optimizer = start(mesh, dt.diloco(every=5))
    advance(model, optimizer, range(3))
    optimizer.synchronize()
    once = weights(model), dt.fingerprint(model, mesh)[1]
    optimizer.synchronize()
    return once == (weights(model), True)


def test_settling_twice_is_settling_once():
    assert all(worlds.run(settled_twice, 2, 1))


def settled_on_the_way(mesh):
    """What has just left is told once: settling lands it, and tells nothing of it again."""
    outer = {"outer_lr": 0.5, "outer_momentum": 0.5}
    late = dt.schemes.streaming_diloco(every=3, fragments=1, delay=1, precision="fp32", **outer)
    found = []
    for scheme in (dt.diloco(2, **outer), late):
        model, optimizer = start(mesh, scheme)
        advance(model, optimizer, range(2))
        optimizer.synchronize()
        found.append(weights(model))
    return len(set(found)) == 1


def test_settling_lands_what_is_on_its_way_once():
    assert all(worlds.run(settled_on_the_way, 2, 1))


def private(mesh):
    model, optimizer = start(mesh)
    advance(model, optimizer, range(2))
    return {k: v.tolist() for k, v in dt.replica_state(optimizer).items()}


def test_law_9_memory_differs_between_replicas():
    first, second = worlds.run(private, 2, 1)
    assert first.keys() == second.keys() and first["step"] == second["step"] == 2
    assert first["0.residual.layers.0.weight"] != second["0.residual.layers.0.weight"]


def state_that_does_not_fit(mesh):
    model, optimizer = start(mesh)
    advance(model, optimizer, range(1))
    state = dt.replica_state(optimizer)
    errors = []
    misshapen = {**state, "0.residual.layers.0.bias": torch.zeros(3)}
    misnamed = {"step": state["step"], "odd": torch.ones(1)}
    for wrong in (misshapen, misnamed):
        try:
            dt.load_replica_state(optimizer, wrong)
        except ValueError as error:
            errors.append(str(error))
    return errors


def test_state_of_another_model_is_refused():
    shape, keys = worlds.run(state_that_does_not_fit, 2, 1)[0]
    assert "0.residual.layers.0.bias was saved with shape (3,), is (64,) here" in shape
    assert "another model or scheme" in keys


def started_differently(mesh, how):
    replica = mesh.get_local_rank("replicate")
    scheme = dt.demo(topk=2 + replica if how == "topk" else 2)
    torch.set_float32_matmul_precision("high" if how == "products" and replica else "highest")
    model, optimizer = start(mesh, scheme, seed=replica if how == "seed" else 0)
    torch.set_float32_matmul_precision("highest")
    if how == "weights" and replica == 1:
        local(model.layers[1].bias).data.add_(1e-3)
    if how == "shape" and replica == 1:
        model = nn.Sequential(nn.Linear(32, 8))
        optimizer = dt.replicate(
            BASES["AdamW"](model.parameters()), model, mesh["replicate"], dt.demo(topk=2)
        )
    return caught(advance, model, optimizer, range(1))


@pytest.mark.parametrize(
    "how, named",
    [
        ("topk", "replica 1 has topk=3, replica 0 has topk=2"),
        ("seed", "replica 1 has seed=1, replica 0 has seed=0"),
        ("weights", "replica 1 has layers.1.bias (weights)="),
        ("shape", "replica 1 has layers.0.weight (shape)=nothing"),
        (
            "products",
            "replica 1 has products of fp32 matrices=tf32, tf32, replica 0 has products of fp32 matrices=ieee",
        ),
    ],
)
def test_replicas_started_differently_are_told_what_differs(how, named):
    for kind, text in worlds.run(started_differently, 2, 1, how):
        assert kind == Mismatch.__name__ and named in text


def poisoned(mesh):
    """NaN in one element on one replica: it never reaches the memory, and all stop at that step."""
    model, optimizer = start(mesh)
    advance(model, optimizer, range(2))
    before = {
        key: tensor
        for key, tensor in dt.replica_state(optimizer).items()
        if "usual_norm" not in key
    }
    model(batch(0, 9, 32)).mean().backward()
    poisoned = mesh.get_local_rank("replicate") == 1
    if poisoned:
        local(model.layers[1].weight.grad)[3, 4] = float("nan")
    outcome = caught(optimizer.step)
    after = dt.replica_state(optimizer)
    assert not poisoned or all(torch.equal(after[key], before[key]) for key in before)
    return outcome


def test_a_non_finite_gradient_is_caught_before_the_memory():
    for kind, text in worlds.run(poisoned, 2, 1):
        assert kind == NonFiniteGradient.__name__
        assert text.startswith(
            "the gradient of layers.1.weight is not finite on replica 1 at step 2"
        )


def refusals(mesh):
    model = built(Plain)
    axis, adamw = mesh["replicate"], torch.optim.AdamW(model.parameters())
    stranger = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    embedding = nn.Embedding(9, 9, sparse=True)
    sparse = dt.replicate(torch.optim.SGD(embedding.parameters()), embedding, axis, dt.full())
    embedding(torch.arange(3)).sum().backward()
    words = dt.shard(nn.Sequential(nn.EmbeddingBag(9, 9, sparse=True)), mesh)
    frozen = nn.Sequential(nn.Embedding(9, 9, sparse=True), nn.Linear(9, 1))
    frozen[0].weight.requires_grad_(False)
    dt.replicate(torch.optim.SGD(dt.shard(frozen, mesh)[1].parameters()), frozen, axis, dt.full())
    late = dt.replicate(adamw, model, axis, dt.demo())
    tiny = nn.Linear(1, 1)
    return [
        caught(dt.replicate, torch.optim.LBFGS(model.parameters()), model, axis, dt.full()),
        caught(dt.replicate, late, model, axis, dt.full()),
        caught(dt.replicate, adamw, model),
        caught(lambda: dt.replicate(adamw, model, levels=[(axis, dt.diloco()), (axis, dt.demo())])),
        caught(dt.replicate(stranger, model, axis, dt.full()).step),
        caught(dt.replicate(adamw, model, mesh, dt.full()).step),
        caught(sparse.step),
        caught(
            dt.replicate, torch.optim.SGD(words.parameters()), words, axis, dt.full()
        ),  # before FSDP2 meets it
        caught(dt.init_mesh, 3, 1),
        caught(dt.replicate(torch.optim.AdamW(tiny.parameters()), tiny, axis, dt.demo()).step),
        caught(lambda: late.train()),  # as optimizers without a schedule have it
    ]


def shown(mesh):
    """Of each scheme, the bytes that its optimizer says it will send and those that it sends, per step."""
    told = {}
    for name in ("demo", "full", "random", "diloco", "none"):
        model, optimizer = start(mesh, SCHEMES[name])
        text = repr(optimizer)
        stranger = dt.replicate(
            torch.optim.SGD([nn.Parameter(torch.ones(3))]), model, *optimizer.levels[0]
        )
        assert repr(stranger).startswith(
            "Replicated, with parameters that are not in the model\nSGD ("
        )
        advance(model, optimizer, range(optimizer.levels[0][1].round.every))
        sent = optimizer.stats.bytes_sent / optimizer.step_count
        told[name] = (
            re.search(r"over 2 replicas: (.*)", text)[1],
            sent,
            optimizer.dense_bytes_by_level[0],
        )
    return told


def test_an_optimizer_shows_the_bytes_that_it_sends():
    for told in worlds.run(shown, 2, 2):
        assert told.pop("none")[0] == "nothing"
        for text, sent, dense in told.values():
            assert text.startswith(f"{sent:,.0f} bytes per step by all-")
            assert text.endswith(f", {sent / dense:.2%} of full synchronisation")


def test_wrong_use_gets_one_clear_line():
    expected = [
        ("ValueError", "LBFGS evaluates the loss several times"),
        ("ValueError", "pass all levels at once"),
        ("ValueError", "needs an axis and a scheme"),
        ("ValueError", "put levels that exchange gradients before levels that exchange parameters"),
        ("ValueError", "2 parameters of the optimizer are not in the model"),
        ("ValueError", "the axis has 2 dimensions ('replicate', 'shard')"),
        ("ValueError", "the gradient of weight is sparse"),
        (
            "ValueError",
            "the gradient of 0.weight is sparse, which cannot be replicated: use sparse=False",
        ),
        ("ValueError", "3 replicas x 1 shards are 3 ranks, but the world has 2"),
        (
            LargerThanDense.__name__,
            "would send 38 bytes per step over 2 replicas, full synchronisation sends 8",
        ),
        (
            "AttributeError",
            "optimizer.train does not exist: for the attributes of the optimizer inside, use optimizer.base",
        ),
    ]
    for outcome, (kind, text) in zip(worlds.run(refusals, 2, 1)[0], expected, strict=True):
        assert outcome[0] == kind and text in outcome[1], outcome


def padding_on_shards(mesh, scheme):
    """The padding row after six steps, and whether all ranks have gone on together."""
    model = dt.shard(built(Padded), mesh)
    optimizer = dt.replicate(
        torch.optim.SGD(model.parameters(), lr=0.1), model, mesh["replicate"], scheme
    )
    advance(model, optimizer, range(6))
    optimizer.synchronize()
    optimizer.verify()
    return model.words.weight.full_tensor().detach()[Padded.padding].tolist()


@pytest.mark.parametrize("name", ["demo", "demo-tiles-64-sign", "demo-diloco", "muloco-2bit"])
def test_the_padding_row_of_an_embedding_stays_on_its_shard(name):
    found = worlds.run(padding_on_shards, 2, 2, SCHEMES[name])
    assert found == [(torch.arange(32) / 10).tolist()] * 4
