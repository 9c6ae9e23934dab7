"""Writes docs/recipe-reference.md: every key of a recipe, from the dataclasses and functions that read it.

python docs/recipe_reference.py
"""

import dataclasses
import inspect
import re
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, get_args, get_type_hints

from detonation.core.schemes.scheme import SCHEMES
from detonation.data import TASKS
from detonation.models import MODELS, model_function
from detonation.train.choice.asked import Auto
from detonation.train.recipe import schema

PAGE = Path(__file__).with_name("recipe-reference.md")
HEAD = """# Recipe reference

A recipe is a TOML file that describes a whole run. `--set table.key=value` overrides any key of this page on the
command line. A wrong key is an error that lists the valid ones. `detonation train quick-lm --print > my.toml`
is the start of your own, and a run writes its fully resolved recipe into `config.toml` of its directory.

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
_TABLES: Mapping[str, type] = {
    "optimizer": schema.OptimizerConfig,
    "schedule": schema.ScheduleConfig,
    "train": schema.TrainConfig,
    "mesh": schema.MeshConfig,
    "peers": schema.PeersConfig,
}
_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean"}
_CHOOSERS = {
    "model": 'a model: olmo2, olmoe, t5, vit, hf:DIRECTORY or hf:ID of transformers, or "package.module:function"',
    "data": 'the kind of data: text, images, translation, or "package.module:function"',
    "scheme": 'a scheme, "auto", or "package.module:function"',
}


DESCRIBED: dict[str, Callable[..., Any]] = {
    "train": schema.TrainConfig,
    "mesh": schema.MeshConfig,
    "schedule": schema.ScheduleConfig,
    "peers": schema.PeersConfig,
    "optimizer": schema.OptimizerConfig,
    **MODELS,
    "hf:...": model_function("hf:..."),
    **TASKS,
    **SCHEMES,
    "auto": Auto,
}
"""The code whose docstring says what a table, or a choice in it, is."""


@dataclass(frozen=True)
class RecipeKey:
    """One key of a recipe.

    Args:
        table: The table of the recipe; "" for a key outside of tables.
        owner: The model, task or scheme that takes it; "" where it belongs to the table itself.
        kind: Its type in JSON.
        default: None where there is none; `required` tells whether it must be given.
    """

    table: str
    owner: str
    name: str
    kind: str
    default: Any
    required: bool
    meaning: str


def recipe_keys() -> list[RecipeKey]:
    """All keys: of the tables, and of each model, task and scheme of this package.

    >>> next(key for key in recipe_keys() if (key.table, key.name) == ("train", "keep")).default
    3
    """
    found = [
        RecipeKey(
            "",
            "",
            "seed",
            "integer",
            0,
            False,
            "Of weights, data order, dropout and random selections.",
        )
    ]
    chosen: dict[str, Mapping[str, Callable[..., Any]]] = {
        "model": {**MODELS, "hf:...": model_function("hf:...")},
        "data": TASKS,
        "scheme": {name: function for name, function in SCHEMES.items() if ":" not in name},
    }
    for table, functions in chosen.items():
        chooser = "task" if table == "data" else "name"
        found.append(RecipeKey(table, "", chooser, "string", None, True, _CHOOSERS[table]))
        for name, function in functions.items():
            found += keys_of(table, name, function, functions)
    for table, kind in _TABLES.items():
        meanings = _meanings(kind)
        hints = get_type_hints(kind)
        for field in dataclasses.fields(kind):
            if field.name != "arguments":
                required = field.default is dataclasses.MISSING
                default = None if required else field.default
                found.append(
                    RecipeKey(
                        table,
                        "",
                        field.name,
                        _kind(hints[field.name]),
                        default,
                        required,
                        meanings[field.name],
                    )
                )
    return found


def keys_of(
    table: str, owner: str, function: Callable[..., Any], others: Mapping[str, Callable[..., Any]]
) -> Iterator[RecipeKey]:
    """The arguments of a function, or the fields of a dataclass, as keys of `table`.

    Args:
        owner: Its name in a recipe.
        others: By name, for a meaning that stands in the docstring of another.
    """
    meanings, hints = _meanings(function), get_type_hints(function)
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is not parameter.VAR_KEYWORD:
            required = parameter.default is parameter.empty
            default = None if required else parameter.default
            meaning = meanings.get(name, "")
            while same := re.fullmatch(r"As in `(\w+)`\.?", meaning):
                meaning = _meanings(others[same[1]]).get(name, "")
            yield RecipeKey(table, owner, name, _kind(hints.get(name)), default, required, meaning)


def _meanings(source: Any) -> dict[str, str]:
    """The sentences about each argument in the "Args:" of a docstring."""
    text = (inspect.getdoc(source) or "").partition("Args:\n")[2]
    found: dict[str, str] = {}
    names: list[str] = []
    for line in text.splitlines():
        entry = re.match(r"    (\w[\w, ]*): (.*)", line)
        if entry:
            names = entry[1].split(", ")
            found |= dict.fromkeys(names, entry[2])
        elif line.startswith("        ") and names:
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
        elif line.strip():
            break
    return found


def _kind(hint: Any) -> str:
    if hint in (tuple[str, ...], tuple[float, ...]):
        return "array"
    plain = (
        [each for each in get_args(hint) if each is not types.NoneType]
        if get_args(hint)
        else [hint]
    )
    return _TYPES.get(plain[0], "string")


def page() -> str:
    """The text of the page."""
    found = recipe_keys() + list(keys_of("scheme", "auto", Auto, {}))
    parts = [HEAD]
    for table in dict.fromkeys(key.table for key in found if key.table):
        keys = [key for key in found if key.table == table]
        if any(key.owner for key in keys):
            parts += [f"## [{table}]\n", CHOICE.format(key=keys[0].name) + "\n", *choices(keys)]
        else:
            more = (
                " All other keys are arguments of the optimizer's class."
                if table == "optimizer"
                else ""
            )
            rows = [f"| `{key.name}` | {spelled(key)} | {meaning(key)} |" for key in keys]
            head = ["| key | default | meaning |", "|---|---|---|"]
            parts += [
                f"## [{table}]\n",
                purpose(table) + more + "\n",
                "\n".join([*head, *rows, ""]),
            ]
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
    texts = {
        bool: lambda x: str(x).lower(),
        str: lambda x: f'"{x}"',
        tuple: lambda x: "[]" if not x else str(list(x)),
    }
    return f"`{texts.get(type(key.default), str)(key.default)}`"


if __name__ == "__main__":
    PAGE.write_text(page())
