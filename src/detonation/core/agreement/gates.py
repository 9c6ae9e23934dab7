"""Gates: optional parts of a training step. A run attaches only the gates that it uses."""

from collections.abc import Sequence
from typing import Any, Protocol

from detonation.core.replicator import Replicator


class StepGate:
    """Base class of gates. A gate is an optional part of every training step. To attach a gate, add
    it to `StopConsensus.gates`.

    All replicas must have the same gates. The methods of this class do nothing: a subclass
    overrides those that it needs.
    """

    def idle(self, step: int) -> bool:
        """True if this replica skips `step`: it computes no gradient and keeps its weights."""
        return False

    def moved(self, step: int, idle: bool) -> None:
        """Called after the step of the base optimizer, and also if this replica skips that step
        (`idle`). Collective."""

    def end(self, step: int) -> None:
        """Called at the end of `step`, after the ranks checked that no rank must stop.
        Collective."""


class ClosenessGate(Protocol):
    """Keeps the weights of replicas close to each other, if replicas round differently."""

    def attach(self, consensus: Any, replicators: Sequence[Replicator], step: int) -> None:
        """Attaches this gate from `step` on. `StopConsensus.verify` then measures how far the
        tensors of replicas are apart, instead of comparing their bits."""
