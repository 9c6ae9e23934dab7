"""The state of a training in the format of torch.distributed.checkpoint."""

from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from detonation.core.link.coordinates import alike
from detonation.core.optimizer.replicated import Replicated
from detonation.core.optimizer.state import fitting_state, load_replica_state, replica_state


class TrainingState(Stateful):
    """A model and its replicated optimizer as one `Stateful`: `dcp.save({"app":
    TrainingState(model, optimizer)})`.

    The state that all replicas share has shared keys, which torch.distributed.checkpoint writes
    once; private state has keys that name replica and shard. A world with other replicas or shards
    misses its keys and is refused by name. All ranks call save and load. For reading and writing
    torch's format only: it unpickles its own metadata, and is neither atomic nor checked;
    `detonation.save_checkpoint` is.

    Raises:
        KeyError: While loading, where the saved world had other replicas or shards.

    Example:
        >>> import torch, detonation as dt
        >>> from detonation.cluster.network.loopback import LoopbackCommunicator
        >>> model = nn.Linear(2, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = dt.replicate(sgd, model, LoopbackCommunicator(), dt.full())
        >>> sorted(TrainingState(model, optimizer).state_dict())
        ['model', 'optimizer', 'replication']
    """

    def __init__(self, model: nn.Module, optimizer: Replicated) -> None:
        self._model, self._optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        """The state under keys that torch.distributed.checkpoint may merge. Collective."""
        optimizer = self._optimizer
        optimizer.set_up()
        model, base = get_state_dict(self._model, optimizer)
        copies = {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in model.items()
        }
        training = {"model": copies, "optimizer": base}
        coordinates = optimizer.coordinates
        shared = (
            training if alike(optimizer.levels) else {f"replica{coordinates.replica}": training}
        )
        return {**shared, "replication": {coordinates.name: replica_state(optimizer)}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the result of `state_dict` of the same world. Collective.

        A state of replicas that does not fit is refused before anything has changed.
        """
        optimizer = self._optimizer
        coordinates = optimizer.coordinates
        private = state_dict["replication"][coordinates.name]
        fitting_state(optimizer, private)
        training = (
            state_dict if alike(optimizer.levels) else state_dict[f"replica{coordinates.replica}"]
        )
        set_state_dict(
            self._model,
            optimizer,
            model_state_dict=training["model"],
            optim_state_dict=training["optimizer"],
        )
        load_replica_state(optimizer, private)
