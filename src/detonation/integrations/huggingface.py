"""Accelerate, the Trainer of Transformers, TRL and PEFT: FSDP2 shards inside each replica, and a
scheme connects the replicas.

Accelerate shards a model, replaces the parameters of its optimizer, and wraps the optimizer. Then
this module replicates the optimizer inside the wrapper. Next to the files of these libraries, a
checkpoint has a directory `detonation` with the state that differs between replicas.
"""

import math
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from detonation.checkpoint.async_save import save_checkpoint
from detonation.checkpoint.gather import CheckpointsElsewhere
from detonation.checkpoint.newest import load_checkpoint
from detonation.cluster.init import watch_waiting
from detonation.core.optim import OptimizerWrapper
from detonation.core.optimizer import Replicated, replicate
from detonation.core.schemes import Scheme
from detonation.integrations.incomplete import skip_checkpoints, skip_folders

try:
    from accelerate import Accelerator
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType
    from transformers.trainer_callback import TrainerCallback
except ImportError as error:
    raise ImportError(f"{error}: run pip install '.[hf]' in a clone") from error

_PART_OF_REPLICAS = "detonation"
"""Name of the directory in a checkpoint that holds the exact state of every rank. The library
writes the rest of the checkpoint.
"""
_NAME = re.compile(r"checkpoint-[0-9]+")
"""Pattern of the names that the Trainer gives its checkpoints."""
_USE = "parallelism_config=Replicas(dp_replicate_size=NODES, dp_shard_size=GPUS_PER_NODE)"


