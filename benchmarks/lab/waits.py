"""How long does a step of training wait for the network, if computing it takes no processor?

    sudo python -m benchmarks.lab.waits --links 100mbit 10mbit
    sudo python -m benchmarks.lab.waits --links 100mbit,2.5ms

Two nodes in network namespaces, the loop of `detonation train`, and a model of 16 layers sharded by
`dt.shard`, whose forward and backward sleep, so that other load of the machine changes little.
Turn by turn: one sign of 64 as it is; the same with ranks that agree on their losses before
backward, and without buckets for late gradients; and no exchange. A latency is that of each node's
path, half of that between nodes. Medians in ms: waiting for messages, and for the losses.
"""

import argparse
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn

LAYERS, MATRICES, WIDTH = 16, 7, 256
FORWARD_S, BACKWARD_S = 0.006, 0.014
STEPS = 4
SETS = (
    "train.steps=100000 train.validate_every=0 train.batch_size=1 schedule.name=constant"
    " optimizer.lr=1e-9 data.context=8"
)
AS_IT_IS, BEFORE, NOTHING = "as it is", "agreed first, no late buckets", "no exchange"


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradient, None, None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(
            nn.Parameter(nn.init.orthogonal_(torch.empty(WIDTH, WIDTH))) for _ in range(MATRICES)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Sleep.apply(x, FORWARD_S, 0.0)
        for part in self.parts:
            x = nn.functional.linear(x, part)
        return Sleep.apply(x, 0.0, BACKWARD_S)  # sleeps before the gradients of the layer


class Sleeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(256, WIDTH))
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, **_: Any) -> SimpleNamespace:
        x = self.embedding[:4]
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return SimpleNamespace(loss=logits.square().mean() * 1e-3, logits=logits)


def rank(shards: int, turns: int) -> dict[str, list[Any]]:
    import torch.distributed as dist

    import detonation as dt
    from detonation.cluster.processes.signals import Stop
    from detonation.train.loop.checks import check_config, load_data
    from detonation.train.loop.fit import fit
    from detonation.train.loop.session import Session
    from detonation.train.loop.world import Ranks
    from detonation.train.recipe.resolve import Request

    mesh = dt.init_mesh(2, shards, "cpu")
    request = Request(Path("recipes/quick-lm.toml"), tuple(SETS.split()), 2, shards)
    config = check_config(request.layers(None).config())
    data = load_data(config.data)
    cpu = torch.device("cpu")
    sessions: dict[str, Session] = {}
    for name in (AS_IT_IS, BEFORE, NOTHING):
        torch.manual_seed(0)
        model = dt.shard(Sleeping(), mesh)
        base = dt.SignSGD(model.parameters(), lr=1e-9)
        scheme = dt.demo(topk=1, precision="sign", error_feedback=False, decay=0.95)
        if name == NOTHING:
            scheme = dt.none()
        optimizer = dt.replicate(base, model, mesh["replicate"], scheme)
        made = Session(config, Ranks(mesh, cpu, [shards] * 2), cpu, data, model, base, optimizer)
        with agreeing_first(name), no_late_buckets(name):
            fit(made, 0, 3, lambda record: None, Stop())
        sessions[name] = made
    found: dict[str, list[Any]] = {name: [] for name in sessions}
    for turn in range(turns):
        for name, made in sessions.items():
            records: list[Any] = []
            dist.barrier()
            with agreeing_first(name):
                fit(made, 3 + STEPS * turn, 3 + STEPS * (turn + 1), records.append, Stop())
            found[name] += [
                (each.seconds, each.waited_s, each.agreeing_s or 0.0, each.bytes_sent)
                for each in records[1:]  # the first one waits for the last turn
            ]
    return found


def agreeing_first(name: str) -> AbstractContextManager[Any]:
    """Ranks agree on their losses before backward, if that is what `name` is."""
    if name != BEFORE:
        return nullcontext()
    return mock.patch("detonation.train.loop.fit._Agreement.precedes_backward", True)


def no_late_buckets(name: str) -> AbstractContextManager[Any]:
    if name != BEFORE:
        return nullcontext()
    path = "detonation.core.optimizer.build.late_parameters"
    return mock.patch(path, lambda model: frozenset())


def entered(cluster: Any, shards: int, number: int) -> None:
    cluster.enter(number // shards)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--links", nargs="+", default=["100mbit", "10mbit", "100mbit,2.5ms"])
    parser.add_argument("--shards", type=int, default=1, help="ranks of a node")
    parser.add_argument("--turns", type=int, default=8, help=f"of {STEPS} steps each")
    args = parser.parse_args()
    from benchmarks.lab import namespace_cluster
    from benchmarks.lab.relay import Conditions
    from benchmarks.lab.relayed_nodes import relayed_cluster

    from detonation.cluster.launch import run_local
    from detonation.link_speed import LinkSpeed

    torch.set_num_threads(1)  # before the ranks are forked
    print("| link | | step | for messages | for losses | waiting | bytes |\n" + "|---" * 7 + "|")
    for link in args.links:
        speed = LinkSpeed.parse(link)
        made: Any = namespace_cluster(2, speed) if not speed.latency_s else None
        with made or relayed_cluster(2, Conditions.of(link)) as cluster:
            enter = partial(entered, cluster, args.shards)
            found = run_local(rank, 2 * args.shards, [args.shards, args.turns], enter=enter)[0]
        for name, records in found.items():
            columns = zip(*records, strict=True)
            step, messages, losses, sent = map(statistics.median, columns)
            share = f"{(messages + losses) / step:.1%}"
            cells = f"{1e3 * step:.0f} | {1e3 * messages:.1f} | {1e3 * losses:.1f} | {share}"
            print(f"| {link} | {name} | {cells} | {sent:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
