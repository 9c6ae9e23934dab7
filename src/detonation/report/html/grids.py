"""HTML tables."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any


def grid(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: bool = False, marked: str = "") -> str:
    """Formats a table; the first cell of each row is its header.

    Args:
        head, rows: Cells as HTML; without `head` the table has no header row.
        numbers: Cells do not wrap.
        marked: The header of the row to be highlighted.
    """
    top = "".join(f"<th>{cell}</th>" for cell in head)
    thead = f"<thead><tr>{top}</tr></thead>\n" if head else ""
    body = ""
    for first, *cells in rows:
        mark = " class=marked" if first == marked else ""
        body += f"<tr{mark}><th>{first}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>\n"
    table = f"<table{' class=numbers' * numbers}>\n{thead}<tbody>{body}</tbody></table>"
    return f'<div class="wide" tabindex="0">{table}</div>'  # tabindex: the keyboard can scroll it


def side_by_side(names: Sequence[str], tables: Sequence[Mapping[str, Any]]) -> str:
    """Formats the entries that differ between `tables`, one column per table; "" where none does. `names` are HTML."""
    flats = [flattened(table) for table in tables]
    every = dict.fromkeys(key for flat in flats for key in flat)
    keys = [key for key in every if len({flat.get(key) for flat in flats}) > 1]
    rows = [(escape(key), *(escape(flat.get(key, "-")) for flat in flats)) for key in keys]
    return grid(["", *names], rows) if rows else ""


def in_common(tables: Sequence[Mapping[str, Any]]) -> str:
    """Formats the entries that are equal in all `tables`; "" where there are none."""
    first, *others = [flattened(table) for table in tables]
    rows = [(escape(k), escape(v)) for k, v in first.items() if all(other.get(k) == v for other in others)]
    return grid([], rows) if rows else ""


def flattened(table: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Joins nested tables into one with dotted keys; values become text.

    >>> flattened({"seed": 0, "scheme": {"name": "demo"}, "gpus": []})
    {'seed': '0', 'scheme.name': 'demo', 'gpus': 'none'}
    """
    entries: dict[str, str] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            entries |= flattened(value, f"{before}{key}.")
        elif isinstance(value, list) and all(isinstance(item, Mapping) for item in value) and value:
            for i, item in enumerate(value):
                entries |= flattened(item, f"{before}{key}.{i}.")
        else:
            entries[before + key] = _text(value)
    return entries


def _text(value: Any) -> str:
    if value is None or value == []:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
