"""`ReplicaStrategy`: a strategy with which Lightning's Trainer trains replicas."""

import shutil
import signal
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.optim import Optimizer

from detonation.checkpoint.async_save import save_checkpoint
from detonation.checkpoint.gather import Texts, Volumes, device_of, survey
from detonation.checkpoint.newest import load_checkpoint
from detonation.choices import checks_keywords
from detonation.cluster.init import GROUP_TIMEOUT_S
from detonation.cluster.mesh import init_mesh, shard
from detonation.core.agreement import Safety
from detonation.core.link import Axis, Link
from detonation.core.optimizer import Replicated, replicate
from detonation.core.schemes import Scheme

try:
    from lightning.fabric.utilities.load import _METADATA_FILENAME
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
    from lightning.pytorch.strategies import ModelParallelStrategy
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.model_helpers import is_overridden
except ImportError as error:
    raise ImportError(
        f"{error}: ReplicaStrategy needs pip install '.[lightning]' in a clone"
    ) from error

PART = "detonation"
"""Name of the directory in a checkpoint that holds the exact state of every rank. Lightning writes
the rest of the checkpoint.
"""
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class ReplicaStrategy(ModelParallelStrategy):
    """Trains a LightningModule with FSDP2 inside each replica, and with `scheme` between replicas.

    The LightningModule needs no change. The strategy shards the whole module. If the module has a
    `configure_model`, that method must shard the module over `self.device_mesh["shard"]` instead.
    Optimizers, schedulers, accumulation and bf16 work as before, and each rank gets different
    batches. `gradient_clip_val` clips by the global norm of the gradients on which replicas agree.
    The logs contain the `bytes_sent` of this rank, including bytes of the runs that this run
    resumes. They also contain the rank's `waited_s` since the process started. At the end of `fit`
    all replicas hold the same weights.

    A checkpoint is a Lightning directory. It contains the weights of replica 0, for evaluation and
    for other strategies, and the exact state of every rank. From a checkpoint of `fit`,
    `fit(ckpt_path=...)` continues bit for bit, even in another process and in the middle of a
    round. See `detonation.load_checkpoint` for a different number of replicas or shards.

    Args:
        scheme: Scheme between the replicas, such as `loco()`, or its name.
        replicas: Copies of the model; "auto" for the number of nodes.
        shards: Ranks that share a copy; "auto" for the devices of a node.
        seed: Seed of random selections.
        kernels: Use compiled kernels if all replicas can build them (g++).
        safety: Reaction to gradients that are not finite, and to replicas out of sync.
        clip: Same as `gradient_clip_val`, which Lightning refuses under manual optimization.
        axis: Axis between replicas with separate process groups, such as the axis of `elastic`;
            create the axis after `init_mesh(1)`. Each replica then saves to its own directory.
            SIGTERM to a rank makes its replica leave: `fit` raises `ReplicaLeft`.
        process_group_backend, timeout: Same as in Lightning's strategies.

    Raises:
        ValueError: `replicas` and `axis` are both given. In `fit`: Lightning would scale losses
            (`precision="16-mixed"`) or clip by value, a callback would average weights, the
            optimizer is replicated already, or replicas x shards is not the number of ranks.
        ImportError: Lightning is not installed.

    Example:
        >>> import detonation as dt
        >>> from lightning.pytorch import Trainer
        >>> strategy = ReplicaStrategy(replicas=2, shards=8, scheme=dt.loco())
        >>> options = {"accelerator": "cpu", "devices": 8, "num_nodes": 2, "logger": False}
        >>> Trainer(strategy=strategy, **options).strategy is strategy
        True
    """

    _optimizers: list[Optimizer]
    sent_before = 0
    """The part of `bytes_sent` from the runs that this run resumes."""

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
        axis: Axis | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(seconds=GROUP_TIMEOUT_S),
    ) -> None:
        if axis is not None and replicas != "auto":
            raise ValueError(
                f"replicas is {replicas}, must be left out with an axis, because the axis gives the"
                " number of replicas"
            )
        if axis is not None:
            replicas = 1
        super().__init__(
            replicas, shards, process_group_backend=process_group_backend, timeout=timeout
        )
        self._axis = axis
        self._scheme = scheme
        self._own_clip = clip
        self._clip = 0.0
        # for each directory of checkpoints: the volumes, and the ranks that see each volume
        self._volumes: dict[Path, Volumes] = {}
        self._options: dict[str, Any] = {"seed": seed, "kernels": kernels, "safety": safety}

    @property
    def replicated(self) -> list[Replicated]:
        """The optimizers of `fit`, which hold `stats` and the state of the replicas."""
        return [optimizer for optimizer in self.optimizers if isinstance(optimizer, Replicated)]

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent to other replicas, including bytes of the runs that this
        run resumes.
        """
        return self.sent_before + sum(optimizer.stats.bytes_sent for optimizer in self.replicated)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of the sampler with which each rank gets different batches, even if ranks are
        shards of the same replica.
        """
        replicas = 1
        replica = 0
        if self._axis is not None:
            replicas = self._axis.size()
            replica = Link(self._axis).replica
        return {
            "num_replicas": replicas * self.world_size,
            "rank": replica * self.world_size + self.global_rank,
        }

    def setup_environment(self) -> None:
        """Joins the process group, and creates the mesh with the axes "replicate" and "shard".

        Refuses callbacks that average weights.
        """
        self._setup_distributed()
        replicas = self._data_parallel_size
        if replicas == "auto":
            replicas = self.num_nodes
        shards = self._tensor_parallel_size
        if shards == "auto":
            shards = self.num_processes
        self._device_mesh = init_mesh(replicas, shards, self.root_device.type)
        module = self.lightning_module
        assert module is not None
        # refuse before Lightning sets up its callbacks: `WeightAveraging` copies the model there
        for callback in module.trainer.callbacks:
            if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
                raise ValueError(
                    f"{type(callback).__name__} cannot average sharded weights: leave this"
                    " callback out"
                )
        module._device_mesh = self._device_mesh
        if not is_overridden("configure_model", module):
            module.configure_model = partial(self._shard, module)  # type: ignore[method-assign]

    def setup(self, trainer: Trainer) -> None:
        """Refuses settings that would make replicas different. Then sets up the model and the
        optimizers.
        """
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise ValueError(
                'precision="16-mixed" scales the loss of each replica by a factor of its own:'
                ' use "bf16-mixed"'
            )
        self._clip = self._own_clip or trainer.gradient_clip_val or 0.0
        if self._clip and trainer.gradient_clip_algorithm == "value":
            _refuse_value(None, self._clip)
        super().setup(trainer)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Replicates the optimizers of the module, after schedulers were attached to these
        optimizers.
        """
        super().setup_optimizers(trainer)
        assert self.model is not None
        if self.replicated:
            raise ValueError(
                "the optimizer is replicated already: give the plain optimizer, the strategy"
                " replicates it"
            )
        axis = self._axis or self.device_mesh["replicate"]
        clip = self._clip or None
        self.optimizers = [
            replicate(optimizer, self.model, axis, self._scheme, clip=clip, **self._options)
            for optimizer in self._optimizers
        ]
        self.sent_before = 0

    def setup_precision_plugin(self) -> None:
        """Replaces the clipping of Lightning, because Lightning would clip before the exchange."""
        super().setup_precision_plugin()
        plugin: Any = self.precision_plugin
        plugin.clip_grad_by_norm = self._leave_clipping
        plugin.clip_grad_by_value = _refuse_value

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Makes a step of the optimizer, and logs sent bytes and waiting time."""
        output = super().optimizer_step(optimizer, closure, *args, **kwargs)
        assert self.lightning_module is not None
        waited_s = sum(each.stats.waited_s for each in self.replicated)
        self.lightning_module.log_dict(
            {
                "bytes_sent": torch.tensor(float(self.bytes_sent)),
                "waited_s": torch.tensor(float(waited_s)),
            }
        )
        return output

    def on_train_start(self) -> None:
        """Makes this replica leave the run at SIGTERM, if the axis is elastic.

        Lightning's own handler of SIGTERM would wait for the other replicas.
        """
        super().on_train_start()
        if (depart := getattr(self._axis, "depart", None)) and current_thread() is main_thread():
            signal.signal(signal.SIGTERM, lambda *_: depart())

    def on_train_end(self) -> None:
        """Completes open rounds, so that all replicas hold the same weights. Collective."""
        super().on_train_end()
        for optimizer in self.replicated:
            optimizer.synchronize()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the weights on the ranks of replica 0, and {} on all other ranks. If several
        replicas saved weights, torch would mix up tensors of equal names.
        """
        if self.device_mesh["replicate"].get_local_rank():
            return {}
        state = super().lightning_module_state_dict()
        for key, value in state.items():
            if isinstance(value, Tensor):
                state[key] = value.clone()
        return state

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns an empty state, because `save_checkpoint` saves the exact state of each
        replica.
        """
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Saves Lightning's checkpoint and, during training, also the exact state of every rank.
        Collective.
        """
        path = Path(self.broadcast(filepath))
        trains = bool(checkpoint.pop("optimizer_states", None))
        assert self.model is not None
        # remove old metadata first, so that after an interrupted save the metadata is missing
        if self.is_global_zero and path.is_dir():
            (path / _METADATA_FILENAME).unlink(missing_ok=True)
        if self.local_rank == 0:  # another run may have left the state of a later step here
            shutil.rmtree(path / PART, ignore_errors=True)
        self.barrier()
        if trains:
            extra = {"bytes_sent": self.bytes_sent}
            for number, optimizer in enumerate(self.replicated):
                save_checkpoint(path / PART / str(number), self.model, optimizer, extra, keep=1)
        super().save_checkpoint(checkpoint, path, storage_options)
        if path.parent not in self._volumes:
            self._volumes[path.parent] = survey(path.parent, Texts(device_of(self.model)))

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes a checkpoint from the disk of each node, because nodes need not share a file
        system.
        """
        path = Path(filepath)
        volumes = self._volumes.get(path.parent)
        leads = volumes is not None and volumes.leads(self.global_rank)
        if self.is_global_zero or (leads and (path / PART).is_dir()):
            self.checkpoint_io.remove_checkpoint(filepath)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads the state of training. For evaluation, loads only the weights. Collective.

        Raises:
            ValueError: The checkpoint belongs to another model, optimizer or scheme, or Lightning's
                part of the checkpoint cannot be read.
        """
        path = Path(self.broadcast(checkpoint_path))
        assert self.lightning_module is not None
        kept = self._optimizers
        fits = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        if fits and self.replicated and self.broadcast((path / PART).is_dir()):
            return self._load_exactly(path, weights_only)
        try:
            # An evaluation loads no optimizer state.
            # In `fit`, a checkpoint of another strategy has only states of base optimizers.
            self._optimizers = []
            if fits:
                self._optimizers = [each.base for each in self.replicated]
            rest = super().load_checkpoint(path, weights_only)
        finally:
            self._optimizers = kept
        # a state dict without "replication" empties all memories, and the next step logs a warning
        if fits:
            for optimizer in self.replicated:
                state = optimizer.state_dict()
                state.pop("replication", None)
                optimizer.load_state_dict(state)
        return rest

    def _load_exactly(self, path: Path, weights_only: bool | None) -> dict[str, Any]:
        """Loads the exact state of every rank, and returns the rest of the checkpoint.
        Collective.
        """
        assert self.model is not None
        # all ranks take the counts of rank 0, so that either all ranks refuse or none
        written = self.broadcast(len([*(path / PART).glob("[0-9]*")]))
        whole = self.broadcast((path / _METADATA_FILENAME).exists())
        if whole and written != len(self.replicated):
            raise ValueError(
                f"{path} was written with {written} optimizers, but this run has"
                f" {len(self.replicated)}: resume with as many optimizers"
            )
        for number, optimizer in enumerate(self.replicated):
            part = path / PART / str(number)
            loaded = load_checkpoint(part, self.model, optimizer)
            if loaded is None:
                raise ValueError(
                    f"{part} holds no checkpoint, because its save was cut short: give ckpt_path"
                    " the path of an earlier checkpoint"
                )
            self.sent_before += int(loaded.extra.get("bytes_sent", 0)) - self.bytes_sent
        rest = dict[str, Any]()
        problem = ""
        try:
            if self.is_global_zero:
                rest = torch.load(path / _METADATA_FILENAME, weights_only=weights_only)
        except FileNotFoundError:
            problem = "its save was cut short; give ckpt_path the path of an earlier checkpoint"
        except Exception as error:
            # catch any error of a damaged file, because other ranks wait for the result
            problem = f"{type(error).__name__}: {error}"
        # send the result of rank 0 to all ranks, because nodes need not share a file system
        rest, problem = self.broadcast((rest, problem))
        if problem:
            raise ValueError(f"{path / _METADATA_FILENAME} cannot be loaded: {problem}")
        return rest

    def _shard(self, module: LightningModule) -> None:
        """Shards a module that has no `configure_model`. FSDP2 then gathers the parameters before
        each call of a step method, such as `training_step`, as before a call of `forward`.
        """
        if isinstance(module, FSDPModule):
            return
        shard(module.to(self.root_device), self.device_mesh)
        for name in _STEPS:
            register_fsdp_forward_method(module, name)

    def _leave_clipping(self, optimizer: Optimizer, clip_val: float) -> None:
        if clip_val != self._clip:
            raise ValueError(
                f"the module clips to {clip_val}, before the exchange: set"
                f" Trainer(gradient_clip_val={clip_val}), or under manual optimization"
                f" ReplicaStrategy(..., clip={clip_val})"
            )


def _refuse_value(optimizer: Optimizer | None, clip_val: float) -> None:
    raise ValueError(
        'gradients are clipped after the exchange, by norm: set gradient_clip_algorithm="norm"'
    )
