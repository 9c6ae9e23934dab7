"""Choosing by name: one table of functions, one wording for every wrong name. Pure Python, a leaf."""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def unknown(kind: str, name: str, valid: Iterable[str]) -> ValueError:
    """The error for a `name` that is not among `valid`: lists what is, and suggests the nearest.

    >>> str(unknown("scheme", "dem", ["demo", "full"]))
    "unknown scheme 'dem', did you mean 'demo'? Valid: demo, full"
    """
    names = sorted(valid)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f", did you mean {near[0]!r}?" if near else "."
    return ValueError(f"unknown {kind} {name!r}{hint} Valid: {', '.join(names)}")


def make(kind: str, table: Mapping[str, Callable[..., T]], name: str, arguments: Mapping[str, Any]) -> T:
    """Calls `table[name](**arguments)` after checking both the name and each argument's name.

    Raises `ValueError` for an unknown name, an unknown argument or a missing one; what the function itself raises
    passes through.
    """
    if name not in table:
        raise unknown(kind, name, table)
    parameters = inspect.signature(table[name]).parameters
    for argument in arguments:
        if argument not in parameters:
            raise unknown(f"argument of {kind} {name}", argument, parameters)
    missing = [p.name for p in parameters.values() if p.default is p.empty and p.name not in arguments]
    if missing:
        raise ValueError(f"{kind} {name} needs {', '.join(missing)}")
    return table[name](**arguments)