class Replicas(ParallelismConfig):  # type: ignore[misc]
    """A `ParallelismConfig` of Accelerate with which FSDP2 shards only inside each replica.

    A scheme connects the replicas. Consecutive ranks are the shards of one replica. Each rank reads
    different data, as with Accelerate's own `ParallelismConfig`. With the `axis` of `elastic`, each
    replica is a separate world. All replicas then read the same data, unless you give each replica
    its own part.

    Args:
        dp_replicate_size: Replicas, usually the number of nodes.
        dp_shard_size: Ranks that share one replica, usually the GPUs of a node; 1 for a replica on
            one GPU. By default both sizes come from the environment of `accelerate launch`.

    Raises:
        ValueError: In `Accelerator`, if the product of the sizes is not the number of ranks.

    Example:
        >>> Replicas(dp_replicate_size=2, dp_shard_size=8).fsdp_dim_names
        ['dp_shard_cp']
    """

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The mesh axes over which FSDP2 shards: only the axes inside a replica."""
        return ["dp_shard_cp"]

    @property
    def dp_replicate_enabled(self) -> bool:
        """True if the run has several ranks, whether they form one replica or several."""
        return bool(self.total_size > 1)

    dp_shard_enabled = dp_replicate_enabled

    def _validate_accelerator(self, accelerator: Accelerator) -> None:
        """If Accelerate counts only one rank, raises an error that is clearer than the error of
        Accelerate.
        """
        if self.total_size > 1 and accelerator.num_processes == 1:
            asked = f"{self.dp_replicate_size} replicas x {self.dp_shard_size} shards"
            raise ValueError(
                f"{asked} are {self.total_size} ranks, but Accelerate counts 1. On accelerators,"
                f" start {self.total_size} ranks with torchrun or accelerate launch. On CPUs, where"
                " Accelerate cannot shard, set dp_shard_size=1"
            )
        super()._validate_accelerator(accelerator)


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer,
    *others: Any,
    scheme: Scheme | str,
    clip: float | None = None,
    **settings: Any,
) -> tuple[Any, ...]:
    """Prepares model, optimizer and other objects as `accelerator.prepare` does. The optimizer then
    also exchanges updates between replicas by `scheme`.

    After this call, `save_state` and `load_state` also include the state of the replicas. If the
    scheme has rounds, call `replicated(optimizer).synchronize()` before you use the model.

    Args:
        accelerator: Accelerator with FSDP2 and `parallelism_config=Replicas(...)`.
        model: Model that is not prepared yet.
        optimizer: Optimizer over parameters of `model`; its step applies the agreed updates.
        others: Loaders and schedulers to prepare.
        scheme: Scheme between the replicas, such as `loco()`.
        clip: Largest global norm, above 0, of the gradients after the exchange. A loop may still
            call `accelerator.clip_grad_norm_` with this norm. The call then returns the norm of
            this replica's gradients and changes nothing.
        settings: Arguments of `replicate`: seed, kernels, safety; and `axis`, such as the axis of
            `elastic` if each replica has its own process group.

    Returns:
        Results of `accelerator.prepare`: the model, the optimizer and the others.

    Raises:
        TypeError: The first two objects are not a model and an optimizer.
        ValueError: The others contain another model or optimizer. The accelerator does not shard
            inside the replicas by FSDP2, or scales gradients (fp16). In `clip_grad_norm_`, if the
            norm is not `clip`. In `load_state`, if the state of the replicas is missing.

    Example; `examples/huggingface_accelerate.py` is the complete file::

        accelerator = Accelerator(fsdp_plugin=plugin, parallelism_config=Replicas(2, 8))
        model, optimizer, loader = prepare(accelerator, model, optimizer, loader, scheme=dt.loco())
    """
    _check_objects(model, optimizer, others)
    check_setup(accelerator.state, model)
    prepared: tuple[Any, ...] = accelerator.prepare(model, optimizer, *others)
    sharded, wrapper = prepared[:2]
    _replicate_inside(wrapper, accelerator, sharded, scheme, {"clip": clip, **settings})
    _keep_with_states(accelerator, wrapper, sharded)
    return prepared


def replicated(optimizer: Optimizer) -> Replicated:
    """Returns the replicated optimizer inside an optimizer that `prepare` returned. The replicated
    optimizer has `stats` and `synchronize`.

    Raises:
        TypeError: `prepare` did not return `optimizer`.

    Example, in a loop::

        accelerator.log({"loss": loss.item(), "bytes_sent": replicated(optimizer).stats.bytes_sent},
        step)
    """
    inside = getattr(optimizer, "optimizer", None)
    if not isinstance(inside, _ReplicatedStep):
        raise TypeError(
            f"the {type(optimizer).__name__} is not replicated: pass the optimizer that prepare"
            " returned"
        )
    return inside.replicated


class Replicate(TrainerCallback):
    """A callback that makes the Trainer train with replicas: `Trainer(...,
    callbacks=[Replicate(dt.loco())])`.

    It works with the Trainer of Transformers and its subclasses, such as TRL's `SFTTrainer`, with
    or without PEFT. `max_grad_norm` clips the gradients on which replicas agree, as in hybrid
    sharding. Each checkpoint holds the state of the replicas, and
    `train(resume_from_checkpoint=...)` continues bit for bit. The logs contain the `bytes_sent` of
    this rank so far. They also contain the `grad_norm` of the gradients on which replicas agree;
    without clipping, they contain no `grad_norm`. The last step completes open rounds, so that all
    replicas evaluate and save the same model.

    Attributes:
        optimizer: Replicated optimizer, for its `stats`; None until training begins.

    Args:
        scheme: Scheme between the replicas, such as `loco()`.
        settings: Arguments of `prepare`: seed, kernels, safety, axis.

    Raises:
        ValueError: In `Trainer(...)`, if its arguments do not shard inside the replicas by FSDP2
            (`fsdp=True, parallelism_config=Replicas(...)`), or scale gradients (fp16). In `train`,
            if `label_smoothing_factor` is set for a causal language model.

    Example:
        >>> import detonation as dt
        >>> Replicate(dt.loco(), seed=1).optimizer is None
        True
    """

    def __init__(self, scheme: Scheme | str, **settings: Any) -> None:
        self.optimizer: Replicated | None = None
        self._scheme = scheme
        self._settings = settings
        self._folder = Path()  # the folder that holds the checkpoints
        self._sent_before = 0  # bytes that the run had sent before it was resumed
        self._elsewhere: CheckpointsElsewhere | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Checks the set-up before data are prepared, and makes the Trainer skip incomplete
        checkpoints.
        """
        check_setup(AcceleratorState(), others["model"])
        skip_checkpoints(_NAME, _PART_OF_REPLICAS)

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Replicates the optimizer after the Trainer has sharded the model and loaded the
        optimizer. Then loads the state of the replicas.
        """
        trainer, checkpoint = _training()
        # check again: a callback that was added by `add_callback` gets no call of `on_init_end`
        check_setup(trainer.accelerator.state, trainer.model)
        check_smoothing(trainer)
        # an earlier call of `train` has already replicated the optimizer
        if isinstance(trainer.optimizer.optimizer, _ReplicatedStep):
            self.optimizer = trainer.optimizer.optimizer.replicated
        else:
            self._sent_before = 0
            own = {"clip": args.max_grad_norm or None, **self._settings}
            self.optimizer = _replicate_inside(
                trainer.optimizer, trainer.accelerator, trainer.model, self._scheme, own
            )
        self._elsewhere = None
        self._folder = Path(trainer._get_output_dir(trainer._trial))
        if args.save_strategy != "no" and not args.save_only_model:
            self._elsewhere = CheckpointsElsewhere(
                self._folder, trainer.model, _NAME, _PART_OF_REPLICAS
            )
        if checkpoint is not None:
            extra = _load_part(Path(checkpoint, _PART_OF_REPLICAS), trainer.model, self.optimizer)
            self._sent_before = int(extra["bytes_sent"]) - self.optimizer.stats.bytes_sent
        callbacks = trainer.callback_handler.callbacks
        rest = [each for each in callbacks if each is not self and not isinstance(each, _LastRound)]
        # This callback must be first, so that trackers get `bytes_sent`.
        # `_LastRound` must be last, because any other callback may stop training.
        callbacks[:] = [self, *rest, _LastRound(self.optimizer)]

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Adds the state of the replicas to the checkpoint that the Trainer has just written."""
        if self.optimizer and not args.save_only_model:
            part = self._folder / f"checkpoint-{state.global_step}" / _PART_OF_REPLICAS
            _save_part(part, others["model"], self.optimizer, {"bytes_sent": self._bytes_sent})
        self._remove_elsewhere(args)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Removes old checkpoints from the disks of all other nodes, because the Trainer removes
        checkpoints only on rank 0.
        """
        self._remove_elsewhere(args)

    def on_log(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Adds the sent bytes to the logs. Replaces the logged gradient norm of this replica by the
        norm of the gradients on which replicas agree. If that norm is not measured, removes the
        logged norm.
        """
        if not self.optimizer:
            return
        norm = self.optimizer.stats.grad_norm
        for logs in (others["logs"], state.log_history[-1]):
            logs["bytes_sent"] = self._bytes_sent
            if logs.pop("grad_norm", None) is not None and norm is not None:
                logs["grad_norm"] = norm.item()

    def _remove_elsewhere(self, args: Any) -> None:
        # without `save_total_limit` the Trainer removes no checkpoints
        if self._elsewhere and args.save_total_limit:
            self._elsewhere.follow()

    @property
    def _bytes_sent(self) -> int:
        if self.optimizer is None:
            return self._sent_before
        return self._sent_before + self.optimizer.stats.bytes_sent


