"""Saves and loads the state of a replicated optimizer, including the state that is private to one
replica.

Replicas differ in their unsent values (memory). With DiLoCo they also differ in parameters and in
inner optimizer state during a round. torch.distributed.checkpoint treats equal keys on different
ranks as one tensor and silently saves the tensor of one rank. Therefore state that differs between
replicas is saved under keys that differ between replicas.
"""

import logging
import re
import secrets
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict

from detonation.core.link import alike, first_text, links_of_shards
from detonation.core.memory import require_same_keys
from detonation.core.replicator import Replicator

if TYPE_CHECKING:
    from detonation.core.optimizer.replicated import Replicated

_MARKED = re.compile(r"replica\d+\.")
_log = logging.getLogger("detonation")


class RunPoint:
    """The id of a run, and the point between two of its steps that training has reached.

    The id is a random text that names the run in checkpoints and update logs. Each rank draws an id
    at random. Then `agree` gives all ranks the id that the first rank drew (the drawn id).

    known: the id of the checkpoint or the log that this process has loaded, replayed or written; ""
    before that. The known id may differ between ranks; the drawn id is equal after `agree`.
    joined: the step at which this replica joined a running training; 0 for other replicas, and
    after a load.
    completed: how often rounds were completed since the last step, for example by `synchronize`;
    None if the loaded state does not contain this count. From this count, a replay knows which
    completions after a step a checkpoint includes.
    """

    def __init__(self) -> None:
        self.known = ""
        self.joined = 0
        self.completed: int | None = 0
        self._drawn = secrets.token_hex(8)

    def load(self, known: str = "", completed: int | None = None) -> None:
        """Takes the id and the count from a loaded state, which may lack either."""
        self.known = known
        self.joined = 0
        self.completed = completed

    def complete(self) -> None:
        """Counts one completion of rounds."""
        if self.completed is not None:
            self.completed += 1

    def agree(self, replicators: Sequence[Replicator]) -> None:
        """Gives all ranks the id that the first rank drew. Collective.

        If replicas exchange nothing, they have no common run, and get no id.
        """
        drawn = self._drawn
        self._drawn = ""
        if replicators:
            parameters = [p for each in replicators for p in each.parameters.values()]
            links = dict.fromkeys(each.link for each in replicators)
            device = replicators[0].channel.runtime.device
            self._drawn = first_text([*links_of_shards(parameters), *links], drawn, device)

    def use(self) -> str:
        """Returns the id for a checkpoint or a log: `known` or, if `known` is empty, the drawn id
        (see `RunPoint`). The returned id becomes `known`.
        """
        self.known = self.known or self._drawn
        return self.known


def replica_state(optimizer: "Replicated") -> dict[str, Tensor]:
    """Returns copies of the private state of this replica and shard, under keys such as
    `0.residual.<parameter>`.

    Together with the model's and the base optimizer's state of the same rank, this state lets
    training resume with the same bits.

    Args:
        optimizer: Made by `replicate`.

    Shapes: -> the local shape of a parameter per key; `step` is `[]` int64.

    Raises:
        OverlapError: Gradients were sent in `overlap`, and their step is missing.

    Example:
        >>> import detonation as dt
        >>> from detonation.cluster.network.loopback import LoopbackCommunicator
        >>> model = torch.nn.Linear(2, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = dt.replicate(sgd, model, LoopbackCommunicator(), dt.demo(topk=1, chunk=2))
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
        >>> sorted(replica_state(optimizer))
        ['0.residual.bias', '0.residual.weight', '0.usual_norm', 'step']
    """
    state = {"step": torch.tensor(optimizer.step_count, dtype=torch.int64, device="cpu")}
    return state | {key: tensor.clone() for key, tensor in optimizer.local_state().items()}


@torch.no_grad()
def load_replica_state(optimizer: "Replicated", state: Mapping[str, Tensor]) -> None:
    """Loads the private state of this replica and shard. All ranks must call this function, each
    with its own `state`, after the model's weights were loaded.

    Args:
        optimizer: Made by `replicate`, for the same model and scheme.
        state: The result of `replica_state` after the same step as the weights and the state of
            the base optimizer. This function cannot detect states of different steps.

    Shapes: as `replica_state`.

    Raises:
        ValueError: The state does not fit this model and scheme.

    Example:
        >>> import detonation as dt
        >>> from detonation.cluster.network.loopback import LoopbackCommunicator
        >>> model = torch.nn.Linear(2, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = dt.replicate(sgd, model, LoopbackCommunicator(), dt.none())
        >>> load_replica_state(optimizer, {"step": torch.tensor(7)})
        >>> optimizer.step_count
        7
    """
    saved = fitting_state(optimizer, state)
    _replace(optimizer, saved, int(state["step"]))


