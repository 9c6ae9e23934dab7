"""Of a product, `make test` runs cases that cover it: each value of the first dimension, each pair of the others."""

from itertools import combinations, product

import pytest

from covering import covered, pairwise, some

DIMS = [
    [range(2), range(2)],
    [range(3), range(4), range(2)],
    [range(5), range(1), range(3), range(2)],
    [range(3)] * 4,
    [range(7), range(6), range(5)],
]


def pairs(rows):
    return {(a, b, row[a], row[b]) for row in rows for a, b in combinations(range(len(row)), 2)}


@pytest.mark.parametrize("dims", DIMS, ids=lambda dims: "x".join(str(len(dim)) for dim in dims))
def test_every_pair_of_values_is_in_a_row(dims):
    rows, whole = pairwise(*dims), list(product(*dims))
    assert pairs(rows) == pairs(whole) and set(rows) <= set(whole)
    assert rows == pairwise(*dims) and len(rows) == len(set(rows))
    largest, second = sorted(map(len, dims))[-2:]
    assert len(rows) <= 1.5 * largest * second  # no fewer than their product can do


def test_a_dimension_without_values_has_no_rows():
    assert pairwise(range(3), []) == []


def everyday(mark):
    return [case.values for case in mark.args[1] if not case.marks]


def test_the_cover_has_each_scheme_and_each_pair_of_what_else_there_is():
    names, optimizers, kernels = [f"scheme{n}" for n in range(7)], range(3), [True, False]
    mark = covered("scheme, optimizer, kernels", names, optimizers, kernels)
    assert [case.values for case in mark.args[1]] == list(product(names, optimizers, kernels))
    assert {row[0] for row in everyday(mark)} == set(names) and len(everyday(mark)) == len(names)
    assert pairs([row[1:] for row in everyday(mark)]) == pairs(list(product(optimizers, kernels)))
    few = everyday(covered("scheme, optimizer", names[:2], range(5)))
    assert len(few) == len({row[1] for row in few}) == 5 and {row[0] for row in few} == set(
        names[:2]
    )


def test_what_is_not_among_the_few_is_long():
    mark = some("name, count", [("a", 1), ("b", 2), ("c", 3)], keep=[("b", 2)])
    assert everyday(mark) == [("b", 2)] and len(mark.args[1]) == 3
    assert everyday(some("name", "abc", keep="ac")) == [("a",), ("c",)]
