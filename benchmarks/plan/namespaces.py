"""The throttled communicator against network namespaces, where the kernel slows real links down: step times and bytes.

    sudo python -m benchmarks.plan.namespaces

Two nodes of two ranks, each node a network namespace; the T5 of benchmarks/step/step_time.py; steps
as `detonation train` takes them. Each scheme has two trainings in one world that take turns: one
over links that the kernel slows down, and one over free links with a throttled communicator of the
same speed (`--link`). Medians of the step time. Bytes: the count of the link for a node, against
the kernel's count at that node's interface, without and with the headers of frames.
"""

import argparse
import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

RECIPE = "recipes/t5-translation.toml"
SETS = (
    "model.hidden_size=256 model.layers=4 model.feed_forward=1024 data.source_length=64 data.target_length=64 "
    "train.batch_size=2 train.steps=100000 train.validate_every=0 schedule.name=constant"
)
"""The T5 of benchmarks/step/step_time.py, 7.4 million parameters, and its batch."""
SCHEMES = {
    "full": "scheme.name=full",
    "demo 4/64": "scheme.name=demo scheme.precision=fp32",
    "random 1/32": "scheme.name=random scheme.rate=0.03125",
}
LINKS = ("10mbit", "100mbit", "1gbit")
FREE = "100gbit"
NODES, RANKS = 2, 2


@dataclasses.dataclass(frozen=True)
class Subject:
    """A training whose steps are timed; `unit` steps, those of a round, are timed together."""

    name: str
    recipe: str
    sets: tuple[str, ...]
    emulated: bool = False
    unit: int = 1


@dataclasses.dataclass(frozen=True)
class Timing:
    """The step times of a subject on a link, each the mean of a unit, and the bytes that left a node per step.

    bytes_sent: as the link counts. data_bytes, frame_bytes: as the kernel counts, without and with headers of frames.
    """

    name: str
    emulated: bool
    link: str
    seconds: tuple[float, ...]
    bytes_sent: float
    data_bytes: float
    frame_bytes: float

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


Report = Callable[[Timing], None]


