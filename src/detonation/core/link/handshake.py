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
    """The `value` of every replica (as JSON), in replica order. Collective.

    Replicas first exchange the largest size, so the size of all messages is known.
    """

    def gathered(content: bytes) -> list[bytes]:
        octets = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
        rows = communicator.all_gather(octets)()
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
    """Raises `Mismatch` on every rank if descriptions differ, and names the difference. Collective.

    All ranks of a node must also have the same description. It runs before the first message,
    because messages of different sizes would crash the receiver inside the network library.

    Args:
        description: Compared entry by entry.
        notes: Shown with an entry of the description; not compared.
        free: Entries that may differ; the result names those that do, and how.

    Raises:
        Mismatch: Entries differ that are not in `free`.
        ValueError: A process group cannot send tensors of `device`.
    """
    for communicator in (inter_node, intra_node):
        if isinstance(communicator, ProcessGroupCommunicator):
            communicator.require_device(device)
    mine = [dict(description), dict(notes)]
    node = [mine]
    if intra_node is not None:
        node = send_to_all(intra_node, mine, device)
    ranks: list[_Rank] = []
    for replica, theirs in enumerate(send_to_all(inter_node, node, device)):
        for local, described in enumerate(theirs):
            name = f"replica {replica}"
            if intra_node is not None:
                name += f" local rank {local}"
            ranks.append((name, described))
    found = [difference for other in ranks[1:] for difference in _differences(ranks[0], other)]
    if differences := [text for key, text in found if key not in free]:
        listed = "; ".join(differences[:3])
        if len(differences) > 3:
            listed += f" (and {len(differences) - 3} more)"
        raise Mismatch(f"replicas differ: {listed}. {remedy}")
    return {key: "; ".join(text for name, text in found if name == key) for key in dict(found)}


_Rank = tuple[str, Sequence[Mapping[str, str]]]
"""A rank's name, description and notes."""


def _differences(one: _Rank, other: _Rank) -> list[tuple[str, str]]:
    _, (mine, _) = one
    _, (theirs, _) = other
    keys = [key for key in dict.fromkeys([*mine, *theirs]) if mine.get(key) != theirs.get(key)]
    return [(key, f"{_entry(other, key)}, {_entry(one, key)}") for key in keys]


def _entry(rank: _Rank, key: str) -> str:
    name, (description, notes) = rank
    text = f"{name} has {key}={description.get(key, 'nothing')}"
    if key in notes:
        text += f" ({notes[key]})"
    return text
