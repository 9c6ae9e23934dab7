"""`save_checkpoint` and `load_checkpoint` in a loop of one's own: results and refusals."""

import gc
import logging
import warnings
import weakref
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from test_exact import BASES, advance, everything, start
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import detonation as dt
import worlds
from detonation.checkpoint import restore, snapshot
from detonation.checkpoint.files import manifest
from detonation.checkpoint.snapshot import take_snapshot, weights
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.core.flat.tensors import digest
from detonation.core.optimizer import gathered
from zoo import Menagerie, Plain, built

pytestmark = pytest.mark.usefixtures("lasting_worlds")

DEMO = dt.demo(topk=4, chunk=16)


def own_loop(mesh, folder):
    """A loop that also saves its scheduler, changes an option meanwhile, and draws random numbers."""
    model, optimizer = start(mesh, DEMO, BASES["AdamW"])
    assert dt.load_checkpoint(folder, model, optimizer) is None, "nothing to load yet"
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    torch.manual_seed(7)
    for step in range(3):
        advance(model, optimizer, [step])
        schedule.step()
    optimizer.param_groups[0]["weight_decay"] = 0.25
    path = dt.save_checkpoint(
        folder, model, optimizer, {"schedule": schedule.state_dict(), "epoch": 3}
    )
    drawn = torch.rand(3)
    other, again = start(mesh, DEMO, BASES["AdamW"])
    loaded = dt.load_checkpoint(folder, other, again)
    after = torch.optim.lr_scheduler.StepLR(again, 2)
    after.load_state_dict(loaded.extra["schedule"])
    assert (loaded.path, loaded.step, loaded.extra["epoch"]) == (
        path,
        3,
        3,
    ) and path.name == "step-000003"
    assert again.param_groups[0]["weight_decay"] == 0.25 and again.param_groups[0]["betas"] == (
        0.9,
        0.999,
    )
    assert torch.equal(torch.rand(3), drawn) and after.get_last_lr() == schedule.get_last_lr()
    described = manifest.read_manifest(path)
    assert (
        described.levels == [{"scheme": "demo", **DEMO.identity}]
        and described.versions["torch"] == torch.__version__
    )
    return everything(model, optimizer) == everything(other, again)


def test_a_loop_of_ones_own_goes_on_with_its_scheduler_and_generators(tmp_path):
    assert all(worlds.run(own_loop, 2, 2, tmp_path))


def refused(mesh, folder):
    """The error of each wrong start."""
    model, optimizer = start(mesh, DEMO, BASES["AdamW"])
    advance(model, optimizer, [0])
    dt.save_checkpoint(folder, model, optimizer)

    def error_of(act):
        try:
            act()
        except ValueError as error:
            return str(error)

    def load(scheme=DEMO, base=BASES["AdamW"], kind=Plain, seed=3):
        other = dt.shard(built(kind), mesh)
        replicated = dt.replicate(
            base(other.parameters()), other, mesh["replicate"], scheme, seed=seed
        )
        dt.load_checkpoint(folder, other, replicated)

    def groups(params):
        first, *others = params
        return torch.optim.AdamW([{"params": others}, {"params": [first]}])

    broken = start(mesh, DEMO, BASES["AdamW"])
    broken[1].base.state[next(broken[0].parameters())]["strange"] = object()
    return {
        "scheme": error_of(lambda: load(scheme=dt.demo(topk=2, chunk=16))),
        "seed": error_of(lambda: load(seed=4)),
        "groups": error_of(lambda: load(base=groups)),
        "optimizer": error_of(lambda: load(base=BASES["SGD"])),
        "model": error_of(lambda: load(kind=Menagerie)),
        "keep": error_of(lambda: dt.Checkpoints(folder, model, optimizer, keep=0)),
        "extra": error_of(
            lambda: dt.save_checkpoint(folder, model, optimizer, {"x": [{"y": object()}]})
        ),
        "kind": error_of(
            lambda: dt.save_checkpoint(folder, model, optimizer, {"x": model.state_dict()})
        ),
        "size": error_of(
            lambda: dt.save_checkpoint(folder, model, optimizer, {"x": "a" * manifest.MOST_BYTES})
        ),
        "state": error_of(lambda: dt.save_checkpoint(folder, *broken)),
    }


