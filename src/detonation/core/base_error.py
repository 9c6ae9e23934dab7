"""The base class of this library's errors. Every other module may import it."""


class DetonationError(Exception):
    """An error that this library names: `except detonation.errors.DetonationError` catches all of
    them.

    Each keeps the built-in class that fits it as a second base: `Mismatch` is a `ValueError`,
    `Desync` a `RuntimeError`. A wrong argument is a plain `ValueError` or `TypeError`, as
    everywhere in Python.

    Example:
        >>> import detonation as dt
        >>> issubclass(dt.errors.Mismatch, dt.errors.DetonationError)
        True
        >>> issubclass(dt.errors.Mismatch, ValueError)
        True
    """
