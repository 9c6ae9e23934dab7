"""Elastic loading: computes the state of a rank, if the run has another number of replicas or
shards than the saved run. The state includes the memory of unsent values.

R replicas saved the checkpoint, and R' replicas continue. Two rules merge the state that differs
between saved replicas. They give replica j of the new run:

    memory            r'_j = R'/R * sum of r_i over the i with target(i) = j
                      target(i) = i if R <= R' else floor(i * R' / R)
    everything else   the mean over all i that have it (if all are bitwise equal: that tensor)

The first rule keeps the mean of the memories: (1/R') sum r' = (1/R) sum r. So what is still to be
sent stays the same. A joining replica starts with zero. The second rule keeps the mean of the
weights. So it also keeps what the current round will send: the mean of the replicas' distances from
their anchor.
Owners (replicas that aggregate rows for all) hold the server residual: what they have aggregated
and not sent yet. The saved server residuals are joined by coordinate. Each new owner gets the
values of its rows.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from detonation.checkpoint.files.reader import (
    Box,
    CheckpointReader,
    ShardReader,
    TensorPart,
    assemble,
)
from detonation.checkpoint.snapshot import level_sizes_in
from detonation.core.flat.layout import Layout
from detonation.core.flat.rows import RowOwners
from detonation.core.link import Coordinates, Level, key_of_axis, replicas_along, sizes_of
from detonation.core.replicator import Channel
from detonation.core.schemes import rows_of_a_turn
from detonation.wire.units import ShardUnit, load_shard_state, shard_units


class Elastic:
    """Reads the state of the rank with the coordinates `own` from a checkpoint of a run with
    another number of replicas or shards.

    among: the replicas that are read for tensors that all replicas share; by default all replicas.
    If the replicas were equal only up to rounding, only the first one is read. levels: the levels
    of this run, of which the outermost may have another size; not needed for state that all
    replicas share.
    """

    def __init__(
        self,
        saved: CheckpointReader,
        own: Coordinates,
        among: Sequence[int] | None = None,
        levels: Sequence[Level] = (),
    ) -> None:
        self._saved = saved
        self._own = own
        self._levels = levels
        self._among: Sequence[int] = range(saved.manifest.replicas)
        if among is not None:
            self._among = among
        self._before = saved.manifest.replicas
        like = own.replica * self._before // own.replicas
        first = self._among[0]
        if like in self._among and not saved.file(first, 0).moved:
            self._like = like
        else:
            self._like = first

    def agreed(self, key: str, box: Box | None, alike: bool = False, some: bool = False) -> Tensor:
        """The part `box` of a tensor that all replicas of this run share, merged from the saved
        replicas.

        Args:
            box: None for a tensor that is not sharded.
            alike: True if the replicas are equal, so that reading one of them is enough.
            some: True to skip replicas without the tensor.
        """
        replicas = self._replicas(alike)
        if some:
            replicas = [replica for replica in replicas if key in self._saved.file(replica, 0)]
        if box is not None:
            return _merge([self._saved.part(replica, key, box) for replica in replicas], key)
        tensors = [file.tensor(key) for replica in replicas for file in self._saved.shards(replica)]
        return _merge(tensors, key)

    def _replicas(self, alike: bool) -> Sequence[int]:
        if alike:
            return [self._like]
        return self._among

    def own(self, key: str, alike: bool) -> Tensor:
        """A tensor of the base optimizer's state that is not sharded like its parameter. Shards may
        have different values of this tensor.

        Raises `ValueError` if this tensor differs between shards and the number of shards has
        changed.
        """
        replicas = [r for r in self._replicas(alike) if key in self._saved.file(r, 0)]
        if self._saved.manifest.shards == self._own.shards:
            return _merge(
                [self._saved.file(replica, self._own.shard).tensor(key) for replica in replicas],
                key,
            )
        found = [[file.tensor(key) for file in self._saved.shards(replica)] for replica in replicas]
        if any(not torch.equal(first, other) for first, *others in found for other in others):
            raise ValueError(
                f"{key} differs between shards: resume with {self._saved.manifest.shards} shards"
            )
        return _merge([first for first, *_ in found], key)

    def memory(self, key: str, box: Box) -> Tensor:
        """The part `box` of the memory of unsent values with which this replica starts. The memory
        is the sum of the memories of `memory_sources`, times new replicas / saved replicas."""
        size = _inside(self._levels, self._own)
        group, place = divmod(self._own.replica, size)
        sources = memory_sources(group, self._before // size, self._own.replicas // size)
        total = torch.zeros(box.shape, dtype=torch.float64)
        for source in sources:
            total += self._saved.part(source * size + place, key, box)
        return (total * (self._own.replicas / self._before)).float()

    def server_residual(
        self, key: str, channel: Channel, boxes: dict[str, Box]
    ) -> list[Tensor] | None:
        """The server residuals (what owners have aggregated and not sent) of the parameters in
        `boxes`; None if the saved run had no owners.

        Owners on several axes keep the sizes of levels (see `compare_level_sizes`).
        """
        along = range(self._before)
        if self._before == self._own.replicas:
            along = replicas_along(channel.link.axis, self._levels, self._own)
        if all(key not in file.keys for file in self._saved.shards(0)):
            return None
        numbers = range(self._saved.manifest.shards)
        shards = [self._server_residual_of_shard(key, channel, number, along) for number in numbers]
        found = []
        for name, box in boxes.items():
            found.append(assemble([parts[name] for parts in shards], box, key))
        return found

    def _server_residual_of_shard(
        self, key: str, channel: Channel, shard: int, along: Sequence[int]
    ) -> dict[str, TensorPart]:
        """The server residuals (what owners have aggregated and not sent) of one shard, assembled
        from the replicas `along` an axis, by parameter."""
        files = [self._saved.file(replica, shard) for replica in along]
        boxes = {slot.name: files[0].boxes[f"model.{slot.name}"] for slot in channel.layout.slots}
        shapes = {name: box.shape for name, box in boxes.items()}
        layout = Layout.of(shapes, channel.layout.chunk, channel.layout.tile)
        turn = rows_of_a_turn(channel.scheme, len(along))
        owners = RowOwners(layout.rows, len(along), turn)
        if key in files[0].keys:
            saved = [file.tensor(key) for file in files]
            # an older version did not save the sizes of levels, so they were not compared
            if any(len(tensor) != owners.owned for tensor in saved):
                raise ValueError(
                    f"{key} was saved with levels of other sizes than this run has: resume with"
                    " the saved sizes"
                )
            coefficients = owners.collect(saved)  # [rows, chunk]
        else:
            coefficients = layout.zeros(torch.device("cpu"))
        parts = layout.parts(channel.engine.codec.basis.inverse(coefficients))
        return {
            name: TensorPart(box, part.dtype, part.__getitem__)
            for (name, box), part in zip(boxes.items(), parts, strict=True)
        }


def memory_sources(replica: int, before: int, now: int) -> range:
    """The saved replicas whose memory of unsent values goes to `replica`, if the number of replicas
    changes from `before` to `now`.

    >>> [list(memory_sources(j, 4, 2)) for j in range(2)]
    [[0, 1], [2, 3]]
    >>> [list(memory_sources(j, 2, 3)) for j in range(3)]
    [[0], [1], []]
    """
    if before <= now:
        return range(replica, min(replica + 1, before))
    return range(-(-replica * before // now), -(-(replica + 1) * before // now))


def compare_level_sizes(
    saved: CheckpointReader,
    file: ShardReader,
    levels: Sequence[Level],
    own: Coordinates,
) -> str:
    """Compares the numbers of replicas of all levels with those in `file`, a file of `saved`.
    Returns a text if an older version did not save them.

    Raises:
        ValueError: they differ, and the memories cannot be merged so that the replicas of an inner
            level stay equal. They can if all levels are on one axis, or if the size of the
            outermost level alone differs and no level has owners.
    """
    if len(levels) == 1:
        return ""
    before = saved.manifest.replicas
    was = level_sizes_in(file.values)
    now = sizes_of(levels)
    on_one_axis = {own.replicas, *now} == {own.replicas}
    if was is None:
        if before != own.replicas and not on_one_axis:
            raise ValueError(
                f"{saved.path} was saved by {before} replicas on levels of unknown sizes, not by"
                f" {own.replicas}: resume with the saved sizes"
            )
        return "; an older version saved it without the sizes of its levels: not compared"
    same = was == now and before == own.replicas
    was_on_one_axis = {before, *was} == {before}
    owners = any(key.endswith("server_residual") for key in file.keys)
    outermost_alone = (
        not owners and was[:-1] == now[:-1] and before == _inside(levels, own) * was[-1]
    )
    if not (same or (was_on_one_axis and on_one_axis) or outermost_alone):
        raise ValueError(
            f"{saved.path} was saved with levels of {was} replicas, innermost first, this run has"
            f" levels of {now}: resume with levels of {was} replicas"
        )
    return ""


def _inside(levels: Sequence[Level], own: Coordinates) -> int:
    """The number of replicas inside one replica of the outermost level."""
    *inner, outermost = [key_of_axis(axis) for axis, _ in levels]
    size = sizes_of(levels)[-1]
    if size > 1 and outermost in inner:  # axes of one replica are equal, but several axes
        return 1
    return own.replicas // size


def merge_policy(replicas: int, shards: int, own: Coordinates) -> str:
    """Describes how the state of the saved replicas and shards becomes the state of this run."""
    worlds = f"from {replicas} replicas x {shards} shards to {own.replicas} x {own.shards}"
    weights = "weights exact where replicas agreed, else their mean"
    if replicas == own.replicas:
        return f"{worlds}: {weights}; memory exact, resharded"
    joiners = " of neighbours"
    if own.replicas > replicas:
        joiners = "; joiners start with none"
    mean = "its mean over the replicas is kept"
    return f"{worlds}: {weights}; memory merged by mean{joiners}, {mean}"


def _merge(tensors: list[Tensor], key: str) -> Tensor:
    """Merges the tensors of several replicas or shards: returns the first tensor if all are equal,
    else their mean.

    Raises `ValueError` for integers that differ.
    """
    first = tensors[0]
    if all(torch.equal(first, other) for other in tensors[1:]):
        return first
    if not first.is_floating_point():
        raise ValueError(
            f"{key} differs between replicas or shards: resume with as many replicas and shards as"
            " the saved run"
        )
    return torch.stack([tensor.double() for tensor in tensors]).mean(0).to(first.dtype)


def owned_rows(pieces: list[Tensor], channel: Channel) -> Tensor:
    """Returns the coefficients of the rows that this rank owns (aggregates for all replicas), as
    [owned, chunk]. The coefficients are computed from `pieces`, which has one tensor of the local
    shape for each parameter.
    """
    codec = channel.engine.codec
    flat = codec.basis.forward(channel.layout.flatten(pieces, torch.device("cpu")))
    owners = RowOwners(
        len(flat), channel.link.replicas, rows_of_a_turn(channel.scheme, channel.link.replicas)
    )
    return owners.deal(flat)[channel.link.replica]


SHARD = "shard.0."
"""Prefix of the keys under which the state of the shard wire (the compressed communication between
shards) is saved."""
_RESIDUAL = f"{SHARD}residual."


def merge_shard_state(saved: CheckpointReader, model: nn.Module, own: Coordinates) -> str:
    """Loads the unsent gradients in `saved` into the shard wire (the compressed communication
    between shards). All ranks must call this function together.

    Returns in words which state had to be dropped.
    """
    names = {k.removeprefix(_RESIDUAL) for k in saved.file(0, 0).keys if k.startswith(_RESIDUAL)}
    state = {}
    units = [unit for unit in shard_units(model) if unit.reduce is not None]
    for unit in units:
        for name, parameter in unit.parameters.items():
            # this merge does not support tensor parallelism, that is, a second mesh dimension
            one_axis = isinstance(parameter, DTensor) and parameter.device_mesh.ndim == 1
            if name in names and parameter.requires_grad and one_axis:
                state[f"residual.{name}"] = _residual(saved, unit, name, parameter, own)
    load_shard_state(model, state)
    lost = len(names) - len(state)
    if lost:
        return f"; dropped: gradients of {lost} parameters that a shard wire had not sent"
    return ""


def _residual(
    saved: CheckpointReader, unit: ShardUnit, name: str, parameter: Tensor, own: Coordinates
) -> Tensor:
    """The unsent gradients of one parameter with which this rank starts: one row for each other
    node, with gradients for the shard on that node.

    For each shard, one node starts with all unsent gradients of the saved run: the node before the
    shard's own node. So this rank fills only the row for the next node, and all other rows are
    zero. The node after the last node is node 0.
    """
    nodes = unit.link.replicas
    node = unit.link.replica
    size = unit.sizes()[name]
    local_ranks = own.shards // nodes
    owner = (node + 1) % nodes * local_ranks + own.shard % local_ranks
    box = Box.of_shard(parameter, owner, own.shards)
    before = saved.manifest.replicas
    total = sum(
        (_unsent(saved, name, box, replica) for replica in range(before)), torch.zeros(box.shape)
    )
    mean = total.mul_(own.shards / saved.manifest.shards / before).reshape(-1)
    residual = torch.zeros(nodes - 1, size)
    others = [other for other in range(nodes) if other != node]
    residual[others.index((node + 1) % nodes), : len(mean)] = mean
    return residual


def _unsent(saved: CheckpointReader, name: str, box: Box, replica: int) -> Tensor:
    """The part `box` of the unsent gradients of one parameter in the saved `replica`. Each node of
    the replica has saved the gradients that it had not sent to the other nodes. The result is the
    sum of these gradients over the nodes.
    """
    files = saved.shards(replica)
    residuals = [file.tensor(f"{_RESIDUAL}{name}") for file in files]  # [nodes - 1, size] each
    nodes = len(residuals[0]) + 1
    local_ranks = len(files) // nodes
    pieces = []
    for shard, file in enumerate(files):
        own_node, local_rank = divmod(shard, local_ranks)
        rows = []
        for node in range(nodes):
            if node != own_node:  # the residual of a node has a row for each other node
                row = own_node - (own_node > node)
                rows.append(residuals[node * local_ranks + local_rank][row])
        part = file.boxes[f"model.{name}"]
        unsent = torch.stack(rows).sum(0)[: torch.Size(part.shape).numel()].view(part.shape)
        pieces.append(TensorPart(part, unsent.dtype, unsent.__getitem__))
    return assemble(pieces, box, name)
