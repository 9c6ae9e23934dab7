"""`[scheme] name = "auto"`: measures the link, and chooses one scheme on all ranks."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.cluster.network.measure import Everyone, probe_axis
from detonation.cluster.network.profile import Step
from detonation.cluster.survive.surviving import SurvivingCommunicator
from detonation.plan.auto import PROBE_S
from detonation.plan.cost import Network, Work, spelled
from detonation.plan.search import Candidate, Option, advise, options, row, why
from detonation.train.choice.asked import Asked, again, goal_of, settings_in, trained
from detonation.train.choice.step_times import forward_backward, optimizer_step
from detonation.train.loop.checks import check_config, shard_shapes
from detonation.train.loop.session import Session, start_session
from detonation.train.recipe.schema import Config, Table
from detonation.train.recipe.tables import to_table


@dataclass(frozen=True)
class Chosen:
    """The chosen scheme, and the measurements behind the choice.

    Args:
        config: Configuration with the chosen scheme.
        line: Reason, as a line to print.
        plan: Contents of `plan.json` in the run directory.
    """

    config: Config
    line: str
    plan: Table


def decide(asked: Asked, everyone: Everyone, axis: SurvivingCommunicator | None = None) -> Chosen:
    """Measures the link and the time of forward and backward, and chooses one scheme for all ranks.
    Collective.

    Args:
        axis: Axis of an elastic run, on which the link is measured. Steps are measured over a
            loopback communicator, because a second optimizer on the axis would prevent replicas
            from joining.
    """
    candidates = asked.candidates()
    device = everyone.device
    config = asked.check()
    # This session only measures: the run later builds a second session, with weights of its own.
    session = start_session(config, device, axis and LoopbackCommunicator(config.mesh.replicas))
    measured = probe_axis(axis or session.optimizer.levels[0][0], device, PROBE_S, everyone)
    network = Network.of_axis(measured, session.config.mesh.shards)
    compute_s, _ = forward_backward(session, everyone)
    accumulate = session.config.train.accumulate
    on_device = device.type != "cpu"
    work = Work(shard_shapes(session.config), compute_s, {}, True, accumulate, True, on_device)
    best, found, work = _search(asked.auto.budget, candidates, session, everyone, network, work)
    goal = goal_of(session.config, work)
    line = why(found, network, goal, asked.auto.budget)
    name = spelled(best.cost.scheme)
    config = check_config(candidates[name])
    plan = {
        "chosen": row(best, goal),
        "why": line,
        "link": asdict(measured),
        "compute_s": compute_s,
        "steps": {name: asdict(step) for name, step in work.steps.items()},
        **advise(found, work, network, goal, asked.auto.budget, partial(settings_in, asked.layers)),
    }
    return Chosen(config, f"auto: {line}", plan)


def _search(
    budget: float,
    candidates: Mapping[str, Config],
    session: Session,
    everyone: Everyone,
    network: Network,
    work: Work,
) -> tuple[Option, list[Option], Work]:
    """Returns the chosen option, all options, and a copy of `work` with the measured times of
    optimizer steps.

    Measuring all schemes would take too long. So this function chooses as if optimizer steps took
    no time, measures the step of the chosen scheme, and chooses again with the measured time. It
    ends when the chosen scheme has been measured. It drops a scheme that the optimizer refuses.
    """
    pairs = trained(candidates)
    goal = goal_of(session.config, work)
    steps: dict[str, Step] = {}
    while True:
        work = replace(work, steps=dict(steps))
        found = options(pairs.values(), work, network, goal, budget)
        # all ranks use the choice of the first rank
        name = everyone.send_to_all(spelled(found[0].cost.scheme))[0]
        if name in steps:
            best = next(option for option in found if spelled(option.cost.scheme) == name)
            text = json.dumps(to_table(candidates[name]), sort_keys=True)
            # raise `Mismatch` on all ranks if their choices differ
            everyone.require_same({"chosen": text}, {})
            return best, found, work
        step = optimizer_step(session, everyone, candidates[name])
        if step is None:
            del pairs[name]
        else:
            steps[name] = step
            _share_local_time(steps, pairs, name)


def _share_local_time(
    steps: dict[str, Step], pairs: Mapping[str, Candidate], measured: str
) -> None:
    """Sets the time of a step without an exchange in `steps`. All settings with the scheme and the
    optimizer of the setting `measured` get the shortest of their measured times.

    The reason is that this time does not depend on the arguments of the scheme.
    """

    def kind(name: str) -> tuple[str, object]:
        scheme, optimizer = pairs[name]
        return scheme.name, optimizer

    settings = [name for name in steps if kind(name) == kind(measured) and steps[name].local_s]
    local_s = min((steps[name].local_s for name in settings), default=0.0)
    for name in settings:
        steps[name] = replace(steps[name], local_s=local_s)


def chosen_config(
    asked: Asked, begun: Path | None, everyone: Everyone, axis: SurvivingCommunicator | None
) -> tuple[Config, Chosen | None]:
    """Returns the configuration of the run, and the choice, which is None if the run has chosen
    earlier. Collective.

    Args:
        begun: Directory of a run that began earlier. Such a run keeps the scheme in its
            configuration.
    """
    if begun is not None:
        before = again(asked, begun, everyone)
        if before is not None:
            return before, None
    chosen = decide(asked, everyone, axis)
    return chosen.config, chosen
