"""Simulated runs: bit for bit those of real worlds, in one process."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

import detonation as dt
from covering import some
from detonation.cluster.network.simulated import simulate_replicas
from detonation.core.link.link import Link, Mismatch
from detonation.train.loop.fit import NonFiniteLoss, Unsafe
from detonation.train.output import metrics
from detonation.train.verbs.simulate import (
    Simulation,
    batch_share,
    simulate,
    train_virtual,
    virtual,
)

EXACT = {
    "full": ["scheme.name=full"],
    "none": ["scheme.name=none"],
    "demo-clipped-dropout": ["train.clip=0.5", "model.dropout=0.2", "train.accumulate=2"],
    "demo-signsgd": [
        "optimizer.name=SignSGD",
        "optimizer.lr=1e-3",
        "scheme.precision=sign",
        "scheme.topk=3",
    ],
    "demo-muon": ["optimizer.name=Muon", "optimizer.lr=1e-2", "train.verify_every=2"],
    "loco": ["scheme.name=loco"],
    "demo-owner": ["scheme.link=owner", "scheme.precision=sign", "scheme.error_feedback=false"],
    "random-bf16": ["scheme.name=random", "scheme.precision=bf16"],
    "random_sign": ["scheme.name=random_sign"],
    "diloco": ["scheme.name=diloco", "scheme.every=4"],
    "streaming": [
        "scheme.name=streaming_diloco",
        "scheme.every=4",
        "scheme.delay=1",
        "scheme.fragments=2",
    ],
    "sparseloco": ["scheme.name=sparseloco", "scheme.every=3", "scheme.topk=8", "scheme.chunk=256"],
}
"""Every kind of link, of round and of memory."""


def simulated(config):
    """Each virtual replica's summary."""
    return simulate_replicas(
        lambda wire: train_virtual(virtual(config, wire)), config.mesh.replicas
    )


def results(summary):
    left_out = (
        "seconds",
        "median_step_seconds",
        "waits",
        "examples_per_second",
        "tokens_per_second",
        "peak_memory",
        "directory",
        "simulated",
    )
    return {key: value for key, value in summary.items() if key not in left_out}


@pytest.mark.long_cases("random_sign", "streaming")
@some(
    "sets",
    EXACT.values(),
    keep=[
        EXACT[name] for name in ("demo-clipped-dropout", "demo-owner", "random_sign", "streaming")
    ],
    ids=EXACT,
)
def test_two_virtual_replicas_are_two_real_ones_bit_for_bit(tiny, train, sets):
    sets = [*sets, "train.validate_every=3"]
    real = train("real", *sets)[0]
    assert [results(one) for one in simulated(tiny(*sets))] == [results(real)] * 2


SIGNSGD = ["optimizer.name=SignSGD", "optimizer.lr=1e-3"]


@pytest.mark.long_cases("gather", "owner-signsgd", "gather-signsgd")
@pytest.mark.parametrize(
    "sets",
    [
        ["scheme.link=owner"],
        ["scheme.name=random_sign", "scheme.link=all-gather"],
        [*SIGNSGD, "scheme.link=owner", "scheme.precision=sign", "scheme.error_feedback=false"],
        [*SIGNSGD, "scheme.link=all-gather"],
    ],
    ids=["owner", "gather", "owner-signsgd", "gather-signsgd"],
)
def test_four_of_them_are_too_where_the_network_does_not_add(tiny, train, sets):
    real = train("real", "mesh.replicas=4", *sets)[0]
    assert results(simulated(tiny("mesh.replicas=4", *sets))[3]) == results(real)


@pytest.mark.long  # no branch of its own
def test_where_the_network_adds_four_are_equal_but_for_the_order_of_a_sum(tiny, train):
    sets = ["scheme.name=full", "mesh.replicas=4"]
    real, simulation = train("real", *sets)[0], simulated(tiny(*sets))[0]
    assert simulation["val_loss"] == pytest.approx(real["val_loss"], rel=1e-4)
    assert (
        simulation["bytes_sent_per_step"] == real["bytes_sent_per_step"]
        and simulation["replicas_equal"]
    )


def test_sixteen_replicas_agree_and_their_memories_do_not(tiny):
    config = tiny(
        "mesh.replicas=16", "train.steps=2", "train.batch_size=1", "train.validation_batches=1"
    )

    def act(wire):
        session = virtual(config, wire)
        summary = train_virtual(session)
        residual = dt.replica_state(session.optimizer)["0.residual.model.embed_tokens.weight"]
        return summary["fingerprint"], summary["replicas_equal"], residual.sum().item()

    fingerprints, equal, memories = zip(*simulate_replicas(act, 16), strict=True)
    assert len(set(fingerprints)) == 1 and all(equal) and len(set(memories)) == 16


