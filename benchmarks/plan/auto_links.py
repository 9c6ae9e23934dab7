"""What `auto` chooses on links as they are, against the settings that one would try by hand there.

    sudo python -m benchmarks.plan.auto_links run                 appends a row for each link that has none yet
    python -m benchmarks.plan.auto_links table

Two nodes of one rank, links and a pause in forward and backward as in
benchmarks/plan/real_links.py, and quick-lm at its full size with one example of 32 tokens. On each
link a world lets `auto` choose twice, as `detonation train` does: freely, and among schemes for
AdamW; and measures the link once more, as `detonation probe` does. Then the settings train, in
turns. One that the plan expects to be three times as late as its first (of AdamW's: as the first
with AdamW) is left out.

An exchange takes what the rank that comes last has waited, on average (late and lost packets count). The rest of a step
is a median (a busy processor does not count); that of local steps over all settings with an optimizer, which take the
same. The time of a setting is its mean step, times the steps to the loss that AdamW in full has after 1,000, by the
losses of `plan`. A round of more than 20 steps is put together: its local steps, and the exchange of a round of 20. For
rounds of a length that was not measured the steps are a straight line in the logarithm of the length, from the shortest
to the longest that were, or from full with that optimizer at 1. Both means of `muloco` have the same messages, so they
are timed together.
"""

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.plan.real_links import Case, Training, drawn, pause_in

RESULTS = Path("benchmarks/results/2026-11-26-auto-links.jsonl")
RECIPE = "recipes/quick-lm.toml"
GOAL = 1000
SETS = f"scheme.name=auto data.context=32 train.batch_size=1 train.steps={GOAL} train.validate_every=0".split()
DRAWS = {"first": 1, "second": 2, "third": 3}
"""Seeds. What was found on the links of a draw was mended before the next was looked at."""
COUNT, LONGEST, TURNS, WARM = 6, 20, 2, 8
"""Links of a draw, steps of the longest round that trains, turns of each setting, and the fewest steps of a turn."""
LEFT_OUT = 3.0
FAST, JUMBO = 200e6, 9000
"""Above this rate packets are so large: the relay passes on some 20,000 in a second."""
MULOCO = {"precision": "2bit", "outer_lr": 1, "outer_momentum": 0, "aggregate": "rescaled_mean"}
RATES = "Mbit/s of all-reduce, all-gather, all-to-all"
EVERY, OUTER = (5, 10, 30, 100), {"outer_lr": 0.7, "outer_momentum": 0.5}
SIGNS = {"precision": "sign", "error_feedback": False}
BY_HAND: list[tuple[str, Mapping[str, Any]]] = [
    ("full", {}),
    ("loco", {}),
    ("demo", {"topk": 1, "decay": 0.95, **SIGNS}),
    ("demo", {"topk": 4, **SIGNS}),
    ("random_sign", {}),
    ("streaming_diloco", {"every": 10, "delay": 1, "keep": 0.5, **OUTER}),
    *(("diloco", {"every": every, **OUTER}) for every in EVERY),
    *(("muloco", {"every": every, **MULOCO}) for every in EVERY),
]


def links(draw: str) -> list[Case]:
    """5 to 1,000 Mbit/s, round trips of 1 to 200 ms, and 0.1 s of compute on each."""
    return list(drawn(COUNT, DRAWS[draw], (5, 1000), (0.5, 100), (0.1, 0.1)))


def run(case: Case) -> dict[str, Any]:
    """The row of a link, from a world of its own."""
    from benchmarks.lab.relayed_nodes import relayed_cluster

    from detonation.cluster.launch import run_local

    conditions = case.conditions()
    if conditions.rate_bits_per_s > FAST:
        conditions = replace(conditions, packet_bytes=JUMBO)
    with relayed_cluster(2, conditions) as cluster:
        return run_local(measure, 2, [case], enter=cluster.enter)[0]


