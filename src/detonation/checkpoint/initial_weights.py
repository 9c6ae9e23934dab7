"""The weights of a run, or of an exported model, as the beginning of another run."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from detonation.checkpoint.elastic import Elastic
from detonation.checkpoint.files.reader import Box, CheckpointReader
from detonation.checkpoint.files.shard_file import TensorFile
from detonation.checkpoint.snapshot import weights
from detonation.checkpoint.verify import newest, whole_replicas
from detonation.core.flat.tensors import local
from detonation.core.link.coordinates import Coordinates

EXPORTED = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_Read = Callable[[str, Box | None], Tensor]


@torch.no_grad()
def load_weights(directory: Path, model: nn.Module) -> str:
    """Puts weights into `model`, which may be sharded: this rank reads its own part of them.

    Args:
        directory: A run directory or a checkpoint, of which the newest whole one counts, or a directory with
            safetensors files, as `detonation export` and transformers write them.

    Returns:
        In words, where they are from.

    Raises:
        ValueError: There are none, or they are of another model.
    """
    read, words = _exported(directory) if _is_exported(directory) else _saved(directory)
    for name, tensor in weights(model).items():
        part = read(name, Box.of(tensor) if isinstance(tensor, nn.Parameter) else None)
        if part.shape != local(tensor).shape:
            raise ValueError(f"{directory} has {name} as {tuple(part.shape)}, not {tuple(tensor.shape)}: another model")
        local(tensor).copy_(part)
    return words


def _is_exported(directory: Path) -> bool:
    return any((directory / name).is_file() for name in (EXPORTED, _INDEX))


def _saved(directory: Path) -> tuple[_Read, str]:
    path, manifest = newest(directory)
    if manifest.replicas > 1 and all(level["scheme"] == "none" for level in manifest.levels):
        raise ValueError(f"{path} is of {manifest.replicas} replicas that trained alone: there is no one model in it")
    here = whole_replicas(path, manifest)
    if not here:
        raise ValueError(f"{path} has no replica with all its shards: copy the other nodes' files into it first")
    source = Elastic(CheckpointReader(path, manifest), Coordinates(0, 1, 0, 1), here)
    return lambda name, box: source.agreed(f"model.{name}", box, manifest.alike), f"weights of {path}"


def _exported(directory: Path) -> tuple[_Read, str]:
    try:
        names = [EXPORTED]
        if not (directory / EXPORTED).is_file():
            names = sorted({*json.loads((directory / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()})
        files = [TensorFile(directory / Path(name).name) for name in names]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{directory} holds no weights that can be read: {error}") from error
    found = {key: file for file in files for key in file.entries}

    def read(name: str, box: Box | None) -> Tensor:
        if name not in found:
            raise ValueError(f"{directory} has no {name}: it is of another model")
        entry = found[name].entries[name]
        if box is None or not box.shape:
            return found[name].read(name)
        if entry.shape != box.whole:
            raise ValueError(f"{directory} has {name} as {entry.shape}, not {box.whole}: it is of another model")
        rows, *rest = (slice(start, start + size) for start, size in zip(box.offset, box.shape, strict=True))
        return found[name].read(name, rows)[:, *rest]

    return read, f"weights of {directory}"
