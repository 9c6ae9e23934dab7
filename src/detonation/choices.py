"""Finds functions by name, in a table or as "package.module:function". Formats names for errors
and warnings.

Uses only the standard library, and imports no other module of the package.
"""

import difflib
import functools
import importlib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType, NoneType, UnionType
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin

_P = ParamSpec("_P")
_T = TypeVar("_T")

_PLAIN: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
}
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def first_names(names: Iterable[str], most: int = 3) -> str:
    """Returns the first `most` names and the number of remaining names, as text for a message."""
    listed = list(names)
    text = ", ".join(listed[:most])
    if len(listed) > most:
        text += f" and {len(listed) - most} more"
    return text


def unknown(kind: str, name: str, valid: Iterable[str], meant: str = "") -> ValueError:
    """Returns the error for a `name` that is not in `valid`. The message lists the valid names and
    suggests the valid name that is most similar to `meant`, which is `name` by default.

    >>> str(unknown("scheme", "dem", ["demo", "full"]))
    "unknown scheme 'dem', did you mean 'demo'? Valid: demo, full"
    >>> str(unknown("optimizer", "adamw", ["Adam", "AdamW"]))
    "unknown optimizer 'adamw', did you mean 'AdamW'? Valid: Adam, AdamW"
    """
    names = sorted(valid)
    hint = did_you_mean(meant or name, names) or "."
    return ValueError(f"unknown {kind} {name!r}{hint} Valid: {', '.join(names)}")


def did_you_mean(name: str, names: Sequence[str], likeness: float = 0.6) -> str:
    """Returns a question that suggests the name in `names` that is most similar to `name`; "" if no
    name has at least the similarity `likeness`. The similarity of equal names is 1, and that of
    names without a common letter is 0.

    >>> did_you_mean("quik-lm", ["quick-lm", "moe-lm"]), did_you_mean("x", ["quick-lm"])
    (", did you mean 'quick-lm'?", '')
    """
    near = [known for known in names if known.lower() == name.lower()]
    near = near or difflib.get_close_matches(name, names, n=1, cutoff=likeness)
    if near:
        return f", did you mean {near[0]!r}?"
    return ""


def needs(module: str, extra: str) -> ModuleType:
    """Imports an optional module. If the module is missing, raises `ValueError` that names the
    `extra` to install.

    >>> needs("json", "data").__name__
    'json'
    >>> needs("no_such_package", "data")
    Traceback (most recent call last):
    ValueError: this needs no_such_package: pip install '.[data]' in a clone
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0].replace("PIL", "pillow")
        raise ValueError(f"this needs {package}: pip install '.[{extra}]' in a clone") from error


def first_line(error: Exception) -> str:
    """Returns the first line of an error's message. If the message is empty, returns the name of
    the error's class.
    """
    return str(error).strip().split("\n")[0] or type(error).__name__


def checks_keywords(kind: str, **elsewhere: str) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Returns a decorator for functions. A call with an unknown keyword then raises `TypeError`,
    whose message lists the valid names.

    Args:
        kind: The noun for the keyword in the message.
        elsewhere: Argument names of other libraries, each with the argument's name here.

    >>> @checks_keywords("argument of halved")
    ... def halved(number: int) -> float:
    ...     return number / 2
    >>> halved(numbr=3)
    Traceback (most recent call last):
    TypeError: unknown argument of halved 'numbr', did you mean 'number'? Valid: number
    """

    def decorated(function: Callable[_P, _T]) -> Callable[_P, _T]:
        valid = [name for name in inspect.signature(function).parameters if name != "self"]

        @functools.wraps(function)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            for name in kwargs:
                if name not in valid:
                    raise TypeError(str(unknown(kind, name, valid, elsewhere.get(name, ""))))
            return function(*args, **kwargs)

        return checked

    return decorated