@pytest.mark.parametrize(
    ("scheme", "shares"), [("demo", True), ("full", True), ("diloco", False), ("none", False)]
)
def test_replicas_share_the_weights_that_are_equal_at_every_step(tiny, scheme, shares):
    config = tiny(f"scheme.name={scheme}", "train.steps=2", "mesh.replicas=3")

    def act(wire):
        session = virtual(config, wire)
        train_virtual(session)
        return [weight.data_ptr() for weight in session.model.parameters()]

    first, *others = simulate_replicas(act, 3)
    assert [each == first for each in others] == [shares] * 2


@pytest.mark.parametrize("link", ["all-gather", "owner"])
def test_one_that_received_another_message_ends_the_simulation(tiny, link):
    config = tiny(f"scheme.link={link}", "mesh.replicas=3")

    def act(wire):
        session = virtual(config, wire)
        (replicator,) = session.optimizer.set_up()
        wait = replicator.link.wait

        def damaged(*arriving):
            arrived, absent = wait(*arriving)
            if wire.replica == 1 and session.optimizer.step_count == 1:
                arrived = [each.clone() for each in arrived]
                arrived[0][0, -1] ^= 1
            return arrived, absent

        replicator.link.wait = damaged
        train_virtual(session)

    with pytest.raises(Unsafe, match="replica 1"):
        simulate_replicas(act, 3)


def test_a_total_batch_is_shared_and_validated_on_as_many_examples(tiny):
    config = tiny(
        "mesh.replicas=8", "train.batch_size=4", "train.validation_batches=4", "train.accumulate=2"
    )
    shared = batch_share(config, 32)
    assert (shared.train.batch_size, shared.train.validation_batches) == (2, 8)
    with pytest.raises(
        ValueError,
        match=r"--total-batch is 24, but must be a multiple of 16 \(replicas x train.acc",
    ):
        batch_share(config, 24)
    with pytest.raises(ValueError, match=r"--total-batch is 0, .* at least 16"):
        batch_share(config, 0)


@pytest.fixture
def recipe(tmp_path):
    """A small recipe as a file."""
    path = tmp_path / "small.toml"
    path.write_text(
        """
        model = { name = "olmo2", layers = 1, hidden_size = 32, heads = 2, feed_forward = 64 }
        data = { task = "text", source = "sotu-sample", context = 32 }
        scheme = { name = "demo", topk = 4, chunk = 32 }
        optimizer = { name = "AdamW", lr = 0.003 }
        train = { steps = 4, batch_size = 4, validation_batches = 2, validate_every = 2 }
        mesh = { replicas = 2, shards = 2 }
        """
    )
    return path


