"""The ranks of a run as one rank sees them: collectives of the training loop, and waiting times."""

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
from detonation.cluster.shares import MicroBatch, micro_batches, share_bounds
from detonation.cluster.survive.membership import Membership
from detonation.cluster.survive.surviving import SurvivingCommunicator
from detonation.core import runtime
from detonation.core.link import Communicator, TextExchange
from detonation.core.replicator import CommStream
from detonation.train.loop.checks import load_data, mark_of_data
from detonation.train.recipe.schema import Config, TrainConfig
from detonation.train.recipe.tables import settings_of, to_table

Gathered = Callable[[], list[list[Any]]]
"""A function that waits for the values of all ranks, and returns one list per rank, in rank
order.
"""


class _Together:
    rank: int
    size: int
    listening = ""

    @property
    def parts(self) -> int:
        """Number of parts of a step. Each part holds the batches of one rank."""
        return self.size

    def share(self, of_part: int, largest: int) -> Sequence[MicroBatch]:
        """Returns the micro-batches of this rank, each with at most `largest` examples. Each part
        of a step has `of_part` examples.
        """
        return micro_batches(of_part * self.size, largest, self.rank, self.size)

    def stopped_by(self, numbers: Sequence[float], mine: int) -> int:
        """Returns the number of the signal that ends the run after this step; 0 if there is none.

        Args:
            numbers: Signal that each rank received; 0 for none.
            mine: Signal that this rank received.
        """
        return int(max(numbers))


class Ranks(_Together):
    """The processes of a mesh with the axes "replicate" and "shard". All methods are collective.

    Args:
        sizes: Number of ranks of each replica.
    """

    def __init__(self, mesh: DeviceMesh, device: torch.device, sizes: list[int]) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.sizes = sizes
        self._mesh = mesh
        self._is_gloo = device.type == "cpu" and dist.get_backend() == "gloo"
        self._comm = CommStream(device)
        self._hosts = mesh.get_group("shard")
        if dist.get_backend(self._hosts) != "gloo":
            # Sum counts by gloo in host memory, because a device would first finish its queue.
            # All ranks must create the process groups of all replicas.
            ends = [*accumulate(sizes)]
            for size, end in zip(sizes, ends, strict=True):
                ranks = range(end - size, end)
                group = dist.new_group([*ranks], backend="gloo")
                if self.rank in ranks:
                    self._hosts = group

    def all_gather(self, values: Tensor) -> Gathered:
        """Starts to gather `values` ([n]) of all ranks. Returns a function that waits for the
        values.
        """
        self._comm.wait_for_current(values)
        with self._comm.active():
            everyone = values.new_empty(self.size, *values.shape)
            if self._is_gloo:
                # all-to-all waits only once, but gloo's all-gather waits once for each other rank
                copies = values.expand_as(everyone).contiguous()
                work = dist.all_to_all_single(everyone, copies, async_op=True)
            else:
                work = dist.all_gather([*everyone.unbind()], values, async_op=True)
            if not runtime.decides_on_device(values.device):
                return partial(_arrived, work, everyone)
            work.wait()  # only the communication stream waits here, not the host
            return runtime.Readback(everyone).read

    def over_shards(self, count: int) -> int:
        """Returns the sum of `count` over the shards of this rank's replica."""
        total = torch.tensor(count)
        dist.all_reduce(total, group=self._hosts)
        return int(total)

    def fingerprint(self, model: nn.Module) -> tuple[str, bool]:
        """Returns a hash of the first replica's parameters, and True if all replicas are bitwise
        equal.
        """
        return fingerprint(model, self._mesh)

    def texts(self) -> TextExchange:
        """Returns a `TextExchange`, with which all ranks gather texts."""
        return Texts(torch.device(self._mesh.device_type))