def fitting_state(optimizer: "Replicated", state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of a saved `state` after checking their names and shapes, and builds the
    levels of replication for the saved parameters.

    The result is empty for a state that was saved before the first step. Drops gradients that
    `overlap` has sent and that no step has used, so all ranks must call this function. Raises
    `ValueError` if the tensors do not fit this model and scheme. After an error, nothing else has
    changed.
    """
    optimizer.drop_overlap()
    saved = {key: tensor for key, tensor in state.items() if key != "step"}
    if saved:
        with optimizer.levels_back_on_error():
            optimizer.build(parameters_of(saved))
            _require_fit(optimizer.local_state(), saved)
    return saved


def _require_fit(local: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    require_same_keys("the saved state", local, saved)
    for key, tensor in local.items():
        if tensor.shape != saved[key].shape:
            shapes = f"{tuple(saved[key].shape)}, is {tuple(tensor.shape)} here"
            raise ValueError(
                f"{key} was saved with shape {shapes}: load a state of the same model, shards"
                " and replicas"
            )


def _replace(optimizer: "Replicated", saved: Mapping[str, Tensor], step: int) -> None:
    """Loads the tensors `saved`, whose shapes were checked, and continues at step number `step`.
    Collective.
    """
    optimizer.memory_lost = False
    optimizer.run.load()
    if not saved and optimizer.is_built and optimizer.local_state():
        optimizer.forget_levels()  # the state was saved before the first step, without memory
    for index, replicator in enumerate(optimizer.build() if saved else ()):
        prefix = f"{index}."
        mine = {key.removeprefix(prefix): t for key, t in saved.items() if key.startswith(prefix)}
        replicator.local_state().load(mine)
    optimizer.resume_at(step)


def local_state_of(replicators: Sequence[Replicator]) -> dict[str, Tensor]:
    """Returns the private state of this replica and shard by name; see `Replicated.local_state`."""
    found = enumerate(replicator.local_state().named() for replicator in replicators)
    return {f"{index}.{key}": tensor for index, named in found for key, tensor in named.items()}


def parameters_of(keys: Iterable[str]) -> set[str]:
    """Returns the names of the parameters that have entries in a saved local state.

    Example:
        >>> keys = ["0.residual.layers.0.weight", "0.anchor.bias", "0.synchronized_at", "step"]
        >>> sorted(parameters_of(keys))
        ['bias', 'layers.0.weight']
    """
    return {key.split(".", 2)[2] for key in keys if key.count(".") > 1}


def only_creates_state() -> bool:
    """True if torch's state-dict helpers called `step()` only to create the base optimizer's state.

    This function looks for the helpers among the callers of `step()`. Such a call is not a training
    step: it must not communicate, increase the step count or decay weights. The helpers set lr and
    gradients to 0, but training may also set these to 0, and on some ranks only. So an lr of 0
    alone does not prove that the helpers called `step()`.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__") == get_state_dict.__module__:
            return True
    return False


def to_state_dict(optimizer: "Replicated") -> dict[str, Any]:
    """Returns the state of the base optimizer and the private state of this replica; see
    `Replicated.state_dict`.
    """
    saved = optimizer.base.state_dict()
    if not alike(optimizer.levels):
        mark = f"replica{optimizer.coordinates.replica}."
        saved["state"] = {
            parameter: {mark + key: value for key, value in values.items()}
            for parameter, values in saved["state"].items()
        }
    return {**saved, "replication": {optimizer.coordinates.name: replica_state(optimizer)}}


def from_state_dict(optimizer: "Replicated", state_dict: Mapping[str, Any]) -> None:
    """Loads the result of `to_state_dict`; see `Replicated.load_state_dict`."""
    optimizer.drop_overlap()
    rest = {key: value for key, value in state_dict.items() if key != "replication"}
    coordinates = optimizer.coordinates
    mark = (  # prefix of saved keys that belong to this replica alone
        f"replica{coordinates.replica}."
    )
    for other in (key for values in rest["state"].values() for key in values):
        if _MARKED.match(str(other)) and not other.startswith(mark):
            raise ValueError(
                f"the saved optimizer state has {other}, not {mark}..., so another replica"
                " saved it: load the file of this replica"
            )
    own = {
        p: {_without(mark, key): value for key, value in v.items()}
        for p, v in rest["state"].items()
    }
    if "replication" in state_dict:
        replicas = state_dict["replication"]
        if coordinates.name not in replicas:
            odd = f"{', '.join(replicas)} saved the state, but this rank is {coordinates.name}"
            raise ValueError(f"{odd}: save one file per rank, or use detonation.save_checkpoint")
        private = replicas[coordinates.name]
        saved = fitting_state(optimizer, private)  # check the state before replacing anything
        with optimizer.levels_back_on_error():
            optimizer.base.load_state_dict({**rest, "state": own})
        _replace(optimizer, saved, int(private["step"]))
    else:
        optimizer.base.load_state_dict({**rest, "state": own})
        schemes = [scheme for _, scheme in optimizer.levels]
        optimizer.run.load()
        optimizer.forget_levels()  # the old anchor would overwrite the loaded weights
        optimizer.memory_lost = any(s.feedback or s.signal == "parameters" for s in schemes)


def _without(mark: str, key: Any) -> Any:
    if isinstance(key, str):
        return key.removeprefix(mark)
    return key


def warn_of_lost_memory(optimizer: "Replicated") -> None:
    """Logs a warning once if a loaded state dict had no "replication" part, so that the unsent
    values (memory) are lost. Checkpoints of other frameworks have no such part.
    """
    lost = optimizer.memory_lost
    optimizer.memory_lost = False
    if lost and (optimizer.coordinates.replica, optimizer.coordinates.shard) == (0, 0):
        schemes = ", ".join(scheme.name for _, scheme in optimizer.levels)
        _log.warning(
            'the loaded optimizer state has no part "replication": the unsent values of the'
            " replicas of %s are lost, and steps are counted from %d; save and load with"
            " detonation.save_checkpoint and load_checkpoint, with TrainingState, or with"
            " replica_state and load_replica_state in addition to the framework's functions",
            schemes,
            optimizer.step_count,
        )
