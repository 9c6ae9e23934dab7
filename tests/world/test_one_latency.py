"""Small exchanges between more than two replicas wait for one latency: gloo's all-gather, a ring, waits for each."""

import torch
import torch.distributed as dist

import worlds
from detonation.core.link.communicator import communicator_of
from detonation.core.schemes.traffic import SMALL
from detonation.train.loop.world import Ranks


def exchanges(mesh):
    """What the loop's agreement and a communicator gather, and the collectives that did."""
    used = []
    kept = dist.all_to_all_single

    def counted(*args, **options):
        used.append(args[0].nbytes)
        return kept(*args, **options)

    dist.all_to_all_single = counted
    try:
        world = Ranks(mesh, torch.device("cpu"), [1] * 3)
        agreed = world.all_gather(torch.tensor([world.rank, 0.5], dtype=torch.float64))()
        axis = communicator_of(mesh["replicate"])
        gathered = []
        for nbytes in (25, SMALL):
            mine = torch.full((nbytes,), world.rank, dtype=torch.uint8)
            gathered.append(axis.all_gather(mine)())
    finally:
        dist.all_to_all_single = kept
    return agreed, [rows[:, -1].tolist() for rows in gathered], used


def test_small_exchanges_of_three_replicas_wait_once():
    for agreed, gathered, used in worlds.run_alone(exchanges, 3, 1):
        assert agreed == [[0, 0.5], [1, 0.5], [2, 0.5]]
        assert gathered == [[0, 1, 2], [0, 1, 2]]
        assert used == [48, 75]
