"""State of a run in the format of torch.distributed.checkpoint."""

from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from detonation.core.link import alike, sizes_of
from detonation.core.optimizer import Replicated, fitting_state, load_replica_state, replica_state


class TrainingState(Stateful):
    """A model and its replicated optimizer as one `Stateful`.

    Save it with `dcp.save({"app": TrainingState(model, optimizer)})`; all ranks call save and load.
    State that is equal on all replicas has the same keys on all replicas, so
    torch.distributed.checkpoint writes it once. State of one rank has keys that name its replica
    and shard.

    Use this class only if you need torch's format. This format unpickles its own metadata, and its
    save is neither atomic nor checked. A save by `detonation.save_checkpoint` is atomic and
    checked.

    Raises:
        ValueError: while loading, if the saved world had other replicas, shards or sizes of levels.
        CheckpointException: while loading, by torch, if the checkpoint lacks state of this rank, or
            an earlier version without the key "world" wrote it. To load the latter, pass
            `DefaultLoadPlanner(allow_partial_load=True)`.

    Example:
        >>> import torch, detonation as dt
        >>> from detonation.cluster.network.loopback import LoopbackCommunicator
        >>> model = nn.Linear(2, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = dt.replicate(sgd, model, LoopbackCommunicator(), dt.full())
        >>> sorted(TrainingState(model, optimizer).state_dict())
        ['model', 'optimizer', 'replication', 'world']
    """

    def __init__(self, model: nn.Module, optimizer: Replicated) -> None:
        self._model = model
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """The state of model and optimizer. State that is equal on all replicas has the same keys,
        so torch.distributed.checkpoint writes it once. All ranks must call this function together.
        """
        optimizer = self._optimizer
        optimizer.set_up()
        model, base = get_state_dict(self._model, optimizer)
        for name, value in model.items():
            if isinstance(value, Tensor):
                model[name] = value.clone()
        training = {"model": model, "optimizer": base}
        coordinates = optimizer.coordinates
        if alike(optimizer.levels):
            shared = training
        else:
            shared = {f"replica{coordinates.replica}": training}
        private = {coordinates.name: replica_state(optimizer)}
        return {**shared, "replication": private, "world": self._world}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` returned in a run with as many replicas and shards as this run
        has. All ranks must call this function together.

        Raises an error before any state has changed, if the state of this replica does not fit.
        """
        saved = state_dict.get("world", self._world)
        if saved != self._world:
            raise ValueError(
                f"the state was saved by {saved}, this run has {self._world}: resume with the same"
                " world, or save with detonation.save_checkpoint, which loads in other worlds"
            )
        optimizer = self._optimizer
        coordinates = optimizer.coordinates
        private = state_dict["replication"][coordinates.name]
        fitting_state(optimizer, private)
        if alike(optimizer.levels):
            training = state_dict
        else:
            training = state_dict[f"replica{coordinates.replica}"]
        set_state_dict(
            self._model,
            optimizer,
            model_state_dict=training["model"],
            optim_state_dict=training["optimizer"],
        )
        load_replica_state(optimizer, private)

    @property
    def _world(self) -> str:
        """The world of this run in words. State of other worlds has the same keys, in part."""
        own = self._optimizer.coordinates
        world = f"{own.replicas} replicas x {own.shards} shards"
        sizes = sizes_of(self._optimizer.levels)
        if len(sizes) > 1:
            world += f" on levels of {sizes} replicas"
        return world
