"""`FabricReplicaStrategy`: replication in Lightning's Fabric, and what the strategy of the Trainer shares with it."""

import shutil
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from detonation.checkpoint.async_save import save_checkpoint
from detonation.checkpoint.newest import load_checkpoint
from detonation.choices import checks_keywords
from detonation.cluster.init import GROUP_TIMEOUT_S
from detonation.cluster.mesh import init_mesh, shard
from detonation.core.agreement.safety import Safety
from detonation.core.optimizer.replicate import replicate
from detonation.core.optimizer.replicated import Replicated
from detonation.core.schemes.scheme import Scheme

try:
    from lightning.fabric.strategies.fsdp import _distributed_checkpoint_save
    from lightning.fabric.strategies.model_parallel import ModelParallelStrategy
    from lightning.fabric.utilities.load import _METADATA_FILENAME, _move_state_into
except ImportError as error:
    raise ImportError(f"{error}: the strategies need pip install 'detonation-torch[lightning]'") from error

PART = "detonation"
"""The part of a checkpoint with the exact state of every rank; the rest is Lightning's own."""


class ReplicatedWorld:
    """The parts that both strategies share, which have one interface to the world."""

    _device_mesh: DeviceMesh | None
    sent_before = 0
    """Bytes that `bytes_sent` counts beside those of this run."""

    @property
    def distributed_sampler_kwargs(self: Any) -> dict[str, Any]:
        """Every rank gets its own batches, the shards of a replica too."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def join(self: Any) -> None:
        """Joins the world, and makes the mesh ("replicate", "shard")."""
        self._setup_distributed()
        replicas = self.num_nodes if self._data_parallel_size == "auto" else self._data_parallel_size
        shards = self.num_processes if self._tensor_parallel_size == "auto" else self._tensor_parallel_size
        self._device_mesh = init_mesh(replicas, shards, self.root_device.type)

    def replicated_by_scheme(self: Any, optimizer: Optimizer, model: nn.Module, clip: float | None) -> Replicated:
        """Replicates an optimizer of `model`; raises `ValueError` for one that is replicated already."""
        if isinstance(optimizer, Replicated):
            raise ValueError("the optimizer is replicated already: give the plain one, the strategy replicates it")
        return replicate(optimizer, model, self.device_mesh["replicate"], self._scheme, clip=clip, **self._options)

    @property
    def bytes_sent(self: Any) -> int:
        """Bytes that this rank has sent to its replicas, in this run and in those that it resumes."""
        return self.sent_before + sum(optimizer.stats.bytes_sent for optimizer in self.replicated)

    def save_exactly(self: Any, path: Path, model: nn.Module, optimizers: Sequence[Replicated]) -> None:
        """Saves the state of every rank into the checkpoint `path`. Collective."""
        if self.local_rank == 0:  # of another run, which may have come further
            shutil.rmtree(path / PART, ignore_errors=True)
        self.barrier()
        for number, optimizer in enumerate(optimizers):
            save_checkpoint(path / PART / str(number), model, optimizer, {"bytes_sent": self.bytes_sent}, keep=1)

    def load_exactly(
        self: Any, path: Path, model: nn.Module, optimizers: Sequence[Replicated], weights_only: bool | None
    ) -> dict[str, Any] | None:
        """Loads the state of every rank, and returns the rest; None where `path` has no such state. Collective."""
        if not optimizers or not self.broadcast((path / PART).is_dir()):
            return None
        for number, optimizer in enumerate(optimizers):
            loaded = load_checkpoint(path / PART / str(number), model, optimizer)
            if loaded is None:
                raise ValueError(f"{path} was written with {number} optimizers, there are {len(optimizers)}")
            self.sent_before += int(loaded.extra.get("bytes_sent", 0)) - self.bytes_sent  # as if it had not stopped
        rest: dict[str, Any]
        rest, problem = self.broadcast(self._rest(path, weights_only))  # nodes may share no file system
        if problem:
            raise ValueError(f"{path / _METADATA_FILENAME} cannot be loaded: {problem}")
        return rest

    def _rest(self: Any, path: Path, weights_only: bool | None) -> tuple[dict[str, Any], str]:
        """The rest of a checkpoint, read on rank 0, or the reason why it cannot be: the others wait for either."""
        try:
            return (torch.load(path / _METADATA_FILENAME, weights_only=weights_only) if self.is_global_zero else {}), ""
        except Exception as error:  # the file may hold anything
            return {}, f"{type(error).__name__}: {error}"


def forget_replicas(optimizers: Sequence[Replicated]) -> None:
    """Drops what `optimizers` remember, after their base optimizers were loaded from elsewhere; the next step warns."""
    for optimizer in optimizers:
        state = optimizer.state_dict()
        del state["replication"]
        optimizer.load_state_dict(state)


def refuse_scaler(precision: object) -> None:
    """Raises `ValueError` where a precision plugin scales the loss."""
    if getattr(precision, "scaler", None) is not None:
        raise ValueError('precision="16-mixed" scales the loss of each replica by itself: use "bf16-mixed"')


class FabricReplicaStrategy(ReplicatedWorld, ModelParallelStrategy):
    """The same for Fabric: `fabric.setup` shards the model, and then `fabric.setup_optimizers` replicates.

    Optimizers are made after `fabric.setup(model)`. `fabric.save` and `fabric.load` of a state with the model and its
    optimizers are exact, as in `ReplicaStrategy`. Call `fabric.strategy.replicated[0].synchronize()` at the end of
    training; the numbers are in its `stats`.

    Args:
        scheme, replicas, shards, seed, kernels, safety: As in `ReplicaStrategy`.
        parallelize_fn: Shards the model over `mesh["shard"]`; by default `detonation.shard`.
        clip: The largest global norm of the gradients that the replicas agreed on; see `replicate`.
        process_group_backend, timeout: As in Lightning's own strategies.

    Raises:
        ValueError: In place of `fabric.clip_gradients`, which would clip before the exchange, and otherwise as in
            `ReplicaStrategy`.
        ImportError: Lightning is not installed.

    Example:
        >>> import detonation as dt
        >>> from lightning.fabric import Fabric
        >>> strategy = FabricReplicaStrategy(dt.loco(), replicas=2, shards=8, clip=1.0)
        >>> Fabric(accelerator="cpu", devices=8, num_nodes=2, strategy=strategy).strategy is strategy
        True
    """

    @checks_keywords("argument of FabricReplicaStrategy")
    def __init__(
        self,
        scheme: Scheme | str,
        replicas: int | Literal["auto"] = "auto",
        shards: int | Literal["auto"] = "auto",
        *,
        parallelize_fn: Callable[[nn.Module, DeviceMesh], nn.Module] | None = None,
        clip: float | None = None,
        seed: int = 0,
        kernels: bool = True,
        safety: Safety | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(seconds=GROUP_TIMEOUT_S),
    ) -> None:
        parallelize = parallelize_fn or (lambda module, mesh: shard(module.to(self.root_device), mesh))
        super().__init__(parallelize, replicas, shards, process_group_backend=process_group_backend, timeout=timeout)
        self._scheme, self._clip, self.replicated = scheme, clip, list[Replicated]()
        self._models: list[nn.Module] = []
        self._options: dict[str, Any] = {"seed": seed, "kernels": kernels, "safety": safety}

    def setup_environment(self) -> None:
        """Joins the world, and makes the mesh ("replicate", "shard")."""
        assert self.accelerator is not None
        self.accelerator.setup_device(self.root_device)
        self.join()

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shards the model."""
        self._models.append(super().setup_module(module))
        return self._models[-1]

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Replicates an optimizer of a model that was set up."""
        refuse_scaler(self.precision)
        mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        holding = [model for model in self._models if mine & {*map(id, model.parameters())}]
        self.replicated.append(self.replicated_by_scheme(optimizer, (holding or self._models)[-1], self._clip))
        return self.replicated[-1]

    def clip_gradients_norm(self, *args: Any, **kwargs: Any) -> Tensor:
        """Raises `ValueError`: the exchange comes first."""
        raise ValueError("fabric.clip_gradients clips before the exchange: FabricReplicaStrategy(..., clip=1.0)")

    clip_gradients_value = clip_gradients_norm  # type: ignore[assignment]

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Saves the weights of replica 0, the exact state of every rank, and the rest of `state`. Collective."""
        if storage_options is not None or filter is not None:
            raise ValueError("storage_options and filter are not supported: the checkpoint is a directory of all ranks")
        key, path, options = _key_of_model(state), Path(self.broadcast(path)), StateDictOptions(cpu_offload=True)
        path.mkdir(parents=True, exist_ok=True)
        first = self.device_mesh["replicate"].get_local_rank() == 0
        _distributed_checkpoint_save({key: get_model_state_dict(state[key], options=options)} if first else {}, path)
        if self.is_global_zero:
            rest = {k: each for k, each in state.items() if not isinstance(each, nn.Module | Optimizer)}
            torch.save(
                {k: e.state_dict() if hasattr(e, "state_dict") else e for k, e in rest.items()},
                path / _METADATA_FILENAME,
            )
        self.save_exactly(path, state[key], [each for each in state.values() if isinstance(each, Replicated)])

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads the exact state of every rank, or what another strategy saved, in place. Collective.

        Raises:
            ValueError: The checkpoint is of another model, optimizer or scheme, or the rest of it cannot be read.
        """
        path, found = Path(self.broadcast(path)), state if isinstance(state, dict) else {}
        optimizers = [each for each in found.values() if isinstance(each, Replicated)]
        model = next((each for each in found.values() if isinstance(each, nn.Module)), self._models[-1])
        rest = self.load_exactly(path, model, optimizers, weights_only)
        if rest is not None:
            _move_state_into(source=rest, destination=found, keys={*found})
            return rest
        if not optimizers:
            return super().load_checkpoint(path, state, strict, weights_only)
        # Lightning loads optimizers by the keys of their states, which replicas under schemes of parameters mark
        plain = {key: each.base if isinstance(each, Replicated) else each for key, each in found.items()}
        read = dict(plain)
        rest = super().load_checkpoint(path, read, strict, weights_only)
        _move_state_into(source=read, destination=found, keys={key for key in plain if read[key] is not plain[key]})
        forget_replicas(optimizers)
        return rest


def _key_of_model(state: dict[str, Any]) -> str:
    """The key of the model in a state of Fabric."""
    keys = [key for key, each in state.items() if isinstance(each, nn.Module)]
    if len(keys) != 1:
        found = f"models under {', '.join(keys)}" if keys else "no model"
        raise ValueError(f"the state has {found}, must have the one that fabric.setup returned")
    return keys[0]
