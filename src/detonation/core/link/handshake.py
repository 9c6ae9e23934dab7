"""The handshake: replicas compare settings, versions and weights before their first message."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from detonation.core.base_error import DetonationError
from detonation.core.link.communicator import Communicator, ProcessGroupCommunicator
from detonation.core.link.elastic_communicator import present_rows

SAME_START = (
    "Start all with the same settings, versions and weights (detonation.same_weights(model, axis)"
    " makes them equal, after the last change of weights)"
)


class Mismatch(DetonationError, ValueError):
    """Replicas were started with different settings, versions or weights."""


def send_to_all(communicator: Communicator, value: Any, device: torch.device) -> list[Any]:
    """Every replica's `value` (of JSON), in replica order, in messages whose sizes all know.

    Collective.
    """

    def gathered(content: bytes) -> list[bytes]:
        rows = communicator.all_gather(
            torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
        )()
        return [bytes(row.tolist()) for row in present_rows(communicator, rows)]

    mine = json.dumps(value).encode()
    longest = max(int.from_bytes(size, "big") for size in gathered(len(mine).to_bytes(8, "big")))
    return [json.loads(text) for text in gathered(mine.ljust(longest))]


def require_same(
    inter_node: Communicator,
    intra_node: Communicator | None,
    description: Mapping[str, str],
    device: torch.device,
    notes: Mapping[str, str],
    remedy: str = SAME_START,
    free: Collection[str] = (),
) -> dict[str, str]:
    """Raises `Mismatch` on every rank where descriptions differ, naming the difference. Collective.

    Raises `ValueError` where a process group carries no tensors of `device`.

    All ranks of a node must have the same description, too. Messages of different sizes would end
    the receiver's process inside the network library, so this comes before the first of them, in
    messages whose sizes all know.

    Args:
        description: Compared entry by entry.
        notes: Shown beside an entry of the description; not compared.
        free: Entries that may differ; those that do are returned, and how.
    """
    for communicator in (inter_node, intra_node):
        if isinstance(communicator, ProcessGroupCommunicator):
            communicator.require_device(device)
    mine = [dict(description), dict(notes)]
    node = [mine] if intra_node is None else send_to_all(intra_node, mine, device)
    ranks = [
        (
            f"replica {replica}" if intra_node is None else f"replica {replica} local rank {local}",
            described,
        )
        for replica, theirs in enumerate(send_to_all(inter_node, node, device))
        for local, described in enumerate(theirs)
    ]
    found = [difference for other in ranks[1:] for difference in _differences(ranks[0], other)]
    if differences := [text for key, text in found if key not in free]:
        more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
        raise Mismatch(f"replicas differ: {'; '.join(differences[:3])}{more}. {remedy}")
    return {key: "; ".join(text for name, text in found if name == key) for key in dict(found)}


_Rank = tuple[str, Sequence[Mapping[str, str]]]
"""The name of a rank, its description, and its notes."""


def _differences(one: _Rank, other: _Rank) -> list[tuple[str, str]]:
    (_, (mine, _)), (_, (theirs, _)) = one, other
    keys = [key for key in dict.fromkeys([*mine, *theirs]) if mine.get(key) != theirs.get(key)]
    return [(key, f"{_entry(other, key)}, {_entry(one, key)}") for key in keys]


def _entry(rank: _Rank, key: str) -> str:
    name, (description, notes) = rank
    note = f" ({notes[key]})" if key in notes else ""
    return f"{name} has {key}={description.get(key, 'nothing')}{note}"
