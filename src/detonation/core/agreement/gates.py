"""Gates: optional parts of a training step. A gate is attached to the step only if it is used."""

from collections.abc import Sequence
from typing import Any, Protocol

from detonation.core.replicator import Replicator


class StepGate:
    """Base class of gates. A gate is an optional part of every training step; it is attached by
    adding it to `StopConsensus.gates`.

    All replicas must have the same gates. Each method does nothing unless a subclass overrides it.
    """

    def idle(self, step: int) -> bool:
        """True if this replica skips `step`: it computes no gradient and keeps its weights."""
        return False

    def moved(self, step: int, idle: bool) -> None:
        """Called after the base optimizer's step, or in its place if this replica skips the step
        (`idle`). Collective."""

    def end(self, step: int) -> None:
        """Called at the end of `step`, after the ranks checked that no rank must stop.
        Collective."""


class ClosenessGate(Protocol):
    """Keeps the weights of replicas close to each other, if replicas round differently."""

    def attach(self, consensus: Any, replicators: Sequence[Replicator], step: int) -> None:
        """Attaches the gate from `step` on. `StopConsensus.verify` then compares the distance of
        tensors instead of their bits."""
