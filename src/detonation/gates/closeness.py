"""Closeness: if replicas round differently, keeps them within rounding error of each other.

Such replicas receive the same messages, so their states differ only by the rounding errors that
accumulate after the states were equal. So the replicas repeatedly copy a part of replica 0's agreed
state (the state that must be equal on all replicas), each time the next part. `verify` compares the
replicas by distance instead of bit for bit.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from detonation.core.agreement import Difference, StepGate, StopConsensus, differences
from detonation.core.flat import weight_hooks
from detonation.core.link import Link
from detonation.core.replicator import Replicator

PERIOD = 1000
"""Number of steps in which every number of the agreed state is copied once to all replicas."""
MOST_MOVED = 1 / 64
"""Replicas may differ by this share of the distance that a tensor moved in the last `PERIOD` steps.
"""
_SIGNS = 8
_STRIP = 1 << 17
"""Number of values that are projected in one operation."""
_FP32 = torch.finfo(torch.float32).eps


class Closeness(StepGate):
    """Copies parts of replica 0's agreed state to all replicas. Compares the whole agreed state of
    the replicas by distance.

    In each step a part is copied: 1 / `PERIOD` of the values in the tensors of
    `Replicator.replicated`. In a round of n steps, n such parts are copied at once, before the
    message of the round. The step number selects the part, so the gate saves no state. The copy is
    an all-reduce, in which all replicas except replica 0 add zeros; the link counts its bytes. If
    an elastic axis has lost replica 0, nothing is copied.

    Args:
        moved: The result of `movements` when a checkpoint was saved.
    """

    def __init__(self, moved: Mapping[str, float] | None = None) -> None:
        self._step = 0
        self._taken = 0
        self._apart = 0.0
        self._moved = moved or {}
        self._replicators: Sequence[Replicator] = ()
        # for each tensor, its projections at earlier steps
        self._seen: dict[tuple[Link, str], list[tuple[int, list[float]]]] = {}

    @torch.no_grad()
    def attach(
        self, consensus: StopConsensus, replicators: Sequence[Replicator], step: int
    ) -> None:
        """Attaches this gate to all steps of `replicators` from step number `step` on."""
        self._step = step
        self._replicators = replicators
        if self not in consensus.gates:
            consensus.gates.append(self)
        consensus.compare = self._compare
        for link, name, tensor in self._fractions():
            if (link, name) not in self._seen:
                self._seen[link, name] = [(step, projections(tensor).tolist())]

    def _fractions(self) -> list[tuple[Link, str, Tensor]]:
        return [
            (each.link, name, tensor)
            for each in self._replicators
            for name, tensor in _floats(each.replicated()).items()
        ]

    def moved(self, step: int, idle: bool) -> None:
        self._step = step + 1
        self._taken += 1
        for replicator in self._replicators:
            if replicator.round.sends(step):
                rounds = replicator.round
                turn = (step + 1 + rounds.delay - rounds.offset) // rounds.every
                for link in self._links_of(replicator):
                    self._align(replicator, link, turn)

    def _links_of(self, replicator: Replicator) -> Iterable[Link]:
        """Returns the links along which all replicas must have equal state of `replicator`: the
        link of this replicator and, if it has an anchor, the links of the inner levels.
        """
        links = [replicator.link]
        if not replicator.stepped:
            links += [
                inner.link
                for inner in self._replicators
                if inner.stepped and inner.link.local_ranks == replicator.link.local_ranks
            ]
        return dict.fromkeys(links)

    def _align(self, replicator: Replicator, link: Link, turn: int) -> None:
        """Copies the part with index `turn` of replica 0's state to all replicas of `link`.
        Collective.
        """
        tensors = _floats(replicator.replicated())
        if replicator.stepped and not all(each.stepped for each in self._replicators):
            # If an outer level has an anchor, copy no weights, because the anchor would not change.
            # The outer momentum would amplify a change that only the weights have.
            for name in replicator.parameters:
                tensors.pop(name, None)
        cut = _cut(tensors, turn, max(1, PERIOD // replicator.round.every))
        if not cut:
            return
        mine = [tensors[name].reshape(-1)[part] for name, part in cut.items()]
        device = replicator.channel.runtime.device
        mark = torch.ones(1, dtype=torch.uint8, device=device)
        sent = torch.cat([*(each.to(device).view(torch.uint8) for each in mine), mark])
        # The sum has the bits of replica 0, because all other replicas send zeros.
        # The last byte of the sum is the 1 in `mark` of replica 0, or 0 if replica 0 was lost.
        if link.replica != 0:
            sent.zero_()
        total = link.all_reduce(sent)()
        present = total[-1] == 1
        parts = torch.split(total[:-1], [each.nbytes for each in mine])
        mended = {}
        for (name, part), own, theirs in zip(cut.items(), mine, parts, strict=True):
            tensor = tensors[name]
            agreed = theirs.clone().view(own.dtype)
            new = torch.where(present, agreed, own.to(device))
            if replicator.stepped and tensor.is_contiguous():
                tensor.view(-1)[part] = new
            else:
                whole = tensor.reshape(-1).clone()
                whole[part] = new
                mended[name] = whole.view(tensor.shape)
        if mended:
            replicator.repair(mended)
        weight_hooks.moved()

    def _compare(
        self,
        link: Link,
        tensors: Mapping[str, Tensor],
        device: torch.device,
        options: Mapping[str, str] | None = None,
    ) -> list[Difference]:
        """Compares the replicas as `differences` does, but compares floating-point tensors by their
        distance. Collective.
        """
        options = options or {}
        floats = _floats(tensors)
        others = {name: each for name, each in tensors.items() if name not in floats}
        names = dict.fromkeys(floats, "")
        found = differences(link, others, device, {**options, **names})
        if not floats or any(each.name not in {*others, *options} for each in found):
            return found
        words: list[float] = []
        for name, tensor in floats.items():
            mine = projections(tensor).tolist()
            words += [*mine, self._movement(link, name, mine)]
        sent = torch.tensor(words, dtype=torch.float64, device="cpu").view(torch.int64)
        table = link.collect(sent.to(device), apart=True).cpu().view(torch.float64)
        ranks = link.replicas * link.local_ranks
        rows = table.view(ranks, len(floats), _SIGNS + 1).tolist()
        for number, (name, tensor) in enumerate(floats.items()):
            of_all = [row[number] for row in rows]
            self._apart = max(self._apart, farthest([row[:_SIGNS] for row in of_all]))
            eps = torch.finfo(tensor.dtype).eps
            difference = _difference(name, of_all, eps, link.local_ranks)
            if difference:
                found.append(difference)
        return found

    def _movement(self, link: Link, name: str, now: list[float]) -> float:
        """Returns the distance that a tensor moved in the last `PERIOD` steps, or since this gate
        first saw the tensor. For a new tensor, returns the distance of the tensor from zero.
        """
        seen = self._seen.setdefault((link, name), [(self._step, [0.0] * _SIGNS)])
        while len(seen) > 1 and seen[1][0] <= self._step - PERIOD:
            del seen[0]
        if seen[-1][0] <= self._step - PERIOD // 10:
            seen.append((self._step, now))
        _, first = seen[0]
        movement = distance(first, now)
        if self._taken < PERIOD:
            movement = max(movement, self._moved.get(name, 0.0))
        return movement

    def movements(self) -> dict[str, float]:
        """Returns the recent movement of each tensor, by name. Replicas may differ by `MOST_MOVED`
        times this movement.
        """
        found: dict[str, float] = {}
        for link, name, tensor in self._fractions():
            moved = self._movement(link, name, projections(tensor).tolist())
            found[name] = max(moved, found.get(name, 0.0))
        return found

    def measure(self) -> float:
        """Returns the largest distance of a tensor on any replica from the same tensor on the first
        replica, relative to the norm of the tensor. Returns infinity if the replicas are not close.
        Collective.
        """
        self._apart = 0.0
        found = []
        for replicator in self._replicators:
            device = replicator.channel.runtime.device
            found += self._compare(replicator.link, replicator.replicated(), device)
        if found:
            return math.inf
        return self._apart


def _floats(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: each for name, each in tensors.items() if each.is_floating_point()}


def _cut(tensors: Mapping[str, Tensor], turn: int, turns: int) -> dict[str, slice]:
    """Cuts all values of `tensors` into `turns` equal parts. Returns the part with index `turn`, as
    one slice of each tensor that this part overlaps.
    """
    ends = list(accumulate((each.numel() for each in tensors.values()), initial=0))
    size = -(-ends[-1] // turns)
    low = turn % turns * size
    high = min(low + size, ends[-1])
    return {
        name: slice(max(low - begin, 0), high - begin)
        for name, begin, end in zip(tensors, ends, ends[1:], strict=False)
        if max(low, begin) < min(high, end)
    }


def projections(tensor: Tensor) -> Tensor:
    """Returns eight sums of the values of `tensor`. In each sum, every value has a fixed random
    sign. The mean square of these sums estimates the squared norm of `tensor`, with a relative
    error of about one half.

    Shapes: any -> `[8]` fp64 on the CPU.
    """
    flat = tensor.detach().reshape(-1)
    bits = torch.arange(_SIGNS, dtype=torch.int64, device=tensor.device)
    total = torch.zeros(_SIGNS, dtype=torch.float64, device=tensor.device)
    for low in range(0, len(flat), _STRIP):
        part = flat[low : low + _STRIP].double()
        mixed = torch.arange(low + 1, low + 1 + len(part), dtype=torch.int64, device=part.device)
        for factor in (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9):
            mixed = mixed * factor
            mixed = mixed.bitwise_xor_(mixed >> 31)
        shifted = mixed.unsqueeze(0) >> bits.unsqueeze(1)
        signs = shifted.bitwise_and_(1).mul_(2).sub_(1)
        total += signs.double() @ part
    return total.cpu()


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Estimates the norm of the difference of two tensors from their projections. All operations
    round in the same way on every processor.

    >>> distance([3.0, 1.0], [0.0, 1.0]) == math.sqrt(4.5)
    True
    """
    total = 0.0
    for a, b in zip(one, other, strict=True):
        total += (a - b) * (a - b)
    return math.sqrt(total / len(one))


