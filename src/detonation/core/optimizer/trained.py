"""The trained parameters: the ones of the optimizer that require a gradient, and whether they changed since the last
layout."""

import weakref
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from detonation.core.flat.tensors import local

_TRAINED = weakref.WeakSet["TrainedParameters"]()
"""Of all replicated optimizers of this process."""


class TrainedParameters:
    """The parameters of `base` that require a gradient, by their names in `model`."""

    def __init__(self, model: nn.Module, base: Optimizer) -> None:
        self.model, self._base = model, base
        self.laid_out: Mapping[str, Tensor] = {}
        """The parameters in the layouts of the levels, by name."""
        self._ids: list[int] = []
        _TRAINED.add(self)

    @property
    def everyone(self) -> list[Tensor]:
        """All parameters of the optimizer, frozen or not.

        Shapes: any.
        """
        return [parameter for group in self._base.param_groups for parameter in group["params"]]

    @property
    def names(self) -> list[str]:
        """The names of all parameters of the model."""
        return [name for name, _ in self.model.named_parameters()]

    def by_name(self) -> dict[str, Tensor]:
        """The parameters that require a gradient, in the model's order.

        Raises `ValueError` where one is not in the model.

        Shapes: any.
        """
        wanted = {id(p) for p in self.everyone if p.requires_grad}
        found = self._found(wanted)
        if len(found) < len(wanted):
            raise ValueError(
                f"{len(wanted) - len(found)} parameters of the optimizer are not in the model: were they made before "
                "sharding? Build the optimizer after detonation.shard"
            )
        return found

    @property
    def frozen(self) -> dict[str, Tensor]:
        """The parameters of the model that nobody trains, by name; those without memory are left out.

        One that another replicated optimizer trains may be frozen for the moment, as Lightning's `toggle_optimizer`
        does; one that requires a gradient may belong to a plain optimizer, and differ between replicas.

        Shapes: any.
        """
        trained = {id(p) for each in _TRAINED for p in each.everyone}
        # by name, too: FSDP2 may show gathered parameters in the place of the shards
        named = {name for each in _TRAINED if each.model is self.model for name in each.laid_out}
        return {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if not (parameter.requires_grad or name in named or id(parameter) in trained)
            and parameter.device.type != "meta"
        }

    def named(self, names: Collection[str]) -> dict[str, Tensor]:
        """The parameters of the optimizer with these `names`, frozen or not, in the model's order.

        Shapes: any.
        """
        everyone = self._found({id(p) for p in self.everyone})
        return {name: p for name, p in everyone.items() if name in names}

    def lay_out(self, parameters: Mapping[str, Tensor]) -> None:
        """Notes that the layouts hold `parameters` from now on.

        Shapes: any.
        """
        self.laid_out, mine = parameters, {id(p) for p in parameters.values()}
        self._ids = [id(p) for p in self.everyone if id(p) in mine]

    @property
    def changed(self) -> bool:
        """True if other parameters require a gradient than the layouts hold; asked at every step."""
        return [id(p) for p in self.everyone if p.requires_grad] != self._ids

    def forget_frozen_gradients(self) -> None:
        """Removes the gradients of frozen parameters: the base optimizer would follow them on this replica alone."""
        for parameter in self.everyone:
            if not parameter.requires_grad:
                parameter.grad = None

    def _found(self, wanted: set[int]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {name: p for name, p in self.model.named_parameters() if id(p) in wanted}
        if len(found) < len(wanted):
            reshard(self.model)
            found = {name: p for name, p in self.model.named_parameters() if id(p) in wanted}
        note_padding(self.model)
        return found


def note_padding(model: nn.Module) -> None:
    """Notes the `padding_row` of each embedding that has a `padding_idx`, on the shard that holds it.

    Not where another module uses the weights, too: an output layer gives that row a gradient.
    """
    users = Counter(id(p) for module in model.modules() for p in module._parameters.values())
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.padding_idx is not None:
            weight: Any = module.weight
            first = 0
            if isinstance(weight, DTensor):
                (chunk,) = weight.__create_chunk_list__()  # type: ignore[no-untyped-call]
                first = chunk.offsets[0]
            row = module.padding_idx - first
            held = 0 <= row < len(local(weight)) and users[id(weight)] == 1
            weight.padding_row = row if held else None


def reshard(model: nn.Module) -> None:
    """Shows the shards again after a forward pass: without a backward pass FSDP2 keeps the root's gathered parameters.

    A backward pass that comes later gathers them once more.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
