"""Single rounding: splits optimizer steps into operations that every processor rounds alike."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_FP64 = 53
"""Number of bits that sums of integers may have so that fp64 adds them exactly, in any order."""
_INT64 = 63
"""Number of bits that sums of integers may have so that int64 adds them exactly."""


class SingleRounding(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context manager that splits compound operations, so that each product, sum and quotient is
    rounded separately.

    torch's `a + s * b`, `addcmul`, `addcdiv` and `lerp` round once or twice, depending on the
    processor's instructions, and torch's fp32 roots depend on a library. IEEE 754 defines the
    rounding of each single operation. Matrix products and norms have no fixed order of summation.
    This context manager computes them as exact sums of integers. The longer a sum, the fewer bits
    its elements keep: 19 bits in a matrix product that sums 30,000 terms. So torch's optimizers and
    Muon compute the same bits on all kinds of processors, unless the optimizers are `fused`.

    Example:
        >>> weight = torch.tensor([1.0, 2.0])
        >>> with SingleRounding():
        ...     weight.add_(torch.tensor([0.5, -0.5]), alpha=-2).tolist()
        [0.0, 3.0]
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func._schema.name.removeprefix("aten::")
        kwargs = kwargs or {}
        rule = _RULES.get(name.removeprefix("_foreach_").removesuffix("_"))
        found = NotImplemented
        if rule and "out" not in kwargs:
            found = rule(name, *args, **kwargs)
        if found is NotImplemented:
            return func(*args, **kwargs)
        if not func._schema.returns:
            return None
        return found


def _apply(name: str, *operands: Any) -> Any:
    """Applies the operation `name` to tensors, or to lists of tensors."""
    function = getattr(torch, name, None)
    if function:
        return function(*operands)
    own, *others = operands
    return getattr(own, name)(*others)


def _like(name: str, operation: str) -> str:
    """Adds to `operation` the prefix `_foreach_` (for lists) if `name` begins with it, and the
    suffix `_` (in place) if `name` ends with it.
    """
    found = _apart(name, operation)
    if name.endswith("_"):
        found += "_"
    return found


def _apart(name: str, operation: str) -> str:
    """Adds to `operation` the prefix `_foreach_` (for lists) if `name` begins with it. Never adds
    the suffix `_` (in place), so the operation does not change its operands.
    """
    if name.startswith("_foreach_"):
        return "_foreach_" + operation
    return operation


def _add(name: str, own: Any, other: Any, alpha: Any = 1) -> Any:
    if alpha != 1:
        other = _apply(_apart(name, "mul"), other, alpha)
    return _apply(name, own, other)


def _move(name: str, own: Any, way: Any, factor: Any) -> Any:
    return _apply(_like(name, "add"), own, _apply(_apart(name, "mul"), way, factor))


def _combine(operation: str, name: str, own: Any, one: Any, other: Any, value: Any = 1) -> Any:
    return _move(name, own, _apply(_apart(name, operation), one, other), value)


def _lerp(name: str, own: Any, end: Any, weight: Any) -> Any:
    return _move(name, own, _apply(_apart(name, "sub"), end, own), weight)


def _divide(name: str, own: Any, by: Any, **rest: Any) -> Any:
    """Divides by numbers: multiplies with their reciprocals, as torch does on accelerators. Leaves
    the division by tensors to torch.
    """
    if rest or isinstance(by, Tensor):
        return NotImplemented
    if not isinstance(by, Sequence):
        return _apply(_like(name, "mul"), own, _reciprocal(by))
    if any(isinstance(each, Tensor) for each in by):
        return NotImplemented
    return _apply(_like(name, "mul"), own, [_reciprocal(each) for each in by])


def _reciprocal(number: Any) -> Any:
    if not number:
        return math.inf
    return 1 / number


def _root(name: str, own: Any) -> Any:
    """Computes the square root in fp64 and converts it back. The result equals the correctly
    rounded fp32 root.
    """
    if name.startswith("_foreach_"):
        return [_root(name.removeprefix("_foreach_"), each) for each in own]
    root = own.double().sqrt().to(own.dtype)
    if name.endswith("_"):
        return own.copy_(root)
    return root


def _whole(tensor: Tensor, bits: int) -> tuple[Tensor, float]:
    """Scales `tensor` to integers of up to `bits` bits, which are stored as fp64. Returns these
    integers, and the power of two by which a caller multiplies them to undo the scaling.
    """
    _, exponent = math.frexp(float(tensor.abs().amax()))
    exponent -= bits
    return (tensor.double() * math.ldexp(1.0, -exponent)).round_(), math.ldexp(1.0, exponent)


def _product(name: str, one: Tensor, other: Tensor) -> Any:
    if not one.is_floating_point() or not one.numel() or not other.numel():
        return NotImplemented
    bits = (_FP64 - len(one.T).bit_length()) // 2
    rows, scale = _whole(one, bits)
    columns, by = _whole(other, bits)
    return (rows @ columns).mul_(scale * by).to(one.dtype)


def _add_matrices(
    name: str, own: Tensor, one: Tensor, other: Tensor, beta: float = 1, alpha: float = 1
) -> Any:
    product = _product(name, one, other)
    if product is NotImplemented:
        return NotImplemented
    return own.mul(beta).add_(product.mul_(alpha))


def _norm(name: str, own: Tensor, order: float = 2, dim: Any = None, **rest: Any) -> Any:
    if order != 2 or dim is not None or rest or not own.numel():
        return NotImplemented
    numbers, scale = _whole(own, (_INT64 - own.numel().bit_length()) // 2)
    squares = int(numbers.long().square_().sum())
    return own.new_tensor(math.sqrt(squares) * scale)


_RULES: dict[str, Callable[..., Any]] = {
    "add": _add,
    "sub": _add,
    "addcmul": partial(_combine, "mul"),
    "addcdiv": partial(_combine, "div"),
    "lerp": _lerp,
    "div": _divide,
    "sqrt": _root,
    "mm": _product,
    "addmm": _add_matrices,
    "linalg_vector_norm": _norm,
}
"""Rules for operations. A key is the operation's name without list prefix and in-place suffix."""
