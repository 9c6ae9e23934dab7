"""`ReplicaStrategy` in a real world of 2 x 2 ranks: Lightning's own loop, checkpoints, logs and clipping."""

import logging
import os
import warnings
from functools import partial
from pathlib import Path

import own_disks
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import detonation as dt
import worlds

lightning = pytest.importorskip("lightning.pytorch")
from lightning.pytorch.callbacks import (  # noqa: E402
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.strategies import ModelParallelStrategy  # noqa: E402

from detonation.integrations.lightning import ReplicaStrategy  # noqa: E402

pytestmark = pytest.mark.usefixtures("own_worlds")

BATCHES = 4
"""Of an epoch, per rank."""


class Module(lightning.LightningModule):
    """Learns with dropout, a schedule, and a training step that calls both a child and the module itself."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 4))
        self.scale = nn.Parameter(torch.ones(4))
        self.seen, self.norms, self.logged, self.saved = [], [], [], []

    def forward(self, x):
        return self.net(x) * self.scale

    def training_step(self, batch, index):
        x, y = batch
        self.seen.append(float(x.sum()))
        loss = (self(x) - y).square().mean() + 0.1 * self.net(x).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", (self(batch[0]) - batch[1]).square().mean(), sync_dist=True)

    def on_train_batch_end(self, *arguments):
        (optimizer,) = self.trainer.strategy.replicated
        norm = optimizer.stats.grad_norm
        self.norms.append(None if norm is None else float(norm))
        self.logged.append(float(self.trainer.callback_metrics.get("bytes_sent", -1.0)))

    def on_save_checkpoint(self, checkpoint):
        self.saved.append(weights(self)[0].clone())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def loader(ranks=4):
    made = (
        torch.randn(8 * BATCHES * ranks, n, generator=torch.Generator().manual_seed(n))
        for n in (16, 4)
    )
    return DataLoader(TensorDataset(*made), batch_size=8)


def trainer(scheme, steps, folder=None, replicas=2, shards=2, strategy=None, keep=-1, **options):
    warnings.simplefilter("ignore")  # Lightning's own, about workers and loggers
    rank = torch.distributed.get_rank()
    world = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": 4,
        "LOCAL_WORLD_SIZE": 4,
        "GROUP_RANK": 0,
        "TORCHELASTIC_RUN_ID": "test",
    }
    os.environ |= {name: str(value) for name, value in world.items()}
    # nobody listens there, because the group exists
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    saving = []
    if folder is not None:
        saving = [ModelCheckpoint(folder, save_top_k=keep, every_n_train_steps=BATCHES)]
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    quiet |= {"enable_checkpointing": bool(saving), "callbacks": saving, "num_sanity_val_steps": 0}
    strategy = strategy or ReplicaStrategy(scheme, replicas, shards)
    defaults = {
        "accelerator": "cpu",
        "devices": 4,
        "max_epochs": 9,
        "log_every_n_steps": 1,
        "use_distributed_sampler": True,
    }
    return lightning.Trainer(strategy=strategy, max_steps=steps, **{**defaults, **quiet, **options})


def fit(
    scheme,
    steps,
    folder=None,
    path=None,
    module=None,
    replicas=2,
    shards=2,
    validate=False,
    **options,
):
    lightning.seed_everything(0, verbose=False)
    module, made = module or Module(), trainer(scheme, steps, folder, replicas, shards, **options)
    made.fit(module, loader(), loader() if validate else None, ckpt_path=path)
    return made, module


def weights(module):
    """This rank's shard of all weights, and the whole of them."""
    local = torch.cat(
        [p.detach().to_local().reshape(-1) for p in module.parameters() if isinstance(p, DTensor)]
    )
    whole = torch.cat([p.detach().full_tensor().reshape(-1) for p in module.parameters()])
    return local, whole


def resumed(mesh, folder, schemes):
    found = {}
    for name, scheme in schemes.items():
        whole, module = fit(scheme, 2 * BATCHES, str(Path(folder, name)))
        (path,) = Path(folder, name).glob(f"*step={BATCHES}.ckpt")
        after, again = fit(scheme, 2 * BATCHES, path=str(path))
        local, agreed = weights(module)
        whole.validate(
            module, loader(), ckpt_path=str(path), verbose=False
        )  # looks back, and forgets nothing
        found[name] = {
            "saved": module.saved[0],
            "evaluated": weights(module)[0],
            "same": torch.equal(local, weights(again)[0]),
            "rates": [t.strategy.replicated[0].param_groups[0]["lr"] for t in (whole, after)],
            "steps": [each.strategy.replicated[0].step_count for each in (whole, after)],
            "whole": agreed,
            "seen": module.seen[:BATCHES],
            "again": again.seen == module.seen[BATCHES:],
            "bytes": (module.logged[BATCHES + 1 :], again.logged[1:]),
        }
    return found


def test_resume_is_bitwise_and_each_rank_sees_its_own_batches(tmp_path):
    schemes = {
        "demo": dt.demo(topk=4, chunk=16),
        "diloco": dt.diloco(every=3),
        "late": dt.schemes.streaming_diloco(every=3, fragments=1, delay=1),
    }
    ranks = worlds.run(resumed, 2, 2, str(tmp_path), schemes)
    for name in schemes:
        found = [rank[name] for rank in ranks]
        assert all(each["same"] and each["again"] for each in found), name
        for whole, again in (each["bytes"] for each in found):
            assert whole == again and len(again) == BATCHES - 1 and again[-1] > 0
        assert all(each["steps"] == [2 * BATCHES, 2 * BATCHES] for each in found)
        assert len({rate for each in found for rate in each["rates"]}) == 1
        assert all(
            torch.equal(each["whole"], found[0]["whole"]) for each in found
        )  # synchronized at the end
        assert len({batch for each in found for batch in each["seen"]}) == 4 * BATCHES
        for rank, each in enumerate(found):  # of replica 0 alone, in the middle of a round too
            assert torch.equal(each["evaluated"], found[rank % 2]["saved"])
    assert not torch.equal(ranks[0]["diloco"]["saved"], ranks[2]["diloco"]["saved"])


def cut_short(mesh, folder):
    """The errors of resumes from a save of two optimizers, and from saves that a kill cut short."""
    fit(dt.full(), BATCHES, folder)
    (path,) = Path(folder).glob("*.ckpt")
    again, part = partial(fit, dt.full(), 2 * BATCHES, path=str(path)), path / "detonation"

    def error_after(change):
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            change()
        torch.distributed.barrier()
        return worlds.caught(again)

    found = [error_after((part / "1").mkdir)]
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        (part / "1").rmdir()

    def fails(*_):
        raise RuntimeError("killed")

    with pytest.MonkeyPatch.context() as patch:
        made = trainer(dt.full(), 2 * BATCHES)
        patch.setattr(ModelParallelStrategy, "save_checkpoint", fails)
        made.fit(Module(), loader(), ckpt_path=str(path))
        with pytest.raises(RuntimeError, match="killed"):
            made.save_checkpoint(path)
    # before Lightning's last file, and before the part of the optimizer
    found.append(error_after(lambda: None))
    found.append(error_after(lambda: (part / "0").rename(path / "lost")))
    return found


def test_a_checkpoint_cut_short_or_of_more_optimizers_is_refused(tmp_path):
    expected = [
        "was written with 2 optimizers, but this run has 1: resume with as many optimizers",
        "its save was cut short; give ckpt_path the path of an earlier checkpoint",
        "0 holds no checkpoint, because its save was cut short: give ckpt_path the path",
    ]
    for found in worlds.run(cut_short, 2, 2, str(tmp_path)):
        for (kind, said), text in zip(found, expected, strict=True):
            assert (kind, text in said) == ("ValueError", True), (kind, said)


def on_own_disks(mesh, scratch):
    """On two nodes that share no file system: the files that each has, and whether resuming is exact."""
    own_disks.mount(scratch, torch.distributed.get_rank())
    _, module = fit(dt.diloco(every=3), 2 * BATCHES, str(scratch / "saved"))
    (path,) = (scratch / "saved").glob(f"*step={BATCHES}.ckpt")
    _, again = fit(dt.diloco(every=3), 2 * BATCHES, path=str(path))
    return torch.equal(weights(module)[0], weights(again)[0]), sorted(
        file.name for file in path.rglob("*.safetensors")
    )


@pytest.mark.long  # no branch of its own
def test_without_a_shared_file_system_each_node_keeps_its_own_part_and_resumes_exactly(tmp_path):
    for rank, (same, files) in enumerate(
        worlds.run_alone(on_own_disks, 2, 2, own_disks.make(tmp_path))
    ):
        assert same and files == [
            f"replica{rank // 2}-shard{shard}.safetensors" for shard in range(2)
        ]


def rotating_on_own_disks(mesh, scratch):
    """On two nodes that share no file system: the checkpoints that each has where the Trainer keeps one."""
    own_disks.mount(scratch, torch.distributed.get_rank())
    (scratch / "saved" / "other=1.ckpt").mkdir(parents=True, exist_ok=True)
    fit("loco", 3 * BATCHES, str(scratch / "saved"), keep=1)
    torch.distributed.barrier()
    return sorted(path.name for path in (scratch / "saved").iterdir())


@pytest.mark.long
def test_without_a_shared_file_system_old_checkpoints_are_removed_on_every_node(tmp_path):
    for names in worlds.run_alone(rotating_on_own_disks, 2, 2, own_disks.make(tmp_path)):
        assert names == [f"epoch=2-step={3 * BATCHES}.ckpt", "other=1.ckpt"]


class Sharded(Module):
    """Is sharded by its own hand, in Lightning's strategy over all ranks and in ours inside a replica."""

    def configure_model(self):
        fully_shard(
            self,
            mesh=self.device_mesh[
                "shard" if "shard" in self.device_mesh.mesh_dim_names else "data_parallel"
            ],
        )

    def on_train_batch_end(self, *arguments):
        pass


def from_another_strategy(mesh, folder, schemes):
    theirs = ModelParallelStrategy(data_parallel_size=4, tensor_parallel_size=1)
    fit(None, BATCHES, folder, module=Sharded(), strategy=theirs)
    (path,) = Path(folder).glob("*.ckpt")
    found = {}
    for name, scheme in schemes.items():
        lines = []
        logging.getLogger("detonation").addHandler(handler := logging.Handler())
        handler.emit = lambda record, lines=lines: lines.append(record.getMessage())
        made, module = fit(scheme, 2 * BATCHES, path=str(path), module=Sharded())
        logging.getLogger("detonation").removeHandler(handler)
        found[name] = made.strategy.replicated[0].step_count, weights(module)[1], lines
    return found


def test_a_checkpoint_of_another_strategy_loads_with_a_warning(tmp_path):
    schemes = {"demo": dt.demo(), "diloco": dt.diloco(every=3)}
    ranks = worlds.run(from_another_strategy, 2, 2, str(tmp_path), schemes)
    for name in schemes:
        assert all(
            rank[name][0] == BATCHES for rank in ranks
        )  # those of the other strategy do not count
        assert all(torch.equal(rank[name][1], ranks[0][name][1]) for rank in ranks)
        assert any('no part "replication"' in line for line in ranks[0][name][2])


def by_hand(mesh, scheme, accumulate, clip):
    """The weights after the same training in a loop of one's own."""
    module, data = plain(), loader().dataset
    order = list(DistributedSampler(data, 4, mesh.get_rank(), seed=0))
    dt.shard(module, mesh)
    (base,), (schedule,) = module.configure_optimizers()
    optimizer = dt.replicate(base, module, mesh["replicate"], scheme, clip=clip)
    for step in range(BATCHES // accumulate):
        for part in range(accumulate):
            rows = order[8 * (accumulate * step + part) :][:8]
            x, y = (torch.stack(each) for each in zip(*(data[row] for row in rows), strict=True))
            loss = (module(x) - y).square().mean()
            (loss / accumulate).backward()
        optimizer.step()
        schedule["scheduler"].step()
        optimizer.zero_grad()
    return weights(module)[1], float(optimizer.stats.grad_norm), optimizer.stats.bytes_sent


class Forward(Module):
    def training_step(self, batch, index):
        return (self(batch[0]) - batch[1]).square().mean()


def plain():
    lightning.seed_everything(0, verbose=False)
    module = Forward()
    module.net[2].p = 0.0
    return module


def compared(mesh):
    scheme, clip = dt.demo(topk=4, chunk=16), 0.05
    theirs, norm, sent = by_hand(mesh, scheme, 2, clip)
    options = {"gradient_clip_val": clip, "accumulate_grad_batches": 2}
    _, module = fit(scheme, BATCHES // 2, module=plain(), **options)
    return (
        torch.equal(weights(module)[1], theirs),
        norm > clip,
        module.norms[-1] == norm,
        sent,
        module.logged,
    )


def test_clipping_accumulation_and_schedules_are_those_of_a_loop_of_ones_own_and_bytes_are_logged():
    for same, clipped, same_norm, sent, logged in worlds.run(compared, 2, 2):
        assert same and clipped and same_norm
        assert logged == [
            -1.0,
            sent / 2,
            sent / 2,
            sent,
        ]  # at each step, and the first batch takes none


def varied(mesh, folder):
    found = {}
    whole, module = fit(
        "demo", BATCHES, str(Path(folder, "demo")), validate=True, precision="bf16-mixed"
    )
    found["bf16"] = weights(module)[1]
    found["val_loss"] = float(whole.callback_metrics["val_loss"])
    (path,) = Path(folder, "demo").glob("*.ckpt")
    (evaluated,) = trainer("demo", -1).validate(
        Module(), loader(), ckpt_path=str(path), verbose=False
    )
    found["evaluated"] = evaluated["val_loss"]
    again, other = fit("demo", 2 * BATCHES, path=str(path), replicas=4, shards=1)
    found["elastic"] = again.strategy.replicated[0].step_count, weights(other)[1]
    return found


@pytest.mark.long  # no branch of its own
def test_bf16_evaluation_and_another_number_of_shards(tmp_path):
    ranks = worlds.run(varied, 2, 2, str(tmp_path))
    first = ranks[0]
    assert all(torch.equal(rank["bf16"], first["bf16"]) for rank in ranks)
    assert abs(first["evaluated"] - first["val_loss"]) < 0.01 * first["val_loss"]  # in fp32
    assert first["elastic"][0] == 2 * BATCHES
    assert all(torch.equal(rank["elastic"][1], first["elastic"][1]) for rank in ranks)


class Clipping(Module):
    def configure_gradient_clipping(
        self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
    ):
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")


class ClippingValues(Module):
    def configure_gradient_clipping(
        self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
    ):
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="value")


class Replicating(Module):
    def configure_optimizers(self):
        return dt.replicate(
            torch.optim.SGD(self.parameters(), lr=0.1), self, self.device_mesh["replicate"], "demo"
        )


class Sharding(Module):
    """Shards across the replicas."""

    def configure_model(self):
        fully_shard(self, mesh=self.device_mesh)


class Averaging(Module):
    """Averages across the replicas."""

    def configure_model(self):
        self.net = DistributedDataParallel(self.net)


class Scaled(lightning.plugins.MixedPrecision):
    scaler = object()

    def __init__(self):
        super().__init__("bf16-mixed", "cpu")
        self.scaler = object()


class Manual(Module):
    """Optimizes by hand. Its parts are sharded where `sharded`, and gradients clipped by `clip`."""

    def __init__(self, clip=None):
        super().__init__()
        self.automatic_optimization, self.clip = False, clip

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        self.manual_backward((self(batch[0]) - batch[1]).square().mean())
        if self.clip:
            self.clip_gradients(
                optimizer, gradient_clip_val=self.clip, gradient_clip_algorithm="norm"
            )
        optimizer.step()
        optimizer.zero_grad()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2)

    on_train_batch_end = lightning.LightningModule.on_train_batch_end


class ManualByParts(Manual):
    def configure_model(self):
        dt.shard(self.net, self.device_mesh)


def by_hand_inside(mesh):
    strategy = ReplicaStrategy("loco", 2, 2, clip=0.1)
    made, _ = fit("loco", 2, module=ManualByParts(clip=0.1), strategy=strategy)
    (inside,) = made.strategy.replicated
    return inside.step_count, float(inside.stats.grad_norm) > 0


@pytest.mark.long  # no branch of its own
def test_a_module_that_shards_its_parts_optimizes_and_clips_by_hand():
    assert worlds.run_alone(by_hand_inside, 2, 2) == [(2, True)] * 4


class OwnAverage(WeightAveraging):
    """A user's own rule of averaging."""


def refused(mesh):
    return {
        "manual clipping": worlds.caught(lambda: fit("demo", 1, module=ManualByParts(clip=0.1))),
        "value": worlds.caught(
            lambda: fit("demo", 1, gradient_clip_val=1.0, gradient_clip_algorithm="value")
        ),
        "fp16": worlds.caught(lambda: fit("demo", 1, plugins=[Scaled()])),
        "average": worlds.caught(
            lambda: fit("demo", 1, callbacks=[StochasticWeightAveraging(1e-2)])
        ),
        "EMA": worlds.caught(lambda: fit("demo", 1, callbacks=[EMAWeightAveraging()])),
        "own average": worlds.caught(
            lambda: fit("demo", 1, module=Sharded(), callbacks=[OwnAverage()])
        ),
        "by itself": worlds.caught(lambda: fit("demo", 1, module=Clipping())),
        "values by itself": worlds.caught(lambda: fit("demo", 1, module=ClippingValues())),
        "twice": worlds.caught(lambda: fit("demo", 1, module=Replicating())),
        "sizes": worlds.caught(lambda: fit("demo", 1, replicas=3)),
        "HSDP": worlds.caught(lambda: fit("demo", 1, module=Sharding())),
        "DDP": worlds.caught(lambda: fit("demo", 1, module=Averaging())),
        "scheme": worlds.caught(lambda: fit("dema", 1)),
        "keyword": worlds.caught(lambda: ReplicaStrategy("demo", replica=2)),
    }


def test_what_the_strategy_cannot_do_is_refused_in_one_line():
    expected = {
        "manual clipping": ("ValueError", "ReplicaStrategy(..., clip=0.1)"),
        "value": ("ValueError", 'gradient_clip_algorithm="norm"'),
        "fp16": ("ValueError", 'use "bf16-mixed"'),
        "average": ("ValueError", "StochasticWeightAveraging cannot average sharded weights"),
        "EMA": ("ValueError", "EMAWeightAveraging cannot average sharded weights: leave"),
        "own average": ("ValueError", "OwnAverage cannot average sharded weights: leave"),
        "by itself": ("ValueError", "set Trainer(gradient_clip_val=0.5)"),
        "values by itself": ("ValueError", 'gradient_clip_algorithm="norm"'),
        "twice": ("ValueError", "give the plain optimizer"),
        "sizes": ("ValueError", "3 replicas x 2 shards are 6 ranks, but the world has 4"),
        "HSDP": ("ValueError", "replicas share it (by hybrid sharding (HSDP))"),
        "DDP": ("ValueError", "DistributedDataParallel averages gradients over ranks 0, 1, 2, 3"),
        "scheme": ("ValueError", "did you mean 'demo'"),
        "keyword": ("TypeError", "did you mean 'replicas'"),
    }
    found = worlds.run_alone(refused, 2, 2)[0]
    assert found.keys() == expected.keys()
    for name, (kind, text) in expected.items():
        assert found[name][0] == kind and text in found[name][1], (name, found[name])


class Thawing(Module):
    """Its first layer is frozen, and trains from the second epoch on. Its steps call a child alone, or the module."""

    def __init__(self, ahead, child):
        super().__init__()
        self.net[0].requires_grad_(False)
        # a loader that begins takes a number from the generator of dropout
        self.net[2] = nn.Identity()
        self.ahead, self.child = ahead, child

    def training_step(self, batch, index):
        if self.child:
            return self.net(batch[0]).square().mean()
        return super().training_step(batch, index)

    def validation_step(self, batch, index):
        self.net(batch[0]) if self.child else super().validation_step(batch, index)

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.net[0].requires_grad_(True)

    def configure_optimizers(self):
        return (
            dt.SignSGD(self.parameters(), lr=1e-2) if self.ahead else super().configure_optimizers()
        )


class Watched(Module):
    """Keeps a weight that each validation sees, of the last batch before it."""

    def validation_step(self, batch, index):
        self(batch[0])
        self.saved.append(float(self.net[0].weight[0].sum()))


def seen_by_validation(mesh):
    found = {}
    for name, scheme in {"round": dt.diloco(every=5), "ahead": dt.loco("4bit")}.items():
        module = fit(
            scheme, 3, module=Watched(), validate=True, val_check_interval=3, limit_val_batches=1
        )[1]
        found[name] = module.saved
    return found


@pytest.mark.long  # no branch of its own
def test_validation_sees_what_replicas_agreed_on_and_in_the_middle_of_a_round_each_its_own():
    ranks = worlds.run_alone(seen_by_validation, 2, 2)
    assert [len(set(map(str, (rank[name] for rank in ranks)))) for name in ("round", "ahead")] == [
        2,
        1,
    ]
    assert all(len(rank["round"]) == 1 for rank in ranks)


def validated(mesh, child):
    found = {}
    ahead = dt.demo(precision="sign", error_feedback=False)
    for name, scheme in {"diloco": dt.diloco(every=5), "ahead": ahead}.items():
        for validate in (False, True):
            # or after each epoch, and so after the last step
            often = {"val_check_interval": 3} if validate and not child else {}
            lightning.seed_everything(0, verbose=False)
            made, module = fit(
                scheme,
                3 * BATCHES,
                module=Thawing(name == "ahead", child),
                validate=validate,
                **often,
            )
            equal = dt.fingerprint(module, made.strategy.device_mesh)[1]
            found[name, validate] = weights(module)[1], equal, module.net[0].weight.requires_grad
    return found


@pytest.mark.long  # no branch of its own
@pytest.mark.parametrize("child", [True, pytest.param(False, marks=pytest.mark.long)])
def test_validation_changes_nothing_and_what_thaws_after_it_trains(child):
    for rank in worlds.run_alone(validated, 2, 2, child):
        for name in ("diloco", "ahead"):
            (without, *first), (with_validation, *second) = rank[name, False], rank[name, True]
            assert torch.equal(without, with_validation) and first == second == [True, True], name
