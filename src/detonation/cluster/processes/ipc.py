"""Results that travel between processes as files: JSON with the tensors beside it, never pickle."""

import json
from pathlib import Path
from typing import Any

import torch

_MARK = "__tensor__"


def write(path: Path, value: Any) -> None:
    """Writes plain values, lists, string-keyed dicts and tensors, in any nesting; tuples come back as lists."""
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(_plain(value, tensors))
    if tensors:
        save_file(tensors, path.with_suffix(".safetensors"))
    # The JSON file appears last and whole: it says that the parcel is complete.
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def read(path: Path) -> Any:
    """What `write` wrote."""
    value = json.loads(path.read_text(encoding="utf-8"))
    beside = path.with_suffix(".safetensors")
    if not beside.exists():
        return value
    from safetensors.torch import load_file

    return _whole(value, load_file(beside))


def _plain(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        key = str(len(tensors))
        tensors[key] = value.detach().cpu().clone().contiguous()
        return {_MARK: key}
    if isinstance(value, dict):
        return {key: _plain(inner, tensors) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, tensors) for inner in value]
    return value


def _whole(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, dict):
        if set(value) == {_MARK}:
            return tensors[value[_MARK]]
        return {key: _whole(inner, tensors) for key, inner in value.items()}
    if isinstance(value, list):
        return [_whole(inner, tensors) for inner in value]
    return value
