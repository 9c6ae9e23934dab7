"""One run of benchmarks/long_rounds: a simulated training in segments, each from the state of the one before it."""

import dataclasses
import json
import re
import shutil
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from benchmarks.compare.queue import file_name, made_by
from benchmarks.compare.rows import Cell, Row, finished
from safetensors.torch import load_file, save_file
from torch import Tensor

from detonation.cluster.processes.signals import Stop
from detonation.core.optimizer.state import load_replica_state, replica_state
from detonation.core.schemes.scheme import Scheme
from detonation.muon.muon import _newton_schulz
from detonation.train.loop.checks import scheme_of
from detonation.train.loop.evaluate import validate
from detonation.train.loop.fit import fit
from detonation.train.recipe.schema import Config
from detonation.train.verbs.simulate import Simulation, configured, virtual
from detonation.whole_files import write_whole

SEGMENT = 500
"""Steps between two states on disk."""
AT_ONCE, MOST = 32, 10**6
"""Held-out examples per forward pass at the end of a run, for any number of replicas, and such examples at most."""


@dataclasses.dataclass(frozen=True)
class State:
    """A run after `done` steps: the tensors of each replica, and what was measured on the way."""

    done: int = 0
    replicas: tuple[dict[str, Tensor], ...] = ()
    curve: tuple[tuple[int, float], ...] = ()
    bytes_sent: int = 0
    cpu_s: float = 0.0
    ended: Row = dataclasses.field(default_factory=dict)

    MEASURED = ("done", "curve", "bytes_sent", "cpu_s", "ended")


