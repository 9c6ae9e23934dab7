"""The summary of a finished run, as `summary.json` holds it, and the faults that are counted over
all its starts."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from detonation.cluster.devices import peak_memory
from detonation.core.flat.tensors import local
from detonation.core.schemes.traffic import ring_bytes
from detonation.gates.closeness import Closeness
from detonation.train.loop.session import Session
from detonation.train.loop.world import ElasticRanks
from detonation.train.output.metrics import Portion, Record, reduction

_LATEST = 20


@dataclass(frozen=True)
class Counts:
    """Contributions `skipped` because a gradient was not finite, by parameter, and messages
    `refused`."""

    skipped: dict[str, int] = field(default_factory=dict)
    refused: int = 0


NOTHING = Counts()


def saved_counts(extra: Mapping[str, Any]) -> Counts:
    """The counts in a checkpoint's `extra`; values that are no whole numbers count as none."""
    skipped, refused = extra.get("skipped"), extra.get("refused")
    by_name = skipped.items() if isinstance(skipped, dict) else ()
    return Counts(
        {name: n for name, n in by_name if type(n) is int}, refused if type(refused) is int else 0
    )


def counted(session: Session, before: Counts) -> Counts:
    """The counts of this start and of those `before` it, the same on every rank. Collective."""
    names = [name for name, _ in session.model.named_parameters()]
    skipped, refused = session.optimizer.stats.skipped_by_parameter, session.optimizer.stats.refused
    mine = torch.tensor([*(skipped.get(name, 0) for name in names), refused], device=session.device)
    replicas = torch.split_with_sizes(
        torch.tensor(session.world.all_gather(mine)()), session.world.sizes
    )
    if len({*session.world.sizes}) > 1:  # which cut a parameter at other rows
        replicas = tuple(each.sum(0, keepdim=True) for each in replicas)
    # All replicas see the faults of a shard, except those that its owner alone sees: the maximum
    # over replicas counts.
    *here, refused = torch.stack(replicas).amax(0).sum(0).tolist()
    together = Counter(before.skipped) + Counter(dict(zip(names, here, strict=True)))
    return Counts(dict(together.most_common()), before.refused + refused)


def summarise(
    session: Session, records: Sequence[Record], before: Counts = NOTHING
) -> dict[str, Any]:
    """The run in numbers, the same on every rank. Collective; `records` are those of all steps.

    `train_loss` is the mean of the last 20 steps; `seconds` is the time spent in steps, without
    validation. `bytes_sent_per_step` is the mean over steps of the bytes that one replica sends,
    all its shards together. `shard_bytes_per_step` is what the replica sends between the nodes that
    its shards lie on. `peak_memory` is that of the rank that needed most. `waits` is `Waits.table`
    of the steps since the last start, `local_steps` those that replicas agreed on last.
    `adapted_to` is the last scheme of a run that followed its link. `replicas_apart` is how far
    apart close ones are.
    """
    config, last = session.config, records[-1]
    by_level = full_sync_by_level(session)
    full_sync = full_sync_per_step(by_level, records)
    sent = sum(record.bytes_sent for record in records) / len(records)
    seconds = sum(record.seconds for record in records)
    fingerprint, equal = session.world.fingerprint(session.model)
    moves = [record.setting for record in records if record.setting]
    peak = torch.tensor([peak_memory(session.device)], device=session.device)
    data, memory = (
        portion(session),
        int(max(count for (count,) in session.world.all_gather(peak)())),
    )
    taken = data.times(records)
    examples = _examples(session) * taken
    session.waits.meet(
        session.world.all_gather(torch.tensor(session.waits.own, device=session.device))(),
        session.world.sizes,
    )
    return {
        "scheme": config.schemes,
        **_levels(session, records, by_level),
        **({"adapted_to": moves[-1]} if moves else {}),
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
        **({} if last.val_accuracy is None else {"val_accuracy": last.val_accuracy}),
        **({} if last.val_bleu is None else {"val_bleu": last.val_bleu}),
        "seconds": seconds,
        "median_step_seconds": statistics.median(record.seconds for record in records),
        "examples_per_second": examples / seconds,
        **({"tokens_per_second": data.count * taken / seconds} if data.unit == "tokens" else {}),
        **({"peak_memory": memory} if memory else {}),
        **({"waits": waits} if (waits := session.waits.table()) else {}),
        **({"local_steps": counts} if (counts := session.optimizer.stats.local_steps) else {}),
        "bytes_sent_per_step": sent,
        "bytes_full_sync_per_step": full_sync,
        "reduction": reduction(sent, full_sync),
        **_shard_wire(session, records),
        **asdict(counted(session, before)),
        "replicas_equal": equal,
        **({} if (apart := _apart(session)) is None else {"replicas_apart": apart}),
        "fingerprint": fingerprint,
    }


