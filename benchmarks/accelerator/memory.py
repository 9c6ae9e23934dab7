"""Memory of a step by scheme, in bytes per parameter: kept between steps, and at the peak inside a step.

    python -m benchmarks.accelerator.memory [--schemes demo full ...] [--replicas 2 8] [--millions 268] [--kernels]

Nothing is computed: the parameters are on the device `meta`, which plays an accelerator, and every storage that torch
makes is counted until it is freed. *kept* is what stays between two steps without gradients: weights, the optimizer's
state, and the memory, anchor and pending updates of the scheme. *messages* are those that are sent and received in a
step, as they travel. *peak* is the largest amount at any moment of a step outside AdamW, gradients and messages
included, and *over* the part of it beyond kept, gradients and messages. *base* is the part of the peak inside AdamW
beyond kept and gradients: its own temporaries. SignSGD takes updates from the messages and counts as outside. With
`--kernels` Triton does the step where it can; the message buffers that it keeps are part of *kept* and of *messages*,
which makes *over* negative.
"""

import argparse
import gc
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import detonation as dt
from detonation.core import runtime
from detonation.core.codec import selection
from detonation.core.integrity.fault_counts import FaultCounts
from detonation.core.link.communicator import Communicator

Base = Callable[[Any], torch.optim.Optimizer]


def signs(parameters: Any) -> torch.optim.Optimizer:
    return dt.SignSGD(parameters, lr=1e-3)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=True)


def muon(parameters: Any) -> torch.optim.Optimizer:
    return dt.Muon(parameters, lr=1e-2)


