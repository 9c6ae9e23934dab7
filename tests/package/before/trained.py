"""Weights that the package detonation 0.5.2 moves: `python trained.py FOLDER OUT` with that package in
FOLDER. It has the name of ours, so it is alone in this process, and in the two that it forks."""

import contextlib
import io
import json
import os
import sys

import torch
import torch.distributed as dist

STEPS = 3


def gradient(shape: tuple[int, ...], replica: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + replica)
    return torch.randn(shape, generator=generator)


def averages_with_gloo() -> None:
    """Gloo has no mean: a sum and a division stand for it."""
    all_reduce = dist.all_reduce

    def mean(tensor, op, group):
        assert op == dist.ReduceOp.AVG
        all_reduce(tensor, group=group)
        tensor.div_(2)

    dist.all_reduce = mean


def weights(case: dict, alone: dist.ProcessGroup) -> list:
    """The weights of this replica after each step; the error in its words if there is one."""
    import detonation

    replicator = getattr(detonation, case["replicator"])(**case.get("arguments", {}))
    parameter = torch.nn.Parameter(torch.zeros(case["shape"]))
    optimizer = getattr(detonation, case["optimizer"])(
        [parameter],
        replicator=replicator,
        sharding_parallel_group=alone,
        replication_parallel_group=dist.group.WORLD,
        **case["options"],
    )
    found = []
    for step in range(STEPS):
        parameter.grad = gradient(parameter.shape, dist.get_rank(), step)
        try:
            optimizer.step()
        except AttributeError as error:
            return [str(error)]
        found.append(parameter.detach().clone())
    return found


def rank(number: int, cases: dict, out: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=number, world_size=2)
    alone = [dist.new_group([each]) for each in range(2)][number]
    averages_with_gloo()
    with contextlib.redirect_stdout(io.StringIO()):
        found = {name: weights(case, alone) for name, case in cases.items()}
    torch.save(found, f"{out}/{number}.pt")
    dist.destroy_process_group()


def main() -> None:
    folder, out = sys.argv[1:]
    sys.path.insert(0, folder)
    cases = json.load(sys.stdin)
    child = os.fork()
    rank(int(child == 0), cases, out)
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


if __name__ == "__main__":
    main()
