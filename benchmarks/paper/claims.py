"""The claims of FlexDeMo (arXiv 2502.06728), each with a table from the rows of benchmarks/paper and a verdict."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence

from benchmarks.compare.paired import judged
from benchmarks.compare.rows import Row
from benchmarks.compare.tuning import Rows, against
from benchmarks.paper import experiment as paper

import detonation as dt
from detonation.core.schemes.traffic import exchange_bytes

MARGIN = 0.02
"""Losses that differ by less count as similar."""
TO_A_LOSS = 1.03
"""The loss that is timed, as a multiple of the final one of AdamW in full."""
BANDWIDTH = {"10mbit": 10e6, "100mbit": 100e6, "1gbit": 1e9, "10gbit": 10e9}
NUMEL = 1 << 26
"""Parameters of the model whose bytes are counted."""

Runs = dict[int, Row]


def similar_loss(done: Rows) -> str:
    """FlexDeMo reaches a validation loss similar to fully synchronised AdamW."""
    lines = []
    for task in paper.TASKS:
        lines += compare(
            task, done, paper.BASELINE, ["demo 4/64", "demo 1/64, sign", "loco 4bit, AdamW"]
        )
    return "\n".join(lines)


def faster(done: Rows) -> str:
    """Training reaches a loss substantially earlier, the more so the slower the link."""
    lines = []
    for task in paper.TASKS:
        found = paper.curves(task, done)
        if paper.BASELINE not in found:
            lines.append(missing(task, paper.BASELINE))
            continue
        wanted = TO_A_LOSS * paper.mean_curve(found[paper.BASELINE])[1][-1]
        seconds = {link: paper.step_seconds(task, link) for link in paper.LINKS}
        lines += [
            f"{task}, seconds to a loss of {wanted:.3f}:",
            "",
            *head(["scheme", "steps", *paper.LINKS]),
        ]
        for name, runs in found.items():
            steps = first_step(*paper.mean_curve(runs), wanted)
            if steps is None:
                lines.append(cells([name, "not reached", *[""] * len(paper.LINKS)]))
                continue
            times = (seconds[link].get(name, math.nan) * steps for link in paper.LINKS)
            lines.append(cells([name, f"{steps:.0f}", *(f"{each:.1f}" for each in times)]))
        lines.append("")
    return "\n".join(lines)


def best_scheme(done: Rows) -> str:
    """DeMo is best for vision and decoder-only models, Random for encoder-decoders; Striding and DiLoCo are behind."""
    return "\n".join(
        line for task in paper.JUDGED for line in compare(task, done, "demo 4/64", paper.RIVALS)
    )


def decoupled_moments(done: Rows) -> str:
    """Decoupled AdamW, whose moments stay local, is behind DeMo with signs."""
    return "\n".join(
        line
        for task in paper.TASKS
        for line in compare(task, done, "demo 4/64", ["decoupled AdamW 4/64", "AdamW 0, 0.95 4/64"])
    )


def sign_first(done: Rows) -> str:
    """The sign belongs before the synchronisation."""
    others = ["sign before, 4/64", "sign before and after, 4/64", "no sign, 4/64"]
    return "\n".join(
        line for task in paper.TASKS for line in compare(task, done, "demo 4/64", others)
    )


def chunks(done: Rows) -> str:
    """Chunks of 32 and a top-k of 4 are the best choice for their bytes."""
    lines = []
    for task, pairs in paper.CHUNKS.items():
        lines += compare(
            task, done, "top-k 4 of 32", [f"top-k {topk} of {chunk}" for topk, chunk in pairs]
        )
    return "\n".join(lines)


def transfer_precision(done: Rows) -> str:
    """Messages in fp32 give a lower loss than messages in 16 bits."""
    lines = []
    for task in paper.TASKS:
        for name in ("demo 4/64", "random 1/32"):
            lines += compare(task, done, name, [f"{name}, bf16"])
    return "\n".join(lines)


def bandwidth(done: Rows) -> str:
    """Random uses half of the bandwidth of DeMo at the same rate, and both use far less than full synchronisation."""
    lines = ["Average Mbit/s that leave a node:", "", *head(["task", "scheme", *paper.LINKS])]
    sent = {
        (row["task"], row["name"]): row["bytes_sent"]
        for row in paper.timings()
        if row["ranks"] == 2
    }
    for (task, name), nbytes in sent.items():
        times = (paper.step_seconds(task, link).get(name, math.nan) for link in paper.LINKS)
        lines.append(cells([task, name, *(f"{8e-6 * nbytes / each:.1f}" for each in times)]))
    return "\n".join(lines)


def sharded(_: Rows) -> str:
    """R replicas of S shards send less, and wait less, than R x S replicas of one shard, as in DeMo."""
    lines = head(
        [
            "scheme",
            "nodes",
            "ranks",
            "MB, R x S",
            "MB, RS x 1",
            "times",
            "s at 100 Mbit/s",
            "s, RS x 1",
        ]
    )
    for name, scheme in {
        "demo 4/64": dt.demo(link="all-gather"),
        "random 1/32": dt.schemes.random(rate=1 / 32),
    }.items():
        for nodes, ranks in ((2, 4), (2, 8), (8, 8)):
            ours = ranks * sent_by_a_rank(scheme, nodes, ranks)
            # On a ring through all ranks, one rank of each node sends to the next node all that a rank sends.
            flat = sent_by_a_rank(scheme, nodes * ranks)
            numbers = [f"{ours / 1e6:.1f}", f"{flat / 1e6:.1f}", f"{flat / ours:.1f}"]
            seconds = (f"{8 * each / BANDWIDTH['100mbit']:.2f}" for each in (ours, flat))
            lines.append(cells([name, str(nodes), str(ranks), *numbers, *seconds]))
    return "\n".join(
        ["Arithmetic, bytes per step that leave a node, 67 million parameters:", "", *lines]
    )


def many_nodes(_: Rows) -> str:
    """DeMo does not scale to many nodes, because an all-gather grows with their number; Random does."""
    schemes = {
        "demo 2/64, all-gather": dt.demo(topk=2, link="all-gather"),
        "demo 2/64, owners": dt.demo(topk=2, link="owner"),
        "random 1/32": dt.schemes.random(rate=1 / 32),
        "full": dt.full(),
    }
    counts = (2, 4, 8, 16, 32, 64)
    lines = head(["bytes per parameter and step", *(f"{n} nodes" for n in counts)])
    for name, scheme in schemes.items():
        sent = (sent_by_a_rank(scheme, n) / NUMEL for n in counts)
        lines.append(cells([name, *(f"{each:.3f}" for each in sent)]))
    return "\n".join(["Arithmetic:", "", *lines])


def sent_by_a_rank(scheme: dt.schemes.Scheme, replicas: int, local_ranks: int = 1) -> int:
    """Bytes per step that one rank sends, of a model of `NUMEL` parameters."""
    kind = "all-reduce" if scheme.link == "auto" else scheme.link
    return exchange_bytes(
        kind, scheme, NUMEL // scheme.codec.selection.chunk, replicas, local_ranks
    )


CLAIMS: Sequence[Callable[[Rows], str]] = (
    similar_loss,
    faster,
    best_scheme,
    decoupled_moments,
    sign_first,
    chunks,
    transfer_precision,
    bandwidth,
    sharded,
    many_nodes,
)


def compare(task: str, done: Rows, base: str, others: Sequence[str]) -> Iterator[str]:
    """The losses of `others` against `base`, paired over seeds, with a verdict for each."""
    found = {each.name: each for each in paper.methods() if each.study == task}
    reference = found[base].judged(done)
    if len(reference) < found[base].seeds:
        yield missing(task, base)
        return
    yield from (f"{task}, against {base}:", "")
    yield from head(["method", "lr", "loss", "accuracy", "BLEU", "difference, % [95 %]", "verdict"])
    for name in dict.fromkeys((base, *others)):
        runs = found[name].judged(done)
        judgement = verdict(runs, reference) if name != base else ""
        yield cells(
            [name, found[name].chosen(done), *means(runs), against(runs, reference), judgement]
        )
    yield ""


def means(runs: Runs) -> list[str]:
    """Mean loss, accuracy and BLEU; empty where not measured."""
    texts = []
    for measure, digits in (("loss", 4), ("accuracy", 3), ("bleu", 2)):
        values = [row[f"val_{measure}"] for row in runs.values()]
        texts.append(
            f"{statistics.fmean(values):.{digits}f}" if values and None not in values else ""
        )
    return texts


def verdict(runs: Runs, reference: Runs) -> str:
    """Whether the loss is lower, similar or higher than the reference, if its interval tells."""
    if len(set(runs) & set(reference)) < 3:
        return "not run"
    _, ends, _ = judged(runs, {seed: row["val_loss"] for seed, row in reference.items()})
    assert ends is not None
    low, high = ends
    if high < 0:
        return "lower"
    if low > 0:
        return "higher" if low > MARGIN else "higher or similar"
    return "similar" if low > -MARGIN and high < MARGIN else "cannot be told here"


def first_step(steps: Sequence[int], losses: Sequence[float], wanted: float) -> float | None:
    """The step at which a curve first reaches `wanted`, linearly between its points; None if it does not."""
    before = None
    for step, each in zip(steps, losses, strict=True):
        if each <= wanted:
            return (
                step
                if before is None
                else before[0] + (step - before[0]) * (before[1] - wanted) / (before[1] - each)
            )
        before = step, each
    return None


def missing(task: str, name: str) -> str:
    return f"{task}: {name} has not run on all seeds\n"


def head(titles: Sequence[str]) -> list[str]:
    return [cells(titles), "|" + "---|" * len(titles)]


def cells(texts: Sequence[str]) -> str:
    return "| " + " | ".join(texts) + " |"