class Lines(logging.Handler):
    """The records of a rank, as pairs of level and text."""

    def __init__(self):
        super().__init__()
        self.found = []
        log = logging.getLogger("detonation")
        log.setLevel(logging.INFO)
        log.addHandler(self)

    def emit(self, record):
        self.found.append((record.levelname, record.getMessage()))

    def taken(self):
        """The records since the last call."""
        taken, self.found = self.found, []
        return taken


def by_name(mesh, folder):
    """A checkpoint by its path, in a shared directory and in one of each rank; and paths to none."""
    lines = Lines()
    for shared in (True, False):
        place = folder / ("all" if shared else f"rank{dist.get_rank()}")
        model, optimizer = start(mesh, DEMO, BASES["AdamW"])
        assert dt.load_checkpoint(place, model, optimizer) is None
        said = ("INFO", f"no checkpoint in {place}: training starts from the beginning")
        assert [line for line in lines.taken() if "start" in line[1]] == [said][dist.get_rank() :]
        ends, paths = {}, {}
        for step in (1, 2):
            advance(model, optimizer, [step])
            paths[step] = dt.save_checkpoint(place, model, optimizer)
            ends[step] = everything(model, optimizer)
        for step, path in ((1, paths[1]), (2, str(paths[2])), (1, f"{paths[1]}/")):
            loaded = dt.load_checkpoint(path, model, optimizer)
            assert (loaded.step, loaded.path) == (step, paths[step])
            assert everything(model, optimizer) == ends[step]
        for path in (place / "step-000007", folder / "none" / "step-000001"):
            with pytest.raises(
                dt.errors.NoCheckpoint, match=f"^{path} is no whole checkpoint: "
            ) as error:
                dt.load_checkpoint(path, model, optimizer)
            other = "no other checkpoint"
            if path.parent == place:
                other = "step-000002, step-000001"
            assert str(error.value).endswith(f"{path.parent} holds {other}")
        dist.barrier()
        if dist.get_rank() == 1 or shared:
            (paths[2] / "replica1-shard0.safetensors").unlink(missing_ok=True)
        dist.barrier()
        with pytest.raises(dt.errors.NoCheckpoint, match="step-000002 is no whole checkpoint: "):
            dt.load_checkpoint(paths[2], model, optimizer)
        assert everything(model, optimizer) == ends[1], "a refused checkpoint changes nothing"
        assert dt.load_checkpoint(place, model, optimizer).step == 1
        if dist.get_rank() == 0 or not shared:
            paths[1].rename(place / "best")
        dist.barrier()
        assert dt.load_checkpoint(place / "best", model, optimizer).step == 1
    logging.getLogger("detonation").removeHandler(lines)
    return True


def test_a_checkpoint_is_loaded_by_its_path_or_refused(tmp_path):
    assert worlds.run(by_name, 2, 1, tmp_path) == [True, True]


def beside_later(mesh, folder):
    """What is said where a run saves beside a later checkpoint, and what stays of both."""
    lines = Lines()
    model, optimizer = start(mesh, DEMO, BASES["AdamW"])
    advance(model, optimizer, range(2))
    early = dt.save_checkpoint(folder, model, optimizer)
    advance(model, optimizer, range(2, 4))
    dt.save_checkpoint(folder, model, optimizer)
    dt.load_checkpoint(early, model, optimizer)
    lines.taken()
    said = []
    for keep in (3, 1):
        advance(model, optimizer, [2])
        dt.save_checkpoint(folder, model, optimizer, keep=keep)
        said.append([text for level, text in lines.taken() if level == "WARNING"])
        dt.load_checkpoint(folder / "step-000003", model, optimizer)
        dist.barrier()
        if keep == 3:
            dt.load_checkpoint(early, model, optimizer)
    logging.getLogger("detonation").removeHandler(lines)
    return said, sorted(path.name for path in folder.iterdir())


def test_a_save_beside_a_later_checkpoint_is_warned_of_once_and_stays(tmp_path):
    (said, left), (other, _) = worlds.run(beside_later, 2, 1, tmp_path)
    warning = (
        f"step-000004 in {tmp_path} is later than the checkpoint of step 3, which was saved now"
    )
    assert said == [
        [
            f"{warning}: a resume would load the later checkpoint; remove it, or save in another directory"
        ],
        [],
    ]
    assert other == [[], []] and left == ["step-000003", "step-000004"]