def farthest(rows: Sequence[Sequence[float]]) -> float:
    """Compares a tensor on several ranks: each of `rows` holds the `projections` of the tensor on
    one rank. Returns the largest distance from the first row, relative to the first row's norm.

    >>> farthest([[4.0, 0.0], [4.0, 1.0], [4.0, 0.0]])
    0.25
    """
    norm = distance(rows[0], [0.0] * len(rows[0]))
    far = max(distance(row, rows[0]) for row in rows)
    if not far:
        return 0.0
    if not norm:
        return math.inf
    return far / norm


def tolerance(norm: float, movement: float, eps: float) -> float:
    """Returns the distance that a tensor may have between two replicas: the rounding that can add
    up in `PERIOD` steps.

    A value that was once equal on both replicas is rounded once per step in fp32, and once to the
    dtype of the tensor. So the bound for rounding is the norm of the tensor, multiplied by the sum
    of one fp32 epsilon per step and one epsilon of the dtype. Both replicas compute updates from
    the same messages. So these updates differ by less than `MOST_MOVED` times the movement of the
    tensor, even if the last bit of a value decides the sign of an update.
    """
    return (PERIOD * _FP32 + eps) * norm + MOST_MOVED * movement


def _difference(
    name: str, rows: Sequence[Sequence[float]], eps: float, local_ranks: int
) -> Difference | None:
    """Compares a tensor on several ranks: each of `rows` holds the `projections` of the tensor on
    one rank, followed by its movement (the distance that it moved in the last `PERIOD` steps).

    Returns the replicas whose rows are not close to the rows of the majority; None if there are
    none.
    """
    sums = [list(row[:_SIGNS]) for row in rows]
    norms = [distance(each, [0.0] * _SIGNS) for each in sums]

    def close(a: int, b: int) -> bool:  # nonfinite numbers are close only if they are equal
        if repr(sums[a]) == repr(sums[b]):
            return True
        norm = min(norms[a], norms[b])
        movement = max(rows[a][_SIGNS], rows[b][_SIGNS])
        most = tolerance(norm, movement, eps)
        return distance(sums[a], sums[b]) <= most < math.inf

    if all(close(0, each) for each in range(1, len(rows))):
        return None
    ranks = range(len(rows))
    near = [[other for other in ranks if close(each, other)] for each in ranks]
    source = max(ranks, key=lambda each: len(near[each]))
    if 2 * len(near[source]) <= len(rows):
        source = 0
    odd = dict.fromkeys(each // local_ranks for each in ranks if each not in near[source])
    return Difference(name, tuple(odd), source // local_ranks)