def measure(case: Case) -> dict[str, Any]:
    """The row. Runs on every rank."""
    import torch
    import torch.distributed as dist

    import detonation as dt
    from detonation.cluster.network.profile import axis_profile
    from detonation.plan.cost import Network, Work, cost
    from detonation.train.choice import decide
    from detonation.train.choice.asked import Asked, Auto
    from detonation.train.loop.checks import shard_shapes
    from detonation.train.recipe.resolve import Request
    from detonation.train.verbs.probe import _AXIS_S

    start, probe, probes = decide.start_session, decide.probe_axis, dict[str, Any]()

    def paused(*arguments: Any) -> Any:
        session = start(*arguments)
        pause_in(session.model, case.compute_s)
        return session

    def timed(axis: Any, device: torch.device, budget_s: float) -> Any:
        began = time.perf_counter()
        found = probe(axis, device, budget_s)
        probes[f"{len(probes)}: {budget_s:g} s"] = {
            **asdict(found),
            "took_s": time.perf_counter() - began,
        }
        return found

    decide.start_session, decide.probe_axis = paused, timed  # type: ignore[attr-defined]

    class WithAdamW(Asked):
        def candidates(self) -> dict[str, Any]:
            return {
                key: each
                for key, each in super().candidates().items()
                if described(each)["optimizer"] == "AdamW"
            }

    layers = Request(Path(RECIPE), tuple(SETS), 2, 1).layers(None)
    device, cpu = torch.device("cpu"), dt.init_mesh(2, 1, "cpu")["replicate"]
    asked = {"auto": Asked(Auto(), layers), "auto, AdamW": WithAdamW(Auto(), layers)}
    chosen = {name: decide.decide(each, device) for name, each in asked.items()}
    timed(cpu, device, _AXIS_S)
    first = {name: each.plan["chosen"]["time_to_loss_s"] for name, each in chosen.items()}
    made = [each.config for each in chosen.values()]
    configs, left_out = {called(each): each for each in made}, {}
    network, work = (
        Network.of_axis(axis_profile(chosen["auto"].plan["link"]), 1),
        Work(shard_shapes(made[0]), case.compute_s, reports=True),
    )
    for config in [layers.under(*each) for each in BY_HAND]:
        wanted = described(config)
        scheme = dt.scheme(wanted["scheme"], wanted["arguments"])
        factor, _ = steps_factor(**wanted, parameters=sum(work.sizes.values()))
        best = first["auto, AdamW" if wanted["optimizer"] == "AdamW" else "auto"]
        late = GOAL * factor * cost(scheme, work, network).total_s / best
        if late > LEFT_OUT:
            left_out[called(config)] = late
        else:
            configs.setdefault(called(config), config)
    trainings: dict[str, Training] = {}
    for config in configs.values():  # of a long round the same at `LONGEST` trains, once
        shortened = shorter(layers, config)
        trainings[called(shortened)] = trainings.get(called(shortened)) or Training(
            decide.check_config(shortened), case.compute_s, unit(shortened)
        )
    records: dict[str, list[Any]] = {name: [] for name in trainings}
    for name, training in [*trainings.items()] * TURNS:
        records[name] += training.train(unit(training.config))
    settings = {
        name: {"records": records[name], **described(each.config)}
        for name, each in trainings.items()
    }
    everyone = [settings, settings]
    dist.all_gather_object(everyone, settings)
    for name, found in settings.items():
        found["records"] = [each[name]["records"] for each in everyone]
    plans = {
        name: {key: value for key, value in each.plan.items() if key != "options"}
        for name, each in chosen.items()
    }
    choices = {name: called(each.config) for name, each in chosen.items()}
    options = [each for plan in chosen.values() for each in plan.plan["options"]]
    predicted = {f"{each['spelled']} with {each['optimizer']}": each["seconds"] for each in options}
    predicted = {name: predicted[name] for name in configs if name in predicted}
    return {
        **asdict(case),
        "choices": choices,
        "predicted": predicted,
        "probes": probes,
        "settings": settings,
        "timed": {
            name: {**described(each), "as": called(shorter(layers, each))}
            for name, each in configs.items()
        },
        "left_out": left_out,
        "plans": plans,
    }


def shorter(layers: Any, config: Any) -> Any:
    """The configuration in rounds of at most `LONGEST` steps."""
    level = config.levels[-1].scheme
    every = level.arguments.get("every", 1)
    return (
        layers.under(level.name, {**level.arguments, "every": LONGEST})
        if every > LONGEST
        else config
    )


def described(config: Any) -> dict[str, Any]:
    from detonation.plan.losses import trained_by
    from detonation.train.loop.checks import scheme_of

    made = scheme_of(config.levels[-1])
    optimizer = trained_by(config.optimizer.name, config.optimizer.arguments)
    return {"scheme": made.name, "arguments": dict(made.arguments), "optimizer": optimizer}


def called(config: Any) -> str:
    """A name for tables, such as "muloco(every=5, ...) with Muon"."""
    from detonation.core.schemes.scheme import scheme
    from detonation.plan.cost import spelled

    found = described(config)
    return f"{spelled(scheme(found['scheme'], found['arguments']))} with {found['optimizer']}"


