"""Replicas as actors of Ray: one whose node gets notice leaves, and the others go on.

python examples/ray_elastic.py
"""

import ray
import ray.util
import torch
from torch import nn

import detonation as dt


class Replica:
    """One copy of the model, in an actor."""

    def __init__(self, number: int, replicas: int, host: str, port: int) -> None:
        store = torch.distributed.TCPStore(host, port)
        self.axis = dt.elastic(replica=number, replicas=replicas, store=store)

    def leave(self) -> None:
        """Called when the node gets notice, while `train` runs in another thread of the actor."""
        self.axis.depart()

    def train(self, steps: int) -> dict[str, object]:
        torch.manual_seed(0)  # the same weights on all replicas
        model = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32))
        base = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer = dt.replicate(base, model, self.axis, dt.loco(), clip=1.0)
        left = False
        for step in range(steps):
            torch.manual_seed(1000 * self.axis.replica + step)  # each replica draws its own data
            x = torch.randn(32, 32)
            loss = (model(x) - x).square().mean()
            loss.backward()
            try:
                optimizer.step()
            except dt.errors.ReplicaLeft:
                left = True
                break
            optimizer.zero_grad()
            self.after_step(step)
        self.axis.close()
        weights = sum(p.double().sum().item() for p in model.parameters())
        return {"steps": optimizer.step_count, "left": left, "loss": loss.item(), "sum": weights}

    def after_step(self, step: int) -> None:
        """Reports, saves and so on."""


if __name__ == "__main__":
    ray.init()
    here = ray.util.get_node_ip_address()
    store = torch.distributed.TCPStore(here, 0, is_master=True, wait_for_workers=False)
    actor = ray.remote(max_concurrency=2)(Replica)  # num_gpus=1 for a model on a GPU
    replicas = [actor.remote(number, 3, here, store.port) for number in range(3)]
    results = [replica.train.remote(300) for replica in replicas]
    replicas[2].leave.remote()  # in place of a notice
    for number, result in enumerate(ray.get(results)):
        print(f"replica {number}: {result}")
