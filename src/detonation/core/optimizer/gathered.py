"""Gathered parameters: after a forward pass without a backward pass, FSDP2 shows copies of all
shards instead of the shards.

Then the next forward pass ignores writes to the shards, and shards ignore a `requires_grad` that is
set on the copies.
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
"""A module's parameters by name, and one of these names."""


class ShownUnit:
    """The parameters that one FSDP unit currently shows: its shards, or gathered copies.

    place: the module and name of one sharded parameter. shard: its shard, which is shown unless the
    unit is gathered; None if the unit has no sharded parameter. copies: the copies seen last, each
    with its shard; FSDP2 refills the same copies.

    Args:
        module: The unit; gets this as an attribute, and a hook before its forward pass.
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
        """Also calls `hook` before methods of `register_fsdp_forward_method`, which run no module
        hooks.
        """
        state: Any = self._module._get_fsdp_state()  # type: ignore[operator]
        gather = state._pre_forward

        def before(*arguments: Any) -> Any:
            hook()
            return gather(*arguments)

        state._pre_forward = before

    @property
    def is_gathered(self) -> bool:
        """True while copies are shown."""
        parameters, name = self.place
        return self.shard is not None and parameters.get(name) is not self.shard

    def settle(self) -> None:
        """Gives shards and copies the `requires_grad` that user code set on either since both were
        last equal.

        FSDP2 itself copies `requires_grad` from shards to copies when it gathers, but never back.
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
        """Shows the shards, after a call of `settle`."""
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
        """Records the common `requires_grad` of shards and of copies that may be shown next."""
        self._required = [shard.requires_grad for _, shard in self._shards]

    def before_forward(self, *_: object) -> None:
        """Calls `settle`, then records the common `requires_grad`."""
        if self.is_gathered:
            self.settle()
        self._note()


def shown_units(model: nn.Module) -> list[ShownUnit]:
    """The FSDP units of `model` that have sharded parameters of their own. An unsharded model has
    none.
    """
    units = [
        vars(m).get(_UNIT) or ShownUnit(m) for m in model.modules() if isinstance(m, FSDPModule)
    ]
    return [unit for unit in units if unit.shard is not None]


def reshard(model: nn.Module) -> None:
    """Shows the shards, for code that reads or writes weights by their names in `model`, or writes
    to shards.

    A later backward pass gathers the copies again. On unsharded models it does nothing.
    """
    gathered = [unit for unit in shown_units(model) if unit.is_gathered]
    for unit in gathered:
        unit.settle()
    for unit in gathered:
        unit.reshard()


def local_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The parameters of `model` as shards, by their names without wrappers."""
    reshard(model)
    return {bare_name(name): parameter for name, parameter in model.named_parameters()}


def late_parameters(model: nn.Module) -> frozenset[str]:
    """Names of the parameters whose gradients arrive only when backward ends.

    FSDP2 delivers the gradients of an outermost unit after the gradients of all units inside it. A
    model without nested units has no late parameters.
    """
    parameters = local_parameters(model)
    late = set[int]()
    inner = set[nn.Module]()
    for unit in model.modules():  # `modules` yields a unit before the units inside it
        if isinstance(unit, FSDPModule) and unit not in inner:
            inside = {each for each in unit.modules() if isinstance(each, FSDPModule)} - {unit}
            inner |= inside
            if inside:
                late |= {id(held[name]) for held, name in _places(unit)}
    return frozenset(name for name, parameter in parameters.items() if id(parameter) in late)


def _places(module: nn.Module) -> Iterator[_Place]:
    """The module and name of each parameter of a unit, without nested units."""
    for name in module._parameters:
        yield module._parameters, name
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _places(child)
