"""Checkpoint state: what a replica must keep to itself between runs, and how other tools may save it.

Memory, and in DiLoCo mid-round parameters and inner optimizer state, differ per replica. torch.distributed.checkpoint
takes equal keys on different ranks for one tensor and silently keeps one of them, so here they never are equal.
"""

from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from detonation.core.link.coordinates import alike
from detonation.core.optimizer.replicated import Replicated


def replica_state(optimizer: Replicated) -> dict[str, Tensor]:
    """Copies of the private state of this replica and shard: flat keys, tensors in the local shape of a parameter.

    Together with the model's and the base optimizer's state of the same rank it resumes exactly.
    """
    return optimizer.replica_state()


def load_replica_state(optimizer: Replicated, state: dict[str, Tensor]) -> None:
    """Goes on from `state`, after the model's weights were loaded. Raises `ValueError` where it does not fit."""
    optimizer.load_replica_state(state)


class TrainingState(Stateful):
    """A model and its replicated optimizer as one `Stateful`: `dcp.save({"app": TrainingState(model, optimizer)})`.

    What all replicas share stands under shared keys, which torch.distributed.checkpoint writes once; what differs,
    under keys that name replica and shard. A world with other replicas or shards misses its keys and is refused by
    name. All ranks call save and load. For reading and writing torch's format only: it unpickles its own metadata, and
    is neither atomic nor checked; `detonation.save_checkpoint` is.
    """

    def __init__(self, model: nn.Module, optimizer: Replicated) -> None:
        self._model, self._optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        optimizer = self._optimizer
        optimizer.set_up()
        with optimizer.settled():
            model, base = get_state_dict(self._model, optimizer)
            copies = {name: value.clone() if isinstance(value, Tensor) else value for name, value in model.items()}
        training = {"model": copies, "optimizer": base}
        place = optimizer.place
        shared = training if alike(optimizer.levels) else {f"replica{place.replica}": training}
        return {**shared, "replication": {place.name: optimizer.replica_state()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        optimizer = self._optimizer
        place = optimizer.place
        training = state_dict if alike(optimizer.levels) else state_dict[f"replica{place.replica}"]
        set_state_dict(
            self._model, optimizer, model_state_dict=training["model"], optim_state_dict=training["optimizer"]
        )
        optimizer.load_replica_state(state_dict["replication"][place.name])