class ElasticRanks:
    """The processes of all present replicas of an elastic run. Each replica has its own process
    group.

    A replica of the outermost level may itself contain several replicas, one per node.

    Args:
        train: Settings that say whether the number of examples of a step stays constant.
    """

    _asked = False  # True if this rank received a signal in the previous step

    def __init__(self, mesh: DeviceMesh, axis: SurvivingCommunicator, train: TrainConfig) -> None:
        self._axis = axis
        self._parts = None
        if train.keeps_batch:
            self._parts = axis.ranks_at_start
        self._hosts = mesh.get_group("shard")
        self._shards = mesh["shard"].size()
        self._ranks = mesh.size()  # count of ranks in one replica
        self.losses = axis.losses  # the axis records lost and joining replicas in this list

    @property
    def rank(self) -> int:
        return self._axis.replica * self._ranks + dist.get_rank()

    @property
    def size(self) -> int:
        return self._axis.size() * self._ranks

    @property
    def members(self) -> Sequence[int]:
        """The replicas that take part in this step, as indices at the start of the run."""
        return self._axis.layout

    @property
    def parts(self) -> int:
        """Number of parts of a step; each part holds the batches of one rank. With a constant batch
        this is the number of ranks at the start of the run, otherwise the current number of ranks.
        """
        return self._parts or self.size

    def share(self, of_part: int, largest: int) -> Sequence[MicroBatch]:
        """Returns the micro-batches of this rank; see `_Together.share`."""
        return self._axis.share(of_part * self.parts, largest)

    def share_of(self, replica: int, members: Sequence[int], of_part: int) -> range:
        """Returns the positions of the examples that `replica` computes in a step in which the
        replicas `members` train. The range is empty if `replica` is not among `members`. `replica`
        and `members` are indices at the start of the run.
        """
        if replica not in members:
            return range(0)
        parts = self._parts or len(members) * self._ranks
        return share_bounds(of_part * parts, members.index(replica), len(members))

    @property
    def listening(self) -> str:
        """Describes the address at which this rank accepts connections of other replicas; "" if the
        address is loopback.
        """
        return self._axis.listening

    @property
    def sizes(self) -> list[int]:
        """The number of ranks of each node that took part in the last finished collective."""
        present = self._axis.size() - len(self._axis.absent)
        return [self._shards] * (present * self._ranks // self._shards)

    def all_gather(self, values: Tensor) -> Gathered:
        mine = [values]
        if self._ranks > 1:
            mine = [torch.empty_like(values) for _ in range(self._ranks)]
            dist.all_gather(mine, values)
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
        starts = range(0, len(digests), self._shards)
        return compared_digests([digests[start : start + self._shards] for start in starts])

    def texts(self) -> TextExchange:
        return self._axis.texts()

    def stopped_by(self, numbers: Sequence[float], mine: int) -> int:
        """Returns the number of the signal that ends the run after this step; 0 if there is none.
        If enough replicas remain, SIGTERM and SIGHUP do not end the run: they end only the replicas
        that received them.
        """
        of_replicas = torch.tensor(numbers).view(-1, self._ranks)
        terminated = (of_replicas == signal.SIGTERM) | (of_replicas == signal.SIGHUP)
        remaining = int((~terminated.any(1)).sum())
        others = {*numbers} - {0, signal.SIGTERM, signal.SIGHUP}
        if others or remaining < max(1, self._axis.least):
            return int(max(numbers))
        # A signal to all replicas may reach some replicas one step earlier than other replicas.
        # So a replica leaves one step after its own signal, when the signals of all are known.
        if mine and self._asked:
            self._axis.depart()
        self._asked = mine > 0
        return 0

    def close(self) -> None:
        """Leaves the run together with the other replicas."""
        self._axis.close()


class Alone(_Together):
    """A simulated run as one of its replicas sees it. All replicas are in one process and have one
    shard each; `communicator` connects them.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.rank = communicator.replica
        self.size = communicator.size()
        self._communicator = communicator
        self.sizes = [1] * self.size

    def all_gather(self, values: Tensor) -> Gathered:
        arrived = self._communicator.all_gather(values.contiguous().view(torch.uint8))
        return lambda: arrived().view(values.dtype).tolist()

    def over_shards(self, count: int) -> int:
        return count

    def fingerprint(self, model: nn.Module) -> tuple[str, bool]:
        digests = self.all_gather(weights_digest(model))()
        return compared_digests([[bytes(each)] for each in digests])

    def texts(self) -> TextExchange:
        raise NotImplementedError(
            "simulated replicas share one process, so they cannot exchange texts between ranks"
        )


World = Ranks | ElasticRanks | Alone
"""All ranks of a run: real, elastic or simulated."""


def rank_in_words(rank: int, sizes: Sequence[int]) -> str:
    """Describes a rank by its replica and shard. `sizes` holds the number of ranks of each replica.

    >>> rank_in_words(2, [1, 2])
    'replica 1 (shard 1)'
    """
    ends = [*accumulate(sizes)]
    replica = next(number for number, end in enumerate(ends) if rank < end)
    return f"replica {replica} (shard {rank - ends[replica] + sizes[replica]})"


def _arrived(work: dist.Work, everyone: Tensor) -> list[list[Any]]:
    work.wait()
    found: list[list[Any]] = everyone.tolist()
    return found


def settings_of_run(membership: Membership) -> dict[str, Any]:
    """Returns the settings of the first replica of an elastic run. Waits until that replica has
    published them.
    """
    found: dict[str, Any] = json.loads(membership.store.get(f"text/{_SETTINGS}"))
    return found


def require_same_settings(membership: Membership, config: Config) -> None:
    """Raises `ValueError` if the settings of this replica of an elastic run differ from those of
    the first replica.
    """
    own = _alike(config)
    first = json.loads(membership.first_text(_SETTINGS, json.dumps(own)))
    for key in _differing(first, own):
        here = f"{key} is {own.get(key)!r} here"
        there = f"{first.get(key)!r} in the run"
        remedy = _REMEDY.get(key, "give all replicas the same recipe and --set")
        raise ValueError(f"{here}, {there}: {remedy}")


def require_same_command(texts: TextExchange, config: Config, flags: Mapping[str, Any]) -> None:
    """Raises `ValueError` on all ranks if the settings or flags of a rank differ from those of rank
    0.

    Collective. With different flags, a rank could skip a collective for which other ranks wait.
    flags: flags of the command line, by name.
    """
    gathered = texts.gather(json.dumps({**_alike(config), **flags}))
    first, *others = map(json.loads, gathered)
    for rank, own in enumerate(others, 1):
        for key in _differing(first, own):
            here = f"{key} is {own.get(key)!r} on rank {rank}"
            there = f"{first.get(key)!r} on rank 0"
            remedy = _REMEDY.get(key, "give all ranks the same recipe and command line")
            raise ValueError(f"{here}, {there}: {remedy}")


def _alike(config: Config) -> dict[str, Any]:
    """Returns the settings that must be equal on all replicas, as they are after a round trip
    through JSON. Also returns a count and a hash of the data, because machines may have different
    files under one name, and the settings of the data, which may explain different examples.
    """
    own = json.loads(json.dumps(dict(settings_of(to_table(config)))))
    alike = {key: value for key, value in own.items() if key.startswith(_ALIKE) and key not in _OWN}
    if ":" not in config.data.name:  # data of a user's function may differ between ranks
        alike[_DATA] = mark_of_data(load_data(config.data))
        alike |= {key: value for key, value in own.items() if key.startswith(_OF_DATA)}
    return alike


def _differing(first: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Returns the keys whose values differ. If the examples differ, the settings of the data come
    first; otherwise these settings may differ.
    """
    keys = sorted(first.keys() | own.keys())
    differing = [key for key in keys if first.get(key) != own.get(key)]
    of_data = [key for key in differing if key.startswith(_OF_DATA)]
    others = [key for key in differing if key not in of_data]
    if _DATA not in others:
        return others
    # paths differ between machines, so they explain nothing
    return [*(key for key in of_data if key not in _PATHS), *others]


_SETTINGS = "settings"
_DATA = "data (examples and hash)"
_OF_DATA = "data."
_PATHS = ("data.source", "data.tokenizer")
_REMEDY = {_DATA: "copy the same data to all machines, and give the same --data"}
_ALIKE = ("seed", "model.", "scheme", "optimizer.", "schedule.", "train.", "mesh.link")
_OWN = {
    "train.log_every",
    "train.loggers",
    "train.publish",
    "train.keep",
    "train.init_from",
    "train.compile",
}
"""Settings that may differ between replicas."""


class Waits:
    """Seconds that replicas waited for each other, summed since the start; equal on all ranks.

    Each rank reports its busy and its waiting seconds in the message that carries its loss. Between
    two reports, the slowest replica is the replica that was busy longest. A replica waits for the
    slowest replica for at most the difference between their busy seconds. The rest of its waiting
    time is network time. The sums start again at 0 when the number of replicas changes.

    >>> waits = Waits()
    >>> waits.meet([[1.0, 2.5], [1.0, 3.0]], [1, 1])
    >>> waits.meet([[3.0, 0.5], [4.0, 0.0]], [1, 1])
    >>> waits.table()
    {'seconds': [[0.0, 0.5], [0.0, 0.0]], 'network_s': [2.5, 3.0], 'slowest': 1, 'lasted_s': 7.5}
    """

    def __init__(self) -> None:
        self.own = (0.0, 0.0)
        self._lasted = 0.0
        # shape [replicas, replicas + 1]; the last column is network time
        self._waited = torch.zeros(0, 1, dtype=torch.float64)

    def add(self, seconds: float, waited: float) -> None:
        """Adds a step of this rank that took `seconds` in total, of which this rank waited `waited`
        seconds.
        """
        self.own = (self.own[0] + seconds - waited, self.own[1] + waited)

    def meet(self, reports: Sequence[Sequence[float]], sizes: list[int]) -> None:
        """Adds the busy and waiting seconds that all ranks reported. Sets `own`, the seconds of
        this rank, to 0.

        Args:
            reports: `own` of each rank, in rank order.
            sizes: Number of ranks of each replica. Ranks of a replica wait for each other in
                backward, so the mean over these ranks is used.
        """
        ranks = iter(reports)
        means = [
            [sum(column) / size for column in zip(*islice(ranks, size), strict=True)]
            for size in sizes
        ]
        busy, waited = torch.tensor(means, dtype=torch.float64).unbind(1)  # both [replicas]
        if len(busy) != len(self._waited):
            self._waited = self._waited.new_zeros(len(busy), len(busy) + 1)
            self._lasted = 0.0
        slowest = int(busy.argmax())
        for_slowest = waited.minimum(busy[slowest] - busy)
        self._waited[:, slowest] += for_slowest
        self._waited[:, -1] += waited - for_slowest
        self.own = (0.0, 0.0)
        self._lasted += float((busy + waited).mean())

    def table(self, most: int = 1_000_000) -> dict[str, Any]:
        """Returns the sums of seconds by name. The table is empty before the first report, for one
        replica, and for more than `most` replicas.

        - `seconds[i][j]`: seconds that replica i waited for replica j.
        - `network_s[i]`: seconds that replica i waited for the network.
        - `slowest`: index of the replica for which other replicas waited longest.
        - `lasted_s`: duration of all steps in seconds, as a mean over replicas.
        """
        seconds = self._waited[:, :-1]
        network = self._waited[:, -1].tolist()
        if not 2 <= len(network) <= most:
            return {}
        slowest = int(seconds.sum(0).argmax())
        return {
            "seconds": seconds.tolist(),
            "network_s": network,
            "slowest": slowest,
            "lasted_s": self._lasted,
        }
