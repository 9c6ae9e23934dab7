"""The runs of benchmarks/frontier: settings, studies and seeds, in order of importance."""

from collections.abc import Iterator

from benchmarks.compare.rows import Cell

QUICK, VIT = "recipes/quick-lm.toml", "recipes/vit-fashion.toml"
TOTAL = {QUICK: 32, VIT: 128}
"""Examples per step over all replicas: those of the recipe at 2 replicas x 2 shards, and at least one per replica."""


def adamw(lr: float) -> str:
    return f"scheme.name=full optimizer.name=AdamW optimizer.lr={lr}"


def dense(lr: float, decay: float = 0.999) -> str:
    """demo with fp32 values."""
    codec = "scheme.topk=4 scheme.precision=fp32"
    return f"scheme.name=demo {codec} scheme.decay={decay} optimizer.name=SignSGD optimizer.lr={lr}"


def signs(topk: int, chunk: int, decay: float, lr: float) -> str:
    """demo with one bit per value."""
    codec = (
        f"scheme.topk={topk} scheme.chunk={chunk} scheme.precision=sign scheme.error_feedback=false"
    )
    return f"scheme.name=demo {codec} scheme.decay={decay} optimizer.name=SignSGD optimizer.lr={lr}"


def votes(period: int, decay: float, lr: float) -> str:
    """random_sign at rate 1 / period, with a cycle: the default then."""
    scheme = (
        f"scheme.name=random_sign scheme.rate={1 / period} scheme.decay={decay} scheme.cycle=true"
    )
    return f"{scheme} optimizer.name=SignSGD optimizer.lr={lr}"


def muon(lr: float, scheme: str = "full") -> str:
    """Muon with full synchronisation, or inside the rounds of muloco."""
    return f"scheme.name={scheme} optimizer.name=Muon optimizer.lr={lr}"


def muloco(every: int, precision: str) -> str:
    """Rounds of Muon in few bits, with the outer settings and rate of recipes/quick-lm.toml."""
    return f"{muon(1e-2, 'muloco')} scheme.every={every} scheme.precision={precision} {PLAIN_OUTER}"


def averaged(scheme: str, also: str = "") -> str:
    """Rounds of 20 steps of AdamW, as in recipes/quick-lm.toml."""
    return f"scheme.name={scheme} scheme.every=20 {also} optimizer.name=AdamW optimizer.lr=3e-3"


PLAIN_OUTER = "scheme.outer_lr=1.0 scheme.outer_momentum=0.0"

CHOSEN = {
    "AdamW, full": adamw(3e-3),
    "demo 4/64, fp32": dense(4e-3),
    "demo 4/64, sign": signs(4, 64, 0.999, 4e-3),
    "demo 1/64, sign": signs(1, 64, 0.95, 4e-3),
    "demo 1/128, sign": signs(1, 128, 0.95, 4e-3),
    "random_sign 1/8": votes(8, 0.9, 2e-2),
    "random_sign 1/16": votes(16, 0.9, 4e-2),
    "random_sign 1/4": votes(4, 0.9, 1e-2),
    "Muon, full": muon(1e-2),
    "muloco 60, 4bit": muloco(60, "4bit"),
    "muloco 30, 2bit": muloco(30, "2bit"),
    "sparseloco 20": averaged("sparseloco"),
    "streaming_diloco 20": averaged(
        "streaming_diloco", f"scheme.delay=2 scheme.keep=0.5 {PLAIN_OUTER}"
    ),
}
"""quick-lm at 2 replicas, with the learning rates that seed 0 chose."""

CORE = ("random_sign 1/8", "demo 1/64, sign", "demo 1/128, sign", "AdamW, full", "demo 4/64, fp32")

AVERAGED = ("sparseloco 20", "streaming_diloco 20")

ROUNDS = ("muloco 60, 4bit", "muloco 30, 2bit", "Muon, full")

VISION = {
    "AdamW, full": adamw(1e-3),
    "demo 1/64, sign": signs(1, 64, 0.95, 4e-3),
    "random_sign 1/8": votes(8, 0.9, 2e-2),
}
"""vit-fashion at 2 replicas."""

VISION_TUNING = {
    "AdamW, full": [adamw(5e-4), adamw(2e-3)],
    "demo 1/64, sign": [signs(1, 64, 0.95, lr) for lr in (1e-3, 2e-3, 4e-3, 8e-3)],
    "random_sign 1/8": [votes(8, 0.9, lr) for lr in (2.5e-3, 5e-3, 1e-2, 2e-2)],
}
"""vit-fashion on seed 0; other learning rates of AdamW are in research/log.md."""

VISION_OF_EIGHT = [
    *(("random_sign 1/8", votes(8, 0.9, lr)) for lr in (1e-2, 2e-2, 4e-2)),
    ("demo 1/64, sign", signs(1, 64, 0.95, 4e-3)),
    *(("demo 4/64, sign", signs(4, 64, 0.95, lr)) for lr in (2e-3, 4e-3)),
]
"""vit-fashion with 8 replicas, on seed 0."""

LARGER = "model.hidden_size=256 model.layers=4 model.feed_forward=1024"
"""quick-lm with 7 times as many parameters."""


