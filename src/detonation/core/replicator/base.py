"""A replicator is one level of replication, called before and after the step of the base
optimizer.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor

from detonation.core.flat.tensors import cut_like, local
from detonation.core.memory import LocalState
from detonation.core.optim import BaseStep
from detonation.core.replicator.channel import Channel, Transfer


class Replicator(ABC):
    """Connects a scheme to the training step: exchanges gradients before the local step, or
    parameters after it.

    Args:
        parameters: By name, in the order of the channel's layout.
    """

    acts_before = True
    """True if it exchanges in `before`, False if in `after`."""
    holds_padding = False
    """True if it keeps padding rows unchanged that its codec would move."""
    innermost = False
    """True if its signals are those of this replica, and not what other levels agreed on."""
    stepped: BaseStep | None = None
    """The optimizer whose steps all replicas must make alike; None if each steps on its own."""

    def __init__(self, parameters: Mapping[str, Tensor], channel: Channel) -> None:
        self.parameters = parameters
        self.channel = channel
        self.round = channel.scheme.round
        # True if this step's gradients were or will be sent in buckets
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
        """Sends `Channel.announce` instead of the message of step `at`, if that step has a message.
        All earlier messages have been sent.

        It runs the same collectives as step `at`, so they match the collectives of a replica that
        announces nothing. No other part of the step runs.

        Args:
            step: The next step, up to `at`.
            name, in_buckets: See `Channel.announce`.

        Returns: The messages, which `discard` receives; empty if step `at` sends none.
        """

    def discard(self, transfers: Sequence[Transfer]) -> None:
        """Receives an announcement and the messages sent before it, without using them."""
        if self.scheme.round.delay:  # without a delay, `announce` has received the messages
            self.local_state()
            self.channel.discard(transfers)

    def drain(self) -> None:
        """Waits for messages in flight, up to the first message that another rank replaced by an
        announcement.
        """
        self.local_state()

    @abstractmethod
    def make_portable(self, step: int) -> None:
        """Brings the state after `step` steps into a form from which another layout can
        continue.
        """

    @abstractmethod
    def synchronize(self, step: int) -> None:
        """Completes open rounds and messages in flight after `step` steps, so that replicas hold
        the same weights.
        """

    @contextmanager
    def overlap(self, step: int, may_send: Callable[[], bool] | None = None) -> Iterator[None]:
        """Context manager in which backward sends the gradients of `step`, if the level supports
        it; see `Replicated.overlap`.
        """
        yield

    def refuse_overlap(self) -> None:
        """Raises `OverlapError` between `overlap` and the step that completes it."""
        return

    @abstractmethod
    def shared_weights(self) -> list[Tensor]:
        """One tensor per parameter that must be bitwise equal on all replicas between steps."""

    @abstractmethod
    def replicated(self) -> dict[str, Tensor]:
        """All tensors that must be bitwise equal on all replicas between steps, by name, read-only.

        Shapes: local shapes.
        """

    @abstractmethod
    def repair(self, tensors: Mapping[str, Tensor]) -> None:
        """Replaces tensors that `replicated` returned.

        Shapes: as `replicated`.
        """

    def forget_held_rows(self) -> None:
        """Determines again which padding rows of its parameters must not move."""
        return

    def part_of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The part of the model's `tensors` that this replicator's replicas hold on this rank.

        The part has all tensors, or pieces of them if the parameters are pieces.
        """
        first = next(iter(self.parameters.values()), None)
        if first is not None:
            tensors = cut_like(first, tensors)
        return {name: local(tensor.detach()) for name, tensor in tensors.items()}

    @abstractmethod
    def local_state(self, alone: bool = False) -> LocalState:
        """The private state of this replica. Waits for messages in flight.

        Args:
            alone: Whether no other replica asks. The set of parameters that nobody used in these
                steps may then remain open.
        """
