"""torchtitan: FSDP2 shards inside each replica as torchtitan does, and a scheme connects the
replicas.

torchtitan's command line names a function that returns a configuration. With the flag `--module
detonation.integrations.torchtitan`, this module calls the function and adds replicas to the
configuration:

    torchrun ... -m torchtitan.train --module detonation.integrations.torchtitan --config
    llama3.llama3_8b \
        --optimizer.scheme loco --parallelism.data_parallel_replicate_degree 4

Use `with_replicas` for a configuration of your own.
"""

import copy
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from detonation.checkpoint.async_save import save_checkpoint
from detonation.checkpoint.gather import warn_unless_shared
from detonation.checkpoint.newest import load_checkpoint
from detonation.cluster.init import watch_waiting
from detonation.core.optimizer import Replicated, replicate
from detonation.core.schemes import Scheme
from detonation.core.schemes import scheme as scheme_named

try:
    from torchtitan.components.checkpointer import DATALOADER, OPTIMIZER, CheckpointManager
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import OptimizersContainer
    from torchtitan.config import ConfigManager
    from torchtitan.config.override import derive
    from torchtitan.distributed import ParallelDims
    from torchtitan.tools import filesystem
    from torchtitan.tools.logging import logger
    from torchtitan.trainer import Trainer
except ImportError as error:
    raise ImportError(f"{error}: run pip install '.[titan]' in a clone") from error


def with_replicas(
    config: Trainer.Config, scheme: Scheme | str = "loco", **settings: Any
) -> Trainer.Config:
    """Makes the trainer of `config` train with replicas, which exchange updates by `scheme`.

    torchtitan shards inside each replica, and reads its batches as before. `training.max_norm`
    clips the gradients on which replicas agree, as in hybrid sharding, and the log shows the norm
    of these gradients. The metrics contain `bytes_sent` and `waited_s` of the logging rank so far.
    Each checkpoint contains the exact state of every rank in a directory `detonation`. A run that
    loads the checkpoint continues bit for bit. The last step completes open rounds.

    Args:
        config: Configuration, changed in place. It needs
            `parallelism.data_parallel_replicate_degree`, the number of replicas.
        scheme: Scheme between the replicas. The flag `--optimizer.scheme` overrides it.
        settings: Arguments of `replicate`: seed, kernels, safety.

    Returns:
        `config`.

    Raises:
        ValueError: A component of `config` is not torchtitan's own. In `Trainer`, for unsupported
            settings: one replica, several optimizers, pipeline, tensor, context or expert
            parallelism, another `spmd_backend`. If a loaded checkpoint lacks the replicas' state.

    Example, your own function for `--module` and `--config`::

        def llama3_8b_loco() -> Trainer.Config:
            return with_replicas(llama3_8b(), dt.loco())
    """
    for name, theirs, ours in (
        ("optimizer", OptimizersContainer.Config, ReplicaOptimizers.Config),
        ("checkpoint", CheckpointManager.Config, ReplicaCheckpoints.Config),
        ("metrics", MetricsProcessor.Config, ReplicaMetrics.Config),
    ):
        found = getattr(config, name)
        if type(found) is not theirs:
            kinds = f"{type(found).__qualname__}, must be {theirs.__qualname__}"
            raise ValueError(
                f"config.{name} is of class {kinds}: call with_replicas once, with torchtitan's"
                " own classes"
            )
        setattr(config, name, derive(found, ours))
    sharding = _Sharding(config.model_spec, scheme, settings)
    config.model_spec = replace(
        config.model_spec,
        parallelize_fn=sharding.parallelize,
        post_optimizer_build_fn=sharding.replicate,
    )
    config.parallelism.spmd_backend = "partial_dtensor"
    return config


