"""Load: the newest checkpoint that is whole for all ranks, put into a model and its optimizer."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from detonation.checkpoint.files import manifest as manifests
from detonation.checkpoint.files import retention
from detonation.checkpoint.files.manifest import Manifest, Untrustworthy, file_name, versions
from detonation.checkpoint.files.reader import Saved
from detonation.checkpoint.files.shard_file import fault
from detonation.checkpoint.gather import device_of, gather
from detonation.checkpoint.load.restore import restore
from detonation.core.link.coordinates import Place
from detonation.core.optimizer.replicated import Replicated

_LONGEST = 600
_log = logging.getLogger("detonation.checkpoint")


class NoCheckpoint(ValueError):
    """There is no checkpoint to go on from, or none that is whole."""


@dataclass(frozen=True)
class Found:
    """A checkpoint that is whole; rejected: a line for each newer one that is not."""

    path: Path
    manifest: Manifest
    rejected: list[str]


@dataclass(frozen=True)
class Loaded:
    """What was loaded: after how many steps it was taken, the `extra` that was saved, and what was merged."""

    path: Path
    step: int
    extra: dict[str, Any]
    merged: str


def load_checkpoint(directory: Path | str, model: nn.Module, optimizer: Replicated) -> Loaded | None:
    """Puts the newest whole checkpoint of `directory` into `model` and `optimizer`; None where there is none at all.

    All ranks call it, after `replicate` and before the first step. In a world of the shape that saved, training goes on
    as if it had not stopped, bit for bit. In another one weights are exact where the replicas agreed, and memory is
    merged as `detonation.checkpoint.load.elastic` says; the log tells. A checkpoint that is not whole is left out, with
    a line in the log that says why.

    Raises `NoCheckpoint` where none is whole, and `ValueError` where it is of another model, optimizer, scheme or seed.
    """
    found = find(Path(directory), model, optimizer)
    return None if found is None else load(found, model, optimizer)


def find(directory: Path, model: nn.Module, optimizer: Replicated) -> Found | None:
    """The newest checkpoint of `directory` that all ranks find whole; None where there is none at all. Collective.

    Raises `NoCheckpoint` where there are some and none is whole.
    """
    device, place = device_of(model), optimizer.place
    names: list[str] = json.loads(
        gather(json.dumps([path.name for path in retention.candidates(directory)]), device)[0]
    )
    rejected: list[str] = []
    for position, name in enumerate(names):
        manifest, problem = _inspect(directory / name, place)
        problems = [text for text in gather(problem, device) if text]
        if not problems and manifest is not None:
            return Found(directory / name, manifest, rejected)
        next_one = f"using {names[position + 1]}" if position + 1 < len(names) else "there is none before it"
        rejected.append(f"{name} rejected: {problems[0]}; {next_one}")
        _log.warning("%s", rejected[-1])
    if rejected:
        raise NoCheckpoint(f"no checkpoint in {directory} is whole: {rejected[0]}")
    return None


def load(found: Found, model: nn.Module, optimizer: Replicated) -> Loaded:
    """Puts `found` into both. Collective; raises `ValueError` on all ranks where it is of something else."""
    problem, merged = "", ""
    try:
        merged = restore(Saved(found.path, found.manifest), model, optimizer) + _older(found.manifest)
    except Exception as error:  # whatever a stranger wrote, all ranks refuse it together
        text = str(error) if isinstance(error, ValueError) else f"{found.path} cannot be loaded: {error!r}"
        problem = text.split("\n")[0][:_LONGEST]
    for text in gather(problem, device_of(model)):
        if text:
            raise ValueError(text)
    optimizer.go_on(found.manifest.step)
    _log.info("%s: %s", found.path, merged)
    return Loaded(found.path, found.manifest.step, found.manifest.extra, merged)


def _older(manifest: Manifest) -> str:
    """A warning where other versions wrote it."""
    here = versions()
    other = [f"{name} {str(was)[:20]!r}" for name, was in manifest.versions.items() if here.get(name) != was]
    return f"; written with {', '.join(other[:3])}: last bits may differ from now on" if other else ""


def _inspect(path: Path, place: Place) -> tuple[Manifest | None, str]:
    """The manifest of the checkpoint at `path`, and what is wrong with the files that are this rank's to check."""
    try:
        manifest = manifests.read(path)
    except Untrustworthy as error:
        return None, str(error)
    if retention.step_of(path) != manifest.step:
        return None, f"its name is not that of step {manifest.step}"
    same = (manifest.replicas, manifest.shards) == (place.replicas, place.shards)
    mine = (
        [file_name(place.replica, place.shard)]
        if same
        else list(manifest.files)[dist.get_rank() :: dist.get_world_size()]
    )
    problems = [problem for name in mine if (problem := fault(path / name, manifest.files[name]))]
    return manifest, problems[0] if problems else ""
