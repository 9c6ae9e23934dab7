"""The recipes that come with the package, by name. Imports nothing heavy."""

import itertools
from importlib import resources
from importlib.resources.abc import Traversable


def shipped_recipes() -> dict[str, Traversable]:
    """The recipe files of the package, by name.

    >>> "quick-lm" in shipped_recipes()
    True
    """
    folder = resources.files("detonation").joinpath("recipes")
    files = [file for file in folder.iterdir() if file.name.endswith(".toml")]
    return {file.name.removesuffix(".toml"): file for file in sorted(files, key=lambda file: file.name)}


def headline(text: str) -> str:
    """The comment at the top of a recipe, in one line.

    >>> headline("# A small model:\\n# two minutes.\\nseed = 0")
    'A small model: two minutes.'
    """
    lines = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    return " ".join(line.removeprefix("#").strip() for line in lines)
