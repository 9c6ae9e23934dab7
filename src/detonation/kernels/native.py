"""DCT and top-k in C++ for the CPU: compiled with g++ on first use, kept in the user's cache, called through ctypes."""

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

CHUNKS = (16, 32, 64, 128, 256)
_SOURCES = tuple(sorted(Path(__file__).parent.glob("*.cpp")))
_HEADERS = tuple(sorted(Path(__file__).parent.glob("*.h")))
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-std=c++17", "-shared", "-fPIC")
_log = logging.getLogger(__name__)


Pace = tuple[float, float]
"""How a weight follows signs: `shrink * weight - lr * sign`, with shrink and lr."""


class Library:
    """The compiled functions. All tensors are on the CPU and contiguous; see the source for what each does.

    name: of the source, the compiler and the processor: replicas whose names differ may round differently.
    """

    def __init__(self, path: Path) -> None:
        self.name = path.stem
        self._library = ctypes.CDLL(str(path))
        self._library.detonation_beyond.restype = ctypes.c_int64
        self._library.detonation_checksum.restype = ctypes.c_int64

    def encode(
        self,
        residual: Tensor,  # [rows, chunk], changed
        gradients: Sequence[Tensor | None],
        numel: Sequence[int],
        decay: float,
        release: float,
        topk: int,
        width: int,
        nbytes: int,
    ) -> tuple[Tensor, Tensor]:
        """Adds the gradients to the decayed residual; its `topk` largest DCT coefficients, `[rows, topk]`, and their
        columns in `nbytes` bytes, as numbers of `width` bits or, where that is 0, as a bitmap."""
        rows, chunk = residual.shape
        values, columns = torch.empty(rows, topk), torch.empty(nbytes, dtype=torch.uint8)
        status = self._library.detonation_encode(
            _pointer(residual), _long(rows), chunk, _pointers(gradients), _longs(numel), ctypes.c_float(decay),
            ctypes.c_float(release), topk, width, _pointer(values), _pointer(columns),
        )  # fmt: skip
        assert status == 0
        return values, columns

    def release(
        self, residual: Tensor, numel: Sequence[int], share: float, values: Tensor, columns: Tensor, width: int
    ) -> None:
        """Takes `share` of the values, at columns as `encode` returns them, out of the residual."""
        rows, chunk = residual.shape
        status = self._library.detonation_release(
            _pointer(residual), _long(rows), chunk, _longs(numel), ctypes.c_float(share), values.shape[1], width,
            _pointer(values), _pointer(columns), _long(columns.nbytes),
        )  # fmt: skip
        assert status == 0

    def decode(
        self,
        targets: Sequence[Tensor],
        chunk: int,
        values: Sequence[Tensor],
        columns: Sequence[Tensor],
        width: int,
        senders: bool,
        paces: Sequence[Pace] | None = None,
    ) -> None:
        """Makes `targets`, one a parameter, the mean of messages, over all or over the senders of a coefficient; or,
        with `paces`, lets them, as weights, follow its signs."""
        rows, topk = values[0].shape
        shrink, lr = (None, None) if paces is None else (_floats([s for s, _ in paces]), _floats([r for _, r in paces]))
        status = self._library.detonation_decode(
            _pointers(targets), _longs([t.numel() for t in targets]), _long(rows), chunk, _pointers(values),
            _pointers(columns), _long(columns[0].nbytes), len(values), topk, width, int(senders),
            shrink, lr,
        )  # fmt: skip
        assert status == 0

    def beyond(self, tensors: Sequence[Tensor], limit: float) -> int:
        """The number of the first of `tensors` (fp32) that holds NaN or a magnitude above `limit`; -1 where none."""
        numel, most = _longs([tensor.numel() for tensor in tensors]), ctypes.c_float(limit)
        return int(self._library.detonation_beyond(_pointers(tensors), numel, _long(len(tensors)), most))

    def sign_step(self, weights: Tensor, directions: Tensor, shrink: float, lr: float) -> None:
        """`weights = shrink * weights - lr * sign(directions)`, both fp32."""
        self._library.detonation_sign_step(
            _pointer(weights), _pointer(directions), _long(weights.numel()), ctypes.c_float(shrink), ctypes.c_float(lr)
        )

    def pack(self, numbers: Tensor, width: int, nbytes: int) -> Tensor:
        """`numbers`, int64, as `nbytes` bytes of `width` bits each."""
        packed = torch.empty(nbytes, dtype=torch.uint8)
        self._library.detonation_pack(_pointer(numbers), _long(len(numbers)), width, _pointer(packed))
        return packed

    def unpack(self, packed: Tensor, count: int, width: int) -> Tensor:
        """The inverse of `pack`."""
        numbers = torch.empty(count, dtype=torch.int64)
        self._library.detonation_unpack(_pointer(packed), _long(count), width, _pointer(numbers))
        return numbers

    def mark(self, columns: Tensor, chunk: int) -> Tensor:
        """The bitmap of rows of `chunk` bits in which `columns` are set."""
        rows, kept = columns.shape
        bitmap = torch.empty((rows * chunk + 7) // 8, dtype=torch.uint8)
        self._library.detonation_mark(_pointer(columns), _long(rows), kept, chunk, _pointer(bitmap))
        return bitmap

    def marked(self, bitmap: Tensor, rows: int, kept: int, chunk: int) -> Tensor:
        """The columns that are set in a bitmap, in order."""
        columns = torch.empty(rows, kept, dtype=torch.int64)
        self._library.detonation_marked(_pointer(bitmap), _long(rows), kept, chunk, _pointer(columns))
        return columns

    def checksum(self, part: Tensor, first: int) -> int:
        """The sum of the 32-bit words of `part`, each times an odd number that depends on where it is, from `first`."""
        return int(self._library.detonation_checksum(_pointer(part), _long(part.nbytes), _long(first)))

    def check_columns(self, packed: Tensor, rows: int, kept: int, chunk: int, width: int) -> int:
        """1 where a packed column is not below `chunk`, 2 where those of a row do not rise, else 0."""
        return int(self._library.detonation_check_columns(_pointer(packed), _long(rows), kept, chunk, width))

    def check_bitmap(self, bitmap: Tensor, rows: int, kept: int, chunk: int) -> int:
        """2 where a row has not exactly `kept` bits set, else 0."""
        return int(self._library.detonation_check_bitmap(_pointer(bitmap), _long(rows), kept, chunk))


@lru_cache
def load() -> Library | None:
    """The library, compiled if it is not yet; None where there is no g++ or it fails (which is logged)."""
    compiler = shutil.which("g++")
    if compiler is None or os.name != "posix":
        return None
    try:
        path = _cache() / f"native-{_identity(compiler)}.so"
        if not path.exists():
            _compile(compiler, path)
        return Library(path)
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("the native kernels are not used: %s", error)
        return None


def load_for(*tensors: Tensor) -> Library | None:
    """The library where it can take all `tensors` (contiguous, on the CPU) and they are enough to be worth a call."""
    if sum(tensor.numel() for tensor in tensors) < 4096:
        return None
    return load() if all(t.device.type == "cpu" and t.is_contiguous() for t in tensors) else None


def _compile(compiler: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one rank of a node compiles, the others wait for it
        if path.exists():
            return
        part = path.with_suffix(f".{os.getpid()}.part")
        command = [compiler, *_FLAGS, "-o", str(part), *map(str, _SOURCES)]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        part.replace(path)


def _identity(compiler: str) -> str:
    """What the machine code depends on: a home directory may be shared by machines that differ."""
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=30).stdout
    cpu = Path("/proc/cpuinfo")
    features = next((line for line in cpu.read_text().splitlines() if line.startswith(("flags", "Features"))), "")
    parts = [
        *(source.read_bytes() for source in (*_SOURCES, *_HEADERS)),
        " ".join(_FLAGS).encode(),
        version,
        features.encode(),
        platform.machine().encode(),
    ]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _cache() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "detonation" / "kernels"


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    return ctypes.c_void_p(tensor.data_ptr())


def _pointers(tensors: Sequence[Tensor | None]) -> "ctypes.Array[ctypes.c_void_p]":
    return (ctypes.c_void_p * len(tensors))(*[None if t is None else _pointer(t).value for t in tensors])


def _long(number: int) -> ctypes.c_int64:
    return ctypes.c_int64(number)


def _longs(numbers: Sequence[int]) -> "ctypes.Array[ctypes.c_int64]":
    return (ctypes.c_int64 * len(numbers))(*numbers)


def _floats(numbers: Sequence[float]) -> "ctypes.Array[ctypes.c_float]":
    return (ctypes.c_float * len(numbers))(*numbers)
