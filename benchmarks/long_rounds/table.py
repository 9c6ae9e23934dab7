"""The table of benchmarks/long_rounds: losses to both references, bytes, seconds on six links, and the seeds."""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator
from math import prod

import torch
from benchmarks.compare.paired import percent
from benchmarks.compare.rows import Cell, Row, per_parameter
from benchmarks.compare.tuning import Method, Rows, losses
from benchmarks.long_rounds.grid import ADAMW, MUON, reference
from benchmarks.long_rounds.run import phases, settings

from detonation.link_speed import LinkSpeed
from detonation.models import build_model
from detonation.plan.cost import Cost, Network, Work, cost
from detonation.plan.losses import relative

LINKS = tuple(f"{rate}mbit,{latency}ms" for rate in (10, 100, 1000) for latency in (5, 100))
REPLICAS = 1, 2, 8
MOST = 8
"""Judging seeds at most."""


def table(grid: Callable[[Rows], Iterator[Method]], done: Rows) -> str:
    """One line per method that has a run; `tuning` in the place of seeds where seed 0 alone has run."""
    links = " | ".join(f"s at {link}" for link in LINKS)
    lines = [
        "| method | replicas | batch | chosen | tries | seeds | held-out loss | to AdamW, % | to Muon, % "
        f"| bytes per parameter and step | {links} |",
        "|---" * (10 + len(LINKS)) + "|",
    ]
    every = {
        (each.study, each.name, each.replicas): dataclasses.replace(each, seeds=MOST)
        for each in grid(done)
    }
    for each in every.values():
        tried = [cell for cell in each.tried(done) if cell.key in done]
        for replicas in REPLICAS if " full" in each.name else (each.replicas,):
            if tried or _runs(each, done):
                lines.append("| " + " | ".join(_line(each, tried, replicas, done)) + " |")
    return "\n".join(lines)


def _line(method: Method, tried: list[Cell], replicas: int, done: Rows) -> list[str]:
    best = method.best(done) or min(
        tried, key=lambda cell: done[cell.key]["val_loss"] or float("inf")
    )
    runs = _runs(method, done)
    found = losses(runs)
    mean = f"{statistics.fmean(found.values()):.4f}" if found else "diverged"
    against = [_against(found, _reference(name, method.total, done)) for name in (ADAMW, MUON)]
    seeds = "tuning" if set(found) <= {0} else str(len(found))
    row = done.get(best.key) or next(iter(runs.values()))
    priced = _priced(best)
    sent, seconds = _sent(priced, replicas, done), _seconds(priced, replicas, done)
    if replicas == best.replicas and priced == best:
        sent = per_parameter(row) if row["val_loss"] else sent
    cells = [
        method.name,
        str(replicas),
        str(method.total),
        _chosen(method, best),
        str(len(tried)),
        seeds,
        mean,
    ]
    return [*cells, *against, f"{sent:.4f}", *(f"{each:,.0f}" for each in seconds)]


def _runs(method: Method, done: Rows) -> dict[int, Row]:
    """The judging runs of the best setting; the best tuning run, as seed 0, where there are none."""
    if runs := method.judged(done):
        return runs
    tried = [
        done[cell.key]
        for cell in method.tried(done)
        if cell.key in done and done[cell.key]["val_loss"]
    ]
    return {0: min(tried, key=lambda row: float(row["val_loss"]))} if tried else {}


def _reference(name: str, total: int, done: Rows) -> dict[int, float]:
    """The losses of a reference by seed, seed 0 among them: whoever has no judging run is compared on that."""
    method = reference(name, total, MOST)
    best = method.best(done)
    return losses({**({0: done[best.key]} if best else {}), **method.judged(done)})


def _against(found: dict[int, float], base: dict[int, float]) -> str:
    common = set(found) & set(base)
    if not common or all(
        found[seed] == base[seed] for seed in common
    ):  # nothing, or the reference itself
        return ""
    return percent(*relative(found, base)[:2])


def _chosen(method: Method, best: Cell) -> str:
    """What tuning chose: the learning rate, marked at an end of its grid, and the settings of the variant."""
    values = best.settings
    edge = (
        " (edge)"
        if len(method.rates) > 1 and best.rate in (method.rates[0], method.rates[-1])
        else ""
    )
    keys = [each.split("=")[0] for each in method.variants[0].split()]
    shown = [f"{key.split('.')[1]} {values[key]}" for key in keys if key != "optimizer.name"]
    return ", ".join([f"lr {best.rate:g}{edge}", *shown])


def _priced(cell: Cell) -> Cell:
    """The run whose bytes count: thin factors, which the simulation sends as their product, have those of 2 bits."""
    if not any(each.endswith(":low_rank") for each in cell.sets):
        return cell
    bits = {"scheme.precision=fp32": "scheme.precision=2bit"}
    return dataclasses.replace(cell, sets=tuple(bits.get(each, each) for each in cell.sets))


def _sent(cell: Cell, replicas: int, done: Rows) -> float:
    """The bytes per parameter and step that the cost model expects."""
    costs = _costs(cell, replicas, LINKS[0], done)
    steps, size = (
        sum(count for _, count in costs),
        sum(prod(shape) for shape in _model(cell).values()),
    )
    return sum(each.bytes_sent * count for each, count in costs) / steps / size


def _seconds(cell: Cell, replicas: int, done: Rows) -> list[float]:
    """Seconds of the whole run on each link."""
    return [
        sum(each.total_s * count for each, count in _costs(cell, replicas, link, done))
        for link in LINKS
    ]


def _costs(cell: Cell, replicas: int, link: str, done: Rows) -> list[tuple[Cost, int]]:
    """The cost of a step in each phase of a run, and the steps of the phase."""
    network = Network.of_link_speed(LinkSpeed.parse(link), replicas, 1)
    work = Work([_model(cell)], _compute_s(cell.total, replicas, done))
    return [(cost(scheme, work, network), steps) for scheme, steps in phases(cell)]


def _compute_s(total: int, replicas: int, done: Rows) -> float:
    """Processor-seconds of a replica's step, the median over runs; of a larger share where so many have not run yet."""
    own = [each for each in done.values() if each["total"] == total and each["val_loss"]]
    same = [each for each in own if each["replicas"] == replicas]
    each = [row["cpu_s"] / row["steps"] / row["replicas"] for row in same]
    if each:
        return float(statistics.median(each))
    return float(statistics.median(row["cpu_s"] / row["steps"] for row in own)) / replicas


@functools.cache
def _model(cell: Cell) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter."""
    chosen = settings(cell, 0).model
    with torch.device("meta"):
        made = build_model(chosen.name, chosen.arguments)
    return {name: tuple(parameter.shape) for name, parameter in made.named_parameters()}