MESSAGES = {
    "scheme": "was written with levels [{'scheme': 'demo', 'topk': 4",
    "seed": "was written with seed 3, this run has 4: resume with the same",
    "groups": "was written with other parameter groups: of [4] parameters, here of [3, 1], in another order from layer",
    "optimizer": "was written with optimizer AdamW, this run has SGD: resume with the same",
    "model": "was written with other parameters: layers.0.weight, layers.0.bias, layers.1.weight and 1 more, which "
    "this one lacks, and without single, frozen, unused and 7 more: resume the same model",
    "keep": "keep is 0, must be at least 1",
    "extra": "extra['x'][0]['y'] is a value of type object, which is not saved: give numbers",
    "kind": "extra['x']['layers.0.weight'] is a DTensor, of which this rank has a part: give",
    "size": " bytes as JSON, more than the 67,108,864 that a manifest may have",
    "state": "optimizer.layers.0.weight.strange is <object object at",
}


def test_a_wrong_start_is_refused_in_one_line(tmp_path):
    errors = worlds.run(refused, 2, 1, tmp_path)[0]
    for key, message in MESSAGES.items():
        assert errors[key] and message in errors[key] and "\n" not in errors[key], (
            key,
            errors[key],
        )


def with_numpy(mesh, folder):
    """The learning rates after loading, where numpy's numbers were saved, are here, or both."""
    found = []
    for name, saved, here in (
        ("both", NUMPY, NUMPY),
        ("saved", NUMPY, PLAIN),
        ("here", PLAIN, NUMPY),
        ("narrow", NARROW, NARROW),
        ("narrow here", PLAIN, NARROW),
    ):
        (lr, seed), (other_lr, other_seed) = saved, here
        model, other = built(Plain), built(Plain)
        base, again = (
            torch.optim.AdamW(model.parameters(), lr=lr),
            torch.optim.AdamW(other.parameters(), lr=other_lr),
        )
        optimizer = dt.replicate(base, model, mesh["replicate"], dt.loco(), seed=seed)
        advance(model, optimizer, [0])
        base.param_groups[0]["lr"] = lr / 2
        dt.save_checkpoint(folder / name, model, optimizer)
        dt.load_checkpoint(
            folder / name,
            other,
            dt.replicate(again, other, mesh["replicate"], dt.loco(), seed=other_seed),
        )
        found.append(again.param_groups[0]["lr"])
    return found


NUMPY, PLAIN = (np.float64(0.5), np.int64(3)), (0.5, 3)
NARROW = (np.float32(0.5), np.int64(3))  # unlike float64, it is no float of Python


def test_numbers_of_numpy_are_saved_and_loaded_as_numbers(tmp_path):
    assert worlds.run(with_numpy, 2, 1, tmp_path) == [[0.25] * 5] * 2


def test_replicas_that_may_be_lost_need_no_default_group_to_save(tmp_path):
    assert not dist.is_initialized()
    axis = dt.elastic(replica=0, replicas=1, store=dist.HashStore(), silence_s=1.1)
    model = built(Plain)
    optimizer = dt.replicate(torch.optim.SGD(model.parameters()), model, axis, dt.full())
    with dt.Checkpoints(tmp_path, model, optimizer) as checkpoints:
        checkpoints.save()
        assert checkpoints.wait() == tmp_path / "step-000000"
    axis.close()


def on_another_device(mesh, folder, saved, here):
    """How a checkpoint was loaded, and a number drawn after that, where ranks have other random generators."""
    model, optimizer = start(mesh, DEMO, BASES["AdamW"])
    advance(model, optimizer, [0])
    torch.manual_seed(7)
    every = {"generator.cpu": torch.default_generator, "generator.cuda": torch.Generator()}
    snapshot.generators = lambda model: {key: every[key] for key in saved}
    dt.save_checkpoint(folder, model, optimizer)
    drawn = torch.rand(1)
    restore.generators = lambda model: {key: every[key] for key in here}
    return dt.load_checkpoint(folder, model, optimizer).merged, torch.equal(torch.rand(1), drawn)


def test_a_generator_that_was_not_saved_starts_anew(tmp_path):
    cpu, both = ["generator.cpu"], ["generator.cpu", "generator.cuda"]
    anew = "exactly as saved; the random generator of cuda was not saved and starts anew"
    assert worlds.run(on_another_device, 2, 1, tmp_path / "a", cpu, both) == [(anew, True)] * 2
    assert (
        worlds.run(on_another_device, 2, 1, tmp_path / "b", both, cpu)
        == [("exactly as saved", True)] * 2
    )


