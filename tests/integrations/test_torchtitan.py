"""torchtitan's own trainer in real worlds of 2 replicas x 2 shards, on CPUs (`torchtitan_on_cpu.py`).

The model is torchtitan's llama3 debug model with two of its six layers.
"""
# ruff: noqa: E402  the library may be absent

import logging
import os
import shutil

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

pytest.importorskip("torchtitan", reason="the extra titan")
pytest.importorskip("triton", reason="torchtitan.trainer needs it")

import own_disks
import torchtitan_on_cpu

torchtitan_on_cpu.pretend()

from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import ParamGroupConfig
from torchtitan.config import ConfigManager

import detonation as dt
import worlds
from detonation.integrations.torchtitan import parsed_scheme, with_replicas

pytestmark = [pytest.mark.usefixtures("own_worlds"), pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    return torchtitan_on_cpu.write_assets(tmp_path_factory.mktemp("assets"))


def small(assets, folder, steps=4, **changed):
    """The configuration of a short run. changed: fields by the part that they are of."""
    config = torchtitan_on_cpu.llama3_debugmodel()
    del config.model_spec.model.layers[2:]
    config.hf_assets_path, config.dataloader.dataset_path = str(assets), str(assets / "data")
    config.dump_folder, config.training.steps, config.debug.seed = str(folder), steps, 0
    config.loss = CrossEntropyLoss.Config(global_vocab_size=config.loss.loss_fn.global_vocab_size)
    for part, values in changed.items():
        for name, value in values.items():
            setattr(getattr(config, part), name, value)
    return config


class Logger:
    """Stands for TensorBoard and the like."""

    def __init__(self):
        self.seen = {}

    def log(self, metrics, step):
        kept = ("global_avg_loss", "grad_norm", "bytes_sent", "lr/AdamW")
        self.seen[step] = {name: metrics[name] for name in metrics if name.endswith(kept)}

    def close(self):
        pass


def built(config):
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    trainer = config.build()
    trainer.metrics_processor.logger = Logger()
    return trainer


def trained(config):
    trainer = built(config)
    trainer.train()
    trainer.close()
    return trainer


def in_a_row(tensors):
    """The local shards of all sharded tensors."""
    return torch.cat(
        [
            each.detach().to_local().flatten()
            for each in tensors.values()
            if isinstance(each, DTensor)
        ]
    )


def weights(model):
    return in_a_row(dict(model.named_parameters()))


def everything(trainer):
    """All that must be the same after a resumed run: weights, states of the base optimizer, state of the replica."""
    (model,), inside = trainer.model_parts, trainer.optimizers.replicated
    states = [
        inside.base.state[p][key]
        for p in model.parameters()
        for key in sorted(inside.base.state[p])
    ]
    tensors = [weights(model), *states, *inside.local_state().values()]
    return [getattr(tensor, "_local_tensor", tensor).detach().clone() for tensor in tensors]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def of_all_ranks(value):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def against_hybrid(mesh, assets, folder):
    changed = {"training": {"max_norm": 0.5}}
    hybrid = trained(small(assets, folder, **changed))
    ours = trained(with_replicas(small(assets, folder, **changed), dt.full()))
    logs = [trainer.metrics_processor.logger.seen for trainer in (hybrid, ours)]
    sent = [entry.pop("bytes_sent") for entry in logs[1].values()]
    return torch.equal(*(weights(trainer.model_parts[0]) for trainer in (hybrid, ours))), logs, sent


@pytest.mark.parametrize("shards", [pytest.param(1, marks=pytest.mark.long), 2])
def test_full_trains_as_torchtitans_hybrid_sharding_does_bit_for_bit(assets, tmp_path, shards):
    """Clipping and the schedule included; so the norms and losses in the logs are equal, too."""
    for equal, (hybrid, ours), sent in worlds.run(against_hybrid, 2, shards, assets, tmp_path):
        assert equal and hybrid == ours and len(ours) == 4
        assert min(entry["loss_metrics/global_avg_loss"] for entry in ours.values()) > 1
        assert min(entry["grad_norm"] for entry in ours.values()) > 0.5  # it clipped
        assert sent == sorted(sent) and sent[0] > 0


def by_hand(mesh, assets, folder):
    """The same training by torchtitan, and in a loop of one's own from the same weights over the same batches."""
    scheme = dt.demo(topk=4, chunk=32)
    trainer = built(
        with_replicas(small(assets, folder, steps=3, training={"global_batch_size": 16}), scheme)
    )
    start = {
        name: p.detach().full_tensor() for name, p in trainer.model_parts[0].named_parameters()
    }
    batches, make = [], trainer.batch_generator

    def recorded(loader):
        for batch in make(loader):
            batches.append(batch)
            yield batch

    trainer.batch_generator = recorded
    trainer.train()
    rates = [entry["lr/AdamW"] for entry in trainer.metrics_processor.logger.seen.values()]
    norms = [entry["grad_norm"] for entry in trainer.metrics_processor.logger.seen.values()]

    model = trainer.model_config.build()
    model.init_weights(buffer_device=None)
    model.load_state_dict(start, strict=False)
    dt.shard(model, mesh)
    base = torch.optim.AdamW(
        model.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.1, foreach=True
    )
    optimizer = dt.replicate(base, model, mesh["replicate"], scheme, clip=1.0)
    own_norms = []
    for rate, parts in zip(rates, zip(batches[::2], batches[1::2], strict=True), strict=True):
        base.param_groups[0]["lr"] = rate
        for inputs, labels in parts:  # accumulates twice
            logits = model(inputs["input"], positions=inputs["positions"])
            (
                torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) / 2
            ).backward()
        optimizer.step()
        optimizer.zero_grad()
        own_norms.append(float(optimizer.stats.grad_norm))
    return torch.equal(weights(model), weights(trainer.model_parts[0])), norms, own_norms


