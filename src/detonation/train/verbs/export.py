"""`detonation export`: writes the model of a checkpoint as a model of transformers, or as a state
dict.
"""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file, save_model

from detonation.checkpoint.elastic import Elastic
from detonation.checkpoint.files.manifest import Manifest
from detonation.checkpoint.files.reader import Box, ShardReader
from detonation.checkpoint.files.shard_file import TensorFile
from detonation.checkpoint.snapshot import weights
from detonation.checkpoint.verify import EXPORTED, newest_model
from detonation.choices import first_names, needs
from detonation.data.tokens import tokenizer_of
from detonation.models import MODELS, build_model
from detonation.models.pretrained import HUB_PREFIX, restore_generation
from detonation.train.output.directory import write_json
from detonation.train.recipe.resolve import require_trust
from detonation.train.recipe.schema import Config
from detonation.train.recipe.tables import from_table

_MODEL = "model."
"""Prefix of the names of weights in a checkpoint."""


@torch.no_grad()
def export(directory: Path, out: Path, trust_code: bool = False) -> dict[str, Any]:
    """Writes the model of the newest complete checkpoint of a run, for `from_pretrained`.

    The tokenizer is written, too. If the model is not from transformers, a state dict for
    `safetensors.torch.load_model` is written instead. The same holds for a user's own training
    loop, because the checkpoint of such a loop does not name its model. If the checkpoint is from
    the middle of a round, the weights are the mean of the replicas whose files are on this node.

    Args:
        directory: Directory of the run.
        out: Directory for the model, new or empty.
        trust_code: Call a model function that the checkpoint names as "package.module:function".

    Raises:
        ValueError: No checkpoint is complete, its replicas never exchanged, `out` is not empty, the
            code is not trusted, the model or its tokenizer cannot be built here, or transformers
            does not write all weights.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is not empty: choose another --out")
    found = newest_model(directory)
    saved = found.reader
    here = found.here
    source = found.source
    manifest = saved.manifest
    config = _config(manifest)
    with _removed_on_failure(out):
        if config is None:
            numel = _write_state_dict(saved.shards(here[0]), source, out)
            for_transformers = False
        else:
            require_trust(trust_code, config, str(saved.path), "export", "model")
            exported = manifest.given.get("exported", {})
            numel, for_transformers = _write_model(config, source, out, exported)
    os.umask(mask := os.umask(0))
    for file in out.iterdir():
        # give the usual permissions to files that only their owner could read
        file.chmod(0o666 & ~mask)
    mean = {}
    if not manifest.alike and len(here) != manifest.replicas:
        mean = {"replicas": f"{len(here)} of {manifest.replicas}"}
    return {
        "exported": str(out),
        "checkpoint": str(saved.path),
        "step": manifest.step,
        "num_parameters": numel,
        "for_transformers": for_transformers,
        "rejected": found.rejected,
        **mean,
    }


@contextmanager
def _removed_on_failure(out: Path) -> Iterator[None]:
    """Context manager that removes what its block has written to `out`, new or empty before, if the
    block fails. Otherwise a part of a model, such as its configuration, would look like a model.
    """
    existed = out.exists()
    target = out.resolve()  # `out` may be a link to an empty directory
    try:
        yield
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        if existed:
            target.mkdir(exist_ok=True)
        raise


def _config(manifest: Manifest) -> Config | None:
    """Returns the recipe in a checkpoint of `detonation train`. Returns None for a checkpoint of a
    user's own training loop, in which a value named "config" need not be a recipe.
    """
    extra = manifest.given
    config = extra.get("config")
    if isinstance(config, dict) and "setting" in extra:
        return from_table(config)
    return None


def _write_model(
    config: Config, source: Elastic, out: Path, exported: Mapping[str, Any]
) -> tuple[int, bool]:
    """Writes the model and the tokenizer of a recipe, and what the data say in `exported`.

    Returns the number of parameters, and True if the model is from transformers.
    """
    with torch.device("meta"):
        planned = weights(build_model(config.model.name, config.model.arguments))
    parts = {}
    for name, each in planned.items():
        box = None  # a buffer is not sharded: each shard holds all of it
        if isinstance(each, torch.nn.Parameter):
            box = Box.of(each)
        parts[name] = source.agreed(f"{_MODEL}{name}", box)
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
    name = config.model.name
    if name.startswith(HUB_PREFIX):
        pretrained = bool(config.model.arguments.get("pretrained"))
        restore_generation(name.removeprefix(HUB_PREFIX), pretrained, model)
    elif name in MODELS:
        restore_generation(None, False, model)
    _name_classes(model, exported.get("labels", []))
    _save(model, out)
    if steps := exported.get("preprocessor"):
        write_json(out / "preprocessor_config.json", steps)
    if tokenizer is not None:
        _pad_as(model, tokenizer)
        # training pads at the right; plain text stays as it is, because training never pads it
        if config.data.name == "translation" or exported.get("labels"):
            tokenizer.padding_side = "right"
        tokenizer.save_pretrained(out)
    return numel, True


def _save(model: Any, out: Path) -> None:
    """Writes a model into the directory `out`. Also writes the weights that the class of the model
    usually omits because it can compute them: training may have changed these weights.
    """
    if not isinstance(model, needs("transformers", "models").PreTrainedModel):
        model.save_pretrained(out)  # an adapter writes only a part of the weights
        return
    model._keys_to_ignore_on_save = set()
    model.save_pretrained(out)
    _require_saved(model, out)


def _require_saved(model: Any, out: Path) -> None:
    """Raises `ValueError` if `from_pretrained` does not give each weight of `model`."""
    written = {name for file in out.glob("*.safetensors") for name in TensorFile(file).entries}
    found = weights(model)
    # a tied weight is written under its other name
    memory = {found[name].data_ptr() for name in written & found.keys()}
    others = {name: each for name, each in found.items() if each.data_ptr() not in memory}
    if not others:
        return
    # weights of experts are written in parts
    loaded = weights(type(model).from_pretrained(out, dtype=model.dtype))
    lost = [
        name
        for name, each in others.items()
        if name not in loaded or not torch.equal(each.to(loaded[name].dtype), loaded[name])
    ]
    if lost:
        raise ValueError(
            f"{out} would lack {first_names(lost)}, which {type(model).__name__} does not write:"
            " use the checkpoint itself"
        )


def _name_classes(model: Any, names: Sequence[str]) -> None:
    """Writes the names of the classes into the configuration of a classifier of transformers."""
    config: Any = getattr(model, "config", None)
    if names and hasattr(config, "id2label") and len(names) == config.num_labels:
        config.id2label = dict(enumerate(names))
        config.label2id = {name: number for number, name in enumerate(names)}


def _pad_as(model: Any, tokenizer: Any) -> None:
    """Makes the tokenizer of a text classifier pad with the model's own id, as training did."""
    own = getattr(model, "own_padding", tokenizer.pad_token_id)
    if own != tokenizer.pad_token_id and (token := tokenizer.convert_ids_to_tokens(own)):
        tokenizer.pad_token = token


def _write_state_dict(shards: Sequence[ShardReader], source: Elastic, out: Path) -> int:
    """Writes all weights that are in the files of one replica. Returns the number of parameters."""
    boxes: dict[str, Box] = {}
    keys: set[str] = set()
    for file in shards:
        boxes |= file.boxes
        keys |= {*file.keys}
    found = {}
    numel = 0
    for key in sorted(keys):
        if not key.startswith(_MODEL):
            continue
        name = key.removeprefix(_MODEL)
        if key in boxes:
            shape = boxes[key].whole
            whole = Box(shape, (0,) * len(shape), shape)
            found[name] = source.agreed(key, whole).contiguous()
            numel += found[name].numel()
        else:  # a buffer is not sharded
            found[name] = source.agreed(key, None).contiguous()
    out.mkdir(parents=True, exist_ok=True)
    save_file(found, out / EXPORTED)
    return numel
