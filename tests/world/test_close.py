"""Replicas that round differently: refused, or trained close to each other, and told from replicas with a fault."""

import hashlib
import logging
import math

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import detonation as dt
import worlds
from covering import covered, some
from detonation.checkpoint.files import manifest
from detonation.checkpoint.files.reader import ShardReader
from detonation.checkpoint.files.shard_file import ShardSummary
from detonation.checkpoint.verify import verify
from detonation.cluster.network.simulated import simulate_replicas
from detonation.core.agreement.self_tests import NORM_SELFTEST, SELFTEST, STEP_SELFTEST
from detonation.core.engine.reference import ReferenceEngine
from detonation.core.flat.tensors import local, locals_of
from detonation.gates import closeness
from detonation.plan.cost import close_bytes
from worlds import caught
from zoo import GRADIENT, SCHEMES, TALKING, Plain, batch, built

OTHERS = [*{name: scheme for name, scheme in TALKING.items() if name not in GRADIENT}]


@torch.no_grad()
def nudged(tensors):
    """Moves numbers by one unit in the last place, half of them up and half down, as another processor may."""
    for tensor in tensors:
        up = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(tensor.numel())) < 0.5
        infinity = torch.full_like(tensor, math.inf)
        tensor.copy_(torch.where(up, tensor.nextafter(infinity), tensor.nextafter(-infinity)))


def rounds_otherwise(kind=torch.optim.AdamW):
    """Lets all steps of a torch optimizer in this process round differently."""
    step = kind.step

    @torch.no_grad()
    def nudging(self, closure=None):
        step(self, closure)
        nudged([local(p) for group in self.param_groups for p in group["params"]])

    kind.step = nudging


def started(mesh, scheme, safety=None, **options):
    model = dt.shard(built(Plain), mesh)
    base = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, dt.replicate(base, model, mesh["replicate"], scheme, safety=safety, **options)


