"""`detonation init`: a commented recipe for the model, the data and the GPUs that are found."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import tomli_w
import torch

from detonation.data.packages import needs
from detonation.data.pictures import SUFFIXES
from detonation.data.readers import ROWS, is_saved
from detonation.models.pretrained import HUB_PREFIX
from detonation.train.loop.session import check_config
from detonation.train.recipe.resolve import read_recipe, resolve

_SKIPPED = {"runs", "checkpoints", "node_modules", "__pycache__"}
_MODELS = {
    "text": ("olmo2", "hidden_size = 128\nlayers = 2\nheads = 4\nfeed_forward = 512"),
    "translation": ("t5", "hidden_size = 128\nlayers = 2\nheads = 4\nfeed_forward = 512"),
    "images": ("vit", "image_size = 32  # images are scaled to it\npatch_size = 4\nhidden_size = 64\nlayers = 4"),
}
_SAMPLES = {"text": "sotu-sample", "translation": "bible-en-es", "images": "fashion-mnist"}
_ABOUT = ("readme", "license", "requirements", "changelog")
_LARGE_BYTES = 2**31
"""Rows from this size on are streamed."""


@dataclass(frozen=True)
class _Found:
    """A finding in the directory: paths as the recipe spells them, "" for nothing; `column` of rows."""

    task: str = ""
    source: str = ""
    column: str = ""
    streaming: bool = False
    model: str = ""
    pretrained: bool = False
    tokenizer: str = ""
    gpus: int = 0


def write_recipe(directory: Path, out: Path) -> dict[str, Any]:
    """Writes a recipe to `out` and checks that it can start; returns the lines about what was found.

    Raises `ValueError` where `out` exists, there is no such directory, or no recipe can start with what is there.
    """
    if out.exists():
        raise ValueError(f"{out} exists, and is left as it is: remove it, or choose another --out")
    if not directory.is_dir():
        raise ValueError(f"there is no directory {directory}")
    found = _look(directory)
    out.parent.mkdir(parents=True, exist_ok=True)
    problem: ValueError | None = None
    for context, batch in ((256, 8), (128, 8), (64, 4), (32, 2), (16, 1)):  # the largest that the data are enough for
        try:
            out.write_text(_recipe(found, context, batch), encoding="utf-8")
            check_config(resolve(read_recipe(out), {}))
            return {"recipe": str(out), "found": _lines(found)}
        except ValueError as error:
            problem = problem or error
            out.unlink()
    raise ValueError(f"no recipe can start with what is in {directory}: {problem}") from problem


def _look(directory: Path) -> _Found:
    """The first model, tokenizer and data, as deep as two folders."""
    folders = [directory, *_inside(directory, 2)]
    found = _Found(gpus=torch.cuda.device_count())
    models = [folder for folder in folders if (folder / "config.json").is_file() and _task_of(folder)]
    if models:
        weights = any(models[0].glob("*.safetensors"))
        found = replace(found, task=_task_of(models[0]), model=f"{HUB_PREFIX}{models[0]}", pretrained=weights)
    words = [folder for folder in [*models[:1], *folders] if _has_tokenizer(folder)]
    for data in _data(
        directory, [folder for folder in folders if folder not in (*models, *words) or folder == directory]
    ):
        if not found.task or data.task == found.task:
            found = replace(found, task=data.task, source=data.source, column=data.column, streaming=data.streaming)
            break
    task = found.task or "text"
    source = found.source or _SAMPLES[task]
    return replace(found, task=task, source=source, tokenizer=str(words[0]) if words and task != "images" else "")


def _inside(directory: Path, depth: int) -> Iterator[Path]:
    for folder in sorted(path for path in directory.iterdir() if path.is_dir()):
        if not folder.name.startswith(".") and folder.name not in _SKIPPED:
            yield folder
            if depth > 1 and not is_saved(folder):
                yield from _inside(folder, depth - 1)


def _task_of(folder: Path) -> str:
    """The task of the model that a config.json describes; "" where it is of none."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        kind, classes = config["model_type"], config.get("architectures") or []
    except (ValueError, TypeError, KeyError):
        return ""
    names = needs("transformers.models.auto.modeling_auto", "models")
    tables = {
        "images": names.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
        "translation": names.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "text": names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    }
    return next(
        (task for task, table in tables.items() if kind in table and table[kind] in (classes or table[kind])), ""
    )


