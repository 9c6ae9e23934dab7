"""The methods of benchmarks/long_rounds, the most important first: research/long-rounds.md has the reasons.

A scheme has five tries on seed 0 per number of replicas, in rounds of 100 steps: three learning rates around that of
its reference, with the first outer setting, then two other outer settings at the best rate. What they choose is judged
in rounds of every length. The references have six tries, and more rates at an end.
"""

import dataclasses
import statistics
from collections.abc import Iterable, Iterator, Sequence

from benchmarks.compare.rows import Cell
from benchmarks.compare.tuning import Method, Rows, losses
from benchmarks.frontier.grid import QUICK
from benchmarks.second_round.grid import MUON_FORMS, SMALLER

STEPS = 3000
MODEL = f"{SMALLER} data.source=sotu"
COMMON = f"{MODEL} train.steps={STEPS} schedule.warmup=100 schedule.floor=0.1"
TOTAL = 16
"""Examples per step over all replicas."""
LARGER = 64
"""The same where each replica has four times as many."""
CURVE = {30: 60}
"""Steps between two losses on the way for rounds of a length, where they are not 100."""

ADAMW, MUON = "AdamW, full", "Muon, full"
RATES = {ADAMW: (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2), MUON: (1.25e-3, 2.5e-3, 5e-3, 1e-2, 2e-2)}
INNER = {
    ADAMW: tuple(
        f"optimizer.name=AdamW optimizer.betas=[0.9,{beta2}] optimizer.weight_decay={decay}"
        for beta2, decay in ((0.999, 0.01), (0.99, 0.01), (0.95, 0.01), (0.99, 0.1))
    ),
    MUON: tuple(
        f"optimizer.name=Muon optimizer.momentum={momentum} optimizer.weight_decay={decay}"
        for momentum, decay in ((0.9, 0.1), (0.8, 0.1), (0.95, 0.1), (0.9, 0.01))
    ),
}
"""Inner optimizers by reference, with the settings that the reference tries."""

OUTER = (1.0, 0.0), (0.7, 0.5), (0.7, 0.9)
"""Learning rates and momenta of the outer step."""
ALONE = (0.7, 0.5), (1.0, 0.5), (0.7, 0.9)
"""The same for one worker, whose (1, 0) is the reference itself."""
SPARSE = (1.0, 0.7, 1.5)
"""Outer learning rates of `sparseloco`, which has no outer momentum."""

TUNED_AT = 100
"""Steps of the rounds that are tuned."""
ROUNDS = (TUNED_AT, 30, 300)
GROWING = "later:600:scheme.every=100 later:900:scheme.every=300"
"""Rounds of 30 until step 600, of 100 until 900, then of 300: 30 rounds, as many as of 100."""
MULOCO = "scheme.name=muloco scheme.aggregate=mean"
"""Of the settings that the recipe has tuned for short rounds none may stay unsaid."""
KEEPS, KEEPS_NOTHING = "streaming_diloco, 4bit", "streaming_diloco, 4bit, keep 0"
"""With eight replicas the second alone is tried: the first parts two of them. With two it takes the first's setting."""
SCHEMES = {
    "muloco, 2bit": (MUON, f"{MULOCO} scheme.precision=2bit"),
    "diloco, 2bit": (ADAMW, f"{MULOCO} scheme.precision=2bit"),
    KEEPS: (ADAMW, "scheme.name=streaming_diloco scheme.delay=5 scheme.keep=0.5"),
    "sparseloco": (ADAMW, "scheme.name=sparseloco"),
    KEEPS_NOTHING: (ADAMW, "scheme.name=streaming_diloco scheme.delay=5 scheme.keep=0.0"),
}
"""By name, the reference with the same inner optimizer and the scheme."""
GAP = {
    "muloco, 2bit, growing rounds": f"{MULOCO} scheme.precision=2bit {GROWING}",
    "muloco, fp32": f"{MULOCO} scheme.precision=fp32",
    "muloco, 2bit, rescaled": "scheme.name=muloco scheme.precision=2bit scheme.aggregate=rescaled_mean",
    "muloco, 2bit, no error feedback": f"{MULOCO} scheme.precision=2bit scheme.decay=0.0",
    "muloco, low rank, bytes of 2bit": f"{MULOCO} scheme.precision=fp32 later:0:low_rank",
    "muloco, 2bit, orthogonal": f"{MULOCO} scheme.precision=2bit later:0:orthogonal_movement",
}
"""What may close the gap of `muloco` with eight replicas, by name."""