def advance(mesh, model, optimizer, steps):
    for step in steps:
        model(batch(mesh.get_rank(), step, 32)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def apart(mesh, shards):
    """What a run of unlike replicas logs, whether its weights differ, and what it sends."""
    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("detonation").addHandler(handler)
    if mesh.get_local_rank("replicate") == 1:
        rounds_otherwise()
    model, optimizer = started(mesh, dt.loco(), dt.Safety(verify_every=5))
    alike = started(mesh, dt.loco(), dt.Safety("skip"))[1]
    advance(mesh, model, optimizer, range(20))
    logging.getLogger("detonation").removeHandler(handler)
    return (
        said,
        dt.fingerprint(model, mesh)[1],
        optimizer.closeness is not None,
        alike.closeness is None,
    )


@some("shards", [1, 2], keep=[1])
def test_replicas_that_round_differently_train_close_and_one_rank_says_so(shards):
    first, *others = worlds.run_alone(apart, 2, shards, shards)
    (text,), equal, close, unbuilt = first
    assert (equal, close, unbuilt) == (False, True, True) and others == [
        ([], False, True, True)
    ] * (2 * shards - 1)
    assert (
        f"replica 1 has {STEP_SELFTEST}=" in text
        and SELFTEST not in text
        and 'Safety(equal="bits")' in text
    )


def refused(mesh, what):
    if mesh.get_rank() == 1 and what == "steps":
        rounds_otherwise()
    if mesh.get_rank() == 1 and what == "decode":
        decoded = ReferenceEngine.update
        ReferenceEngine.update = lambda self, *arguments: decoded(self, *arguments).mul(1 + 2**-23)
    model, optimizer = started(mesh, dt.schemes.random(), dt.Safety(equal="bits"), clip=1.0)
    outcome = caught(advance, mesh, model, optimizer, range(1))
    model, optimizer = started(mesh, dt.schemes.random(), clip=1.0)
    advance(mesh, model, optimizer, range(3))
    optimizer.verify()
    return outcome


@pytest.mark.parametrize(("what", "named"), [("steps", STEP_SELFTEST), ("decode", SELFTEST)])
def test_bits_refuses_them_and_says_what_differs(what, named):
    for kind, text in worlds.run_alone(refused, 2, 1, what):
        assert (
            kind == "Mismatch" and f"replica 1 has {named}=" in text and NORM_SELFTEST not in text
        )
        assert "(threads=1, cpu=" in text and ", replica 0 has" in text


def counted(mesh):
    """Bytes of a step beside those of bits, and whether like replicas keep their bits, under all that is said."""
    found = []
    for equal in ("auto", "bits", "close"):
        model, optimizer = started(mesh, dt.loco(), dt.Safety(equal=equal))
        advance(mesh, model, optimizer, range(3))
        begun = optimizer.stats.bytes_sent
        advance(mesh, model, optimizer, range(3, 4))
        weights, equal = dt.fingerprint(model, mesh)
        found.append(
            (optimizer.closeness is None, optimizer.stats.bytes_sent - begun, weights, equal)
        )
    return found


@pytest.mark.long  # no branch of its own
def test_like_replicas_have_equal_bits_and_send_nothing_for_it():
    (auto, bits, close), other = worlds.run_alone(counted, 2, 1)
    assert auto == bits and auto[0] and auto[3] and not close[0] and [auto, bits, close] == other
    numbers = (
        2 * (32 * 64 + 64 * 32 + 64 + 32) + sum(p.numel() for p in built(Plain).parameters()) + 4
    )  # and 4 counts
    assert close[2:] == auto[2:] and close[1] - auto[1] == 4 * -(-numbers // closeness.PERIOD) + 1
    planned = close_bytes(
        dt.loco(), "AdamW", sum(p.numel() for p in built(Plain).parameters()), replicas=2
    )
    assert abs(close[1] - auto[1] - planned) < 4 * 2  # a number more at the end, and the mark
    assert (
        close_bytes(dt.diloco(), "Muon", 1000, replicas=4) == 12
        and close_bytes(dt.none(), "AdamW", 1000, 4) == 0
    )


def flipped(tensor, bit):
    """Flips a bit of a number: 23 to 30 are those of its exponent."""
    tensor.data.view(-1)[7:8].view(torch.int32).bitwise_xor_(1 << bit)


def faulty(mesh, scheme, on_desync, what):
    """One replica has a fault in the middle of a close run."""
    if mesh.get_local_rank("replicate") == 1:
        rounds_otherwise()
    model, optimizer = started(mesh, scheme, dt.Safety(verify_every=4, on_desync=on_desync))
    advance(mesh, model, optimizer, range(8))
    if mesh.get_local_rank("replicate") == 1:
        weight = model.layers[0].weight
        if what == "weight":
            flipped(local(weight), 29)
        elif what == "state":
            flipped(local(optimizer.state[weight]["exp_avg_sq"]), 30)
        elif what == "anchor":
            flipped(optimizer.build()[0]._anchor.flat, 29)
        elif what == "own":  # its own gradient in the place of what all agreed on
            take = optimizer.base_step.optimizer.step
            optimizer.base_step.optimizer.step = lambda: (
                [p.grad.mul_(-1) for p in model.parameters()] and take()
            )
        else:
            take = optimizer.base_step.optimizer.step

            def faster():
                optimizer.param_groups[0]["lr"] *= 1.25
                take()
                optimizer.param_groups[0]["lr"] /= 1.25

            optimizer.base_step.optimizer.step = faster
    return caught(advance, mesh, model, optimizer, range(8, 12)), optimizer.step_count


@pytest.mark.long_cases("weight", "state", "lr", "anchor")
@pytest.mark.parametrize("what", ["weight", "state", "own", "lr", "anchor"])
def test_a_fault_is_told_from_rounding(what):
    scheme = dt.diloco(every=2, outer_momentum=0.0) if what == "anchor" else dt.loco()
    outcomes = worlds.run_alone(faulty, 3, 1, scheme, "stop", what)
    for (kind, text), steps in outcomes:
        assert kind == "Desync" and text.startswith("replica 1 differs") and steps == 12


@pytest.mark.long  # no branch of its own
@some("replicas", [2, 3], keep=[3])
def test_a_fault_is_repaired(replicas):
    assert (
        worlds.run_alone(faulty, replicas, 1, dt.loco(), "repair", "weight")
        == [(("nothing", ""), 12)] * replicas
    )


def mended(mesh, name, period):
    """After so many steps all that a replica had nudged is equal again, where all round alike."""
    closeness.PERIOD = period
    found = {}
    for each in name:
        model, optimizer = started(mesh, SCHEMES[each], dt.Safety(equal="close", verify_every=0))
        advance(mesh, model, optimizer, range(4))
        if mesh.get_local_rank("replicate") == 1:
            nudged(
                [
                    t
                    for r in optimizer.build()
                    for t in r.replicated().values()
                    if t.is_floating_point() and t.ndim
                ]
            )
        apart = [equal_on_all(optimizer)]
        advance(mesh, model, optimizer, range(4, 4 + 2 * period))
        found[each] = (*apart, equal_on_all(optimizer))
    return found


def equal_on_all(optimizer):
    consensus = optimizer._consensus
    return not any(
        closeness.differences(r.link, r.replicated(), consensus.runtime.device)
        for r in optimizer.build()
    )


@pytest.mark.long  # no branch of its own
@some("shards", [1, 2], keep=[1])
def test_everything_is_made_equal_in_turn(shards):
    names = ["loco", "full", *(name for name in OTHERS if "tiles" not in name)]
    for found in worlds.run_alone(mended, 2, shards, names, 12):
        assert found == dict.fromkeys(names, (False, True))


def resumed(mesh):
    """A close run goes on from states that differ by rounding; one with equal bits does not."""
    outcomes = []
    for equal in ("close", "auto"):
        for scheme in (dt.loco(), dt.diloco(every=2)):
            model, optimizer = started(mesh, scheme, dt.Safety(equal=equal, verify_every=0))
            advance(mesh, model, optimizer, range(4))
            state = optimizer.state_dict()
            if mesh.get_rank() == 1:
                saved = next(iter(state["replication"].values()))
                nudged([tensor for key, tensor in saved.items() if ".anchor." in key])
                nudged(locals_of(dict(model.named_parameters())))
            again = dt.replicate(
                torch.optim.AdamW(model.parameters(), lr=1e-2),
                model,
                mesh["replicate"],
                scheme,
                safety=optimizer.settings.safety,
            )
            outcomes.append(
                caught(again.load_state_dict, state)
                if equal == "auto"
                else caught(go_on, again, state)
            )
    return outcomes


def go_on(optimizer, state):
    optimizer.load_state_dict(state)
    for _ in range(3):
        optimizer.step()
    optimizer.verify()


@pytest.mark.long  # no branch of its own
def test_a_close_run_is_resumed():
    for outcomes in worlds.run_alone(resumed, 2, 1):
        assert outcomes[:2] == [("nothing", "")] * 2
        assert [kind for kind, _ in outcomes[2:]] == ["Mismatch"] * 2
        assert 'Safety(equal="close")' in outcomes[2][1]


def saved(mesh, folder, scheme):
    """A checkpoint of a close run, which like replicas load: in "auto", "bits", and by a world of another shape."""
    if mesh.get_local_rank("replicate") == 1:
        rounds_otherwise()
    model, optimizer = started(mesh, scheme, dt.Safety(equal="close"))
    advance(mesh, model, optimizer, range(6))
    if mesh.get_local_rank("replicate") == 1:
        nudged(
            [
                t
                for r in optimizer.build()
                for t in r.replicated().values()
                if t.is_floating_point() and t.ndim
            ]
        )
    return dt.save_checkpoint(folder, model, optimizer)


def loaded(mesh, folder, scheme):
    """How like replicas go on from it, whether they hold the same bits then, and are the close ones that they were."""
    found = []
    for equal in ("auto", "close", "bits"):
        model, optimizer = started(mesh, scheme, dt.Safety(equal=equal))
        outcome = caught(dt.load_checkpoint, folder, model, optimizer)
        if outcome == ("nothing", ""):
            apart = not equal_on_all(optimizer)
            advance(mesh, model, optimizer, range(6, 9))
            optimizer.verify()
            moved = max(optimizer.closeness.movements().values()) if optimizer.closeness else 0.0
            outcome = apart, optimizer.closeness is not None, moved > 0.0
        found.append(outcome)
    return found


CLOSE_SCHEMES = {"loco": dt.loco(), "diloco": dt.diloco(every=2)}


@pytest.mark.long_cases("diloco-2")
@covered("name, shards", CLOSE_SCHEMES, [1, 2])
def test_a_checkpoint_of_a_close_run_is_verified_and_loaded_as_one(name, shards, tmp_path):
    scheme = CLOSE_SCHEMES[name]
    path = worlds.run_alone(saved, 2, shards, tmp_path, scheme)[0]
    report = verify(path)
    assert report.good and 0 < report.apart < 1e-5, report.line()
    said = f"replicas close in {report.compared} tensors a shard, at most {report.apart:.1e} of a norm apart"
    assert report.line() == f"{path}: whole, {said}"
    for auto, close, (kind, text) in worlds.run_alone(loaded, 2, shards, tmp_path, scheme):
        assert auto == close == (True, True, True)
        assert kind == "Mismatch" and 'Safety(equal="close")' in text
    (grown, *_), *_ = worlds.run_alone(
        loaded, 3, 1, tmp_path, scheme
    )  # at the mean: they may have equal bits again
    assert grown == (False, False, False)


@pytest.mark.parametrize("key", ["model.layers.0.weight", "optimizer.layers.0.weight.exp_avg"])
def test_a_replica_that_is_really_different_fails(key, tmp_path):
    """Its tensor is off by a tenth of what it moved in these steps."""
    path = worlds.run_alone(saved, 2, 1, tmp_path, dt.loco())[0]
    read = ShardReader(path / "replica1-shard0.safetensors")
    tensors = {each: read.tensor(each) for each in read.keys}
    name = key.removeprefix("model.") if key.startswith("model") else "layers.0.weight (exp_avg)"
    noise = torch.randn(tensors[key].shape)
    tensors[key] += noise * (read.moved[name] / 10 / noise.norm())
    rewritten(path, tensors)
    report = verify(path)
    assert not report.good and report.differences == [
        f"{key} on replica 1, shard 0 (compared with replica 0)"
    ]


def rewritten(path, tensors):
    """Writes other tensors of replica 1, under right checksums."""
    name = "replica1-shard0.safetensors"
    with safe_open(path / name, "pt") as file:
        metadata = file.metadata()
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path / name, metadata)
    described, content = manifest.read_manifest(path), (path / name).read_bytes()
    described.files[name] = ShardSummary(len(content), hashlib.sha256(content).hexdigest())
    (path / manifest.MANIFEST_NAME).write_text(described.dumps())


def test_levels_inside_and_outside_stay_close():
    """Weights along the one axis and anchors along the other, on four replicas of two kinds."""
    outcomes = worlds.run_alone(by_levels, 2, 2)
    assert outcomes == [True] * 4


def by_levels(mesh):
    closeness.PERIOD = 12
    model = built(Plain)
    base = torch.optim.AdamW(model.parameters(), lr=1e-2)
    levels = [(mesh["shard"], dt.loco()), (mesh["replicate"], dt.diloco(every=2))]
    optimizer = dt.replicate(
        base, model, levels=levels, safety=dt.Safety(equal="close", verify_every=0)
    )
    optimizer.set_up()
    if mesh.get_rank() == 3:
        optimizer.build()[1]._anchor.flat.mul_(1 + 1e-5)
    advance(mesh, model, optimizer, range(60))
    gathered = [torch.empty_like(optimizer.build()[1]._anchor.flat) for _ in range(4)]
    torch.distributed.all_gather(gathered, optimizer.build()[1]._anchor.flat)
    return max(float((each - gathered[0]).abs().max()) for each in gathered) < 1e-6


def test_projections_measure_distances():
    torch.manual_seed(0)
    for numel in (1, 31, 70_000, 300_000):
        one = torch.randn(numel)
        other = one + 1e-3 * torch.randn(numel)
        found = closeness.distance(
            closeness.projections(one).tolist(), closeness.projections(other).tolist()
        )
        assert 0.4 < found / float((one - other).norm()) < 1.8
    signs = torch.stack([closeness.projections(row) for row in torch.eye(64)])
    assert set(signs.view(-1).tolist()) == {-1.0, 1.0} and abs(float(signs.mean())) < 0.1


def test_a_lost_source_changes_nothing():
    """On an elastic axis the sum goes without a replica that was lost: nobody takes zeros for its weights."""

    def act(communicator):
        whole = communicator.all_reduce
        model = built(Plain)
        base = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = dt.replicate(
            base, model, communicator, dt.demo(), safety=dt.Safety(equal="close")
        )
        optimizer.set_up()
        before = [p.detach().clone() for p in model.parameters()]
        communicator.all_reduce = lambda values: whole(values.zero_())
        optimizer.closeness.moved(0, False)
        return all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))

    assert simulate_replicas(act, 2) == [True, True]