def test_gradients_are_those_of_a_loop_of_ones_own_whatever_torchtitan_divides_by(assets, tmp_path):
    """torchtitan sums and divides by the tokens of all replicas: inside a replica that is 1/R of the mean."""
    for equal, norms, own_norms in worlds.run(by_hand, 2, 2, assets, tmp_path):
        assert equal and norms == own_norms


def resumed(mesh, assets, folder, scheme, mode):
    saving = {"enable": True, "interval": 3, "async_mode": mode, "last_save_model_only": False}

    def fresh(**options):
        return built(
            with_replicas(small(assets, folder, steps=5, checkpoint=saving | options), scheme)
        )

    whole, at_saves = fresh(), {}
    save = whole.checkpointer.save

    def watched(step, last_step=False):
        at_saves[step] = in_a_row(whole.model_parts[0].state_dict()).clone()
        return save(step, last_step)

    whole.checkpointer.save = watched
    whole.train()
    whole.checkpointer.maybe_wait_for_saving()
    ends = of_all_ranks(weights(whole.model_parts[0]))
    path = folder / "checkpoint" / "step-3"
    read = {
        name: torch.zeros_like(tensor) for name, tensor in whole.model_parts[0].state_dict().items()
    }
    dcp.load(read, checkpoint_id=str(path))
    first = torch.equal(in_a_row(read), of_all_ranks(at_saves[3])[mesh.get_rank() % 2])
    after = fresh(load_step=3)
    after.train()
    logs = [trainer.metrics_processor.logger.seen for trainer in (whole, after)]
    equal = same(*(everything(trainer) for trainer in (whole, after)))
    after.checkpointer.maybe_wait_for_saving()
    if dist.get_rank() == 0:
        shutil.rmtree(path / "detonation")
    dist.barrier()
    lost = worlds.caught(fresh().checkpointer.load, 3)
    apart = torch.equal(*of_all_ranks(at_saves[3])[::2])
    return equal, logs, torch.equal(ends[0], ends[2]), first, apart, lost


@pytest.mark.parametrize(
    ("scheme", "mode"),
    [(dt.demo(), "async"), (dt.diloco(every=2), "disabled")],
    ids=["demo", "diloco"],
)
def test_a_checkpoint_resumes_bit_for_bit_also_in_the_middle_of_a_round(
    assets, tmp_path, scheme, mode
):
    for equal, logs, agreed, first, apart, lost in worlds.run(
        resumed, 2, 2, assets, tmp_path, scheme, mode
    ):
        assert equal and agreed  # the last round is open, and ends with the last step
        assert logs[1] == {
            step: entry for step, entry in logs[0].items() if step > 3
        }  # bytes_sent counts on
        assert first and apart == (
            scheme.name == "demo"
        )  # torchtitan's own files have replica 0's weights
        assert lost[0] == "ValueError" and "no directory detonation" in lost[1]


