"""ParameterReplicator: replicas train separately for a round of local steps, and then all replicas
move to common parameters, the anchor.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from detonation.core.flat.layout import copy
from detonation.core.flat.rows import Bucket
from detonation.core.flat.tensors import locals_of, padding_row
from detonation.core.memory import LocalState
from detonation.core.replicator.base import Replicator
from detonation.core.replicator.channel import BucketPipeline, Channel, Transfer, Update
from detonation.core.replicator.outer import OuterSGD
from detonation.core.round import Round
from detonation.core.schemes import ParameterScheme

Unsent = Tensor | tuple[Update, float] | None
"""The part of a bucket's movement that was not sent, if the parameters keep this part: a tensor, or
the sent message and the weight of the movement. From message and weight, the unsent part can be
computed until the parameters change.
"""
Part = tuple[BucketPipeline, Unsent]
"""A bucket of a message in flight, and the part of the bucket's movement that was not sent."""


class ParameterReplicator(Replicator):
    """Lets replicas train separately for a round of local steps, and then moves all replicas to
    common parameters, the anchor.

    Each replica sends its movement in the round: the anchor, rounded to the dtype of the
    parameters, minus the current parameters. The agreed update is the gradient of an outer SGD,
    which moves the anchor. The anchor is fp32 and bitwise equal on all replicas. With a delay of n
    steps, the update is applied n steps after the message was sent. The scheme's `resume_from` and
    `keep` decide how far the parameters follow the anchor afterwards.
    """

    acts_before = False

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        channel: Channel,
        scheme: ParameterScheme,
        round: Round,
    ) -> None:
        super().__init__(parameters, channel)
        self.round = round
        self._keep = scheme.keep
        self._divides = scheme.divides_messages
        self._cycle = (
            scheme.codec.selection.period if scheme.resume_from == "sent" else 1
        )  # number of consecutive messages that together contain all coordinates
        self._synchronized_at = torch.zeros((), dtype=torch.int64, device="cpu")
        self._in_flight: deque[tuple[Transfer, list[Part]]] = deque()
        self._arrived: Tensor | None = (
            # the received update that a checkpoint has stored, until the update is applied
            None
        )
        self._lost: dict[
            int, bool | Tensor
        ] = {}  # True if a bucket's last movement was nonfinite, by the bucket's first row
        # steps until the update of the message in flight is applied; 0 if no message is in flight
        self._steps_left = torch.zeros((), dtype=torch.int64, device="cpu")
        self._anchor = OuterSGD(
            self.layout.flatten(locals_of(parameters), channel.runtime.device), scheme.outer
        )
        self._local_steps = channel.runtime.local_steps
        self._rounds = any(parameter.dtype == torch.bfloat16 for parameter in parameters.values())
        # local steps of each replica since the last message, without steps that an update undoes
        self._taken = torch.zeros(
            channel.link.replicas if self._local_steps else 0, dtype=torch.int64, device="cpu"
        )

    @property
    def in_flight(self) -> bool:
        return bool(self._in_flight)

    def after(self, step: int) -> None:
        # the update in flight overwrites this step, unless `keep` keeps a part of it
        if self._local_steps and (self._keep or not self._steps_left):
            self._taken += self._local_steps.taken(step)
        if self._steps_left:
            self._steps_left -= 1
            if not self._steps_left:
                self._land()
        else:
            self._arrived = None  # without an update in flight, a checkpoint stores zeros
        if self.round.sends(step):
            self._exchange(step, self.round.delay)

    def announce(self, step: int, at: int, name: str, in_buckets: bool) -> list[Transfer]:
        if self._steps_left == at - step + 1:  # the update in flight is applied at step `at`
            self._arriving()
        if not self.round.sends(at):
            return []
        transfers = self.channel.announce(at, name, in_buckets)
        if not self.round.delay:
            self.channel.discard(transfers)
        return transfers

    def make_portable(self, step: int) -> None:
        self.synchronize(step)

    def synchronize(self, step: int) -> None:
        if step == self._synchronized_at:
            return
        if self._steps_left:
            self._land()
        if self._cycle > 1 or not self.round.sends(step - 1):
            first = -(-step // self._cycle) * self._cycle
            for each in range(first, first + self._cycle):
                # check earlier messages first, because the next message carries a digest of them
                self.counts.catch_up(math.inf)
                self._exchange(each, delay=0)
        if (
            self._keep or self.scheme.needs_own_update
        ):  # otherwise parameters equal the anchor, or an outer level has moved them away from it
            copy(locals_of(self.parameters), self.shared_weights())
        self._synchronized_at.fill_(step)

    def shared_weights(self) -> list[Tensor]:
        return self.layout.parts(self._anchor.flat)

    def replicated(self) -> dict[str, Tensor]:
        return {
            slot.name + suffix: part
            for suffix, flat in self._agreed().items()
            for slot, part in zip(self.layout.slots, self.layout.parts(flat), strict=True)
        }

    @torch.no_grad()
    def repair(self, tensors: Mapping[str, Tensor]) -> None:
        before = self._anchor.flat.clone()
        for suffix, flat in self._agreed().items():
            self.layout.write(flat, [tensors.get(slot.name + suffix) for slot in self.layout.slots])
        shift = self._anchor.flat - before
        parts = map(self.layout.parts, (before, shift, self._anchor.flat))
        for weight, was, by, anchor in zip(locals_of(self.parameters), *parts, strict=True):
            moved = weight + by  # adds the anchor's shift, and so keeps the replica's own movement
            unmoved = weight == was.to(weight.dtype)
            alone = unmoved | moved.isfinite().logical_not()
            weight.copy_(torch.where(alone, anchor, moved))

    def local_state(self) -> LocalState:
        flats = {"anchor": self._anchor.flat, **self._anchor.state()}
        others = {"synchronized_at": self._synchronized_at}
        if self.round.delay:
            flats["arriving"] = self._arriving()
            others["steps_left"] = self._steps_left
        if self._local_steps:
            others |= {"taken": self._taken, "local_steps": self._local_steps.counts}
        return self.channel.local_state(flats, others)

    def _agreed(self) -> dict[str, Tensor]:
        """Returns the tensors that are equal on all replicas: the anchor and the momentum of the
        outer SGD. The keys are the suffixes that `replicated` adds to parameter names.
        """
        return {"": self._anchor.flat} | {
            f" ({kind})": flat for kind, flat in self._anchor.state().items()
        }

    def _exchange(self, step: int, delay: int) -> None:
        """Sends the movement of this replica in the current round, bucket by bucket.

        If there is no delay and each bucket is a separate message, the update of a bucket is
        applied while the next bucket is in flight. So at most two buckets are in memory.
        """
        self._arrived = None
        self._steps_left.fill_(delay)
        weight = 1.0
        found, weights = self._weights()
        if self._local_steps and any(
            taken := self._taken.tolist()
        ):  # a replica's movement counts in proportion to its local steps in this round
            weight = taken[self.link.replica] * len(taken) / sum(taken)
        if not self._divides:
            self._in_flight.append((self.channel.start(step), []))
        for pipeline in self.channel.pipelines:
            self._send(pipeline, weights, step, weight)
            if not delay and len(self._in_flight) > 1:
                self._land_next(weights)
        if not delay:
            self._land_next(weights)
        if weights is not found:
            copy(found, weights)
        self._taken.zero_()

    def _send(
        self,
        pipeline: BucketPipeline,
        weights: Sequence[Tensor],
        step: int,
        weight: float,
    ) -> None:
        moved = self._movement(pipeline.bucket, weights, weight)
        pieces = pipeline.bucket.layout.parts(moved)
        if self._divides:
            transfer = self.channel.send(pieces, step, pipeline)
            self._in_flight.append((transfer, []))
            lost = transfer.verdict.bad
        else:
            transfer, _ = self._in_flight[-1]
            lost = self.channel.send_bucket(transfer, pipeline, pieces)
        if isinstance(lost, Tensor) and lost.dim():
            # the bucket has nonfinite values if any element of the tensor `lost` is nonzero
            lost = lost.any()
        self._lost[pipeline.bucket.first] = lost
        unsent: Unsent = None
        if transfer.own:
            own = transfer.own.pop()
            # an accelerator computes the unsent part again later, to save memory
            if self.channel.runtime.decides_on_device:
                unsent = (own, weight)
            else:
                unsent = torch.sub(moved, self._decoded(pipeline.bucket, own), out=moved)
        self._in_flight[-1][1].append((pipeline, unsent))

    def _movement(self, bucket: Bucket, weights: Sequence[Tensor], weight: float) -> Tensor:
        """Returns the movement of a bucket's parameters in this round (the anchor minus the current
        parameters), times `weight`."""  # shapes: -> [rows of the bucket, chunk]
        moved = self._position(bucket, weights)
        start = self._anchor.flat
        torch.sub(
            self._rounded(start, bucket, weights) if self._rounds else start[bucket.rows],
            moved,
            out=moved,
        )
        if weight != 1.0:
            return moved.mul_(weight)
        return moved

    def _rest(
        self, bucket: Bucket, unsent: Tensor | tuple[Update, float], weights: Sequence[Tensor]
    ) -> Tensor:
        """Returns the part of a bucket's movement that was not sent. Must be called before the
        anchor moves."""
        # shapes: -> [rows of the bucket, chunk]
        if isinstance(unsent, Tensor):
            return unsent
        own, weight = unsent
        moved = self._movement(bucket, weights, weight)
        return torch.sub(moved, self._decoded(bucket, own), out=moved)

    def _decoded(self, bucket: Bucket, own: Update) -> Tensor:
        """Decodes the part of a bucket's movement that this replica sent."""
        # shapes: -> [rows of the bucket, chunk]
        return own.flat()

    def _land(self) -> None:
        """Waits for the update in flight, moves the anchor by this update, and then moves the
        parameters."""
        found, weights = self._weights()
        if self._arrived is not None:
            for pipeline in self.channel.pipelines:
                self._follow(pipeline.bucket, self._arrived[pipeline.bucket.rows], None, weights)
        for transfer, _ in self._in_flight:
            transfer.forward()
        while self._in_flight:
            self._land_next(weights)
        if weights is not found:
            copy(found, weights)
        self._arrived = None
        self._steps_left.zero_()

    def _land_next(self, weights: Sequence[Tensor]) -> None:
        transfer, parts = self._in_flight.popleft()
        update = transfer.receive()
        for pipeline, unsent in parts:
            if unsent is None:
                rest = None
            else:
                rest = self._rest(pipeline.bucket, unsent, weights)
            self._follow(
                pipeline.bucket,
                update.rows_of(pipeline, transfer.pipeline.bucket.first),
                rest,
                weights,
            )
            del rest  # frees `rest` before the next bucket allocates a tensor of the same size

    def _follow(
        self, bucket: Bucket, update: Tensor, unsent: Tensor | None, weights: Sequence[Tensor]
    ) -> None:
        """Moves the anchor of a bucket by `update`. Then moves the bucket's parameters to the
        anchor, except for the part of their movement that they keep.

        Shapes: update and unsent `[rows of the bucket, chunk]`; weights one local shape per
        parameter.
        """
        self._anchor.step(bucket.rows, update)
        target = anchor = self._anchor.flat[bucket.rows]
        if unsent is not None:
            if self._rounds:
                begun = self._rounded(self._anchor.flat, bucket, weights)
            else:
                begun = anchor
            target = torch.sub(begun, unsent, out=unsent)
        elif self._keep:
            position = self._position(bucket, weights)
            target = torch.lerp(anchor, position, self._keep, out=position)
        lost = self._lost.get(bucket.first, False)
        if target is anchor:
            pass
        elif isinstance(lost, Tensor):
            torch.where(lost, anchor, target, out=target)
        elif lost:  # this replica's movement was not finite, so its weights are set to the anchor
            target = anchor
        copy(bucket.cut(weights), bucket.layout.parts(target))

    def _arriving(self) -> Tensor:
        """Waits for the update in flight, stores it and returns it. Returns zeros if no update is
        in flight.
        """
        # [rows, chunk]
        if self._arrived is None:
            self._arrived = self.layout.zeros(self.channel.runtime.device)
            for transfer, _ in self._in_flight:
                transfer.forward()
            while self._in_flight:
                transfer, _ = self._in_flight.popleft()
                self._arrived[transfer.pipeline.bucket.rows] = transfer.receive().flat()
        return self._arrived

    def _position(self, bucket: Bucket, weights: Sequence[Tensor]) -> Tensor:
        """Returns an fp32 copy of the parameters in a bucket."""
        # shapes: -> [rows of the bucket, chunk]
        return bucket.layout.flatten(bucket.cut(weights), self.channel.runtime.device)

    def _rounded(self, flat: Tensor, bucket: Bucket, weights: Sequence[Tensor]) -> Tensor:
        """Returns the rows of a bucket from `flat`, rounded to the dtype of the parameters. So the
        rounding error between fp32 anchor and parameters is not sent as a movement.
        """
        rows = flat[bucket.rows]
        types = [weight.dtype for weight in bucket.cut(weights)]
        parts = [
            part.to(dtype) for part, dtype in zip(bucket.layout.parts(rows), types, strict=True)
        ]
        return bucket.layout.flatten(parts, rows.device)

    def _weights(self) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the local parameters, and contiguous versions of these parameters, which can be
        written in pieces. If the two lists differ, the caller must copy the contiguous versions
        back.
        """
        found = locals_of(self.parameters)
        return found, found if all(each.is_contiguous() for each in found) else [
            each.contiguous() for each in found
        ]


class HoldingReplicator(ParameterReplicator):
    """A ParameterReplicator that keeps the padding rows of embeddings unchanged. It sets their
    updates to zero, because the codec would decode small nonzero values for these rows.
    """

    def forget_held_rows(self) -> None:
        vars(self).pop("_places", None)

    def _follow(
        self, bucket: Bucket, update: Tensor, unsent: Tensor | None, weights: Sequence[Tensor]
    ) -> None:
        super()._follow(bucket, self._held(bucket, update), unsent, weights)

    def _decoded(self, bucket: Bucket, own: Update) -> Tensor:
        return self._held(bucket, own.flat())

    def _held(self, bucket: Bucket, flat: Tensor) -> Tensor:
        """Returns a copy of `flat` with zeros in the padding rows of embeddings."""
        # shapes: -> [rows of the bucket, chunk]
        return flat.reshape(-1).index_fill(0, self._places[bucket.first], 0.0).view_as(flat)

    @cached_property
    def _places(self) -> dict[int, Tensor]:
        """The positions in each bucket that belong to padding rows of embeddings, by the bucket's
        first row.
        """
        marks = [torch.zeros_like(weight) for weight in locals_of(self.parameters)]
        for mark, parameter in zip(marks, self.parameters.values(), strict=True):
            if (row := padding_row(parameter)) is not None:
                mark[row] = 1.0
        marked = self.layout.flatten(marks, self.channel.runtime.device)
        found = {}
        for pipeline in self.channel.pipelines:
            bucket = pipeline.bucket
            found[bucket.first] = marked[bucket.rows].view(-1).nonzero().view(-1)
        return found