CASES: dict[str, tuple[dt.schemes.Scheme, Base, torch.dtype]] = {
    "none + AdamW (FSDP alone)": (dt.none(), adamw, torch.float32),
    "none + SignSGD": (dt.none(), signs, torch.float32),
    "full + AdamW": (dt.full(), adamw, torch.float32),
    "full bf16 + AdamW": (dt.full("bf16"), adamw, torch.float32),
    "demo 4/64 + SignSGD": (dt.demo(), signs, torch.float32),
    "demo 4/64, bf16 weights": (dt.demo(), signs, torch.bfloat16),
    "demo 4/64 all-gather": (dt.demo(link="all-gather"), signs, torch.float32),
    "demo 4/64 sign, no error feedback": (
        dt.demo(precision="sign", error_feedback=False), signs, torch.float32),
    "demo 32/64 + SignSGD": (dt.demo(topk=32), signs, torch.float32),
    "demo tiles 32/4096": (dt.demo(topk=32, tiles=True), signs, torch.float32),
    "decoupled_adamw 4/64 + AdamW": (dt.schemes.decoupled_adamw(), adamw, torch.float32),
    "random 1/16 + SignSGD": (dt.schemes.random(), signs, torch.float32),
    "random_sign 1/8 + SignSGD": (dt.random_sign(), signs, torch.float32),
    "striding + SignSGD": (dt.schemes.striding(), signs, torch.float32),
    "diloco + AdamW": (dt.diloco(every=4), adamw, torch.float32),
    "diloco int8 + AdamW": (dt.diloco(every=4, precision="int8"), adamw, torch.float32),
    "local_sgd + AdamW": (dt.schemes.local_sgd(every=4), adamw, torch.float32),
    "streaming_diloco 4bit + AdamW": (dt.schemes.streaming_diloco(every=8, fragments=4, delay=1), adamw, torch.float32),
    "muloco 4bit + AdamW": (dt.muloco(every=4), adamw, torch.float32),
    "sparta 1/200 + AdamW": (dt.schemes.sparta(), adamw, torch.float32),
    "sparseloco + AdamW": (dt.schemes.sparseloco(every=4), adamw, torch.float32),
}  # fmt: skip
MULOCO = dt.muloco(
    every=5, precision="2bit", outer_lr=1, outer_momentum=0, aggregate="rescaled_mean"
)
"""The README's choice for Muon on a slow link."""
OF_MUON: dict[str, tuple[dt.schemes.Scheme, Base, torch.dtype]] = {
    "muloco 2bit + Muon": (MULOCO, muon, torch.float32),
    "full + Muon": (dt.full(), muon, torch.float32),
}
"""Cases whose temporaries no law bounds: `rescaled_mean` compares whole messages, and Muon computes
whole matrices.
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--schemes", nargs="+", default=[], help="cases whose name contains one of these words"
    )
    parser.add_argument("--replicas", nargs="+", type=int, default=[2, 8])
    parser.add_argument(
        "--millions", type=int, default=256, help="of parameters, in 16 square matrices"
    )
    parser.add_argument("--kernels", action="store_true", help="the Triton kernels do the step")
    args = parser.parse_args()
    if args.kernels:
        os.environ["DETONATION_KERNELS"] = "triton"
    side = int((args.millions * 2**20 / 16) ** 0.5) // 64 * 64
    print("| case | replicas | kept | gradients | messages | peak | over | the peak is in | base |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, case in (CASES | OF_MUON).items():
        if not args.schemes or any(word in name for word in args.schemes):
            for replicas in args.replicas:
                found = measured(*case, [(side, side)] * 16, replicas, args.kernels)
                numbers = (
                    found.kept,
                    found.gradients,
                    found.messages,
                    found.peak,
                    found.over,
                    max(0, found.base),
                )
                *columns, base_over = [f"{number / found.numel:.2f}" for number in numbers]
                cells = [name, str(replicas), *columns, found.at, base_over]
                print("| " + " | ".join(cells) + " |", flush=True)


@dataclass(frozen=True)
class Measured:
    """Bytes: kept between steps, of gradients and messages, at the peak of a step, and inside the base optimizer.

    at: the operation of the peak. operations: their number in a step that exchanges, outside the base optimizer.
    """

    numel: int
    kept: int
    gradients: int
    messages: int
    peak: int
    at: str
    base: int
    operations: int

    @property
    def over(self) -> int:
        return self.peak - self.kept - self.gradients - self.messages


class Watch(TorchDispatchMode):
    """Counts operations that touch data, and the bytes of the storages that they make: now, and at the most."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.now = self.peak = 0
        self.at = ""
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        if not function.is_view:
            self.names.append(function.overloadpacket.__name__)
        for tensor in out if isinstance(out, list | tuple) else [out]:
            if isinstance(tensor, Tensor):
                self.count(tensor, str(function))
        return out

    def count(self, tensor: Tensor, at: str = "") -> None:
        """Counts the storage of `tensor`, once, until it is freed."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self.now += storage.nbytes()
            if self.now > self.peak:
                self.peak, self.at = self.now, at
            weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())

    def _freed(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


class Mirror(Communicator):
    """A communicator whose peers send something of the right size: nobody looks at it. nbytes: sent and received."""

    replica = 0

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self.nbytes = 0

    def size(self) -> int:
        return self._replicas

    def all_reduce(self, values: Tensor) -> Callable[[], Tensor]:
        self.nbytes += values.nbytes
        return lambda: values

    def all_gather(self, mine: Tensor) -> Callable[[], Tensor]:
        arrived = mine.new_empty(self._replicas, len(mine))
        self.nbytes += mine.nbytes + arrived.nbytes
        return lambda: arrived

    def all_to_all(self, mine: Tensor) -> Callable[[], Tensor]:
        arrived = torch.empty_like(mine)
        self.nbytes += 2 * mine.nbytes
        return lambda: arrived.view(self._replicas, -1)


class Nothing:
    """A readback of a step in which nothing bad happened."""

    def __init__(self, numbers: Tensor) -> None:
        self._shape, self._good = numbers.shape, numbers.dtype == torch.bool

    def read(self) -> Any:
        numbers: Any = self._good
        for size in reversed(self._shape):
            numbers = [numbers] * size
        return numbers


@contextmanager
def accelerator() -> Iterator[None]:
    """Gives `meta` what it lacks to be an accelerator: a way to the host, and generators."""
    with (
        patch.object(runtime, "Readback", Nothing),
        patch.object(FaultCounts, "refuse", lambda *_: None),
        patch.object(FaultCounts, "misplace", lambda *_: None),
        patch.object(selection, "_generator", lambda device, *key: None, create=True),
    ):
        yield


def measured(
    scheme: dt.schemes.Scheme,
    base: Base,
    dtype: torch.dtype,
    shapes: list[tuple[int, ...]],
    replicas: int,
    kernels: bool = False,
) -> Measured:
    """Takes the steps of two rounds and more, and looks at those after the first round."""
    model = nn.ParameterList([torch.zeros(shape, dtype=dtype, device="meta") for shape in shapes])
    communicator, numel = Mirror(replicas), sum(p.numel() for p in model)
    optimizer = dt.replicate(base(model.parameters()), model, communicator, scheme, kernels=kernels)
    every, messages, operations = scheme.round.every, 0, 0
    with accelerator(), Watch() as watch:
        peaks = [(0, "")]  # outside the base optimizer
        base_peak = [0]
        take = optimizer.base.step

        def step_of_base(*arguments: Any) -> Any:
            peaks.append((watch.peak, watch.at))
            counted, watch.peak = len(watch.names), watch.now
            took = take(*arguments)
            if isinstance(optimizer.base, dt.SignSGD):
                peaks.append((watch.peak, watch.at))
            else:
                base_peak.append(watch.peak)
            del watch.names[counted:]
            watch.peak = watch.now
            return took

        optimizer.base.step = step_of_base  # type: ignore[method-assign]
        for parameter in model:
            watch.count(parameter)
        optimizer.build()
        for step in range(2 * every + scheme.round.delay + 1):
            for parameter in model:
                parameter.grad = torch.zeros_like(parameter)
            if step == every:
                peaks, base_peak = [(0, "")], [0]
            watch.peak, communicator.nbytes = watch.now, 0
            watch.names.clear()
            optimizer.step()
            peaks.append((watch.peak, watch.at))
            messages, operations = (
                max(messages, communicator.nbytes),
                max(operations, len(watch.names)),
            )
            optimizer.zero_grad()
            gc.collect(0)
        gc.collect()
        kept, gradients = watch.now, numel * dtype.itemsize
        peak, at = max(peaks)
        return Measured(
            numel,
            kept,
            gradients,
            messages,
            peak,
            at,
            max(base_peak) - kept - gradients,
            operations,
        )


if __name__ == "__main__":
    main()
