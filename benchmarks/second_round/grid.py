"""The methods of benchmarks/second_round, by study, the most important first.

Methods have the same budget of tuning (benchmarks/compare/tuning.py). A learning rate that ends at
0 was worse for each method that tried it, so later methods do not.
"""

import dataclasses
from collections.abc import Iterator

from benchmarks.compare.tuning import Method
from benchmarks.frontier.grid import LARGER, QUICK, VIT

COMMON = "data.source=sotu train.validation_batches=1000000"
REFERENCES = {
    "text": (("text", "AdamW 0.999, full", 2), ("text", "Muon 0.8, full", 2)),
    "votes": (("text", "random_sign 1/8, cycle", 8), ("text", "AdamW 0.999, full", 2)),
    "support": (("text", "demo 1/64 sign", 8), ("text", "AdamW 0.999, full", 2)),
    "delay": (("text", "demo 1/64 sign", 2), ("text", "AdamW 0.999, full", 2)),
    "rounds": (("rounds", "AdamW, full", 2), ("rounds", "Muon, full", 2)),
    "size": (("size", "AdamW, full", 2), ("size", "Muon, full", 2)),
    "images": (("images", "AdamW, full", 2), ("images", "demo 1/64 sign", 2)),
    "groups": (("groups", "AdamW, full", 2), ("text", "AdamW 0.999, full", 2)),
    "long": (("long", "AdamW, full", 1),),
    "muon": (("text", "Muon 0.8, full", 2), ("text", "AdamW 0.999, full", 2)),
}
"""The methods (study, name, replicas) that those of a study are compared with."""
ALSO = {
    "groups": (
        ("text", "muloco 5, 2bit, rescaled, Muon 0.8", 2),
        ("text", "muloco 5, 2bit, rescaled, Muon 0.8", 8),
        ("text", "muloco 30, 2bit, Muon 0.8", 2),
    )
}
"""Methods of the study of text in the table of another study: Muon always gives tables and head a
rate of their own."""
AVERAGED = "groups", "long"
"""Studies that also validate an average of the weights."""

PAIRS = (
    (("demo 4/64 sign, AdamW 0, 0.95", 2), ("AdamW 0.95, full", 2)),
    (("demo 1/64 sign, AdamW 0, 0.95", 2), ("demo 1/64 sign", 2)),
    (("demo 1/64 sign, alpha 0.2", 2), ("demo 1/64 sign", 2)),
    (("demo 4/64 sign, Muon", 2), ("muloco 5, 2bit, rescaled, Muon 0.8", 2)),
    (("loco 4bit, Muon 0.8", 2), ("muloco 5, 2bit, rescaled, Muon 0.8", 2)),
    (("random_sign 1/8", 8), ("random_sign 1/8, cycle", 8)),
    *(
        ((f"random_sign 1/{share}, cycle", 8), ("random_sign 1/8, cycle", 8))
        for share in (1, 2, 4, 16)
    ),
    *(((f"random_sign 1/{share}", 8), ("random_sign 1/8", 8)) for share in (4, 16)),
)
"""Two methods (name, replicas) of the study of text each, whose difference docs/findings.md quotes."""

TEXT, ROUNDS, SIZE, IMAGES = 32, 16, 16, 128
"""Examples per step over all replicas."""
ADAMW = "optimizer.name=AdamW optimizer.betas=[0.9,{}]"
WITHOUT_MOMENTUM = "optimizer.name=AdamW optimizer.betas=[0.0,{}]"
MUON = "optimizer.name=Muon optimizer.momentum=0.8"
MUON_ALONE = "optimizer.name=Muon optimizer.momentum=0"
"""Under a scheme that remembers a momentum."""
LONG_MUON = "optimizer.name=Muon"
"""Muon's default, a momentum of 0.95, was worse: research/log.md."""
MUON_FORMS = {
    "Polar Express": "optimizer.coefficients=polar_express",
    "NorMuon": "optimizer.muon_beta2=0.95",
    "Polar Express, NorMuon": "optimizer.coefficients=polar_express optimizer.muon_beta2=0.95",
}
"""Muon of 2025, against that of 2024."""
SIGNSGD = "optimizer.name=SignSGD"
FULL = "scheme.name=full "
SMALLER = "model.hidden_size=64 model.feed_forward=192"
"""0.14 million parameters."""
LONG = f"{SMALLER} schedule.warmup=100 train.steps=3000 train.validate_every=3000"

