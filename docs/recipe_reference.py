"""Writes docs/recipe-reference.md: every key of a recipe, from the dataclasses and functions that read it.

python docs/recipe_reference.py
"""

import inspect
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

from detonation.core.schemes.registry import schemes
from detonation.data import TASKS
from detonation.models import MODELS, model_function
from detonation.train.auto.asked import Auto
from detonation.train.recipe import schema

sys.path.insert(0, str(Path(__file__).parent))
from recipe_keys import RecipeKey, keys_of, recipe_keys

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
"""Of a table that chooses: each choice stands with its keys and their defaults, each meaning once for all choices."""
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
    found = recipe_keys() + list(keys_of("scheme", "auto", Auto, {}))
    parts = [HEAD]
    for table in dict.fromkeys(key.table for key in found if key.table):
        keys = [key for key in found if key.table == table]
        if any(key.owner for key in keys):
            parts += [f"## [{table}]\n", CHOICE.format(key=keys[0].name) + "\n", *choices(keys)]
        else:
            more = " All other keys are arguments of the optimizer's class." if table == "optimizer" else ""
            rows = [f"| `{key.name}` | {spelled(key)} | {meaning(key)} |" for key in keys]
            head = ["| key | default | meaning |", "|---|---|---|"]
            parts += [f"## [{table}]\n", purpose(table) + more + "\n", "\n".join([*head, *rows, ""])]
    return "\n".join([*parts, LEVELS, TUNED])


def choices(keys: list[RecipeKey]) -> list[str]:
    """The choices of a table, each with its keys, and one table of the meanings of all keys."""
    listed, owners = [], dict[tuple[str, str], list[str]]()
    for owner, own in groupby(keys[1:], lambda key: key.owner):
        spellings = []
        for key in own:
            owners.setdefault((key.name, meaning(key)), []).append(owner)
            given = "" if key.default is None else f" = {spelled(key).strip('`')}"
            spellings.append(f"`{key.name}{given}`")
        taken = f" Keys: {', '.join(spellings)}." if spellings else ""
        listed.append(f'- `{keys[0].name} = "{owner}"`: {purpose(owner)}{taken}')
    head = ["| key | of | meaning |", "|---|---|---|"]
    names = list(dict.fromkeys(name for name, _ in owners))
    together = sorted(owners.items(), key=lambda row: names.index(row[0][0]))
    rows = [f"| `{name}` | {', '.join(of)} | {said} |" for (name, said), of in together]
    return ["\n".join([*listed, ""]), "\n".join([*head, *rows, ""])]


def purpose(described: str) -> str:
    """The purpose of a table or a choice: the first paragraph of its docstring."""
    return " ".join((inspect.getdoc(DESCRIBED[described]) or "").partition("\n\n")[0].split())


def meaning(key: RecipeKey) -> str:
    """The meaning of a key, in a cell of a table."""
    return key.meaning.replace("|", chr(92) + "|")


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
