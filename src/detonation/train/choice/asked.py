"""A recipe with scheme "auto": the candidate schemes, and the goal for which they are ranked."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from detonation.choices import make
from detonation.cluster.network.measure import Everyone
from detonation.core.schemes import Scheme, known_schemes
from detonation.plan.cost import Work, spelled
from detonation.plan.losses import Goal, task_of, trained_by
from detonation.plan.search import BUDGET, Candidate, check_budget, settings
from detonation.train.loop.checks import check_config, check_levels, scheme_of
from detonation.train.output import directory
from detonation.train.recipe import optimizers
from detonation.train.recipe.resolve import Layers
from detonation.train.recipe.schema import Config

AUTO = "auto"


@dataclass(frozen=True)
class Auto:
    """The arguments of scheme "auto" in a recipe.

    Args:
        budget: Largest share of a step, between 0 and 1, that full synchronisation may spend
            waiting for the network.

    Raises:
        ValueError: A value is out of range.
    """

    budget: float = BUDGET

    def __post_init__(self) -> None:
        check_budget(self.budget)

    @classmethod
    def of(cls, config: Config) -> "Auto | None":
        """Returns the arguments of scheme "auto" in `config`; None if `config` names another
        scheme. Raises `ValueError` if an argument is not valid.
        """
        names = [level.scheme.name for level in config.levels]
        if AUTO not in names:
            return None
        if len(names) > 1:
            raise ValueError(
                "scheme auto needs a recipe with a single [scheme]: in each [[scheme]], set name to"
                " a scheme other than auto"
            )
        return make("scheme", {AUTO: cls}, AUTO, config.scheme.arguments)


@dataclass(frozen=True)
class Asked:
    """A run whose scheme has not been chosen yet.

    Args:
        auto: Arguments of scheme "auto" in the recipe.
        layers: The recipe, its overrides and its defaults for each scheme.
    """

    auto: Auto
    layers: Layers

    def candidates(self) -> dict[str, Config]:
        """Returns the configurations among which to choose. The keys are their schemes as text.
        Each registered scheme is tried with the arguments in the recipe and with other arguments.

        Omits the scheme `none` if the recipe requires equal replicas.
        """
        found: dict[str, Config] = {}
        full = self.layers.under("full", {})
        equal = full.train.log_updates or full.train.publish or full.mesh.elastic
        for name in known_schemes():
            if name == "none" and equal:
                continue
            for arguments in settings(name):
                config = self.layers.under(name, arguments)
                try:
                    found.setdefault(spelled(scheme_of(config.levels[-1])), config)
                except ValueError:
                    if not arguments:  # the recipe's own arguments are invalid
                        raise
        return found

    def under(self, scheme: Mapping[str, Any]) -> Config:
        """Returns the checked recipe with the scheme that the table `scheme` describes."""
        arguments = {key: value for key, value in scheme.items() if key != "name"}
        return check_config(self.layers.under(scheme["name"], arguments))

    def check(self) -> Config:
        """Checks the recipe with each candidate scheme. Returns the configuration of the recipe
        with full synchronisation.

        Raises `ValueError` if the recipe is invalid with any of the candidate schemes.
        """
        for config in self.candidates().values():
            check_levels(config.levels)
            optimizers.check_optimizer(config.optimizer)
        return check_config(self.layers.under("full", {}))


def trained(candidates: Mapping[str, Config]) -> dict[str, Candidate]:
    """Returns the candidate schemes, each with the optimizer that the recipe sets for this
    scheme.
    """
    found = {}
    for name, config in candidates.items():
        optimizer = trained_by(config.optimizer.name, config.optimizer.arguments)
        found[name] = (scheme_of(config.levels[-1]), optimizer)
    return found


def goal_of(config: Config, work: Work) -> Goal:
    """Returns the goal of a recipe: its replicas, model size, steps and task. The planner estimates
    the losses of schemes for this goal.
    """
    return Goal(
        config.mesh.replicas,
        sum(work.sizes.values()),
        config.train.steps,
        task_of(config.model.name),
    )


def settings_in(layers: Layers, chosen: Scheme) -> dict[str, object]:
    """Returns the arguments of `chosen` whose values differ from the values that the recipe sets
    for the same scheme.
    """
    own = scheme_of(layers.under(chosen.name, {}).levels[-1]).arguments
    return {key: value for key, value in chosen.arguments.items() if value != own[key]}


def standing(layers: Layers) -> Config:
    """Returns the configuration of the recipe. If the recipe's scheme is "auto" and no scheme has
    been chosen yet, this configuration uses full synchronisation.
    """
    config = layers.config()
    if Auto.of(config) is None:
        return config
    return layers.under("full", {})


def again(asked: Asked, path: Path, everyone: Everyone) -> Config | None:
    """Returns the configuration that the run in `path` chose at an earlier start; None if rank 0
    cannot read this configuration. Collective.

    Only rank 0 needs to see the directory `path`.
    """
    scheme = directory.config_in(path).get("scheme")
    if not isinstance(scheme, dict) or "name" not in scheme:
        scheme = None
    found = everyone.send_to_all(scheme)[0]
    if found is None:
        return None
    return asked.under(found)
