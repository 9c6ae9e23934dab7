"""Few cases in place of a product: `make test` runs those that cover, `make test-all` the whole product."""

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(*dims: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Rows with one value of each dimension, among which every pair of values of two dimensions is found.

    Greedy and without chance: each row is, of the whole product, the first that holds most of the pairs still missing.

    >>> pairwise("ab", [1, 2], [True, False])
    [('a', 1, True), ('a', 2, False), ('b', 1, False), ('b', 2, True)]
    """
    values = [list(dim) for dim in dims]
    rows = list(product(*(range(len(dim)) for dim in values)))
    missing = set().union(*map(_pairs, rows)) if rows else set()
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(_pairs(row) & missing))
        missing -= _pairs(best)
        chosen.append(best)
    return [tuple(dim[index] for dim, index in zip(values, row, strict=True)) for row in chosen]


def covered(
    names: str, first: Iterable[Any], *others: Iterable[Any], ids: Any = None
) -> pytest.MarkDecorator:
    """`parametrize` over the product of the dimensions, of which all but a cover are `long`.

    The cover has every value of the first dimension, such as the schemes, at least once, and every pair of values of
    two others. The names are in the order of the dimensions.
    """
    dims = list(first), *map(list, others)
    rows = pairwise(*dims[1:]) if len(dims) > 2 else [(value,) for value in dims[1]]
    count = max(len(dims[0]), len(rows))
    chosen = [(dims[0][n % len(dims[0])], *rows[n % len(rows)]) for n in range(count)]
    cases = [
        pytest.param(*row, marks=() if row in chosen else pytest.mark.long)
        for row in product(*dims)
    ]
    return pytest.mark.parametrize(names, cases, ids=ids)


def some(
    names: str, cases: Iterable[Any], keep: Iterable[Any], ids: Any = None
) -> pytest.MarkDecorator:
    """`parametrize` over all cases, of which those that `keep` lacks are `long`."""
    kept = list(keep)
    each = [
        pytest.param(*_row(case), marks=() if case in kept else pytest.mark.long) for case in cases
    ]
    return pytest.mark.parametrize(names, each, ids=ids)


def _row(case: Any) -> Sequence[Any]:
    return case if isinstance(case, tuple) else (case,)


def _pairs(row: Sequence[int]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    """The pairs of a row, each place in it with its value."""
    return set(combinations(enumerate(row), 2))
