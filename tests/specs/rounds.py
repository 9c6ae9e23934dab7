"""Specifications of the schemes that exchange how far the parameters moved.

Each takes the weights that all replicas begin with, the gradients by step, replica and name, and
the base optimizer, and returns the weights that each replica ends with.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from specs.bases import Base, Tensors
from specs.gradients import Gradients, shares_of
from specs.parts import Exchange, Rows, every_index, largest, random_indices, scattered


class Outer:
    """The anchor of the parameters, and the SGD that moves it."""

    def __init__(
        self, anchor: Tensor, lr: float, momentum: float = 0.0, nesterov: bool = True
    ) -> None:
        self.anchor = anchor
        self.lr = lr
        self.momentum = momentum
        self.nesterov = nesterov
        self.velocity = torch.zeros_like(anchor)

    def step(self, update: Tensor) -> None:
        self.velocity = self.velocity * self.momentum + update
        ahead = update + self.velocity * self.momentum
        self.anchor = self.anchor - (ahead if self.nesterov else self.velocity) * self.lr


def movement(anchor: Tensor, rows: Rows, weights: Tensors) -> Tensor:
    """How far `weights` are from the anchor; padding does not move."""
    return (anchor - rows.of(weights)) * rows.inside


def follow(weights: Tensors, target: Tensors) -> None:
    for name, tensor in target.items():
        weights[name].copy_(tensor)


def outer_sgd(
    weights: Tensors,
    gradients: Gradients,
    base: Base,
    rows: Rows,
    exchange: Exchange,
    every: int,
    outer: Outer,
    decay: float = 0.0,
    indices_of: Callable[[Tensor], Tensor] = every_index,
) -> list[Tensors]:
    """The rule of all rounds: replicas train alone, then all move to a common anchor.

    The unsent part of a movement, times `decay`, is added to the next movement.
    """
    replicas = [{name: each.clone() for name, each in weights.items()} for _ in gradients[0]]
    take_steps = [base(mine) for mine in replicas]
    memories = [rows.zeros() for _ in replicas]
    for step, given in enumerate(gradients):
        for take_step, gradient in zip(take_steps, given, strict=True):
            take_step(gradient)
        if (step + 1) % every:
            continue
        sent, where = [], []
        for number, mine in enumerate(replicas):
            signal = memories[number] * decay + movement(outer.anchor, rows, mine)
            indices = indices_of(signal)
            message = exchange.read(signal.gather(1, indices), step, number)
            gone = scattered(message[: len(signal)], indices, rows.chunk)
            memories[number] = (signal - gone) * rows.inside
            sent.append(message)
            where.append(indices)
        outer.step(scattered(*exchange.update(sent, where, step), rows.chunk))
        for mine in replicas:
            follow(mine, rows.back(outer.anchor))
    return replicas


def diloco(
    weights: Tensors,
    gradients: Gradients,
    base: Base,
    every: int = 100,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.5,
    nesterov: bool = True,
    precision: str = "fp32",
    link: str = "all-reduce",
) -> list[Tensors]:
    """The mean movement of a round is the gradient of an outer SGD."""
    rows = Rows(weights, chunk=1)
    exchange = Exchange(
        rows, len(gradients[0]), 1, precision, "mean", link, shared=True, period=every, cancel=True
    )
    outer = Outer(rows.of(weights), outer_lr, outer_momentum, nesterov)
    return outer_sgd(weights, gradients, base, rows, exchange, every, outer)


def local_sgd(
    weights: Tensors,
    gradients: Gradients,
    base: Base,
    every: int = 16,
    precision: str = "fp32",
    link: str = "all-reduce",
) -> list[Tensors]:
    """The parameters are averaged: `diloco` with an outer lr of 1 and no momentum."""
    settings = 1.0, 0.0, False, precision, link
    return diloco(weights, gradients, base, every, *settings)


def muloco(
    weights: Tensors,
    gradients: Gradients,
    base: Base,
    every: int = 30,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.6,
    precision: str = "4bit",
    decay: float = 1.0,
    aggregate: str = "mean",
    link: str = "all-gather",
) -> list[Tensors]:
    """`diloco` in low precision; rounding errors are sent in the next round. `base` is Muon."""
    width = 1 if aggregate == "mean" else 256  # of rows whose norm is rescaled
    rows = Rows(weights, width)
    settings = len(gradients[0]), width, precision, aggregate, link
    exchange = Exchange(rows, *settings, shared=True, period=every, cancel=True)
    outer = Outer(rows.of(weights), outer_lr, outer_momentum)
    return outer_sgd(weights, gradients, base, rows, exchange, every, outer, decay)


def sparseloco(
    weights: Tensors,
    gradients: Gradients,
    base: Base,
    every: int = 15,
    topk: int = 64,
    chunk: int = 4096,
    decay: float = 0.95,
    outer_lr: float = 1.0,
    precision: str = "2bit",
    aggregate: str = "clipped_mean",
    link: str = "all-gather",
) -> list[Tensors]:
    """The largest coordinates of a movement are sent; the rest is added to the next movement."""
    rows = Rows(weights, chunk)
    settings = len(gradients[0]), topk, precision, aggregate, link
    exchange = Exchange(rows, *settings, shared=False, period=every, cancel=True)
    outer = Outer(rows.of(weights), outer_lr)

    def indices_of(signal: Tensor) -> Tensor:
        return largest(signal, topk)

    return outer_sgd(weights, gradients, base, rows, exchange, every, outer, decay, indices_of)


def sparta(
    weights: Tensors,
    gradients: Gradients,
    base: Base,
    rate: float = 1 / 200,
    precision: str = "fp32",
    link: str = "all-reduce",
) -> list[Tensors]:
    """A random part of the parameters is averaged after every step; the rest is unchanged."""
    replicas = [{name: each.clone() for name, each in weights.items()} for _ in gradients[0]]
    take_steps = [base(mine) for mine in replicas]
    shares, k = shares_of(rate)
    rows = Rows(weights, shares * k)
    settings = len(replicas), k, precision, "mean", link
    exchange = Exchange(rows, *settings, shared=True, period=shares, cancel=True)
    outer = Outer(rows.of(weights), lr=1.0)
    for step, given in enumerate(gradients):
        for take_step, gradient in zip(take_steps, given, strict=True):
            take_step(gradient)
        indices = random_indices(len(rows.inside), rows.chunk, k, step)
        moved = [movement(outer.anchor, rows, mine) for mine in replicas]
        sent = [exchange.read(m.gather(1, indices), step, i) for i, m in enumerate(moved)]
        outer.step(scattered(*exchange.update(sent, [indices] * len(sent), step), rows.chunk))
        for mine, signal, message in zip(replicas, moved, sent, strict=True):
            gone = scattered(message[: len(signal)], indices, rows.chunk)
            follow(mine, rows.back(outer.anchor - (signal - gone)))
    return replicas


def streaming_diloco(
    weights: Tensors,
    gradients: Gradients,
    base: Base,
    every: int = 100,
    fragments: int = 4,
    delay: int = 5,
    keep: float = 0.0,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.5,
    precision: str = "4bit",
    unit: str = "parameter",
    link: str = "all-gather",
) -> list[Tensors]:
    """`diloco` by fragments, sent at different steps; a message has `delay` steps to arrive."""
    replicas = [{name: each.clone() for name, each in weights.items()} for _ in gradients[0]]
    take_steps = [base(mine) for mine in replicas]
    parts = [Rows(each, chunk=1) for each in fragments_of(weights, fragments, unit)]
    settings = len(replicas), 1, precision, "mean", link, True, False, every, True
    exchanges = [Exchange(rows, *settings) for rows in parts]
    outers = [Outer(rows.of(weights), outer_lr, outer_momentum) for rows in parts]
    arriving: dict[int, Tensor] = {}
    for step, given in enumerate(gradients):
        for take_step, gradient in zip(take_steps, given, strict=True):
            take_step(gradient)
        for turn, (rows, exchange, outer) in enumerate(zip(parts, exchanges, outers, strict=True)):
            over = step + 1 - (turn + 1) * every // fragments  # steps since the first move
            if (over + delay) % every == 0:
                moved = [movement(outer.anchor, rows, mine) for mine in replicas]
                sent = [exchange.read(each, step, i) for i, each in enumerate(moved)]
                where = [every_index(outer.anchor)] * len(sent)
                arriving[turn] = exchange.update(sent, where, step)[0]
            if over % every == 0 and turn in arriving:
                outer.step(arriving.pop(turn))
                for mine in replicas:
                    kept = outer.anchor.lerp(rows.of(mine), keep)
                    follow(mine, rows.back(kept if keep else outer.anchor))
    return replicas


def fragments_of(weights: Tensors, count: int, unit: str) -> list[Tensors]:
    """Parts of the parameters of nearly equal size: the largest unit first, to the lightest part.

    A unit is a parameter, or with "block" all parameters of a numbered layer.
    """
    units: dict[str, Tensors] = {}
    for name, weight in weights.items():
        numbered = unit == "block" and name.split(".")[0].isdecimal()
        units.setdefault(name.split(".")[0] if numbered else name, {})[name] = weight
    sizes = {key: sum(w.numel() for w in each.values()) for key, each in units.items()}
    parts: list[Tensors] = [{} for _ in range(count)]
    for key in sorted(sizes, key=lambda each: -sizes[each]):
        lightest = min(parts, key=lambda part: sum(w.numel() for w in part.values()))
        lightest.update(units[key])
    return [{name: part[name] for name in weights if name in part} for part in parts]
