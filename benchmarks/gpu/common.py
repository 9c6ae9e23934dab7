"""The parts share this: a job with its device and its findings, the clock of a device, engines and shapes."""

import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from benchmarks.gpu.moved import bytes_of, label
from torch import nn

import detonation as dt
from detonation.cluster.network.loopback import LoopbackCommunicator

ENGINES = ("triton", "torch")
"""The engines of a step on an accelerator; `triton` only where it is the engine that `replicate` chooses."""

TIME_WAS_UP = "was left out: the time was up"


@dataclass
class Findings:
    """The findings of one part, written to `path` after each: a part that is ended leaves those it had.

    table: rows of cells under `columns`. failures: of its checks, whose number is `checks`. headline: one line. began:
    the last attempt that began. files: names of those beside `path` with whole output and tracebacks.
    passed: names of the attempts that passed. left_out: what had no time. kernels: those that the
    part `occupancy` should try. build: see `clock.build_of`.
    """

    path: Path
    title: str = ""
    columns: list[str] = field(default_factory=list)
    table: list[list[str]] = field(default_factory=list)
    checks: int = 0
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    headline: str = ""
    began: str = ""
    files: list[str] = field(default_factory=list)
    done: bool = False
    passed: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    build: str = ""

    def save(self) -> None:
        contents = {key: value for key, value in asdict(self).items() if key != "path"}
        written = self.path.with_suffix(".json.part")
        written.write_text(json.dumps(contents, indent=1))
        written.replace(self.path)

    @property
    def complete(self) -> bool:
        """True if nothing of the part is missing."""
        return self.done and not self.left_out


def read_findings(path: Path) -> Findings | None:
    """The findings of a part, or None where it was never run."""
    return Findings(path, **json.loads(path.read_text())) if path.exists() else None


