"""Formats numbers and texts for people. Imports only the standard library."""

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
            if unit == "B":
                return f"{count:.0f} B"
            return f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def factor(value: float | None) -> str:
    """Formats a reduction factor; "-" for None, which means that no bytes were sent.

    >>> factor(12.8), factor(1180.4), factor(None)
    ('x12.8', 'x1,180', '-')
    """
    if value is None:
        return "-"
    if value < 99.95:
        return f"x{value:.1f}"
    return f"x{value:,.0f}"


def loss_text(loss: float | None) -> str:
    """Formats a loss; "-" if it was not measured, "diverged" if it is not finite.

    >>> loss_text(2.31), loss_text(None), loss_text(float("nan"))
    ('2.3100', '-', 'diverged')
    """
    if loss is None:
        return "-"
    if isfinite(loss):
        return f"{loss:.4f}"
    return "diverged"


def equality(summary: Mapping[str, Any], yes: str = "yes") -> str:
    """Describes in words whether the replicas of a run were equal, or how far they were apart. The
    result is "" if an elastic run ended with one replica.

    >>> equality({"replicas_equal": True}), equality({"replicas_equal": True, "replicas_left": 1})
    ('yes', '')
    >>> equality({"replicas_equal": False, "replicas_apart": 2.5e-7})
    'close, 2.5e-07 of a norm apart'
    """
    if summary.get("replicas_left") == 1:
        return ""
    if summary["replicas_equal"]:
        return yes
    if "replicas_apart" in summary:
        return f"close, {summary['replicas_apart']:.1e} of a norm apart"
    return "no"


def world_text(summary: Mapping[str, Any]) -> str:
    """Describes the replicas and shards of a run. For an elastic run whose replicas have changed,
    also says how many replicas were lost, left on request, and joined.

    >>> run = {"replicas": 2, "shards": 1, "replicas_left": 2, "losses": []}
    >>> world_text(run)
    '2 replicas x 1 shards'
    >>> changes = {"losses": [{"replicas": [1]}], "joined": [{"replicas": [2]}]}
    >>> world_text({**run, **changes})
    '2 replicas x 1 shards at the start, 2 replicas at the end: 1 lost, 1 joined'
    """
    start = f"{summary['replicas']} replicas x {summary['shards']} shards"
    changes = membership_changes(summary)
    if not changes:
        return start
    left = summary["replicas_left"]
    end = f"{left} replica{'s' * (left != 1)} at the end"
    counts = ", ".join(f"{count} {what}" for what, count in changes.items())
    return f"{start} at the start, {end}: {counts}"


def membership_changes(summary: Mapping[str, Any]) -> dict[str, int]:
    """Returns how many replicas of an elastic run were lost, left on request, and joined. Omits
    counts that are 0.

    >>> losses = [{"replicas": [0, 1]}, {"replicas": [2], "left": True}]
    >>> membership_changes({"losses": losses})
    {'lost': 2, 'left': 1}
    """
    counts = dict.fromkeys(("lost", "left", "joined"), 0)
    for loss in summary.get("losses", ()):
        kind = "lost"
        if loss.get("left"):
            kind = "left"
        counts[kind] += len(loss["replicas"])
    counts["joined"] = sum(len(each["replicas"]) for each in summary.get("joined", ()))
    return {what: count for what, count in counts.items() if count}


def less_text(value: float | None) -> str:
    """Describes a reduction factor in words; "" if no bytes were sent.

    >>> less_text(12.8), less_text(1.0), less_text(None)
    ('x12.8 less', 'nothing saved', '')
    """
    if value is None:
        return ""
    if value >= 1.05:
        return f"{factor(value)} less"
    return "nothing saved"


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
    if seconds < 86400 * 999:
        return f"{seconds / 86400:,.3g} days"
    return f"{seconds / 86400:,.0f} days"


def printable(text: str) -> str:
    r"""Escapes control characters in `text`, and bytes of file names that are not UTF-8.

    A name from another user must not move the cursor, reverse the line, or end it.

    >>> printable("run-1 café"), printable("\x1b]0;mine\x07\n"), printable("a\u202eb\udcff")
    ('run-1 café', '\\x1b]0;mine\\x07\\n', 'a\\u202eb\\udcff')
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shortened(text: str, length: int = 44) -> str:
    """Replaces the middle of a text by "…" if the text is longer than `length`.

    >>> shortened("quick-lm-demo-20261120-125504", 20)
    'quick-lm-d…20-125504'
    """
    half = (length - 1) // 2
    if len(text) <= length:
        return text
    return f"{text[: length - 1 - half]}…{text[-half:]}"
