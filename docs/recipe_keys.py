"""Every key of a recipe, from the dataclasses and functions that take it."""

import dataclasses
import inspect
import re
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from detonation.core.schemes.registry import schemes
from detonation.data import TASKS
from detonation.models import MODELS, model_function
from detonation.train.recipe.schema import MeshConfig, OptimizerConfig, PeersConfig, ScheduleConfig, TrainConfig

_TABLES: Mapping[str, type] = {
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
    "train": TrainConfig,
    "mesh": MeshConfig,
    "peers": PeersConfig,
}
_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean"}
_CHOOSERS = {
    "model": 'a model: olmo2, olmoe, t5, vit, hf:DIRECTORY or hf:ID of transformers, or "package.module:function"',
    "data": 'the kind of data: text, images, translation, or "package.module:function"',
    "scheme": 'a scheme, "auto", or "package.module:function"',
}


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
    found = [RecipeKey("", "", "seed", "integer", 0, False, "Of weights, data order, dropout and random selections.")]
    chosen: dict[str, Mapping[str, Callable[..., Any]]] = {
        "model": {**MODELS, "hf:...": model_function("hf:...")},
        "data": TASKS,
        "scheme": {name: function for name, function in schemes().items() if ":" not in name},
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
                    RecipeKey(table, "", field.name, _kind(hints[field.name]), default, required, meanings[field.name])
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
    plain = [each for each in get_args(hint) if each is not types.NoneType] if get_args(hint) else [hint]
    return _TYPES.get(plain[0], "string")
