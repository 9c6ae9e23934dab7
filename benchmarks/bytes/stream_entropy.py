"""How small a followed stream of `demo` 1/64 in signs could be: the entropy of what two replicas agreed on.

    OMP_NUM_THREADS=1 python -m benchmarks.bytes.stream_entropy [--steps 120]

Two simulated replicas train a model of half the width of quick-lm's on its text. Of the messages of the later half of
the steps it counts, per row of 64 coefficients, the bits that an ideal coder with fixed tables would take: for each
replica by itself, and for the union of both, in which their order does not count. The scales of the blocks come on top
as they are.
"""

import argparse
import math
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import detonation as dt
from detonation.cluster.network.simulated import SimulatedCommunicator, simulate_replicas
from detonation.core.codec.indices import narrow
from detonation.core.codec.received import Arrived
from detonation.core.integrity.message import HEADER_BYTES
from detonation.core.integrity.observer import StepObserver
from detonation.models import build_model


class Seen(StepObserver):
    """Counts the coefficients of all messages."""

    def __init__(self, scheme: dt.schemes.Scheme, rows: int, after: int) -> None:
        self.scheme, self.rows, self.after = scheme, rows, after
        self.single, self.pair, self.agreeing, self.total = Counter[Any](), Counter[Any](), 0, 0

    def received(self, place: int, step: int, message: Tensor) -> None:
        if step < self.after:
            return
        arrived = Arrived(
            self.scheme.codec, message[:, HEADER_BYTES:], self.rows, None, self.scheme.aggregation
        )
        found = arrived.read(0, self.rows)
        assert found.indices is not None
        signed = (narrow(found.indices).to(torch.int64) * 2 + (found.values < 0)).squeeze(
            -1
        )  # [replicas, rows]
        for each in signed:
            self.single.update(each.tolist())
        low, high = signed.amin(0), signed.amax(0)
        self.pair.update((low * 256 + high).tolist())
        self.agreeing += int((low >> 1 == high >> 1).sum())
        self.total += len(low)

    def take(self, place: int, step: int) -> Tensor:
        raise NotImplementedError

    def end(self, what: str, optimizer: Any) -> None:
        return


def bits(counts: Counter[Any]) -> float:
    total = sum(counts.values())
    return -sum(n / total * math.log2(n / total) for n in counts.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=120)
    args = parser.parse_args()
    text = torch.tensor(
        list(next(Path(dt.__file__).parent.rglob("*.txt")).read_bytes()), dtype=torch.int64
    )
    scheme = dt.demo(topk=1, precision="sign", error_feedback=False)

    def act(communicator: SimulatedCommunicator) -> tuple[Seen, int]:
        torch.manual_seed(0)
        model = build_model("olmo2", {"hidden_size": 64, "layers": 2, "feed_forward": 256})
        sign = dt.SignSGD(model.parameters(), lr=1e-3)
        optimizer = dt.replicate(sign, model, communicator, scheme)
        rows = sum(each.layout.rows for each in optimizer.build())
        seen = Seen(scheme, rows, args.steps // 2)
        if communicator.replica == 0:
            optimizer.record(seen)
        draw = torch.Generator().manual_seed(communicator.replica)
        for _ in range(args.steps):
            at = torch.randint(0, len(text) - 129, (16,), generator=draw)
            ids = torch.stack([text[first : first + 128] for first in at])
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return seen, sum(p.numel() for p in model.parameters())

    seen, _ = simulate_replicas(act, 2)[0]
    one, both = bits(seen.single), bits(seen.pair)
    print("| per row of 64, two replicas | bits | bytes per parameter |")
    print("|---|---|---|")
    for name, found in (
        ("as it travels: 2 x (6 + 1) bits", 14.0),
        ("each replica by itself, entropy", 2 * one),
        ("the union, entropy", both),
    ):
        print(f"| {name} | {found:.2f} | {found / 8 / 64:.4f} |")
    print(f"\nrows in which both send the same coordinate: {seen.agreeing / seen.total:.1%}")


if __name__ == "__main__":
    main()
