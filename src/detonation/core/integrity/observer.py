"""Observers: objects that watch the steps of a `Replicated` without changing them."""

from typing import Any

from torch import Tensor


class StepObserver:
    """Sees what all replicas agree on: messages, and weights before and after a step.

    Each method does nothing unless an observer overrides it.
    """

    def begin(self, optimizer: Any) -> None:
        """Called before the first step of a `Replicated`, with its weights."""

    def left(self) -> None:
        """Called after another state was loaded, so that the next step does not continue the last
        one.
        """

    def enter(self, optimizer: Any) -> None:
        """Called with the weights before each step and each `synchronize` of a `Replicated`."""

    def moved(self, optimizer: Any) -> None:
        """Called with the weights after the base optimizer has moved them, but before the post-step
        hooks of this optimizer run.
        """

    def received(self, place: int, step: int, message: Tensor) -> None:
        """Called with the messages of all replicas, or their sum. Their memory may be overwritten
        afterwards.

        Args:
            place: Number of the channel and bucket.
            step: Step at which they were sent.
        """

    def end(self, what: str, optimizer: Any) -> None:
        """Called after a "step" or "synchronize" of a `Replicated` has applied its messages."""


class PlayedMessages(StepObserver):
    """Supplies the recorded messages of a run instead of all collectives: replicas encode and send
    nothing.
    """

    def take(self, place: int, step: int) -> Tensor:
        """Returns the next recorded messages of one channel and bucket.

        Shapes: -> `[bytes]` uint8.
        """
        raise NotImplementedError

    def find(self, place: int, step: int) -> Tensor | None:
        """Returns the messages of a step whose record is complete; None if there are none.

        Shapes: -> `[bytes]` uint8.
        """
        raise NotImplementedError