class _LastRound(TrainerCallback):
    """Completes open rounds when training stops, before the Trainer saves a model or loads the best
    model.

    It must be the last callback, because every other callback may stop training.
    """

    def __init__(self, optimizer: Replicated) -> None:
        self._optimizer: Replicated | None = optimizer

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        ends = control.should_training_stop or state.global_step >= state.max_steps
        if self._optimizer and ends:
            self._optimizer.synchronize()

    on_epoch_end = on_evaluate = on_step_end

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._optimizer = None  # a later call of `evaluate` then completes no round


def check_setup(state: AcceleratorState, model: nn.Module) -> None:
    """Raises `ValueError` with the remedy if Accelerate does not shard `model` inside the replicas
    by FSDP2.
    """
    if isinstance(model, DistributedDataParallel | FullyShardedDataParallel):
        raise ValueError(
            f"the model is wrapped in {type(model).__name__}: pass the bare model, and"
            " let FSDP2 shard it"
        )
    kind = state.distributed_type
    config = state.parallelism_config
    plugin = getattr(state, "fsdp_plugin", None)
    if kind == DistributedType.NO:
        raise ValueError(
            "this is the only rank: start several ranks with torchrun or accelerate launch"
        )
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise ValueError(
            f"{kind.value} has its own sharding and step, which cannot be replicated: use FSDP2 and"
            f" {_USE}"
        )
    if plugin is not None and plugin.fsdp_version != 2:
        raise ValueError(
            f"FSDP1 hides its shards: use FSDP2 (version 2 in the FSDP settings) and {_USE}"
        )
    if config is None:
        raise ValueError(
            f"parallelism_config is missing, which says how many replicas there are: pass {_USE}"
        )
    if plugin is None or kind != DistributedType.FSDP:
        remedy = f"pass an fsdp_plugin with fsdp_version=2 (Trainer: fsdp=True) and {_USE}"
        raise ValueError(
            "without FSDP2, DistributedDataParallel sends whole gradients between replicas:"
            f" {remedy}"
        )
    if not isinstance(config, Replicas):
        raise ValueError(
            f"{type(config).__name__} shards across replicas (hybrid sharding): pass {_USE} instead"
        )
    if state.mixed_precision == "fp16":
        raise ValueError(
            "fp16 scales the loss on each replica separately, and replicas would skip different"
            " steps: use bf16"
        )


