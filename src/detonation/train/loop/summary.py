"""The summary of a finished run, as in `summary.json`, and the counts of its faults over all
starts.
"""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from detonation.cluster.devices import peak_memory
from detonation.core.flat.tensors import local
from detonation.core.schemes import ring_bytes
from detonation.gates.closeness import Closeness
from detonation.train.loop.session import Session
from detonation.train.loop.world import ElasticRanks
from detonation.train.output.metrics import Portion, Record, reduction

_LATEST = 20


@dataclass(frozen=True)
class Counts:
    """Counts of faults, by kind.

    Args:
        skipped: For each parameter, how many contributions of replicas were left out because a
            gradient was not finite.
        refused: Number of refused messages.
    """

    skipped: dict[str, int] = field(default_factory=dict)
    refused: int = 0


NOTHING = Counts()


def saved_counts(extra: Mapping[str, Any]) -> Counts:
    """Returns the counts of faults in a checkpoint's `extra`. Ignores values that are not
    integers.
    """
    skipped = extra.get("skipped")
    if not isinstance(skipped, dict):
        skipped = {}
    refused = extra.get("refused")
    if type(refused) is not int:
        refused = 0
    return Counts({name: count for name, count in skipped.items() if type(count) is int}, refused)


def counted(session: Session, before: Counts) -> Counts:
    """Returns the counts of faults since this start plus the counts `before` this start. All ranks
    get the same counts. Collective.
    """
    names = [name for name, _ in session.model.named_parameters()]
    skipped = session.optimizer.stats.skipped_by_parameter
    refused = session.optimizer.stats.refused
    counts = [skipped.get(name, 0) for name in names]
    mine = torch.tensor([*counts, refused], device=session.device)
    gathered = torch.tensor(session.world.all_gather(mine)())
    replicas = torch.split_with_sizes(gathered, session.world.sizes)
    # replicas of different sizes shard parameters differently, so first sum over their ranks
    if len({*session.world.sizes}) > 1:
        replicas = tuple(each.sum(0, keepdim=True) for each in replicas)
    # Only owners (replicas that aggregate) see some faults, so use the maximum over replicas.
    *here, refused = torch.stack(replicas).amax(0).sum(0).tolist()
    now = Counter(dict(zip(names, here, strict=True)))
    together = Counter(before.skipped) + now
    return Counts(dict(together.most_common()), before.refused + refused)


def summarise(
    session: Session, records: Sequence[Record], before: Counts = NOTHING
) -> dict[str, Any]:
    """Returns the results of the run; all ranks get the same results. Collective. `records` holds
    the record of each step.

    - `train_loss`: mean loss of the last 20 steps.
    - `seconds`: time spent in steps, without validation.
    - `bytes_sent_per_step`: mean bytes per step that one replica sends, summed over its shards.
    - `shard_bytes_per_step`: bytes that one replica sends between its nodes.
    - `peak_memory`: the most bytes of device memory that any rank used; on CPUs, of RAM.
    - `waits`: waiting times of replicas in the steps since the last start, see `Waits.table`.
    - `local_steps`: number of local steps of each replica in a round, as last agreed.
    - `replicas_apart`: largest relative distance between replicas, if replicas may differ slightly.
    """
    config = session.config
    last = records[-1]
    by_level = full_sync_by_level(session)
    full_sync = full_sync_per_step(by_level, records)
    sent = sum(record.bytes_sent for record in records) / len(records)
    seconds = sum(record.seconds for record in records)
    fingerprint, equal = session.world.fingerprint(session.model)
    peak = torch.tensor([peak_memory(session.device)], device=session.device)
    data = portion(session)
    memory = int(max(count for (count,) in session.world.all_gather(peak)()))
    taken = data.times(records)
    examples = _examples(session) * taken
    own = torch.tensor(session.waits.own, device=session.device)
    session.waits.meet(session.world.all_gather(own)(), session.world.sizes)
    scores = {"val_accuracy": last.val_accuracy, "val_bleu": last.val_bleu}
    measured: dict[str, Any] = {}
    if data.unit == "tokens":
        measured["tokens_per_second"] = data.count * taken / seconds
    optional = {
        "peak_memory": memory,
        "waits": session.waits.table(),
        "local_steps": session.optimizer.stats.local_steps,
    }
    measured |= {name: value for name, value in optional.items() if value}
    return {
        "scheme": config.schemes,
        **_levels(session, records, by_level),
        "optimizer": config.optimizer.name,
        "replicas": config.mesh.replicas,
        "shards": [*config.mesh.nodes] or config.mesh.shards,
        "seed": config.seed,
        "model": config.model.name,
        "data": session.data.name,
        "num_parameters": sum(parameter.numel() for parameter in session.model.parameters()),
        "steps": last.step,
        "train_loss": statistics.fmean(record.loss for record in records[-_LATEST:]),
        "val_loss": last.val_loss,
        **{name: score for name, score in scores.items() if score is not None},
        "seconds": seconds,
        "median_step_seconds": statistics.median(record.seconds for record in records),
        "examples_per_second": examples / seconds,
        **measured,
        "bytes_sent_per_step": sent,
        "bytes_full_sync_per_step": full_sync,
        "reduction": reduction(sent, full_sync),
        **_shard_wire(session, records),
        **asdict(counted(session, before)),
        "replicas_equal": equal,
        **_apart(session),
        "fingerprint": fingerprint,
    }


