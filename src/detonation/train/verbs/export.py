"""`detonation export`: the whole model of a checkpoint, in the format of transformers or as a state dict."""

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_model

from detonation.checkpoint.files.box import Box
from detonation.checkpoint.files.reader import CheckpointReader
from detonation.checkpoint.initial_weights import EXPORTED
from detonation.checkpoint.load.elastic import Elastic
from detonation.checkpoint.rank_state import weights
from detonation.checkpoint.verify import newest, whole_replicas
from detonation.core.link.coordinates import Coordinates
from detonation.data.tokens import tokenizer_of
from detonation.models import build_model
from detonation.train.recipe.tables import from_table
from detonation.train.verbs.named_code import require_trust


@torch.no_grad()
def export(directory: Path, out: Path, trust_code: bool = False) -> dict[str, Any]:
    """Writes the model of the newest whole checkpoint of the run in `directory` to `out`, for `from_pretrained`.

    The tokenizer lies beside it, also that of bytes. A module that is not of transformers is written as a state dict,
    for `safetensors.torch.load_model`.

    In the middle of a round it is the mean of the replicas, as far as their files are on this node.

    Args:
        trust_code: Import and call a model function that the checkpoint names as "package.module:function".

    Raises:
        ValueError: There is no whole checkpoint, its replicas trained alone, `out` is not empty, the code is not
            trusted, or the model or its tokenizer cannot be built here.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is not empty: choose another --out")
    path, manifest = newest(directory)
    config = from_table(manifest.extra.get("config", {}))
    if config.scheme.name == "none" and manifest.replicas > 1:
        raise ValueError(
            f"{path} is of {manifest.replicas} replicas that trained alone: there is no one model to export"
        )
    require_trust(trust_code, config, str(path), "export", "model")
    here = whole_replicas(path, manifest)
    if not here:
        raise ValueError(f"{path} has no replica with all its shards: copy the other nodes' files into it first")
    source = Elastic(CheckpointReader(path, manifest), Coordinates(0, 1, 0, 1), here)
    with torch.device("meta"):
        planned = weights(build_model(config.model.name, config.model.arguments))
    parts = {name: source.agreed(f"model.{name}", _box(tensor)) for name, tensor in planned.items()}
    random = {key: value for key, value in config.model.arguments.items() if key != "pretrained"}
    model: Any = build_model(config.model.name, random)
    tokenizer = tokenizer_of(config.data.name, config.data.arguments)
    for name, tensor in weights(model).items():
        tensor.copy_(parts[name])
    for_transformers = hasattr(model, "save_pretrained")
    if for_transformers:
        model.save_pretrained(out)
        if tokenizer is not None:
            tokenizer.save_pretrained(out)
    else:
        out.mkdir(parents=True, exist_ok=True)
        save_model(model, str(out / EXPORTED))
    for file in out.iterdir():
        file.chmod(0o666 & ~_umask())  # some libraries write through private temporary files
    numel = sum(parameter.numel() for parameter in model.parameters())
    mean = "" if manifest.alike or len(here) == manifest.replicas else f"{len(here)} of {manifest.replicas}"
    return {
        "exported": str(out),
        "checkpoint": str(path),
        "step": manifest.step,
        "num_parameters": numel,
        "for_transformers": for_transformers,
        **({"replicas": mean} if mean else {}),
    }


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _box(tensor: torch.Tensor) -> Box | None:
    """A parameter may be cut; a buffer is whole on every shard."""
    return Box.of(tensor) if isinstance(tensor, torch.nn.Parameter) else None
