"""Triton's interpreter with the products and sums of a GPU."""

from types import MethodType
from typing import Any

import numpy
import pytest

from fused import fused


@pytest.fixture(autouse=True)
def products_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each element of a product is a sum in one order, by fused multiply-add, as on a GPU.

    The interpreter asks numpy, whose product for processors with AVX2 alone adds up the last rows of a tile in another
    order: there the bits of a row would depend on how many rows its tile has.
    """
    interpreter = pytest.importorskip("triton.runtime.interpreter")

    def create_dot(builder: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        total = d.data.copy()
        for each in range(a.data.shape[1]):
            total = fused(
                numpy.broadcast_to(a.data[:, each, None], total.shape), b.data[each], total
            )
        return interpreter.TensorHandle(total, d.dtype.scalar)

    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "create_dot", MethodType(create_dot, builder))


@pytest.fixture(autouse=True)
def multiplied_and_added_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused multiply-add is rounded once; the interpreter rounds the product, too."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")

    def create_fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
        return interpreter.TensorHandle(fused(a.data, b.data, c.data), c.dtype.scalar)

    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "create_fma", MethodType(create_fma, builder))
