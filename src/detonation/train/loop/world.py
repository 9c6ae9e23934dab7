"""The world of a run, as one rank sees it: the collectives of the training loop, and who waits for
whom."""

import json
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from detonation.checkpoint.gather import Texts
from detonation.cluster.mesh import compared_digests, fingerprint, weights_digest
from detonation.cluster.survive.membership import Membership
from detonation.cluster.survive.surviving import SurvivingCommunicator
from detonation.core import runtime
from detonation.core.link.communicator import Communicator
from detonation.core.link.elastic_communicator import TextExchange
from detonation.core.replicator.overlap import CommStream
from detonation.train.recipe.schema import Config
from detonation.train.recipe.tables import settings_of, to_table

Gathered = Callable[[], list[list[Any]]]
"""Waits for the values of all ranks: a list of each, in rank order."""


class _Together:
    listening = ""

    def stopped_by(self, numbers: Sequence[float], mine: int) -> int:
        """The signal that ends the run after this step, 0 for none, where each rank got one of
        `numbers`."""
        return int(max(numbers))


class Ranks(_Together):
    """The processes of a mesh ("replicate", "shard"), and how many each replica has.

    The methods are collective.
    """

    def __init__(self, mesh: DeviceMesh, device: torch.device, sizes: list[int]) -> None:
        self.rank, self.size, self.sizes = dist.get_rank(), dist.get_world_size(), sizes
        self._mesh, self._comm = mesh, CommStream(device)
        self._hosts = mesh.get_group("shard")
        if dist.get_backend(self._hosts) != "gloo":
            # Counts of the host go from host to host: a device would first finish its queue.
            ends = [*accumulate(sizes)]
            groups = [
                dist.new_group([*range(e - n, e)], backend="gloo")
                for n, e in zip(sizes, ends, strict=True)
            ]
            self._hosts = next(
                group for group, end in zip(groups, ends, strict=True) if self.rank < end
            )

    def all_gather(self, values: Tensor) -> Gathered:
        """The `values` of all ranks. Until they are asked for, neither host nor device waits."""
        # [n]
        self._comm.wait_for_current(values)
        with self._comm.active():
            everyone = [torch.empty_like(values) for _ in range(self.size)]
            work = dist.all_gather(everyone, values, async_op=True)
            if not runtime.decides_on_device(values.device):
                return partial(_arrived, work, everyone)
            work.wait()  # makes the comm stream wait, not the host
            return runtime.Readback(torch.stack(everyone)).read

    def over_shards(self, count: int) -> int:
        """The sum of `count` over the shards of this rank's replica."""
        total = torch.tensor(count)
        dist.all_reduce(total, group=self._hosts)
        return int(total)

    def fingerprint(self, model: nn.Module) -> tuple[str, bool]:
        """A hash of the first replica's parameters, and whether all replicas are bitwise equal to
        it."""
        return fingerprint(model, self._mesh)

    def texts(self) -> TextExchange:
        """Texts between all ranks."""
        return Texts(torch.device(self._mesh.device_type))


