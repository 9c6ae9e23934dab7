"""What a replica that is slower costs the others, with and without `balance`: steps/s of replica 0.

    OMP_NUM_THREADS=1 python -m benchmarks.step.slow_replica [--times 2] [--rounds 12] [--every 20] [--pause-ms 30]

Two processes train by `diloco`; the second one does the forward and backward pass of
each step `--times` times. Three runs take turns, `--every` steps at a time, in the same processes: no replica slow, one
slow, one slow with `balance`. The medians of these rounds are printed, without the first two, in which
nobody knows how long a step takes.

With `--pause-ms` a pass is a pause of that long, as for the host of an accelerator: other work on the machine, and the
replicas on each other's processors, then disturb nothing.
"""

import argparse
import statistics
import time

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import detonation as dt
from detonation.cluster.launch import run_local
from detonation.models import build_model

CASES = {
    "no slow replica": (False, False),
    "a slow replica": (True, False),
    "a slow replica, balance": (True, True),
}


def trained(times: int, rounds: int, every: int, pause_s: float) -> list[list[float]]:
    """The seconds of each round in each case, and the gradients that each replica computes per round in the last."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    replica = mesh.get_local_rank()
    runs = [_started(mesh, every, evened) for _, evened in CASES.values()]
    computed = 0
    ids = torch.randint(0, 256, (4, 64))
    seconds: list[list[float]] = [[] for _ in CASES]
    for _ in range(rounds):
        for case, ((slow, _), (model, optimizer)) in enumerate(
            zip(CASES.values(), runs, strict=True)
        ):
            began = time.perf_counter()
            for _ in range(every):
                if not optimizer.idle:
                    computed += case == len(runs) - 1
                    for _ in range(times if slow and replica else 1):
                        optimizer.zero_grad()
                        _pass(model, ids, pause_s)
                optimizer.step()
            seconds[case].append(time.perf_counter() - began)
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(mesh.size())]
    torch.distributed.all_gather(counts, torch.tensor([computed]))
    return [*seconds, [int(count) / rounds for count in counts]]


def _started(
    mesh: torch.distributed.device_mesh.DeviceMesh, every: int, evened: bool
) -> tuple[nn.Module, dt.Replicated]:
    torch.manual_seed(0)
    model = build_model("olmo2", {"hidden_size": 64, "layers": 2, "feed_forward": 256})
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, dt.replicate(adam, model, mesh, dt.diloco(every=every), balance=evened)


def _pass(model: nn.Module, ids: Tensor, pause_s: float) -> None:
    if pause_s:
        time.sleep(pause_s)
    else:
        model(input_ids=ids, labels=ids).loss.backward()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--pause-ms", type=float, default=0.0)
    args = parser.parse_args()
    arguments = args.times, args.rounds, args.every, args.pause_ms / 1000
    *seconds, counts = run_local(trained, 2, list(arguments), timeout_s=3600)[0]
    print(
        f"| run | steps/s of replica 0 | of that without a slow replica | gradients in {args.every} steps |"
    )
    print("|---|---|---|---|")
    medians = [statistics.median(each[2:]) for each in seconds]
    for name, median in zip(CASES, medians, strict=True):
        steps = [args.every] * 2 if "balance" not in name else [round(count, 1) for count in counts]
        print(
            f"| {name} | {args.every / median:.1f} | {medians[0] / median:.1%} | {steps[0]}, {steps[1]} |"
        )


if __name__ == "__main__":
    main()
