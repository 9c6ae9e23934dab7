"""A fused multiply-add in numpy, which has none."""

from typing import Any

import numpy


def fused(a: Any, b: Any, c: Any) -> Any:
    """`a * b + c`, rounded once: an inexact sum in fp64 becomes odd, which no rounding to fp32 takes for a tie."""
    with numpy.errstate(invalid="ignore", over="ignore"):
        product, added = a.astype(numpy.float64) * b, c.astype(numpy.float64)
        total = product + added
        error = (product - (total - (total - product))) + (added - (total - product))
        number = total.view(numpy.int64)
        odd = number + numpy.where((error > 0) == (total > 0), 1, -1)
        inexact = (numpy.abs(error) > 0) & (number % 2 == 0)
        return numpy.where(inexact, odd, number).view(numpy.float64).astype(a.dtype)