@dataclass
class Job:
    """One part at work: its device, whether it proves itself at a tiny size, its findings, and the end of its time."""

    device: torch.device
    tiny: bool
    findings: Findings
    ends_at: float

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def has(self, name: str) -> bool:
        """True if an earlier run of this build passed the attempt `name`."""
        return name in self.findings.passed

    def once(self, name: str, act: Callable[[], Any]) -> None:
        """Attempts `act` unless an earlier run of this build passed it."""
        if not self.has(name):
            self.attempt(name, act)

    def leave_out(self, name: str) -> None:
        """Notes an attempt for which there is no time; a later run of the same build makes it."""
        self.findings.left_out.append(name)
        self.note(f"{name} {TIME_WAS_UP}")

    def name_kernel(self, name: str) -> None:
        """Names a kernel for the part `occupancy`."""
        if name not in self.findings.kernels:
            self.findings.kernels.append(name)

    def left_s(self) -> float:
        """Seconds until the part should be done."""
        return self.ends_at - time.monotonic()

    def row(self, **cells: object) -> None:
        """Adds a row to the table; the first one names the columns."""
        found = self.findings
        found.columns = found.columns or [name.replace("_", " ") for name in cells]
        found.table.append([_text(value) for value in cells.values()])
        found.save()
        print(
            "  " + "  ".join(f"{name} {_text(value)}" for name, value in cells.items()), flush=True
        )

    def file(self, kind: str) -> Path:
        """A file of this part beside its findings, which the report names."""
        path = self.findings.path.with_suffix(f".{kind}")
        if path.name not in self.findings.files:
            self.findings.files.append(path.name)
            path.unlink(missing_ok=True)
        return path

    def check(self, name: str, holds: bool, seen: object = "", whole: str = "") -> None:
        """Counts a check, and keeps the line of one that fails, and its `whole` traceback in a file."""
        self.findings.checks += 1
        if not holds:
            self.findings.failures.append(f"{name}: {seen}" if seen != "" else name)
            print(f"  FAILED {self.findings.failures[-1]}", flush=True)
            if whole:
                with self.file("errors.txt").open("a") as file:
                    file.write(f"{self.findings.failures[-1]}\n\n{whole.rstrip()}\n\n\n")
        self.findings.save()

    def attempt(self, name: str, act: Callable[[], Any]) -> Any:
        """The result of `act`; an exception is a failed check, its traceback goes to a file, and the part goes on."""
        self.findings.began = name
        self.findings.save()
        try:
            result = act()
        except Exception as error:
            lines = str(error).strip().splitlines()
            seen = " ... ".join(
                dict.fromkeys([*lines[:1], *lines[-1:]])
            )  # triton's first line is a place alone
            self.check(name, False, f"{type(error).__name__}: {seen}"[:300], traceback.format_exc())
            if self.on_gpu:
                torch.cuda.empty_cache()
            return None
        self.findings.passed.append(name)
        self.check(name, True)
        return result

    def note(self, text: str) -> None:
        """Adds a line under the table."""
        self.findings.notes.append(text)
        self.findings.save()
        print(f"  {text}", flush=True)

    def headline(self, text: str) -> None:
        """Sets the line of the part in the last table."""
        self.findings.headline = text
        self.findings.save()


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(act: Callable[[], Any], device: torch.device) -> float:
    """The seconds of `act` on the device, by its events on a GPU and by the clock elsewhere."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        act()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    at = time.perf_counter()
    act()
    return time.perf_counter() - at


def cold_cache(device: torch.device) -> Callable[[], Any]:
    """Writes over the caches of a GPU, of which none holds as much; does nothing elsewhere."""
    return (
        torch.empty(2**28, dtype=torch.uint8, device=device).zero_
        if device.type == "cuda"
        else lambda: None
    )


def median_s(
    act: Callable[[], Any],
    device: torch.device,
    times: int = 50,
    warm: int = 3,
    most_s: float = 5.0,
    before: Callable[[], Any] = lambda: None,
) -> float:
    """The median seconds of `act` on the device, and of nothing that `before` does there each time.

    Fewer than `times` are taken where they would last longer than `most_s`, but at least five.
    """
    for _ in range(warm):
        act()
    synchronize(device)
    seconds: list[float] = []
    began = time.monotonic()
    while len(seconds) < times and (len(seconds) < 5 or time.monotonic() - began < most_s):
        before()
        seconds.append(seconds_of(act, device))
    return statistics.median(seconds)


def copy_bandwidth(device: torch.device, nbytes: int) -> float:
    """Bytes per second that a copy inside the device's memory moves: read and written."""
    source = torch.ones(nbytes // 4, device=device)
    target = torch.empty_like(source)
    return (
        2
        * nbytes
        / median_s(lambda: target.copy_(source), device, times=20, before=cold_cache(device))
    )


@dataclass
class Stepper:
    """A model with gradients and its optimizer, of which one step is measured.

    gradients: copies, because a scheme may write the update in their place.
    """

    model: nn.ParameterList
    gradients: list[torch.Tensor]
    optimizer: torch.optim.Optimizer
    engine: str

    def step(self) -> None:
        """One step, on the gradients that the last one left: to restore them would add a pass of its own."""
        self.optimizer.step()

    def renew(self) -> None:
        """Puts the gradients back, as a backward pass would."""
        for parameter, gradient in zip(self.model, self.gradients, strict=True):
            parameter.grad = gradient.clone()


def stepper(
    shapes: Sequence[tuple[int, ...]],
    device: torch.device,
    scheme: dt.schemes.Scheme | None,
    engine: str = "torch",
    dtype: torch.dtype = torch.float32,
    base: Callable[[Any], torch.optim.Optimizer] | None = None,
    replicas: int = 2,
    communicator: LoopbackCommunicator | None = None,
) -> Stepper | None:
    """A step of `scheme` among `replicas` over a loopback; of `base` alone without a scheme.

    Args:
        communicator: Another loopback, of as many replicas as it has.

    Returns:
        None where `engine` is "triton" and `replicate` chooses another.
    """
    torch.manual_seed(0)
    model = nn.ParameterList(
        [torch.randn(shape, device=device, dtype=dtype) * 0.02 for shape in shapes]
    )
    gradients = [torch.randn_like(parameter) for parameter in model]
    for parameter, gradient in zip(model, gradients, strict=True):
        parameter.grad = gradient.clone()
    made = (base or (lambda params: dt.SignSGD(params, lr=1e-4)))(model.parameters())
    if scheme is None:
        return Stepper(model, gradients, made, "torch")
    kernels = engine == "triton"
    network = communicator or LoopbackCommunicator(replicas)
    optimizer = dt.replicate(made, model, network, scheme, kernels=kernels)
    replicators = optimizer.build()
    if not replicators:  # `none` talks to nobody
        return Stepper(model, gradients, optimizer, engine)
    chosen = replicators[0].channel.engine
    if kernels and "triton" not in chosen.name:
        return None
    return Stepper(model, gradients, optimizer, engine)


def olmo2_shapes(width: int, layers: int, inner: int, tokens: int) -> list[tuple[int, ...]]:
    """The parameter shapes of an OLMo2 model with untied embeddings."""
    layer = [(width, width)] * 4 + [(width,)] * 4 + [(inner, width)] * 2 + [(width, inner)]
    return [(tokens, width), *layer * layers, (width,), (tokens, width)]


SIZES = {
    "tiny": olmo2_shapes(64, 2, 128, 256),
    "8M": olmo2_shapes(256, 4, 1024, 7_168),
    "125M": olmo2_shapes(768, 10, 2048, 35_000),
    "1.2B": olmo2_shapes(2048, 16, 8192, 32_000),
}
"""Parameter shapes by the name of the size."""


def numel(shapes: Sequence[tuple[int, ...]]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)


@contextmanager
def instead_of_launches(
    act: Callable[[str, Callable[..., Any], float], None], numel: int
) -> Iterator[None]:
    """Within it `act` takes the place of each launch of a step of `numel` parameters: it gets the label of the kernel,
    the launch, and the bytes that this must move."""
    from detonation.kernels.gpu import inspection, launches, launching

    def given(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
        values = dict(zip(kernel.arg_names, arguments, strict=False)) | constants
        launch = partial(launching.launch, kernel, programs, *arguments, **constants)
        act(
            label(kernel.__name__, values),
            launch,
            bytes_of(kernel.__name__, values, programs, numel),
        )

    with patch.object(launches, "launch", given), patch.object(inspection, "launch", given):
        yield


def no_waits(device: torch.device) -> AbstractContextManager[None]:
    """Within it an operation that makes the host wait for the GPU raises."""
    return _NoWaits() if device.type == "cuda" else nullcontext()


class _NoWaits(AbstractContextManager[None]):
    def __enter__(self) -> None:
        torch.cuda.set_sync_debug_mode("error")

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_sync_debug_mode("default")
