"""One kernel on odd shapes, beside ordinary torch on the CPU; `first` starts this once for each kernel.

    python -m benchmarks.gpu.one_kernel scan_kernel --device cuda --shapes 0 1 2

Prints a line of JSON before each launch, with its constants, and one after each comparison. GPU_FIRST_FAULT, for tests
alone, makes a kernel crash, hang, or give a wrong bit: "scan_kernel=crash,seal_kernel=bit".
"""

import argparse
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from benchmarks.gpu.children import stacks_at_the_end
from torch import Tensor

import detonation as dt
from detonation.core.codec.aggregate import ClippedMean
from detonation.core.codec.message_rows import MessageRows
from detonation.core.codec.received import Arrived
from detonation.core.codec.selection import Random, Striding, random_start
from detonation.core.compute.nonfinite import LIMIT, SIGNAL_LIMIT
from detonation.core.engine.reference import ReferenceEngine, engine_for
from detonation.core.integrity.guard import FORGET, LOUDER, Expected, decide_usable, unsealed
from detonation.core.integrity.message import HEADER_BYTES, IDENTITY, Header
from detonation.core.memory import Memory
from detonation.core.runtime import Runtime
from detonation.engines.triton.coding import coding_of, places_of, run_shape
from detonation.engines.triton.engine import TritonEngine
from detonation.kernels.gpu import inspection, launches, launching

CPU = torch.device("cpu")
SHAPES = [[(257,), ()], [(3, 5, 7), (0, 7), (1,)], [(40, 16), (67, 129), (31,)]]
"""Of the tensors, by number."""
SCHEMES = [
    dt.demo(topk=3, chunk=16),
    dt.demo(topk=1, precision="sign", error_feedback=False),
    dt.schemes.random(rate=1 / 8, link="all-gather"),
]
"""Of messages, by the number of the shapes."""
Compared = tuple[str, Tensor, Tensor, float]
"""What was found, and what torch makes of it on the CPU; 0.0 for equal bits, or the error that rounding has."""


def main() -> int:
    stacks_at_the_end()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kernel", choices=CASES)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--shapes", nargs="+", type=int, default=[0, 1, 2])
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cuda", 0) if args.device == "cuda" else CPU
    faults = dict(
        each.split("=") for each in os.environ.get("GPU_FIRST_FAULT", "").split(",") if each
    )
    fault = faults.get(args.kernel, "")
    say(interpreted=launching.INTERPRETED)
    watched = partial(launched, launching.launch, args.kernel, fault)
    failed = False
    with patch.object(launches, "launch", watched), patch.object(inspection, "launch", watched):
        for number in args.shapes:
            say(shapes=number)
            try:
                seen = difference(CASES[args.kernel](device, number), wrong_bit=fault == "bit")
                failed |= bool(seen)
                say(compared=number, seen=seen)
            except Exception as error:
                failed = True
                lines = str(error).strip().splitlines() or [""]
                headline = (
                    f"{type(error).__name__}: {' ... '.join(dict.fromkeys([lines[0], lines[-1]]))}"
                )
                say(compared=number, seen=headline, traceback=traceback.format_exc())
                if "CUDA" in headline:  # no later launch of this process means anything
                    break
    return int(failed)


def say(**line: Any) -> None:
    print(json.dumps(line, default=str), flush=True)


def launched(
    launch: Callable[..., None],
    wanted: str,
    fault: str,
    kernel: Any,
    programs: int,
    *arguments: Any,
    **constants: Any,
) -> None:
    """Says what is launched, launches it, and waits for it, so that an error is of this launch."""
    say(launch=kernel.__name__, programs=programs, constants=constants)
    if kernel.__name__ == wanted and fault == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if kernel.__name__ == wanted and fault == "hang":
        signal.pause()
    launch(kernel, programs, *arguments, **constants)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def difference(compared: Sequence[Compared], wrong_bit: bool = False) -> str:
    """The first difference in words; "" where there is none."""
    for name, found, wanted, error in compared:
        mine = found.detach().cpu().contiguous().clone()
        if wrong_bit:
            octets = mine.view(-1).view(torch.uint8)
            octets[mine.element_size() - 1] ^= 64
        mine, right = mine.reshape(wanted.shape), wanted.detach().contiguous()
        differs = mine != right if error == 0 else _apart(mine, right, error)
        if differs.any():
            at = int(differs.view(-1).nonzero()[0])
            count = f"{int(differs.sum())} of {differs.numel()}"
            return f"{name}: {count} values differ, the first at {at}: {mine.view(-1)[at]}, not {right.view(-1)[at]}"
    return ""


