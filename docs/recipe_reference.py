"""Writes docs/recipe-reference.md: every key of a recipe, from the dataclasses and functions that read it.

python docs/recipe_reference.py
"""

import inspect
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

from detonation.core.schemes.registry import schemes
from detonation.data import TASKS
from detonation.models import MODELS, model_function
from detonation.train.auto.asked import Auto
from detonation.train.recipe import schema
from detonation.train.recipe.keys import RecipeKey, keys_of, recipe_keys

PAGE = Path(__file__).with_name("recipe-reference.md")
HEAD = """# Recipe reference

A recipe is a TOML file that describes a whole run. `--set table.key=value` overrides any key of this page on the
command line. A wrong key is an error that lists the valid ones. `detonation recipes quick-lm > my.toml` is the start of
your own, and a run writes its fully resolved recipe into `config.toml` of its directory.

*This page is made by `python docs/recipe_reference.py` from the code that reads recipes; a test holds it to that.*

`seed` is the only key outside a table: a whole number, 0 when left out. Initial weights, batches and random selections
follow from it.
"""
CHOICE = "`{key}` chooses; all other keys are arguments of what it chooses. `package.module:function` is yours."
LEVELS = """## [[scheme]]

One table for each tier of the network, from the innermost: `axis`, its name; `replicas`, those that it joins; and the
keys of a scheme.
"""
TUNED = """## [tuned.SCHEME]

Tables `scheme`, `optimizer`, `schedule` and `train` that are laid over the recipe where SCHEME is chosen. So `--scheme
random` brings along the learning rate that was tuned for it. `--set` counts over both.
"""


DESCRIBED: dict[str, Callable[..., Any]] = {
    "train": schema.TrainConfig,
    "mesh": schema.MeshConfig,
    "schedule": schema.ScheduleConfig,
    "peers": schema.PeersConfig,
    "optimizer": schema.OptimizerConfig,
    **MODELS,
    "hf:...": model_function("hf:..."),
    **TASKS,
    **schemes(),
    "auto": Auto,
}
"""The code whose docstring says what a table, or a choice in it, is."""


def page() -> str:
    """The text of the page."""
    parts, last = [HEAD], list(schemes())[-1]
    for (table, owner), keys in groupby(recipe_keys(), lambda key: (key.table, key.owner)):
        own = list(keys)
        if not table:
            continue
        if owner:
            chooser = "task" if table == "data" else "name"
            parts.append(section(f'### {chooser} = "{owner}"', owner, own))
        elif table in ("model", "data", "scheme"):
            parts.append(f"## [{table}]\n\n{CHOICE.format(key=own[0].name)}\n")
        else:
            more = " All other keys are arguments of the optimizer's class." if table == "optimizer" else ""
            parts.append(section(f"## [{table}]", table, own, more))
        if owner == last:
            parts.append(section('### name = "auto"', "auto", list(keys_of("scheme", "auto", Auto, {}))))
    return "\n".join([*parts, LEVELS, TUNED])


def section(title: str, described: str, keys: list[RecipeKey], more: str = "") -> str:
    """A heading, the purpose of the table or choice, and a row for each of its keys."""
    purpose = " ".join((inspect.getdoc(DESCRIBED[described]) or "").partition("\n\n")[0].split())
    rows = [f"| `{key.name}` | {spelled(key)} | {key.meaning.replace('|', chr(92) + '|')} |" for key in keys]
    table = ["| key | default | meaning |", "|---|---|---|", *rows, ""] if rows else []
    return "\n".join([title, "", purpose + more, "", *table])


def spelled(key: RecipeKey) -> str:
    """A default as a recipe spells it."""
    if key.required:
        return "must be given"
    if key.default is None:
        return "none"
    texts = {bool: lambda x: str(x).lower(), str: lambda x: f'"{x}"', tuple: lambda x: "[]" if not x else str(list(x))}
    return f"`{texts.get(type(key.default), str)(key.default)}`"


if __name__ == "__main__":
    PAGE.write_text(page())
