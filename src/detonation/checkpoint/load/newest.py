"""Finds the newest checkpoint that is whole for all ranks, and loads it into a model and its optimizer."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from detonation.checkpoint.files import retention
from detonation.checkpoint.files.manifest import Manifest, versions
from detonation.checkpoint.files.reader import CheckpointReader
from detonation.checkpoint.gather import texts_between
from detonation.checkpoint.load.restore import restore
from detonation.checkpoint.load.views import candidates, inspect
from detonation.core.base_error import DetonationError
from detonation.core.link.elastic_communicator import TextExchange
from detonation.core.optimizer.replicated import Replicated

_LONGEST = 600
_log = logging.getLogger("detonation.checkpoint")


class NoCheckpoint(DetonationError, ValueError):
    """There is no checkpoint to load, or none that is whole."""


@dataclass(frozen=True)
class Found:
    """A whole checkpoint. rejected: a line for each newer checkpoint that is not whole."""

    path: Path
    manifest: Manifest
    rejected: list[str]


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was loaded.

    step: the step after which it was taken. extra: the JSON values that were saved with it. merged: in words, how its
    world was merged into this one.
    """

    path: Path
    step: int
    extra: dict[str, Any]
    merged: str


def load_checkpoint(directory: Path | str, model: nn.Module, optimizer: Replicated) -> Loaded | None:
    """Loads the newest whole checkpoint of `directory` into `model` and `optimizer`. All ranks call it.

    Call it after `replicate` and before the first step. In a world of the shape that saved, training goes on bit for
    bit as if it had not stopped. In another world the weights are exact where the replicas agreed, and memories are
    merged as `detonation.checkpoint.load.elastic` describes. Those that are not whole are passed over, and logged.

    Returns:
        The path, step and `extra` of the checkpoint; None where `directory` holds no checkpoint at all.

    Raises:
        NoCheckpoint: there are checkpoints, and none is whole for all ranks. Where nodes share no file system, the
            message says which replica's files are needed on which host, and where they are.
        ValueError: the checkpoint is of another model, optimizer, scheme or seed.

    Example:
        >>> import tempfile, torch, torch.distributed as dist, detonation as dt
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model, mesh = torch.nn.Linear(8, 1), dt.init_mesh(replicas=1, shards=1, device="cpu")
        >>> base = torch.optim.AdamW(model.parameters())
        >>> optimizer = dt.replicate(base, model, mesh["replicate"], dt.loco())
        >>> folder = tempfile.TemporaryDirectory()
        >>> dt.load_checkpoint(folder.name, model, optimizer)  # nothing to load yet
        >>> path = dt.save_checkpoint(folder.name, model, optimizer, {"epoch": 3})
        >>> loaded = dt.load_checkpoint(folder.name, model, optimizer)
        >>> loaded.step, loaded.extra, loaded.merged
        (0, {'epoch': 3}, 'exactly as saved')
        >>> folder.cleanup(); dt.leave()
    """
    found = find(Path(directory), model, optimizer)
    return None if found is None else load_found(found, model, optimizer)


def find(directory: Path, model: nn.Module, optimizer: Replicated, most: int | None = None) -> Found | None:
    """The newest checkpoint of `directory` that all ranks find whole; None where there is none at all. Collective.

    Args:
        most: The step after which no checkpoint counts.

    Raises `NoCheckpoint` where there are checkpoints and none is whole.
    """
    texts, rejected = texts_between(model, optimizer), list[str]()
    names = [name for name in candidates(directory, texts) if most is None or retention.step_of(Path(name)) <= most]
    for position, name in enumerate(names):
        path, manifest, reason = inspect(directory, name, optimizer.coordinates, texts)
        if manifest is not None and not reason:
            return Found(path, manifest, rejected)
        alternative = f"using {names[position + 1]}" if position + 1 < len(names) else "there is none before it"
        rejected.append(f"{name} rejected: {reason}; {alternative}")
        _log.warning("%s", rejected[-1])
    if rejected:
        raise NoCheckpoint(f"no checkpoint in {directory} is whole: {rejected[0]}")
    return None


def load_found(found: Found, model: nn.Module, optimizer: Replicated) -> Loaded:
    """Loads `found` into both. Collective. Raises `ValueError` on all ranks where it is of another run."""
    texts = texts_between(model, optimizer)
    with _refused_together(found, texts):
        merged, complete = restore(CheckpointReader(found.path, found.manifest), model, optimizer)
    with _refused_together(found, texts):
        merged += complete() + _other_versions(found.manifest)
    optimizer.resume_at(found.manifest.step)
    _log.info("%s: %s", found.path, merged)
    return Loaded(found.path, found.manifest.step, found.manifest.extra, merged)


@contextmanager
def _refused_together(found: Found, texts: TextExchange) -> Iterator[None]:
    """Raises on all ranks what one raises: whatever a stranger wrote, all ranks refuse it together. Collective."""
    problem = ""
    try:
        yield
    except Exception as error:
        text = str(error) if isinstance(error, ValueError) else f"{found.path} cannot be loaded: {error!r}"
        problem = text.split("\n")[0][:_LONGEST]
    for text in texts.gather(problem):
        if text:
            raise ValueError(text)


def _other_versions(manifest: Manifest) -> str:
    """A warning where other versions wrote the checkpoint; else ""."""
    current = versions()
    other = [f"{name} {str(was)[:20]!r}" for name, was in manifest.versions.items() if current.get(name) != was]
    return f"; written with {', '.join(other[:3])}: last bits may differ from now on" if other else ""
