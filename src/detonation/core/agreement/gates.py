"""The gates of a step that core does not have: rooms bring them, and they attach when an optimizer needs one."""

from collections.abc import Sequence
from typing import Any, Protocol

from detonation.core.replicator.base import Replicator
from detonation.core.round import LocalSteps

BALANCE, CLOSENESS = "detonation.gates.balance:Balance", "detonation.gates.closeness:Closeness"
"""The classes of the gates, for `choices.imported`: no earlier than one is needed."""


class BalanceGate(Protocol):
    """Lets slow replicas sit steps out."""

    local_steps: LocalSteps

    def idle(self, step: int) -> bool: ...  # this replica sits the step out

    def stepped(self) -> None: ...  # a local step was taken

    def end(self, step: int) -> None: ...  # collective


class ClosenessGate(Protocol):
    """Keeps replicas that round differently close to each other."""

    def attach(self, consensus: Any, replicators: Sequence[Replicator], step: int) -> None: ...  # from `step` on