def _data(directory: Path, folders: list[Path]) -> Iterator[_Found]:
    """The data that could be trained on, in the order of the folders."""
    for folder in folders:
        if is_saved(folder):
            yield _Found("text", str(folder))
            continue
        if any(file.suffix.lower() in SUFFIXES for file in islice(folder.glob("*/*"), 1000)):
            yield _Found("images", str(folder.parent if folder.name in ("train", "validation") else folder))
        files = sorted(file for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))
        for file in files:
            if file.suffix.lower() in ROWS:
                yield from _rows(file)
        pairs = [file for file in files if file.suffix == ".tsv"]
        yield from (_Found("translation", str(file)) for file in pairs)
        texts = [file for file in files if file.suffix == ".txt" and not file.name.lower().startswith(_ABOUT)]
        if len(texts) == len(files) > 1 and folder != Path():  # the recipe itself will lie here
            yield _Found("text", str(folder))
        elif texts:
            yield _Found("text", str(max(texts, key=lambda file: file.stat().st_size)))


def _rows(file: Path) -> Iterator[_Found]:
    """The column of a file of rows that can be trained on: "text", "translation", or the first text."""
    row = next(ROWS[file.suffix.lower()](file), {})
    if isinstance(row.get("translation"), dict):
        yield _Found("translation", str(file))
    texts = [key for key, value in row.items() if isinstance(value, str)]
    column = "text" if "text" in texts else max(texts, key=lambda key: len(row[key]), default="")
    if column:
        large = file.stat().st_size >= _LARGE_BYTES
        yield _Found("text", str(file), column=column if column != "text" else "", streaming=large)


def _lines(found: _Found) -> list[str]:
    gpus = f"{found.gpus} GPUs" if found.gpus else "no GPU: ranks train on the CPU"
    data = found.source if found.source != _SAMPLES[found.task] else f"{found.source}, because nothing was found here"
    return [
        f"model: {found.model or _MODELS[found.task][0] + ', small, with random weights'}",
        f"data: {data} ({found.task}{', as bytes' if found.task != 'images' and not found.tokenizer else ''})",
        *([f"tokenizer: {found.tokenizer}"] if found.tokenizer else []),
        gpus,
    ]


def _recipe(found: _Found, context: int, batch: int) -> str:
    """The text of the recipe."""
    name, sizes = _MODELS[found.task]
    lengths = {"text": ["context"], "translation": ["source_length", "target_length"], "images": []}[found.task]
    unit = "tokens" if found.tokenizer else "bytes"
    two = found.gpus % 2 == 0
    mesh = (2 if two else 1, max(found.gpus // 2 if two else found.gpus, 1))
    data: dict[str, Any] = {"source": found.source}
    data |= {"column": found.column} if found.column else {}
    data |= {"streaming": True} if found.streaming else {}
    data |= {"tokenizer": found.tokenizer} if found.tokenizer else {}
    if found.model:
        model = f"{_toml(name=found.model)}\n{_toml(pretrained=found.pretrained)}  # false starts from random weights"
    else:
        model = f'{_toml(name=name)}  # or "hf:DIRECTORY", "hf:ID" of the hub, "package.module:function"\n{sizes}'
    return _TEMPLATE.format(
        model=model,
        task=_toml(task=found.task),
        data=_toml(**data) + "".join(f"\n{key} = {context}  # {unit} per example" for key in lengths),
        adamw="3e-5" if found.pretrained else "3e-3",
        lr="1e-4" if found.pretrained else "4e-3",
        batch=batch,
        autocast='\nautocast = "bf16"' if found.gpus else "",
        replicas=mesh[0],
        shards=mesh[1],
    )


def _toml(**values: Any) -> str:
    return tomli_w.dumps(values).strip()


_TEMPLATE = """\
# Start: detonation train THIS-FILE        All keys: detonation recipes --keys
# Paths are relative to the directory in which the command starts.
seed = 0

[model]
{model}

[data]
{task}  # text, translation or images
{data}

[scheme]  # between replicas; others: --scheme NAME, or auto, which measures the link and chooses
name = "demo"
topk = 4  # coefficients sent of each chunk: fewer are fewer bytes
chunk = 64
precision = "sign"  # one bit per coefficient; "fp32" sends five times as many bytes
error_feedback = false  # for "sign"; true for other precisions

[optimizer]
name = "SignSGD"  # goes with demo; AdamW (lr {adamw}) goes with full, loco and diloco
lr = {lr}  # a first guess: try half and double

[schedule]
name = "cosine"
warmup = 20

[train]
steps = 300
batch_size = {batch}  # per process and micro-batch; accumulate = 4 makes it four times as large without more memory
validate_every = 100
checkpoint_every = 100  # detonation train THIS-FILE --out DIR --resume continues{autocast}

[mesh]  # replicas x shards processes; under torchrun or srun a replica per node and a shard per GPU
replicas = {replicas}
shards = {shards}

# What another scheme needs instead; --scheme full, loco and diloco bring it along.
[tuned.full.optimizer]
name = "AdamW"
lr = {adamw}

[tuned.loco.optimizer]
name = "AdamW"
lr = {adamw}

[tuned.diloco]
scheme = {{ every = 20 }}
optimizer = {{ name = "AdamW", lr = {adamw} }}
"""


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "spiece.model"))