ADAMW_RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
MUON_RATES = (1.25e-3, 2.5e-3, 5e-3, 1e-2, 2e-2, 5e-2, 1e-1)
SIGN_RATES = (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
VOTE_RATES = (2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2)
OUTER = (1.0, 0.0), (0.7, 0.5), (0.7, 0.9)
"""Learning rates and momenta of the outer step."""
LONGER = {2: ((1, 0), (1.25, 0), (1.5, 0)), 8: ((1, 0), (1.5, 0), (2, 0), (2.5, 0))}
"""By replicas: the mean of movements in different directions is shorter than each; a rate above 1 makes up for it."""
MEAN, RESCALED = "scheme.aggregate=mean ", "scheme.aggregate=rescaled_mean "
ALONE = "scheme.outer_lr=1 scheme.outer_momentum=0 "
FLOOR = "schedule.floor=0.1"
"""The learning rate ends at a tenth."""
TO_ZERO = "schedule.floor=0.0"


def methods() -> Iterator[Method]:
    """Lists the methods, the most important first."""
    yield from headline()
    yield from references_of_rounds()
    yield from optimizers()
    yield from rounds_of_adamw()
    yield from few_bits()
    yield from replicas()
    yield from rounds()
    yield from longer()
    yield from votes()
    yield from support()
    yield from delay()
    yield from larger()
    yield from images()
    yield from groups()
    yield from long_groups()
    yield from muon_forms()


def text(
    name: str,
    sets: str,
    rates: tuple[float, ...],
    count: int = 2,
    seeds: int = 3,
    variants: tuple[str, ...] = (FLOOR,),
    study: str = "text",
) -> Method:
    return Method(study, name, QUICK, f"{COMMON} {sets}", rates, TEXT, count, seeds, variants)


def with_outer(*settings: tuple[float, float]) -> tuple[str, ...]:
    """Variants with these learning rates and momenta of the outer step."""
    return tuple(
        f"{FLOOR} scheme.outer_lr={lr:g} scheme.outer_momentum={momentum:g}"
        for lr, momentum in settings
    )


def headline() -> Iterator[Method]:
    """Both dense references, and what reaches them in fewer bytes."""
    both = FLOOR, TO_ZERO
    yield text("AdamW 0.999, full", FULL + ADAMW.format(0.999), ADAMW_RATES, seeds=8, variants=both)
    yield text("Muon 0.8, full", FULL + MUON, MUON_RATES, seeds=8)
    yield text(
        "muloco 5, 2bit, Muon 0.8",
        MEAN + muloco(5),
        MUON_RATES,
        seeds=8,
        variants=with_outer(*LONGER[2]),
    )
    yield text("loco 4bit, Muon 0.8", "scheme.name=loco " + MUON, MUON_RATES)
    yield text(
        "loco 4bit, AdamW",
        "scheme.name=loco " + ADAMW.format(0.999),
        ADAMW_RATES,
        seeds=8,
        variants=both,
    )
    yield text("demo 4/64 sign, Muon", demo(4, MUON_ALONE), MUON_RATES, seeds=8, variants=both)
    yield text("demo 1/64 sign", demo(1), SIGN_RATES, seeds=8, variants=both)
    decays = tuple(f"{FLOOR} scheme.decay={decay}" for decay in (0.999, 0.95))
    yield text("demo 4/64 sign", demo(4, decay=None), SIGN_RATES, seeds=8, variants=decays)
    yield text("random_sign 1/8", vote(8), VOTE_RATES, 8, seeds=8)
    yield text("random_sign 1/8, cycle", vote(8, cycle=True), VOTE_RATES, 8, seeds=8, variants=both)
    yield text(
        "muloco 5, 2bit, Muon 0.8", MEAN + muloco(5), MUON_RATES, 8, variants=with_outer(*LONGER[8])
    )
    for count, outer, seeds in (2, LONGER[2][:1], 8), (8, LONGER[8], 3):
        sets, tried = MEAN + muloco(30), with_outer(*outer)
        yield text("muloco 30, 2bit, Muon 0.8", sets, MUON_RATES, count, seeds, tried)
    # 7 and 8: at most 0.06 bytes with so many replicas
    for every, count, seeds in (5, 8, 8), (5, 2, 8), (7, 4, 3), (8, 8, 3), (30, 8, 3):
        name, sets = f"muloco {every}, 2bit, rescaled, Muon 0.8", ALONE + RESCALED + muloco(every)
        yield text(name, sets, MUON_RATES, count, seeds)
    for every, count in (
        (3, 2),
        (4, 4),
        (4, 8),
        (13, 2),
        (23, 8),
    ):  # at most 0.06 bytes, and at most 0.01
        sets = ALONE + RESCALED + muloco(every, precision="sign")
        yield text(f"muloco {every}, sign, rescaled, Muon 0.8", sets, MUON_RATES, count)
    yield text("Muon 0.95, full", FULL + LONG_MUON, MUON_RATES, seeds=8, variants=both)
    yield text(
        "muloco 5, 2bit, Muon 0.95",
        MEAN + ALONE + muloco(5, LONG_MUON),
        MUON_RATES,
        seeds=8,
        variants=both,
    )
    yield text(
        "muloco 30, 2bit, Muon 0.95",
        MEAN + ALONE + muloco(30, LONG_MUON),
        MUON_RATES,
        variants=both,
    )


def optimizers() -> Iterator[Method]:
    """What belongs to the optimizer and not to the scheme."""
    for decay in (0.9, 0.95):
        yield text(
            f"Signum {decay}, full", f"{FULL}{SIGNSGD} optimizer.momentum={decay}", SIGN_RATES
        )
    yield text("AdamW 0.95, full", FULL + ADAMW.format(0.95), ADAMW_RATES)
    yield text(
        "AdamW 0.999, full bf16", "scheme.precision=bf16 " + FULL + ADAMW.format(0.999), ADAMW_RATES
    )


def rounds_of_adamw() -> Iterator[Method]:
    """Short rounds for who keeps AdamW."""
    adamw = "scheme.precision={} " + ADAMW.format(0.999)
    for every, precision in (2, "4bit"), (5, "2bit"):
        sets = f"{MEAN}{ALONE}scheme.name=muloco scheme.every={every} {adamw.format(precision)}"
        yield text(f"muloco {every}, {precision}, AdamW", sets, ADAMW_RATES)
    yield text(
        "local_sgd 2, 4bit, AdamW",
        "scheme.name=local_sgd scheme.every=2 " + adamw.format("4bit"),
        ADAMW_RATES,
    )


def few_bits() -> Iterator[Method]:
    """Less on the wire, or less that leaves the memory."""
    yield text("demo 4/64 fp32", demo(4, precision="fp32", decay=0.999), SIGN_RATES)
    yield text("demo 1/64 sign, alpha 0.2", demo(1) + " scheme.alpha=0.2", SIGN_RATES)
    yield text("demo 4/64 sign, AdamW", demo(4, ADAMW.format(0.999)), ADAMW_RATES)
    for topk, decay, seeds in (4, 0.95, 8), (1, 0.95, 3), (4, 0.999, 3):
        sets = demo(topk, WITHOUT_MOMENTUM.format(decay))
        yield text(f"demo {topk}/64 sign, AdamW 0, {decay}", sets, ADAMW_RATES, seeds=seeds)
    for precision in ("2bit", "sign"):
        loco = f"scheme.name=loco scheme.precision={precision} "
        yield text(f"loco {precision}, Muon 0.8", loco + MUON, MUON_RATES)
        yield text(f"loco {precision}, AdamW", loco + ADAMW.format(0.999), ADAMW_RATES)


def replicas() -> Iterator[Method]:
    """The methods of two replicas with more of them, and the share that votes need."""
    for count in (4, 8):
        yield text("demo 1/64 sign", demo(1), SIGN_RATES, count)
    yield text(
        "demo 4/64 sign, AdamW 0, 0.95", demo(4, WITHOUT_MOMENTUM.format(0.95)), ADAMW_RATES, 8
    )
    yield text("loco 4bit, Muon 0.8", "scheme.name=loco " + MUON, MUON_RATES, 8)
    yield text("loco 4bit, AdamW", "scheme.name=loco " + ADAMW.format(0.999), ADAMW_RATES, 8)
    for share in (1, 2, 4, 16):
        yield text(f"random_sign 1/{share}, cycle", vote(share, cycle=True), VOTE_RATES, 8)
    for share in (4, 16):
        yield text(f"random_sign 1/{share}", vote(share), VOTE_RATES, 8)
    for count in (2, 4, 16, 32):
        yield text("random_sign 1/8", vote(8), VOTE_RATES, count)
    yield text("demo 4/64 sign, Muon", demo(4, MUON_ALONE), MUON_RATES, 8)


def votes() -> Iterator[Method]:
    """What `random_sign` with a cycle owes its loss to: one change at a time, with eight replicas."""
    for decay in (0.0, 0.5, 0.97):
        yield _votes(f"decay {decay}", vote(8, decay, cycle=True))
    signs = "scheme.precision=sign scheme.error_feedback=false scheme.decay=0.9"
    yield _votes("sent coordinates stay in the memory", vote(8, cycle=True) + " scheme.alpha=0")
    yield _votes(
        "rounding error stays in the memory", vote(8, cycle=True) + " scheme.error_feedback=true"
    )
    yield _votes("mean of signs", f"scheme.name=random scheme.rate=0.125 {signs} {SIGNSGD}")
    comb = (
        f"scheme.name=striding scheme.rate=0.125 {signs} scheme.aggregate=majority_vote {SIGNSGD}"
    )
    yield _votes("a comb instead of random subsets", comb)
    values = (
        "scheme.name=random scheme.precision=bf16 scheme.rate=0.0078125 scheme.decay={} " + SIGNSGD
    )
    for decay in (0.9, 0.999):  # a 128th in bf16 is an eighth in signs
        yield _votes(f"1/128 in bf16, decay {decay}", values.format(decay))
    yield _votes(
        "memories averaged every 50 steps", vote(8, cycle=True) + " every:50:memories_averaged"
    )
    half = vote(2, cycle=True)
    yield _votes("1/2, after 43 steps 1/16", half + " later:43:scheme.rate=0.0625")
    yield _votes(
        "1/2, after 43 steps 1/16 and 8 times as far", half + " later:43:fewer_and_farther"
    )


def _votes(name: str, sets: str) -> Method:
    return text(name, sets, VOTE_RATES, 8, study="votes")


def support() -> Iterator[Method]:
    """One support for all replicas in place of a top-k of each; nothing real can choose it better than by the mean.

    Of 64 coefficients eight signs without an index are about the bits of one sign and its index.
    """
    one = f"scheme.name=variants:one_support {SIGNSGD} scheme.of_mean="
    for name, sets in {
        "1/64 by the mean memory": "true",
        "8/64 by the mean memory": "true scheme.topk=8",
        "8/64 by one replica in turn": "false scheme.topk=8",
    }.items():
        yield text(name, one + sets, SIGN_RATES, 8, study="support")


def delay() -> Iterator[Method]:
    """Where the loss of a delay of one step comes from. The rows are kept; the delay of gradients is gone."""
    for name, sets in {
        "as it is": " scheme.delay=1",
        "without look-ahead": " scheme.delay=1 scheme.lookahead=false",
        "after 50 steps without": " later:50:delay_of_one",
        "the guess is the memory": " scheme.delay=1 later:1:look_ahead_by_memory",
    }.items():
        yield text(name, demo(1) + sets, SIGN_RATES, study="delay")
    for decay in (0.9, 0.98):
        yield text(
            f"decay {decay}", demo(1, decay=decay) + " scheme.delay=1", SIGN_RATES, study="delay"
        )


def references_of_rounds() -> Iterator[Method]:
    yield _rounds("AdamW, full", FULL + ADAMW.format(0.999), ADAMW_RATES)
    yield _rounds("Muon, full", FULL + MUON, MUON_RATES)


def rounds() -> Iterator[Method]:
    """A hundred rounds of ten steps, with outer settings of each family."""
    adamw = " scheme.every=10 " + ADAMW.format(0.999)
    yield _rounds(
        "diloco 10", "scheme.name=diloco" + adamw, ADAMW_RATES, variants=with_outer(*OUTER)
    )
    for count in (2, 8, 16):
        tried = with_outer(*OUTER)
        yield _rounds("muloco 10, 2bit, rescaled", RESCALED + muloco(10), MUON_RATES, count, tried)
    streaming = "scheme.name=streaming_diloco scheme.delay=1 scheme.keep=0.5" + adamw
    yield _rounds("streaming_diloco 10", streaming, ADAMW_RATES, variants=with_outer(*OUTER))
    sparse = tuple(f"{FLOOR} scheme.outer_lr={lr}" for lr in (1.0, 0.7, 0.5))
    yield _rounds("sparseloco 10", "scheme.name=sparseloco" + adamw, ADAMW_RATES, variants=sparse)


def longer() -> Iterator[Method]:
    """The schemes that exchange at every step, over as many steps as the rounds."""
    yield _rounds("demo 1/64 sign", demo(1), SIGN_RATES)
    yield _rounds("random_sign 1/8", vote(8), VOTE_RATES, 8)


def _rounds(
    name: str,
    sets: str,
    rates: tuple[float, ...],
    count: int = 2,
    variants: tuple[str, ...] = (FLOOR,),
) -> Method:
    sets = f"{COMMON} train.steps=1000 {sets}"
    return Method("rounds", name, QUICK, sets, rates, ROUNDS, count, variants=variants)


def larger() -> Iterator[Method]:
    """4.3 million parameters."""
    yield _larger("AdamW, full", FULL + ADAMW.format(0.999), (2.5e-4, 5e-4, *ADAMW_RATES[:3]))
    yield _larger("Muon, full", FULL + MUON, MUON_RATES[1:6], seeds=8)
    yield _larger("demo 1/64 sign", demo(1), SIGN_RATES)
    yield _larger("random_sign 1/8", vote(8), (1.25e-3, *VOTE_RATES[:4]), 8)
    for every, seeds in (5, 8), (30, 3):
        sets = ALONE + RESCALED + muloco(every)
        yield _larger(f"muloco {every}, 2bit, rescaled", sets, MUON_RATES[1:6], seeds=seeds)


def _larger(
    name: str, sets: str, rates: tuple[float, ...], count: int = 2, seeds: int = 3
) -> Method:
    return Method("size", name, QUICK, f"{COMMON} {LARGER} {sets}", rates, SIZE, count, seeds)


def images() -> Iterator[Method]:
    """1,200 steps of a vision transformer: after 300, three seeds see a difference of no less than 10 %."""
    yield _images("AdamW, full", FULL + ADAMW.format(0.999), (2.5e-4, 5e-4, *ADAMW_RATES[:3]))
    yield _images("demo 1/64 sign", demo(1), SIGN_RATES)
    yield _images("random_sign 1/8", vote(8), VOTE_RATES, 8)
    yield _images(
        "loco 4bit, AdamW",
        "scheme.name=loco " + ADAMW.format(0.999),
        (2.5e-4, 5e-4, *ADAMW_RATES[:3]),
    )


def groups() -> Iterator[Method]:
    """Two learning rates each: that of the matrices, and a ratio of it for tables, head and norms.

    Each method has the same tries: its rates at the first ratio, then three other ratios. The
    fourth was added for all when AdamW chose the last of three.
    """
    adamw = _by_groups("adamw", "optimizer.betas=[0.9,0.95]")
    signs = _by_groups("signsgd")
    codec = "scheme.chunk=64 scheme.precision=sign scheme.error_feedback=false"
    yield _grouped("AdamW, full", FULL + adamw, GROUP_ADAMW_RATES, (10, 3, 30, 100))
    yield _grouped(
        "demo 4/64 sign",
        f"scheme.name=demo scheme.topk=4 {codec} {signs}",
        SIGN_RATES,
        (3, 1, 10, 30),
    )
    yield _grouped(
        "demo 1/64 sign",
        f"scheme.name=demo scheme.topk=1 {codec} scheme.decay=0.95 {signs}",
        SIGN_RATES,
        (3, 1, 10, 30),
    )
    yield _grouped(
        "random_sign 1/8",
        f"scheme.name=random_sign scheme.rate=0.125 scheme.decay=0.9 {signs}",
        VOTE_RATES,
        (3, 1, 10, 30),
        count=8,
    )
    yield _grouped(
        "loco 4bit, AdamW", f"scheme.name=loco {adamw}", GROUP_ADAMW_RATES, (10, 3, 30, 100)
    )
    muon = _by_groups("muon", "optimizer.momentum=0.8")
    yield _grouped("Muon, full", FULL + muon, MUON_RATES, (1, 0.3, 3, 10))
    signum = _by_groups("signsgd", "optimizer.momentum=0.9")
    yield _grouped("Signum 0.9, full", FULL + signum, SIGN_RATES, (3, 1, 10, 30))


def long_groups() -> Iterator[Method]:
    """Methods of `groups` over 3,000 steps of 0.14 million parameters, as in benchmarks/long_rounds.

    Each keeps the ratio that it chose over 300 steps, and tries three rates, more at an end.
    Gradients of one replica are the mean of several replicas with as many examples.
    """
    ratios = {
        "AdamW, full": 30,
        "demo 4/64 sign": 10,
        "demo 1/64 sign": 3,
        "random_sign 1/8": 3,
        "loco 4bit, AdamW": 30,
    }
    for each in groups():
        if each.name in ratios:
            yield dataclasses.replace(
                each,
                study="long",
                sets=f"{each.sets} {LONG}",
                replicas=1 if each.name == "AdamW, full" else each.replicas,
                total=ROUNDS,
                variants=(f"{FLOOR} optimizer.ratio={ratios[each.name]}",),
            )


def muon_forms() -> Iterator[Method]:
    """Newer forms of Muon, tuned as the old form was: all in full, a look ahead, then in rounds."""
    for name, sets in MUON_FORMS.items():
        yield text(f"Muon 0.8, {name}, full", f"{FULL}{MUON} {sets}", MUON_RATES, study="muon")
    yield text(
        "Muon 0.8, EMA-Nesterov, full",
        f"{FULL}optimizer.name=benchmarks.second_round.lookahead:muon",
        MUON_RATES,
        variants=tuple(
            f"{FLOOR} optimizer.ahead={ahead} optimizer.decay={decay}"
            for ahead, decay in ((0.5, 0.9), (0.25, 0.9), (0.8, 0.9), (0.5, 0.97))
        ),
        study="muon",
    )
    for name, sets in MUON_FORMS.items():
        yield from _in_rounds(name, f"{MUON} {sets}")


def _in_rounds(name: str, form: str) -> Iterator[Method]:
    for count in (2, 8):
        yield text(
            f"muloco 5, 2bit, rescaled, Muon 0.8, {name}",
            ALONE + RESCALED + muloco(5, form),
            MUON_RATES,
            count,
            study="muon",
        )
        yield text(
            f"muloco 30, 2bit, Muon 0.8, {name}",
            MEAN + muloco(30, form),
            MUON_RATES,
            count,
            variants=with_outer(*(LONGER[2][:1] if count == 2 else LONGER[8])),
            study="muon",
        )


GROUP_ADAMW_RATES = (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3)


def _by_groups(name: str, more: str = "") -> str:
    return f"optimizer.name=benchmarks.size_law.optimizers:{name} {more}".rstrip()


def _grouped(
    name: str, sets: str, rates: tuple[float, ...], ratios: tuple[float, ...], count: int = 2
) -> Method:
    variants = tuple(f"{FLOOR} optimizer.ratio={ratio}" for ratio in ratios)
    return text(name, sets, rates, count, seeds=8, variants=variants, study="groups")


def _images(name: str, sets: str, rates: tuple[float, ...], count: int = 2) -> Method:
    sets = f"train.validation_batches=1000000 train.steps=1200 train.validate_every=1200 {sets}"
    return Method("images", name, VIT, sets, rates, IMAGES, count)


def demo(
    topk: int, optimizer: str = SIGNSGD, decay: float | None = 0.95, precision: str = "sign"
) -> str:
    """decay: None where variants have one."""
    codec = f"scheme.topk={topk} scheme.chunk=64 scheme.precision={precision} scheme.error_feedback=false"
    return f"scheme.name=demo {codec} {optimizer}" + (f" scheme.decay={decay}" if decay else "")


def vote(share: int, decay: float = 0.9, cycle: bool = False) -> str:
    settings = f"scheme.rate={1 / share} scheme.decay={decay}" + " scheme.cycle=true" * cycle
    return f"scheme.name=random_sign {settings} {SIGNSGD}"


def muloco(every: int, optimizer: str = MUON, precision: str = "2bit") -> str:
    """Without the settings of the outer step."""
    return f"scheme.name=muloco scheme.every={every} scheme.precision={precision} {optimizer}"
