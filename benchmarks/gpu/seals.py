"""Messages sealed and inspected many times, of random sizes, while another stream moves memory: do all checksums agree?

    python -m benchmarks.gpu.seals --device cuda --times 10000 --seconds 30

Every tenth time a byte is changed on the way, which the checksum must tell; every fiftieth the seal is compared with
that of ordinary torch. The last line is JSON: the rounds, and the first wrong one of each kind, or -1.
"""

import argparse
import json
import random
import sys
import time

import torch
from benchmarks.gpu.children import stacks_at_the_end

import detonation as dt
from detonation.core.compute.nonfinite import LIMIT
from detonation.core.integrity.guard import FORGET, LOUDER
from detonation.core.integrity.message import HEADER_BYTES, IDENTITY, Header
from detonation.engines.triton.coding import coding_of, places_of, run_shape
from detonation.kernels.gpu import inspection

MESSAGES = 3
STATED, ADDED = 7, 8
"""The columns of the table that `inspect` returns: the checksum in the header, and that of the bytes that arrived."""


def main() -> int:
    stacks_at_the_end()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--times", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=30.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = agreed(torch.device(args.device), args.times, args.seconds)
    print(json.dumps(found))
    return int(max(found["disagree"], found["missed"], found["unlike_torch"]) >= 0)


def agreed(device: torch.device, times: int, seconds: float) -> dict[str, int]:
    """The rounds that were run; the first with checksums that disagree, with damage that was missed, and with a seal
    that is not torch's: -1 where there is none. The host does not wait between rounds."""
    codec, chance, ends_at = dt.demo().codec, random.Random(0), time.monotonic() + seconds
    most_rows = 20_000 if device.type == "cuda" else 60
    width = codec.width(most_rows, HEADER_BYTES)
    pool = torch.randint(0, 256, (MESSAGES, 2 * width), dtype=torch.uint8, device=device)
    sealed, joined = (
        torch.zeros(MESSAGES, width, dtype=torch.uint8, device=device) for _ in range(2)
    )
    inspector = inspection.Inspector(MESSAGES, device)
    usual, status = torch.zeros(1, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    first = torch.full((3,), -1, dtype=torch.int64, device=device)
    coding, limits = coding_of(codec), inspection.Limits(LIMIT, LOUDER, FORGET)
    side = torch.cuda.Stream() if device.type == "cuda" else None
    heavy = torch.zeros(2, 2**26 if side else 1, device=device)
    done = 0
    for number in range(times):
        if number % 100 == 0 and side:
            torch.cuda.synchronize()
        if time.monotonic() > ends_at:
            break
        if side:
            with torch.cuda.stream(side):
                heavy[0].copy_(heavy[1])
        rows = int(most_rows ** chance.random())
        nbytes, at = codec.nbytes(rows), chance.randrange(width)
        sealed[:, HEADER_BYTES : HEADER_BYTES + nbytes].copy_(pool[:, at : at + nbytes])
        header = Header(2**40, number, 0, 0)
        shapes = [run_shape(codec, HEADER_BYTES, rows)]
        inspector.seal(
            [sealed], shapes, nbytes, IDENTITY, header.schema, number, header.origin, status, 0
        )
        arrived = sealed[
            :, : HEADER_BYTES + nbytes
        ].contiguous()  # the rows of it begin at any address
        damaged = number % 10 == 9
        if damaged:
            arrived[-1, HEADER_BYTES + chance.randrange(nbytes)].bitwise_xor_(
                1 << chance.randrange(8)
            )
        table = inspector.inspect(
            [arrived], shapes, joined, nbytes, coding,
            places_of(codec, rows), IDENTITY, header.schema, number, 0, 6, usual, True, limits,
        )  # fmt: skip
        agree = table[:, STATED] == table[:, ADDED]
        _note(first[0], agree[: -1 if damaged else None].logical_not().any(), number)
        if damaged:
            _note(first[1], agree[-1], number)
        if number % 50 == 0:
            plain = torch.zeros(MESSAGES, width, dtype=torch.uint8, device=device)
            plain[:, HEADER_BYTES : HEADER_BYTES + nbytes].copy_(pool[:, at : at + nbytes])
            header.seal(plain, nbytes)
            _note(first[2], (plain[:, :HEADER_BYTES] != sealed[:, :HEADER_BYTES]).any(), number)
        done += 1
    return {
        "rounds": done,
        **dict(zip(("disagree", "missed", "unlike_torch"), first.tolist(), strict=True)),
    }


def _note(first: torch.Tensor, bad: torch.Tensor, number: int) -> None:
    """Keeps the number of the first bad round, on the device."""
    first.copy_(torch.where(bad & (first < 0), number, first))


if __name__ == "__main__":
    sys.exit(main())
