"""Results that one process hands to another as files: JSON with the tensors beside it, never pickle."""

import json
from pathlib import Path
from typing import Any

import torch

from detonation.whole_files import write_whole

_TENSOR_MARK = "__tensor__"


def write_result(path: Path, value: Any) -> None:
    """Writes plain values, lists, string-keyed dicts and tensors, in any nesting; tuples come back as lists."""
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(_without_tensors(value, tensors))
    if tensors:
        save_file(tensors, path.with_suffix(".safetensors"))
    # The JSON file appears last and whole: its presence means that the result is complete.
    write_whole(path, text.encode())


def read_result(path: Path) -> Any:
    """Reads a result that `write_result` wrote."""
    value = json.loads(path.read_text(encoding="utf-8"))
    tensor_file = path.with_suffix(".safetensors")
    if not tensor_file.exists():
        return value
    from safetensors.torch import load_file

    return _with_tensors(value, load_file(tensor_file))


def _without_tensors(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """`value` with a mark in the place of each tensor; the tensors go into `tensors`."""
    if isinstance(value, torch.Tensor):
        key = str(len(tensors))
        tensors[key] = value.detach().cpu().clone().contiguous()
        return {_TENSOR_MARK: key}
    if isinstance(value, dict):
        return {key: _without_tensors(inner, tensors) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_tensors(inner, tensors) for inner in value]
    return value


def _with_tensors(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, dict):
        if set(value) == {_TENSOR_MARK}:
            return tensors[value[_TENSOR_MARK]]
        return {key: _with_tensors(inner, tensors) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_tensors(inner, tensors) for inner in value]
    return value