def measure(
    subjects: Sequence[Subject],
    turns: Mapping[str, Mapping[str, int]],
    report: Report,
    ranks: int = RANKS,
) -> None:
    """Times every subject on each link, one after another in turns[link][subject's name] turns. Needs root.

    report: called on rank 0, a process of its own, with each timing once a link is done. ranks: of each node.
    """
    import torch
    from benchmarks.lab import namespace_cluster

    from detonation.cluster.launch import run_local
    from detonation.link_speed import LinkSpeed

    torch.set_num_threads(1)  # before the ranks are forked
    with namespace_cluster(NODES, LinkSpeed.parse(FREE)) as cluster:
        arguments = [cluster, subjects, turns, report, ranks]
        run_local(_rank, NODES * ranks, arguments, enter=lambda rank: cluster.enter(rank // ranks))


def _rank(
    cluster: Any,
    subjects: Sequence[Subject],
    turns: Mapping[str, Mapping[str, int]],
    report: Report,
    ranks: int,
) -> None:
    import torch.distributed as dist

    import detonation as dt
    from detonation.link_speed import LinkSpeed

    mesh = dt.init_mesh(NODES, ranks, "cpu")
    trainings = [Training(subject, mesh) for subject in subjects]
    for link, counts in turns.items():
        timings: dict[Subject, list[tuple[float, ...]]] = {
            training.subject: [] for training in trainings
        }
        for turn in range(max(counts.values())):
            for training in trainings:
                if turn < counts[training.subject.name]:
                    if dist.get_rank() == 0:
                        cluster.shape(LinkSpeed.parse(FREE if training.subject.emulated else link))
                    timings[training.subject].append(training.timed(LinkSpeed.parse(link), cluster))
        for subject, rows in timings.items():
            if rows and dist.get_rank() == 0:
                seconds, *counted = zip(*rows, strict=True)
                means = [statistics.fmean(column) for column in counted]
                report(Timing(subject.name, subject.emulated, link, seconds, *means))


class Training:
    """A training of one subject on this rank. Two steps are done: the first sets up, the second cuts buckets."""

    def __init__(self, subject: Subject, mesh: Any) -> None:
        import torch

        import detonation as dt
        from detonation import models
        from detonation.cluster.network.throttled import ThrottledCommunicator
        from detonation.link_speed import LinkSpeed
        from detonation.train.loop.checks import check_config, load_data
        from detonation.train.loop.session import Session
        from detonation.train.loop.world import Ranks
        from detonation.train.recipe import optimizers
        from detonation.train.recipe.resolve import Request

        config = check_config(
            Request(Path(subject.recipe), subject.sets, *mesh.shape).layers(None).config()
        )
        torch.manual_seed(config.seed)
        model = dt.shard(models.build_model(config.model.name, config.model.arguments), mesh)
        base = optimizers.build_optimizer(config.optimizer, model)
        self._axis: Any = (
            ThrottledCommunicator(mesh["replicate"], LinkSpeed.parse(FREE))
            if subject.emulated
            else mesh["replicate"]
        )
        scheme = dt.scheme(config.scheme.name, config.scheme.arguments)
        optimizer = dt.replicate(base, model, self._axis, scheme, seed=config.seed)
        replicas, shards = mesh.shape
        world = Ranks(mesh, torch.device("cpu"), [shards] * replicas)
        data = load_data(config.data)
        self.subject, self._done = subject, 0
        self._session = Session(config, world, torch.device("cpu"), data, model, base, optimizer)
        self._steps(2)

    def timed(self, speed: Any, cluster: Any) -> tuple[float, ...]:
        """Seconds and bytes per step over a link of `speed`, the mean of a unit."""
        import torch.distributed as dist

        if self.subject.emulated:
            self._axis.speed = speed
        before = cluster.counters(0)
        dist.barrier()
        records = self._steps(self.subject.unit)
        dist.barrier()
        counted = cluster.counters(0).since(before)
        totals = (
            sum(record.seconds for record in records),
            sum(record.bytes_sent for record in records),
            counted.sent_data_bytes,
            counted.sent_bytes,
        )
        return tuple(total / self.subject.unit for total in totals)

    def _steps(self, count: int) -> list[Any]:
        from detonation.cluster.processes.signals import Stop
        from detonation.train.loop.fit import fit

        records: list[Any] = []
        fit(self._session, self._done, self._done + count, records.append, Stop())
        self._done += count
        return records


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--links", nargs="+", default=LINKS)
    parser.add_argument(
        "--turns", type=int, default=9, help="steps of each subject; 3 on links below 50 Mbit/s"
    )
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES), choices=SCHEMES)
    parser.add_argument("--ranks", type=int, default=RANKS, help="per node")
    args = parser.parse_args()
    from detonation.link_speed import LinkSpeed

    slow = {link for link in args.links if LinkSpeed.parse(link).rate_bits_per_s < 50e6}
    turns = {
        link: dict.fromkeys(args.schemes, 3 if link in slow else args.turns) for link in args.links
    }
    subjects = [
        Subject(name, RECIPE, (*SETS.split(), *SCHEMES[name].split()), emulated)
        for name in args.schemes
        for emulated in (False, True)
    ]
    titles = [
        "scheme",
        "link",
        "namespaces, s",
        "throttled, s",
        "throttled / namespaces",
        "transfer time, s",
        "sent per step, by the link",
    ]
    print(
        "| "
        + " | ".join([*titles, "by the kernel", "with headers"])
        + " |\n"
        + "|---" * (len(titles) + 2)
        + "|"
    )
    real: dict[str, Timing] = {}

    def report(timing: Timing) -> None:
        if timing.emulated:
            print(row(real[timing.name], timing), flush=True)
        else:
            real[timing.name] = timing

    measure(subjects, turns, report, args.ranks)
    return


def row(real: Timing, emulated: Timing) -> str:
    from detonation.link_speed import LinkSpeed

    cells = [real.name, real.link, f"{real.median:.3f}", f"{emulated.median:.3f}"]
    cells += [
        f"{emulated.median / real.median:.3f}",
        f"{LinkSpeed.parse(real.link).seconds(real.bytes_sent, 0):.3f}",
    ]
    cells += [f"{real.bytes_sent:,.0f}"]
    cells += [
        f"{n:,.0f} ({n / real.bytes_sent - 1:+.1%})" for n in (real.data_bytes, real.frame_bytes)
    ]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
