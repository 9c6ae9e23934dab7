"""Saves that are cut short at every operation, and checkpoints that are damaged in every way."""

import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rows import Row

import detonation as dt
import worlds
from detonation.checkpoint.files import disk
from detonation.checkpoint.verify import verify
from detonation.core.flat.tensors import digest
from zoo import Plain, batch, built

SCHEMES = {"demo": dt.demo(topk=4, chunk=16), "diloco": dt.diloco(every=3), "full": dt.full()}


def crash_points(folder: Path, crashes: Sequence[tuple[str, int]]) -> Row:
    """A save ends before each of its operations: then the previous checkpoint or the new one loads, exactly."""
    row = Row("crash points of a save")
    for name, first in crashes:
        for problem in worlds.run(_cut_short, 1, 1, folder / f"{name}{first}", name, first)[0]:
            row.add(problem)
    return row


def _cut_short(mesh, folder: Path, name: str, first: int) -> list[str]:
    model = dt.shard(built(Plain), mesh)
    optimizer = dt.replicate(
        torch.optim.AdamW(model.parameters(), lr=1e-3), model, mesh["replicate"], SCHEMES[name]
    )
    states = {}
    for step in (1, 2):
        model(batch(0, step, 32)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        states[step] = _state(model, optimizer)
        if step == first:
            dt.save_checkpoint(folder / "before", model, optimizer)
    problems, reached = [], True
    while reached:
        shutil.rmtree(folder / "run", ignore_errors=True)
        shutil.copytree(folder / "before", folder / "run")
        reached = _ends_before(
            len(problems), lambda: dt.save_checkpoint(folder / "run", model, optimizer, keep=1)
        )
        loaded = dt.load_checkpoint(folder / "run", model, optimizer)
        right = loaded is not None and _state(model, optimizer) == states[loaded.step]
        problems.append("" if right else f"{name} from step {first}: operation {len(problems)}")
        dt.load_checkpoint(folder / "before", model, optimizer)
        if first == 1:
            model(batch(0, 2, 32)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return problems


def _state(model, optimizer) -> object:
    base = [
        {key: digest([value]) for key, value in optimizer.base.state[p].items()}
        for p in model.parameters()
    ]
    return (
        digest(model.parameters()),
        base,
        {key: digest([t]) for key, t in dt.replica_state(optimizer).items()},
    )


def _ends_before(point: int, save: Callable[[], object]) -> bool:
    """Calls `save` in a process that ends before operation number `point`; False where there is no such operation."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    try:
        seen = iter(range(sys.maxsize))
        disk.observer = lambda operation, path: os._exit(9) if next(seen) == point else None
        save()
    finally:
        os._exit(0)


def corruptions(checkpoint: Path, folder: Path, seed: int, count: int) -> Row:
    """Each damage to a file of `checkpoint` is found, and the repaired checkpoint is found whole."""
    row, rng = Row("corruptions of a checkpoint"), random.Random(seed)
    target = folder / checkpoint.name
    shutil.copytree(checkpoint, target)
    whole = {path: path.read_bytes() for path in sorted(target.iterdir())}
    assert verify(target).good
    for _ in range(count):
        path, since = rng.choice(list(whole)), time.monotonic()
        kind = rng.choice(list(DAMAGES))
        DAMAGES[kind](path, whole[path], rng)
        row.add("" if verify(target).faults else f"{kind} of {path.name} was not found", since)
        path.write_bytes(whole[path])
    assert verify(target).good
    return row


def _flip(path: Path, content: bytes, rng: random.Random) -> None:
    changed = bytearray(content)
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    path.write_bytes(changed)


def _overwrite(path: Path, content: bytes, rng: random.Random) -> None:
    changed, start = bytearray(content), rng.randrange(len(content))
    for position in range(start, min(start + rng.randrange(1, 513), len(content))):
        changed[position] ^= rng.randrange(1, 256)
    path.write_bytes(changed)


DAMAGES: dict[str, Callable[[Path, bytes, random.Random], object]] = {
    "a flipped bit": _flip,
    "an overwritten stretch": _overwrite,
    "a cut": lambda path, content, rng: path.write_bytes(content[: rng.randrange(len(content))]),
    "an appended byte": lambda path, content, rng: path.write_bytes(
        content + bytes([rng.randrange(256)])
    ),
    "a removal": lambda path, content, rng: path.unlink(),
}
