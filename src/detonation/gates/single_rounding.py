"""Single rounding: the steps of an optimizer in operations that every processor rounds alike."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_FP64, _INT64 = 53, 63
"""Bits in which sums of whole numbers are exact, whatever their order."""


class SingleRounding(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes compound operations apart within it, so that each multiplication, sum and quotient is
    rounded by itself.

    Torch's `a + s * b`, `addcmul`, `addcdiv` and `lerp` round once or twice, as the instructions of
    a processor have it, and its fp32 roots are those of a library; IEEE 754 says what one operation
    alone rounds to. Products of matrices and norms add up in any order: here they are exact sums of
    whole numbers, of the largest element and the 19 bits or more below it. So an optimizer of
    torch, and Muon, ends with the same bits on all kinds of processor, unless it is `fused`.

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
        name, kwargs = func._schema.name.removeprefix("aten::"), kwargs or {}
        rule = (
            None
            if "out" in kwargs
            else _RULES.get(name.removeprefix("_foreach_").removesuffix("_"))
        )
        found = rule(name, *args, **kwargs) if rule else NotImplemented
        if found is NotImplemented:
            return func(*args, **kwargs)
        return found if func._schema.returns else None


def _apply(name: str, *operands: Any) -> Any:
    """The operation `name` on tensors, or on lists of them."""
    function = getattr(torch, name, None)
    return function(*operands) if function else getattr(operands[0], name)(*operands[1:])


def _like(name: str, operation: str) -> str:
    """`operation` in the form of `name`: on lists, or in place."""
    return _apart(name, operation) + ("_" if name.endswith("_") else "")


def _apart(name: str, operation: str) -> str:
    return ("_foreach_" if name.startswith("_foreach_") else "") + operation


def _add(name: str, own: Any, other: Any, alpha: Any = 1) -> Any:
    return _apply(name, own, other if alpha == 1 else _apply(_apart(name, "mul"), other, alpha))


def _move(name: str, own: Any, way: Any, factor: Any) -> Any:
    return _apply(_like(name, "add"), own, _apply(_apart(name, "mul"), way, factor))


def _combine(operation: str, name: str, own: Any, one: Any, other: Any, value: Any = 1) -> Any:
    return _move(name, own, _apply(_apart(name, operation), one, other), value)


def _lerp(name: str, own: Any, end: Any, weight: Any) -> Any:
    return _move(name, own, _apply(_apart(name, "sub"), end, own), weight)


def _divide(name: str, own: Any, by: Any, **rest: Any) -> Any:
    """By numbers through their reciprocals, as some devices do."""
    if (
        rest
        or isinstance(by, Tensor)
        or (isinstance(by, Sequence) and any(isinstance(each, Tensor) for each in by))
    ):
        return NotImplemented
    inverse = [
        1 / each if each else math.inf for each in (by if isinstance(by, Sequence) else [by])
    ]
    return _apply(_like(name, "mul"), own, inverse if isinstance(by, Sequence) else inverse[0])


def _root(name: str, own: Any) -> Any:
    """In fp64 and back, which is the root rounded once."""
    several = name.startswith("_foreach_")
    roots = [(each, each.double().sqrt().to(each.dtype)) for each in (own if several else [own])]
    found = [each.copy_(root) if name.endswith("_") else root for each, root in roots]
    return found if several else found[0]


def _whole(tensor: Tensor, bits: int) -> tuple[Tensor, float]:
    """Whole numbers of up to `bits` bits in fp64, and the power of two by which they are
    multiplied."""
    exponent = math.frexp(float(tensor.abs().amax()))[1] - bits
    return (tensor.double() * math.ldexp(1.0, -exponent)).round_(), math.ldexp(1.0, exponent)


def _product(name: str, one: Tensor, other: Tensor) -> Any:
    if not one.is_floating_point() or not one.numel() or not other.numel():
        return NotImplemented
    bits = (_FP64 - len(one.T).bit_length()) // 2
    (rows, scale), (columns, by) = _whole(one, bits), _whole(other, bits)
    return (rows @ columns).mul_(scale * by).to(one.dtype)


def _add_matrices(
    name: str, own: Tensor, one: Tensor, other: Tensor, beta: float = 1, alpha: float = 1
) -> Any:
    product = _product(name, one, other)
    return NotImplemented if product is NotImplemented else own.mul(beta).add_(product.mul_(alpha))


def _norm(name: str, own: Tensor, order: float = 2, dim: Any = None, **rest: Any) -> Any:
    if order != 2 or dim is not None or rest or not own.numel():
        return NotImplemented
    numbers, scale = _whole(own, (_INT64 - own.numel().bit_length()) // 2)
    return own.new_tensor(math.sqrt(int(numbers.long().square_().sum())) * scale)


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
"""By the name of the operation, without the marks of lists and of work in place."""
