"""The law of size at 30 M parameters: `make gpu GPU="law"`, which is no part of `make gpu`.

Full synchronisation by AdamW and by Muon; `diloco` with eight simulated replicas; `demo` in signs
and `muloco` with two. All take an equal number of steps on equal batches: as many as the time of
this call is sufficient for, or that of LAW_CALLS calls. Each run appends a row to law.rows.jsonl in the
directory of the report; another call trains what is missing there, then the next seed.
"""

import json
import math
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu.common import Job
from benchmarks.gpu.law_runs import Study, TimeUp, Trained, trained
from benchmarks.size_law import predict
from benchmarks.size_law.grid import (
    DILOCO,
    FULL,
    FULL_MUON,
    LONG_MULOCO,
    MIDDLES,
    RATIOS,
    SIGNS,
    Scheme,
)
from benchmarks.size_law.predict import Expected
from benchmarks.size_law.sizes import ROUND, WINDOW

TITLE = "The law of size"
CASES = (FULL, 1), (DILOCO, 8), (SIGNS, 2), (FULL_MUON, 1), (LONG_MULOCO, 2)
REFERENCES = {DILOCO.name: FULL.name, SIGNS.name: FULL.name, LONG_MULOCO.name: FULL_MUON.name}
SEEDS, TINY_SEEDS = 3, 1
SHARE = 0.85
"""Share of the time that is left which the planned steps take."""
NEAR = 0.05
"""Relative distance in tokens per parameter up to which a prediction is for a run."""

Row = dict[str, Any]
Written = tuple[dict[str, Any], list[Expected]] | None


def measure(job: Job) -> None:
    study = Study.of(job)
    written = predict.read(predict.PATH, study.size.name)
    cases = [case_of(scheme, replicas, written) for scheme, replicas in CASES]
    path = job.findings.path.with_suffix(".rows.jsonl")
    job.findings.files.append(path.name)
    plan = plan_of(job, path, study, cases)
    if plan is None:
        job.headline("no run")
        return
    call = Call(job, study, path, plan, is_comparable(job, study, plan, written))
    for seed in range(1, (TINY_SEEDS if job.tiny else SEEDS) + 1):
        if not all(call.has_row(case, seed) for case in cases):
            break
    job.headline("; ".join(summary(of_kind("run", path, study), cases)) or "no run yet")


def rows(path: Path) -> list[Row]:
    """The lines that are there; a line without its end is not there."""
    if not path.exists():
        return []
    lines = path.read_text().rpartition("\n")[0].splitlines()
    return [json.loads(line) for line in lines]


