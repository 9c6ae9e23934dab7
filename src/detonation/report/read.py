"""Reads runs from their directories into plain values. Escapes all texts, so that they can be
printed.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from detonation.report.words import printable
from detonation.whole_files import MOST_RECORDS, parse_toml, read_text

FILES = ("metrics.jsonl", "summary.json", "config.toml", "environment.json")
"""Files of a run directory; the last file is optional."""
_STEP = ("bytes_sent", "loss", "seconds", "step")
_LOSSES = {"loss", "val_loss"}
_SUMMARY = {
    "scheme",
    "optimizer",
    "replicas",
    "shards",
    "model",
    "data",
    "num_parameters",
    "steps",
    "train_loss",
    "val_loss",
    "seconds",
    "median_step_seconds",
    "examples_per_second",
    "bytes_sent_per_step",
    "bytes_full_sync_per_step",
    "reduction",
    "replicas_equal",
    "fingerprint",
}
"""Keys that a summary must have."""


@dataclass(frozen=True)
class Run:
    """The parsed files of one run directory.

    Args:
        summary: Contents of summary.json.
        config: Text of config.toml, unparsed.
        settings: Values in config.toml, as nested tables.
        records: Lines of metrics.jsonl.
        environment: Contents of environment.json.
    """

    name: str
    directory: Path
    summary: dict[str, Any]
    config: str
    settings: dict[str, Any]
    records: list[dict[str, Any]]
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def timed(self) -> bool:
        """True if the records split the time of a step into its parts.

        A simulation cannot split this time, because its replicas share one machine.
        """
        split = all("step_s" in record and "waited_s" in record for record in self.records)
        return split and not self.summary.get("simulated")

    def series(self, key: str) -> list[float]:
        return [record[key] for record in self.records]

    def bytes_so_far(self) -> list[float]:
        """Returns the bytes that one replica had sent by the end of each step."""
        return list(accumulate(self.series("bytes_sent")))

    def seconds_so_far(self) -> list[float]:
        """Returns the seconds that the run had spent in steps by the end of each step."""
        return list(accumulate(self.series("seconds")))

    def validations(self) -> list[tuple[int, float]]:
        """Returns the index of the record and the loss of each validation. Leaves out losses that
        are not finite.
        """
        found = [(i, record.get("val_loss", math.nan)) for i, record in enumerate(self.records)]
        return [(i, loss) for i, loss in found if math.isfinite(loss)]


def agreeing_s(record: dict[str, Any]) -> float:
    """Returns the seconds of a step for which rank 0 waited for the losses of other ranks; 0 if
    this time was not measured.
    """
    return float(record.get("agreeing_s", 0.0))


def read_all(directories: Sequence[Path]) -> list[Run]:
    """Reads the runs in `directories`, and gives them distinct names. Raises `ValueError` for the
    same reasons as `read_run`.
    """
    runs = [read_run(directory) for directory in directories]
    names = map(printable, distinct_names([run.directory for run in runs]))
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]


def is_unfinished(directory: Path) -> bool:
    """True if `directory` holds a run that still trains, or a run that stopped before its end."""
    metrics, summary, config, _ = (directory / name for name in FILES)
    return metrics.is_file() and config.is_file() and not summary.exists()


def read_begun(directory: Path) -> Run:
    """Reads the configuration of a run in training. Does not read its records."""
    config, settings = _configuration(directory / "config.toml")
    path = directory.resolve()
    levels = settings["scheme"]
    mesh = settings["mesh"]
    if isinstance(levels, list):
        replicas = math.prod(level["replicas"] for level in levels)
    else:
        replicas = mesh["replicas"]
    summary = {
        "steps": settings["train"]["steps"],
        "data": settings["data"].get("source", settings["data"]["task"]),
        "replicas": replicas,
        "shards": mesh["shards"],
    }
    return Run(printable(path.name), path, summary, config, settings, [])


def read_run(directory: Path) -> Run:
    """Reads the run in `directory`. Raises `ValueError` if the directory holds no finished run."""
    _require_finished_run(directory)
    metrics, summary, config, environment = (directory / name for name in FILES)
    table = _table(summary)
    if missing := sorted(_SUMMARY - table.keys()):
        raise ValueError(
            f"{summary} is damaged, it lacks {', '.join(missing[:3])}: restore it, or leave this"
            " run out"
        )
    text, settings = _configuration(config)
    path = directory.resolve()
    lines = records(metrics)
    described = {}
    if environment.exists():
        described = _table(environment)
    return Run(printable(path.name), path, table, text, settings, lines, described)


def _configuration(path: Path) -> tuple[str, dict[str, Any]]:
    """Returns the text of a config.toml, and its values. Raises `ValueError` if the file is
    damaged.
    """
    text = read_text(path, errors="replace")
    try:
        settings = _printable(parse_toml(text))
    except ValueError as error:
        raise ValueError(
            f"{path} is damaged, {error}: restore it, or leave this run out"
        ) from error
    return "\n".join(map(printable, text.splitlines())), settings


def records(path: Path) -> list[dict[str, Any]]:
    """Parses a metrics file. A loss that is not finite becomes NaN. Leaves out an incomplete last
    line, which a killed run may have written.

    Raises `ValueError` with the number of a damaged line.
    """
    parsed = []
    text = read_text(path, errors="replace", most=MOST_RECORDS)
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        record = _record(line)
        if record is None and number == len(lines) and not line.endswith("\n"):
            break
        if record is None:
            raise ValueError(
                f"{path} is damaged in line {number}, which is no JSON object with"
                f" {', '.join(_STEP)}: remove the line"
            )
        parsed.append(record)
    if not parsed:
        raise ValueError(f"{path} holds no step: give the directory of a run that has trained")
    return parsed


def _record(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or "loss" not in record:
        return None
    if not all(_is_finite(record.get(key)) for key in {*_STEP} - _LOSSES):
        return None
    for key in _LOSSES & record.keys():
        if not _is_finite(record[key]):
            record[key] = math.nan
    return dict(_printable(record))


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e300


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """Names each path by its last parts. Uses the smallest number of parts for which all names
    differ.

    >>> distinct_names([Path("/runs/a/full"), Path("/runs/b/full"), Path("/runs/b/demo")])
    ['a/full', 'b/full', 'demo']
    """
    names = []
    for path in paths:
        others = {other for other in paths if other != path}
        depth = 1
        while depth < len(path.parts):
            if path.parts[-depth:] not in {other.parts[-depth:] for other in others}:
                break
            depth += 1
        names.append("/".join(path.parts[-depth:]))
    return names


def _require_finished_run(directory: Path) -> None:
    """Raises `ValueError` with the remedy if `directory` holds no finished run."""
    if all((directory / name).is_file() for name in FILES[:3]):
        return
    if inner := len([*directory.glob("*/summary.json")]):
        found = f"holds {inner} runs, not one"
        remedy = f"detonation report {directory}/*/"
    elif not (directory / "config.toml").is_file():
        found = "holds no finished run"
        remedy = "give the directory of a finished run, which detonation train prints last"
    elif not (directory / "metrics.jsonl").exists():
        found = "holds a run without its metrics"
        remedy = (
            "without a shared file system metrics and summary are on the node of rank 0: run report"
            " there"
        )
    else:
        found = "holds no finished run, but a run that stopped or still trains"
        remedy = (
            f"finish it with detonation train RECIPE.toml --out {directory} --resume, or report"
            " this run alone"
        )
    raise ValueError(f"{directory} {found}: {remedy}")


def _table(path: Path) -> dict[str, Any]:
    try:
        table = _printable(json.loads(read_text(path, errors="replace")))
    except (ValueError, RecursionError):
        table = None
    if not isinstance(table, dict):
        raise ValueError(
            f"{path} is damaged, it is no JSON object: restore it, or leave this run out"
        )
    return table


def _printable(value: Any) -> Any:
    """Returns a value of JSON or TOML in which all texts are escaped for printing."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(key): _printable(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_printable(inner) for inner in value]
    return value