class _Sharding:
    """Provides two functions for a `ModelSpec`: one shards the model inside a replica, the other
    replicates the optimizer.
    """

    def __init__(self, spec: Any, scheme: Scheme | str, settings: dict[str, Any]) -> None:
        self._spec = spec
        self._scheme = scheme
        self._settings = settings
        self._clip: float | None = None

    def parallelize(
        self,
        model: nn.Module,
        *,
        parallel_dims: ParallelDims,
        training: Any,
        parallelism: Any,
        **others: Any,
    ) -> nn.Module:
        check_dimensions(parallel_dims)
        self._steps = training.steps
        # read `max_norm` only once: a second trainer would read the infinite value set below
        if self._clip is None:
            self._clip = training.max_norm
        # with an infinite limit, torchtitan measures the norm before the exchange but does not clip
        training.max_norm = math.inf
        inside = copy.copy(parallel_dims)
        inside.__class__ = _InsideReplica
        model = self._spec.parallelize_fn(
            model, parallel_dims=inside, training=training, parallelism=parallelism, **others
        )
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # torchtitan divides losses by the tokens of all R replicas: multiply gradients by R
                module.set_gradient_divide_factor(1 / parallel_dims.dp_replicate)
                # gloo cannot multiply while it sums, so on CPUs FSDP2 must multiply separately.
                # A single shard sums nothing: a separate product would apply the factor twice.
                if parallel_dims.world_mesh.device_type == "cpu":
                    several = parallel_dims.get_mesh("fsdp").size() > 1
                    module.set_force_sum_reduction_for_comms(several)
        return model

    def replicate(
        self, optimizers: "ReplicaOptimizers", parts: Sequence[nn.Module], dims: ParallelDims
    ) -> None:
        """Makes the model's `optimizers` exchange updates between replicas."""
        options = {"clip": self._clip, **self._settings}
        optimizers.replicate(dims.get_mesh("dp_replicate"), self._scheme, self._steps, options)
        if self._spec.post_optimizer_build_fn is not None:
            self._spec.post_optimizer_build_fn(optimizers, parts, dims)


class _InsideReplica(ParallelDims):  # type: ignore[misc]
    """The parallel dimensions that FSDP sees: without the axis between replicas."""

    dp_replicate_enabled = False

    def get_activated_mesh(self, axes: list[str]) -> DeviceMesh | None:
        inside = [axis for axis in axes if axis != "dp_replicate"]
        mesh: DeviceMesh | None = super().get_activated_mesh(inside)
        return mesh


class ReplicaOptimizers(OptimizersContainer):  # type: ignore[misc]
    """torchtitan's container of optimizers, with a step that exchanges updates between replicas.

    The container keeps the base optimizer, because schedulers change this optimizer and
    torchtitan's checkpoints save it.

    Attributes:
        replicated: Replicated optimizer, for its `stats`.
        sent_before: Bytes that this rank sent in the runs that this run resumes.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):  # type: ignore[misc]
        """torchtitan's configuration of optimizers, with the scheme as an additional field."""

        scheme: str = ""
        """Scheme between replicas, such as loco, or with arguments 'diloco={"every": 50}'.

        If this text is empty, the scheme that was passed in code is used.
        """

    replicated: Replicated
    sent_before = 0

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        self._scheme = config.scheme
        super().__init__(config, model_parts=model_parts)

    def replicate(
        self, axis: DeviceMesh, scheme: Scheme | str, steps: int, options: dict[str, Any]
    ) -> None:
        """Replicates the optimizer along `axis`.

        Args:
            scheme: Scheme that was passed in code; the flag `--optimizer.scheme` overrides it.
            steps: Number of training steps.
        """
        if len(self.optimizers) > 1:
            kinds = ", ".join(type(each).__name__ for each in self.optimizers)
            raise ValueError(
                f"there are {len(self.optimizers)} optimizers ({kinds}), must be one"
                " for all parameters"
            )
        chosen = scheme
        if self._scheme:
            chosen = parsed_scheme(self._scheme)
        watch_waiting()
        self.replicated = replicate(
            self.optimizers[0], self.model_parts[0], axis, chosen, **options
        )
        self._steps = steps

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Makes a step together with the other replicas. After the last step of training, all
        replicas hold the same weights.
        """
        self.replicated.step()
        if self.replicated.step_count == self._steps:
            self.replicated.synchronize()

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent to other replicas since the run began, including bytes of
        the runs that this run resumes.
        """
        return self.sent_before + self.replicated.stats.bytes_sent


class ReplicaMetrics(MetricsProcessor):  # type: ignore[misc]
    """torchtitan's metrics, with `bytes_sent`, `waited_s`, and the norm of the gradients on which
    replicas agree.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):  # type: ignore[misc]
        """torchtitan's configuration of metrics, which builds the class `ReplicaMetrics`."""

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        stats = self.optimizers.replicated.stats
        sent = self.optimizers.bytes_sent
        if stats.grad_norm is not None:
            grad_norm = stats.grad_norm.item()
        extra = {**(extra_metrics or {}), "bytes_sent": sent, "waited_s": stats.waited_s}
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra)
        logger.info(
            f"step: {step:2}  sent to replicas: {sent:,} bytes  waited: {stats.waited_s:.1f} s"
        )