def test_a_simulation_leaves_a_run_directory(recipe, tmp_path):
    out = tmp_path / "run"
    summary = simulate(
        Simulation(recipe, ("train.steps=5",), replicas=4, total_batch=8, out=out, to_stderr=True)
    )
    assert (summary["replicas"], summary["shards"], summary["steps"], summary["simulated"]) == (
        4,
        1,
        5,
        True,
    )
    assert json.loads((out / "summary.json").read_text()).items() <= summary.items()
    records = metrics.read_metrics(out / "metrics.jsonl")
    assert [record.val_loss is None for record in records] == [True, False, True, False, False]
    assert sum(record.bytes_sent for record in records) == 5 * summary["bytes_sent_per_step"] > 0
    assert (out / "config.toml").exists() and (out / "environment.json").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"overrides": ("mesh.nodes=[1,2]",)},
            r"mesh\.nodes is \[1, 2\], but must be left out in a simulation",
        ),
        ({"overrides": ("mesh.shards=2",)}, "mesh.shards is 2, but must be 1 in a simulation"),
        (
            {"overrides": ("mesh.link=10mbit,5ms",)},
            "mesh.link is '10mbit,5ms', but must be '' in a simulation",
        ),
        ({"replicas": 0}, "mesh.replicas is 0, but must be at least 1"),
        ({"replicas": 100_000}, "but the data have"),
        ({"replicas": 3, "total_batch": 4}, "--total-batch is 4, but must be a multiple of 3"),
        ({"overrides": ("scheme.topk=32",)}, "full synchronisation sends"),
        ({"overrides": ("scheme.name=demi",)}, "demi"),
    ],
    ids=["nodes", "shards", "link", "none", "too-many", "total", "larger-than-dense", "scheme"],
)
def test_bad_input_is_refused_before_anything_is_written(recipe, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        simulate(Simulation(recipe, out=tmp_path / "run", to_stderr=True, **options))
    assert not (tmp_path / "run").exists()


def test_levels_are_refused_and_not_left_out(recipe, tmp_path):
    one = 'scheme = { name = "demo", topk = 4, chunk = 32 }'
    tiers = [
        f'{{ name = "{name}", axis = "{axis}", replicas = 2 }}'
        for name, axis in (("full", "rack"), ("demo", "site"))
    ]
    text = recipe.read_text().replace(one, f"scheme = [{', '.join(tiers)}]")
    recipe.write_text(text.replace("mesh = { replicas = 2, shards = 2 }", ""))
    with pytest.raises(
        ValueError, match=r"^scheme is 'full\+demo', but must be one level in a simulation"
    ):
        simulate(Simulation(recipe, out=tmp_path / "run", to_stderr=True))


def test_a_lost_loss_ends_all_replicas(recipe, tmp_path):
    sets = ("optimizer.name=SignSGD", "optimizer.lr=1e38")
    before = threading.active_count()
    with pytest.raises(NonFiniteLoss, match=r"the loss is (nan|inf) at step 2 on replica 0"):
        simulate(Simulation(recipe, sets, out=tmp_path / "run", to_stderr=True))
    assert threading.active_count() == before


def test_a_wire_carries_what_a_group_carries():
    def act(wire):
        mine = torch.tensor([wire.replica + 1.0])
        late = wire.all_reduce(mine.clone())
        told = wire.all_gather(mine.view(torch.uint8))
        given = wire.all_to_all(
            torch.tensor([10 * wire.replica + other for other in range(3)], dtype=torch.uint8)
        )
        return given()[:, 0].tolist(), told().view(torch.float32).view(-1).tolist(), late().item()

    ends = simulate_replicas(act, 3)
    assert [end[0] for end in ends] == [[0, 10, 20], [1, 11, 21], [2, 12, 22]]
    assert [end[1:] for end in ends] == [([1.0, 2.0, 3.0], 6.0)] * 3


def test_one_replica_runs_at_a_time_in_order():
    turns = []

    def act(wire):
        for step in range(3):
            turns.append((step, wire.replica))
            wire.all_gather(torch.zeros(1, dtype=torch.uint8))()

    simulate_replicas(act, 3)
    assert turns == [(0, 0), (0, 1), (0, 2), (1, 2), (1, 0), (1, 1), (2, 1), (2, 2), (2, 0)]


def test_no_thread_is_left_that_could_hold_a_lock_when_the_process_is_forked():
    tasks = Path("/proc/self/task")
    before = set(tasks.iterdir())
    for _ in range(20):
        simulate_replicas(lambda _: torch.ones(64, 64) @ torch.ones(64, 64), 4)
        assert set(tasks.iterdir()) <= before


def test_ctrl_c_comes_out_when_all_replicas_have_ended():
    """One that still computes while the interpreter is taken down aborts the process."""
    ended = []

    def act(wire):
        os.kill(os.getpid(), signal.SIGINT)
        until = time.monotonic() + 0.3
        while time.monotonic() < until:  # computes, and does not look up
            torch.ones(64).sum()
        ended.append(wire.replica)

    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # ignored where tests run in the background
    try:
        with pytest.raises(KeyboardInterrupt):
            simulate_replicas(act, 1)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended == [0]


def test_what_can_never_arrive_is_an_error_not_a_hang():
    def unequal(wire):
        if wire.replica:
            wire.all_gather(torch.zeros(1, dtype=torch.uint8))()

    with pytest.raises(
        RuntimeError, match="simulated replica 1 waits for a collective that other replicas do not"
    ):
        simulate_replicas(unequal, 3)


def test_virtual_replicas_that_differ_are_told_so():
    def act(wire):
        Link(wire).require_same({"topk": str(wire.replica)}, torch.device("cpu"), {})

    with pytest.raises(Mismatch, match="replica 1 has topk=1, replica 0 has topk=0"):
        simulate_replicas(act, 2)


def test_what_is_not_simulated_is_named(recipe, tmp_path, capsys):
    asked = (
        "mesh.elastic=true",
        "train.log_updates=true",
        "train.publish=127.0.0.1:0",
        "train.checkpoint_every=2",
    )
    for sets in ((), asked):
        simulate(Simulation(recipe, (*sets, "train.steps=1"), out=tmp_path / str(len(sets))))
        first = capsys.readouterr().out.splitlines()[0]
    assert (
        first
        == "not simulated: mesh.elastic, train.publish, train.log_updates, train.checkpoint_every"
    )
