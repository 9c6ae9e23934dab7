"""Observers: what attaches to the steps of a `Replicated` without a part in them."""

from typing import Any

from torch import Tensor


class StepObserver:
    """Sees what all replicas agree on: messages, and the weights before and after.

    Each method does nothing unless an observer overrides it.
    """

    def begin(self, optimizer: Any) -> None:
        """Sees the weights of a `Replicated` before its first step."""

    def left(self) -> None:
        """Hears that another state was loaded: the next step does not follow the last one."""

    def enter(self, optimizer: Any) -> None:
        """Sees the weights of a `Replicated` before each step and each call of `synchronize`."""

    def moved(self, optimizer: Any) -> None:
        """Sees the weights once the base optimizer has moved them, before its hooks after a step
        run."""

    def received(self, place: int, step: int, message: Tensor) -> None:
        """Sees the messages of all replicas, or their sum. They may be overwritten afterwards.

        Args:
            place: Number of the channel and bucket.
            step: Step at which they were sent.
        """

    def end(self, what: str, optimizer: Any) -> None:
        """Called after a "step" or "synchronize" of a `Replicated` has applied the messages before
        it."""


class PlayedMessages(StepObserver):
    """Gives the messages of a run instead of all collectives: replicas encode and send nothing."""

    def take(self, place: int, step: int) -> Tensor:
        """Returns the next messages of a place, as an observer saw them.

        Shapes: -> `[bytes]` uint8.
        """
        raise NotImplementedError

    def find(self, place: int, step: int) -> Tensor | None:
        """Returns the messages of a step whose record was read to its end; None if it has none.

        Shapes: -> `[bytes]` uint8.
        """
        raise NotImplementedError
