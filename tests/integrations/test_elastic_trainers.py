"""Trainers of other libraries over an elastic axis: each replica is a process of its own, and one is asked to leave."""

import os
import signal
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import detonation as dt
from detonation.core.flat.tensors import digest
from limits import LIMIT_S

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


def optimizer_of(model, axis):
    return dt.replicate(torch.optim.AdamW(model.parameters(), lr=1e-2), model, axis, dt.loco())


def with_transformers(model, axis, after_step, folder):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class After(TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            after_step(state.global_step)

    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "use_cpu": True}
    arguments = TrainingArguments(str(folder), max_steps=STEPS, per_device_train_batch_size=4, max_grad_norm=0, **quiet)
    data = [{"x": x, "labels": y} for x, y in zip(*examples(axis), strict=True)]
    optimizers = (optimizer_of(model, axis), None)
    Trainer(model, arguments, train_dataset=data, optimizers=optimizers, callbacks=[After()]).train()


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


def replica(number, train, port, folder):
    """Trains as replica `number`; writes what it has in the end."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=LIMIT_S))
    axis, model = dt.elastic(replica=number, replicas=REPLICAS, store=store), Model()
    signal.signal(signal.SIGTERM, lambda *_: axis.depart())
    taken = []

    def after_step(step):
        taken.append(step)
        if (number, step) == (1, LEAVES_AT):
            os.kill(os.getpid(), signal.SIGTERM)

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
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    children = []
    for number in range(REPLICAS):
        if not (child := os.fork()):
            try:
                warnings.simplefilter("ignore")  # of the libraries about each other
                replica(number, train, store.port, tmp_path)
                os._exit(0)
            except BaseException as error:
                (tmp_path / f"{number}.end").write_text(repr(error))
                os._exit(1)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    ends = [(tmp_path / f"{number}.end").read_text() for number in range(REPLICAS)]
    assert ends[1] == "left" and ends[0] == ends[2], ends
    assert ends[0].startswith(f"trained {STEPS} 2 "), ends