class ReplicaCheckpoints(CheckpointManager):  # type: ignore[misc]
    """torchtitan's checkpoints. Each full checkpoint also contains the exact state of every rank.

    The files of torchtitan contain the model and the optimizer of replica 0 only, because torch
    would mix up the files of several replicas.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """torchtitan's configuration of checkpoints, which builds the class
        `ReplicaCheckpoints`.
        """

    def __init__(self, config: Config, *, base_folder: str = "", **others: Any) -> None:
        if config.enable and "://" in (folder := str(filesystem.join(base_folder, config.folder))):
            raise ValueError(
                f"checkpoint.folder is {folder}: replicas save to directories, not to remote"
                " storage"
            )
        super().__init__(config, base_folder=base_folder, **others)
        if config.enable:
            warn_unless_shared(Path(self.folder), others["model_parts"][0])

    def dcp_save(
        self, state_dict: dict[str, Any], checkpoint_id: str, *others: Any, **options: Any
    ) -> Any:
        """Saves the state of the replicas first, and then torchtitan's state. Collective.

        torchtitan writes its metadata last. A checkpoint without metadata is not valid.
        """
        if OPTIMIZER in state_dict:
            optimizers: ReplicaOptimizers = state_dict[OPTIMIZER]
            (model,) = optimizers.model_parts
            extra = {"bytes_sent": optimizers.bytes_sent}
            save_checkpoint(
                Path(checkpoint_id, "detonation"), model, optimizers.replicated, extra, keep=1
            )
            if optimizers.replicated.coordinates.replica:
                state_dict = {DATALOADER: state_dict[DATALOADER]}
        return super().dcp_save(state_dict, checkpoint_id, *others, **options)

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, *others: Any, **options: Any
    ) -> None:
        """Loads torchtitan's state first, and then the state of the replicas. Collective.

        Raises `ValueError` if the state of the replicas is missing, or if it belongs to another
        model, optimizer or scheme.
        """
        super().dcp_load(state_dict, checkpoint_id, *others, **options)
        if OPTIMIZER in state_dict:
            optimizers: ReplicaOptimizers = state_dict[OPTIMIZER]
            own = Path(checkpoint_id, "detonation")
            (model,) = optimizers.model_parts
            loaded = load_checkpoint(own, model, optimizers.replicated)
            if loaded is None:
                remedy = (
                    "set load_step to an earlier step, or set initial_load_path to load only the"
                    " model of this checkpoint"
                )
                raise ValueError(
                    f"{checkpoint_id} has no directory detonation, the state of the replicas:"
                    f" {remedy}"
                )
            optimizers.sent_before = (
                int(loaded.extra["bytes_sent"]) - optimizers.replicated.stats.bytes_sent
            )


def check_dimensions(dims: ParallelDims) -> None:
    """Raises `ValueError` if `dims` has parallel dimensions that replicas do not support."""
    if dims.dp_replicate < 2:
        raise ValueError(
            f"parallelism.data_parallel_replicate_degree is {dims.dp_replicate}, must be the number"
            " of replicas, usually of nodes, and at least 2"
        )
    for name in ("pipeline", "tensor", "context", "expert"):
        if (degree := getattr(dims, f"{name[0]}p")) > 1:  # the fields are pp, tp, cp and ep
            raise ValueError(
                f"parallelism.{name}_parallel_degree is {degree}, must be 1: only FSDP may"
                " shard a replica"
            )
    if dims.spmd_backend != "partial_dtensor":
        raise ValueError(
            f"parallelism.spmd_backend is {dims.spmd_backend}, which makes parameters of all"
            " replicas one tensor: leave it at partial_dtensor"
        )


def parsed_scheme(text: str) -> Scheme:
    """Parses a scheme: `NAME`, or `NAME={"argument": value}` as in torchtitan's own overrides.

    Raises `ValueError` if the text has another form.

    Example:
        >>> parsed_scheme('demo={"topk": 2}').arguments["topk"]
        2
    """
    name, _, arguments = text.partition("=")
    try:
        found = json.loads(arguments or "{}")
    except json.JSONDecodeError as error:
        raise ValueError(f"optimizer.scheme is {text!r}: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(
            f'optimizer.scheme is {text!r}, must be a name, or NAME={{"argument": value}}'
        )
    return scheme_named(name, found)


# `__getattr__` is hidden from type checkers, so that these still report undefined names
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Callable[[], Trainer.Config]:
        """Finds the function that `--config MODULE.FUNCTION` names, in torchtitan or in your own
        module. Adds replicas to the configuration that this function returns.
        """
        module, dot, function = name.rpartition(".")
        if not dot:
            raise AttributeError(
                f"module {__name__} has no attribute {name!r}; --config takes MODULE.FUNCTION"
            )
        config, _ = ConfigManager()._load_config(["--module", module, "--config", function])
        return lambda: with_replicas(config)
