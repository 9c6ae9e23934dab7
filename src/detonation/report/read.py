"""A finished run as the report sees it: plain values read from its directory. Imports nothing else of this package."""

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Run:
    """One run directory."""

    name: str
    summary: dict[str, Any]
    config: str
    records: list[dict[str, Any]]

    def series(self, key: str) -> list[float]:
        """The values of `key`, one a step."""
        return [record[key] for record in self.records]

    def bytes_so_far(self) -> list[float]:
        """What one replica has sent up to and including each step."""
        return list(accumulate(self.series("bytes_sent")))

    def median(self, value: Callable[[dict[str, Any]], float]) -> float:
        """The median of `value` over the steps."""
        return statistics.median(value(record) for record in self.records)

    def validations(self) -> list[tuple[int, float]]:
        """Index into the records, and validation loss, wherever it was measured."""
        return [(i, record["val_loss"]) for i, record in enumerate(self.records) if "val_loss" in record]


def read(directory: Path) -> Run:
    """The run in `directory`. Raises `ValueError` when it holds no finished run."""
    try:
        summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
        config = (directory / "config.toml").read_text(encoding="utf-8")
        lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines]
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{directory} holds no finished run: {error}") from error
    return Run(directory.resolve().name, summary, config, records)