def unit(config: Any) -> int:
    """Steps of a turn: whole rounds."""
    every = int(config.levels[-1].scheme.arguments.get("every", 1))
    return every * math.ceil(WARM / every)


def step_s(row: dict[str, Any], setting: dict[str, Any], every: int | None) -> float:
    """Seconds of a step of a setting in rounds of `every`, None where it has none."""
    same = [taken(each) for each in row["settings"].values() if messages(each) == messages(setting)]
    trained = same[0][2]
    own, waited = (
        [second for each in same for second in each[part][trained - 1 :: trained]]
        for part in (0, 1)
    )
    exchange = statistics.median(own) + statistics.fmean(waited)
    if trained == 1:
        return exchange
    alike = [
        taken(each)
        for each in row["settings"].values()
        if each["optimizer"] == setting["optimizer"]
    ]
    local = statistics.median(
        each[n] for each, _, length in alike for n in range(len(each)) if (n + 1) % length
    )
    local += statistics.fmean(
        each[n] for _, each, _ in same for n in range(len(each)) if (n + 1) % trained
    )
    assert every
    return ((every - 1) * local + exchange) / every


def messages(setting: dict[str, Any]) -> dict[str, Any]:
    """What makes the messages of a setting: both means of `muloco` have the same."""
    alike = {key: value for key, value in setting["arguments"].items() if key != "aggregate"}
    return {"scheme": setting["scheme"], "optimizer": setting["optimizer"], **alike}


def taken(setting: dict[str, Any]) -> tuple[list[float], list[float], int]:
    """Of each step the seconds beside waiting, and those that the last rank waited; and after how many steps it sends.

    A streaming scheme sends now and then, so all its steps count alike.
    """
    ranks = setting["records"]
    own = [
        max(owns)
        for owns in zip(
            *([seconds - wait for seconds, wait in rank] for rank in ranks), strict=True
        )
    ]
    waited = [
        min(waits) for waits in zip(*([wait for _, wait in rank] for rank in ranks), strict=True)
    ]
    return (
        own,
        waited,
        1 if "fragments" in setting["arguments"] else int(setting["arguments"].get("every", 1)),
    )


def steps_factor(
    scheme: str, arguments: Mapping[str, Any], optimizer: str, parameters: int
) -> tuple[float, bool]:
    """Steps to the loss over those of the baseline, and whether they were measured at this length of a round.

    Without end where no length was measured.
    """
    import detonation as dt
    from detonation.plan.losses import Goal, estimate

    goal = Goal(2, parameters, GOAL)

    def known(name: str, changed: Mapping[str, Any]) -> float | None:
        found = estimate(dt.scheme(name, changed), optimizer, goal)
        return found.steps_factor if found else None

    here = known(scheme, arguments)
    if here is not None:
        return here, True
    near = {every: known(scheme, {**arguments, "every": every}) for every in range(2, 101)}
    points = sorted((every, factor) for every, factor in near.items() if factor)
    whole = known("full", {})
    if not points:
        return math.inf, False
    if len(points) == 1 and whole is not None:
        points.insert(0, (1, whole))
    (x0, y0), *_, (x1, y1) = [(math.log(every), factor) for every, factor in points]
    return y0 + (y1 - y0) * (math.log(arguments["every"]) - x0) / (x1 - x0), False


def times(row: dict[str, Any], parameters: int) -> dict[str, tuple[float, float, bool]]:
    """By setting: the seconds of a step, seconds to the loss, and whether the loss was measured at that length."""
    from detonation.core.schemes.scheme import scheme
    from detonation.plan.cost import spelled

    found: dict[str, tuple[float, float, bool]] = {}
    for timed in row["timed"].values():
        name, arguments, optimizer = timed["scheme"], timed["arguments"], timed["optimizer"]
        seconds = step_s(row, row["settings"][timed["as"]], arguments.get("every"))
        for aggregate in (
            ("mean", "rescaled_mean") if name == "muloco" else (arguments.get("aggregate"),)
        ):
            given = {**arguments, "aggregate": aggregate} if aggregate else arguments
            factor, measured = steps_factor(name, given, optimizer, parameters)
            called = f"{spelled(scheme(name, given))} with {optimizer}"
            if factor < math.inf:
                found[called] = seconds, GOAL * seconds * factor, measured
    return found


