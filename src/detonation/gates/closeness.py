"""Closeness: replicas that round differently stay within rounding of each other.

They receive the same messages, so what they compute from them differs by rounding alone, and by as
much as has added up since it was equal. So in each step all replicas take over a part of the agreed
state of replica 0, another one each time, and a comparison measures distances in the place of bits.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from detonation.core.agreement.consensus import StopConsensus
from detonation.core.agreement.desync import Difference, differences
from detonation.core.agreement.gates import StepGate
from detonation.core.flat import weight_hooks
from detonation.core.link.link import Link
from detonation.core.replicator.base import Replicator

PERIOD = 1000
"""Steps in which every number of the agreed state is made equal once: no difference is older."""
MOST_MOVED = 1 / 64
"""The part of a tensor's movement within `PERIOD` steps by which replicas may differ."""
_SIGNS = 8
_STRIP = 1 << 17
"""Numbers that are projected at once."""
_FP32 = torch.finfo(torch.float32).eps


class Closeness(StepGate):
    """Makes a part of the agreed state equal in each step, and compares all of it by distance.

    A part is 1 / `PERIOD` of the numbers of each replicator's `replicated` tensors; under rounds of
    several steps as many times more before the message of a round leaves. The number of the step
    says which, so nothing of it is saved. Replica 0 sends, and the link counts the bytes; where an
    elastic axis has lost it, nobody takes anything over. So the messages alone make the state of
    replica 0, and of no other. moved: The `movements` before a checkpoint.
    """

    def __init__(self, moved: Mapping[str, float] | None = None) -> None:
        self._step, self._taken, self._apart, self._moved = 0, 0, 0.0, moved or {}
        self._replicators: Sequence[Replicator] = ()
        self._seen: dict[
            tuple[Link, str], list[tuple[int, list[float]]]
        ] = {}  # projections of earlier steps

    @torch.no_grad()
    def attach(
        self, consensus: StopConsensus, replicators: Sequence[Replicator], step: int
    ) -> None:
        """Takes its place in the steps of `replicators` from `step` on."""
        self._step, self._replicators = step, replicators
        if self not in consensus.gates:
            consensus.gates.append(self)
        consensus.compare = self._compare
        for link, name, tensor in self._fractions():
            if (link, name) not in self._seen:
                self._seen[link, name] = [(step, projections(tensor).tolist())]

    def _fractions(self) -> list[tuple[Link, str, Tensor]]:
        found = [
            (each.link, *item) for each in self._replicators for item in each.replicated().items()
        ]
        return [item for item in found if item[2].is_floating_point()]

    def moved(self, step: int, idle: bool) -> None:
        self._step = step + 1
        self._taken += 1
        for each in self._replicators:
            if each.round.sends(step):
                # an anchor is agreed on along its own axis; those inside it hold it, too
                inner = [
                    e.link
                    for e in self._replicators
                    if e.stepped and e.link.local_ranks == each.link.local_ranks
                ]
                for link in dict.fromkeys([each.link, *(inner if not each.stepped else ())]):
                    self._align(
                        each,
                        link,
                        (step + 1 + each.round.delay - each.round.offset) // each.round.every,
                    )

    def _align(self, replicator: Replicator, link: Link, turn: int) -> None:
        """Takes over a part of the state of replica 0 along `link`. Collective."""
        tensors = {
            name: each for name, each in replicator.replicated().items() if each.is_floating_point()
        }
        if replicator.stepped and not all(each.stepped for each in self._replicators):
            # weights follow an anchor: to move them alone is a movement, which the outer momentum
            # would multiply
            tensors = {
                name: each for name, each in tensors.items() if name not in replicator.parameters
            }
        ends = list(accumulate((each.numel() for each in tensors.values()), initial=0))
        turns = max(1, PERIOD // replicator.round.every)
        size = -(-ends[-1] // turns)
        low, high = turn % turns * size, min(turn % turns * size + size, ends[-1])
        cut = {
            name: slice(max(low - begin, 0), high - begin)
            for name, begin, end in zip(tensors, ends, ends[1:], strict=False)
            if max(low, begin) < min(high, end)
        }
        if not cut:
            return
        mine = [tensors[name].reshape(-1)[part] for name, part in cut.items()]
        device = replicator.channel.runtime.device
        mark = torch.ones(1, dtype=torch.uint8, device=device)
        sent = torch.cat([*(each.to(device).view(torch.uint8) for each in mine), mark])
        # the others add zeros to its bytes, so that all get the same bits; the mark says whether it
        # took part
        total = link.all_reduce(sent if link.replica == 0 else sent.zero_())()
        parts = torch.split(total[:-1], [each.nbytes for each in mine])
        mended = {}
        for (name, part), own, theirs in zip(cut.items(), mine, parts, strict=True):
            new = torch.where(total[-1] == 1, theirs.clone().view(own.dtype), own.to(device))
            in_place = replicator.stepped and tensors[name].is_contiguous()
            whole = tensors[name].view(-1) if in_place else tensors[name].reshape(-1).clone()
            whole[part] = new
            if not in_place:
                mended[name] = whole.view(tensors[name].shape)
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
        """As `differences`, but for tensors of fractions, which are compared by their distance.

        Collective.
        """
        floats = {name: each for name, each in tensors.items() if each.is_floating_point()}
        others = {name: each for name, each in tensors.items() if name not in floats}
        found = differences(link, others, device, {**(options or {}), **dict.fromkeys(floats, "")})
        if not floats or any(each.name not in {*others, *(options or {})} for each in found):
            return found
        words = list[float]()
        for name, tensor in floats.items():
            words += (mine := projections(tensor).tolist()) + [self._movement(link, name, mine)]
        sent = torch.tensor(words, dtype=torch.float64, device="cpu").view(torch.int64)
        table = link.collect(sent.to(device), apart=True).cpu().view(torch.float64)
        rows = table.view(link.replicas * link.local_ranks, len(floats), _SIGNS + 1).tolist()
        for number, (name, tensor) in enumerate(floats.items()):
            of_all = [row[number] for row in rows]
            self._apart = max(self._apart, farthest([row[:_SIGNS] for row in of_all]))
            difference = _difference(name, of_all, torch.finfo(tensor.dtype).eps, link.local_ranks)
            found += [difference] if difference else []
        return found

    def _movement(self, link: Link, name: str, now: list[float]) -> float:
        """How far a tensor moved in the last `PERIOD` steps, or since it was first seen; a new one
        came from zero."""
        seen = self._seen.setdefault((link, name), [(self._step, [0.0] * _SIGNS)])
        while len(seen) > 1 and seen[1][0] <= self._step - PERIOD:
            del seen[0]
        if seen[-1][0] <= self._step - PERIOD // 10:
            seen.append((self._step, now))
        before = self._moved.get(name, 0.0) if self._taken < PERIOD else 0.0
        return max(distance(seen[0][1], now), before)

    def movements(self) -> dict[str, float]:
        """How far each tensor moved of late, by name: a part of it is how far replicas may be
        apart."""
        found = dict[str, float]()
        for link, name, tensor in self._fractions():
            moved = self._movement(link, name, projections(tensor).tolist())
            found[name] = max(moved, found.get(name, 0.0))
        return found

    def measure(self) -> float:
        """The largest part of a tensor's norm between replicas; infinity where they are not close.

        Collective.
        """
        self._apart = 0.0
        each = [
            self._compare(r.link, r.replicated(), r.channel.runtime.device)
            for r in self._replicators
        ]
        return math.inf if any(each) else self._apart


def projections(tensor: Tensor) -> Tensor:
    """Sums of the numbers of `tensor` with fixed random signs: their mean square is its squared
    norm, to about a half.

    Shapes: any -> `[8]` fp64 on the CPU.
    """
    flat, places = (
        tensor.detach().reshape(-1),
        torch.arange(_SIGNS, dtype=torch.int64, device=tensor.device),
    )
    total = torch.zeros(_SIGNS, dtype=torch.float64, device=tensor.device)
    for low in range(0, len(flat), _STRIP):
        part = flat[low : low + _STRIP].double()
        mixed = torch.arange(low + 1, low + 1 + len(part), dtype=torch.int64, device=part.device)
        for factor in (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9):
            mixed = mixed * factor
            mixed = mixed.bitwise_xor_(mixed >> 31)
        signs = (mixed.unsqueeze(0) >> places.unsqueeze(1)).bitwise_and_(1).mul_(2).sub_(1)
        total += signs.double() @ part
    return total.cpu()


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """About the norm of the difference of two tensors, by operations that round alike anywhere.

    >>> distance([3.0, 1.0], [0.0, 1.0]) == math.sqrt(4.5)
    True
    """
    total = 0.0
    for a, b in zip(one, other, strict=True):
        total += (a - b) * (a - b)
    return math.sqrt(total / len(one))


def farthest(rows: Sequence[Sequence[float]]) -> float:
    """The largest distance from the first of `rows`, as a part of its norm.

    >>> farthest([[4.0, 0.0], [4.0, 1.0], [4.0, 0.0]])
    0.25
    """
    norm, far = distance(rows[0], [0.0] * len(rows[0])), max(distance(row, rows[0]) for row in rows)
    return (far / norm if norm else math.inf) if far else 0.0


def tolerance(norm: float, movement: float, eps: float) -> float:
    """The distance that replicas may have in a tensor: what rounding can add up to in `PERIOD`
    steps.

    Once equal, a number is rounded once per step, in fp32, and stored in its type: an eps of fp32
    per step and one of the type, of the norm. The steps themselves come from the same messages, so
    that they differ by less than `MOST_MOVED` of the movement, also where the step of a sign turns
    on a last bit.
    """
    return (PERIOD * _FP32 + eps) * norm + MOST_MOVED * movement


def _difference(
    name: str, rows: Sequence[Sequence[float]], eps: float, local_ranks: int
) -> Difference | None:
    """The replicas whose rows, projections and movement of a tensor, are not close to those of the
    most."""
    sums = [list(row[:_SIGNS]) for row in rows]
    norms = [distance(each, [0.0] * _SIGNS) for each in sums]

    def close(a: int, b: int) -> bool:  # false for what is not finite, unless it is equal
        most = tolerance(min(norms[a], norms[b]), max(rows[a][_SIGNS], rows[b][_SIGNS]), eps)
        return repr(sums[a]) == repr(sums[b]) or distance(sums[a], sums[b]) <= most < math.inf

    if all(close(0, each) for each in range(1, len(rows))):
        return None
    near = [
        [other for other in range(len(rows)) if close(each, other)] for each in range(len(rows))
    ]
    usual = max(range(len(rows)), key=lambda each: len(near[each]))
    usual = usual if 2 * len(near[usual]) > len(rows) else 0
    odd = dict.fromkeys(each // local_ranks for each in range(len(rows)) if each not in near[usual])
    return Difference(name, tuple(odd), usual // local_ranks)
