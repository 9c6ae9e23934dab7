"""Restore: puts what a checkpoint holds for this rank into a model and its optimizer."""

import json
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from detonation.checkpoint.files.manifest import Untrustworthy
from detonation.checkpoint.files.reader import File, Saved
from detonation.checkpoint.load.elastic import Elastic, owners_share
from detonation.checkpoint.save.snapshot import Box, generators, groups, weights
from detonation.core.flat.layout import local
from detonation.core.link.coordinates import Place
from detonation.core.optimizer.replicated import Replicated

MEMORY = "residual"
OWNED = "owned"


@torch.no_grad()
def restore(saved: Saved, model: nn.Module, optimizer: Replicated) -> str:
    """Puts the state of `saved` into both; returns in a line what was merged. Not yet compared between replicas.

    Raises `ValueError` where the checkpoint is of another model, optimizer or scheme.
    """
    place, manifest = optimizer.place, saved.manifest
    _check(saved, model, optimizer, place)
    same = (manifest.replicas, manifest.shards) == (place.replicas, place.shards)
    source: Elastic | File = saved.file(place.replica, place.shard) if same else Elastic(saved, place)
    parameters = dict(model.named_parameters())
    for name, tensor in weights(model).items():
        share = manifest.alike and name in parameters
        key = f"model.{name}"
        local(tensor).copy_(_fitting(key, local(tensor), _get(source, key, Box.of(tensor), share)))
    for name, parameter in parameters.items():
        _base_state(saved, source, optimizer, name, parameter)
    for group, options in zip(optimizer.param_groups, saved.file(0, 0).groups, strict=True):
        group |= {key: _option(key, group.get(key, 0.0), value) for key, value in options["options"].items()}
        for key, value in options["tensors"].items():
            group[key] = torch.tensor(value, dtype=group[key].dtype, device=group[key].device)
    optimizer.built()
    if isinstance(source, File):
        _private_same(source, optimizer)
        for key, generator in generators(model).items():
            generator.set_state(source.tensor(key))
        return "exactly as saved"
    dropped = _private_elastic(source, optimizer, {name: Box.of(tensor) for name, tensor in parameters.items()})
    return _policy(manifest.replicas, manifest.shards, place) + dropped


def _check(saved: Saved, model: nn.Module, optimizer: Replicated, place: Place) -> None:
    manifest = saved.manifest
    here = described(optimizer)
    for key, now in here.items():
        was = getattr(manifest, key)
        if was != now:
            raise ValueError(f"{saved.path} was written with {key} {was}, this run has {now}: resume with the same")
    mine = [group["parameters"] for group in groups(model, optimizer)]
    theirs = [group.get("parameters") if isinstance(group, dict) else None for group in saved.file(0, 0).groups]
    if mine != theirs:
        raise ValueError(f"{saved.path} was written with other parameters or parameter groups: resume the same model")
    if manifest.replicas != place.replicas and all(scheme.signal == "nothing" for _, scheme in optimizer.levels):
        counts = f"{manifest.replicas} replicas, not {place.replicas}"
        raise ValueError(f"{saved.path} is of {counts}: without an exchange they have nothing in common to go on from")


def described(optimizer: Replicated) -> dict[str, Any]:
    """What must be the same when it is resumed, as the manifest spells it."""
    levels = [{"scheme": scheme.name, **scheme.arguments} for _, scheme in optimizer.levels]
    return {
        "levels": json.loads(json.dumps(levels)),
        "seed": optimizer.seed,
        "optimizer": type(optimizer.base).__name__,
    }


def _option(key: str, here: Any, saved: Any) -> Any:
    """An option of a parameter group, which must be of the kind that it is here; one that is not here, a number."""
    if isinstance(here, tuple | list) and isinstance(saved, list) and len(here) == len(saved):
        return type(here)(_option(key, mine, theirs) for mine, theirs in zip(here, saved, strict=True))
    number = type(here) in (int, float) and type(saved) in (int, float)
    switch = isinstance(here, bool | None) and isinstance(saved, bool | None)
    if not (number or switch or (isinstance(here, str) and isinstance(saved, str))):
        raise Untrustworthy(f"the option {key} was saved as {str(saved)[:60]!r}, is {here!r} here")
    return saved


def _get(source: Elastic | File, key: str, box: Box, share: bool) -> Tensor:
    return source.tensor(key) if isinstance(source, File) else source.agreed(key, box, share)


