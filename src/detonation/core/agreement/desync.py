"""Desync: tensors that must be equal on all replicas and are not, found by one checksum per tensor,
and repaired from the majority."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from detonation.core.compute.checksum import checksum
from detonation.core.integrity.header import hash63
from detonation.core.link.link import Link

CHANGE = "a change of the trained parameters"


@dataclass(frozen=True)
class Difference:
    """A tensor that is not the same on all replicas.

    Args:
        odd: The replicas that differ.
        source: A replica of the majority, or replica 0 where there is none, as with two replicas.
            With the name `CHANGE` the replicas `odd` announced a change of the parameter with the
            number `source`.
    """

    name: str
    odd: tuple[int, ...]
    source: int

    def __str__(self) -> str:
        others = ", ".join(map(str, self.odd))
        which = f"replica {others} differs" if len(self.odd) == 1 else f"replicas {others} differ"
        return f"{which} from replica {self.source} in {self.name}"


def differences(
    link: Link,
    tensors: Mapping[str, Tensor],
    device: torch.device,
    options: Mapping[str, str] | None = None,
) -> list[Difference]:
    """The `tensors` that are not bitwise equal on all replicas; the same list on all of them.
    Collective.

    Reads every tensor once and sends 8 bytes for each; not counted as sent.

    Args:
        options: Texts that must be equal, too, by name.
    """
    options = options or {}
    names = torch.tensor([hash63(repr([*tensors, *options]))], dtype=torch.int64, device=device)
    everyone = link.collect(names).view(-1).tolist()
    if changing := _announced(link, everyone):
        return [Difference(CHANGE, tuple(changing), min(changing.values()))]
    if len(set(everyone)) > 1:  # messages of different sizes would end the receiver
        return [Difference("what they hold", tuple(range(1, link.replicas)), 0)]
    sums = [checksum(tensor).to(device) for tensor in tensors.values()]
    sums += torch.tensor(
        [hash63(text) for text in options.values()], dtype=torch.int64, device=device
    ).unbind()
    if not sums:
        return []
    table = link.collect(torch.stack(sums)).tolist()  # [replicas][tensors and options]
    columns = zip([*tensors, *options], zip(*table, strict=True), strict=True)
    return [
        difference
        for difference in (_difference(name, column) for name, column in columns)
        if difference
    ]


def options_of(optimizer: Optimizer) -> dict[str, str]:
    """The plain options of parameter groups (lr, betas, weight_decay, ...) as texts that are equal
    where they are.

    Reads the value of an lr that is a tensor.

    Example:
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        >>> options_of(optimizer)["lr of group 0"]
        '0.1'
    """
    found, private = {}, _private(optimizer)
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            plain = (
                value.tolist()
                if isinstance(value, Tensor) and value.device.type != "meta"
                else value
            )
            if key not in private and (
                plain is None or isinstance(plain, bool | int | float | str | tuple)
            ):
                found[f"{key} of group {number}"] = str(plain)  # the same for a number of numpy
    return found


def numbers_of(optimizer: Optimizer | None) -> Callable[[Mapping[str, Any]], str]:
    """A reader, for one group, of the optimizer's own options that are numbers in all groups (lr,
    betas, ...).

    An lr that is a tensor is left out, because a step would wait for its device: `options_of` reads
    it. So is what others keep in the groups, such as the first lr of a scheduler, which a newcomer
    may not have.

    Example:
        >>> optimizer = torch.optim.Rprop([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        >>> numbers_of(optimizer)(optimizer.param_groups[0])
        'lr=0.1 etas=(0.5, 1.2) step_sizes=(1e-06, 50) maximize=False differentiable=False
        capturable=False'
    """
    groups, private = (optimizer.param_groups, _private(optimizer)) if optimizer else ([], set())
    found = [key for key in (optimizer.defaults if optimizer else ()) if key not in private]
    return " ".join(
        f"{key}={{{key}}}" for key in found if all(_is_number(g.get(key)) for g in groups)
    ).format_map


def _private(optimizer: Optimizer) -> set[str]:
    """The defaults that no argument of the constructor sets: state, such as the estimate of
    Prodigy."""
    arguments = signature(type(optimizer).__init__).parameters
    takes_others = any(each.kind == each.VAR_KEYWORD for each in arguments.values())
    return (
        set()
        if takes_others or "params" not in arguments
        else optimizer.defaults.keys() - arguments.keys()
    )


def _is_number(value: object) -> bool:
    return all(
        isinstance(each, int | float) for each in (value if isinstance(value, tuple) else [value])
    )


def announce_change(link: Link, number: int, device: torch.device) -> list[int]:
    """The replicas that announce a change, this one of parameter `number`; the others are in
    `differences`. Collective."""
    everyone = (
        link.collect(torch.tensor([-1 - number], dtype=torch.int64, device=device))
        .view(-1)
        .tolist()
    )
    return list(_announced(link, everyone))


def _announced(link: Link, words: Sequence[int]) -> dict[int, int]:
    """The replicas that announced a change, and the parameter's number: `Link.collect` mixes the
    ranks of a node."""
    numbers = {replica: -word // link.local_ranks**2 - 1 for replica, word in enumerate(words)}
    return {replica: number for replica, number in numbers.items() if 0 <= number < 2**31}


def repaired(link: Link, difference: Difference, tensor: Tensor, device: torch.device) -> Tensor:
    """The source's tensor, on every replica; the own one where the source was lost on the way.
    Collective.

    The others add zeros to its bytes, so that all get the same bits. device: that the link carries.
    """
    mark = torch.ones(1, dtype=torch.uint8, device=device)
    mine = torch.cat([tensor.contiguous().view(-1).view(torch.uint8).to(device), mark])
    total = link.all_reduce(mine if link.replica == difference.source else mine.zero_())()
    return (
        total[:-1].view(tensor.dtype).view(tensor.shape).to(tensor.device) if total[-1] else tensor
    )


def _difference(name: str, sums: Sequence[int]) -> Difference | None:
    usual, count = Counter(sums).most_common(1)[0]
    if count == len(sums):
        return None
    usual = usual if 2 * count > len(sums) else sums[0]
    odd = tuple(replica for replica, each in enumerate(sums) if each != usual)
    return Difference(name, odd, sums.index(usual))
