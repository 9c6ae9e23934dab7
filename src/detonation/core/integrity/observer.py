"""Observers: objects that watch the steps of a `Replicated` without changing them."""

from typing import Any

from torch import Tensor


class StepObserver:
    """Base class of observers. An observer sees messages, and the weights before and after each
    step; both are equal on all replicas.

    Each method does nothing unless a subclass overrides it.
    """

    def begin(self, optimizer: Any) -> None:
        """Called before the first step of `optimizer`, a `Replicated`. The weights are the initial
        weights or, if this replica has just joined, the weights of the other replicas.
        """

    def left(self) -> None:
        """Called after the optimizer loaded a state or dropped its own state. The next step then
        does not continue from the last observed step.
        """

    def enter(self, optimizer: Any) -> None:
        """Called before each step and each `synchronize` of `optimizer`, a `Replicated`."""

    def moved(self, optimizer: Any) -> None:
        """Called after the base optimizer has moved the weights, but before the base optimizer
        calls its hooks for the end of a step.
        """

    def received(self, place: int, step: int, message: Tensor) -> None:
        """Called with the messages of all replicas, or with the sum of an all-reduce. The tensor
        `message` may be overwritten after the call.

        Args:
            place: Number of the channel and bucket.
            step: Step at which the messages were sent.
        """

    def end(self, what: str, optimizer: Any) -> None:
        """Called after `optimizer` has applied the messages of a step or of `synchronize`.

        `what` is "step", "synchronize" or "join". "join" stands for a `synchronize` after which a
        replica may join.
        """


class PlayedMessages(StepObserver):
    """Supplies messages that were recorded in an earlier run, in place of all collectives. Replicas
    then encode and send nothing.
    """

    def take(self, place: int, step: int) -> Tensor:
        """Returns the next recorded messages of one channel and bucket (`place`).

        Shapes: -> `[bytes]` uint8.
        """
        raise NotImplementedError

    def find(self, place: int, step: int) -> Tensor | None:
        """Returns the recorded messages of one channel and bucket (`place`) at `step`. Returns None
        if there are none. The record that ends `step` must have been read before this call.

        Shapes: -> `[bytes]` uint8.
        """
        raise NotImplementedError
