"""Trainers of other libraries over an elastic axis: each replica is a process of its own, and one is asked to leave."""

import os
import signal
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import detonation as dt
import worlds
from commands import free_port
from detonation.core.flat.tensors import digest
from limits import LIMIT_S

pytestmark = pytest.mark.usefixtures("patient")

STEPS, LEAVES_AT, REPLICAS = 12, 4, 3


class Model(nn.Module):
    """As the libraries want it: a loss for inputs and labels."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x, labels=None):
        return {"loss": (self.net(x) - labels).square().mean()}


def examples(axis):
    """Those of this replica alone."""
    made = torch.Generator().manual_seed(axis.replica)
    return torch.randn(4 * STEPS, 8, generator=made), torch.randn(4 * STEPS, 1, generator=made)


def be_asked_to_leave(axis):
    """As by a spot machine; returns once all know, because these few steps may take less time than that."""
    os.kill(os.getpid(), signal.SIGTERM)
    with axis._changed:
        assert axis._changed.wait_for(lambda: axis.departing, LIMIT_S)


def optimizer_of(model, axis):
    return dt.replicate(torch.optim.AdamW(model.parameters(), lr=1e-2), model, axis, dt.loco())


def with_transformers(model, axis, after_step, folder):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class After(TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            after_step(state.global_step)

    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "use_cpu": True}
    arguments = TrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=4, max_grad_norm=0, **quiet
    )
    data = [{"x": x, "labels": y} for x, y in zip(*examples(axis), strict=True)]
    optimizers = (optimizer_of(model, axis), None)
    Trainer(
        model, arguments, train_dataset=data, optimizers=optimizers, callbacks=[After()]
    ).train()


def with_accelerate(model, axis, after_step, folder):
    from accelerate import Accelerator

    loader = DataLoader(TensorDataset(*examples(axis)), batch_size=4)
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer_of(model, axis), loader)
    for step, (x, y) in enumerate(loader, 1):
        accelerator.backward(model(x, y)["loss"])
        optimizer.step()
        optimizer.zero_grad()
        after_step(step)


def with_lightning(model, axis, after_step, folder):
    import lightning.pytorch as lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.inside = model

        def on_train_start(self):  # Lightning's own handler ends the fit
            signal.signal(signal.SIGTERM, lambda *_: axis.depart())

        def training_step(self, batch, index):
            return self.inside(*batch)["loss"]

        def on_train_batch_end(self, *arguments):
            after_step(self.global_step)

        def configure_optimizers(self):
            return optimizer_of(self.inside, axis)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet["enable_model_summary"] = False
    loader = DataLoader(TensorDataset(*examples(axis)), batch_size=4)
    lightning.Trainer(accelerator="cpu", max_steps=STEPS, **quiet).fit(Module(), loader)


def node(rank, ports, folder, store_port):
    """A rank of a replica of two, which Accelerate shards by FSDP2: a world of its own."""
    import accelerate_on_cpu
    import transformers.training_args
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    from detonation.integrations.huggingface import Replicas, Replicate

    accelerate_on_cpu.pretend()
    transformers.training_args.is_torch_bf16_gpu_available = lambda: True
    number, shard = divmod(rank, 2)
    os.environ |= {
        "RANK": str(shard),
        "LOCAL_RANK": str(shard),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[number])}
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=32, tie_word_embeddings=False, pad_token_id=None, **sizes)
    )
    wrapped = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    quiet = {
        "report_to": [],
        "disable_tqdm": True,
        "save_steps": 6,
        "fsdp": True,
        "fsdp_config": wrapped,
    }
    own = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "parallelism_config": Replicas(1, 2),
    }
    arguments = TrainingArguments(str(folder / f"node{number}"), **own, **quiet)
    dist.barrier()  # the arguments have made the process group
    store = dist.TCPStore(
        "127.0.0.1", store_port, is_master=False, timeout=timedelta(seconds=LIMIT_S)
    )
    axis = dt.elastic(dt.init_mesh(1, 2, "cpu"), replica=number, replicas=2, store=store)
    signal.signal(signal.SIGTERM, lambda *_: axis.depart())

    class After(TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            if (rank, state.global_step) == (2, LEAVES_AT):
                be_asked_to_leave(axis)

    tokens = torch.randint(0, 32, (128, 16), generator=torch.Generator().manual_seed(number))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    callbacks = [Replicate(dt.loco(), axis=axis), After()]
    try:
        Trainer(model, arguments, train_dataset=data, callbacks=callbacks).train()
        axis.close()
        end = f"trained {axis.size()}"
    except dt.errors.ReplicaLeft:
        end = "left"
    (folder / f"{rank}.end").write_text(end)


def lightning_node(rank, ports, folder, store_port):
    """A rank of a replica of two, which `ReplicaStrategy` shards: a world of its own, as of one torchrun."""
    import lightning.pytorch as lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from detonation.integrations.lightning import ReplicaStrategy

    number, shard = divmod(rank, 2)
    own = {
        "RANK": shard,
        "LOCAL_RANK": shard,
        "WORLD_SIZE": 2,
        "LOCAL_WORLD_SIZE": 2,
        "GROUP_RANK": 0,
    }
    os.environ |= {name: str(value) for name, value in own.items()} | {
        "TORCHELASTIC_RUN_ID": "test"
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[number])}
    mesh = dt.init_mesh(1, 2, "cpu")
    store = dist.TCPStore(
        "127.0.0.1", store_port, is_master=False, timeout=timedelta(seconds=LIMIT_S)
    )
    axis = dt.elastic(mesh, replica=number, replicas=3, store=store)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.inside, self.seen = Model(), []

        def training_step(self, batch, index):
            self.seen += batch[0][:, 0].tolist()
            return self.inside(*batch)["loss"]

        def on_train_batch_end(self, *arguments):
            if (rank, self.global_step) == (3, LEAVES_AT):  # one shard alone is told
                be_asked_to_leave(axis)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    saving = ModelCheckpoint(folder / f"node{number}", every_n_train_steps=6)
    data = TensorDataset(
        *(torch.randn(6 * 4 * STEPS, n, generator=torch.Generator().manual_seed(n)) for n in (8, 1))
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        max_steps=STEPS,
        callbacks=[saving],
        strategy=ReplicaStrategy(dt.loco(), shards=2, axis=axis, clip=1.0),
        **quiet,
    )
    module = Module()
    try:
        trainer.fit(module, DataLoader(data, batch_size=4))
        axis.close()
        weights = digest([parameter.to_local() for parameter in module.parameters()])
        end = f"trained {trainer.global_step} {axis.size()} {weights}"
    except dt.errors.ReplicaLeft:
        end = "left"
    (folder / f"{rank}.seen").write_text(" ".join(map(str, module.seen[: 4 * LEAVES_AT])))
    (folder / f"{rank}.end").write_text(end)


def test_a_sharded_replica_of_lightning_leaves_and_the_others_train_on_bitwise_equal(tmp_path):
    pytest.importorskip("lightning.pytorch")
    ports = [free_port() for _ in range(3)]
    ends = worlds.forked(
        [partial(lightning_node, rank, ports, tmp_path) for rank in range(6)], tmp_path
    )
    assert ends[2:4] == ["left", "left"], ends
    assert ends[:2] == ends[4:] and all(
        end.startswith(f"trained {STEPS} 2 ") for end in ends[:2]
    ), ends
    seen = [
        number for rank in range(6) for number in (tmp_path / f"{rank}.seen").read_text().split()
    ]
    assert (
        len({*seen}) == len(seen) == 6 * 4 * LEAVES_AT
    )  # each rank of each replica has examples of its own
    for number in (0, 2):
        saved = sorted(path.name for path in (tmp_path / f"node{number}").iterdir())
        assert (
            saved == [f"epoch=0-step={STEPS}.ckpt"]
            and (tmp_path / f"node{number}" / saved[0] / "detonation").is_dir()
        )


def test_with_an_axis_the_replicas_are_its_own():
    pytest.importorskip("lightning.pytorch")
    from detonation.integrations.lightning import ReplicaStrategy

    axis = dt.elastic(replica=0, replicas=1, store=dist.HashStore())
    with pytest.raises(ValueError, match="replicas is 2, must be left out with an axis"):
        ReplicaStrategy(dt.loco(), replicas=2, axis=axis)
    axis.close()


def test_a_sharded_replica_of_the_trainer_leaves_and_the_other_trains_on(tmp_path):
    pytest.importorskip("transformers.trainer")
    pytest.importorskip("accelerate")
    ports = [free_port() for _ in range(2)]
    ends = worlds.forked([partial(node, rank, ports, tmp_path) for rank in range(4)], tmp_path)
    assert ends == ["trained 1", "trained 1", "left", "left"]
    assert (tmp_path / "node0" / f"checkpoint-{STEPS}" / "detonation").is_dir()


def replica(number, train, folder, port):
    """Trains as replica `number`; writes what it has in the end."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=LIMIT_S))
    axis, model = dt.elastic(replica=number, replicas=REPLICAS, store=store), Model()
    signal.signal(signal.SIGTERM, lambda *_: axis.depart())
    taken = []

    def after_step(step):
        taken.append(step)
        if (number, step) == (1, LEAVES_AT):
            be_asked_to_leave(axis)

    try:
        train(model, axis, after_step, folder / str(number))
        axis.close()
        end = f"trained {len(taken)} {axis.size()} {digest(model.parameters())}"
    except dt.errors.ReplicaLeft:
        end = "left"
    (folder / f"{number}.end").write_text(end)


@pytest.mark.parametrize(
    ("library", "train"),
    [
        ("transformers.trainer", with_transformers),
        ("accelerate", with_accelerate),
        ("lightning.pytorch", with_lightning),
    ],
)
def test_a_replica_leaves_the_loop_of_a_library_and_the_others_train_on(library, train, tmp_path):
    pytest.importorskip(library)  # here, so that the replicas find it imported
    ends = worlds.forked(
        [partial(replica, number, train, tmp_path) for number in range(REPLICAS)], tmp_path
    )
    assert ends[1] == "left" and ends[0] == ends[2], ends
    assert ends[0].startswith(f"trained {STEPS} 2 "), ends
