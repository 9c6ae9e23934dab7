"""A tape of the messages that all replicas received: enough to repeat their steps, bit for bit."""

from typing import Any, Protocol

from torch import Tensor


class Tape(Protocol):
    """Takes in what was agreed on, or plays it back in the place of an exchange.

    plays: Whether it plays back. Replicas then encode and send nothing, and receive from the tape.
    """

    plays: bool

    def put(self, place: int, step: int, message: Tensor) -> None:
        """Takes in the messages of all replicas, or their sum, which may be overwritten afterwards.

        Args:
            place: The channel and the bucket of which they are.
            step: At which they were sent.
        """
        ...

    def take(self, place: int, step: int) -> Tensor:
        """The next messages of a place, as they were put in.

        Shapes: -> `[bytes]` uint8.
        """
        ...

    def end(self, what: str, optimizer: Any) -> None:
        """Ends what moved the weights of a `Replicated` with the messages before: a "step", or "synchronize"."""
        ...
