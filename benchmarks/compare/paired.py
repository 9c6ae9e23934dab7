"""A method against another on equal seeds: seeds differ more than methods do."""

import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.compare.rows import Row

import detonation as dt
from detonation.extend import SCHEMES
from detonation.plan.losses import relative

Measured = tuple[dt.schemes.Scheme, str, int, dict[int, Row], str, str]
"""A scheme, its recipe and replicas, its runs by seed, their study, and the page that tells it."""


def judged(
    runs: Mapping[int, Row], base: Mapping[int, float]
) -> tuple[float, tuple[float, float] | None, int]:
    """The relative loss over the seeds that both have, its interval with three seeds or more, and their number."""
    return relative({seed: row["val_loss"] for seed, row in runs.items()}, base)


def percent(cost: float, interval: tuple[float, float] | None) -> str:
    """A relative loss and its interval as tables write them, in percent: +1.4 [+0.9, +1.8]."""
    ends = [f"{100 * end:+.1f}" for end in interval or ()]
    return f"{100 * cost:+.1f}" + f" [{', '.join(ends)}]" * bool(ends)


def scheme_of(sets: Sequence[str]) -> dt.schemes.Scheme | None:
    """The scheme of a run with nothing but settings of scheme and optimizer, else None, as of what is gone."""
    values = dict(each.split("=", 1) for each in sets)
    if any(not key.startswith(("scheme.", "optimizer.")) for key in values):
        return None
    given = {
        key.removeprefix("scheme."): value
        for key, value in values.items()
        if key.startswith("scheme.")
    }
    if given["name"] not in SCHEMES:
        return None
    arguments = {key: value_of(value) for key, value in given.items() if key != "name"}
    arguments.pop("lookahead", None)
    if given["name"] != "streaming_diloco" and arguments.get("delay"):
        return None  # late gradients are gone
    return dt.scheme(given["name"], arguments)


def value_of(text: str) -> Any:
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text