def table(rows: list[dict[str, Any]]) -> None:
    from detonation.train.loop.checks import shard_shapes
    from detonation.train.recipe.resolve import Request

    layers = Request(Path(RECIPE), tuple(SETS), 2, 1).layers(None)
    parameters = sum(
        math.prod(shape) for shape in shard_shapes(layers.under("full", {}))[0].values()
    )
    known = [
        (Case(*(row[name] for name in Case.__match_args__)), row, times(row, parameters))
        for row in rows
    ]
    lost: dict[tuple[str, str], list[float]] = {}
    titles = (
        "best, losses measured",
        "to the loss, s",
        "later",
        "best, losses by a line, too",
        "to the loss, s",
        "later",
    )
    line("link", "by", "choice", "step, ms (plan)", "to the loss, s", *titles)
    line(*["---"] * 11)
    for case, row, found in known:
        for by, choice in row["choices"].items():
            among = {
                name: each
                for name, each in found.items()
                if by == "auto" or name.endswith(" with AdamW")
            }
            step, seconds, _ = found[choice]
            cells = [f"{1e3 * step:.0f} ({1e3 * row['predicted'][choice]:.0f})", f"{seconds:.0f}"]
            for losses in "measured", "by a line, too":
                there = {
                    name: each for name, each in among.items() if each[2] or losses != "measured"
                }
                best = min(there, key=lambda name: there[name][1])
                lost.setdefault((by, losses), []).append(seconds / there[best][1] - 1)
                cells += [short(best), f"{there[best][1]:.0f}", f"{lost[by, losses][-1]:+.1%}"]
            line(case, by, short(choice), *cells)
    print()
    for (by, losses), each in lost.items():
        worst = f"{statistics.median(each):.1%} (median), {max(each):.1%} (worst)"
        print(f"{by}: {worst} later than the best of all whose losses are {losses}")
    print()
    line("step, ms (plan), to the loss, s", *(case.link for case, _, _ in known))
    line(*["---"] * (len(known) + 1))
    for name in dict.fromkeys(
        name for _, row, found in known for name in (*found, *row["left_out"])
    ):
        line(short(name), *(cell(name, row, found) for _, row, found in known))
    print()
    line(
        "link",
        "round trip",
        "budget",
        "took",
        RATES,
        "latency of an all-gather",
        "64 KiB after silence",
    )
    line(*["---"] * 7)
    for case, row, _ in known:
        for name, probe in row["probes"].items():
            rates = ", ".join(
                f"{each['rate_bits_per_s'] / 1e6:.3g}" for each in probe["operations"].values()
            )
            latency, late = probe["operations"]["all-gather"]["latency_s"], probe["silence_s"]
            trip = f"{2e3 * case.conditions().latency_s:.3g} ms"
            cells = [
                f"{probe['took_s']:.1f} s",
                rates,
                f"{1e3 * latency:.3g} ms",
                f"{1e3 * late:+.0f} ms",
            ]
            line(case, trip, name.split(": ")[1], *cells)


def line(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |")


def cell(name: str, row: dict[str, Any], found: Mapping[str, tuple[float, float, bool]]) -> str:
    if name not in found:
        return f"x {row['left_out'][name]:.1f}, left out" if name in row["left_out"] else ""
    step, seconds, _ = found[name]
    expected = f" ({1e3 * row['predicted'][name]:.0f})" if name in row["predicted"] else ""
    return f"{1e3 * step:.0f}{expected}, {seconds:.0f}"


def short(name: str) -> str:
    """Without the settings that all have in common."""
    for each in ("outer_lr=0.7, outer_momentum=0.5", "outer_lr=1, outer_momentum=0, "):
        name = name.replace(each, "")
    return name.replace("aggregate=rescaled_mean", "rescaled")


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["run", "table"])
    parser.add_argument("--draw", choices=DRAWS, default="third")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of links")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows = (
        [json.loads(line) for line in args.results.read_text().splitlines()]
        if args.results.exists()
        else []
    )
    rows = [row for row in rows if row["draw"] == args.draw]
    if args.action == "table":
        table(rows)
        return
    import torch

    torch.set_num_threads(1)  # before the ranks are forked
    os.nice(-15)  # others use the machine, too
    for number, case in enumerate(links(args.draw)):
        if number not in (args.only or range(COUNT)) or any(
            row["number"] == number for row in rows
        ):
            continue
        began = time.perf_counter()
        row = {"draw": args.draw, "number": number, **run(case)}
        with args.results.open("a") as file:
            file.write(json.dumps(rounded(row)) + "\n")
        print(
            f"{number}: {case} in {time.perf_counter() - began:.0f} s, load {os.getloadavg()[0]:.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