def append(path: Path, row: Row) -> None:
    """Appends a whole line; removes what a killed call has torn."""
    with path.open("ab+") as file:
        file.seek(0)
        whole, end, _ = file.read().rpartition(b"\n")
        file.truncate(len(whole + end))
        file.write(json.dumps(row).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def case_of(scheme: Scheme, replicas: int, written: Written) -> Expected:
    """What is predicted of a scheme; without a prediction, the settings that are tried first."""
    if written is not None:
        for each in written[1]:
            if (each.scheme, each.replicas) == (scheme.name, replicas):
                return each
    inner = scheme.inner.own[0] if scheme.inner else ""
    sets = (
        f"{scheme.sets} optimizer.name=benchmarks.size_law.optimizers:{scheme.optimizer} "
        f"optimizer.lr={MIDDLES[scheme.optimizer]} optimizer.ratio={RATIOS[0]} "
        f"{scheme.own[0]} {inner}"
    )
    return Expected(scheme.name, replicas, REFERENCES.get(scheme.name, ""), tuple(sets.split()))


def plan_of(job: Job, path: Path, study: Study, cases: Sequence[Expected]) -> Row | None:
    """The steps of each run: those of an earlier call, or as many as fit. None where too few do."""
    plans = of_kind("plan", path, study)
    if plans:
        return plans[-1]
    step_s = {row["scheme"]: row["step_s"] for row in of_kind("timed", path, study)}
    for case in cases:
        if case.scheme not in step_s:
            found = in_time(job, f"two rounds of {case.scheme}", study, case, 0, 2 * ROUND)
            if found is None:
                return None
            step_s[case.scheme] = found.step_s
            timed = {"kind": "timed", "scheme": case.scheme, "step_s": found.step_s}
            append(path, {**timed, **study.name})
    least = WINDOW * ROUND
    steps = least if job.tiny else steps_within(job.left_s(), step_s, study.size.steps)
    if steps < least:
        job.note(f"the time is sufficient for {steps} steps; a run has at least {least}")
        return None
    plan = {"kind": "plan", **study.name, "steps": steps, "step_s": step_s}
    append(path, plan)
    return plan


def of_kind(kind: str, path: Path, study: Study) -> list[Row]:
    """The rows of a kind, "timed", "plan" or "run", for this size and text."""
    wanted = {"kind": kind, **study.name}.items()
    return [row for row in rows(path) if wanted <= row.items()]


def in_time(
    job: Job, name: str, study: Study, case: Expected, seed: int, steps: int
) -> Trained | None:
    """Trains one run; None where it failed, or where the time was up, which a note says."""

    def act() -> Trained | None:
        try:
            return trained(job, study, case, seed, steps)
        except TimeUp as ended:
            job.note(f"{name}: the time was up {ended}")
            return None

    found: Trained | None = job.attempt(name, act)
    return found


def steps_within(left_s: float, step_s: dict[str, float], most: int) -> int:
    """Steps of each run, in whole rounds: all runs within LAW_CALLS calls, each run within one."""
    calls = int(os.environ.get("LAW_CALLS", "1"))
    together = calls * SHARE * left_s / sum(step_s.values())
    alone = SHARE * left_s / max(step_s.values())
    return min(most, ROUND * int(min(together, alone) / ROUND))


def is_comparable(job: Job, study: Study, plan: Row, written: Written) -> bool:
    """True if there is a prediction for these tokens and this text. Notes what there is."""
    tokens = plan["steps"] * study.tokens / study.size.parameters
    runs = f"{plan['steps']:,} steps, {tokens:.1f} tokens per parameter, text {study.text}"
    if written is None:
        job.note(
            f"{runs}. No prediction is written yet (python -m benchmarks.size_law --predict): the "
            "losses are alone, and the settings are the first of the grid, tuned at no size"
        )
        return False
    date, wanted, text = (written[0][key] for key in ("date", "tokens_per_parameter", "text"))
    is_for = abs(tokens / wanted - 1) <= NEAR and text == study.text
    job.note(
        f"{runs}. The prediction of {date} is for {wanted} tokens per parameter, text {text}"
        + ("" if is_for else ": it is shown, but these runs do not test it")
    )
    return is_for


@dataclass(frozen=True)
class Call:
    """The runs of this call. is_test: whether the prediction is for these runs."""

    job: Job
    study: Study
    path: Path
    plan: Row
    is_test: bool

    def has_row(self, case: Expected, seed: int) -> bool:
        """Trains a run that has no row. False if there is none then: the time was up."""
        done = of_kind("run", self.path, self.study)
        row = row_of(done, case, seed, self.plan["steps"])
        if row is None:
            row = self.train(case, seed)
            if row is None:
                return False
            append(self.path, row)
            done.append(row)
        self.show(row, case, done)
        return True

    def train(self, case: Expected, seed: int) -> Row | None:
        job, steps = self.job, self.plan["steps"]
        name = f"{case.scheme}, seed {seed}"
        needed_s = steps * self.plan["step_s"][case.scheme]
        if job.left_s() < needed_s and not job.tiny:
            job.note(f"{name} is left to the next call: it needs {needed_s:,.0f} s")
            return None
        found = in_time(job, name, self.study, case, seed, steps)
        if found is None:
            return None
        return {
            "kind": "run",
            **self.study.name,
            "scheme": case.scheme,
            "replicas": case.replicas,
            "sets": list(case.sets),
            "seed": seed,
            "steps": steps,
            "tokens": steps * self.study.tokens,
            "parameters": self.study.size.parameters,
            "val_loss": round(found.loss, 5),
            "curve": found.curve,
            "step_s": found.step_s,
            "bytes_sent_per_step": found.bytes_sent / steps,
            "torch": torch.__version__,
        }

    def show(self, row: Row, case: Expected, done: Sequence[Row]) -> None:
        cost = cost_of(row, case, done)
        within = ""
        if self.is_test and cost is not None and is_predicted(case):
            within = "yes" if case.run_low <= cost <= case.run_high else "no"
        self.job.row(
            run=row["scheme"],
            replicas=row["replicas"],
            seed=row["seed"],
            loss=f"{row['val_loss']:.4f}",
            to=case.to,
            found="" if cost is None else f"{cost:+.1%}",
            predicted=predicted(case),
            law=case.law,
            within=within,
            ms_per_step=1e3 * row["step_s"],
            bytes_per_parameter_and_step=row["bytes_sent_per_step"] / row["parameters"],
        )


def row_of(done: Sequence[Row], case: Expected, seed: int, steps: int) -> Row | None:
    wanted = (case.scheme, case.replicas, list(case.sets), seed, steps)
    keys = ("scheme", "replicas", "sets", "seed", "steps")
    return next((row for row in done if tuple(row[key] for key in keys) == wanted), None)


def cost_of(row: Row, case: Expected, done: Sequence[Row]) -> float | None:
    """The loss relative to that of full synchronisation with the same seed."""
    for base in done:
        if base["scheme"] == case.to and all(base[key] == row[key] for key in ("seed", "steps")):
            return float(row["val_loss"] / base["val_loss"] - 1)
    return None


def is_predicted(case: Expected) -> bool:
    """False without a law, and where the largest size of the fit has refuted it."""
    return case.cost is not None and case.law != "refuted"


def predicted(case: Expected) -> str:
    """The predicted cost of a single run with its interval, in percent."""
    if not is_predicted(case):
        return ""
    low, high = 100 * case.run_low, 100 * case.run_high
    return f"{case.cost:+.1%} [{low:+.1f}, {high:+.1f}]"


def summary(done: Sequence[Row], cases: Sequence[Expected]) -> Iterator[str]:
    """By scheme, the mean over seeds of what was found."""
    for case in cases:
        own = [row for row in done if row["scheme"] == case.scheme]
        costs = [cost_of(row, case, done) for row in own]
        logs = [math.log1p(cost) for cost in costs if cost is not None]
        if logs:
            mean = math.expm1(statistics.fmean(logs))
            yield f"{case.scheme} {mean:+.1%} to {case.to} (n={len(logs)})"
