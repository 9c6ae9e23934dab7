"""A run of an experiment: its settings, its training, and the row that it leaves."""

import dataclasses
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run. `study`: the question that it belongs to; `method`: its name in tables; `sets`: its settings."""

    study: str
    method: str
    recipe: str
    sets: tuple[str, ...]
    replicas: int
    total: int
    seed: int

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.recipe, tuple(sorted(self.sets)), self.replicas, self.total, self.seed)

    @property
    def settings(self) -> dict[str, str]:
        """The values of its settings, by key."""
        return dict(each.split("=", 1) for each in self.sets if "=" in each)

    @property
    def rate(self) -> float:
        """The learning rate."""
        return float(self.settings["optimizer.lr"])


def run(cell: Cell, recorder: Callable[[Any], Any] = lambda session: None) -> Row:
    """Trains one run and returns its row; `val_loss` is None where it diverged.

    recorder: Makes the recorder of each replica's training; none where it returns None.
    """
    from detonation.train.verbs.simulate import Simulation, configured, train_virtual, virtual

    sets = (*cell.sets, "train.validate_every=0", f"seed={cell.seed}")
    config = configured(Simulation(Path(cell.recipe), sets, cell.replicas, cell.total))

    def act(communicator: Any) -> Row:
        session = virtual(config, communicator)
        return train_virtual(session, recorder(session))

    began = time.process_time()
    summary = (finished(act, cell.replicas) or [{"val_loss": None}])[0]
    columns = (
        "val_loss",
        "val_accuracy",
        "train_loss",
        "num_parameters",
        "steps",
        "bytes_sent_per_step",
        "replicas_equal",
    )
    row = {key: summary[key] for key in columns if key in summary}
    return {**dataclasses.asdict(cell), **row, "cpu_s": round(time.process_time() - began, 1)}


def finished(act: Callable[[Any], Any], replicas: int) -> list[Any] | None:
    """The results of virtual replicas; None where a loss or a gradient becomes non-finite."""
    from detonation.cluster.network.simulated import simulate_replicas
    from detonation.core.integrity.fault_counts import NonFiniteGradient
    from detonation.train.loop.fit import NonFiniteLoss, Unsafe

    try:
        return simulate_replicas(act, replicas)
    except NonFiniteLoss:
        return None
    except Unsafe as error:
        if isinstance(error.__cause__, NonFiniteGradient):
            return None
        raise


def rows(*paths: Path) -> dict[tuple[Any, ...], Row]:
    """Reads the existing rows, by key; a row of a later file replaces that of an earlier one."""
    done = [
        json.loads(line)
        for path in paths
        if path.exists()
        for line in path.read_text().splitlines()
    ]
    return by_key(done)


def by_key(found: Iterable[Row]) -> dict[tuple[Any, ...], Row]:
    """Rows by the key of their run; the last of equal runs counts."""
    return {
        (r["recipe"], tuple(sorted(r["sets"])), r["replicas"], r["total"], r["seed"]): r
        for r in found
    }


def per_parameter(row: Row) -> float:
    return float(row["bytes_sent_per_step"] / row["num_parameters"])