def synchronized_and_saved(mesh, folder):
    """A round that was ended early is not ended again after loading."""
    model, optimizer = start(mesh, dt.diloco(every=5), BASES["SGD"])
    advance(model, optimizer, range(3))
    optimizer.synchronize()
    dt.save_checkpoint(folder, model, optimizer)
    other, again = start(mesh, dt.diloco(every=5), BASES["SGD"])
    dt.load_checkpoint(folder, other, again)
    again.synchronize()
    return everything(model, optimizer) == everything(other, again)


def test_a_synchronized_round_stays_synchronized(tmp_path):
    assert all(worlds.run(synchronized_and_saved, 2, 1, tmp_path))


def several_levels(mesh, folder):
    """Two levels on one axis, and a model whose own buffers differ between replicas."""
    axis = mesh["replicate"]
    levels = [(axis, dt.schemes.random(rate=1 / 2)), (axis, dt.schemes.local_sgd(every=3))]

    def begun():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
        return model, dt.replicate(torch.optim.AdamW(model.parameters()), model, levels=levels)

    model, optimizer = begun()
    advance(model, optimizer, range(4))
    dt.save_checkpoint(folder, model, optimizer)
    other, again = begun()
    dt.load_checkpoint(folder, other, again)
    advance(model, optimizer, range(4, 8))
    advance(other, again, range(4, 8))
    return everything(model, optimizer) == everything(other, again) and torch.equal(
        model[1].running_mean, other[1].running_mean
    )


def test_several_levels_and_local_buffers_go_on_exactly(tmp_path):
    assert all(worlds.run(several_levels, 2, 1, tmp_path))


def without_frozen(mesh, folder, frozen):
    """Saved by 2 x 2, loaded by 2 x 2 and, the ranks taken otherwise, by 4 x 1: True where a run goes on exactly."""
    other_mesh = dt.init_mesh(4, 1, "cpu")

    def begun(mesh):
        model = dt.shard(built(Plain), mesh)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("bias" in name)
        base = BASES["AdamW"]([p for p in model.parameters() if p.requires_grad])
        return model, dt.replicate(base, model, mesh["replicate"], DEMO)

    model, optimizer = begun(mesh)
    advance(model, optimizer, range(3))

    def move(model):
        """Frozen weights unlike what a fresh model has."""
        with torch.no_grad():
            for parameter in model.parameters():
                if not parameter.requires_grad:
                    parameter.add_(1.0)

    move(model)
    path = dt.save_checkpoint(folder, model, optimizer, frozen=frozen)
    if dist.get_rank() == 0:
        assert any("bias" not in key for key in names_in(path)) == frozen
    kept = []
    for other, again in (begun(mesh), begun(other_mesh)):
        if not frozen:
            move(other)
        fresh = [p.detach().clone() for p in other.parameters()]
        dt.load_checkpoint(folder, other, again)
        left = [torch.equal(a, b) for a, b in zip(fresh, other.parameters(), strict=True)]
        kept.append([left[i] for i, p in enumerate(other.parameters()) if not p.requires_grad])
        assert not all(left) and again.step_count == 3
    return kept


def names_in(path):
    """The parameters whose weights are in the file of the first rank."""
    return [
        key for key in load_file(path / "replica0-shard0.safetensors") if key.startswith("model.")
    ]


@pytest.mark.parametrize("frozen", [True, False])
def test_frozen_parameters_are_left_out_on_request_and_then_stay_as_they_are(tmp_path, frozen):
    for exact, elastic in worlds.run(without_frozen, 2, 2, tmp_path, frozen):
        assert {*exact, *elastic} == {not frozen}


