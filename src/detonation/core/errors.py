"""The base class of this library's errors. The ground floor of core: every room may import it."""


class DetonationError(Exception):
    """An error that this library names: `except detonation.DetonationError` catches all of them.

    Each keeps the built-in class that fits it as a second base: `Mismatch` is a `ValueError`, `Desync` a
    `RuntimeError`. A wrong argument is a plain `ValueError` or `TypeError`, as everywhere in Python.

    Example:
        >>> import detonation as dt
        >>> issubclass(dt.Mismatch, dt.DetonationError), issubclass(dt.Mismatch, ValueError)
        (True, True)
    """
