"""`[scheme] name = "auto"` in a recipe: what it may say, and the recipe under each scheme that may be chosen."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import detonation as dt
from detonation.choices import unknown
from detonation.core.schemes.registry import SCHEMES
from detonation.plan.choice import BUDGET, check_budget
from detonation.plan.search import settings
from detonation.plan.spelling import spelled
from detonation.train.loop.session import check, check_levels
from detonation.train.recipe import optimizers, resolve
from detonation.train.recipe.schema import Config, Table, require

NAME = "auto"


@dataclass(frozen=True)
class Auto:
    """What a recipe says beside the name. budget: the part of a step that may be waited for the network.

    adapt: whether the scheme's setting follows the link while the run goes on.
    """

    budget: float = BUDGET
    adapt: bool = False

    def __post_init__(self) -> None:
        check_budget(self.budget)
        require(isinstance(self.adapt, bool), "scheme.adapt", self.adapt, "true or false")

    @classmethod
    def of(cls, config: Config) -> "Auto | None":
        """What `config` asks for; None where it names its scheme. Raises `ValueError` for what makes no sense."""
        names = [level.scheme.name for level in config.levels]
        if NAME not in names:
            return None
        if len(names) > 1:
            raise ValueError("scheme auto is for a recipe of one [scheme]: name the scheme of each [[scheme]]")
        known = [field.name for field in fields(cls)]
        for key in config.scheme.arguments:
            if key not in known:
                raise unknown(f"argument of scheme {NAME}", key, known)
        return cls(**config.scheme.arguments)


@dataclass(frozen=True)
class Asked:
    """What a run must be told to choose: how, and the recipe with what the command line says about it."""

    auto: Auto
    tables: Table
    overrides: Table

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> "Asked":
        """What `asdict` made a table of."""
        return cls(Auto(**table["auto"]), table["tables"], table["overrides"])

    def under(self, name: str, arguments: Mapping[str, Any]) -> Config:
        """The recipe under a scheme, with what it has tuned for it."""
        return resolve.resolve(self.tables, {**self.overrides, "scheme": {"name": name, **arguments}})

    def candidates(self) -> dict[str, Config]:
        """The recipe under every scheme, as it is tuned and at other settings that go with that."""
        made: dict[str, Config] = {}
        for name in SCHEMES:
            for arguments in settings(name):
                config = self.under(name, arguments)
                try:
                    made.setdefault(spelled(dt.scheme(name, config.scheme.arguments)), config)
                except ValueError:
                    if not arguments:  # then it is the recipe that makes no sense
                        raise
        return made

    def check(self) -> Config:
        """The recipe under full synchronisation. Raises `ValueError` for whatever would fail under some scheme."""
        for config in self.candidates().values():
            check_levels(config.levels)
            optimizers.check(config.optimizer)
        return check(self.under("full", {}))
