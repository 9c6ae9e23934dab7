"""Schemes by name, for recipes, the command line, the planner and the library."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

from detonation.choices import checks_keywords, find_function, make, plain_types
from detonation.core.schemes.scheme import Scheme
from detonation.plugins import plugin, plugin_names

P = ParamSpec("P")
S = TypeVar("S", bound=Scheme)

SCHEMES: dict[str, Callable[..., Scheme]] = {}
"""Every registered scheme, in order of registration."""


def known_schemes() -> Mapping[str, Callable[..., Scheme]]:
    """`SCHEMES`, after importing the schemes that installed packages provide."""
    for name in plugin_names("schemes"):
        _import_installed(name)
    return SCHEMES


def _import_installed(name: str) -> None:
    """Imports the scheme `name` of an installed package; the import registers it.

    Raises `ValueError` if the module registers no scheme of that name.
    """
    if name in SCHEMES:
        return
    function = plugin("schemes", name)
    if name not in SCHEMES:
        raise ValueError(
            f"the entry point {name!r} of detonation.schemes is the function {function.__name__}:"
            " put it under @register, and give both one name"
        )


def register(function: Callable[P, S]) -> Callable[P, S]:
    """Registers the scheme that `function` makes under the function's name.

    Recipes, `--help`, `compare` and `plan` then offer it, and `detonation.testing.check_scheme`
    checks it against the laws. The decorator records name and arguments, defaults included, and
    checks each argument's type.

    Args:
        function: Returns a `GradientScheme` or a `ParameterScheme`; every parameter is annotated
            with `int`, `float`, `bool`, `str` or a `Literal`, and has a default.

    Returns:
        The function, which now raises `ValueError` for an argument of another type.

    Raises:
        ValueError: Another function has this name already.

    Example:
        >>> from detonation.extend import DCT, TopK, momentum, register
        >>> @register
        ... def half(chunk: int = 64) -> Scheme:
        ...     return momentum(DCT(), TopK(chunk // 2, chunk), decay=0.9)
        >>> half(chunk=8).arguments, scheme("half", {"chunk": 8}) == half(chunk=8)
        ({'chunk': 8}, True)
        >>> del SCHEMES["half"]
    """
    name = function.__name__
    if name in SCHEMES and SCHEMES[name].__module__ != function.__module__:
        raise ValueError(f"scheme {name} is registered already, by {SCHEMES[name].__module__}")
    SCHEMES[name] = recorded = _recorded(function, name)
    return recorded


def _recorded(function: Callable[P, S], name: str) -> Callable[P, S]:
    """Wraps `function`: checks its arguments, and records them and `name` in its scheme."""
    signature = inspect.signature(function)
    hints = get_type_hints(function)

    @checks_keywords(f"argument of scheme {name}")
    @functools.wraps(function)
    def made(*args: P.args, **kwargs: P.kwargs) -> S:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        for argument, value in bound.arguments.items():
            _require_type(argument, value, hints.get(argument))
        found = function(*args, **kwargs)
        if not isinstance(found, Scheme):
            raise ValueError(
                f"scheme {name} is {found!r}, must be made by momentum(...), outer_sgd(...) or the"
                " like"
            )
        return replace(found, name=name, arguments=dict(bound.arguments))

    return made


def scheme(name: str, arguments: Mapping[str, Any] | None = None) -> Scheme:
    """Makes a scheme from its name and arguments, as written in a recipe.

    Args:
        name: A scheme that is registered or that an installed package adds, or
            "package.module:function" for a function that returns one.
        arguments: The function's own arguments; the rest take their defaults.

    Raises:
        ValueError: A name or an argument does not exist (the message lists the valid ones), or a
            value is out of range.

    Example:
        >>> scheme("demo", {"topk": 2}).arguments["chunk"]
        64
    """
    if name in plugin_names("schemes"):
        _import_installed(name)
    function = find_function("scheme", name, SCHEMES)
    if name not in SCHEMES:
        function = _recorded(function, name)
    made: Scheme = make("scheme", {name: function}, name, arguments or {})
    return made


def _require_type(name: str, value: object, hint: Any) -> None:
    """Raises `ValueError` unless `value` matches `hint`: a value of a `Literal`, or a plain
    type.
    """
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise ValueError(
                f"{name} is {value!r}, must be one of {', '.join(map(str, get_args(hint)))}"
            )
        return
    if allowed := plain_types(value, hint):
        text = f"{name} is {value!r}, must be {allowed}"
        if hasattr(value, "item"):
            text += f": pass its .item(), not a {type(value).__name__}"
        raise ValueError(text)
