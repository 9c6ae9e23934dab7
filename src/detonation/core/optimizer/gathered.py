"""Handles gathered parameters: after a forward pass without a backward pass, the modules of an
FSDP2 model hold gathered copies of the parameters instead of the shards.

While the modules hold copies, the next forward pass ignores writes to the shards, and a
`requires_grad` that is set on a copy does not reach its shard.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from detonation.core.flat.tensors import bare_name

_UNIT = "_detonation_shown"
_Place = tuple[dict[str, nn.Parameter | None], str]
"""The place of a parameter: its module's dictionary of parameters, and its name there."""


class ShownUnit:
    """Tracks whether the modules of one FSDP unit currently hold shards or gathered copies.

    place: the module and name of one sharded parameter. shard: the shard of this parameter, which
    the module holds while the unit is not gathered; None if the unit has no sharded parameter.
    copies: the gathered copies that were seen last, each with its shard. FSDP2 reuses the same
    copies.

    Args:
        module: The unit. It gets this object as an attribute, and a hook before its forward pass.
    """

    place: _Place = {}, ""
    shard: nn.Parameter | None = None

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._shards = list[tuple[_Place, nn.Parameter]]()
        shown = {(id(parameters), name): parameters[name] for parameters, name in _places(module)}
        self._show()
        pairs = [(shown[id(place[0]), place[1]], shard) for place, shard in self._shards]
        self.copies = [
            (copy, shard) for copy, shard in pairs if copy is not None and copy is not shard
        ]
        for copy, shard in self.copies:
            shard.requires_grad_(copy.requires_grad)
        self._note()
        setattr(module, _UNIT, self)
        hook = torch.compiler.disable(self.before_forward)  # type: ignore[no-untyped-call]
        module.register_forward_pre_hook(hook, prepend=True)
        self._hook_methods(hook)

    def _hook_methods(self, hook: Callable[[], None]) -> None:
        """Makes FSDP2 also call `hook` before the methods that `register_fsdp_forward_method`
        registered, because these methods run no forward hooks of the module.
        """
        state: Any = self._module._get_fsdp_state()  # type: ignore[operator]
        gather = state._pre_forward

        def before(*arguments: Any) -> Any:
            hook()
            return gather(*arguments)

        state._pre_forward = before

    @property
    def is_gathered(self) -> bool:
        """True while the unit's modules hold gathered copies instead of shards."""
        parameters, name = self.place
        return self.shard is not None and parameters.get(name) is not self.shard

    def settle(self) -> None:
        """Makes `requires_grad` of each shard and its gathered copy equal. If they differ, user
        code has changed one of the two, and the changed value is used.

        FSDP2 itself copies `requires_grad` from shards to copies when it gathers, but never from
        copies to shards.
        """
        self.copies = []
        for ((parameters, name), shard), before in zip(self._shards, self._required, strict=True):
            copy = parameters.get(name)
            if copy is None or copy is shard:
                continue
            self.copies.append((copy, shard))
            if copy.requires_grad != shard.requires_grad:
                copy.requires_grad_(not before)
                shard.requires_grad_(not before)

    def reshard(self) -> None:
        """Puts the shards back into the unit's modules. `settle` must be called first."""
        self._show()
        self._note()

    def _show(self) -> None:
        assert isinstance(self._module, FSDPModule)
        self._module.reshard()
        shown = [
            (place, p) for place in _places(self._module) if (p := place[0][place[1]]) is not None
        ]
        sharded = [(place, p) for place, p in shown if isinstance(p, DTensor)]
        if sharded:
            self.place, self.shard = sharded[0]
            self._shards = shown

    def _note(self) -> None:
        """Records `requires_grad` of each shard, so that `settle` can detect later changes."""
        self._required = [shard.requires_grad for _, shard in self._shards]

    def before_forward(self, *_: object) -> None:
        """Calls `settle` if the modules of this FSDP unit hold gathered copies. In either case,
        records `requires_grad` of each shard afterwards.
        """
        if self.is_gathered:
            self.settle()
        self._note()


def shown_units(model: nn.Module) -> list[ShownUnit]:
    """Returns the FSDP units of `model` that have sharded parameters of their own. For an unsharded
    model the list is empty.
    """
    units = [
        vars(m).get(_UNIT) or ShownUnit(m) for m in model.modules() if isinstance(m, FSDPModule)
    ]
    return [unit for unit in units if unit.shard is not None]


def reshard(model: nn.Module) -> None:
    """Makes the modules of `model` hold their FSDP2 shards instead of gathered copies. Code that
    reads or writes weights by name, or writes to shards, must call this function first.

    A later backward pass gathers the copies again. On an unsharded model this function does
    nothing.
    """
    gathered = [unit for unit in shown_units(model) if unit.is_gathered]
    for unit in gathered:
        unit.settle()
    for unit in gathered:
        unit.reshard()


def local_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters of `model` as shards, by name without the prefixes of wrappers."""
    reshard(model)
    return {bare_name(name): parameter for name, parameter in model.named_parameters()}


def late_parameters(model: nn.Module) -> frozenset[str]:
    """Returns the names of the late parameters. Their gradients arrive only when backward ends.

    FSDP2 delivers the gradients of an outermost unit after the gradients of all units inside this
    unit. A model without nested FSDP units has no late parameters.
    """
    parameters = local_parameters(model)
    late = set[int]()
    inner = set[nn.Module]()
    for unit in model.modules():  # `modules` yields an outer unit before its inner units
        if isinstance(unit, FSDPModule) and unit not in inner:
            inside = {each for each in unit.modules() if isinstance(each, FSDPModule)} - {unit}
            inner |= inside
            if inside:
                late |= {id(held[name]) for held, name in _places(unit)}
    return frozenset(name for name, parameter in parameters.items() if id(parameter) in late)


def _places(module: nn.Module) -> Iterator[_Place]:
    """Yields the place of each parameter of an FSDP unit: the dictionary of parameters of its
    module, and the parameter's name there. Parameters of nested units are left out.
    """
    for name in module._parameters:
        yield module._parameters, name
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _places(child)