def _check_objects(model: Any, optimizer: Any, others: tuple[Any, ...]) -> None:
    """Refuses objects that `prepare` would not replicate."""
    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
        kinds = f"{type(model).__name__} and {type(optimizer).__name__}"
        raise TypeError(
            f"prepare got {kinds}, must get a model and an optimizer: pass"
            " prepare(accelerator, model, optimizer, ..., scheme=...)"
        )
    more = [each for each in others if isinstance(each, nn.Module | Optimizer)]
    if more:
        raise ValueError(
            f"others contains {type(more[0]).__name__}, but prepare replicates one optimizer of one"
            " model: put all parameters of a model in groups of one optimizer, and call prepare"
            " for each model"
        )


def check_smoothing(trainer: Any) -> None:
    """Raises `ValueError` if the Trainer would smooth unshifted labels of a causal language model.

    The Trainer shifts the labels if the class of the model has the name of a causal language model.
    FSDP2 renames this class, so without this check the model would learn to copy its input. Inside
    an adapter of PEFT, FSDP2 renames the class only if it shards the adapted model as a separate
    unit.
    """
    # import here, because loops with Accelerate alone do not need these slow modules
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if trainer.label_smoother is None or trainer.compute_loss_func is not None:
        return
    # torch.compile wraps the model in a class with another name
    model = getattr(trainer.model, "_orig_mod", trainer.model)
    if hasattr(model, "peft_config"):
        model = model.base_model.model
    renamed = type(model).__name__
    name = renamed.removeprefix("FSDP")
    if name != renamed and name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise ValueError(
            f"label_smoothing_factor is {trainer.args.label_smoothing_factor}, must be 0 for"
            f" {name}: FSDP2 renames this class, so the Trainer would not shift the labels; smooth"
            " them in a compute_loss_func instead"
        )