def make(
    kind: str,
    table: Mapping[str, Callable[..., _T]],
    name: str,
    arguments: Mapping[str, Any],
    also: Sequence[str] = (),
) -> _T:
    """Checks `name` and the names of the arguments, and then calls `table[name](**arguments)`.

    Args:
        also: Names of arguments that the caller has already handled. An error about an unknown
            argument lists these names, too.

    Raises:
        ValueError: The name or an argument is unknown, or an argument is missing. Errors of the
            function itself are not caught.
    """
    if name not in table:
        raise unknown(kind, name, table)
    parameters = inspect.signature(table[name]).parameters
    named = {key: p for key, p in parameters.items() if p.kind not in _VARIADIC}
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for argument in arguments:
            if argument not in named:
                raise unknown(f"argument of {kind} {name}", argument, [*named, *also])
    missing = [p.name for p in named.values() if p.default is p.empty and p.name not in arguments]
    if missing:
        raise ValueError(f"{kind} {name} needs {', '.join(missing)}")
    return table[name](**arguments)


def plain_types(value: object, hint: Any) -> str:
    """Returns "" if `value` has one of the types in the annotation `hint`; otherwise returns all
    these types as text. Checks only bool, int, float, str and None: if `hint` contains another
    type, returns "".

    An int counts as a float, but a bool does not count as an int.

    >>> plain_types("x", int | None), plain_types(3, float), plain_types(True, int)
    ('a whole number', '', 'a whole number')
    """
    kinds = {hint}
    if get_origin(hint) in (Union, UnionType):
        kinds = set(get_args(hint))
    accepted = set(kinds)
    if float in kinds:
        accepted.add(int)
    if not kinds <= {*_PLAIN, NoneType} or type(value) in accepted:
        return ""
    return " or ".join(sorted(_PLAIN[kind] for kind in kinds if kind is not NoneType))


def require_range(name: str, value: Any, below: float = math.inf) -> None:
    """Raises `ValueError` unless `value` is a number of at least 0 and less than `below`, or a
    tensor that holds one such number.

    >>> require_range("momentum", "0.9", below=1)
    Traceback (most recent call last):
    ValueError: momentum is '0.9', must be a number from 0 to below 1
    >>> require_range("lr", -1)
    Traceback (most recent call last):
    ValueError: lr is -1, must be a number of at least 0
    """
    try:
        fits = type(value) not in (str, bool) and 0 <= float(value) < below
    except (TypeError, ValueError, RuntimeError):  # a tensor of several numbers raises RuntimeError
        fits = False
    if not fits:
        range_text = "of at least 0" if below == math.inf else f"from 0 to below {below}"
        raise ValueError(f"{name} is {value!r}, must be a number {range_text}")


def find_function(
    kind: str, name: str, table: Mapping[str, Callable[..., _T]]
) -> Callable[..., _T]:
    """Returns the function called `name` in `table`, or the function that "package.module:function"
    names.

    Raises `ValueError` for any other name; `kind` is the noun for the function in the message.

    >>> find_function("number", "math:floor", {"int": int})(2.5)
    2
    >>> find_function("number", "imt", {"int": int})
    Traceback (most recent call last):
    ValueError: unknown number 'imt', did you mean 'int'? Valid: int; or package.module:function
    """
    if ":" in name:
        return imported(name)
    if name not in table:
        raise ValueError(f"{unknown(kind, name, table)}; or package.module:function")
    return table[name]


def imported(name: str) -> Callable[..., Any]:
    """Returns the function that "package.module:function" names.

    Raises:
        ValueError: The module does not exist, or has no such function. Errors of the module itself
            are not caught.
    """
    module, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), attribute)):
        raise ValueError(f"{name!r} does not name a function, must be package.module:function")
    try:
        home = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"{name}: no module named {error.name}; it must be installed or be in this directory"
        ) from error
    if not hasattr(home, attribute):
        raise ValueError(f"{name}: module {module} has no function {attribute!r}")
    found = getattr(home, attribute)
    if not callable(found):
        raise ValueError(f"{name} is {found!r}, must be a function")
    return found  # type: ignore[no-any-return]
