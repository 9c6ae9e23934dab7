"""Desync: finds tensors that differ between replicas, by one checksum per tensor. Repairs such a
tensor with the value of the majority of replicas."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from detonation.core.agreement.options import python_number
from detonation.core.compute.checksum import checksum
from detonation.core.flat.tensors import whole_of
from detonation.core.integrity.message import hash63
from detonation.core.link import Link

CHANGE = "a change of the trained parameters"


@dataclass(frozen=True)
class Difference:
    """A tensor, named `name`, that differs between replicas.

    If `name` is `CHANGE`, no tensor differs: the replicas in `odd` announced that they began or
    stopped training the parameter with the index `source`.

    Args:
        odd: Replicas that differ.
        source: A replica of the majority; 0 if there is no majority, as between two replicas.
    """

    name: str
    odd: tuple[int, ...]
    source: int

    def __str__(self) -> str:
        others = ", ".join(map(str, self.odd))
        which = f"replicas {others} differ"
        if len(self.odd) == 1:
            which = f"replica {others} differs"
        return f"{which} from replica {self.source} in {self.name}"


def differences(
    link: Link,
    tensors: Mapping[str, Tensor],
    device: torch.device,
    options: Mapping[str, str] | None = None,
) -> list[Difference]:
    """Finds the `tensors` that are not bitwise equal on all replicas. All replicas get the same
    list of differences. Collective.

    Reads every tensor once and sends 8 bytes per tensor. The link does not count these bytes as
    sent.

    Args:
        options: Texts that must also be equal, by name.
    """
    options = options or {}
    names = [*tensors, *options]
    digest = torch.tensor([hash63(repr(names))], dtype=torch.int64, device=device)
    everyone = link.collect(digest).view(-1).tolist()
    if changing := _announced(link, everyone):
        return [Difference(CHANGE, tuple(changing), min(changing.values()))]
    if len(set(everyone)) > 1:  # checksum tables of different sizes could not be exchanged
        return [
            Difference("the names of their tensors and options", tuple(range(1, link.replicas)), 0)
        ]
    sums = [checksum(tensor).to(device) for tensor in tensors.values()]
    hashes = [hash63(text) for text in options.values()]
    sums += torch.tensor(hashes, dtype=torch.int64, device=device).unbind()
    if not sums:
        return []
    # for each replica, the checksums of its tensors, then the hashes of its options
    table = link.collect(torch.stack(sums)).tolist()
    columns = zip(names, zip(*table, strict=True), strict=True)
    found = [_difference(name, column) for name, column in columns]
    return [difference for difference in found if difference]


def options_of(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """Returns the options of all parameter groups (lr, betas, weight_decay, ...) as texts, so that
    replicas can compare the options. One further text per group identifies those `parameters` that
    the group holds.

    Waits for the device if an option is a tensor.

    Example:
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        >>> options_of(optimizer, {})["lr of group 0"]
        '0.1'
    """
    found = {}
    for number, text in enumerate(members_of(optimizer, parameters)):
        found[f"parameters of group {number}"] = text
    private = _private(optimizer)
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            value = python_number(value)
            if isinstance(value, Tensor) and value.device.type != "meta":
                value = value.tolist()
            is_plain = value is None or isinstance(value, bool | int | float | str | tuple)
            if is_plain and key not in private:
                found[f"{key} of group {number}"] = str(value)
    return found


def members_of(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> list[str]:
    """Returns a text for each parameter group: the count of those `parameters` that the group
    holds, and a digest of their names.
    """
    names = {id(whole_of(parameter)): name for name, parameter in parameters.items()}
    found = []
    for group in optimizer.param_groups:
        held = sorted(names[id(p)] for p in group["params"] if id(p) in names)
        found.append(f"{len(held)}, {hash63(repr(held)):x}")
    return found


def numbers_of(optimizer: Optimizer | None) -> Callable[[Mapping[str, Any]], str]:
    """Returns a function that converts a parameter group to text. The text contains the numeric
    options of the optimizer (lr, betas, ...): those that are a number or None in every group.

    The text omits an lr that is a tensor, because each step would wait for the device to read this
    tensor; `options_of` reads such an lr. The text also omits entries that other code added to a
    group, such as a scheduler's initial lr, because a joining replica may lack these entries.

    Example:
        >>> optimizer = torch.optim.Rprop([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        >>> numbers_of(optimizer)(optimizer.param_groups[0]).partition(" maximize")[0]
        'lr=0.1 etas=(0.5, 1.2) step_sizes=(1e-06, 50)'
    """
    found = []
    if optimizer:
        private = _private(optimizer)
        for key in optimizer.defaults:
            values = [group.get(key) for group in optimizer.param_groups]
            numbers = [value for value in values if value is not None]
            if key not in private and numbers and all(map(_is_number, numbers)):
                found.append(f"{key}={{{key}}}")
    return " ".join(found).format_map


def _private(optimizer: Optimizer) -> set[str]:
    """Returns those keys of `optimizer.defaults` that are not arguments of the optimizer's
    constructor. Entries under these keys are state, for example the distance estimate of Prodigy,
    and not options.
    """
    arguments = signature(type(optimizer).__init__).parameters
    takes_others = any(each.kind == each.VAR_KEYWORD for each in arguments.values())
    if takes_others or "params" not in arguments:
        return set()
    return optimizer.defaults.keys() - arguments.keys()


def _is_number(value: object) -> bool:
    value = python_number(value)
    if isinstance(value, tuple):
        return all(isinstance(each, int | float) for each in value)
    return isinstance(value, int | float)


def announce_change(link: Link, number: int, device: torch.device) -> list[int]:
    """Announces to all replicas that this replica began or stopped training the parameter with the
    index `number`. Returns all replicas that announce such a change. Replicas without a change call
    `differences` instead. Collective."""
    word = torch.tensor([-1 - number], dtype=torch.int64, device=device)
    everyone = link.collect(word).view(-1).tolist()
    return list(_announced(link, everyone))


def _announced(link: Link, words: Sequence[int]) -> dict[int, int]:
    """Returns, for each replica that announced that it began or stopped training a parameter, the
    index of this parameter.

    words: one integer of each replica, as `Link.collect` returns them. All `local_ranks` ranks of a
    replica send the same integer. `collect` adds these integers with the weights 1, 3, 5, ..., so
    the sum is `local_ranks` squared times the sent integer.
    """
    numbers = {replica: -word // link.local_ranks**2 - 1 for replica, word in enumerate(words)}
    return {replica: number for replica, number in numbers.items() if 0 <= number < 2**31}


def repaired(
    link: Link,
    difference: Difference,
    tensor: Tensor,
    device: torch.device,
    apart: bool = False,
) -> Tensor:
    """Copies the tensor of the replica `difference.source` to all replicas, and returns the copy.
    If this source replica has been lost, returns the local tensor. Collective.

    The copy is an all-reduce of bytes in which all replicas except the source send zeros. So all
    replicas get the same bits.

    Args:
        device: Device of the tensors that the link sends.
        apart: True if the ranks of a node may have different tensors, such as shards.
    """
    octets = tensor.contiguous().view(-1).view(torch.uint8).to(device)
    mark = torch.ones(1, dtype=torch.uint8, device=device)
    mine = torch.cat([octets, mark])
    if link.replica != difference.source:
        mine.zero_()
    total = link.all_reduce(mine, apart)()
    if not total[-1]:
        return tensor
    return total[:-1].view(tensor.dtype).view(tensor.shape).to(tensor.device)


def _difference(name: str, sums: Sequence[int]) -> Difference | None:
    expected, count = Counter(sums).most_common(1)[0]
    if count == len(sums):
        return None
    if 2 * count <= len(sums):
        expected = sums[0]
    odd = tuple(replica for replica, each in enumerate(sums) if each != expected)
    return Difference(name, odd, sums.index(expected))
