"""The runs of benchmarks/size_law, the most informative first: research/size-law.md has the rules.

Seed 0 tunes. A scheme tries, at 0.14M: three rates and the next one while the last of an end is
the best, then two other ratios between the rates of the groups, then two settings of its own, and
the rates at what it chose; at 0.037M the rates again. The schemes in `SETS_EXPONENT` try their
rates at 0.59M, too. Seeds from 1
on judge each size at the rate of the rule.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from benchmarks.compare.tuning import Method, Rows
from benchmarks.size_law.rule import rule
from benchmarks.size_law.sizes import LARGEST, SIZES, Size

RECIPE = "benchmarks/size_law/recipe.toml"
SMALL, TUNED, MIDDLE = SIZES[:3]
"""`TUNED` is the size at which all settings are tried."""
RATIOS = 3, 1, 10
"""Rates of embedding, output layer and norms, as multiples of that of the matrices."""
OUTER = (0.7, 0.9), (0.7, 0.5), (1.0, 0.0)
"""Learning rates and momenta of the outer step."""
MIDDLES = {"adamw": 2e-3, "muon": 5e-3, "signsgd": 1e-3}
"""The rate that is tried first, by optimizer."""


@dataclasses.dataclass(frozen=True)
class Scheme:
    """A line of the table.

    own: The settings that go with each rate, then two others.
    inner: Full synchronisation whose optimizer's settings a scheme with rounds takes.
    """

    name: str
    optimizer: str
    sets: str
    own: tuple[str, str, str]
    inner: "Scheme | None" = None


def _outer(settings: Sequence[tuple[float, float]]) -> tuple[str, str, str]:
    first, second, third = (
        f"scheme.outer_lr={lr} scheme.outer_momentum={momentum}" for lr, momentum in settings
    )
    return first, second, third


ADAMW = (
    "optimizer.betas=[0.9,0.95] optimizer.weight_decay=0.01",
    "optimizer.betas=[0.9,0.99] optimizer.weight_decay=0.01",
    "optimizer.betas=[0.9,0.95] optimizer.weight_decay=0.1",
)
MUON = (
    "optimizer.momentum=0.9 optimizer.weight_decay=0.01",
    "optimizer.momentum=0.95 optimizer.weight_decay=0.01",
    "optimizer.momentum=0.9 optimizer.weight_decay=0.1",
)
DEMO = (
    "scheme.name=demo scheme.topk=4 scheme.chunk=64 scheme.precision=sign "
    "scheme.error_feedback=false"
)
FULL = Scheme("AdamW, full", "adamw", "scheme.name=full", ADAMW)
FULL_MUON = Scheme("Muon, full", "muon", "scheme.name=full", MUON)
DILOCO = Scheme("diloco 30", "adamw", "scheme.name=diloco scheme.every=30", _outer(OUTER), FULL)
SIGNS = Scheme(
    "demo 4/64, sign",
    "signsgd",
    DEMO,
    ("scheme.decay=0.95", "scheme.decay=0.99", "scheme.decay=0.999"),
)
VOTES = Scheme(
    "random_sign 1/8",
    "signsgd",
    "scheme.name=random_sign scheme.rate=0.125",
    ("scheme.decay=0.9", "scheme.decay=0.95", "scheme.decay=0.8"),
)
LOCO = Scheme("loco, 4bit", "adamw", "scheme.name=loco scheme.precision=4bit", ADAMW)


def _muloco(every: int, settings: Sequence[tuple[float, float]]) -> Scheme:
    sets = f"scheme.name=muloco scheme.precision=2bit scheme.every={every}"
    sets += " scheme.aggregate=rescaled_mean"
    return Scheme(f"muloco {every}, 2bit", "muon", sets, _outer(settings), FULL_MUON)


LONG_MULOCO, SHORT_MULOCO = _muloco(30, OUTER[::-1]), _muloco(5, OUTER[::-1])
FIRST = (FULL, 1), (DILOCO, 8)
"""What all sizes have before the rest begins."""
SECOND = (DILOCO, 2), (FULL_MUON, 1), (LONG_MULOCO, 8), (LONG_MULOCO, 2)
THIRD = (
    *((SIGNS, 8), (SIGNS, 2), (SHORT_MULOCO, 8), (SHORT_MULOCO, 2)),
    *((VOTES, 8), (VOTES, 2), (LOCO, 8), (LOCO, 2)),
)
FOURTH = (DILOCO, 4), (LONG_MULOCO, 4)
"""For the power in the number of replicas."""
SETS_EXPONENT = {"adamw": (FULL, 1), "muon": (FULL_MUON, 1), "signsgd": (SIGNS, 8)}
"""By optimizer, the scheme and replicas whose rates at three sizes say how rates fall with size."""


def methods(done: Rows) -> Iterator[Method]:
    """Lists the methods, as far as they follow from the runs that are done."""
    for part in (FIRST, SECOND, THIRD, FOURTH):
        for scheme, replicas in part:
            yield from tuning(scheme, replicas, done)
        for size in SIZES:
            yield from judging(size, part, done)
    yield from judging(LARGEST, FIRST, done)


def judging(size: Size, part: Sequence[tuple[Scheme, int]], done: Rows) -> Iterator[Method]:
    """The judging runs of a size, of the schemes whose rule is known."""
    for scheme, replicas in part:
        rate, variant = rate_of(scheme, replicas, size, done), chosen(scheme, replicas, done)
        if rate is not None and variant is not None:
            yield method(scheme, replicas, size, (rate,), (variant,))


def tuning(scheme: Scheme, replicas: int, done: Rows) -> Iterator[Method]:
    """The tries of a scheme, as methods that no seed judges."""
    yield from every_setting(scheme, replicas, done)
    yield from every_rate(scheme, replicas, done).values()


def own_settings(scheme: Scheme, done: Rows) -> list[str]:
    """The own settings that a scheme tries; none until those of its inner optimizer are known."""
    if scheme.inner is None:
        return list(scheme.own)
    inner = chosen(scheme.inner, 1, done)
    if inner is None:
        return []
    _, _, settings = inner.partition(" ")  # without the ratio, which each scheme tries
    return [f"{own} {settings}" for own in scheme.own]


def every_setting(scheme: Scheme, replicas: int, done: Rows) -> list[Method]:
    """The tries at `TUNED`: rates and ratios, then, once those are known, its own settings."""
    middle, own = MIDDLES[scheme.optimizer], own_settings(scheme, done)
    if not own:
        return []
    ratios = tuple(f"optimizer.ratio={ratio} {own[0]}" for ratio in RATIOS)
    first = method(scheme, replicas, TUNED, around(middle), ratios, "tuning")
    best = first.best(done)
    if best is None:
        return [first]
    ratio = best.settings["optimizer.ratio"]
    others = tuple(f"optimizer.ratio={ratio} {each}" for each in own)
    return [first, method(scheme, replicas, TUNED, (best.rate,), others, "tuning")]


def every_rate(scheme: Scheme, replicas: int, done: Rows) -> dict[Size, Method]:
    """The tries of rates at each size that tunes, at the settings that `TUNED` has chosen.

    Where those are the first ones, the tries at `TUNED` are done already.
    """
    variant = chosen(scheme, replicas, done)
    if variant is None:
        return {}
    middle = every_setting(scheme, replicas, done)[0].best(done)
    assert middle is not None
    sizes = [TUNED, SMALL]
    if SETS_EXPONENT[scheme.optimizer] == (scheme, replicas):
        sizes.append(MIDDLE)
    rates = around(middle.rate)
    return {size: method(scheme, replicas, size, rates, (variant,), "tuning") for size in sizes}


def chosen(scheme: Scheme, replicas: int, done: Rows) -> str | None:
    """The ratio and the own settings that `TUNED` has chosen; None until they are known."""
    tries = every_setting(scheme, replicas, done)
    best = tries[1].best(done) if len(tries) > 1 else None
    if best is None:
        return None
    ratio = best.settings["optimizer.ratio"]
    variants = [f"optimizer.ratio={ratio} {own}" for own in own_settings(scheme, done)]
    (found,) = (each for each in variants if set(each.split()) <= set(best.sets))
    return found


def optima(scheme: Scheme, replicas: int, done: Rows) -> dict[Size, Method]:
    """The tries of rates by size; empty until all are done."""
    rates = every_rate(scheme, replicas, done)
    return rates if all(each.best(done) is not None for each in rates.values()) else {}


def rate_of(scheme: Scheme, replicas: int, size: Size, done: Rows) -> float | None:
    """The learning rate of the rule; None until the tries that it rests on are done."""
    reference = optima(*SETS_EXPONENT[scheme.optimizer], done)
    own = optima(scheme, replicas, done)
    return rule(reference, own, size, done) if reference and own else None


def method(
    scheme: Scheme,
    replicas: int,
    size: Size,
    rates: tuple[float, ...],
    variants: tuple[str, ...],
    study: str = "judged",
) -> Method:
    optimizer = f"optimizer.name=benchmarks.size_law.optimizers:{scheme.optimizer}"
    return Method(
        f"{study} {size.name}",
        scheme.name,
        RECIPE,
        f"{size.sets} {scheme.sets} {optimizer}",
        rates,
        size.batch,
        replicas,
        0 if study == "tuning" else size.seeds,
        variants,
    )


def around(middle: float) -> tuple[float, ...]:
    """Nine rates, each twice the one before it."""
    return tuple(float(f"{middle * 2.0**power:.4g}") for power in range(-4, 5))