def over_another_base(mesh, folder):
    """How checkpoints without frozen weights load onto the same base, and onto others."""
    other_mesh = dt.init_mesh(4, 1, "cpu")
    said = {}
    for case, here in {"same": mesh, "moved": mesh, "bf16": mesh, "elastic": other_mesh}.items():
        for n, axes in enumerate((mesh, here)):
            model = dt.shard(built(Plain), axes)
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("bias" in name)
            weight = model.layers[1].weight
            with torch.no_grad():
                if n and case == "moved" and dist.get_rank() == 3:  # one rank: all must refuse
                    weight.to_local()[-1, -1] += 1e-6
            if n and case == "bf16":
                model.layers[1].weight = nn.Parameter(weight.detach().bfloat16(), False)
            base = BASES["AdamW"]([p for p in model.parameters() if p.requires_grad])
            optimizer = dt.replicate(base, model, axes["replicate"], DEMO)
            if not n:
                advance(model, optimizer, range(2))
                dt.save_checkpoint(folder / case, model, optimizer, frozen=False)
        before = digest(model.parameters())
        try:
            said[case] = dt.load_checkpoint(folder / case, model, optimizer).merged
        except ValueError as error:
            said[case] = str(error)
            assert digest(model.parameters()) == before and optimizer.step_count == 0
    return said


def test_a_checkpoint_without_frozen_weights_loads_over_the_same_ones_alone(tmp_path):
    for said in worlds.run(over_another_base, 2, 2, tmp_path):
        assert said["same"] == "exactly as saved"
        for case in ("moved", "bf16"):
            assert said[case] == (
                f"the frozen weights are not those of the saved run {tmp_path}/{case}/step-000002"
                " (layers.1.weight): load the same base model, in the same dtype"
            )
        assert said["elastic"].endswith(
            "; frozen weights were not compared: they were sharded otherwise"
        )


def trained_again(mesh, folder):
    """What loading over a weight says that the saved run had frozen, and how it loads once all weights are frozen."""
    model = built(Plain)
    name, weight = next(model.named_parameters())
    optimizer = dt.replicate(BASES["SGD"](model.parameters()), model, mesh["replicate"], DEMO)
    weight.requires_grad_(False)
    advance(model, optimizer, range(2))
    path = dt.save_checkpoint(folder, model, optimizer, frozen=False)

    again = built(Plain)
    other = dt.replicate(BASES["SGD"](again.parameters()), again, mesh["replicate"], DEMO)
    with pytest.raises(ValueError) as raised:
        dt.load_checkpoint(folder, again, other)
    again.requires_grad_(False)
    dt.load_checkpoint(folder, again, other)

    for each, its in ((model, optimizer), (again, other)):
        each.requires_grad_(True)
        advance(each, its, range(2, 4))
    return str(raised.value) == (
        f"{path} leaves out the frozen weights {name}, which this run trains: give the model these weights, freeze"
        " them (requires_grad_(False)), and unfreeze them after the load"
    ), digest(model.parameters()) == digest(again.parameters())


def test_a_checkpoint_without_frozen_weights_says_that_this_run_trains_them(tmp_path):
    assert worlds.run(trained_again, 2, 1, tmp_path) == [(True, True)] * 2


def unmarked(mesh, folder):
    """Earlier versions did not describe the frozen weights that they omitted."""
    for n in range(2):
        model = built(Plain)
        model.layers[0].weight.requires_grad_(False).add_(n)
        base = BASES["AdamW"]([p for p in model.parameters() if p.requires_grad])
        optimizer = dt.replicate(base, model, mesh["replicate"], DEMO)
        if not n:
            advance(model, optimizer, range(2))
            with patch.object(snapshot, "FROZEN", "ignored."):
                dt.save_checkpoint(folder, model, optimizer, frozen=False)
    return dt.load_checkpoint(folder, model, optimizer).merged


def test_a_checkpoint_that_describes_no_frozen_weights_loads_over_any(tmp_path):
    assert worlds.run(unmarked, 2, 1, tmp_path) == ["exactly as saved"] * 2


def bare(model):
    return model


def compiled(model):
    return torch.compile(model, backend="eager")


def compiled_in_part(model):
    model.layers[0] = torch.compile(model.layers[0], backend="eager")
    return model


def checkpointed(model):
    model.layers[1] = checkpoint_wrapper(compiled_in_part(model).layers[1])
    return model


