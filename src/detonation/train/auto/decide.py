"""The choice of a run's scheme at its start, for the links that are there, the same on all ranks."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from detonation.cluster.network.measure import probe_axis
from detonation.cluster.network.profile import Step
from detonation.core.link.link import Link
from detonation.plan.advice import advise, row, why
from detonation.plan.auto import PROBE_S, world_link
from detonation.plan.cost import Network, Work
from detonation.plan.search import Option, options
from detonation.plan.spelling import spelled
from detonation.train.auto.adapt import Followed
from detonation.train.auto.asked import Asked, goal_of, settings_in, trained
from detonation.train.loop.session import Session, check_config, start_session
from detonation.train.loop.timing import forward_backward, optimizer_step
from detonation.train.output import directory
from detonation.train.recipe.schema import Config, Table
from detonation.train.recipe.sizes import shard_shapes
from detonation.train.recipe.tables import to_table


@dataclass(frozen=True)
class Chosen:
    """The choice: its configuration, a line to show, the `plan` of the run directory, an adapter's first state."""

    config: Config
    line: str
    plan: Table
    followed: Followed


def chosen_before(path: Path) -> Table | None:
    """The scheme of the run in `path`; None where no configuration is there, or none that can be read."""
    try:
        scheme = tomllib.loads((path / directory.CONFIG).read_text(encoding="utf-8")).get("scheme")
    except (OSError, ValueError):  # the other ranks already wait for the answer of this one
        return None
    return scheme if isinstance(scheme, dict) and "name" in scheme else None


def again(asked: Asked, path: Path, device: torch.device) -> Config | None:
    """The configuration that the run in `path` has chosen before; None where rank 0 cannot read it. Collective.

    No other rank needs to see the directory yet.
    """
    mine = chosen_before(path) if dist.get_rank() == 0 else None
    scheme: Table | None = world_link(device).send_to_all(mine, device)[0]
    if scheme is None:
        return None
    arguments = {key: value for key, value in scheme.items() if key != "name"}
    return check_config(asked.layers.under(scheme["name"], arguments))


def decide(asked: Asked, device: torch.device) -> Chosen:
    """Measures the link and the compute of a step, and chooses; all ranks agree. Collective."""
    candidates = asked.candidates()
    session = start_session(asked.check(), device)  # for measuring only: the run makes its own weights
    axis, _ = session.optimizer.levels[0]
    measured = probe_axis(axis, device, PROBE_S)
    network = Network(session.config.mesh.replicas, session.config.mesh.shards, measured.operations)
    compute_s, _ = forward_backward(session)
    work = Work(shard_shapes(session.config), compute_s, accumulate=session.config.train.accumulate)
    best, found, work = _search(asked.auto.budget, candidates, session, network, work)
    goal = goal_of(session.config, work)
    line = why(found, network, goal, asked.auto.budget)
    config = check_config(candidates[spelled(best.cost.scheme)])
    plan = {
        "chosen": row(best, goal),
        "why": line,
        **asdict(asked.auto),
        "link": asdict(measured),
        "compute_s": compute_s,
        "steps": {name: asdict(step) for name, step in work.steps.items()},
        **advise(found, work, network, goal, asked.auto.budget, partial(settings_in, asked.layers)),
    }
    followed = Followed(asked.auto.budget, network, compute_s, work.steps[spelled(best.cost.scheme)])
    return Chosen(config, f"auto: {line}", plan, followed)


def _search(
    budget: float, candidates: Mapping[str, Config], session: Session, network: Network, work: Work
) -> tuple[Option, list[Option], Work]:
    """The choice, the options that it was made from, and the work with the optimizer steps measured for it.

    The step of a scheme is measured only when it would be chosen: its time changes the share that is spent waiting.
    """
    device, world = session.device, world_link(session.device)
    pairs, goal = trained(candidates), goal_of(session.config, work)
    steps: dict[str, Step] = {}
    while True:
        work = replace(work, steps=dict(steps))
        found = options(pairs.values(), work, network, goal, budget)
        name = world.send_to_all(spelled(found[0].cost.scheme), device)[0]  # the first rank decides
        if name in steps:
            best = next(option for option in found if spelled(option.cost.scheme) == name)
            _agree(world, candidates[name], device)
            return best, found, work
        step = optimizer_step(session, candidates[name])
        if step is None:  # the optimizer refuses it
            del pairs[name]
        else:
            steps[name] = step


def _agree(world: Link, config: Config, device: torch.device) -> None:
    """Raises `Mismatch` on all ranks where one has another configuration of the choice."""
    world.require_same({"chosen": json.dumps(to_table(config), sort_keys=True)}, device, {})
