"""Numbers in words for people. Pure Python; imports nothing."""


def size(count: float) -> str:
    """A number of bytes for people, in powers of 1000.

    >>> size(0), size(184_680), size(2_363_904)
    ('0 B', '184.7 kB', '2.4 MB')
    """
    for unit in ("B", "kB", "MB"):
        if count < 999.95:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def factor(value: float | None) -> str:
    """How many times less was sent; `-` when nothing was.

    >>> factor(12.8), factor(1180.4), factor(None)
    ('x12.8', 'x1,180', '-')
    """
    if value is None:
        return "-"
    return f"x{value:.1f}" if value < 99.95 else f"x{value:,.0f}"