def _base_state(saved: Saved, source: Elastic | File, optimizer: Replicated, name: str, parameter: Tensor) -> None:
    """The base optimizer's state of one parameter."""
    file = source if isinstance(source, File) else saved.file(0, 0)
    prefix = f"optimizer.{name}."
    state: dict[str, Any] = {k.removeprefix(prefix): v for k, v in file.values.items() if _of(k, prefix)}
    if not all(isinstance(value, int | float | None) for value in state.values()):
        raise Untrustworthy(f"the state of {name} holds {str(state)[:60]}, must be numbers")
    for key in [key for key in file.keys if _of(key, prefix)]:
        if isinstance(source, File):
            tensor, box = source.tensor(key), source.boxes.get(key)
            whole = box.whole if box else ()
            if whole == tuple(parameter.shape) and tensor.shape != local(parameter).shape:
                raise Untrustworthy(f"{key} has shape {tuple(tensor.shape)}, not {tuple(local(parameter).shape)}")
        else:
            cut = key in file.boxes
            if cut and file.boxes[key].whole != tuple(parameter.shape):
                raise ValueError(f"{key} is cut in a way of its own: resume with {saved.manifest.shards} shards")
            tensor = source.agreed(key, Box.of(parameter) if cut else None, saved.manifest.alike)
            whole = tuple(parameter.shape)
        tensor = tensor if key in file.on_host else tensor.to(local(parameter).device)
        state[key.removeprefix(prefix)] = _wrapped(parameter, tensor, whole) if key in file.wrapped else tensor
    if state:
        optimizer.base.state[parameter] = state
    else:
        optimizer.base.state.pop(parameter, None)


def _of(key: str, prefix: str) -> bool:
    return key.startswith(prefix) and "." not in key.removeprefix(prefix)


def _wrapped(parameter: Tensor, tensor: Tensor, whole: tuple[int, ...]) -> Tensor:
    if not isinstance(parameter, DTensor):
        return tensor
    stride = torch.empty(whole, device="meta").stride()
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(tensor, mesh, placements, run_check=False, shape=torch.Size(whole), stride=stride)


def _private_same(source: File, optimizer: Replicated) -> None:
    private = {f"replica.{key}": tensor for key, tensor in optimizer.private().items()}
    saved = {key for key in source.keys if key.startswith("replica.")}
    if private.keys() != saved:
        odd = sorted(private.keys() ^ saved)
        raise ValueError(f"the checkpoint is of another model or scheme: {odd[0]} and {len(odd) - 1} more differ")
    loaded = {key: _fitting(key, tensor, source.tensor(key)) for key, tensor in private.items()}
    for level, replicator in enumerate(optimizer.built()):
        mark = f"replica.{level}."
        replicator.private().load({k.removeprefix(mark): t for k, t in loaded.items() if k.startswith(mark)})


def _private_elastic(source: Elastic, optimizer: Replicated, boxes: dict[str, Box]) -> str:
    """Merges what was private to the replicas; returns what had to be dropped, in words."""
    dropped = ""
    for level, replicator in enumerate(optimizer.built()):
        private, channel = replicator.private(), replicator.channel
        mine = {slot.name: boxes[slot.name] for slot in channel.layout.slots}
        state = {}
        for key, tensor in private.named().items():
            kind, _, name = key.partition(".")
            where = f"replica.{level}.{key}"
            if kind == MEMORY:
                state[key] = _fitting(where, tensor, source.memory(where, mine[name]))
            elif kind == OWNED:
                state[key] = torch.zeros_like(tensor)
            else:
                state[key] = _fitting(where, tensor, source.agreed(where, mine.get(name)))
        owned = source.owned(f"replica.{level}.{OWNED}", channel, mine)
        if owned is not None and OWNED in state:
            state[OWNED] = owners_share(owned, channel)
        elif owned is not None and channel.memory is not None:
            for name, piece in zip(mine, owned, strict=True):
                state[f"{MEMORY}.{name}"] += piece
        elif owned is not None:
            norm = sum(float(piece.double().square().sum()) for piece in owned) ** 0.5
            dropped += f"; dropped: what owners had not told, norm {norm:.3g}, has no place in this world"
        private.load(state)
    return dropped


def _fitting(key: str, target: Tensor, source: Tensor) -> Tensor:
    """`source`, which must be of the shape and type of `target`."""
    if target.shape != source.shape or target.dtype != source.dtype:
        was, now = f"{source.dtype} {tuple(source.shape)}", f"{target.dtype} {tuple(target.shape)}"
        raise ValueError(f"{key} was saved as {was}, is {now} here: it is of another model or scheme")
    return source


def _policy(replicas: int, shards: int, place: Place) -> str:
    change = f"from {replicas} replicas x {shards} shards to {place.replicas} x {place.shards}"
    if replicas == place.replicas:
        return f"{change}: weights and memory exact, cut anew"
    joiners = "; joiners start with none" if place.replicas > replicas else " of neighbours"
    kept = "its mean over the replicas is kept"
    return f"{change}: weights exact where replicas agreed, else their mean; memory merged by mean{joiners}, {kept}"
