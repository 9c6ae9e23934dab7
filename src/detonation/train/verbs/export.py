"""`detonation export`: the whole model of a checkpoint, in the format of transformers."""

from pathlib import Path
from typing import Any

import torch

from detonation.checkpoint.files.box import Box
from detonation.checkpoint.files.reader import CheckpointReader
from detonation.checkpoint.load.elastic import Elastic
from detonation.checkpoint.rank_state import weights
from detonation.checkpoint.verify import newest, whole_replicas
from detonation.core.link.coordinates import Coordinates
from detonation.models import build_model
from detonation.train.recipe.tables import from_table


@torch.no_grad()
def export(directory: Path, out: Path, trust_code: bool = False) -> dict[str, Any]:
    """Writes the model of the newest whole checkpoint of the run in `directory` to `out`, for `from_pretrained`.

    In the middle of a round it is the mean of the replicas, as far as their files are on this node.

    Args:
        trust_code: Import and call a model function that the checkpoint names as "package.module:function".

    Raises:
        ValueError: There is no whole checkpoint, its replicas trained alone, `out` is not empty, the code is not
            trusted, or the model cannot be saved for transformers.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is not empty: choose another --out")
    path, manifest = newest(directory)
    config = from_table(manifest.extra.get("config", {}))
    if config.scheme.name == "none" and manifest.replicas > 1:
        raise ValueError(
            f"{path} is of {manifest.replicas} replicas that trained alone: there is no one model to export"
        )
    if ":" in config.model.name and not trust_code:
        raise ValueError(
            f"{path} names the code {config.model.name}, which export would run: say --trust-code if you wrote it"
        )
    here = whole_replicas(path, manifest)
    if not here:
        raise ValueError(f"{path} has no replica with all its shards: copy the other nodes' files into it first")
    source = Elastic(CheckpointReader(path, manifest), Coordinates(0, 1, 0, 1), here)
    with torch.device("meta"):
        planned = weights(build_model(config.model.name, config.model.arguments))
    parts = {name: source.agreed(f"model.{name}", _box(tensor)) for name, tensor in planned.items()}
    model: Any = build_model(config.model.name, config.model.arguments)
    if not hasattr(model, "save_pretrained"):
        raise ValueError(f"model {config.model.name} has no save_pretrained, so transformers cannot load what it saves")
    for name, tensor in weights(model).items():
        tensor.copy_(parts[name])
    model.save_pretrained(out)
    numel = sum(parameter.numel() for parameter in model.parameters())
    mean = "" if manifest.alike or len(here) == manifest.replicas else f"{len(here)} of {manifest.replicas}"
    return {
        "exported": str(out),
        "checkpoint": str(path),
        "step": manifest.step,
        "num_parameters": numel,
        **({"replicas": mean} if mean else {}),
    }


def _box(tensor: torch.Tensor) -> Box | None:
    """A parameter may be cut; a buffer is whole on every shard."""
    return Box.of(tensor) if isinstance(tensor, torch.nn.Parameter) else None
