"""Converts options of parameter groups, such as lr, to Python numbers and to JSON, and reads equal
options back from JSON."""

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_TENSORS = "$tensors"
"""Key under which a record of options stores the names and dtypes of the options that are tensors.
"""
USUAL = {bool, int, float, str, type(None), tuple, list, Tensor}
"""The types of options that need no conversion to Python numbers, alone or inside tuples."""


def use_python_numbers(group: dict[str, Any]) -> None:
    """Replaces NumPy scalars in a parameter group by Python numbers.

    With an lr that is a NumPy `float32`, optimizers would compute less precisely than with a Python
    number. Also, NumPy may not be installed on a replica, or on a follower that replays the run.
    """
    group.update({key: python_number(value) for key, value in group.items()})


def python_number(value: Any) -> Any:
    """Converts a NumPy scalar, alone or inside a tuple, to a Python number. Returns a value of any
    other type unchanged.
    """
    numpy = sys.modules.get("numpy")  # if NumPy was not imported, no option can be a NumPy scalar
    if type(value) is tuple:
        return tuple(map(python_number, value))
    if numpy is None:
        return value
    if isinstance(value, numpy.generic) or (isinstance(value, numpy.ndarray) and not value.ndim):
        return value.item()
    return value


def recorded_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a parameter group that JSON can represent. A tensor of one element
    becomes a number, and the record also states the dtype of this tensor.
    """
    found: dict[str, Any] = {}
    kinds = {}
    for key, option in group.items():
        value = python_number(option)
        if isinstance(value, Tensor) and value.numel() == 1:
            kinds[key] = str(value.dtype).removeprefix("torch.")
            value = float(value)
        if key != "params" and _is_plain(value):
            found[key] = value
    found[_TENSORS] = kinds
    return found


def take_recorded(group: dict[str, Any], recorded: Mapping[str, Any]) -> None:
    """Writes `recorded`, the options from `recorded_options`, into the parameter group `group`. An
    option that was recorded from a tensor becomes a tensor again.
    """
    options = dict(recorded)
    kinds = options.pop(_TENSORS, None)
    if isinstance(kinds, dict):  # records that older versions wrote have no dtypes
        _take_kinds(group, kinds)
    group.update({key: _like(group.get(key), value) for key, value in options.items()})


def _take_kinds(group: dict[str, Any], kinds: Mapping[str, Any]) -> None:
    for key in group.keys() - {"params"}:
        value = group[key]
        dtype = getattr(torch, str(kinds.get(key)), None)
        if isinstance(dtype, torch.dtype) and isinstance(value, Tensor):
            group[key] = value.to(dtype)
        elif isinstance(dtype, torch.dtype) and isinstance(value, int | float):
            group[key] = torch.tensor(value, dtype=dtype, device="cpu")
        elif isinstance(value, Tensor) and value.numel() == 1:
            group[key] = value.item()


def _like(current: object, value: Any) -> Any:
    """Converts `value`, an option that was read from JSON, to the type of `current`, the option in
    the parameter group."""
    if isinstance(current, Tensor):
        return current.fill_(value)
    if isinstance(current, tuple):
        return tuple(value)
    return value


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return isinstance(value, int | float | str | None) and value == value  # JSON has no NaN
