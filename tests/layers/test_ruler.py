"""The density and the complexity of the source do not rise, and the ruler measures them right."""

import ast

import pytest

import ruler


@pytest.mark.parametrize("measure", ruler.CEILINGS)
def test_no_measure_is_above_its_ceiling(measure):
    assert ruler.measures()[measure] <= ruler.CEILINGS[measure]


def _cognitive(text):
    return ruler.cognitive(ast.parse(text).body[0])


def test_a_break_in_the_flow_costs_its_depth_and_a_chain_of_elif_one_each():
    assert _cognitive("def f(): return 1") == 0
    assert _cognitive("def f():\n if a: pass\n elif b: pass\n else: pass") == 3
    assert _cognitive("def f():\n for x in y:\n  if a and b: pass") == 1 + 2 + 1
    assert _cognitive("def f():\n try: pass\n except E:\n  while a: pass") == 1 + 2
    assert _cognitive("def f(): return [a if b else c for x in y if z]") == 1 + 1
    assert _cognitive("def f():\n def g():\n  if a: pass") == 2


def test_an_import_inside_a_package_counts_as_the_module_that_it_reaches():
    text = "from detonation.core.memory import Memory\nfrom ..flat import layout\nimport torch"
    module = ruler.Module("core/codec/codec.py", text, ast.parse(text))
    assert ruler.own_imports(module) == {"detonation.core.memory", "detonation.core.flat"}


def test_swaps_and_calls_that_return_pairs_are_not_packed():
    text = "a, b = 1, 2\nc, d = f()\n"
    module = ruler.Module("x.py", text, ast.parse(text))
    per_statement = ruler._density([module])
    assert per_statement["packed assignments per 1,000 statements"] == 500