def _apart(found: Tensor, wanted: Tensor, error: float) -> Tensor:
    return torch.isclose(
        found.float(), wanted.float(), rtol=error, atol=error, equal_nan=True
    ).logical_not()


def drawn(number: int) -> list[Tensor]:
    """Signals on the CPU, one of them bf16."""
    generator = torch.Generator().manual_seed(number)
    found = [torch.randn(shape, generator=generator) for shape in SHAPES[number]]
    return [*found[:-1], found[-1].bfloat16()]


def scan(device: torch.device, number: int) -> list[Compared]:
    found, signals = [], drawn(number)
    for bad in (None, 0, len(signals) - 1):
        given = [signal.clone() for signal in signals]
        if bad is not None:
            given[bad].view(-1)[-1] = float("nan")
        scanner = inspection.Scanner([each.numel() for each in given], range(len(given)), device)
        status = scanner.scan([each.to(device) for each in given], SIGNAL_LIMIT).cpu()
        least = status[status > 0].min() if status.any() else torch.tensor(0)
        found.append(
            (f"the bad signal {bad}", least, torch.tensor(0 if bad is None else 1 + bad), 0.0)
        )
    return found


def rotation(device: torch.device, number: int) -> list[Compared]:
    rule: Any = (Random(0.3), Striding(1 / 16), Striding(1 / 300))[number]
    rows, seed, step = 70, 5, 3
    cycle, share, deal = rule.phase(step, seed)
    coding = launching.Coding(
        rule.chunk, rule.k, "none", type(rule).__name__.lower(), "fp32", 1, 0, False
    )
    rotations = launches.Rotations.room(coding, device)
    words, choices = (random_start(seed, cycle, which) for which in (0, 1))
    rotations.rotate(coding, words, choices, share, deal)
    wanted = torch.full((rows, rule.chunk), -1, dtype=torch.int32)
    indices = rule.indices(torch.empty(rows, rule.chunk), step, seed)
    wanted.scatter_(1, indices, torch.arange(rule.k, dtype=torch.int32).expand(rows, -1))
    there = {tuple(line) for line in rotations.table.tolist()}
    found = torch.tensor([tuple(line) in there for line in wanted.tolist()], dtype=torch.int32)
    return [("permutations that are there", found, torch.ones(rows, dtype=torch.int32), 0.0)]


