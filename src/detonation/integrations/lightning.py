"""`ReplicaStrategy`: replication in the Trainer of Lightning."""

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
from detonation.core.agreement.safety import Safety
from detonation.core.link.communicator import Axis
from detonation.core.link.link import Link
from detonation.core.optimizer.replicate import replicate
from detonation.core.optimizer.replicated import Replicated
from detonation.core.schemes.scheme import Scheme

try:
    from lightning.fabric.utilities.load import _METADATA_FILENAME
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import StochasticWeightAveraging
    from lightning.pytorch.strategies import ModelParallelStrategy
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.model_helpers import is_overridden
except ImportError as error:
    raise ImportError(
        f"{error}: ReplicaStrategy needs pip install '.[lightning]' in a clone"
    ) from error

PART = "detonation"
"""The part of a checkpoint with the exact state of every rank; the rest is Lightning's own."""
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class ReplicaStrategy(ModelParallelStrategy):
    """Trains a LightningModule sharded inside each replica (FSDP2), whose replicas communicate by
    `scheme`.

    The module stays as it is. The whole of it is sharded, unless it has a `configure_model`, which
    then shards it over `self.device_mesh["shard"]`. Optimizers, schedulers, accumulation and bf16
    work as ever, and every rank gets its own batches. `gradient_clip_val` clips by the global norm
    of the gradients that the replicas agreed on. The logs get `bytes_sent` of this rank, counted on
    after a resume, and `waited_s` since the start of the process. At the end of `fit` all replicas
    hold the same weights.

    A checkpoint is a directory: Lightning's own, with the weights of replica 0 for evaluation and
    for other strategies, and beside them the exact state of every rank. `fit(ckpt_path=...)` from a
    checkpoint that was saved during `fit` goes on bit for bit, also in another process and in the
    middle of a round; with other numbers of replicas and shards as `load_checkpoint` describes.

    Args:
        scheme: How the replicas communicate, such as `loco()`, or its name.
        replicas: Copies of the model; "auto" for the number of nodes.
        shards: Ranks that share a copy; "auto" for the devices of a node.
        seed: Of the random selections.
        kernels: Use compiled kernels where they can be built (g++), on all replicas or none.
        safety: The reaction to gradients that are not finite, and to replicas out of sync.
        clip: As `gradient_clip_val`, which Lightning does not take under manual optimization.
        axis: Between replicas that are worlds of their own, such as that of `elastic`; made after
            `init_mesh(1)`. Each then saves to a directory of its own, and SIGTERM to a rank lets
            its replica leave: `ReplicaLeft` in `fit`.
        process_group_backend, timeout: As in Lightning's own strategies.

    Raises:
        ValueError: `replicas` and `axis` are both given; at `fit`, where Lightning would scale
            losses (`precision="16-mixed"`) or clip by value, where a callback would average
            weights, where the optimizer is replicated already, or where replicas x shards is not
            the number of ranks.
        ImportError: Lightning is not installed.

    Example:
        >>> import detonation as dt
        >>> from lightning.pytorch import Trainer
        >>> strategy = ReplicaStrategy(replicas=2, shards=8, scheme=dt.loco())
        >>> Trainer(accelerator="cpu", devices=8, num_nodes=2, strategy=strategy, logger=False).strategy is strategy
        True
    """

    _optimizers: list[Optimizer]
    sent_before = 0
    """Bytes that `bytes_sent` counts beside those of this run."""

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
                f"replicas is {replicas}, must be left out with an axis, which has their number"
            )
        replicas = replicas if axis is None else 1
        super().__init__(
            replicas, shards, process_group_backend=process_group_backend, timeout=timeout
        )
        self._axis = axis
        self._scheme, self._own_clip, self._clip = scheme, clip, 0.0
        self._volumes: dict[Path, Volumes] = {}  # of the directories that checkpoints were saved to
        self._options: dict[str, Any] = {"seed": seed, "kernels": kernels, "safety": safety}

    @property
    def replicated(self) -> list[Replicated]:
        """The optimizers of `fit`, which hold the numbers (`stats`) and the state of the replicas."""
        return [optimizer for optimizer in self.optimizers if isinstance(optimizer, Replicated)]

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent to its replicas, in this run and in those that it resumes."""
        return self.sent_before + sum(optimizer.stats.bytes_sent for optimizer in self.replicated)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Every rank gets its own batches, the shards of a replica too."""
        replicas, replica = (
            (1, 0) if self._axis is None else (self._axis.size(), Link(self._axis).replica)
        )
        return {
            "num_replicas": replicas * self.world_size,
            "rank": replica * self.world_size + self.global_rank,
        }

    def setup_environment(self) -> None:
        """Joins the world, and makes the mesh ("replicate", "shard")."""
        self._setup_distributed()
        replicas = (
            self.num_nodes if self._data_parallel_size == "auto" else self._data_parallel_size
        )
        shards = (
            self.num_processes
            if self._tensor_parallel_size == "auto"
            else self._tensor_parallel_size
        )
        self._device_mesh = init_mesh(replicas, shards, self.root_device.type)
        module = self.lightning_module
        assert module is not None
        module._device_mesh = self._device_mesh
        if not is_overridden("configure_model", module):
            module.configure_model = partial(self._shard, module)  # type: ignore[method-assign]

    def setup(self, trainer: Trainer) -> None:
        """Refuses what would part the replicas, and sets up the model and its optimizers."""
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise ValueError(
                'precision="16-mixed" scales the loss of each replica by itself: use "bf16-mixed"'
            )
        if any(isinstance(callback, StochasticWeightAveraging) for callback in trainer.callbacks):
            raise ValueError(
                "StochasticWeightAveraging cannot write shards, its average would be lost: leave"
                " it out"
            )
        self._clip = self._own_clip or trainer.gradient_clip_val or 0.0
        if self._clip and trainer.gradient_clip_algorithm == "value":
            _refuse_value(None, self._clip)
        super().setup(trainer)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Replicates the optimizers that the module configures, after schedulers were attached to
        them."""
        super().setup_optimizers(trainer)
        assert self.model is not None
        if self.replicated:
            raise ValueError(
                "the optimizer is replicated already: give the plain one, the strategy"
                " replicates it"
            )
        axis, clip = self._axis or self.device_mesh["replicate"], self._clip or None
        self.optimizers = [
            replicate(optimizer, self.model, axis, self._scheme, clip=clip, **self._options)
            for optimizer in self._optimizers
        ]
        self.sent_before = 0

    def setup_precision_plugin(self) -> None:
        """Takes clipping over from Lightning, which would clip each replica's gradients before the
        exchange."""
        super().setup_precision_plugin()
        self.precision_plugin.clip_grad_by_norm = self._leave_clipping  # type: ignore[method-assign]
        self.precision_plugin.clip_grad_by_value = _refuse_value  # type: ignore[method-assign]

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Takes the step, and logs what it sent."""
        output = super().optimizer_step(optimizer, closure, *args, **kwargs)
        assert self.lightning_module is not None
        wide = {
            "bytes_sent": self.bytes_sent,
            "waited_s": sum(each.stats.waited_s for each in self.replicated),
        }
        self.lightning_module.log_dict(
            {name: torch.tensor(float(value)) for name, value in wide.items()}
        )
        return output

    def on_train_start(self) -> None:
        """Lets SIGTERM ask this replica of an elastic axis to leave; Lightning's handler would wait
        for the others."""
        super().on_train_start()
        if (depart := getattr(self._axis, "depart", None)) and current_thread() is main_thread():
            signal.signal(signal.SIGTERM, lambda *_: depart())

    def on_train_end(self) -> None:
        """Ends open rounds, so that all replicas hold the same weights. Collective."""
        super().on_train_end()
        for optimizer in self.replicated:
            optimizer.synchronize()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights of replica 0, by its ranks; torch would mix those of several replicas under
        one name."""
        if self.device_mesh["replicate"].get_local_rank():
            return {}
        state = super().lightning_module_state_dict()
        return {
            key: value.clone() if isinstance(value, Tensor) else value
            for key, value in state.items()
        }

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Nothing: `save_checkpoint` saves it, exactly and for each replica."""
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Saves Lightning's own checkpoint, and with the state of training that of every rank.

        Collective.
        """
        path, trains = (
            Path(self.broadcast(filepath)),
            bool(checkpoint.pop("optimizer_states", None)),
        )
        assert self.model is not None
        # Lightning writes its metadata last: a save that a kill cuts short has none.
        if self.is_global_zero and path.is_dir():
            (path / _METADATA_FILENAME).unlink(missing_ok=True)
        if self.local_rank == 0:  # of another run, which may have come further
            shutil.rmtree(path / PART, ignore_errors=True)
        self.barrier()
        for number, optimizer in enumerate(self.replicated if trains else ()):
            save_checkpoint(
                path / PART / str(number),
                self.model,
                optimizer,
                {"bytes_sent": self.bytes_sent},
                keep=1,
            )
        super().save_checkpoint(checkpoint, path, storage_options)
        if path.parent not in self._volumes:
            self._volumes[path.parent] = survey(path.parent, Texts(device_of(self.model)))

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes a checkpoint from each disk that it was saved to: nodes may share no file system."""
        path = Path(filepath)
        volumes = self._volumes.get(path.parent)
        if self.is_global_zero or (
            volumes and volumes.leads(self.global_rank) and (path / PART).is_dir()
        ):
            self.checkpoint_io.remove_checkpoint(filepath)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads the state of training, or for evaluation the weights alone. Collective.

        Raises:
            ValueError: The checkpoint is of another model, optimizer or scheme, or the rest of it
                cannot be read.
        """
        path = Path(self.broadcast(checkpoint_path))
        assert self.lightning_module is not None
        kept, fits = self._optimizers, self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        if fits and self.replicated and self.broadcast((path / PART).is_dir()):
            return self._load_exactly(path, weights_only)
        try:
            # those of an earlier fit are no part of an evaluation, and in `fit` the checkpoint is
            # of another strategy
            self._optimizers = [each.base for each in self.replicated] if fits else []
            rest = super().load_checkpoint(path, weights_only)
        finally:
            self._optimizers = kept
        for optimizer in (
            self.replicated if fits else ()
        ):  # whose base was loaded from elsewhere; the next step warns
            optimizer.load_state_dict(
                {k: v for k, v in optimizer.state_dict().items() if k != "replication"}
            )
        return rest

    def _load_exactly(self, path: Path, weights_only: bool | None) -> dict[str, Any]:
        """Loads the state of every rank, and returns the rest of the checkpoint. Collective."""
        assert self.model is not None
        for number, optimizer in enumerate(self.replicated):
            loaded = load_checkpoint(path / PART / str(number), self.model, optimizer)
            if loaded is None:
                raise ValueError(
                    f"{path} was written with {number} optimizers, there are {len(self.replicated)}"
                )
            self.sent_before += (
                int(loaded.extra.get("bytes_sent", 0)) - self.bytes_sent
            )  # as if it had not stopped
        rest, problem = dict[str, Any](), ""
        try:
            rest = (
                torch.load(path / _METADATA_FILENAME, weights_only=weights_only)
                if self.is_global_zero
                else {}
            )
        except FileNotFoundError:
            problem = "its save was cut short; give ckpt_path the path of an earlier checkpoint"
        except Exception as error:  # the file may hold anything, and the others wait
            problem = f"{type(error).__name__}: {error}"
        rest, problem = self.broadcast((rest, problem))  # nodes may share no file system
        if problem:
            raise ValueError(f"{path / _METADATA_FILENAME} cannot be loaded: {problem}")
        return rest

    def _shard(self, module: LightningModule) -> None:
        """Shards the whole of a module without a `configure_model` of its own, whose steps are then
        its forward."""
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
        'gradients are clipped after the exchange, by norm: gradient_clip_algorithm="norm"'
    )