def grid() -> Iterator[Cell]:
    """Lists all runs, the most important first."""
    for seed in (1, 2):
        for method in CORE:
            yield chosen(method, seed)
    for seed in (1, 2, 3):
        for method in ROUNDS:
            yield chosen(method, seed)
    for seed in (1, 2, 3):
        for method in ("random_sign 1/8", "AdamW, full"):
            yield chosen(method, seed, "replicas", replicas=8)
    for method in ("random_sign 1/8", "AdamW, full"):
        yield chosen(method, 1, "replicas", replicas=32)
    yield chosen("demo 1/64, sign", 1, "replicas", replicas=8)
    for setting in (
        signs(1, 64, 0.95, 4e-3) + " scheme.aggregate=mean_nonzero",
        signs(1, 64, 0.99, 4e-3),
        signs(1, 64, 0.95, 2e-3),
    ):
        yield cell("replicas", "demo 1/64, sign", QUICK, setting, 8, seed=1)
    for method in ("demo 4/64, sign", "demo 1/128, sign", "demo 4/64, fp32", "muloco 30, 2bit"):
        yield chosen(method, 1, "replicas", replicas=8)
    for seed in (1, 2, 3):
        for method, sets in VISION.items():
            yield cell("vision", method, VIT, sets, 2, seed)
        yield cell("vision", "demo 1/64, sign", VIT, signs(1, 64, 0.95, 2e-3), 2, seed)
    for method, settings in VISION_TUNING.items():
        for sets in settings:
            yield cell("tuning", method, VIT, sets, 2, seed=0)
    for method, sets in VISION_OF_EIGHT:
        yield cell("tuning", method, VIT, sets, 8, seed=0)
    for seed in (1, 2, 3):
        for replicas, lr in ((2, 5e-3), (8, 5e-3), (8, 2e-2)):
            yield cell("vision", "random_sign 1/8", VIT, votes(8, 0.9, lr), replicas, seed)
        yield cell("vision", "AdamW, full", VIT, VISION["AdamW, full"], 8, seed)
        yield chosen("demo 1/64, sign", seed, "replicas", replicas=8)
        for method in AVERAGED:
            yield chosen(method, seed)
    for seed in (4, 5):  # because the first three differ much
        for method in ("AdamW, full", "demo 1/64, sign"):
            yield cell("vision", method, VIT, VISION[method], 2, seed)
        yield cell("vision", "random_sign 1/8", VIT, votes(8, 0.9, 2e-2), 8, seed)
    for seed in (1, 2, 3, 4, 5):
        yield cell("vision", "AdamW, full", VIT, adamw(2e-3), 2, seed)
    for method in CORE:
        yield chosen(method, 3)
    for method in ("AdamW, full", "demo 1/64, sign", "random_sign 1/8"):
        yield chosen(method, 1, "replicas", replicas=32)
    yield from tuning()
    for method in CHOSEN:
        yield chosen(method, 1)
    for seed in (1, 2, 3):
        for method in ("demo 1/64, sign", "random_sign 1/8", "demo 4/64, sign"):
            yield chosen(method, seed, "replicas", replicas=4)
    for seed in (1, 2, 3):
        yield chosen("random_sign 1/16", seed, "replicas", replicas=8)
    for method in ("demo 1/64, sign", "AdamW, full", "random_sign 1/8", "demo 4/64, sign"):
        yield chosen(method, 1, "batch", replicas=8, total=128)  # 16 per replica, as with two
    for method in ("random_sign 1/8", "AdamW, full"):
        yield chosen(method, 1, "replicas", replicas=64)
    for seed in (2, 3):
        yield chosen("random_sign 1/8", seed, "replicas", replicas=32)
    for seed in (2, 3):
        for method in ("demo 4/64, sign", "random_sign 1/16"):
            yield chosen(method, seed)
    for method in ("AdamW, full", "random_sign 1/8", "demo 1/64, sign"):
        yield chosen(method, 1, "long", "train.steps=1200")
    yield chosen("random_sign 1/8", 1, "long", "train.steps=1200", replicas=8)
    for method in ("AdamW, full", "demo 1/64, sign", "random_sign 1/8"):
        yield chosen(method, 1, "larger", LARGER)
    for method in ("random_sign 1/8", "muloco 30, 2bit"):
        yield chosen(method, 1, "larger", LARGER, replicas=8)


def chosen(
    method: str, seed: int, study: str = "bytes", also: str = "", replicas: int = 2, total: int = 0
) -> Cell:
    return cell(study, method, QUICK, f"{CHOSEN[method]} {also}", replicas, seed, total)


def tuning() -> Iterator[Cell]:
    """Learning rates and decays on seed 0 at 2 replicas; those of AdamW and of demo in fp32 are in research/log.md."""
    for method, settings in {
        "random_sign 1/8": [
            votes(8, 0.9, 4e-2),
            votes(8, 0.95, 2e-2),
            votes(8, 0.95, 1e-2),
            votes(8, 0.9, 2e-2),
        ],
        "random_sign 1/4": [votes(4, 0.8, 2e-2), votes(4, 0.9, 1e-2), votes(4, 0.95, 1e-2)],
        "demo 1/128, sign": [
            signs(1, 128, 0.95, 4e-3),
            signs(1, 128, 0.95, 8e-3),
            signs(1, 128, 0.9, 4e-3),
            signs(1, 128, 0.9, 8e-3),
        ],
        "random_sign 1/16": [votes(16, 0.95, 4e-2), votes(16, 0.9, 4e-2)],
    }.items():
        for sets in settings:
            yield cell("tuning", method, QUICK, sets, 2, seed=0)


def cell(
    study: str, method: str, recipe: str, sets: str, replicas: int, seed: int, total: int = 0
) -> Cell:
    return Cell(
        study,
        method,
        recipe,
        tuple(sets.split()),
        replicas,
        total or max(TOTAL[recipe], replicas),
        seed,
    )
