"""A run's state on disk: one safetensors file a rank, and a manifest last. Whole or absent, checked on reading."""

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from detonation.cluster.failure import Echo
from detonation.train.config import to_table
from detonation.train.directory import unwritable, write_json
from detonation.train.setup import Session
from detonation.train.snapshot import collect, restore

MANIFEST = "manifest.json"
_FORMAT = 1


def save_state(session: Session, checkpoints: Path, step: int) -> Path:
    """Writes the state after `step` steps to `checkpoints/step-NNNNNN`. Collective; all ranks see one file system."""
    target = checkpoints / f"step-{step:06d}"
    part = checkpoints / f".step-{step:06d}.part"
    if session.rank == 0:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    dist.barrier()
    with session.optimizer.settled():
        failure = _write(session, part / _file_name(session))
    files = _everyones(session, part / _file_name(session), failure)
    if session.rank == 0:
        _finish(session, part, target, step, files)
    if failure is not None:
        raise unwritable(target, failure) from failure
    dist.barrier()
    if not all(files.values()):
        raise Echo(f"another rank could not write its part of {target}")
    return target


def load_state(session: Session, path: Path) -> int:
    """Puts the state at `path` into `session`, on all ranks; returns the number of steps that it was taken after.

    Raises `ValueError` when a file is missing or damaged, or was written by another shape of world or another scheme.
    """
    manifest = read_manifest(path)
    _check_same(session, manifest, path)
    name = _file_name(session)
    content = (path / name).read_bytes() if (path / name).exists() else b""
    if hashlib.sha256(content).hexdigest() != manifest["files"][name]["sha256"]:
        raise ValueError(f"{path / name} is damaged: its checksum differs from the manifest; use another checkpoint")
    with safe_open(path / name, framework="pt", device=str(session.device)) as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
        rest = json.loads(file.metadata()["json"])
    restore(session, tensors, rest)
    return int(manifest["step"])


def latest(checkpoints: Path) -> Path:
    """The checkpoint with the most steps. Raises `ValueError` when there is none."""
    whole = sorted(path.parent for path in checkpoints.glob(f"step-*/{MANIFEST}"))
    if not whole:
        raise ValueError(f"there is no whole checkpoint in {checkpoints}: start without --resume in another --out")
    return whole[-1]


def read_manifest(path: Path) -> dict[str, Any]:
    """What a checkpoint says of itself. Raises `ValueError` when it cannot be read."""
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no whole checkpoint: {MANIFEST} cannot be read ({error})") from error
    if manifest.get("format") != _FORMAT:
        raise ValueError(f"{path} has format {manifest.get('format')!r}, this version reads {_FORMAT}")
    return manifest


def _write(session: Session, path: Path) -> Exception | None:
    """Writes this rank's file; returns what stood in the way."""
    try:
        tensors, rest = collect(session)
        save_file(tensors, path, {"json": json.dumps(rest)})
        _sync(path)
    except (OSError, SafetensorError) as error:
        return error
    return None


def _finish(session: Session, part: Path, target: Path, step: int, files: Mapping[str, Any]) -> None:
    """Makes a checkpoint of what all ranks wrote, or removes it when one of them could not."""
    try:
        if all(files.values()):
            write_json(part / MANIFEST, _manifest(session, step, files))
            _sync(part)
            shutil.rmtree(target, ignore_errors=True)
            part.rename(target)
            _sync(target.parent)
    except OSError as error:
        raise unwritable(target, error) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _file_name(session: Session) -> str:
    return _name(*divmod(session.rank, session.config.mesh.shards))


def _name(replica: int, shard: int) -> str:
    return f"replica{replica}-shard{shard}.safetensors"


def _everyones(session: Session, path: Path, failure: Exception | None) -> dict[str, Any]:
    """Size and checksum of every rank's file, on every rank; None for a file that could not be written."""
    content = b"" if failure else path.read_bytes()
    mine = hashlib.sha256(content).digest() + len(content).to_bytes(8, "big")
    buffer = torch.tensor(list(mine), dtype=torch.uint8, device=session.device)
    everyone = [torch.empty_like(buffer) for _ in range(session.world_size)]
    dist.all_gather(everyone, buffer)
    files: dict[str, Any] = {}
    for rank, row in enumerate(bytes(other.tolist()) for other in everyone):
        replica, shard = divmod(rank, session.config.mesh.shards)
        count = int.from_bytes(row[32:], "big")
        files[_name(replica, shard)] = {"bytes": count, "sha256": row[:32].hex()} if count else None
    return files


def _manifest(session: Session, step: int, files: Mapping[str, Any]) -> dict[str, Any]:
    config = to_table(session.config)
    mesh = dataclasses.asdict(session.config.mesh)
    return {"format": _FORMAT, "step": step, "scheme": config["scheme"], "mesh": mesh, "config": config, "files": files}


def _check_same(session: Session, manifest: Mapping[str, Any], path: Path) -> None:
    here = to_table(session.config)
    for key in ("mesh", "scheme", "model", "seed"):
        saved = manifest["config"][key]
        if saved != here[key]:
            raise ValueError(f"{path} was written with {key} {saved}, this run has {here[key]}: resume with the same")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
