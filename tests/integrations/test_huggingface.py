"""Accelerate, the Trainer, PEFT and TRL in real worlds of 2 replicas x 2 shards.

A small Llama, on CPUs: Accelerate's check of the device is replaced (`accelerate_on_cpu.py`).
"""
# ruff: noqa: E402  the libraries may be absent

import contextlib
import io
import logging
import math
import os
import runpy
import shutil
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("accelerate", reason="the extra hf")
peft = pytest.importorskip("peft")

import accelerate_on_cpu
import own_disks
import transformers.integrations
import transformers.training_args
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType, ProjectConfiguration
from safetensors.torch import load_file
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import HPSearchBackend

import detonation as dt
import worlds
from detonation.integrations.huggingface import (
    Replicas,
    Replicate,
    check_setup,
    check_smoothing,
    prepare,
    replicated,
)

pytestmark = [pytest.mark.usefixtures("own_worlds"), pytest.mark.filterwarnings("default")]

EXAMPLES = Path(__file__).parents[2] / "examples"
SHARDED = {"state_dict_type": "SHARDED_STATE_DICT"}


class Sequences(torch.utils.data.Dataset):
    """128 sequences of 16 tokens."""

    def __init__(self):
        self.tokens = torch.randint(0, 32, (128, 16), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return {"input_ids": self.tokens[i], "labels": self.tokens[i]}


class Tracker(TrainerCallback):
    """Stands for those of `report_to`, which see logs before the callbacks of a user."""

    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs, **others):
        self.seen.append(dict(logs))


def begin():
    """Environment and Accelerate's global state, as in a new process under a launcher."""
    warnings.simplefilter("ignore")
    accelerate_on_cpu.pretend()
    transformers.training_args.is_torch_bf16_gpu_available = lambda: True
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]  # the Trainer leaves its settings there
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def llama():
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=32, tie_word_embeddings=False, pad_token_id=None, **sizes)
    )


def arguments(folder, kind=TrainingArguments, wrap=(), **changed):
    own = {
        "max_steps": 5,
        "logging_steps": 1,
        "save_steps": 4,
        "per_device_train_batch_size": 4,
        "fsdp": True,
    }
    own |= {
        "learning_rate": 3e-3,
        "report_to": "none",
        "disable_tqdm": True,
        "parallelism_config": Replicas(2, 2),
    }
    wrapped = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]} | dict(wrap)
    return kind(str(folder), **(own | {"fsdp_config": wrapped} | changed))


def trained(folder, callbacks, model=None, resume=None, **changed):
    begin()
    data = {"train_dataset": Sequences(), "eval_dataset": Sequences()}
    trainer = Trainer(model or llama(), arguments(folder, **changed), callbacks=callbacks, **data)
    with contextlib.redirect_stdout(io.StringIO()):  # the Trainer prints its logs
        trainer.train(resume_from_checkpoint=resume)
    return trainer


def weights(model):
    """The local shards of all parameters in a row."""
    return torch.cat([p.detach().to_local().flatten() for p in model.parameters()])


def everything(optimizer, model):
    """All that must be the same after a resumed run: weights, states of the base optimizer, state of the replica."""
    inside = replicated(optimizer)
    states = [
        inside.base.state[p][key]
        for p in model.parameters()
        for key in sorted(inside.base.state.get(p, {}))
    ]
    tensors = [weights(model), *states, *inside.local_state().values()]
    return [
        getattr(tensor, "_local_tensor", tensor).detach().clone() for tensor in tensors
    ], inside.step_count


def same(one, other):
    (tensors, steps), (others, other_steps) = one, other
    return steps == other_steps and all(
        torch.equal(a, b) for a, b in zip(tensors, others, strict=True)
    )


def of_all_ranks(value):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def logged(trainer):
    """The training logs, by step."""
    return {entry["step"]: entry for entry in trainer.state.log_history if "loss" in entry}


def against_hybrid(mesh, folder, clip):
    changed = {
        "save_strategy": "no",
        "max_grad_norm": clip,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
    }
    hybrid = trained(
        folder,
        [],
        parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2),
        **changed,
    )
    ours = trained(folder, [Replicate(dt.full())], **changed)
    without = {
        step: {k: v for k, v in entry.items() if k != "bytes_sent"}
        for step, entry in logged(ours).items()
    }
    return torch.equal(weights(hybrid.model), weights(ours.model)), logged(hybrid), without