def _apart(session: Session) -> float | None:
    """The largest part of a tensor's norm between close replicas; None where they are not close.

    Collective.
    """
    gate = session.optimizer.closeness
    if not isinstance(gate, Closeness):
        return None
    mine = torch.tensor([gate.measure()], dtype=torch.float64, device=session.device)
    apart = max(each for (each,) in session.world.all_gather(mine)())
    return apart if math.isfinite(apart) else None


def _shard_wire(session: Session, records: Sequence[Record]) -> dict[str, Any]:
    """The precisions between the nodes of one replica, and the bytes that it sent between them per
    step."""
    wire = session.config.mesh.shard_wire
    if wire is None:
        return {}
    sent = sum(record.shard_bytes_sent or 0 for record in records) / len(records)
    described = f"weights {wire.weights}, gradients {wire.gradients} over {wire.nodes} nodes"
    return {"shard_wire": described, "shard_bytes_per_step": sent}


def portion(session: Session) -> Portion:
    """The data of one replica in one step: tokens of text, or whole examples."""
    examples, data, replicas = _examples(session), session.data, session.config.mesh.replicas
    one = data.validation[torch.tensor([0])]
    if data.kind == "text" and "input_ids" in one:
        return Portion(examples * one["input_ids"].shape[1], "tokens", replicas)
    return Portion(
        examples, {"images": "images", "labels": "texts"}.get(data.kind, "pairs"), replicas
    )


def _examples(session: Session) -> int:
    """The examples of one replica in one step; the mean where replicas differ."""
    train = session.config.train
    sizes = session.config.mesh.sizes
    return train.batch_size * train.accumulate * sum(sizes) // len(sizes)


@dataclass(frozen=True)
class FullSync:
    """The bytes that one replica sends over an axis in a step of full synchronisation.

    bytes: In the world as it is.
    weights: Of one replica, in fp32; None where the number of replicas stays.
    replicas: Those of a step whose record has no number; `members` of them are one on the axis.
    """

    bytes: int
    weights: int | None = None
    replicas: int = 1
    members: int = 1

    def per_step(self, records: Sequence[Record]) -> int:
        """The mean over these steps, each among the replicas that took it.

        >>> steps = [Record(1, 2.0, 0.1, 0.5, 0, taking=taking) for taking in (2, 2, 2, 1)]
        >>> FullSync(0).per_step(steps), FullSync(0, weights=4000).per_step(steps)
        (0, 3000)
        """
        if self.weights is None:
            return self.bytes
        counts = [self.replicas if record.taking is None else record.taking for record in records]
        sizes = [max(1, count // self.members) for count in counts]
        total = sum(ring_bytes("all-reduce", self.weights, size) for size in sizes)
        return round(total / len(records))


def full_sync_by_level(session: Session) -> list[FullSync]:
    """Full synchronisation over each axis, from the innermost outwards. Collective."""
    dense = [session.world.over_shards(each) for each in session.optimizer.dense_bytes_by_level]
    found = [FullSync(each) for each in dense]
    # Under `balance` a record counts the replicas that did not sit its step out.
    if isinstance(session.world, ElasticRanks) and not session.config.train.balance:
        trained = [parameter for parameter in session.model.parameters() if parameter.requires_grad]
        weights = session.world.over_shards(4 * sum(local(each).numel() for each in trained))
        members = math.prod(level.replicas for level in session.config.levels[:-1])
        found[-1] = FullSync(dense[-1], weights, session.config.mesh.replicas, members)
    return found


def full_sync_per_step(levels: Sequence[FullSync], records: Sequence[Record]) -> int:
    """The mean over these steps, of all axes together."""
    return sum(level.per_step(records) for level in levels)


def _levels(
    session: Session, records: Sequence[Record], dense: Sequence[FullSync]
) -> dict[str, Any]:
    """The arguments of the scheme; of several levels, those of each, and the bytes that it sent per
    step."""
    levels = session.config.levels
    if len(levels) == 1:
        return {"scheme_arguments": dict(levels[0].scheme.arguments)}
    tiers = []
    for level, full in zip(levels, dense, strict=True):
        sent = sum(record.levels[level.axis] for record in records) / len(records)
        full_sync = full.per_step(records)
        chosen = {"scheme": level.scheme.name, "scheme_arguments": dict(level.scheme.arguments)}
        traffic = {"bytes_full_sync_per_step": full_sync, "reduction": reduction(sent, full_sync)}
        tiers.append(
            {
                "axis": level.axis,
                "replicas": level.replicas,
                **chosen,
                "bytes_sent_per_step": sent,
                **traffic,
            }
        )
    return {"levels": tiers}
