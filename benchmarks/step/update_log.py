"""The cost of a log of updates: the time of a whole training step with and without it, and the bytes that it takes.

    python -m benchmarks.step.update_log [--rounds 40] [--schemes full demo]

Loopback in the place of a network: no message is waited for. A step is a forward and a backward pass and the
optimizer's step; steps with and without a log take turns, and each pair is compared. The last column is the time for
which the training thread itself ran longer, as a share of a step: it does not depend on what else the machine does.
The other one also has what the writing thread takes from it where no processor is free.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

import detonation as dt
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.models import build_model

SCHEMES = {
    "demo": dt.demo(),
    "demo 1/64 sign": dt.demo(topk=1, precision="sign", error_feedback=False),
    "random_sign": dt.random_sign(),
    "full": dt.full(),
    "diloco": dt.diloco(every=20),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES), choices=list(SCHEMES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| scheme | log, bytes/parameter | step ms | with log ms | slower | training thread ms | with log ms | more |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in args.schemes:
        print(row(name, SCHEMES[name], args.rounds, args.replicas), flush=True)


def row(name: str, scheme: dt.schemes.Scheme, rounds: int, replicas: int) -> str:
    torch.manual_seed(0)
    model = build_model("olmo2", {"hidden_size": 256, "layers": 4, "feed_forward": 1024})
    ids = torch.randint(0, 256, (8, 128))
    with tempfile.TemporaryDirectory() as folder:
        pair = [
            dt.replicate(
                torch.optim.SGD(model.parameters(), lr=1e-6),
                model,
                LoopbackCommunicator(replicas),
                scheme,
            )
            for _ in range(2)
        ]
        log = dt.UpdateLog(folder)
        pair[1].record(log)
        times: list[list[tuple[float, float]]] = [[], []]
        for turn in range(rounds):
            for which in (0, 1) if turn % 2 else (1, 0):
                began, ran = time.perf_counter(), time.thread_time()
                model(input_ids=ids, labels=ids).loss.backward()
                pair[which].step()
                pair[which].zero_grad()
                times[which].append((time.perf_counter() - began, time.thread_time() - ran))
        log.close()
        numel = sum(parameter.numel() for parameter in model.parameters())
        cells = [
            f"{sum(file.stat().st_size for file in Path(folder).iterdir()) / rounds / numel:.4f}"
        ]
        for clock in (0, 1):
            without, recorded = ([each[clock] for each in one[2:]] for one in times)
            middle = statistics.median(without)
            more = statistics.median(b - a for a, b in zip(without, recorded, strict=True)) / middle
            cells += [
                f"{1000 * middle:.1f}",
                f"{1000 * statistics.median(recorded):.1f}",
                f"{more:+.1%}",
            ]
    return f"| {name} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
