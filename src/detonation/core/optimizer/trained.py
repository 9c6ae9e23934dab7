"""Tracks the trained parameters, and detects when they change. The trained parameters are the
parameters of the optimizer that require a gradient.
"""

import gc
import weakref
from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from detonation.core.flat.padding_rows import note_padding
from detonation.core.flat.tensors import bare_name
from detonation.core.optimizer.gathered import local_parameters, reshard, shown_units

_TRAINED = weakref.WeakKeyDictionary["TrainedParameters", None]()
"""All `TrainedParameters` of this process, as weak keys. Read them by `keyrefs()`, because another
thread may create an instance during the iteration.
"""

# an attrgetter runs in C, so a step calls no Python function for each parameter
_KIND = attrgetter("dtype", "shape")


class TrainedParameters:
    """The parameters of the optimizer `base` that require a gradient, by their names in `model`."""

    def __init__(self, model: nn.Module, base: Optimizer) -> None:
        self.model = model
        self._base = base
        self.laid_out: Mapping[str, Tensor] = {}
        """The parameters in the message layouts of the levels, by name."""
        self._ids = set[int]()
        # dtypes and shapes of the parameters in the layouts
        self._kinds: list[tuple[torch.dtype, torch.Size]] = []
        # The next four lists have one entry for each use of an optimizer's parameter in a module.
        # The four entries: the module's `_parameters`, the names in module and model, and the id.
        self._owners: list[dict[str, nn.Parameter | None]] = []
        self._own_names: list[str] = []
        self._full_names: list[str] = []
        self._owned: list[int] = []
        self._units = shown_units(model)
        self._take_shards()
        _TRAINED[self] = None

    @property
    def everyone(self) -> list[Tensor]:
        """All parameters of the optimizer, whether frozen or trained."""
        return [parameter for group in self._base.param_groups for parameter in group["params"]]

    def by_name(self) -> dict[str, Tensor]:
        """Returns the optimizer's parameters that require a gradient, by name, in the model's
        order.

        Raises `ValueError` if one of these parameters is not in the model.
        """
        parameters = local_parameters(self.model)
        self._take_shards()
        wanted = {id(p): p for p in self.everyone if p.requires_grad}
        found = {name: p for name, p in parameters.items() if id(p) in wanted}
        if len(found) < len(wanted):
            odd = [p for p in wanted.values() if all(p is not mine for mine in found.values())]
            raise ValueError(
                f"{len(odd)} parameters of the optimizer are not in the model, such as one of shape"
                f" {tuple(odd[0].shape)}: {_cause(odd, self.model)}"
            )
        note_padding(self.model)
        return found

    @property
    def frozen(self) -> dict[str, Tensor]:
        """The parameters of the model that require no gradient, by name. Parameters on the meta
        device are left out.

        Frozen parameters of another replicated optimizer are left out, too, because they may be
        frozen only for a time, for example by Lightning's `toggle_optimizer`.
        """
        found = {name: p for name, p in self._not_here().items() if not p.requires_grad}
        return self._without_replicated(found)

    @property
    def unreplicated(self) -> dict[str, Tensor]:
        """The parameters of the model that no replicated optimizer trains, by name."""
        return self._without_replicated(self._not_here())

    def _without_replicated(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the parameters in `found` that no other replicated optimizer has."""
        ids = {id(p) for p in found.values()}
        trained = self._trained_elsewhere()
        if ids & trained:
            gc.collect()  # frees old optimizers that reference cycles keep alive on some ranks only
            trained = self._trained_elsewhere()
        return {name: p for name, p in found.items() if id(p) not in trained}

    def _not_here(self) -> dict[str, Tensor]:
        """Returns the parameters that are in no message layout and not on the meta device."""
        return {
            name: p
            for name, p in local_parameters(self.model).items()
            if name not in self.laid_out and p.device.type != "meta"
        }

    def _trained_elsewhere(self) -> set[int]:
        """Returns the ids of the parameters of all other replicated optimizers that are in use.

        Some ranks may still hold an old optimizer that other ranks have already dropped. So that
        all ranks get the same result, an old optimizer does not count if a later optimizer has one
        of its parameters.
        """
        found = dict[TrainedParameters, set[int]]()
        for each in _TRAINED.keyrefs():  # iterates over optimizers in order of creation
            if (one := each()) is not None:
                ids = {id(p) for p in one.everyone}
                found = {other: had for other, had in found.items() if had.isdisjoint(ids)}
                found[one] = ids
        found.pop(self, None)
        return set[int]().union(*found.values())

    def named(self, names: Collection[str]) -> dict[str, Tensor]:
        """Returns those parameters of the optimizer whose names are in `names`, whether frozen or
        trained, in the model's order.
        """
        everyone = {id(p) for p in self.everyone}
        parameters = local_parameters(self.model)
        note_padding(self.model)
        return {name: p for name, p in parameters.items() if name in names and id(p) in everyone}

    def _take_shards(self) -> None:
        """Replaces gathered copies in the parameter groups by their shards. The groups contain
        copies if the optimizer or a group was created after a forward pass without a backward pass.
        """
        shards = {
            id(copy): shard for unit in shown_units(self.model) for copy, shard in unit.copies
        }
        if not any(id(p) in shards for p in self.everyone):
            return
        for group in self._base.param_groups:
            group["params"] = [shards.get(id(p), p) for p in group["params"]]
        if len({id(p) for p in self.everyone}) < len(self.everyone):
            raise ValueError(
                "some parameters appear in more than one parameter group of the optimizer: list"
                " each parameter once"
            )

    def lay_out(self, parameters: Mapping[str, Tensor]) -> None:
        """Records that the message layouts now contain the trained `parameters`."""
        self.laid_out = parameters
        mine = {id(p) for p in parameters.values()}
        self._kinds = [*map(_KIND, parameters.values())]
        self._units = shown_units(self.model)
        self._ids = {id(p) for p in self.everyone if id(p) in mine}
        self._note_owners()
        self._forget_frozen_gradients()

    def _note_owners(self) -> None:
        mine = {id(p) for p in self.everyone}
        found = [
            (module._parameters, name, f"{prefix}.{name}", id(p))
            for prefix, module in self.model.named_modules()
            for name, p in module._parameters.items()
            if id(p) in mine
        ]
        self._owners = [parameters for parameters, _, _, _ in found]
        self._own_names = [name for _, name, _, _ in found]
        self._full_names = [bare_name(full.removeprefix(".")) for _, _, full, _ in found]
        self._owned = [number for _, _, _, number in found]

    def show_shards(self) -> bool:
        """Makes the model hold FSDP2 shards again, if a forward pass without a backward pass left
        gathered copies.

        Every step calls this method. Returns True if the parameters that require a gradient are no
        longer the parameters of the message layouts.
        """
        for unit in self._units:
            parameters, name = unit.place
            if parameters.get(name) is not unit.shard:
                reshard(self.model)
                break
        if [*map(_KIND, self.laid_out.values())] != self._kinds:
            self._refuse_other_kinds()
        if [*map(id, map(dict.get, self._owners, self._own_names))] != self._owned:
            self._refuse_replaced()
        groups = self._base.param_groups
        return {id(p) for group in groups for p in group["params"] if p.requires_grad} != self._ids

    def _refuse_other_kinds(self) -> None:
        for (name, p), (dtype, shape) in zip(self.laid_out.items(), self._kinds, strict=True):
            if (p.dtype, p.shape) != (dtype, shape):
                raise ValueError(
                    f"{name} is {p.shape} {p.dtype}, was {shape} {dtype} at the last step:"
                    " keep dtype and shape, or make the optimizer again"
                )

    def _refuse_replaced(self) -> None:
        """Raises `ValueError` if the model no longer contains a parameter of the optimizer, because
        other code put a new parameter in its place.

        It is no error if the model contains the same parameter under another name, as after a
        parametrization was registered.
        """
        held = {id(p) for p in self.model.parameters()}
        for name, number in zip(self._full_names, self._owned, strict=True):
            if number not in held:
                raise ValueError(
                    f"{name} of the model is a new parameter, which the optimizer does not have, as"
                    " after load_state_dict(assign=True): load without assign, or make the"
                    " optimizer again"
                )
        self._note_owners()

    @property
    def changed(self) -> bool:
        """True if the parameters that require a gradient are no longer the parameters of the
        message layouts.
        """
        return {id(p) for p in self.everyone if p.requires_grad} != self._ids

    def _forget_frozen_gradients(self) -> None:
        """Sets the gradients of frozen parameters to None. The base optimizer would otherwise apply
        these gradients on this replica alone.
        """
        for parameter in self.everyone:
            if not parameter.requires_grad:
                parameter.grad = None


def _cause(odd: Sequence[Tensor], model: nn.Module) -> str:
    """Returns, as text, the reason why the parameters `odd` of an optimizer are not in the model,
    and a remedy.
    """
    if any(p.device.type == "meta" for p in odd):
        return "these parameters are on the meta device: make the optimizer after to_empty"
    if any(isinstance(p, DTensor) for p in model.parameters()) and not any(
        isinstance(p, DTensor) for p in odd
    ):
        return (
            "the model is sharded, but these parameters are not: make the optimizer after"
            " detonation.shard or fully_shard (in Lightning, in configure_optimizers)"
        )
    return (
        "make the optimizer from the parameters of the model that is passed to replicate, after"
        " sharding, loading and moving the model"
    )
