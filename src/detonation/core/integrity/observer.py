"""Observers: what attaches to the steps of a `Replicated` without a part in them."""

from typing import Any

from torch import Tensor


class StepObserver:
    """Sees what all replicas agree on: messages, and the weights before and after.

    Each method does nothing unless an observer overrides it.
    """

    def begin(self, optimizer: Any) -> None:
        """Sees the weights of a `Replicated` before its first step."""

    def enter(self, optimizer: Any) -> None:
        """Sees the weights of a `Replicated` before each step and each call of `synchronize`."""

    def received(self, place: int, step: int, message: Tensor) -> None:
        """Sees the messages of all replicas, or their sum, which may be overwritten afterwards.

        Args:
            place: The channel and the bucket of which they are.
            step: At which they were sent.
        """

    def end(self, what: str, optimizer: Any) -> None:
        """Ends what moved the weights of a `Replicated` with the messages before: a "step", or
        "synchronize"."""


class PlayedMessages(StepObserver):
    """Has the messages of a run, in the place of all collectives: replicas encode and send
    nothing."""

    def take(self, place: int, step: int) -> Tensor:
        """The next messages of a place, as an observer saw them.

        Shapes: -> `[bytes]` uint8.
        """
        raise NotImplementedError

    def find(self, place: int, step: int) -> Tensor | None:
        """The same, of a step whose messages were all read; None where an observer saw none.

        Shapes: -> `[bytes]` uint8.
        """
        raise NotImplementedError
