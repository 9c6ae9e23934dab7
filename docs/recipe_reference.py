"""Writes docs/recipe-reference.md: every key of a recipe, from the dataclasses and functions that read it.

python docs/recipe_reference.py
"""

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from detonation.core.schemes.registry import SCHEMES
from detonation.data import TASKS
from detonation.models import MODELS
from detonation.train.auto.asked import Auto
from detonation.train.recipe import schema

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
TUNED = """## [tuned.SCHEME]

Tables `scheme`, `optimizer`, `schedule` and `train` that are laid over the recipe where SCHEME is chosen. So `--scheme
random` brings along the learning rate that was tuned for it. `--set` counts over both.
"""


def page() -> str:
    """The text of the page."""
    parts = [HEAD]
    for name, kind in (("train", schema.TrainConfig), ("mesh", schema.MeshConfig), ("schedule", schema.ScheduleConfig)):
        parts.append(section(f"[{name}]", kind))
    parts.append(section("[peers]", schema.PeersConfig))
    parts.append(
        section("[optimizer]", schema.OptimizerConfig, "All other keys are arguments of the optimizer's class.")
    )
    schemes = {name: SCHEMES[name] for name in sorted(SCHEMES)} | {"auto": Auto}
    for table, key, choices in (("model", "name", MODELS), ("data", "task", TASKS), ("scheme", "name", schemes)):
        parts.append(f"## [{table}]\n\n{CHOICE.format(key=key)}\n")
        parts += [section(f'{key} = "{name}"', function, level=3) for name, function in choices.items()]
    parts.append(
        section("[[scheme]]", schema.LevelConfig, "One table for each tier of the network, from the innermost.")
    )
    return "\n".join([*parts, TUNED])


def section(title: str, described: Callable[..., Any], more: str = "", level: int = 2) -> str:
    """The heading of a table, its purpose, and a row for each key."""
    text = inspect.getdoc(described) or ""
    meanings = arguments(text)
    rows = [f"| `{key}` | {spelled(default)} | {meanings.get(key, '')} |" for key, default in keys(described).items()]
    table = ["| key | default | meaning |", "|---|---|---|", *rows, ""] if rows else []
    purpose = " ".join(text.partition("\n\n")[0].split())
    return "\n".join([f"{'#' * level} {title}", "", " ".join([purpose, more]).strip(), "", *table])


def keys(described: Callable[..., Any]) -> Mapping[str, Any]:
    """The keys that a recipe may give, with their defaults; those that hold other tables are left out."""
    inner = {"arguments", "scheme"}
    return {
        name: parameter.default
        for name, parameter in inspect.signature(described).parameters.items()
        if not (dataclasses.is_dataclass(described) and name in inner)
    }


def arguments(text: str) -> dict[str, str]:
    """The meanings in the section Args of a docstring, by name; a line may name several arguments."""
    body = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", text, re.DOTALL | re.MULTILINE)
    found = {}
    for names, meaning in re.findall(r"^ {4}([\w, ]+): (.*(?:\n {8,}.*)*)", body[1] if body else "", re.MULTILINE):
        for name in names.split(", "):
            found[name] = " ".join(meaning.split()).replace("|", "\\|")
    return found


def spelled(default: Any) -> str:
    """A default as a recipe spells it."""
    if default is inspect.Parameter.empty:
        return "must be given"
    if default is None:
        return "none"
    texts = {True: "true", False: "false"}
    text = texts[default] if isinstance(default, bool) else f'"{default}"' if isinstance(default, str) else str(default)
    return f"`{'[]' if default == () else text}`"


if __name__ == "__main__":
    PAGE.write_text(page())
