"""A transfer: the message of one step in flight, and the update that comes of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from detonation.core.codec.aggregate import Received
from detonation.core.codec.codec import Selected
from detonation.core.compute.kernel_library import SignRate
from detonation.core.engine.reference import ReferenceEngine
from detonation.core.exchange.exchange import Exchange
from detonation.core.flat.rows import Bucket
from detonation.core.integrity.message import Message


@dataclass(frozen=True)
class BucketPipeline:
    """A bucket, the engine that encodes it into its rows of a message, and the exchange that sends this message."""

    bucket: Bucket
    engine: ReferenceEngine
    exchange: Exchange


@dataclass
class Transfer:
    """The message of one replica at one step, encoded bucket by bucket, in flight until it becomes an update.

    However many collectives it takes, it is one message with one header: all replicas decide once whether to use it.
    pipeline: of the bucket that is the message, which may be the whole. own: the update of each bucket if all replicas
    had sent what this one did, for a scheme that needs it. is_empty: True if a part of it is zeros because of values
    that are not finite; `[]` bool on a device that decides. unreleased: the selections that are still to leave the
    memory, with their values as every receiver decodes them, if these differ.
    """

    pipeline: BucketPipeline
    message: Message
    own: "list[Update]" = field(default_factory=list)
    is_empty: bool | Tensor = False
    forwarded: bool = False
    status: int = 0
    within: list[tuple[list[int], Tensor]] = field(default_factory=list)
    unreleased: list[tuple[ReferenceEngine, Selected, Tensor | None]] = field(default_factory=list)

    def forward(self) -> None:
        """Starts the second collective, if there is one and it was not started yet."""
        if not self.forwarded:
            self.pipeline.exchange.forward(self.message)
        self.forwarded = True

    def receive(self) -> "Update":
        """Waits for the update that all replicas agree on."""
        exchange = self.pipeline.exchange
        if exchange.secluded:
            self.forward()
        return Update(self.pipeline.engine, exchange.receive(self.message))


@dataclass(frozen=True)
class Update:
    """The messages that all replicas received, decoded where the update is needed: the same bits on every replica."""

    engine: ReferenceEngine
    received: Received

    def flat(self) -> Tensor:
        """Decodes the update.

        Shapes: -> `[rows, chunk]` fp32; its padding is undefined.
        """
        return self.engine.decode(self.received)  # which may share memory with the messages

    def rows_of(self, pipeline: BucketPipeline, first: int) -> Tensor:
        """Decodes the rows of a bucket; `first` is the first row of the message.

        Shapes: -> `[rows of the bucket, chunk]` fp32.
        """
        bucket = pipeline.bucket
        return pipeline.engine.decode(self.received.rows_of(bucket.first - first, bucket.layout.rows))

    def write(self, targets: Sequence[Tensor]) -> None:
        """Decodes the update into `targets`.

        Shapes: one local shape per parameter.
        """
        self.engine.write(self.received, targets)
        if self.received.release:  # nobody looks at the messages again
            self.received.release()

    def can_apply_signs(self, weights: Sequence[Tensor]) -> bool:
        """True if `apply_signs` supports these weights.

        Shapes: one local shape per parameter.
        """
        return self.engine.can_apply_signs(self.received, weights)

    def apply_signs(self, weights: Sequence[Tensor], rates: Sequence[SignRate]) -> None:
        """Moves `weights` by the signs of the update while it is decoded.

        Shapes: one local shape per parameter.
        """
        self.engine.apply_signs(self.received, weights, rates)
        if self.received.release:
            self.received.release()
