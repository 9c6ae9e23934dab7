"""The interface of replicators. A replicator carries out one level of replication for its
parameters, and is called before and after each step of the base optimizer.
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
    """Connects a scheme to the training step: exchanges gradients before the step of the base
    optimizer, or parameters after it.

    Args:
        parameters: Parameters by name, in the order of the channel's layout.
    """

    acts_before = True
    """True if this replicator exchanges messages in `before`, False if in `after`."""
    holds_padding = False
    """True if this replicator keeps the padding rows of embeddings unchanged, which its codec would
    otherwise move."""
    innermost = False
    """True if this replicator sends this replica's own gradients or movements, False if it sends
    the result of an inner level."""
    stepped: BaseStep | None = None
    """The base optimizer, if its steps must have the same result on all replicas; None if each
    replica steps on its own."""

    def __init__(self, parameters: Mapping[str, Tensor], channel: Channel) -> None:
        self.parameters = parameters
        self.channel = channel
        self.round = channel.scheme.round
        # True if gradients of this step were or will be sent bucket by bucket in `overlap`
        self.overlapping = False
        self.scheme = channel.scheme
        self.layout = channel.layout
        self.link = channel.link
        self.counts = channel.counts

    @property
    def in_flight(self) -> bool:
        """True if this replica has sent a message whose update has not arrived yet."""
        return False

    def before(self, step: int) -> None:
        """Runs before the step of the base optimizer."""
        return

    def after(self, step: int) -> None:
        """Runs after the step of the base optimizer."""
        return

    @abstractmethod
    def announce(self, step: int, at: int, name: str, in_buckets: bool) -> list[Transfer]:
        """Announces to the other replicas that this rank began or stopped training the parameter
        `name`. If step `at` sends a message, sends an empty message instead, which reports this
        reason. All earlier messages must have been sent.

        Replicas that announce no change run the whole step `at` at the same time. So this method
        runs the same collectives as that step, but no other part of the step.

        Args:
            step: The first step that has not run yet; at most `at`.
            name, in_buckets: See `Channel.announce`.

        Returns: The messages, which `discard` receives; empty if step `at` sends none.
        """

    def discard(self, transfers: Sequence[Transfer]) -> None:
        """Receives the messages that `announce` sent, and the messages that were in flight before,
        without using any of these messages.
        """
        if self.scheme.round.delay:  # without a delay, `announce` received all messages
            self.local_state()
            self.channel.discard(transfers)

    @abstractmethod
    def make_portable(self, step: int) -> None:
        """Completes, after `step` steps, open rounds and everything else that depends on the layout
        of the messages. Afterwards a replicator with another layout can take over the state.
        """

    @abstractmethod
    def synchronize(self, step: int) -> None:
        """Completes open rounds and messages in flight after `step` steps, so that replicas hold
        the same weights.
        """

    @contextmanager
    def overlap(self, step: int, may_send: Callable[[], bool] | None = None) -> Iterator[None]:
        """Context manager in which backward sends the gradients of `step`; see
        `Replicated.overlap`. Replicators that cannot send during backward do nothing.
        """
        yield

    def refuse_overlap(self) -> None:
        """Raises `OverlapError` if `overlap` has begun, but no step has used its gradients yet."""
        return

    def drop_overlap(self) -> None:
        """Drops the gradients that `overlap` has sent and that no step has used. All ranks call
        this method before they load a state.
        """
        return

    @abstractmethod
    def shared_weights(self) -> list[Tensor]:
        """Returns one tensor per parameter, which must be bitwise equal on all replicas between
        steps: the weight or its anchor.
        """

    @abstractmethod
    def replicated(self) -> dict[str, Tensor]:
        """Returns all tensors that must be bitwise equal on all replicas between steps, by name.
        The caller must not change these tensors.

        Shapes: local shapes.
        """

    @abstractmethod
    def repair(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrites tensors that `replicated` returns with repaired `tensors` of the same names.

        Shapes: as `replicated`.
        """

    def forget_held_rows(self) -> None:
        """Makes the replicator determine again which padding rows of embeddings must not move."""
        return

    def part_of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the local parts of `tensors`, cut like this replicator's parameters.

        If the parameters are pieces of shards, the result holds the same pieces of `tensors`.
        Otherwise the result holds all of `tensors`.
        """
        first = next(iter(self.parameters.values()), None)
        if first is not None:
            tensors = cut_like(first, tensors)
        return {name: local(tensor.detach()) for name, tensor in tensors.items()}

    @abstractmethod
    def local_state(self) -> LocalState:
        """Returns the private state of this replica. Waits for messages in flight."""
