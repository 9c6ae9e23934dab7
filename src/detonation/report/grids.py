"""Tables as HTML."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any


def grid(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: bool = False, marked: str = "") -> str:
    """A table whose first column names its rows; cells are HTML. `numbers` do not wrap; `marked`: one row."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(_row(row, " class=marked" if row[0] == marked else "") for row in rows)
    thead = f"<thead><tr>{top}</tr></thead>\n" if head else ""
    table = f"<table{' class=numbers' * numbers}>\n{thead}<tbody>{body}</tbody></table>"
    return f'<div class="wide" tabindex="0">{table}</div>'  # it can be scrolled with the keyboard, too


def _row(cells: Sequence[str], kind: str) -> str:
    return f"<tr{kind}><th>{cells[0]}</th>{''.join(f'<td>{cell}</td>' for cell in cells[1:])}</tr>\n"


def side_by_side(names: Sequence[str], tables: Sequence[Mapping[str, Any]]) -> str:
    """What `tables` do not have in common, a column each; empty where there is nothing. `names` are HTML."""
    flats = [flat(table) for table in tables]
    keys = [key for key in dict.fromkeys(k for one in flats for k in one) if len({one.get(key) for one in flats}) > 1]
    rows = [(escape(key), *(escape(one.get(key, "-")) for one in flats)) for key in keys]
    return grid(["", *names], rows) if rows else ""


def in_common(tables: Sequence[Mapping[str, Any]]) -> str:
    """What all of `tables` say, and say alike; empty where there is nothing."""
    first, *others = [flat(table) for table in tables]
    rows = [(escape(k), escape(v)) for k, v in first.items() if all(other.get(k) == v for other in others)]
    return grid([], rows) if rows else ""


def flat(table: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """`table` and the tables in it as one, with texts.

    >>> flat({"seed": 0, "scheme": {"name": "demo"}, "gpus": []})
    {'seed': '0', 'scheme.name': 'demo', 'gpus': 'none'}
    """
    found: dict[str, str] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{before}{key}.")
        elif isinstance(value, list) and all(isinstance(item, Mapping) for item in value) and value:
            for i, item in enumerate(value):
                found |= flat(item, f"{before}{key}.{i}.")
        else:
            found[before + key] = _text(value)
    return found


def _text(value: Any) -> str:
    if value is None or value == []:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
