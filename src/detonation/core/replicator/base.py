"""A replicator is one level of replication around the step of the base optimizer."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor

from detonation.core.flat.tensors import cut_like, local
from detonation.core.memory import LocalState
from detonation.core.optim import BaseStep
from detonation.core.replicator.channel import Channel, Transfer


class Replicator(ABC):
    """Where a scheme meets the training step: gradients before the local step, parameters after it.

    Args:
        parameters: By name, in the order of the channel's layout.
    """

    acts_before = True
    """True where it acts in `before`; otherwise in `after`."""
    holds_padding = False
    """True if it keeps padding rows where they are, which its codec would move."""
    innermost = False
    """True if its signals are those of this replica, and not what other levels agreed on."""
    stepped: BaseStep | None = None
    """The optimizer whose steps all replicas must take alike; None where each steps by itself."""

    def __init__(self, parameters: Mapping[str, Tensor], channel: Channel) -> None:
        self.parameters = parameters
        self.channel = channel
        self.round = channel.scheme.round
        # whether gradients were sent, or are to be, in buckets, and their step has not come
        self.overlapping = False
        self.scheme = channel.scheme
        self.layout = channel.layout
        self.link = channel.link
        self.counts = channel.counts

    def before(self, step: int) -> None:
        """Runs before the local step."""
        return

    def after(self, step: int) -> None:
        """Runs after the local step."""
        return

    @abstractmethod
    def announce(self, step: int, at: int, name: str, in_buckets: bool) -> list[Transfer]:
        """Sends `Channel.announce` in the place of the message of step `at`, if there is one; all
        before it have left.

        Starts and waits for the same collectives as an ordinary step `at`, so that a replica that
        announces nothing meets it there. Nothing of the step happens.

        Args:
            step: The next step, up to `at`.
            name, in_buckets: See `Channel.announce`.

        Returns:
            The messages, which `discard` receives; none where none is sent at step `at`.
        """

    def discard(self, transfers: Sequence[Transfer]) -> None:
        """Receives an announcement, and what was sent before it."""
        if self.scheme.round.delay:  # otherwise `announce` has received it
            self.local_state()
            self.channel.discard(transfers)

    def drain(self) -> None:
        """Waits for messages in flight, up to the first that announces what this rank does not."""
        self.local_state()

    @abstractmethod
    def make_portable(self, step: int) -> None:
        """Brings the state after `step` steps to where another layout can go on from it."""

    @abstractmethod
    def synchronize(self, step: int) -> None:
        """Completes open rounds and transfers after `step` steps, so that the replicas hold the
        same weights."""

    @contextmanager
    def overlap(self, step: int) -> Iterator[None]:
        """Context in which backward sends the gradients of `step`, if the level supports it."""
        yield

    def refuse_overlap(self) -> None:
        """Raises `OverlapError` between `overlap` and the step that completes it."""
        return

    @abstractmethod
    def shared_weights(self) -> list[Tensor]:
        """One tensor per parameter that must be bitwise equal on all replicas between steps."""

    @abstractmethod
    def replicated(self) -> dict[str, Tensor]:
        """All tensors that must be bitwise equal on all replicas between steps, by name; to read.

        Shapes: local shapes.
        """

    @abstractmethod
    def repair(self, tensors: Mapping[str, Tensor]) -> None:
        """Replaces some of the tensors that `replicated` returned.

        Shapes: as `replicated`.
        """

    def forget_held_rows(self) -> None:
        """Looks again for the padding rows of its parameters, as some may move from now on."""
        return

    def part_of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The part of other `tensors` of the model that each of its replicas holds on this rank.

        All of them, or pieces, where its parameters are pieces.
        """
        first = next(iter(self.parameters.values()), None)
        if first is not None:
            tensors = cut_like(first, tensors)
        return {name: local(tensor.detach()) for name, tensor in tensors.items()}

    @abstractmethod
    def local_state(self, alone: bool = False) -> LocalState:
        """The state that is private to this replica. Waits for messages in flight.

        Args:
            alone: Whether no other replica asks. Which parameters nobody used in the steps of these
                messages may then stay open.
        """
