"""Specifications of the schemes that exchange at every step.

Each takes the weights that all replicas begin with, the gradients by step, replica and name, and
the base optimizer, and returns the weights that all replicas end with. `link` is the collective
that carries the messages: "auto" of the product chooses it by bytes.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specs.bases import Base, Tensors
from specs.parts import (
    Exchange,
    Rows,
    dct,
    every_index,
    inverse_dct,
    largest,
    random_indices,
    scattered,
)

Gradients = list[list[Tensors]]


def none(weights: Tensors, gradients: Gradients, base: Base) -> list[Tensors]:
    """Each replica trains alone."""
    alone = []
    for replica in range(len(gradients[0])):
        mine = {name: weight.clone() for name, weight in weights.items()}
        take_step = base(mine)
        for given in gradients:
            take_step(given[replica])
        alone.append(mine)
    return alone


def full(
    weights: Tensors,
    gradients: Gradients,
    base: Base,
    precision: str = "fp32",
    link: str = "all-reduce",
) -> Tensors:
    """All gradients are rounded to the precision and averaged."""
    weights = {name: weight.clone() for name, weight in weights.items()}
    replicas = len(gradients[0])
    take_step = base(weights)
    rows = Rows(weights, chunk=1)
    exchange = Exchange(rows, replicas, 1, precision, "mean", link, shared=True)
    indices = every_index(rows.inside)
    for step, given in enumerate(gradients):
        sent = [exchange.read(rows.of(each), step, i) for i, each in enumerate(given)]
        update, _ = exchange.update(sent, [indices] * replicas, step)
        take_step(rows.back(update))
    return weights


def momentum(
    weights: Tensors,
    gradients: Gradients,
    base: Base,
    rows: Rows,
    exchange: Exchange,
    indices_of: Callable[[Tensor, int], Tensor],
    decay: float,
    alpha: float = 1.0,
    error_feedback: bool = True,
    forward: Callable[[Tensor], Tensor] = lambda memory: memory,
    inverse: Callable[..., Tensor] = scattered,
) -> Tensors:
    """The rule of all schemes with a momentum: sent values are subtracted from it.

    `indices_of(coefficients, step)` selects coefficients. `forward` and `inverse` are the basis.
    """
    weights = {name: weight.clone() for name, weight in weights.items()}
    take_step = base(weights)
    memories = [rows.zeros() for _ in gradients[0]]
    for step, given in enumerate(gradients):
        sent, where = [], []
        for replica, gradient in enumerate(given):
            memory = memories[replica] * decay + rows.of(gradient)
            coefficients = forward(memory)
            indices = indices_of(coefficients, step)
            values = coefficients.gather(1, indices)
            message = exchange.read(values, step, replica)
            gone = message[: len(values)] if error_feedback else values
            memory = memory.sub(inverse(gone, indices, rows.chunk), alpha=alpha)
            memories[replica] = memory * rows.inside  # padding stays zero
            sent.append(message)
            where.append(indices)
        update = inverse(*exchange.update(sent, where, step), rows.chunk)
        take_step(rows.back(update))
    return weights


def loco(
    weights: Tensors,
    gradients: Gradients,
    base: Base,
    precision: str = "4bit",
    decay: float = 1.0,
    link: str = "all-gather",
) -> Tensors:
    """All gradients are averaged; each rounding error is added to the next gradient."""
    rows = Rows(weights, chunk=1)
    exchange = Exchange(rows, len(gradients[0]), 1, precision, "mean", link, shared=True)

    def everything(memory: Tensor, step: int) -> Tensor:
        return every_index(memory)

    return momentum(weights, gradients, base, rows, exchange, everything, decay)


def demo(
    weights: Tensors,
    gradients: Gradients,
    base: Base,
    topk: int = 4,
    chunk: int = 64,
    tiles: bool = False,
    decay: float = 0.999,
    alpha: float = 1.0,
    precision: str = "fp32",
    error_feedback: bool = True,
    aggregate: str = "mean",
    link: str = "all-gather",
) -> Tensors:
    """The largest DCT coefficients of each chunk of a momentum are sent."""
    side = chunk if tiles else 0
    rows = Rows(weights, chunk * chunk if tiles else chunk, side)
    exchange = Exchange(
        rows, len(gradients[0]), topk, precision, aggregate, link, shared=False, summed=not tiles
    )

    def indices_of(coefficients: Tensor, step: int) -> Tensor:
        return largest(coefficients, topk)

    forward = partial(dct, side=side)
    inverse = partial(inverse_dct, side=side)
    settings = decay, alpha, error_feedback, forward, inverse
    return momentum(weights, gradients, base, rows, exchange, indices_of, *settings)


def decoupled_adamw(weights: Tensors, gradients: Gradients, base: Base, **options: Any) -> Tensors:
    """`demo` with AdamW, which computes its moments from the common update."""
    return demo(weights, gradients, base, **options)


def random(
    weights: Tensors,
    gradients: Gradients,
    base: Base,
    rate: float = 1 / 16,
    decay: float = 0.999,
    alpha: float = 1.0,
    precision: str = "fp32",
    error_feedback: bool = True,
    aggregate: str = "mean",
    link: str = "all-reduce",
    cycle: bool = True,
) -> Tensors:
    """A random part of the momentum is sent; all replicas send the same coordinates."""
    shares, k = shares_of(rate)
    rows = Rows(weights, shares * k)
    replicas, period = len(gradients[0]), shares if cycle else 1
    exchange = Exchange(rows, replicas, k, precision, aggregate, link, shared=True, period=period)

    def indices_of(memory: Tensor, step: int) -> Tensor:
        return random_indices(len(memory), shares * k, k, step, cycle)

    settings = decay, alpha, error_feedback
    return momentum(weights, gradients, base, rows, exchange, indices_of, *settings)


def random_sign(
    weights: Tensors,
    gradients: Gradients,
    base: Base,
    rate: float = 1 / 8,
    decay: float = 0.9,
    alpha: float = 1.0,
    error_feedback: bool = False,
    cycle: bool = False,
    link: str = "all-gather",
) -> Tensors:
    """`random` with signs: the majority of the replicas' signs decides."""
    settings = "sign", error_feedback, "majority_vote", link, cycle
    return random(weights, gradients, base, rate, decay, alpha, *settings)


def striding(
    weights: Tensors,
    gradients: Gradients,
    base: Base,
    rate: float = 1 / 16,
    decay: float = 0.999,
    alpha: float = 1.0,
    precision: str = "fp32",
    error_feedback: bool = True,
    aggregate: str = "mean",
    link: str = "all-reduce",
) -> Tensors:
    """Every n-th coordinate of the momentum is sent, one coordinate later at each step."""
    shares, k = shares_of(rate)
    rows = Rows(weights, shares * k)
    replicas = len(gradients[0])
    exchange = Exchange(rows, replicas, k, precision, aggregate, link, shared=True, period=shares)

    def indices_of(memory: Tensor, step: int) -> Tensor:
        return torch.arange(step % shares, shares * k, shares).expand(len(memory), -1)

    settings = decay, alpha, error_feedback
    return momentum(weights, gradients, base, rows, exchange, indices_of, *settings)


def shares_of(rate: float) -> tuple[int, int]:
    """The steps in which every coordinate is sent once, and the coordinates of a row per step."""
    shares = math.ceil(1 / rate - 1e-9)
    return shares, 1 if shares == 1 else max(1, 64 // shares)
