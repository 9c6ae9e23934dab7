"""Compiles the C++ kernels with g++ on first use, keeps the library in a cache of the user, and
calls it through ctypes.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from functools import lru_cache, partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from detonation.kernels.cache import cached

if TYPE_CHECKING:
    from torch import Tensor

KERNEL_CHUNKS = (16, 32, 64, 128, 256)
"""Chunk lengths for which the DCT kernels are compiled."""
_SOURCES = tuple(sorted(Path(__file__).parent.glob("*.cpp")))
_HEADERS = tuple(sorted(Path(__file__).parent.glob("*.h")))
_FLAGS = (
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-std=c++17",
    "-shared",
    "-fPIC",
)
_log = logging.getLogger(__name__)


SignRate = tuple[float, float]
"""The factors (shrink, lr) of a step by signs: `weight = shrink * weight - lr * sign`."""


_P = ctypes.c_void_p
_I = ctypes.c_int64
_F = ctypes.c_float
_N = ctypes.c_int
_ARGUMENTS: dict[str, list[Any]] = {
    "encode": [_P, _I, _N, _P, _P, _F, _F, _N, _N, _P, _P, _P, _N, _P],
    "release": [_P, _I, _N, _P, _F, _N, _N, _P, _P, _I, _N, _P],
    "decode": [_P, _P, _I, _N, _P, _P, _P, _I, _N, _N, _N, _N, _N, _F, _P, _P, _P],
    "topk": [_P, _I, _N, _N, _P],
    "product": [_P, _I, _N, _P, _P],
    "beyond": [_P, _P, _I, _F],
    "sign_step": [_P, _P, _I, _F, _F],
    "pack": [_P, _I, _I, _N, _N, _P, _I],
    "unpack": [_P, _I, _I, _I, _I, _N, _N, _P],
    "mark": [_P, _I, _I, _N, _N, _N, _P],
    "marked": [_P, _I, _I, _I, _N, _N, _N, _P],
    "checksums": [_P, _I, _I, _I, _I, _P],
    "check_indices": [_P, _I, _I, _I, _N, _N, _N, _P],
    "encode_powers": [_P, _I, _I, _P, _P, _P, _I, _N],
    "look_up": [_P, _I, _I, _I, _I, _N, _I, _P, _I, _N, _P],
}
"""Argument types of each C++ function: pointers, 64-bit counts, floats and ints."""


class Library:
    """The compiled functions. All tensors are contiguous and on the CPU. The C++ source documents
    each function.

    name: identifies the source, the compiler and the processor. Replicas with different names may
    round differently.
    """

    def __init__(self, path: Path) -> None:
        self.name = path.stem
        self._library = ctypes.CDLL(str(path))
        for function, arguments in _ARGUMENTS.items():
            getattr(self._library, f"detonation_{function}").argtypes = arguments
        self._library.detonation_beyond.restype = ctypes.c_int64

    def encode(
        self,
        residual: Tensor,
        gradients: Sequence[Tensor | None],
        numel: ctypes.Array[ctypes.c_int64],
        decay: float,
        release: float,
        width: int,
        basis: Tensor,
        k: int,
        values: Tensor,
        statistics: Tensor | None,
        negative_zeros: bool,
        indices: Tensor,
    ) -> None:
        """Adds the gradients to the decayed residual of unsent values, and selects the `k` largest
        DCT coefficients in each row of the sum.

        Args:
            residual: Changed in place; `release` times the selected part is subtracted at once.
            gradients: fp32, one tensor per parameter; None counts as zeros.
            width: Bits per index; 0 for a bitmap.
            values, statistics, indices: Outputs for the selected coefficients; contiguous. With
                `statistics` the values are signs.

        Shapes: residual `[rows, chunk]`, basis `[chunk, chunk]`, values `[rows, k]` fp32; all else
        `[nbytes]` uint8.
        """
        rows, chunk = residual.shape
        pointers = (ctypes.c_void_p * len(gradients))()  # null for each gradient that is None
        for number, gradient in enumerate(gradients):
            if gradient is not None:
                pointers[number] = gradient.data_ptr()
        signs_at = None
        if statistics is not None:
            signs_at = statistics.data_ptr()
        status = self._library.detonation_encode(
            residual.data_ptr(), rows, chunk, pointers, numel, decay, release, k, width,
            basis.data_ptr(),
            values.data_ptr(), signs_at,
            negative_zeros,
            indices.data_ptr(),
        )  # fmt: skip
        assert status == 0

    def release(
        self,
        residual: Tensor,
        numel: ctypes.Array[ctypes.c_int64],
        share: float,
        values: Tensor,
        indices: Tensor,
        width: int,
        few: bool,
        basis: Tensor,
    ) -> None:
        """Subtracts the sent `values`, times `share`, from the residual of unsent values. `decode`
        describes `few` and `basis`.
        """
        # shapes, as in `encode`: residual [rows, chunk], values [rows, k], indices [nbytes] uint8
        rows, chunk = residual.shape
        status = self._library.detonation_release(
            residual.data_ptr(), rows, chunk, numel, share, values.shape[1], width,
            values.data_ptr(),
            indices.data_ptr(), indices.nbytes, few, basis.data_ptr(),
        )  # fmt: skip
        assert status == 0

    def decode(
        self,
        targets: Sequence[Tensor],
        shape: tuple[int, int, int],
        values: Sequence[Tensor],
        magnitudes: Sequence[Tensor] | None,
        indices: Sequence[Tensor],
        width: int,
        few: bool,
        nonzero: bool,
        basis: Tensor,
        rates: Sequence[SignRate] | None = None,
    ) -> None:
        """Writes the mean of messages into `targets`. With `rates`, `targets` are weights, and each
        weight moves by the lr of its parameter, against the sign of the mean.

        Args:
            targets: fp32, one tensor per parameter.
            shape: Number of rows, coefficients per row, and selected coefficients per row.
            magnitudes: Magnitude of each block, if the values are signs.
            few: True if each row is a single sum over the coefficients of all replicas, of which
                there are at most `chunk` (`scatter_sum.weighted_sum`). Otherwise coefficients are
                aggregated first (`scatter_sum.product_in_order`).
            nonzero: True if each mean is over the replicas that sent a nonzero coefficient, instead
                of over all replicas.

        Shapes: basis `[chunk, chunk]`, values `[rows, k]`, magnitudes `[blocks]` fp32; signs,
        indices `[nbytes]` uint8.
        """
        assert all(
            tensor.is_contiguous() for tensor in (*targets, *values, *(magnitudes or ()), *indices)
        )
        rows, chunk, k = shape
        count = len(targets)
        shrink = None
        lr = None
        if rates is not None:
            shrink = (ctypes.c_float * count)(*[rate[0] for rate in rates])
            lr = (ctypes.c_float * count)(*[rate[1] for rate in rates])
        into = (ctypes.c_void_p * count)(*[target.data_ptr() for target in targets])
        sent = (ctypes.c_void_p * len(values))(*[each.data_ptr() for each in values])
        places = (ctypes.c_void_p * len(indices))(*[each.data_ptr() for each in indices])
        sizes = None
        if magnitudes is not None:
            sizes = (ctypes.c_void_p * len(magnitudes))(*[each.data_ptr() for each in magnitudes])
        numel = (ctypes.c_int64 * count)(*[t.numel() for t in targets])
        status = self._library.detonation_decode(
            into, numel, rows, chunk, sent, sizes, places, indices[0].nbytes, len(values), k,
            width, few, nonzero,
            1 / len(values), basis.data_ptr(), shrink, lr,
        )  # fmt: skip
        assert status == 0

    def topk(self, coefficients: Tensor, k: int) -> Tensor:
        """Returns the indices of the `k` largest magnitudes in each row, in rising order; see
        `topk_indices`.
        """
        # shapes: [rows, chunk] fp32 -> [rows, k] uint8; chunk is one of KERNEL_CHUNKS
        rows, chunk = coefficients.shape
        found = torch.empty(rows, k, dtype=torch.uint8, device="cpu")
        status = self._library.detonation_topk(
            coefficients.data_ptr(), rows, chunk, k, found.data_ptr()
        )
        assert status == 0
        return found

    def product(self, coefficients: Tensor, basis: Tensor) -> Tensor:
        """Computes `coefficients @ basis` as a chain of fused multiply-adds, in the order of the
        basis vectors.
        """
        # shapes: [rows, chunk], [chunk, chunk] fp32 -> [rows, chunk]; chunk is one of KERNEL_CHUNKS
        rows, chunk = coefficients.shape
        out = torch.empty_like(coefficients)
        status = self._library.detonation_product(
            coefficients.data_ptr(), rows, chunk, basis.data_ptr(), out.data_ptr()
        )
        assert status == 0
        return out

    def beyond(self, tensors: Sequence[Tensor], limit: float) -> int:
        """Returns the index of the first fp32 tensor that contains NaN or a magnitude above
        `limit`; -1 if there is no such tensor.
        """
        count = len(tensors)
        pointers = (ctypes.c_void_p * count)(*[tensor.data_ptr() for tensor in tensors])
        numel = (ctypes.c_int64 * count)(*[tensor.numel() for tensor in tensors])
        return int(self._library.detonation_beyond(pointers, numel, count, limit))

    def sign_step(self, weights: Tensor, directions: Tensor, shrink: float, lr: float) -> None:
        """Computes `weights = shrink * weights - lr * sign(directions)` in fp32, in place."""
        self._library.detonation_sign_step(
            weights.data_ptr(), directions.data_ptr(), weights.numel(), shrink, lr
        )

    def pack(self, numbers: Tensor, width: int, nbytes: int) -> Tensor:
        """Packs numbers of `width` bits without gaps, each line separately."""
        # shapes: [..., n] integers -> [..., nbytes] uint8
        *lines, count = numbers.shape
        is_narrow = width <= 8
        plain = numbers.to(torch.uint8 if is_narrow else torch.int64).contiguous()
        packed = torch.empty(*lines, nbytes, dtype=torch.uint8, device="cpu")
        self._library.detonation_pack(
            plain.data_ptr(), prod(lines), count, is_narrow, width, packed.data_ptr(), nbytes
        )
        return packed

    def unpack(self, packed: Tensor, count: int, width: int) -> Tensor:
        """Unpacks the numbers that `pack` has packed."""
        # shapes: [..., nbytes] uint8 -> [..., count] uint8 or, above 8 bits, int64
        lines = packed.unsqueeze(0).flatten(0, -2)
        is_narrow = width <= 8
        shape = (*packed.shape[:-1], count)
        numbers = torch.empty(shape, dtype=torch.uint8 if is_narrow else torch.int64, device="cpu")
        at = lines.data_ptr(), len(lines), lines.stride(0)
        self._library.detonation_unpack(
            *at, lines.shape[1], count, is_narrow, width, numbers.data_ptr()
        )
        return numbers

    def mark(self, indices: Tensor, chunk: int) -> Tensor:
        """Returns a bitmap of rows of `chunk` bits, in which the bits at `indices` are set."""
        # shapes: [..., rows, k] integers -> [..., ceil(rows * chunk / 8)] uint8
        *lines, rows, k = indices.shape
        is_narrow = chunk <= 256
        plain = indices.to(torch.uint8 if is_narrow else torch.int64).contiguous()
        bitmap = torch.empty(*lines, (rows * chunk + 7) // 8, dtype=torch.uint8, device="cpu")
        self._library.detonation_mark(
            plain.data_ptr(), prod(lines), rows, k, chunk, is_narrow, bitmap.data_ptr()
        )
        return bitmap

    def marked(self, bitmap: Tensor, rows: int, k: int, chunk: int) -> Tensor:
        """Returns the indices of the bits that are set in a bitmap, in order."""
        # shapes as in `mark`; the indices are uint8 for a chunk up to 256, else int64
        lines = bitmap.unsqueeze(0).flatten(0, -2)
        is_narrow = chunk <= 256
        shape = (*bitmap.shape[:-1], rows, k)
        indices = torch.empty(shape, dtype=torch.uint8 if is_narrow else torch.int64, device="cpu")
        at = lines.data_ptr(), len(lines), lines.stride(0)
        self._library.detonation_marked(*at, rows, k, chunk, is_narrow, indices.data_ptr())
        return indices

    def checksums(self, messages: Tensor, skipped: int = -1) -> Tensor:
        """Returns a checksum of each message: the sum of its 32-bit words, each multiplied by an
        odd number that depends on the position of the word.

        The eight bytes of each message from byte `skipped` on count as zeros; they must be in the
        first 4,096 bytes. If `skipped` is -1, all bytes count as they are.
        """
        found = torch.empty(len(messages), dtype=torch.int64, device="cpu")
        at = messages.data_ptr(), len(messages), messages.stride(0)
        self._library.detonation_checksums(*at, messages.shape[1], skipped, found.data_ptr())
        return found

    def check_indices(self, packed: Tensor, rows: int, k: int, chunk: int, width: int) -> Tensor:
        """Checks the indices of each message; the result 0 means that they are valid. 1 means that
        a packed index is not below `chunk`, and 2 that the indices of a row do not rise. For
        bitmaps (`width` 0), 2 means that the number of set bits in a row is not `k`.

        Shapes: `[messages, nbytes]` uint8 -> `[messages]` int64.
        """
        found = torch.empty(len(packed), dtype=torch.int64, device="cpu")
        at = packed.data_ptr(), len(packed), packed.stride(0)
        self._library.detonation_check_indices(*at, rows, k, chunk, width, found.data_ptr())
        return found

    def encode_powers(
        self,
        values: Tensor,
        limits: Tensor,
        packed: Tensor,
        statistics: Tensor,
        subtract: bool = False,
    ) -> None:
        """Encodes lines of values as `codebooks.E3M0` does. `octave_limits` describes `limits`.

        Args:
            packed, statistics: Outputs, whose lines lie at a constant distance in memory.
            subtract: Whether to subtract from `values` what was sent.
        """
        # shapes: values [lines, n] and limits [6] fp32, packed and statistics [lines, nbytes] uint8
        self._library.detonation_encode_powers(
            values.data_ptr(), *values.shape, limits.data_ptr(),
            packed.data_ptr(), statistics.data_ptr(), packed.stride(0), subtract,
        )  # fmt: skip

    def look_up(
        self,
        packed: Tensor,
        levels: Tensor,
        first: int,
        count: int,
        width: int,
        block: int,
        mean: bool = False,
    ) -> Tensor:
        """Returns the level of each packed code of up to 4 bits; see `BlockCodebook.read`."""
        # shapes: [..., nbytes] uint8, levels [..., blocks, 2**width] fp32 -> [..., count] fp32
        # For the mean of all messages, the shape of the result is [1, count].
        lines = packed.unsqueeze(0).flatten(0, -2)
        of_lines = levels.unsqueeze(0).flatten(0, -3)
        written = packed.shape[:-1]
        if mean:
            written = torch.Size([1])
        values = torch.empty(*written, count, dtype=torch.float32, device="cpu")
        at = lines.data_ptr(), len(lines), lines.stride(0), lines.shape[1]
        begin = of_lines[:, first:]
        self._library.detonation_look_up(
            *at, count, width, block, begin.data_ptr(), begin.stride(0), mean, values.data_ptr()
        )
        return values


@lru_cache
def load_library() -> Library | None:
    """Returns the library, which the first call compiles. Returns None and logs the reason if g++
    is missing or fails.
    """
    compiler = shutil.which("g++")
    if compiler is None or os.name != "posix":
        _log.info("plain torch replaces the C++ kernels: there is no g++")
        return None
    try:
        name = f"native-{_identity(compiler)}.so"
        library = cached(name, partial(_compile, compiler), _load)
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("plain torch replaces the C++ kernels: %s", error)
        return None
    assert isinstance(library, Library)
    return library


def _load(path: Path) -> Library:
    try:
        return Library(path)
    except AttributeError as error:  # the library lacks a function
        raise OSError(f"{path} is not the library: {error}. Check g++") from error


def _compile(compiler: str, path: Path) -> None:
    command = [compiler, *_FLAGS, "-o", str(path), *map(str, _SOURCES)]
    try:
        # a long time limit, because compiling takes 13 s even on an idle machine
        subprocess.run(command, check=True, capture_output=True, timeout=300)
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip().splitlines()
        said = said or [f"code {error.returncode}"]
        for line in said:
            # an OSError lets the caller try another directory, which may have free space
            if "No space left" in line or "quota exceeded" in line:
                raise OSError(f"{compiler} failed: {line}") from error
        # report the first error only, because it causes the other errors
        errors = [line for line in said if "error" in line] or said
        raise subprocess.SubprocessError(f"{compiler} failed: {errors[0]}") from error


def _identity(compiler: str) -> str:
    """Returns a name that identifies the machine code. The name depends on compiler and processor,
    because machines of different kinds may share a home directory.
    """
    version = subprocess.run(
        [compiler, "--version"], check=True, capture_output=True, timeout=30
    ).stdout
    cpu = Path("/proc/cpuinfo")
    features = next(
        (line for line in cpu.read_text().splitlines() if line.startswith(("flags", "Features"))),
        "",
    )
    parts = [
        *(source.read_bytes() for source in (*_SOURCES, *_HEADERS)),
        " ".join(_FLAGS).encode(),
        version,
        features.encode(),
        platform.machine().encode(),
    ]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