def test_full_trains_as_the_trainers_hybrid_sharding_does_bit_for_bit(tmp_path):
    """Clipping, accumulation and the schedule included; so the norms and losses in the logs are equal, too."""
    for equal, hybrid, ours in worlds.run(against_hybrid, 2, 2, tmp_path, 0.2):
        assert equal and hybrid == ours
        assert min(entry["grad_norm"] for entry in ours.values()) > 0.2  # it clipped


def test_a_norm_that_nobody_clips_is_not_logged(tmp_path):
    """The Trainer's own is that of one replica."""
    for equal, hybrid, ours in worlds.run(against_hybrid, 2, 2, tmp_path, 0.0):
        for entry in hybrid.values():
            del entry["grad_norm"]
        assert equal and hybrid == ours


def by_signs(mesh, folder):
    begin()
    tracker = Tracker()
    trainer = Trainer(
        llama(),
        arguments(folder, save_strategy="no", max_steps=1),
        callbacks=[tracker, Replicate(dt.full())],
        train_dataset=Sequences(),
        optimizer_cls_and_kwargs=(dt.SignSGD, {"lr": 1e-3}),
    )
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    return [*logged(trainer).values(), tracker.seen[0]]


def test_a_norm_of_one_replica_alone_is_not_logged(tmp_path):
    for entries in worlds.run(by_signs, 2, 2, tmp_path):
        assert all("bytes_sent" in each and "grad_norm" not in each for each in entries)


def trainer_resumes(mesh, folder, scheme, changed):
    tracker = Tracker()
    whole = trained(folder, [tracker, Replicate(scheme)], **changed)
    if dist.get_rank() == 0:
        Path(folder, "checkpoint-4").rename(Path(folder, "moved"))
    dist.barrier()
    resumed = trained(folder, [Replicate(scheme)], resume=str(Path(folder, "moved")), **changed)
    equal = same(*(everything(each.optimizer, each.model) for each in (whole, resumed)))
    shards, last = of_all_ranks(weights(whole.model)), logged(whole)[5]
    whole.save_model(str(Path(folder, "final")))
    saved = whole.accelerator.get_state_dict(whole.model)  # on rank 0
    seen = list(tracker.seen)
    with contextlib.redirect_stdout(io.StringIO()):
        whole.train()  # once more: it goes on from the state that there is
    again = replicated(whole.optimizer).step_count
    agreed = torch.equal(shards[0], shards[2]) and torch.equal(shards[1], shards[3])
    return equal, agreed, last, logged(resumed)[5], seen, saved, again


@pytest.mark.parametrize(
    ("scheme", "changed"),
    [
        # the checkpoint is in the middle of a round
        pytest.param(dt.diloco(every=3), {}, marks=pytest.mark.long),
        (dt.demo(), {"wrap": SHARDED, "bf16": True, "gradient_accumulation_steps": 2}),
    ],
    ids=["diloco", "demo"],
)
def test_a_trainer_resumes_bit_for_bit_and_ends_with_one_model(tmp_path, scheme, changed):
    outcome = worlds.run(trainer_resumes, 2, 2, tmp_path, scheme, changed)
    for equal, agreed, last, after, seen, _, again in outcome:
        assert equal and agreed and again == 10
        assert last == after and last["bytes_sent"] > 0
        assert [logs["bytes_sent"] for logs in seen] == sorted(logs["bytes_sent"] for logs in seen)
    if "wrap" not in changed:  # save_model of the Trainer writes nothing from sharded state dicts
        file = load_file(tmp_path / "final" / "model.safetensors")
        assert all(torch.equal(file[name], tensor) for name, tensor in outcome[0][5].items())


def signs(mesh, folder):
    begin()
    how = {"optimizer_cls_and_kwargs": (dt.SignSGD, {"lr": 1e-3}), "train_dataset": Sequences()}
    exchange = Replicate(dt.demo(precision="sign", error_feedback=False))
    trainer = Trainer(llama(), arguments(folder, save_strategy="no"), callbacks=[exchange], **how)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    return (
        type(exchange.optimizer.base).__name__,
        exchange.optimizer.param_groups[0]["lr"],
        logged(trainer),
    )


