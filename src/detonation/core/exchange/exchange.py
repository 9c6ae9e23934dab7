"""The contract of all exchanges, and what they share."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from detonation.core.codec.aggregate import MajorityVote, Received
from detonation.core.codec.message_rows import MessageRows
from detonation.core.codec.zeros import zeros_are_negative
from detonation.core.integrity.guard import Guard
from detonation.core.integrity.message import Message
from detonation.core.integrity.tape import Tape
from detonation.core.integrity.workspace import Workspace
from detonation.core.link.link import Link
from detonation.core.schemes.scheme import Scheme


class Exchange(Protocol):
    """Sends messages through one or two collectives. All replicas call its methods in the same order."""

    secluded: bool
    """True if a replica receives messages that the others do not see, and answers them in a second collective."""

    def run(self, message: Message, first: int, rows: int) -> MessageRows:
        """Where engines write the `rows` rows of the flat from row `first` on, which the next collective carries.

        The rows from 0 on leave last, with the header.
        """
        ...

    def send(self, message: Message, status: int | Tensor | None) -> None:
        """Starts a collective with the run that waits.

        Args:
            status: See `Header`; None if more of this message follows.

        Shapes: `[]` int64 where only the device knows.
        """
        ...

    def forward(self, message: Message) -> None:
        """Starts the second collective, where `secluded`; called for all messages before the first `receive`."""
        ...

    def receive(self, message: Message) -> Received:
        """Waits for the messages that all replicas receive."""
        ...

    def play(self, message: Message, tape: Tape) -> None:
        """Lets arrive what the tape has of this message, in the place of all collectives."""
        ...

    def for_rows(self, first: int, rows: int, guard: Guard) -> "Exchange":
        """The exchange of a bucket, `rows` rows from row `first` on, which shares the state."""
        ...

    def state(self) -> dict[str, Tensor]:
        """The tensors that stay between steps, by name."""
        ...


def negative_zeros(scheme: Scheme, step: int, replica: int = 0, replicas: int = 1) -> bool:
    """`zeros_are_negative` for the message that a replica, or the owner of a row, sends at `step`."""
    sending = step // (scheme.round.every * max(1, scheme.codec.selection.period))
    proportional = scheme.signal == "parameters"  # an outer SGD; of gradients the base optimizer may use the sign
    return zeros_are_negative(sending, replica, replicas, proportional or isinstance(scheme.aggregation, MajorityVote))


def played(tape: Tape, guard: Guard, step: int, replicas: int) -> Callable[[], Tensor]:
    """Takes the messages of `step` from the tape, to the device of `guard`."""
    return lambda: tape.take(guard.place, step).to(guard.usual.device).view(replicas, -1)  # [replicas, 64 + nbytes]


def workspace_for(scheme: Scheme, link: Link, guard: Guard) -> Workspace:
    """The workspace of a channel.

    Gradients leave at every step. A round is rare, and its messages take memory only while they travel. A communicator
    that outlives replicas may send a message once more, long after it has arrived here; one of simulated replicas, on
    a CPU, hands a message itself to others, who may still read it.
    """
    kept = guard.on_kernels and scheme.signal == "gradients" and link.elastic is None
    return Workspace(scheme.round.delay + 1 if kept else 0)