def methods(done: Rows) -> Iterator[Method]:
    """Lists the methods, as far as they follow from the runs that are done, the most important first."""
    references = [reference(name) for name in RATES]
    yield from references
    if any(
        each.best(done) is None for each in references
    ):  # their settings are the middle of all other grids
        return
    first, second = tuple(SCHEMES)[:2], tuple(SCHEMES)[2:]
    yield from gap(done)
    yield from alone(done)
    yield from schemes(done, first)
    yield from schemes(done, second)
    yield from (reference(name, seeds=8) for name in RATES)
    yield from winners(done)
    yield from larger(done)
    yield from forms(done)


def reference(name: str, total: int = TOTAL, seeds: int = 3) -> Method:
    """Full synchronisation: by one replica, since the mean of gradients is the same for any number.

    With the larger batch only the learning rate is tuned: Muon chose the last setting with the smaller one.
    """
    study, inner = (
        ("references", INNER[name]) if total == TOTAL else ("larger batch", INNER[name][-1:])
    )
    sets = f"{COMMON} train.validate_every=100 scheme.name=full"
    return Method(study, name, QUICK, sets, RATES[name], total, 1, seeds, inner)


def forms(done: Rows) -> Iterator[Method]:
    """Newer forms of Muon: as references, then in rounds of 30 steps, with as many tries as the old form."""
    whole = reference(MUON)
    for name, sets in MUON_FORMS.items():
        inner = tuple(f"{variant} {sets}" for variant in whole.variants)
        called = f"Muon, {name}, full"
        yield dataclasses.replace(whole, study="forms", name=called, variants=inner)
    for name, sets in MUON_FORMS.items():
        scheme, called = f"{SCHEMES['muloco, 2bit'][1]} {sets}", f"muloco, 2bit, {name}, every 30"
        for replicas in (2, 8):
            yield _tried(done, "forms", called, MUON, scheme, 30, replicas, with_outer(OUTER))


def alone(done: Rows) -> Iterator[Method]:
    """One worker with an outer step and no exchange."""
    for name in RATES:
        called = f"{name.split(',')[0]}, outer step every {TUNED_AT}"
        yield _tried(
            done, "alone", called, name, "scheme.name=diloco", TUNED_AT, 1, with_outer(ALONE)
        )


def schemes(done: Rows, names: Sequence[str]) -> Iterator[Method]:
    """Schemes with rounds of every length."""
    for replicas in (2, 8):
        yield from (
            rounds(done, name, replicas, every)
            for name in tried_with(replicas, names)
            for every in ROUNDS
        )


def tried_with(replicas: int, names: Iterable[str]) -> list[str]:
    """The schemes among `names` that so many replicas try."""
    return [name for name in names if replicas == 2 or name != KEEPS]


def rounds(done: Rows, name: str, replicas: int, every: int) -> Method:
    """A scheme with rounds of one length; other lengths than `TUNED_AT` take the setting that was tuned there."""
    against, scheme = SCHEMES[name]
    tried = (
        tuple(f"scheme.outer_lr={lr}" for lr in SPARSE)
        if name == "sparseloco"
        else with_outer(OUTER)
    )
    tuned = _tried(
        done, "rounds", f"{name}, every {TUNED_AT}", against, scheme, TUNED_AT, replicas, tried
    )
    source = (
        rounds(done, KEEPS, replicas, TUNED_AT)
        if name == KEEPS_NOTHING and replicas == 2
        else tuned
    )
    best = source.best(done)
    if best is None or (source is tuned and every == TUNED_AT):
        return tuned
    return _as_tuned(best, done, "rounds", f"{name}, every {every}", against, scheme, every)


