"""The cost of a log of updates: the time of the optimizer's step with and without it, and the bytes that it takes.

    python benchmarks/update_log.py [--rounds 15]

Loopback in the place of a network: no message is waited for. A step of training has a forward and a backward pass,
too, so the share of a whole step is smaller.
"""

import argparse
import statistics
import tempfile
import time

import torch

import detonation as dt
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.log.writer import logged_bytes
from detonation.models import build_model

SCHEMES = {
    "demo": dt.demo(),
    "demo 1/64 sign": dt.demo(topk=1, precision="sign", error_feedback=False),
    "random_sign": dt.random_sign(),
    "full": dt.full(),
    "diloco": dt.diloco(every=20),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--replicas", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| scheme | log, bytes per parameter | forward and backward ms | step ms | with log ms | of a whole step |")
    print("|---|---|---|---|---|---|")
    for name, scheme in SCHEMES.items():
        print(row(name, scheme, args.rounds, args.replicas), flush=True)


def row(name: str, scheme: dt.Scheme, rounds: int, replicas: int) -> str:
    torch.manual_seed(0)
    model = build_model("olmo2", {"hidden_size": 256, "layers": 4, "feed_forward": 1024})
    ids = torch.randint(0, 256, (8, 128))
    with tempfile.TemporaryDirectory() as folder:
        pair = [
            dt.replicate(torch.optim.SGD(model.parameters(), lr=1e-6), model, LoopbackCommunicator(replicas), scheme)
            for _ in range(2)
        ]
        pair[1].record(dt.UpdateLog(folder))
        times: list[list[float]] = [[], [], []]
        for turn in range(rounds):
            began = time.perf_counter()
            model(input_ids=ids, labels=ids).loss.backward()
            times[2].append(time.perf_counter() - began)
            for which in (0, 1) if turn % 2 else (1, 0):
                began = time.perf_counter()
                for _ in range(20):
                    pair[which].step()
                times[which].append((time.perf_counter() - began) / 20)
        without, recorded, passes = (statistics.median(each) for each in times)
        numel = sum(parameter.numel() for parameter in model.parameters())
        share = statistics.median(b - a for a, b in zip(times[0], times[1], strict=True)) / (passes + without)
        cells = (f"{logged_bytes(pair[1]) / numel:.4f}", *(f"{1000 * x:.1f}" for x in (passes, without, recorded)))
    return f"| {name} | {' | '.join(cells)} | {share:+.1%} |"


if __name__ == "__main__":
    main()