class ElasticRanks:
    """The processes of the replicas that are left; each replica, of one node or more, is a process
    group of its own."""

    _asked = False  # to leave, in the step before

    def __init__(self, mesh: DeviceMesh, axis: SurvivingCommunicator) -> None:
        self._axis, self._hosts, self._shards = axis, mesh.get_group("shard"), mesh["shard"].size()
        self._ranks, self.losses = (
            mesh.size(),
            axis.losses,
        )  # of a replica; of the axis, and the replicas that came

    @property
    def rank(self) -> int:
        return self._axis.replica * self._ranks + dist.get_rank()

    @property
    def size(self) -> int:
        return self._axis.size() * self._ranks

    @property
    def listening(self) -> str:
        """Where this rank listens for other replicas, in words; "" where that is loopback."""
        return self._axis.listening

    @property
    def sizes(self) -> list[int]:
        """Of the nodes that took part in the collective that was waited for last."""
        return [self._shards] * (
            (self._axis.size() - len(self._axis.absent)) * self._ranks // self._shards
        )

    def all_gather(self, values: Tensor) -> Gathered:
        mine = [torch.empty_like(values) for _ in range(self._ranks)]
        if self._ranks > 1:
            dist.all_gather(mine, values)
        else:
            mine = [values]
        arriving = self._axis.all_gather(torch.cat(mine).view(torch.uint8))

        def arrived() -> list[list[Any]]:
            rows = arriving()
            present = [number for number in range(len(rows)) if number not in self._axis.absent]
            return rows[present].view(values.dtype).view(-1, len(values)).tolist()

        return arrived

    def over_shards(self, count: int) -> int:
        if self._shards == 1:
            return count
        total = torch.tensor(count)
        dist.all_reduce(total, group=self._hosts)
        return int(total)

    def fingerprint(self, model: nn.Module) -> tuple[str, bool]:
        digests = [bytes(each) for each in self.all_gather(weights_digest(model))()]
        return compared_digests(
            [digests[at : at + self._shards] for at in range(0, len(digests), self._shards)]
        )

    def texts(self) -> TextExchange:
        return self._axis.texts()

    def stopped_by(self, numbers: Sequence[float], mine: int) -> int:
        """As of all ranks, but SIGTERM to some replicas ends these alone, where enough are left."""
        told = torch.tensor(numbers).view(-1, self._ranks) == signal.SIGTERM
        if {*numbers} - {0, signal.SIGTERM} or int((~told.any(1)).sum()) < max(1, self._axis.least):
            return int(max(numbers))
        if mine and self._asked:  # where all are told, some hear of it a step before the others
            self._axis.depart()
        self._asked = mine > 0
        return 0

    def close(self) -> None:
        """Leaves together with the others."""
        self._axis.close()


class Alone(_Together):
    """The replicas of a simulation: whole, of one shard each, and joined by a communicator alone."""

    def __init__(self, communicator: Communicator) -> None:
        self.rank, self.size, self._communicator = (
            communicator.replica,
            communicator.size(),
            communicator,
        )
        self.sizes = [1] * self.size

    def all_gather(self, values: Tensor) -> Gathered:
        arrived = self._communicator.all_gather(values.contiguous().view(torch.uint8))
        return lambda: arrived().view(values.dtype).tolist()

    def over_shards(self, count: int) -> int:
        return count

    def fingerprint(self, model: nn.Module) -> tuple[str, bool]:
        return compared_digests(
            [[bytes(each)] for each in self.all_gather(weights_digest(model))()]
        )

    def texts(self) -> TextExchange:
        raise NotImplementedError("a simulation has no ranks that could differ")


World = Ranks | ElasticRanks | Alone
"""All ranks of a run."""


def rank_in_words(rank: int, sizes: Sequence[int]) -> str:
    """A rank in words, among replicas of `sizes` ranks.

    >>> rank_in_words(2, [1, 2])
    'replica 1 (shard 1)'
    """
    ends = [*accumulate(sizes)]
    replica = next(number for number, end in enumerate(ends) if rank < end)
    return f"replica {replica} (shard {rank - ends[replica] + sizes[replica]})"


def _arrived(work: dist.Work, everyone: list[Tensor]) -> list[list[Any]]:
    work.wait()
    return [values.tolist() for values in everyone]


def settings_of_run(membership: Membership) -> dict[str, Any]:
    """The settings of the replica that came first to an elastic run. Waits for it."""
    found: dict[str, Any] = json.loads(membership.store.get(f"text/{_SETTINGS}"))
    return found


def require_same_settings(membership: Membership, config: Config) -> None:
    """Raises `ValueError` where this replica of an elastic run would train otherwise than the one
    that came first."""
    own = _alike(config)
    first = json.loads(membership.first_text(_SETTINGS, json.dumps(own)))
    for key in _differing(first, own):
        here, there = f"{key} is {own.get(key)!r} here", f"{first.get(key)!r} in the run"
        raise ValueError(f"{here}, {there}: all replicas train by the same recipe and --set")


