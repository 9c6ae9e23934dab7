"""Launches kernels with their arguments and tables, without blocking the host."""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from detonation.kernels.gpu.addressing import BF16, FP16, FP32, wide

# checks the type of a kernel, because several values of TRITON_INTERPRET mean true
INTERPRETED = not isinstance(wide, triton.JITFunction)
"""True if Triton's interpreter runs the kernels. The interpreter needs the same time for few
numbers as for many.
"""
KIND_OF = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}
"""The dtypes that kernels read and write, each with its bit."""
# True if `launch` starts compiled kernels without Triton's JIT.
# False with ROCm, because the JIT of ROCm also specialises on tensor sizes.
_DIRECT = not INTERPRETED and torch.version.hip is None
_compiled: dict[
    Hashable, tuple[Any, list[Any]]
] = {}  # functions that start compiled kernels, and the constants that they get after the arguments
launch_counts: Counter[str] = Counter()
"""How often each kernel was launched, and how often a table of addresses was copied to a device."""


@dataclass(frozen=True)
class Coding:
    """The compile-time constants of a codec in kernels.

    basis: "dct" or "none". selection: "topk", "random", "striding" or "everything". precision:
    "fp32", "bf16", "sign", "2bit", "4bit" or "int8". block: number of values that are encoded
    together. width: bits of an index; 0 if no indices are sent. bitmap: a row has a bit for each
    coefficient.
    """

    chunk: int
    k: int
    basis: str
    selection: str
    precision: str
    block: int
    width: int
    bitmap: bool

    @cached_property
    def columns(self) -> int:
        """Returns the length of a row in kernels: a power of two, at least 16 for a matrix
        product.
        """
        columns = 1 << (self.chunk - 1).bit_length()
        if self.basis == "dct":
            return max(16, columns)
        return columns

    @cached_property
    def constants(self) -> dict[str, Any]:
        """Returns the constants that the encode and decode kernels share."""
        width = self.width
        if self.bitmap:
            width = 1
        return {
            "CHUNK": self.chunk,
            "COLUMNS": self.columns,
            "K": self.k,
            "BASIS": self.basis,
            "SELECTION": self.selection,
            "PRECISION": self.precision,
            "BLOCK": self.block,
            "WIDTH": width,
            "BITMAP": self.bitmap,
        }

    @cached_property
    def arrived_constants(self) -> dict[str, Any]:
        """Returns the constants of `encode_kernel` for the received messages that it aggregates."""
        names = ("K", "SELECTION", "PRECISION", "BLOCK", "WIDTH", "BITMAP")
        return {f"ARRIVED_{name}": self.constants[name] for name in names}


@dataclass(frozen=True)
class Places:
    """Positions of the parts of a message, in bytes from its first value on, and the assignment of
    rows to messages; see `dealt_row`.
    """

    statistics_at: int
    indices_at: int
    count: int = 1
    turns: int = 0
    run: int = 1
    owned: int = 0


class Slots:
    """The positions of many tensors in one flat (the matrix of all rows): for each tensor its first
    row and its number of coordinates, in device memory.
    """

    def __init__(
        self, starts: Sequence[int], numels: Sequence[int], rows: int, device: torch.device
    ) -> None:
        self.count = len(starts)
        self.rows = rows
        self.device = device
        self.starts = torch.tensor(list(starts), dtype=torch.int64, device=device)
        self.numels = torch.tensor(list(numels), dtype=torch.int64, device=device)
        self.search = len(starts).bit_length()


class Addresses:
    """A table of the addresses and dtypes of tensors, in device memory. The table is copied to the
    device again only if an entry changes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: tuple[int, ...] = ()
        self.kinds = 0
        self.table = torch.zeros(0, dtype=torch.int64, device=device)  # shape [2, tensors]

    def update(self, tensors: Sequence[Tensor | None]) -> "Addresses":
        """Updates the table to `tensors`: each is contiguous with a dtype in `KIND_OF`, or None."""
        addresses = []
        kinds = []
        for tensor in tensors:
            address = 0
            kind = 0
            if tensor is not None and tensor.numel():
                address = tensor.data_ptr()
                kind = KIND_OF[tensor.dtype]
            addresses.append(address)
            kinds.append(kind)
        known = (*addresses, *kinds)
        if known != self._known:
            self._known = known
            self.kinds = 0
            for kind in kinds:
                self.kinds |= kind
            self.table = uploaded(known, torch.int64, self._device)
        return self


def uploaded(numbers: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copies `numbers` to `device` from pinned memory, without waiting for the copy. torch keeps
    the pinned memory until the copy has ended.
    """
    # shape of the result: [numbers]
    launch_counts["upload"] += 1
    if device.type == "meta":
        return torch.empty(len(numbers), dtype=dtype, device=device)
    host = torch.tensor(list(numbers), dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def launch(kernel: Any, programs: int, *arguments: Any, warps: int = 8, **constants: Any) -> None:
    """Starts `programs` programs of a kernel, with `warps` warps each. On the device `meta`, only
    counts the launch.

    Products and sums are rounded separately, as in torch. Only `tl.fma` and `tl.dot` fuse them, on
    every target.
    """
    launch_counts[kernel.__name__] += 1
    device = torch.device("cpu")
    for each in arguments:
        if isinstance(each, Tensor):
            device = each.device
            break
    if device.type == "meta":
        return
    on_device: AbstractContextManager[object] = nullcontext()
    if device.type == "cuda":  # Triton launches on the current device
        on_device = torch.cuda.device(device)
    with on_device:
        key: list[Any] = [id(kernel), device, programs, warps, *constants, *constants.values()]
        # the JIT would inspect each argument, which needs more time than the launch
        if _DIRECT:
            for each in arguments:  # calls no Python function, because calls take time
                if isinstance(each, Tensor):
                    key += (each.dtype, each.data_ptr() % 16)
                else:
                    key.append(_COMPILED_FOR[type(each)](each))
            if known := _compiled.get(tuple(key)):
                start, following = known
                start(*arguments, *following)
                return
        compiled = kernel[(programs,)](
            *arguments, **constants, num_warps=warps, enable_fp_fusion=False
        )
        if _DIRECT:
            _compiled[tuple(key)] = (
                compiled[(programs, 1, 1)],
                [constants[name] for name in kernel.arg_names[len(arguments) :]],
            )


@lru_cache(4096)
def _kind(value: int) -> int:
    return (
        (value == 1) + 2 * (value % 16 == 0) + 4 * (-(2**31) <= value < 2**31) + 8 * (value < 2**63)
    )


_COMPILED_FOR: dict[type, Callable[[Any], Hashable]] = {int: _kind, float: type, bool: type}
"""For each type of an argument, the property on which the JIT specialises. Too many distinctions
are harmless, but too few would start a wrong kernel.

Arguments of other types are tensors.
"""