def test_a_trainer_takes_the_sign_step_of_demo(tmp_path):
    for base, lr, logs in worlds.run(signs, 2, 2, tmp_path):
        assert base == "SignSGD" and lr < 1e-3  # the Trainer's schedule lowers it
        assert logs[5]["loss"] < logs[1]["loss"]


def best_model(mesh, folder):
    """The loss falls, and the greater one counts as better, so the first of two checkpoints is the best."""
    changed = {
        "max_steps": 4,
        "save_steps": 2,
        "eval_steps": 2,
        "eval_strategy": "steps",
        "greater_is_better": True,
    }
    changed |= {
        "metric_for_best_model": "eval_loss",
        "load_best_model_at_end": True,
        "learning_rate": 1e-2,
    }
    trainer = trained(folder, [Replicate(dt.diloco(every=3))], **changed)
    return trainer.state.best_model_checkpoint, trainer.accelerator.get_state_dict(trainer.model)


@pytest.mark.long  # no branch of its own
def test_the_best_model_stays_as_it_was_saved(tmp_path):
    """The last round is open, and must end before the best model is loaded."""
    (best, model), *_ = worlds.run(best_model, 2, 2, tmp_path)
    file = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert best.endswith("checkpoint-2") and all(
        torch.equal(file[name], tensor) for name, tensor in model.items()
    )


def searched(mesh, folder):
    """As a trial of `hyperparameter_search` trains."""
    begin()
    trainer = Trainer(
        None,
        arguments(folder),
        train_dataset=Sequences(),
        model_init=llama,
        callbacks=[Replicate("demo")],
    )
    transformers.integrations.hp_params = lambda trial: {}  # optuna itself may not be installed
    trainer.hp_search_backend, trainer.hp_space = HPSearchBackend.OPTUNA, lambda trial: {}
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train(trial=SimpleNamespace(number=3, params={}))


def test_the_state_of_the_replicas_is_in_the_checkpoints_of_a_trial(tmp_path):
    worlds.run(searched, 2, 2, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["run-3"]
    assert (tmp_path / "run-3" / "checkpoint-4" / "detonation").is_dir()


class Stop(TrainerCallback):
    """Ends training after four steps, and asks for a checkpoint."""

    def on_step_end(self, args, state, control, **others):
        if state.global_step == 4:
            control.should_training_stop = control.should_save = True


class StopAtEvaluation(TrainerCallback):
    """Ends training at the evaluation after four steps, as early stopping does."""

    def on_evaluate(self, args, state, control, **others):
        if state.global_step == 4:
            control.should_training_stop = True


def stopped(mesh, folder):
    """Whether replicas and the last checkpoint hold one model where a callback stops in the middle of a round."""
    changed = {"max_steps": 8, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    found = []
    for stop in (Stop(), StopAtEvaluation()):
        own = Path(folder, type(stop).__name__)
        trainer = trained(own, [Replicate(dt.diloco(every=3)), stop], **changed)
        shards = of_all_ranks(weights(trainer.model))
        whole = {name: p.full_tensor() for name, p in trainer.model.named_parameters()}
        dist.barrier()
        file = load_file(own / "checkpoint-4" / "model.safetensors")
        equal = all(torch.equal(file[name], tensor) for name, tensor in whole.items())
        found.append((trainer.state.global_step, torch.equal(shards[0], shards[2]), equal))
    return found


@pytest.mark.long
def test_where_a_callback_stops_training_the_last_checkpoint_is_the_agreed_model(tmp_path):
    assert worlds.run(stopped, 2, 2, tmp_path) == [[(4, True, True)] * 2] * 4


def adapter_resumes(mesh, folder):
    def adapter():
        return peft.get_peft_model(
            llama(), peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
        )

    whole = trained(folder, [Replicate(dt.demo())], adapter())
    resumed = trained(
        folder, [Replicate(dt.demo())], adapter(), resume=str(Path(folder, "checkpoint-4"))
    )
    numel = sum(p.numel() for p in whole.model.parameters() if p.requires_grad)
    return (
        same(*(everything(each.optimizer, each.model) for each in (whole, resumed))),
        logged(whole)[5],
        numel,
    )


def test_an_adapter_alone_is_exchanged_and_saved_and_resumes_bit_for_bit(tmp_path):
    for equal, last, numel in worlds.run(adapter_resumes, 2, 2, tmp_path):
        assert equal and 0 < last["bytes_sent"] < 5 * 4 * numel
    file = load_file(tmp_path / "checkpoint-4/detonation/step-000004/replica0-shard0.safetensors")
    kept = {key for key in file if key.startswith("model.")}
    assert kept and all(".lora_" in key for key in kept)


def sft(mesh, folder):
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    begin()
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(32)}, unk_token="t0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1")
    data = Dataset.from_dict({"input_ids": Sequences().tokens.tolist()})
    setting = arguments(
        folder, SFTConfig, save_strategy="no", max_steps=2, bf16=False, gradient_checkpointing=False
    )
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = SFTTrainer(
            llama(),
            setting,
            train_dataset=data,
            processing_class=tokenizer,
            callbacks=[Replicate("demo")],
        )
        trainer.train()
    shards = of_all_ranks(weights(trainer.model))
    return torch.equal(shards[0], shards[2]), logged(trainer)[2]