def train(
    cell: Cell, scratch: Path, every: int = SEGMENT, judged: Callable[[Any], Row] | None = None
) -> Row:
    """Trains one run from its last state in `scratch` on; returns its row. `val_loss` is None where it diverged.

    A segment of `every` steps begins with the state that the one before it has written, whether or not the process is
    the same: a run that was interrupted is bit for bit one that was not.
    """
    state, steps = load(scratch), settings(cell, 0).train.steps
    while state.done < steps and "val_loss" not in state.ended:
        until = min(_next_change(cell, state.done, steps), (state.done // every + 1) * every)
        state = segment(cell, state, until, judged or judge)
        save(scratch, state)
    measured = {"bytes_sent_per_step": state.bytes_sent / state.done, "curve": state.curve}
    return {
        **dataclasses.asdict(cell),
        **state.ended,
        "steps": steps,
        **measured,
        "cpu_s": round(state.cpu_s, 1),
    }


def segment(cell: Cell, state: State, until: int, judged: Callable[[Any], Row]) -> State:
    """Trains from a state to step `until`, by the code of real replicas."""
    config = settings(cell, state.done)

    def act(communicator: Any) -> tuple[dict[str, Tensor], list[Any], Row]:
        session = virtual(config, communicator)
        if state.replicas:
            restore(session, state.replicas[communicator.replica])
        for change in changes(cell, state.done):
            if "=" not in change:
                CHANGES[change](session.optimizer)
        records: list[Any] = []
        fit(session, state.done, until, records.append, Stop())
        return tensors(session), records, judged(session) if until == config.train.steps else {}

    began = time.process_time()
    found = finished(act, cell.replicas)
    cpu_s = state.cpu_s + time.process_time() - began
    if found is None:
        return dataclasses.replace(state, done=until, cpu_s=cpu_s, ended={"val_loss": None})
    _, records, ended = found[0]
    curve = [
        (record.step, round(record.val_loss, 5))
        for record in records
        if record.val_loss is not None
    ]
    sent = state.bytes_sent + sum(record.bytes_sent for record in records)
    return State(
        until, tuple(each[0] for each in found), (*state.curve, *curve), sent, cpu_s, ended
    )


def judge(session: Any, most: int = MOST) -> Row:
    """The loss on all held-out examples, or on `most`, at the weights that the replicas agreed on. Collective."""
    whole = dataclasses.replace(
        session.config.train, batch_size=AT_ONCE, validation_batches=-(-most // AT_ONCE)
    )
    held_out = validate(
        dataclasses.replace(session, config=dataclasses.replace(session.config, train=whole))
    )
    count = sum(parameter.numel() for parameter in session.model.parameters())
    _, equal = session.world.fingerprint(session.model)
    return {**held_out, "num_parameters": count, "replicas_equal": equal}


@cache  # a table asks for each several times
def settings(cell: Cell, done: int) -> Config:
    """The configuration of a run's next step. `later:STEP:scheme.KEY=VALUE` counts from that step on."""
    sets = [each for each in cell.sets if not each.startswith("later:")]
    sets += [change for change in changes(cell, done) if "=" in change]
    return configured(
        Simulation(Path(cell.recipe), (*sets, f"seed={cell.seed}"), cell.replicas, cell.total)
    )


def changes(cell: Cell, done: int) -> list[str]:
    """The changes of `later:STEP:CHANGE` that count after `done` steps, in their order."""
    parts = [each.split(":", 2) for each in cell.sets if each.startswith("later:")]
    return [change for _, step, change in parts if int(step) <= done]


def phases(cell: Cell) -> list[tuple[Scheme, int]]:
    """The schemes of a run one after another, and the steps of each."""
    found: list[tuple[Scheme, int]] = []
    done, steps = 0, settings(cell, 0).train.steps
    while done < steps:
        until = _next_change(cell, done, steps)
        found.append((scheme_of(settings(cell, done).levels[-1]), until - done))
        done = until
    return found


def _next_change(cell: Cell, done: int, steps: int) -> int:
    at = [int(each.split(":")[1]) for each in cell.sets if each.startswith("later:")]
    return min(step for step in (*at, steps) if step > done)


def orthogonal_movement(optimizer: Any) -> None:
    """From now on the agreed movement of each matrix goes in the nearest orthogonal direction, as far as before."""
    for replicator in optimizer.set_up():
        anchor, layout = replicator._anchor, replicator.layout

        def step(
            rows: slice, update: Tensor, step: Any = anchor.step, layout: Any = layout
        ) -> None:
            if len(update) != layout.rows:
                raise ValueError(
                    f"{len(update)} of {layout.rows} rows arrived, and whole matrices are needed"
                )
            for slot, part in zip(layout.slots, layout.views(update), strict=True):
                if part.ndim == 2 and not re.search("embed|lm_head", slot.name):
                    direction = _newton_schulz(part)
                    part.copy_(direction * (part.norm() / direction.norm().clamp(min=1e-12)))
            step(rows, update)

        anchor.step = step


def low_rank(optimizer: Any) -> None:
    """From now on two thin factors of each matrix are sent, in the bytes of 2 bits per number; the rest is remembered.

    For a scheme in fp32 with a memory that forgets nothing.
    """
    for replicator in optimizer.set_up():
        ThinFactors(replicator)


class ThinFactors:
    """Takes the place of two methods of a replicator: memory + movement goes out as the product of thin factors."""

    def __init__(self, replicator: Any) -> None:
        (self._pipeline,) = replicator.channel.pipelines  # one bucket: whole matrices
        self._memory, self._views = replicator.channel.memory.residual, replicator.layout.views
        self._rest = self._memory
        self._send, self._movement = replicator._send, replicator._movement
        replicator._send, replicator._movement = self.send, self.movement

    def movement(self, *of: Any) -> Tensor:
        """What makes the thin product of it and the memory; the rest is kept for later."""
        moved = self._movement(*of)
        whole = moved + self._memory
        sent = whole.clone()
        for part in self._views(sent):
            if part.ndim == 2:
                part.copy_(thin(part))
        self._rest = whole - sent
        return moved - self._rest

    def send(self, *of: Any) -> None:
        self._send(*of)
        self._memory.copy_(self._rest)  # all that was sent has left it


def thin(matrix: Tensor) -> Tensor:
    """The product of two factors of a matrix in bf16, which together have its numbers times 2 bits, or one column each.

    Shapes: `[rows, columns]` -> the same.
    """
    rows, columns = matrix.shape
    rank = max(rows * columns // (8 * (rows + columns)), 1)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    scale = values[:rank].sqrt()
    factors = left[:, :rank] * scale, scale[:, None] * right[:rank]
    first, second = (each.bfloat16().float() for each in factors)
    return first @ second


CHANGES: dict[str, Callable[[Any], None]] = {
    "orthogonal_movement": orthogonal_movement,
    "low_rank": low_rank,
}
"""Changes of a training that are no setting, by name."""


def tensors(session: Any) -> dict[str, Tensor]:
    """All that a replica needs to go on: the model, the inner optimizer, and what replication remembers. Collective."""
    inner = session.base.state_dict()["state"]
    found = {f"model.{name}": tensor for name, tensor in session.model.state_dict().items()}
    found |= {
        f"base.{number}.{key}": tensor
        for number, values in inner.items()
        for key, tensor in values.items()
    }
    found |= {f"replica.{key}": tensor for key, tensor in replica_state(session.optimizer).items()}
    return {key: tensor.detach().clone() for key, tensor in found.items()}


def restore(session: Any, saved: dict[str, Tensor]) -> None:
    """Continues from `saved`. Collective."""

    def part(name: str) -> dict[str, Tensor]:
        return {
            key.partition(".")[2]: tensor
            for key, tensor in saved.items()
            if key.startswith(f"{name}.")
        }

    session.model.load_state_dict(part("model"))
    inner: dict[int, dict[str, Tensor]] = {}
    for key, tensor in part("base").items():
        number, _, name = key.partition(".")
        inner.setdefault(int(number), {})[name] = tensor
    session.base.load_state_dict(
        {"state": inner, "param_groups": session.base.state_dict()["param_groups"]}
    )
    load_replica_state(session.optimizer, part("replica"))


def save(scratch: Path, state: State) -> None:
    """Writes a state in a directory of its own, and removes those before it."""
    part, whole = scratch / "part", scratch / f"after-{state.done:05}"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for number, replica in enumerate(state.replicas):
        save_file(replica, part / f"{number}.safetensors")
    (part / "measured.json").write_text(
        json.dumps({key: getattr(state, key) for key in State.MEASURED})
    )
    part.rename(whole)
    for old in sorted(scratch.glob("after-*"))[:-1]:
        shutil.rmtree(old)


def load(scratch: Path) -> State:
    """The last state in `scratch`; that of the beginning where there is none."""
    found = sorted(scratch.glob("after-*"))
    if not found:
        return State()
    measured = json.loads((found[-1] / "measured.json").read_text())
    files = sorted(found[-1].glob("*.safetensors"), key=lambda path: int(path.stem))
    curve = tuple((step, loss) for step, loss in measured.pop("curve"))
    return State(**measured, curve=curve, replicas=tuple(load_file(path) for path in files))


def run_cell(
    cell: Cell, results: Path, scratch: Path, judged: Callable[[Any], Row] = judge
) -> None:
    """Trains one run in this process, judges it at its end, and writes its row."""
    row = train(cell, scratch / file_name(cell), judged=judged)
    results.mkdir(parents=True, exist_ok=True)
    whole = json.dumps({**row, **made_by()}) + "\n"
    write_whole(results / f"{file_name(cell)}.json", whole.encode())
    shutil.rmtree(scratch / file_name(cell))
