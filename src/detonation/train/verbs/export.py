"""`detonation export`: the whole model of a checkpoint, in the format of transformers or as a state
dict."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file, save_model

from detonation.checkpoint.elastic import Elastic
from detonation.checkpoint.files.manifest import Manifest
from detonation.checkpoint.files.reader import Box, ShardReader
from detonation.checkpoint.snapshot import weights
from detonation.checkpoint.verify import EXPORTED, newest_model
from detonation.data.tokens import tokenizer_of
from detonation.models import build_model
from detonation.train.recipe.resolve import require_trust
from detonation.train.recipe.schema import Config
from detonation.train.recipe.tables import from_table

_MODEL = "model."
"""The prefix of the weights in a checkpoint."""


@torch.no_grad()
def export(directory: Path, out: Path, trust_code: bool = False) -> dict[str, Any]:
    """Writes the model of the newest whole checkpoint of the run in `directory` to `out`, for
    `from_pretrained`.

    The tokenizer lies beside it, also that of bytes. A module that is not of transformers is
    written as a state dict, for `safetensors.torch.load_model`, and so is that of a loop of one's
    own, whose checkpoint names no model.

    In the middle of a round it is the mean of the replicas, as far as their files are on this node.
    `trust_code` lets it call a model function that the checkpoint names as
    "package.module:function".

    Raises:
        ValueError: There is no whole checkpoint, its replicas trained alone, `out` is not empty,
            the code is not trusted, or the model or its tokenizer cannot be built here.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is not empty: choose another --out")
    found = newest_model(directory)
    saved, here, source = found.reader, found.here, found.source
    manifest = saved.manifest
    config = _config(manifest)
    if config is None:
        numel, for_transformers = _write_state_dict(saved.shards(here[0]), source, out), False
    else:
        require_trust(trust_code, config, str(saved.path), "export", "model")
        numel, for_transformers = _write_model(config, source, out)
    os.umask(mask := os.umask(0))
    for file in out.iterdir():
        file.chmod(0o666 & ~mask)  # some libraries write through private temporary files
    mean = (
        ""
        if manifest.alike or len(here) == manifest.replicas
        else f"{len(here)} of {manifest.replicas}"
    )
    return {
        "exported": str(out),
        "checkpoint": str(saved.path),
        "step": manifest.step,
        "num_parameters": numel,
        "for_transformers": for_transformers,
        "rejected": found.rejected,
        **({"replicas": mean} if mean else {}),
    }


def _config(manifest: Manifest) -> Config | None:
    """The recipe in a checkpoint; None for one of somebody's own loop, whose values may have any
    name."""
    extra = manifest.given
    ours = isinstance(extra.get("config"), dict) and "setting" in extra
    return from_table(extra["config"]) if ours else None


def _write_model(config: Config, source: Elastic, out: Path) -> tuple[int, bool]:
    """Writes a recipe's model and tokenizer; returns the number of parameters, and True for a model
    of transformers."""
    with torch.device("meta"):
        planned = weights(build_model(config.model.name, config.model.arguments))
    # a parameter may be cut; a buffer is whole on every shard
    boxes = {
        name: Box.of(each) if isinstance(each, torch.nn.Parameter) else None
        for name, each in planned.items()
    }
    parts = {name: source.agreed(f"{_MODEL}{name}", box) for name, box in boxes.items()}
    random = {key: value for key, value in config.model.arguments.items() if key != "pretrained"}
    model: Any = build_model(config.model.name, random)
    tokenizer = tokenizer_of(config.data.name, config.data.arguments)
    for name, tensor in weights(model).items():
        tensor.copy_(parts[name])
    numel = sum(parameter.numel() for parameter in model.parameters())
    if not hasattr(model, "save_pretrained"):
        out.mkdir(parents=True, exist_ok=True)
        save_model(model, str(out / EXPORTED))
        return numel, False
    model.save_pretrained(out)
    if tokenizer is not None:
        tokenizer.save_pretrained(out)
    return numel, True


def _write_state_dict(shards: Sequence[ShardReader], source: Elastic, out: Path) -> int:
    """Writes the weights that the files of one replica name; returns the number of parameters."""
    boxes = {
        key: box for file in shards for key, box in file.boxes.items() if key.startswith(_MODEL)
    }
    buffers = {key for file in shards for key in file.keys if key.startswith(_MODEL)} - boxes.keys()
    found = {
        key: source.agreed(key, Box(box.whole, (0,) * len(box.whole), box.whole))
        for key, box in boxes.items()
    }
    numel = sum(parameter.numel() for parameter in found.values())
    found |= {key: source.agreed(key, None) for key in buffers}
    out.mkdir(parents=True, exist_ok=True)
    save_file(
        {key.removeprefix(_MODEL): tensor.contiguous() for key, tensor in found.items()},
        out / EXPORTED,
    )
    return numel