def require_same_command(texts: TextExchange, config: Config, flags: Mapping[str, Any]) -> None:
    """Raises `ValueError` on all ranks where one of them was started to train otherwise than rank
    0. Collective.

    A rank that does otherwise would leave a collective out, for which the others wait. flags: Of
    the command line, by name.
    """
    gathered = texts.gather(json.dumps({**_alike(config), **flags}))
    first, *others = map(json.loads, gathered)
    for rank, own in enumerate(others, 1):
        for key in _differing(first, own):
            here, there = (
                f"{key} is {own.get(key)!r} on rank {rank}",
                f"{first.get(key)!r} on rank 0",
            )
            raise ValueError(f"{here}, {there}: give all ranks the same recipe and command line")


def _alike(config: Config) -> dict[str, Any]:
    """The settings that all replicas must have alike, as they come out of a text."""
    own = json.loads(json.dumps(dict(settings_of(to_table(config)))))
    return {key: value for key, value in own.items() if key.startswith(_ALIKE) and key not in _OWN}


def _differing(first: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    return [key for key in sorted(first.keys() | own.keys()) if first.get(key) != own.get(key)]


_SETTINGS = "settings"
_ALIKE = ("seed", "model.", "scheme", "optimizer.", "schedule.", "train.", "mesh.link")
_OWN = {
    "train.log_every",
    "train.loggers",
    "train.publish",
    "train.keep",
    "train.init_from",
    "train.compile",
}
"""Settings of a replica that change nothing for the others."""


class Waits:
    """The seconds of waiting between replicas, summed since the start; the same on every rank.

    Ranks send what they were busy and waited since their last report along with their losses, so it
    costs no message. Between two reports all wait for the replica that was busy for longest: no
    longer than it was busy beyond them. The rest of their waiting is the network's. Where the
    number of replicas changes the sums begin anew.

    >>> waits = Waits()
    >>> waits.meet([[1.0, 2.5], [1.0, 3.0]], [1, 1])
    >>> waits.meet([[3.0, 0.5], [4.0, 0.0]], [1, 1])
    >>> waits.table()
    {'seconds': [[0.0, 0.5], [0.0, 0.0]], 'network_s': [2.5, 3.0], 'slowest': 1, 'lasted_s': 7.5}
    """

    def __init__(self) -> None:
        self.own, self._lasted = (0.0, 0.0), 0.0
        self._waited = torch.zeros(
            0, 1, dtype=torch.float64
        )  # [replicas, replicas, and the network last]

    def add(self, seconds: float, waited: float) -> None:
        """Takes in a step of this rank of `seconds`, of which it `waited` some."""
        self.own = (self.own[0] + seconds - waited, self.own[1] + waited)

    def meet(self, reports: Sequence[Sequence[float]], sizes: list[int]) -> None:
        """Takes in the `own` seconds of all ranks, in rank order; they count as reported then.

        sizes: Ranks of each replica; they wait for each other in backward, and their mean counts.
        """
        ranks = iter(reports)
        means = [
            [sum(column) / size for column in zip(*islice(ranks, size), strict=True)]
            for size in sizes
        ]
        busy, waited = torch.tensor(means, dtype=torch.float64).unbind(1)  # [replicas]
        if len(busy) != len(self._waited):
            self._waited, self._lasted = self._waited.new_zeros(len(busy), len(busy) + 1), 0.0
        last = int(busy.argmax())
        for_it = waited.minimum(busy[last] - busy)
        self._waited[:, last] += for_it
        self._waited[:, -1] += waited - for_it
        self.own, self._lasted = (0.0, 0.0), self._lasted + float((busy + waited).mean())

    def table(self, most: int = 1_000_000) -> dict[str, Any]:
        """The sums by name; {} before the first report, and where there is one replica or more than
        `most`.

        `seconds[i][j]` that replica i waited for replica j, `network_s` of each replica, the
        `slowest`, and `lasted_s`, the mean over replicas of the seconds of the steps.
        """
        seconds, network = self._waited[:, :-1], self._waited[:, -1].tolist()
        if not 2 <= len(network) <= most:
            return {}
        slowest = int(seconds.sum(0).argmax())
        return {
            "seconds": seconds.tolist(),
            "network_s": network,
            "slowest": slowest,
            "lasted_s": self._lasted,
        }
