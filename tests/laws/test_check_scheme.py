"""`check_scheme` finds parts of a scheme that break their contract, and names it."""

import itertools
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

import detonation as dt
from detonation.extend import Identity, TopK, momentum, scatter_sum
from detonation.testing import LawBroken, check_scheme

TURN = itertools.count()


@dataclass(frozen=True)
class Halved:
    tile: ClassVar[int] = 0

    def forward(self, chunks):
        return chunks * 0.5

    def inverse(self, coefficients):
        return coefficients * 0.5


@dataclass(frozen=True)
class Drawn(TopK):
    def indices(self, coefficients, step, seed):
        drawn = torch.rand(coefficients.shape)
        return drawn.topk(self.topk, 1).indices.sort(1).values


@dataclass(frozen=True)
class Counted(TopK):
    def indices(self, coefficients, step, seed):
        first = next(TURN) % 8
        return (first + torch.arange(self.topk)).expand(len(coefficients), -1).contiguous()


@dataclass(frozen=True)
class Unsorted(TopK):
    def indices(self, coefficients, step, seed):
        return coefficients.abs().topk(self.topk, 1).indices


@dataclass(frozen=True)
class Wrong:
    how: str
    rowwise: ClassVar[bool] = True

    def __call__(self, values, indices, chunk):
        if self.how == "in place":
            values.mul_(1 / len(values))
        total = scatter_sum(values, indices, chunk)
        if self.how == "noise":
            return total + 1e-4 * torch.randn_like(total)
        if self.how == "norm":
            return total / total.norm()
        return total


def of(basis=None, selection=None, aggregation=None):
    """A scheme of `momentum` under the name and arguments of `demo`, with one wrong part."""
    right = dt.demo(topk=4, chunk=64)
    codec = momentum(basis or Identity(), selection or TopK(4, 64), 0.99).codec
    return replace(right, codec=codec, aggregation=aggregation or right.aggregation)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (
            of(basis=Halved()),
            "inverse.forward.x.. is off by 0.75 of x, and forward makes norms 0.5",
        ),
        (of(selection=Drawn(4, 64)), "two calls of indices with equal arguments return"),
        (of(selection=Counted(4, 64)), "two calls of indices with equal arguments return"),
        (of(selection=Unsorted(4, 64)), "the indices of a row do not rise"),
        (of(aggregation=Wrong("in place")), "it changes the values that it is given"),
        (of(aggregation=Wrong("noise")), "two calls with equal values differ in their results"),
        (of(aggregation=Wrong("norm")), "rowwise is True, but a row of the result depends"),
    ],
)
def test_a_part_that_breaks_its_contract_is_found(wrong, text, monkeypatch):
    monkeypatch.setattr("detonation.testing.scheme_named", lambda *_: wrong)  # it has no name
    with pytest.raises(LawBroken, match=f"^the contract of an? .*: {text}"):
        check_scheme(wrong)
