"""Gates: optional parts of a step, attached only if they are used."""

from collections.abc import Sequence
from typing import Any, Protocol

from detonation.core.replicator import Replicator


class StepGate:
    """A part of every step of a replica, attached through `StopConsensus.gates`.

    All replicas have the same gates. Each method does nothing unless a gate overrides it.
    """

    def idle(self, step: int) -> bool:
        """True if this replica skips the step: it computes no gradient and keeps its weights."""
        return False

    def moved(self, step: int, idle: bool) -> None:
        """Called after the base optimizer's step, or after this replica skipped it. Collective."""

    def end(self, step: int) -> None:
        """Called after the replicas agreed on the step. Collective."""


class ClosenessGate(Protocol):
    """Keeps replicas that round differently close to each other."""

    def attach(self, consensus: Any, replicators: Sequence[Replicator], step: int) -> None:
        """Attaches the gate from `step` on; `verify` then compares distances instead of bits."""
