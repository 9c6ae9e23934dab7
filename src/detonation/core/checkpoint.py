"""Checkpoint state: what a replica must keep to itself between runs.

Memory, and in DiLoCo mid-round parameters and inner optimizer state, differ per replica. torch.distributed.checkpoint
takes equal keys on different ranks for one tensor and silently keeps one of them, so save this state per rank.
"""

from torch import Tensor

from detonation.core.replicate import Replicated


def replica_state(optimizer: Replicated) -> dict[str, Tensor]:
    """Copies of the private state of this replica and shard: flat keys, tensors in the local shape of a parameter.

    Together with the model's and the base optimizer's state of the same rank it resumes exactly.
    """
    return optimizer.replica_state()


def load_replica_state(optimizer: Replicated, state: dict[str, Tensor]) -> None:
    """Goes on from `state`, after the model's weights were loaded. Raises `ValueError` where it does not fit."""
    optimizer.load_replica_state(state)