def gap(done: Rows) -> Iterator[Method]:
    """What may close the gap to Muon with eight replicas, each with the setting that the plain scheme was tuned to."""
    best = rounds(done, "muloco, 2bit", 8, TUNED_AT).best(done)
    if best is None:
        return
    for name, scheme in GAP.items():
        every = 30 if "growing" in name else TUNED_AT
        called = name if "growing" in name else f"{name}, every {TUNED_AT}"
        yield _as_tuned(best, done, "gap", called, MUON, scheme, every)


def larger(done: Rows) -> Iterator[Method]:
    """The same scheme where each replica has more examples, as in real runs.

    The scheme takes the learning rate of its reference, as it chose with the smaller batch, and its own outer step.
    """
    whole = reference(MUON, LARGER)
    yield whole
    chosen, best = whole.best(done), rounds(done, "muloco, 2bit", 8, TUNED_AT).best(done)
    if chosen is None or best is None:
        return
    scheme, called = SCHEMES["muloco, 2bit"][1], f"muloco, 2bit, every {TUNED_AT}"
    tried = _tried(done, "larger batch", called, MUON, scheme, TUNED_AT, 8, (_outer(best),), LARGER)
    yield dataclasses.replace(tried, rates=(chosen.rate,))


def winners(done: Rows) -> Iterator[Method]:
    """The scheme with the lowest mean for each number of replicas, once all have been judged, on eight seeds."""
    for replicas in (8, 2):
        every = [
            rounds(done, name, replicas, length)
            for name in tried_with(replicas, SCHEMES)
            for length in ROUNDS
        ]
        means = {each.name: _mean(each, done) for each in every}
        if None not in means.values():
            best = min(every, key=lambda each: means[each.name] or 0.0)
            yield dataclasses.replace(best, seeds=8)


def with_outer(settings: tuple[tuple[float, float], ...]) -> tuple[str, ...]:
    """Variants with these learning rates and momenta of the outer step."""
    return tuple(
        f"scheme.outer_lr={lr} scheme.outer_momentum={momentum}" for lr, momentum in settings
    )


def _tried(
    done: Rows,
    study: str,
    name: str,
    against: str,
    scheme: str,
    every: int,
    replicas: int,
    variants: tuple[str, ...],
    total: int = TOTAL,
) -> Method:
    """A method with the inner optimizer and, in the middle, the learning rate of its reference, once that is tuned."""
    tuned = reference(against, total).best(done)
    settings = tuned.settings if tuned else {}
    own = {key: value for key, value in settings.items() if key.startswith("optimizer.")}
    middle = float(own.pop("optimizer.lr", RATES[against][2]))
    inner = " ".join(f"{key}={value}" for key, value in own.items()) or INNER[against][0]
    sets = f"{COMMON} train.validate_every={CURVE.get(every, 100)} {scheme} scheme.every={every} {inner}"
    return Method(
        study, name, QUICK, sets, (middle / 2, middle, 2 * middle), total, replicas, 3, variants
    )


def _as_tuned(
    best: Cell, done: Rows, study: str, name: str, against: str, scheme: str, every: int
) -> Method:
    """A method with the learning rate and the outer step of a setting that was tuned, and no tries of its own."""
    own = _tried(done, study, name, against, scheme, every, best.replicas, (_outer(best),))
    return dataclasses.replace(own, rates=(best.rate,))


def _outer(cell: Cell) -> str:
    """The outer step of a run."""
    return " ".join(
        f"{key}={value}" for key, value in cell.settings.items() if key.startswith("scheme.outer_")
    )


def _mean(method: Method, done: Rows) -> float | None:
    found = losses(method.judged(done))
    return statistics.fmean(found.values()) if len(found) == method.seeds else None
