"""Formats numbers and texts for people. Imports nothing but the standard library."""

from collections.abc import Mapping
from math import isfinite
from typing import Any


def size_text(count: float) -> str:
    """Formats a number of bytes, in powers of 1000.

    >>> size_text(0), size_text(184_680), size_text(2_363_904)
    ('0 B', '184.7 kB', '2.4 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.95:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def factor(value: float | None) -> str:
    """Formats a reduction factor; None, where nothing was sent, is "-".

    >>> factor(12.8), factor(1180.4), factor(None)
    ('x12.8', 'x1,180', '-')
    """
    if value is None:
        return "-"
    return f"x{value:.1f}" if value < 99.95 else f"x{value:,.0f}"


def loss_text(loss: float | None) -> str:
    """Formats a loss; one that was not measured is "-", and one that is not finite says what
    happened.

    >>> loss_text(2.31), loss_text(None), loss_text(float("nan"))
    ('2.3100', '-', 'diverged')
    """
    if loss is None:
        return "-"
    return f"{loss:.4f}" if isfinite(loss) else "diverged"


def equality(summary: Mapping[str, Any], yes: str = "yes", no: str = "no") -> str:
    """Says whether the replicas of a run were equal at its end, and of close ones how far apart
    they were.

    >>> equality({"replicas_equal": True}), equality({"replicas_equal": False, "replicas_apart": 2.5e-7})
    ('yes', 'close, 2.5e-07 of a norm apart')
    """
    close = (
        f"close, {summary['replicas_apart']:.1e} of a norm apart"
        if "replicas_apart" in summary
        else no
    )
    return yes if summary["replicas_equal"] else close


def less_text(value: float | None) -> str:
    """Says a reduction factor in words; "" where nothing was sent.

    >>> less_text(12.8), less_text(1.0), less_text(None)
    ('x12.8 less', 'nothing saved', '')
    """
    if value is None:
        return ""
    return f"{factor(value)} less" if value >= 1.05 else "nothing saved"


def rate(bits_per_s: float) -> str:
    """Formats a bit rate.

    >>> rate(1.25e8), rate(9.4e9), rate(56e3)
    ('125 Mbit/s', '9.4 Gbit/s', '56 kbit/s')
    """
    for unit in ("bit/s", "kbit/s", "Mbit/s"):
        if bits_per_s < 999.5:
            return f"{bits_per_s:.3g} {unit}"
        bits_per_s /= 1000
    return f"{bits_per_s:.3g} Gbit/s"


def duration(seconds: float) -> str:
    """Formats a duration.

    >>> duration(0.00042), duration(0.158), duration(95), duration(7200), duration(1e6)
    ('0.42 ms', '158 ms', '95 s', '2 h', '11.6 days')
    """
    for limit, unit, size in (
        (0.9995, "ms", 1e-3),
        (600, "s", 1),
        (5400, "min", 60),
        (172800, "h", 3600),
    ):
        if seconds < limit:
            return f"{seconds / size:.3g} {unit}"
    return (
        f"{seconds / 86400:,.3g} days" if seconds < 86400 * 999 else f"{seconds / 86400:,.0f} days"
    )


def printable(text: str) -> str:
    r"""Escapes the characters of `text` that are not printed but done, and bytes of file names that
    are no text.

    A name from elsewhere must not move the cursor, turn the line round, or end it.

    >>> printable("run-1 café"), printable("\x1b]0;mine\x07\n"), printable("a\u202eb\udcff")
    ('run-1 café', '\\x1b]0;mine\\x07\\n', 'a\\u202eb\\udcff')
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shortened(text: str, length: int = 44) -> str:
    """Replaces the middle of a text that is longer than `length`.

    >>> shortened("quick-lm-demo-20261120-125504", 20)
    'quick-lm-d…20-125504'
    """
    half = (length - 1) // 2
    return text if len(text) <= length else f"{text[: length - 1 - half]}…{text[-half:]}"