def _apart(session: Session) -> dict[str, float]:
    """Returns the largest distance between a tensor on two replicas, relative to the norm of the
    tensor. Collective.

    The result is empty if replicas must be equal, or if the distance is not finite.
    """
    gate = session.optimizer.closeness
    if not isinstance(gate, Closeness):
        return {}
    mine = torch.tensor([gate.measure()], dtype=torch.float64, device=session.device)
    apart = max(each for (each,) in session.world.all_gather(mine)())
    if not math.isfinite(apart):
        return {}
    return {"replicas_apart": apart}


def _shard_wire(session: Session, records: Sequence[Record]) -> dict[str, Any]:
    """Describes the compressed communication between the nodes of a replica: its precisions, and
    the bytes that the replica sends between its nodes per step.
    """
    wire = session.config.mesh.shard_wire
    if wire is None:
        return {}
    sent = sum(record.shard_bytes_sent or 0 for record in records) / len(records)
    described = f"weights {wire.weights}, gradients {wire.gradients} over {wire.nodes} nodes"
    return {"shard_wire": described, "shard_bytes_per_step": sent}


def portion(session: Session) -> Portion:
    """Returns the amount of data that one replica processes in one step: tokens of text, or
    examples.
    """
    examples = _examples(session)
    data = session.data
    replicas = session.config.mesh.replicas
    constant = isinstance(session.world, ElasticRanks) and session.config.train.keeps_batch
    if constant:
        replicas = session.world.parts // session.config.mesh.shards
    one = data.validation[torch.tensor([0])]
    if data.kind == "text" and "input_ids" in one:
        return Portion(examples * one["input_ids"].shape[1], "tokens", replicas, constant)
    unit = {"images": "images", "labels": "texts"}.get(data.kind, "pairs")
    return Portion(examples, unit, replicas, constant)


def _examples(session: Session) -> int:
    """Returns the number of examples of one replica in one step. If replicas have different sizes,
    returns the mean over replicas.
    """
    train = session.config.train
    sizes = session.config.mesh.sizes
    return train.batch_size * train.accumulate * sum(sizes) // len(sizes)


@dataclass(frozen=True)
class FullSync:
    """Bytes that one replica sends over an axis in a step of full synchronisation.

    bytes: the bytes that a replica sends with the current number of replicas.

    weights: the size of one replica's weights in fp32, in bytes; None if the number of replicas is
    constant.

    replicas: the number of replicas in a step whose record does not state this number.

    members: how many of these replicas together form one replica of the outermost axis.
    """

    bytes: int
    weights: int | None = None
    replicas: int = 1
    members: int = 1

    def per_step(self, records: Sequence[Record]) -> int:
        """Returns the mean bytes per step over the steps in `records`. For each step, uses the
        number of replicas that ran the step.

        >>> steps = [Record(1, 2.0, 0.1, 0.5, 0, taking=taking) for taking in (2, 2, 2, 1)]
        >>> FullSync(0).per_step(steps), FullSync(0, weights=4000).per_step(steps)
        (0, 3000)
        """
        if self.weights is None:
            return self.bytes
        total = 0
        for record in records:
            count = record.taking
            if count is None:
                count = self.replicas
            size = max(1, count // self.members)
            total += ring_bytes("all-reduce", self.weights, size)
        return round(total / len(records))


def full_sync_by_level(session: Session) -> list[FullSync]:
    """Returns the bytes of full synchronisation over each axis, the innermost axis first.
    Collective.
    """
    dense = [session.world.over_shards(each) for each in session.optimizer.dense_bytes_by_level]
    found = [FullSync(each) for each in dense]
    # With `train.balance` all replicas exchange, but a record counts only those that ran the step.
    if isinstance(session.world, ElasticRanks) and not session.config.train.balance:
        trained = [parameter for parameter in session.model.parameters() if parameter.requires_grad]
        numel = sum(local(each).numel() for each in trained)
        weights = session.world.over_shards(4 * numel)
        members = math.prod(level.replicas for level in session.config.levels[:-1])
        found[-1] = FullSync(dense[-1], weights, session.config.mesh.replicas, members)
    return found


def full_sync_per_step(levels: Sequence[FullSync], records: Sequence[Record]) -> int:
    """Returns the mean bytes per step of full synchronisation over the steps in `records`, summed
    over all axes.
    """
    return sum(level.per_step(records) for level in levels)


def _levels(
    session: Session, records: Sequence[Record], dense: Sequence[FullSync]
) -> dict[str, Any]:
    """Returns the arguments of the scheme. With several levels, returns the arguments and the bytes
    per step of each level.
    """
    levels = session.config.levels
    if len(levels) == 1:
        return {"scheme_arguments": dict(levels[0].scheme.arguments)}
    tiers = []
    for level, full in zip(levels, dense, strict=True):
        sent = sum(record.levels[level.axis] for record in records) / len(records)
        full_sync = full.per_step(records)
        arguments = dict(level.scheme.arguments)
        less = reduction(sent, full_sync)
        tiers.append(
            {
                "axis": level.axis,
                "replicas": level.replicas,
                "scheme": level.scheme.name,
                "scheme_arguments": arguments,
                "bytes_sent_per_step": sent,
                "bytes_full_sync_per_step": full_sync,
                "reduction": less,
            }
        )
    return {"levels": tiers}
