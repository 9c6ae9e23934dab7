"""Detects writes to weights outside of optimizer steps: compares the identity, version and address
of each weight with those at an earlier time."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

Stamp = tuple[int, int, int]
"""Identity of a tensor, its version, and the address of its memory."""
WeightPlace = tuple[Mapping[str, Parameter | None], str]
"""Where a weight is stored: the parameters of its module by name, and its name in this module."""


def stamp(tensor: Tensor) -> Stamp:
    """Three numbers, of which at least one changes when `tensor` is written, replaced, or moved to
    other memory.

    This function reads nothing from a device. It misses writes that torch does not count:
    `tensor.data.copy_`, writes in inference mode, and kernels that write by address.
    """
    mine: Any = getattr(tensor, "_local_tensor", tensor)
    version = _version(tensor)
    if mine is not tensor:  # a DTensor and its shard count their writes separately
        version += _version(mine)
    address = 0
    # tensors of other types, such as quantized weights, may have no address
    if type(mine) in (Tensor, Parameter):
        address = mine.data_ptr()
    return id(tensor), version, address


def _version(tensor: Tensor) -> int:
    if tensor.is_inference():
        return 0
    return tensor._version


@dataclass
class WrittenWeights:
    """Finds weights that were written since the last `note`.

    This library calls `note` whenever it has written weights itself.
    """

    places: Mapping[str, WeightPlace] = field(default_factory=dict)
    """The module and own name of each weight, by its name in the model."""
    _stamps: dict[str, Stamp] = field(default_factory=dict)

    def note(self) -> None:
        """Stores the current stamp (see `stamp`) of each weight. `found` compares later stamps with
        the stored stamps."""
        self._stamps = {name: stamp(tensor) for name, tensor in self._tensors()}

    def forget(self) -> None:
        """Drops the stamps that `note` stored. `found` returns nothing until the next `note`."""
        self._stamps = {}

    def found(self) -> dict[str, Tensor]:
        """Weights that were written since the last `note`, by name."""
        noted = self._stamps
        if not noted:
            return {}
        return {name: each for name, each in self._tensors() if noted.get(name) != stamp(each)}

    def _tensors(self) -> Iterable[tuple[str, Tensor]]:
        for name, (parameters, own_name) in self.places.items():
            tensor = parameters.get(own_name)
            if tensor is not None:
                yield name, tensor


def weight_places(model: nn.Module) -> dict[str, WeightPlace]:
    """Returns where each parameter of `model` is stored, by its name in the model: the parameters
    of the module that owns the parameter, and the parameter's name in this module.
    """
    modules = dict(model.named_modules())
    found = {}
    for name, _ in model.named_parameters():
        owner, _, own_name = name.rpartition(".")
        found[name] = (modules[owner]._parameters, own_name)
    return found