def _training() -> tuple[Any, str | None]:
    """Returns the Trainer whose `train` is running, and the checkpoint from which it resumes.

    The function searches the frames of its callers, because the Trainer passes neither itself nor
    the checkpoint to callbacks.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        trainer = frame.f_locals.get("self")
        if "resume_from_checkpoint" in frame.f_locals and hasattr(trainer, "callback_handler"):
            return trainer, frame.f_locals["resume_from_checkpoint"]
    raise RuntimeError(
        "Replicate runs outside of a Trainer: pass it as Trainer(..., callbacks=[Replicate(...)])"
    )


class _ReplicatedStep(OptimizerWrapper):
    """The base optimizer, with a `step` that exchanges updates between replicas.

    A library that saves this object saves only the state of the base optimizer. If the library
    called `Replicated.state_dict`, it would copy the memory of unsent values. It would then lose
    this memory, or mix up the memories of several replicas.
    """

    def __init__(self, inside: Replicated) -> None:
        super().__init__(inside.base)
        self.replicated = inside

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return self.replicated.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return self.with_saving_hooks(self.base.state_dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.with_loading_hooks(state_dict, self.base.load_state_dict)


def _replicate_inside(
    wrapper: Any,
    accelerator: Accelerator,
    model: nn.Module,
    scheme: Scheme | str,
    settings: dict[str, Any],
) -> Replicated:
    """Replicates the optimizer inside Accelerate's `wrapper`, over the sharded `model`."""
    watch_waiting()
    axis = settings.pop("axis", None) or accelerator.torch_device_mesh["dp_replicate"]
    inside = replicate(wrapper.optimizer, model, axis, scheme, **settings)
    wrapper.optimizer = _ReplicatedStep(inside)
    measure = accelerator.clip_grad_norm_
    clip = settings["clip"]

    def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Returns the norm of the gradients without clipping them. `step` clips after the exchange,
        because before the exchange each replica would scale by a different norm.
        """
        if isinstance(parameters, Tensor):
            parameters = [parameters]
        parameters = [*parameters]
        mine = {id(parameter) for group in inside.param_groups for parameter in group["params"]}
        # parameters that are not in this optimizer belong to another model of the accelerator
        if mine.isdisjoint(map(id, parameters)):
            return measure(parameters, max_norm, norm_type)
        if math.isfinite(max_norm) and (max_norm, norm_type) != (clip, 2):
            remedy = (
                f"pass clip={max_norm} to prepare, for the 2-norm of the gradients that replicas"
                " agreed on"
            )
            raise ValueError(
                f"clip_grad_norm_({max_norm}) would clip each replica before the exchange: {remedy}"
            )
        return measure(parameters, math.inf, norm_type)

    accelerator.clip_grad_norm_ = clip_grad_norm_
    return inside


def _keep_with_states(accelerator: Accelerator, wrapper: Any, model: nn.Module) -> None:
    """Makes `save_state` and `load_state` include the state of the replicated optimizer in
    `wrapper`.

    The folders of several optimizers are numbered in the order of the calls of `prepare`:
    `detonation`, `detonation_1`, ...
    """

    def parts(path: str) -> Iterator[Path]:
        """Yields the folder of `wrapper` in the checkpoint at `path`. Yields nothing after
        `free_memory`, because `free_memory` forgets prepared optimizers.
        """
        optimizers = accelerator._optimizers
        kept = [each for each in optimizers if isinstance(each.optimizer, _ReplicatedStep)]
        for number, each in enumerate(kept):
            name = _PART_OF_REPLICAS
            if number:
                name += f"_{number}"
            if each is wrapper:
                yield Path(path, name)

    def save(models: Any, weights: Any, path: str) -> None:
        for part in parts(path):
            _save_part(part, model, wrapper.optimizer.replicated)

    def load(models: Any, path: str) -> None:
        for part in parts(path):
            _load_part(part, model, wrapper.optimizer.replicated)

    skip_folders(accelerator, _PART_OF_REPLICAS)
    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def _save_part(
    part: Path, model: nn.Module, optimizer: Replicated, extra: Mapping[str, Any] | None = None
) -> None:
    """Saves the exact state of every rank in the directory `part`. Collective."""
    state = AcceleratorState()
    # This directory may hold a later step of an earlier run, so remove the directory.
    # One rank of each node removes this directory, because nodes need not share a file system.
    if state.is_local_main_process:
        shutil.rmtree(part, ignore_errors=True)
    state.wait_for_everyone()
    save_checkpoint(part, model, optimizer, extra, keep=1, frozen=False)


def _load_part(part: Path, model: nn.Module, optimizer: Replicated) -> dict[str, Any]:
    """Loads the result of `_save_part`, after the library has loaded its own part of the state.
    Returns `extra`. Collective.

    Raises `ValueError` if the directory `part` is missing, or if its state belongs to another
    model, optimizer or scheme.
    """
    loaded = load_checkpoint(part, model, optimizer)
    if loaded is None:
        missing = f"{part.parent} has no directory {part.name}, the state of the replicas"
        remedy = "it was saved without this state, or cut short: use an earlier checkpoint"
        raise ValueError(f"{missing}: {remedy}")
    return loaded.extra