def seal(device: torch.device, number: int) -> list[Compared]:
    nbytes = (100, 4032, 5003)[number]
    width = -(-(HEADER_BYTES + nbytes) // 4096) * 4096
    wanted = torch.zeros(2, width, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(number)
    wanted[:, HEADER_BYTES : HEADER_BYTES + nbytes] = torch.randint(
        0, 256, (2, nbytes), dtype=torch.uint8, generator=generator
    )
    found = wanted.clone()
    found[:, :HEADER_BYTES], found[:, HEADER_BYTES + nbytes :] = 77, 55  # of an earlier step
    header, found = Header(2**62 + 12345, 3, 5, 1, 7, 2**61 + 9), found.to(device)
    header.seal(wanted, nbytes)
    shape, status = (
        inspection.RunShape(HEADER_BYTES, 0, (nbytes, 0, 0)),
        torch.tensor([7], device=device),
    )
    inspection.Inspector(2, device).seal(
        [found], [shape], nbytes, IDENTITY, header.schema, 3, header.origin, status, header.received
    )
    whole = slice(HEADER_BYTES + nbytes)
    return [("sealed messages", found[:, whole], wanted[:, whole], 0.0)]


def inspect(device: torch.device, number: int) -> list[Compared]:
    codec, rows, replicas = SCHEMES[number].codec, (24, 7, 33)[number], 3
    nbytes, schema = codec.nbytes(rows), 2**40
    messages = torch.zeros(replicas, codec.width(rows, HEADER_BYTES), dtype=torch.uint8)
    for replica in range(replicas):
        values = torch.randn(
            rows, codec.selection.chunk, generator=torch.Generator().manual_seed(replica)
        )
        messages[replica, HEADER_BYTES : HEADER_BYTES + nbytes] = codec.encode(
            codec.select(values, 0, 0)
        )
        Header(schema, 3, 0, replica).seal(messages[replica : replica + 1], nbytes)
    messages[2, HEADER_BYTES + nbytes // 2] ^= 4  # damage
    usual, mine = torch.tensor([0.5]), torch.tensor([0.5], device=device)
    body = messages[:, HEADER_BYTES : HEADER_BYTES + nbytes]
    shared: Any = codec.select(values, 0, 0).indices if codec.selection.shared else None
    arrived = Arrived(codec, body, rows, shared, dt.demo().aggregation)
    expected = Expected(Header(schema, 3, 0, 0), nbytes, 6, True)
    refused, table = decide_usable(*unsealed(messages), *arrived.facts(), expected, usual)
    octets = messages[:, : HEADER_BYTES + nbytes].to(device).contiguous()
    joined = torch.zeros_like(messages, device=device)
    found = inspection.Inspector(replicas, device).inspect(
        [octets], [run_shape(codec, HEADER_BYTES, rows)], joined, nbytes, coding_of(codec),
        places_of(codec, rows), IDENTITY, schema, 3, 0, 6, mine, True,
        inspection.Limits(LIMIT, LOUDER, FORGET),
    ).cpu()  # fmt: skip
    norms, bounds = (
        [each[:, at].clone().view(torch.float64) for each in (found, table)] for at in (10, 11)
    )
    rest = [at for at in range(13) if at not in (10, 11)]
    kept = body.clone()
    kept[refused] = 0
    return [
        ("table of messages", found[:, rest], table[:, rest], 0.0),
        ("norms", norms[0], norms[1], 1e-5),
        ("bounds", bounds[0], bounds[1], 1e-5),
        ("the usual norm", mine, usual, 1e-5),
        ("joined messages", joined[:, HEADER_BYTES : HEADER_BYTES + nbytes], kept, 0.0),
    ]


def weigh(device: torch.device, number: int) -> list[Compared]:
    codec, rows = dt.demo(topk=3, chunk=16, aggregate="clipped_mean").codec, (24, 7, 33)[number]
    values = torch.randn(rows, codec.selection.chunk, generator=torch.Generator().manual_seed(0))
    scales = ([1, 5, 2, 0.1], [0, 0, 3, 1], [1])[number]
    wanted: Any = codec.received(
        [codec.encode(codec.select(values * scale, 0, 0)) for scale in scales],
        rows,
        None,
        ClippedMean(),
    )
    weights, message = torch.empty(len(scales), device=device), wanted.source.body.to(device)
    inspector = inspection.Inspector(len(scales), device)
    inspector.weigh(message, places_of(codec, rows), coding_of(codec), weights)
    return [("weights", weights, wanted.aggregation.of_replicas, 0.0)]


def _engines(device: torch.device, number: int) -> tuple[TritonEngine, ReferenceEngine]:
    scheme = SCHEMES[number]
    layout = scheme.codec.layout({str(i): shape for i, shape in enumerate(SHAPES[number])})
    memories = [
        Memory(layout, scheme.feedback, each) if scheme.feedback else None for each in (device, CPU)
    ]
    mine = engine_for(scheme.codec, layout, memories[0], Runtime(device, 3))
    if not isinstance(mine, TritonEngine):
        raise TypeError(f"the engine is {mine.name}, not triton's")
    return mine, ReferenceEngine(scheme.codec, layout, memories[1], Runtime(CPU, 3, kernels=False))


def _encoded(
    engine: ReferenceEngine, signals: Sequence[Tensor], device: torch.device
) -> tuple[MessageRows, Any]:
    """The rows of a message, and what was selected."""
    codec, rows = engine.codec, engine.layout.rows
    octets = torch.zeros(1, codec.width(rows, HEADER_BYTES), dtype=torch.uint8, device=device)
    run = MessageRows(codec, rows, lambda: octets, room=HEADER_BYTES, negative_zeros=False)
    return run, engine.encode_into(run, [signal.to(device) for signal in signals], 0)


def encode(device: torch.device, number: int) -> list[Compared]:
    mine, reference = _engines(device, number)
    (run, _), (other, selected) = (
        _encoded(engine, drawn(number), each) for engine, each in ((mine, device), (reference, CPU))
    )
    codec = mine.codec
    values = codec.written(other).clone()
    compared = [("values", codec.written(run), values, 1e-5)]
    if not codec.selection.shared:
        compared.append(("indices", run.parts[-1][0], other.parts[-1][0], 0.0))
    if mine.memory and reference.memory:
        if not reference.releases_at_once:
            reference.release(selected, values if reference.needs_own_values else None)
        compared.append(("the memory", mine.memory.residual, reference.memory.residual, 1e-5))
    return compared


def decode(device: torch.device, number: int) -> list[Compared]:
    mine, reference = _engines(device, number)
    codec, rows, aggregation = mine.codec, mine.layout.rows, SCHEMES[number].aggregation
    run, selected = _encoded(reference, drawn(number), CPU)
    message, updates = run.body[0].clone(), []
    for engine, each in ((mine, device), (reference, CPU)):
        shared = None
        if codec.selection.shared:
            shared = engine.empty(0).indices if engine is mine else selected.indices
        sent = message.to(each)
        received: Any = codec.received([sent, sent], rows, shared, aggregation)
        if engine is mine:
            received.shared = shared
        updates.append([torch.zeros(shape, device=each) for shape in SHAPES[number]])
        engine.write(received, updates[-1])
    return [
        (f"update of {SHAPES[number][i]}", *pair, 1e-5)
        for i, pair in enumerate(zip(*updates, strict=True))
    ]


def seal_sum(device: torch.device, number: int) -> list[Compared]:
    replica, replicas = ((0, 1), (1, 3), (6, 7))[number]
    status, mark = 259 + number, 9
    digits = torch.full(
        (3 * replicas,), 5, dtype=torch.bfloat16 if number == 1 else torch.float32, device=device
    )
    inspection.SumInspector(device).seal(
        torch.tensor([0, status], device=device), digits, 3 * replica, 3, mark
    )
    wanted = torch.zeros(3 * replicas)
    wanted[3 * replica : 3 * replica + 3] = torch.tensor(
        [status & 255, status >> 8, mark], dtype=torch.float32
    )
    return [("digits", digits.float(), wanted, 0.0)]


def inspect_sum(device: torch.device, number: int) -> list[Compared]:
    runs = [
        torch.randn(size, generator=torch.Generator().manual_seed(size))
        for size in (257, 9001, 1)[: number + 1]
    ]
    digits, compared = torch.tensor([9.0, 3.0, 1.0]), []
    inspector = inspection.SumInspector(device)
    for good in (1.0, 0.0):
        if not good:
            runs[-1][-1] = float("inf")
        report = torch.empty(4, device=device)
        inspector.inspect([run.to(device) for run in runs], digits.to(device), report)
        compared.append(
            (f"report, finite {good:.0f}", report, torch.tensor([good, 9.0, 3.0, 1.0]), 0.0)
        )
    return compared


CASES: dict[str, Callable[[torch.device, int], list[Compared]]] = {
    "scan_kernel": scan,
    "seal_kernel": seal,
    "inspect_kernel": inspect,
    "encode_kernel": encode,
    "decode_kernel": decode,
    "rotation_kernel": rotation,
    "weigh_kernel": weigh,
    "seal_sum_kernel": seal_sum,
    "inspect_sum_kernel": inspect_sum,
}
"""Every kernel."""

if __name__ == "__main__":
    sys.exit(main())
