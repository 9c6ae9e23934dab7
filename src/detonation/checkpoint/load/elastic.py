"""Elastic: what a rank of a world of another shape takes from a checkpoint, so that nothing untold is lost.

R replicas saved, R' go on. What differs between replicas becomes, for replica j of the new world:

    memory     r'_j = R'/R * sum of r_i over the i with place(i) = j     place(i) = i if R <= R' else floor(i * R' / R)
    all else   the mean over all i (where they are bitwise equal: that)

The first keeps the mean of the memories, (1/R') sum r' = (1/R) sum r, which is what they would add up to once told:
neighbours are merged by mean, and a joiner starts with zero. The second keeps the mean of the weights, and so how far
the replicas have moved from their anchor on average, which is the signal of the round that is open. What an owner has
not told is the same for all replicas: it is put together in the coordinates of the parameters and dealt out again.
"""

import torch
from torch import Tensor

from detonation.checkpoint.files.reader import Piece, Saved, assembled
from detonation.checkpoint.save.snapshot import Box
from detonation.core.flat.layout import Layout
from detonation.core.link.coordinates import Place
from detonation.core.link.owners import Owners
from detonation.core.replicator.channel import Channel
from detonation.core.schemes.buckets import run


class Elastic:
    """The state for `place`, taken from a checkpoint of a world of another shape."""

    def __init__(self, saved: Saved, place: Place) -> None:
        self._saved, self._place = saved, place
        self._before = saved.manifest.replicas

    def agreed(self, key: str, box: Box | None, alike: bool = False) -> Tensor:
        """What all replicas share from now on; without a box, one that no shard has a part of.

        alike: the replicas are known to have been equal, so that one of them is enough.
        """
        replicas = [self._place.replica * self._before // self._place.replicas] if alike else range(self._before)
        if box is not None:
            return mean([self._saved.part(replica, key, box) for replica in replicas], key)
        everyone = [file.tensor(key) for replica in replicas for file in self._saved.shards(replica)]
        return mean(everyone, key)

    def memory(self, key: str, box: Box) -> Tensor:
        """This replica's share of what the replicas had not told."""
        mine = members(self._place.replica, self._before, self._place.replicas)
        if not mine:
            return torch.zeros(box.shape)
        total = sum((self._saved.part(replica, key, box).double() for replica in mine), torch.zeros(()).double())
        return (total * (self._place.replicas / self._before)).float()

    def owned(self, key: str, channel: Channel, boxes: dict[str, Box]) -> list[Tensor] | None:
        """What the owners had not told, for each parameter of `channel`; None where there were no owners."""
        if any(key not in file.keys for file in self._saved.shards(0)):
            return None
        parts = [self._of_shard(key, channel, shard) for shard in range(self._saved.manifest.shards)]
        return [assembled([part[name] for part in parts], box, key) for name, box in boxes.items()]

    def _of_shard(self, key: str, channel: Channel, shard: int) -> dict[str, Piece]:
        """What the owners among the replicas of one shard had not told, by parameter."""
        files = [self._saved.file(replica, shard) for replica in range(self._before)]
        boxes = {slot.name: files[0].boxes[f"model.{slot.name}"] for slot in channel.layout.slots}
        shapes = {name: box.shape for name, box in boxes.items()}
        layout = Layout.of(shapes, channel.layout.chunk, channel.layout.tile)
        owners = Owners(layout.rows, self._before, run(channel.engine.codec))
        coefficients = owners.collect([file.tensor(key) for file in files])
        parts = layout.parts(channel.engine.codec.basis.inverse(coefficients))
        pieces = [Piece(box, part.dtype, part.__getitem__) for box, part in zip(boxes.values(), parts, strict=True)]
        return dict(zip(boxes, pieces, strict=True))


def members(replica: int, before: int, now: int) -> range:
    """The replicas of a world of `before` whose memory goes to `replica` of one of `now`.

    >>> [list(members(j, 4, 2)) for j in range(2)], [list(members(j, 2, 3)) for j in range(3)]
    ([[0, 1], [2, 3]], [[0], [1], []])
    """
    if before <= now:
        return range(replica, min(replica + 1, before))
    return range(-(-replica * before // now), -(-(replica + 1) * before // now))


def mean(tensors: list[Tensor], key: str) -> Tensor:
    """The tensor that all are, or the mean of what differs. Raises `ValueError` for whole numbers that differ."""
    first = tensors[0]
    if all(torch.equal(first, other) for other in tensors[1:]):
        return first
    if not first.is_floating_point():
        raise ValueError(
            f"{key} differs between replicas or shards and cannot be merged: resume with as many as before"
        )
    return torch.stack([tensor.double() for tensor in tensors]).mean(0).to(first.dtype)


def owners_share(pieces: list[Tensor], channel: Channel) -> Tensor:
    """This replica's rows of what the owners have not told."""  # [owned, chunk]
    codec = channel.engine.codec
    flat = codec.basis.forward(channel.layout.flatten(pieces, torch.device("cpu")))
    owners = Owners(len(flat), channel.link.replicas, run(codec))
    return owners.deal(flat, flat.new_zeros(flat.shape[1]))[channel.link.replica]
