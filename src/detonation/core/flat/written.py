"""Weights that others write: what changed since somebody looked, by the stamps of tensors."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

Stamp = tuple[int, int, int]
"""The identity of a tensor, its version, and the address of its memory."""
WeightPlace = tuple[Mapping[str, Parameter | None], str]
"""The parameters of a module, and the name of one."""


def stamp(tensor: Tensor) -> Stamp:
    """Numbers of which one is another after `tensor` was written, replaced, or given other memory.

    Reads nothing on a device. A write that torch does not count keeps them: by `tensor.data.copy_`,
    in inference mode, or by a kernel that has the address alone.
    """
    mine: Any = getattr(tensor, "_local_tensor", tensor)
    # a write to a DTensor counts on it alone, and one to its shard on the shard alone
    version = _version(tensor) + (0 if mine is tensor else _version(mine))
    # a subclass, such as a quantized weight, may have no address
    address = mine.data_ptr() if type(mine) in (Tensor, Parameter) else 0
    return id(tensor), version, address


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


@dataclass
class WrittenWeights:
    """Tells which weights were written since they were noted.

    Whoever moves weights notes them afterwards, so that what is found was written by others.
    """

    places: Mapping[str, WeightPlace] = field(default_factory=dict)
    """Where the model has each weight, by its name in the model."""
    _stamps: dict[str, Stamp] = field(default_factory=dict)

    def note(self) -> None:
        """Takes the weights as they are now for known."""
        self._stamps = {name: stamp(tensor) for name, tensor in self._tensors()}

    def forget(self) -> None:
        """Finds nothing until the weights are noted again."""
        self._stamps = {}

    def found(self) -> dict[str, Tensor]:
        """The weights that were written since they were noted, by name."""
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
    """Where `model` has each of its parameters, by the names of `named_parameters`."""
    modules = dict(model.named_modules())
    found = {}
    for name, _ in model.named_parameters():
        owner, _, own_name = name.rpartition(".")
        found[name] = (modules[owner]._parameters, own_name)
    return found


def first_names(names: Iterable[str], most: int = 3) -> str:
    """The first of `names`, and how many there are more, for a message."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
