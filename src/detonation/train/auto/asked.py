"""`[scheme] name = "auto"` in a recipe: its arguments, and the recipe under each scheme that may be chosen."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from detonation.choices import unknown
from detonation.core.schemes.registry import schemes
from detonation.core.schemes.scheme import Scheme
from detonation.plan.cost import Work
from detonation.plan.losses import GOAL_STEPS, Goal, task_of, trained_by
from detonation.plan.search import BUDGET, Candidate, check_budget, settings
from detonation.plan.spelling import changed, spelled
from detonation.train.loop.session import check_config, check_levels, scheme_of
from detonation.train.recipe import optimizers
from detonation.train.recipe.resolve import Layers
from detonation.train.recipe.schema import Config, require

AUTO = "auto"


@dataclass(frozen=True)
class Auto:
    """The arguments of scheme "auto" in a recipe.

    Args:
        budget: The part of a step that full synchronisation, or the adapted setting, may wait: between 0 and 1.
        adapt: Let the setting of the chosen scheme follow the link during the run.

    Raises:
        ValueError: A value is out of range.
    """

    budget: float = BUDGET
    adapt: bool = False

    def __post_init__(self) -> None:
        check_budget(self.budget)
        require(isinstance(self.adapt, bool), "scheme.adapt", self.adapt, "true or false")

    @classmethod
    def of(cls, config: Config) -> "Auto | None":
        """The arguments in `config`; None where it names its scheme. Raises `ValueError` for bad arguments."""
        names = [level.scheme.name for level in config.levels]
        if AUTO not in names:
            return None
        if len(names) > 1:
            raise ValueError("scheme auto is for a recipe of one [scheme]: name the scheme of each [[scheme]]")
        known = [field.name for field in fields(cls)]
        for key in config.scheme.arguments:
            if key not in known:
                raise unknown(f"argument of scheme {AUTO}", key, known)
        return cls(**config.scheme.arguments)


@dataclass(frozen=True)
class Asked:
    """A run whose scheme is still to be chosen: how to choose, and the recipe with its layers."""

    auto: Auto
    layers: Layers

    def candidates(self) -> dict[str, Config]:
        """The recipe under every scheme, by spelling: as it is tuned, and at other settings that go with that.

        `none` is left out where the recipe's replicas must agree.
        """
        made: dict[str, Config] = {}
        full = self.layers.under("full", {})
        agreeing = full.train.log_updates or full.train.publish or full.mesh.elastic
        for name in [name for name in schemes() if name != "none" or not agreeing]:
            for arguments in settings(name):
                config = self.layers.under(name, arguments)
                try:
                    made.setdefault(spelled(scheme_of(config.levels[-1])), config)
                except ValueError:
                    if not arguments:  # the recipe itself is not valid
                        raise
        return made

    def check(self) -> Config:
        """The recipe under full synchronisation. Raises `ValueError` for anything that would fail under some scheme."""
        for config in self.candidates().values():
            check_levels(config.levels)
            optimizers.check_optimizer(config.optimizer)
        return check_config(self.layers.under("full", {}))


def trained(candidates: Mapping[str, Config]) -> dict[str, Candidate]:
    """Each scheme that may be chosen, with the optimizer that the recipe trains it with."""
    found = {}
    for name, config in candidates.items():
        optimizer = trained_by(config.optimizer.name, config.optimizer.arguments)
        found[name] = (scheme_of(config.levels[-1]), optimizer)
    return found


def goal_of(config: Config, work: Work, optimizer: str | None = None) -> Goal:
    """The run of a recipe, for estimates of its loss."""
    parameters = sum(work.sizes.values())
    steps = config.train.steps or GOAL_STEPS  # of a recipe in epochs, whose steps its data tell
    return Goal(config.mesh.replicas, parameters, steps, task_of(config.model.name), optimizer)


def settings_in(layers: Layers, chosen: Scheme) -> dict[str, object]:
    """The arguments that a recipe must be given to train under `chosen`: those that it has otherwise under its name."""
    if isinstance(layers.tables.get("scheme"), list):
        return changed(chosen)
    own = scheme_of(layers.under(chosen.name, {}).levels[-1]).arguments
    return {key: value for key, value in chosen.arguments.items() if value != own[key]}


def standing(layers: Layers) -> Config:
    """The configuration, with full synchronisation in the place of a scheme that is still to be chosen."""
    config = layers.config()
    return config if Auto.of(config) is None else layers.under("full", {})
