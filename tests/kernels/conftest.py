"""Triton's interpreter with matrix products that have the same bits on every processor."""

from types import MethodType
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def products_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each element of a product is a sum in one order, as on a GPU.

    The interpreter asks numpy, whose product for processors with AVX2 alone adds up the last rows of a tile in another
    order: there the bits of a row would depend on how many rows its tile has.
    """
    interpreter = pytest.importorskip("triton.runtime.interpreter")

    def create_dot(builder: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        total = d.data.copy()
        for each in range(a.data.shape[1]):
            total += a.data[:, each, None] * b.data[each]
        return interpreter.TensorHandle(total, d.dtype.scalar)

    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "create_dot", MethodType(create_dot, builder))