def test_trls_trainer_takes_the_callback(tmp_path):
    pytest.importorskip("trl")
    for agreed, last in worlds.run(sft, 2, 2, tmp_path):
        assert agreed and last["bytes_sent"] > 0 and "mean_token_accuracy" in last


def accelerated(scheme, size=(2, 2), clip=None, **settings):
    begin()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", **settings.pop("wrap", {})
    )
    accelerator = Accelerator(fsdp_plugin=plugin, parallelism_config=Replicas(*size), **settings)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8))
    loader = torch.utils.data.DataLoader(torch.randn(96, 16), batch_size=2)
    base = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(base, T_max=40)
    return accelerator, *prepare(
        accelerator, model, base, loader, schedule, scheme=scheme, clip=clip
    )


def advance(accelerator, model, optimizer, loader, schedule, batches, clip=None):
    for batch in list(loader)[batches]:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            if clip and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


def accelerate_resumes(mesh, folder, scheme, settings):
    whole = accelerated(scheme, **settings)
    advance(*whole, slice(0, 8), settings.get("clip"))
    whole[0].save_state(folder)
    advance(*whole, slice(8, 12), settings.get("clip"))
    expected, rate = everything(whole[2], whole[1]), whole[2].param_groups[0]["lr"]
    replicated(whole[2]).synchronize()
    shards = of_all_ranks(weights(whole[1]))
    equal = [rate < 1e-2, torch.equal(shards[0], shards[2])]
    for resumed in (
        whole,
        accelerated(scheme, **settings),
    ):  # from a later state, and in a new process
        resumed[0].load_state(folder)
        advance(*resumed, slice(8, 12), settings.get("clip"))
        equal += [
            same(everything(resumed[2], resumed[1]), expected),
            resumed[2].param_groups[0]["lr"] == rate,
        ]
    return equal, expected[1]


@pytest.mark.parametrize(
    ("scheme", "settings", "steps"),
    [
        pytest.param(
            *(
                dt.demo(),
                {"gradient_accumulation_steps": 2, "mixed_precision": "bf16", "clip": 0.01},
                6,
            ),
            marks=pytest.mark.long,
        ),
        (dt.diloco(every=3), {"wrap": SHARDED}, 12),
    ],
    ids=["demo", "diloco"],
)
def test_accelerates_saved_state_resumes_bit_for_bit(tmp_path, scheme, settings, steps):
    outcome = worlds.run(accelerate_resumes, 2, 2, tmp_path, scheme, settings)
    assert outcome == [([True] * 6, steps)] * 4