def on_own_disks(mesh, assets, scratch):
    """Two nodes that share no file system, which copy from each other what they lack, and resume."""
    rank, lines = dist.get_rank(), []
    own_disks.mount(scratch, rank)
    logging.getLogger("detonation").addHandler(handler := logging.Handler())
    handler.emit = lambda record: lines.append(record.getMessage())
    saving = {"enable": True, "interval": 3, "last_save_model_only": False}
    whole = trained(with_replicas(small(assets, scratch / "out", steps=5, checkpoint=saving)))
    if rank in (0, 2):
        other, own = scratch.parent / f"disk{1 - rank // 2}", scratch
        for file in other.glob("out/checkpoint/step-3/*"):
            if not (here := own / file.relative_to(other)).exists():
                shutil.copy(file, here)
    dist.barrier()
    resuming = small(assets, scratch / "out", steps=5, checkpoint=saving | {"load_step": 3})
    return same(
        *(everything(trainer) for trainer in (whole, trained(with_replicas(resuming))))
    ), lines


def test_without_a_shared_file_system_a_line_says_what_to_copy_and_resuming_is_exact(
    assets, tmp_path
):
    outcome = worlds.run_alone(on_own_disks, 2, 2, assets, own_disks.make(tmp_path))
    assert all(equal for equal, _ in outcome)
    assert any(
        "(ranks 0-1; ranks 2-3)" in line and "copy to each node" in line for line in outcome[0][1]
    )


def refusals(mesh, assets, folder):
    def refused(scheme="demo", change=None, **changed):
        config = small(assets, folder, **changed)
        if change:
            change(config)
        return worlds.caught(lambda: built(with_replicas(config, scheme)))

    def two_optimizers(config):
        (adamw,) = config.optimizer.param_groups
        other = ParamGroupConfig(
            pattern="norm", optimizer_name="Adam", optimizer_kwargs={"lr": 1e-3}
        )
        config.optimizer.param_groups = [other, adamw]

    def twice(config):
        with_replicas(config)

    def whole_dtensors():
        config = with_replicas(small(assets, folder))
        config.parallelism.spmd_backend = "spmd_types"
        built(config)

    def remote():
        config = small(assets, folder, checkpoint={"enable": True, "folder": "gs://bucket/run"})
        config.dump_folder = ""
        built(with_replicas(config))

    return {
        "data_parallel_replicate_degree is 1": refused(
            parallelism={"data_parallel_replicate_degree": 1}
        ),
        "tensor_parallel_degree is 2": refused(parallelism={"tensor_parallel_degree": 2}),
        "context_parallel_degree is 2": refused(parallelism={"context_parallel_degree": 2}),
        "pipeline_parallel_degree is 2": refused(parallelism={"pipeline_parallel_degree": 2}),
        "expert_parallel_degree is 2": refused(parallelism={"expert_parallel_degree": 2}),
        "spmd_backend is spmd_types": worlds.caught(whole_dtensors),
        "2 optimizers (Adam, AdamW)": refused(change=two_optimizers),
        "config.optimizer is of class ReplicaOptimizers.Config": refused(change=twice),
        "did you mean 'demo'": refused("dema"),
        "not to remote storage": worlds.caught(remote),
    }


def test_what_replicas_cannot_do_is_refused_in_one_line(assets, tmp_path):
    for found in worlds.run(refusals, 2, 2, assets, tmp_path):
        for text, (kind, said) in found.items():
            assert (kind, text in said, "\n" in said) == ("ValueError", True, False), (
                text,
                kind,
                said,
            )


def test_the_command_names_the_function_and_the_scheme():
    module = ["--module", "detonation.integrations.torchtitan", "--config"]
    mine = ["torchtitan_on_cpu.llama3_debugmodel", "--optimizer.scheme", 'diloco={"every": 50}']
    config = ConfigManager().parse_args([*module, *mine])
    assert parsed_scheme(config.optimizer.scheme).round.every == 50
    assert ConfigManager().parse_args([*module, "llama3.llama3_8b"]).model_spec.flavor == "8B"
    with pytest.raises(ValueError, match="'llama3_9b' not found"):
        ConfigManager().parse_args([*module, "llama3.llama3_9b"])
    with pytest.raises(ValueError, match="'llama3_8b' not found"):
        ConfigManager().parse_args([*module, "llama3_8b"])
    for text in ("demo=[4]", "demo={topk: 4}", 'demo={"top": 4}'):
        with pytest.raises(ValueError, match="scheme"):
            parsed_scheme(text)
