"""Replicator: where a scheme meets the training step. Gradients before the local step, parameters after H of them."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from detonation.core.replicator.channel import Channel
from detonation.core.replicator.local_state import Private


class Replicator(Protocol):
    """One level of replication around the step of the base optimizer."""

    channel: Channel

    def before(self, step: int) -> None: ...

    def after(self, step: int) -> None: ...

    def settle(self, step: int) -> None:
        """Ends after `step` steps what is still open, so that the replicas hold the same weights."""
        ...

    def back(self) -> None:
        """To the weights that the replicas agreed on last, from where the next gradient is to be taken."""
        ...

    def ahead(self) -> None:
        """Undoes `back`."""
        ...

    def shared(self) -> list[Tensor]:
        """One tensor a parameter that must be bitwise equal on all replicas between steps."""
        ...

    def equal(self) -> dict[str, Tensor]:
        """All that must be bitwise equal on all replicas between steps, by name; to read."""
        ...

    def mend(self, tensors: Mapping[str, Tensor]) -> None:
        """Makes some of what `equal` returned anew."""
        ...

    def private(self) -> Private:
        """What this replica must keep to go on."""
        ...