def two_models(mesh, folder):
    """Two models on one accelerator, each with an optimizer, saved and resumed; and once more after `free_memory`."""

    def made(accelerator):
        pairs = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            model = torch.nn.Linear(16, 16)
            pairs.append(
                prepare(
                    accelerator,
                    model,
                    torch.optim.AdamW(model.parameters(), lr=1e-2),
                    scheme="loco",
                )
            )
        return pairs

    def train(accelerator, pairs):
        for model, optimizer in pairs:
            torch.manual_seed(dist.get_rank())
            accelerator.backward(model(torch.randn(4, 16)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return [everything(optimizer, model) for model, optimizer in pairs]

    found = []
    accelerator = accelerated("loco")[0]
    for again in (False, True):
        accelerator.free_memory()  # and forgets a model that was prepared before
        pairs = made(accelerator)
        train(accelerator, pairs)
        own = Path(folder, str(again))
        accelerator.save_state(str(own))
        expected = train(accelerator, pairs)
        if not again:
            accelerator = accelerated("loco")[0]
            accelerator.free_memory()
            pairs = made(accelerator)
        accelerator.load_state(str(own))
        found += [same(*each) for each in zip(train(accelerator, pairs), expected, strict=True)]
        found.append(
            sorted(path.name for path in own.glob("detonation*")) == ["detonation", "detonation_1"]
        )
    return found


def clips_of_two_models(mesh):
    """What the first model meets, whose `prepare` was followed by another with another norm."""
    accelerator = accelerated("loco")[0]
    accelerator.free_memory()
    models = [torch.nn.Linear(16, 16) for _ in range(2)]
    for model, clip in zip(models, (1.0, 0.5), strict=True):
        prepare(accelerator, model, torch.optim.AdamW(model.parameters()), scheme="loco", clip=clip)
    accelerator.backward(models[0](torch.ones(1, 16)).square().mean())
    return [
        worlds.caught(accelerator.clip_grad_norm_, models[0].parameters(), clip)[0]
        for clip in (1.0, 0.5)
    ]


@pytest.mark.long
def test_two_models_of_one_accelerator_are_clipped_each_by_its_own_norm():
    assert worlds.run(clips_of_two_models, 2, 2) == [["nothing", "ValueError"]] * 4


def test_two_models_of_one_accelerator_each_keep_their_state(tmp_path):
    assert worlds.run(two_models, 2, 2, tmp_path) == [[True] * 6] * 4


def odd_uses(mesh, folder):
    """Clipping in a loop, a replica on one GPU, one replica, and checkpoints of other worlds and of others."""
    accelerator, model, optimizer, *rest = accelerated(dt.demo(), clip=0.5)
    advance(accelerator, model, optimizer, *rest, slice(0, 1), clip=0.5)
    refused = worlds.caught(accelerator.clip_grad_norm_, model.parameters(), 1.0)
    norms = (
        float(accelerator.clip_grad_norm_(model.parameters(), math.inf)),
        float(replicated(optimizer).stats.grad_norm),
    )
    other = worlds.caught(replicated, replicated(optimizer).base)
    coordinates = []
    for size, scheme in (((4, 1), dt.demo()), ((1, 4), dt.full())):
        each = accelerated(scheme, size)
        advance(*each, slice(0, 2))
        shards = of_all_ranks(weights(each[1]))
        coordinates.append((replicated(each[2]).coordinates, torch.equal(shards[0], shards[3])))
    accelerator, model, optimizer, *rest = accelerated(dt.demo())
    advance(accelerator, model, optimizer, *rest, slice(0, 3))
    accelerator.save_state(folder)
    whole = [p.detach().full_tensor() for p in model.parameters()]
    accelerator, model, optimizer, *_ = accelerated(dt.demo(), (4, 1))
    accelerator.load_state(folder)
    elastic = [
        torch.equal(p.full_tensor(), was) for p, was in zip(model.parameters(), whole, strict=True)
    ]
    elastic.append(replicated(optimizer).step_count == 3)
    if dist.get_rank() == 0:
        Path(folder, "detonation").rename(Path(folder, "lost"))
    dist.barrier()
    lost = worlds.caught(accelerator.load_state, folder)
    return refused, norms, other, (*coordinates, elastic), lost


def test_odd_uses_are_right_or_refused(tmp_path):
    for refused, (before, after), other, shapes, lost in worlds.run(odd_uses, 2, 2, tmp_path):
        (one, apart), (whole, _), elastic = shapes
        assert refused[0] == "ValueError" and "pass clip=1.0 to prepare" in refused[1]
        assert before == 0 < after  # the gradients were zeroed; the step's were clipped
        assert other[0] == "TypeError" and "pass the optimizer that prepare returned" in other[1]
        assert (one.replicas, one.shards, apart) == (4, 1, True) and (
            whole.replicas,
            whole.shards,
        ) == (1, 4)
        assert all(elastic)
        assert (
            lost[0] == "ValueError"
            and "has no directory detonation, the state of the replicas" in lost[1]
        )


def cut_short(mesh, folder):
    """What resumed runs log and where they end, after kills while the second checkpoint was saved."""
    lines, found = [], []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("detonation").addHandler(handler)
    whole = trained(folder, [Replicate(dt.full())], save_steps=2)
    dist.barrier()
    checkpoints = [folder / "checkpoint-4", folder / "checkpoint-5"]
    for name in ("detonation", "trainer_state.json"):
        dist.barrier()
        if dist.get_rank() == 0:
            (checkpoints[1] / name).rename(folder / name)
        dist.barrier()
        resumed = trained(folder, [Replicate(dt.full())], resume=True, save_strategy="no")
        found.append((torch.equal(weights(resumed.model), weights(whole.model)), [*lines]))
        lines.clear()
        dist.barrier()
        if dist.get_rank() == 0:
            (folder / name).rename(checkpoints[1] / name)
    dist.barrier()
    if dist.get_rank() == 0:
        for checkpoint in folder.glob("checkpoint-*"):
            shutil.rmtree(checkpoint / "detonation")
    dist.barrier()
    again = worlds.caught(partial(trained, folder, [Replicate(dt.full())], resume=True))
    return found, again


def test_a_checkpoint_whose_save_was_cut_short_is_skipped(tmp_path):
    results = worlds.run(cut_short, 2, 2, tmp_path / "out")
    for rank, (found, again) in enumerate(results):
        assert [same for same, _ in found] == [True, True]
        for name, (_, lines) in zip(("detonation", "trainer_state.json"), found, strict=True):
            told = [line for line in lines if "cut short" in line]
            assert len(told) == (rank == 0)
            if told:
                assert told[0].startswith(f"checkpoint-5 lacks {name} on rank 0: ")
                assert told[0].endswith("goes on from checkpoint-4")
        assert again[0] == "ValueError" and "is whole: checkpoint-" in again[1]


def folders_cut_short(mesh, folder):
    """The steps from which `load_state()` goes on, after kills while the second folder was saved."""
    naming = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True)
    whole = accelerated(dt.full(), project_config=naming)
    steps = []
    for part in (slice(0, 2), slice(2, 4)):
        advance(*whole, part)
        whole[0].save_state()
    newest = folder / "checkpoints" / "checkpoint_1"
    for name in ("random_states_1.pkl", "detonation"):
        accelerator, _, optimizer, *_ = accelerated(dt.full(), project_config=naming)
        dist.barrier()
        accelerator.load_state()
        steps.append(replicated(optimizer).step_count)
        dist.barrier()
        if dist.get_rank() == 0:
            (newest / name).rename(folder / name)
        dist.barrier()
        accelerator.load_state()
        steps.append(replicated(optimizer).step_count)
        dist.barrier()
        if dist.get_rank() == 0:
            (folder / name).rename(newest / name)
    return steps


def test_a_folder_of_accelerate_whose_save_was_cut_short_is_skipped(tmp_path):
    assert worlds.run(folders_cut_short, 2, 2, tmp_path) == [[4, 2, 4, 2]] * 4


def on_own_disks(mesh, scratch):
    """The Trainer on two nodes that share no file system, which copy from the first what they lack, and resume."""
    rank, lines = dist.get_rank(), []
    own_disks.mount(scratch, rank)
    logging.getLogger("detonation").addHandler(handler := logging.Handler())
    handler.emit = lambda record: lines.append(record.getMessage())
    whole = trained(scratch / "out", [Replicate(dt.diloco(every=3))])
    checkpoint = Path("out", "checkpoint-4")
    before = [path.name for path in (scratch / checkpoint).iterdir()]
    if rank == 2:
        for file in (scratch.parent / "disk0" / checkpoint).iterdir():
            if file.name not in before:
                shutil.copy(file, scratch / checkpoint)
    dist.barrier()
    resumed = trained(
        scratch / "out", [Replicate(dt.diloco(every=3))], resume=str(scratch / checkpoint)
    )
    return (
        same(*(everything(each.optimizer, each.model) for each in (whole, resumed))),
        before,
        lines,
    )


def test_without_a_shared_file_system_a_line_says_what_to_copy_and_resuming_is_exact(tmp_path):
    outcome = worlds.run_alone(on_own_disks, 2, 2, own_disks.make(tmp_path))
    for equal, _, _ in outcome:
        assert equal
    (_, first, said), _, (_, second, _), _ = outcome
    assert "trainer_state.json" in first and "trainer_state.json" not in second
    assert any(
        "(ranks 0-1; ranks 2-3)" in line and "copy to each node the files" in line for line in said
    )


def rotating_on_own_disks(mesh, scratch):
    """On two nodes that share no file system: what each has where the Trainer keeps one checkpoint."""
    own_disks.mount(scratch, dist.get_rank())
    kept = ["checkpoint-900/detonation", "checkpoint-best/detonation", "my-checkpoint-2/detonation"]
    for name in kept if dist.get_rank() == 2 else []:  # checkpoint-900 was never on the first node
        (scratch / "out" / name).mkdir(parents=True)
    dist.barrier()
    trained(scratch / "out", [Replicate(dt.full())], save_steps=1, save_total_limit=1)
    dist.barrier()
    return sorted(path.name for path in (scratch / "out").iterdir())


@pytest.mark.long
def test_without_a_shared_file_system_old_checkpoints_and_nothing_else_are_removed_on_every_node(
    tmp_path,
):
    outcome = worlds.run_alone(rotating_on_own_disks, 2, 2, own_disks.make(tmp_path))
    assert outcome[:2] == [["checkpoint-5"]] * 2
    assert (
        outcome[2:]
        == [["checkpoint-5", "checkpoint-900", "checkpoint-best", "my-checkpoint-2"]] * 2
    )


class State:
    """Accelerate's state, as far as a set-up is read from it."""

    distributed_type, mixed_precision = DistributedType.FSDP, "no"
    fsdp_plugin = type("Plugin", (), {"fsdp_version": 2})
    parallelism_config = Replicas(2, 2)

    def __init__(self, **changed):
        self.__dict__ |= changed


SET_UPS = {
    "parallelism_config is missing": {"parallelism_config": None},
    "this is the only rank": {"distributed_type": DistributedType.NO},
    "FSDP1 hides its shards": {"fsdp_plugin": type("Plugin", (), {"fsdp_version": 1})},
    "without FSDP2, DistributedDataParallel": {
        "fsdp_plugin": None,
        "distributed_type": DistributedType.MULTI_GPU,
    },
    "(hybrid sharding)": {"parallelism_config": ParallelismConfig(2, 2)},
    "DEEPSPEED has its own sharding and step": {"distributed_type": DistributedType.DEEPSPEED},
    "MEGATRON_LM has its own sharding and step": {"distributed_type": DistributedType.MEGATRON_LM},
    "use bf16": {"mixed_precision": "fp16"},
}


@pytest.mark.parametrize("message", SET_UPS)
def test_a_set_up_that_cannot_be_replicated_is_refused_in_one_line(message):
    with pytest.raises(ValueError) as found:
        check_setup(State(**SET_UPS[message]), torch.nn.Linear(1, 1))
    assert message in str(found.value) and "\n" not in str(found.value)


@pytest.mark.parametrize("wrapper", [DistributedDataParallel, FullyShardedDataParallel])
def test_a_wrapped_model_is_refused(wrapper):
    with pytest.raises(ValueError, match=f"wrapped in {wrapper.__name__}: pass the bare model"):
        check_setup(State(), wrapper.__new__(wrapper))
    check_setup(State(), torch.nn.Linear(1, 1))


MODEL = torch.nn.Linear(1, 1)
OPTIMIZER = torch.optim.SGD(MODEL.parameters())


@pytest.mark.parametrize(
    ("objects", "kind", "message"),
    [
        ((OPTIMIZER, MODEL), TypeError, "prepare got SGD and Linear, must get a model and an"),
        ((MODEL, None), TypeError, "prepare got Linear and NoneType, must get a model and an"),
        (
            (MODEL, OPTIMIZER, OPTIMIZER),
            ValueError,
            "others contains SGD, but prepare replicates one",
        ),
        (
            (MODEL, OPTIMIZER, MODEL),
            ValueError,
            "others contains Linear, but prepare replicates one",
        ),
    ],
)
def test_an_object_that_would_not_be_replicated_is_refused(objects, kind, message):
    with pytest.raises(kind, match=message) as found:
        prepare(None, *objects, scheme="loco")
    assert "\n" not in str(found.value)


class FSDPMarianMTModel(torch.nn.Linear):
    """A model whose labels are not shifted, by its name."""


class FSDPLlamaForCausalLM(torch.nn.Linear):
    """A model whose labels the Trainer no longer shifts, because FSDP2 has renamed its class."""


def adapted(model):
    """An adapter of PEFT around a model."""
    return SimpleNamespace(peft_config={}, base_model=SimpleNamespace(model=model))


@pytest.mark.parametrize(
    "changed",
    [
        {"model": FSDPMarianMTModel(1, 1)},
        {"model": adapted(llama())},
        {"label_smoother": None},
        {"compute_loss_func": lambda *_, **__: None},
    ],
)
def test_labels_are_smoothed_where_the_trainer_need_not_shift_them(changed):
    renamed = FSDPLlamaForCausalLM(1, 1)
    trainer = {"model": renamed, "label_smoother": object(), "compute_loss_func": None}
    trainer["args"] = SimpleNamespace(label_smoothing_factor=0.1)
    for model in (renamed, adapted(renamed)):
        with pytest.raises(ValueError, match=r"smoothing_factor is 0\.1, must be 0 for Llama"):
            check_smoothing(SimpleNamespace(**trainer | {"model": model}))
    check_smoothing(SimpleNamespace(**trainer | changed))


def refusals(mesh, folder):
    """Where the real libraries meet the checks: when a Trainer is made or trains, and before a model is prepared."""

    def trainer(**changed):
        begin()
        return Trainer(
            llama(),
            arguments(folder, **changed),
            train_dataset=Sequences(),
            callbacks=[Replicate("demo")],
        )

    def loop():
        begin()
        model = torch.nn.Linear(8, 8)
        prepare(Accelerator(), model, torch.optim.AdamW(model.parameters()), scheme="demo")

    return [
        worlds.caught(lambda: trainer(parallelism_config=ParallelismConfig(2, 2))),
        worlds.caught(lambda: trainer(parallelism_config=None)),
        worlds.caught(lambda: trainer(fsdp=False)),
        worlds.caught(lambda: trainer(label_smoothing_factor=0.1).train()),
        worlds.caught(loop),
    ]


def test_the_libraries_meet_the_checks(tmp_path):
    expected = [
        "(hybrid sharding)",
        "parallelism_config is missing",
        "without FSDP2",
        "label_smoothing_factor is 0.1, must be 0 for LlamaForCausalLM: FSDP2 renames this class",
        "parallelism_config is missing",
    ]
    for found in worlds.run(refusals, 2, 2, tmp_path):
        for (kind, said), text in zip(found, expected, strict=True):
            assert (kind, text in said) == ("ValueError", True), (kind, said)


def example(mesh, name, folder):
    begin()
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return printed.getvalue()


@pytest.mark.long  # no branch of its own
@pytest.mark.parametrize(
    "name",
    ["huggingface_accelerate.py", pytest.param("huggingface_trainer.py", marks=pytest.mark.long)],
)
def test_an_example_learns_and_its_replicas_end_equal(tmp_path, name):
    assert len((EXAMPLES / name).read_text().splitlines()) <= 60
    printed, *_ = worlds.run_alone(example, 2, 2, name, tmp_path)
    before, after = (float(loss) for loss in printed.split("loss ")[1].split(",")[0].split(" -> "))
    assert after < before / 2 and "replicas equal: True" in printed
