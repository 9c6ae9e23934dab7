"""Gates: conditions of a step that attach where they are in use."""

from collections.abc import Sequence
from typing import Any, Protocol

from detonation.core.replicator import Replicator


class StepGate:
    """Takes part in each step of a replica, in `StopConsensus.gates`.

    All replicas have the same gates. Each method does nothing unless a gate overrides it.
    """

    def idle(self, step: int) -> bool:
        """True if this replica sits the step out: it computes no gradient, and its weights stay."""
        return False

    def moved(self, step: int, idle: bool) -> None:
        """Runs once the base optimizer has stepped, or where the replica was idle. Collective."""

    def end(self, step: int) -> None:
        """Runs when the replicas have agreed on the step. Collective."""


class ClosenessGate(Protocol):
    """Keeps replicas that round differently close to each other."""

    def attach(self, consensus: Any, replicators: Sequence[Replicator], step: int) -> None:
        """Takes part from `step` on, and compares distances in the place of bits."""