def wrapped(mesh, folder):
    """What was saved of a model in one wrapper, and what another loaded; and the names in files."""
    warnings.simplefilter(
        "ignore"
    )  # of torch's compiler, which looks at .grad of what FSDP2 returns
    found, names = {}, set()
    for how in (bare, compiled, compiled_in_part, checkpointed):
        ends = {}
        for other in (how, bare, compiled, checkpointed):
            model = other(dt.shard(built(Plain), mesh))
            base = torch.optim.AdamW(model.parameters(), lr=1e-3)
            optimizer = dt.replicate(base, model, mesh["replicate"], DEMO)
            if ends:
                dt.load_checkpoint(folder / how.__name__, model, optimizer)
            else:
                advance(model, optimizer, range(2))
                dt.save_checkpoint(folder / how.__name__, model, optimizer)
            names |= {*weights(model)}
            ends[other.__name__] = everything(model, optimizer)
        found[how.__name__] = ends
    return found, sorted(names)


@pytest.mark.long  # no branch of its own
def test_wrappers_have_no_part_in_names(tmp_path):
    for found, names in worlds.run_alone(wrapped, 2, 1, tmp_path):
        assert names == ["layers.0.bias", "layers.0.weight", "layers.1.bias", "layers.1.weight"]
        for how, ends in found.items():
            assert all(end == ends[how] for end in ends.values()), how


def saved_with_wrappers(mesh, folder):
    """A version before this one kept the parts of wrappers in the names of a checkpoint."""
    with patch.object(gathered, "bare_name", str):
        model, optimizer = start(mesh, DEMO, BASES["AdamW"])
        outer = compiled(model)
        optimizer = dt.replicate(optimizer.base, outer, mesh["replicate"], DEMO, seed=3)
        advance(model, optimizer, range(2))
        path = dt.save_checkpoint(folder, outer, optimizer)
        kept = any("_orig_mod" in key for key in load_file(path / "replica0-shard0.safetensors"))
    other, again = start(mesh, DEMO, BASES["AdamW"])
    dt.load_checkpoint(folder, other, again)
    (*ours, state), (*theirs, loaded) = everything(model, optimizer), everything(other, again)
    return kept, ours == theirs and [*state.values()] == [*loaded.values()]


def test_a_checkpoint_that_has_wrappers_in_its_names_loads(tmp_path):
    assert worlds.run_alone(saved_with_wrappers, 2, 1, tmp_path) == [(True, True)] * 2


def with_buffers_of_other_types(mesh, folder):
    """Whether each comes back bit for bit; the error of a type that safetensors has not, from both ways to save."""
    equal = []
    for dtype, value in (
        (torch.complex64, 3 - 2j),
        (torch.uint16, 65535),
        (torch.uint32, 2**32 - 1),
        (torch.uint64, 7),
    ):
        buffers = [
            nn.Buffer(torch.tensor([value, 0], dtype=dtype)),
            nn.Buffer(torch.zeros(2, dtype=dtype)),
        ]
        for n, buffer in enumerate(buffers):
            model, optimizer = start(mesh, DEMO, BASES["AdamW"])
            model.table = buffer
            place = folder / str(dtype)
            dt.load_checkpoint(place, model, optimizer) if n else dt.save_checkpoint(
                place, model, optimizer
            )
        equal.append(torch.equal(*buffers) and buffers[1][0].item() == value)
    model.table = nn.Buffer(torch.zeros(2, dtype=torch.complex128))
    with dt.Checkpoints(folder, model, optimizer) as checkpoints:
        for save in (checkpoints.save, lambda: dt.save_checkpoint(folder, model, optimizer)):
            with pytest.raises(
                ValueError,
                match=r"model\.table is of type torch\.complex128, which safetensors does not",
            ):
                save()
        equal.append(checkpoints._group is None)  # which one rank could close too early
    return equal


def test_every_type_of_safetensors_is_saved_and_another_is_refused_at_once(tmp_path):
    assert worlds.run(with_buffers_of_other_types, 2, 1, tmp_path) == [[True] * 5] * 2


class Scaled(nn.Linear):
    def get_extra_state(self):
        return {"scale": 1.0}


def test_extra_state_is_warned_of_once_and_a_model_that_was_saved_is_freed(caplog):
    def saved_twice():
        model = Scaled(4, 4)
        optimizer = dt.replicate(
            torch.optim.SGD(model.parameters()), model, LoopbackCommunicator(), dt.full()
        )
        for _ in range(2):
            take_snapshot(model, optimizer)
        return weakref.ref(model)

    with caplog.at_level(logging.WARNING, "detonation.checkpoint"):
        model = saved_twice()
    assert caplog.text.count("a checkpoint does not hold the extra state") == 1
    gc.collect()
    assert model() is None
