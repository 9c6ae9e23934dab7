"""`ReplicaStrategy`: replication in the Trainer of Lightning."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.optim import Optimizer

from detonation.checkpoint.gather import Texts, Volumes, device_of, survey
from detonation.choices import checks_keywords
from detonation.cluster.init import GROUP_TIMEOUT_S
from detonation.cluster.mesh import shard
from detonation.core.agreement.safety import Safety
from detonation.core.optimizer.replicated import Replicated
from detonation.core.schemes.scheme import Scheme
from detonation.integrations.fabric import PART, ReplicatedWorld, forget_replicas, refuse_scaler

try:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.model_helpers import is_overridden
except ImportError as error:
    raise ImportError(f"{error}: ReplicaStrategy needs pip install 'detonation-torch[lightning]'") from error

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class ReplicaStrategy(ReplicatedWorld, ModelParallelStrategy):
    """Trains a LightningModule sharded inside each replica (FSDP2), whose replicas communicate by `scheme`.

    The module stays as it is. The whole of it is sharded, unless it has a `configure_model`, which then shards it over
    `self.device_mesh["shard"]`. Optimizers, schedulers, accumulation and bf16 work as ever, and every rank gets its own
    batches. `gradient_clip_val` clips by the global norm of the gradients that the replicas agreed on. The logs get
    `bytes_sent` of this rank, counted on after a resume, and `waited_s` since the start of the process. At the end of
    `fit` all replicas hold the same weights.

    A checkpoint is a directory: Lightning's own, with the weights of replica 0 for evaluation and for other strategies,
    and beside them the exact state of every rank. `fit(ckpt_path=...)` from a checkpoint that was saved during `fit`
    goes on bit for bit, also in another process and in the middle of a round; with other numbers of replicas and shards
    as `load_checkpoint` describes.

    Args:
        scheme: How the replicas communicate, such as `loco()`, or its name.
        replicas: Copies of the model; "auto" for the number of nodes.
        shards: Ranks that share a copy; "auto" for the devices of a node.
        seed: Of the random selections.
        kernels: Use compiled kernels where they can be built (g++), on all replicas or none.
        safety: The reaction to gradients that are not finite, and to replicas out of sync.
        clip: As `gradient_clip_val`, which Lightning does not take under manual optimization.
        process_group_backend, timeout: As in Lightning's own strategies.

    Raises:
        ValueError: At `fit`, where Lightning would scale losses (`precision="16-mixed"`) or clip by value, where the
            optimizer is replicated already, or where replicas x shards is not the number of ranks.
        ImportError: Lightning is not installed.

    Example:
        >>> import detonation as dt
        >>> from lightning.pytorch import Trainer
        >>> strategy = ReplicaStrategy(replicas=2, shards=8, scheme=dt.loco())
        >>> Trainer(accelerator="cpu", devices=8, num_nodes=2, strategy=strategy, logger=False).strategy is strategy
        True
    """

    _optimizers: list[Optimizer]

    @checks_keywords("argument of ReplicaStrategy")
    def __init__(
        self,
        scheme: Scheme | str,
        replicas: int | Literal["auto"] = "auto",
        shards: int | Literal["auto"] = "auto",
        *,
        seed: int = 0,
        kernels: bool = True,
        safety: Safety | None = None,
        clip: float | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(seconds=GROUP_TIMEOUT_S),
    ) -> None:
        super().__init__(replicas, shards, process_group_backend=process_group_backend, timeout=timeout)
        self._scheme, self._own_clip, self._clip = scheme, clip, 0.0
        self._volumes: dict[Path, Volumes] = {}  # of the directories that checkpoints were saved to
        self._options: dict[str, Any] = {"seed": seed, "kernels": kernels, "safety": safety}

    @property
    def replicated(self) -> list[Replicated]:
        """The optimizers of `fit`, which hold the numbers (`stats`) and the state of the replicas."""
        return [optimizer for optimizer in self.optimizers if isinstance(optimizer, Replicated)]

    def setup_environment(self) -> None:
        """Joins the world, and makes the mesh ("replicate", "shard")."""
        self.join()
        module = self.lightning_module
        assert module is not None
        module._device_mesh = self._device_mesh
        if not is_overridden("configure_model", module):
            module.configure_model = partial(self._shard, module)  # type: ignore[method-assign]

    def setup(self, trainer: Trainer) -> None:
        """Refuses what would part the replicas, and sets up the model and its optimizers."""
        refuse_scaler(self.precision_plugin)
        self._clip = self._own_clip or trainer.gradient_clip_val or 0.0
        if self._clip and trainer.gradient_clip_algorithm == "value":
            _refuse_value(None, self._clip)
        super().setup(trainer)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Replicates the optimizers that the module configures, after schedulers were attached to them."""
        super().setup_optimizers(trainer)
        assert self.model is not None
        clip, plain = self._clip or None, list(self._optimizers)
        made: list[Optimizer] = [self.replicated_by_scheme(optimizer, self.model, clip) for optimizer in plain]
        self.optimizers, self.sent_before = made, 0

    def setup_precision_plugin(self) -> None:
        """Takes clipping over from Lightning, which would clip each replica's gradients before the exchange."""
        super().setup_precision_plugin()
        self.precision_plugin.clip_grad_by_norm = self._leave_clipping  # type: ignore[method-assign]
        self.precision_plugin.clip_grad_by_value = _refuse_value  # type: ignore[method-assign]

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Takes the step, and logs what it sent."""
        output = super().optimizer_step(optimizer, closure, *args, **kwargs)
        assert self.lightning_module is not None
        wide = {"bytes_sent": self.bytes_sent, "waited_s": sum(each.stats.waited_s for each in self.replicated)}
        self.lightning_module.log_dict({name: torch.tensor(float(value)) for name, value in wide.items()})
        return output

    def on_train_end(self) -> None:
        """Ends open rounds, so that all replicas hold the same weights. Collective."""
        super().on_train_end()
        for optimizer in self.replicated:
            optimizer.synchronize()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights of replica 0, by its ranks; torch would mix those of several replicas under one name."""
        if self.device_mesh["replicate"].get_local_rank():
            return {}
        state = super().lightning_module_state_dict()
        return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Nothing: `save_checkpoint` saves it, exactly and for each replica."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Saves Lightning's own checkpoint, and with the state of training that of every rank. Collective."""
        path, trains = Path(self.broadcast(filepath)), bool(checkpoint.pop("optimizer_states", None))
        super().save_checkpoint(checkpoint, path, storage_options)
        assert self.model is not None
        self.save_exactly(path, self.model, self.replicated if trains else [])
        if path.parent not in self._volumes:
            self._volumes[path.parent] = survey(path.parent, Texts(device_of(self.model)))

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes a checkpoint from each disk that it was saved to: nodes may share no file system."""
        path = Path(filepath)
        volumes = self._volumes.get(path.parent)
        if self.is_global_zero or (volumes and volumes.leads(self.global_rank) and (path / PART).is_dir()):
            self.checkpoint_io.remove_checkpoint(filepath)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads the state of training, or for evaluation the weights alone. Collective.

        Raises:
            ValueError: The checkpoint is of another model, optimizer or scheme, or the rest of it cannot be read.
        """
        path = Path(self.broadcast(checkpoint_path))
        assert self.model is not None and self.lightning_module is not None
        kept, fits = self._optimizers, self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        if fits and (own := self.load_exactly(path, self.model, self.replicated, weights_only)) is not None:
            return own
        try:
            # those of an earlier fit are no part of an evaluation, and in `fit` the checkpoint is of another strategy
            self._optimizers = [each.base for each in self.replicated] if fits else []
            rest = super().load_checkpoint(path, weights_only)
        finally:
            self._optimizers = kept
        forget_replicas(self.replicated if fits else [])
        return rest

    def _shard(self, module: LightningModule) -> None:
        """Shards the whole of a module without a `configure_model` of its own, whose steps are then its forward."""
        if isinstance(module, FSDPModule):
            return
        shard(module.to(self.root_device), self.device_mesh)
        for name in _STEPS:
            register_fsdp_forward_method(module, name)

    def _leave_clipping(self, optimizer: Optimizer, clip_val: float) -> None:
        if clip_val != self._clip:
            raise ValueError(
                f"the module clips to {clip_val}, before the exchange: set Trainer(gradient_clip_val={clip_val}), or "
                f"under manual optimization ReplicaStrategy(..., clip={clip_val})"
            )


def _refuse_value(optimizer: Optimizer | None, clip_val: float) -> None:
    raise ValueError('gradients are clipped after the exchange, by norm: gradient_clip_algorithm="norm"')
