"""Writes the small part of TOML that a configuration needs: tables of texts, numbers, truths and arrays of them."""

import json
import math
from collections.abc import Mapping
from typing import Any


def dumps(table: Mapping[str, Any]) -> str:
    """`table` as TOML; `tomllib.loads(dumps(table)) == table`.

    >>> print(dumps({"seed": 0, "scheme": {"name": "demo", "topk": 4}}), end="")
    seed = 0
    <BLANKLINE>
    [scheme]
    name = "demo"
    topk = 4
    """
    lines = [f"{_key(key)} = {_value(value)}" for key, value in table.items() if not _tables(value)]
    for key, value in table.items():
        header = f"[{_key(key)}]" if isinstance(value, dict) else f"[[{_key(key)}]]"
        for inner in _tables(value):
            lines += ["", header, *(f"{_key(name)} = {_value(item)}" for name, item in inner.items())]
    return "\n".join(lines).lstrip("\n") + "\n"


def _tables(value: Any) -> list[dict[str, Any]]:
    """The tables that `value` is written as: itself, or each of a list of them."""
    if isinstance(value, dict):
        return [value]
    return value if isinstance(value, list) and all(isinstance(item, dict) for item in value) else []


def _key(key: str) -> str:
    bare = key and all(c.isascii() and (c.isalnum() or c in "-_") for c in key)
    return key if bare else _text(key)


def _text(text: str) -> str:
    # JSON's escapes are TOML's, except that JSON lets DEL through.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else f"{value}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(item) for item in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_value(inner)}" for key, inner in value.items()) + "}"
    raise ValueError(f"a configuration cannot hold {value!r} of type {type(value).__name__}")
