"""Plugins: functions that are found by name. A plugin is built in, or an installed package provides
it.

A package provides a plugin by an entry point, `name = "package.module:function"`, in the group
`detonation.engines`, `detonation.schemes` or `detonation.axes`. Each plugin is imported only when
it is requested. This module uses only the standard library, and imports no other module of the
package except `choices`.
"""

from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Literal, TypeAlias

from detonation.choices import imported, unknown

Kind: TypeAlias = Literal["engines", "schemes", "axes", "gates"]
"""The kinds of plugins. engines: functions that take the arguments of `engine_for` and return an
engine or None; the first engine that is returned is used. schemes: functions decorated with
`@register`, each under its own name. axes: subclasses of `Communicator`, or functions that make a
`Communicator`. gates: optional parts of a step, all of them built in.
"""

_BUILT_IN: dict[Kind, dict[str, str]] = {
    "engines": {
        "triton": "detonation.engines.triton:triton_engine",
        "native": "detonation.engines.native_engine:native_engine",
    },
    "gates": {
        "balance": "detonation.gates.balance:Balance",
        "closeness": "detonation.gates.closeness:Closeness",
        "single rounding": "detonation.gates.single_rounding:SingleRounding",
    },
}


@cache
def plugin_names(kind: Kind) -> dict[str, str]:
    """Returns all functions of a kind, by name, as "package.module:function".

    Functions of installed packages come first, sorted by name, so that all ranks have the same
    order. Raises `ValueError` if two packages provide the same name, or if a package provides a
    built-in name.
    """
    built_in = _BUILT_IN.get(kind, {})
    added: dict[str, str] = {}
    for point in sorted(entry_points(group=f"detonation.{kind}")):
        other = (built_in | added).get(point.name, point.value)
        if other != point.value:
            raise ValueError(
                f"the entry point {point.name} = {point.value} in detonation.{kind} has the same"
                f" name as {other}: rename the entry point, or uninstall its package"
            )
        added[point.name] = point.value
    return added | built_in


@cache
def plugins(kind: Kind) -> tuple[Callable[..., Any], ...]:
    """Returns all functions of a kind, in the order of `plugin_names`."""
    return tuple(imported(function) for function in plugin_names(kind).values())


def plugin(kind: Kind, name: str) -> Callable[..., Any]:
    """Returns the function `name` of a kind. If there is no such function, raises `ValueError` with
    the valid names.

    >>> plugin("gates", "balance").__name__
    'Balance'
    """
    names = plugin_names(kind)
    if name not in names:
        raise unknown(f"name in detonation.{kind}", name, names)
    return imported(names[name])
