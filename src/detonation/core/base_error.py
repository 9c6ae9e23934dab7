"""The base class of this library's errors. Every other module may import it."""


class DetonationError(Exception):
    """Base class of all errors of this library. `except detonation.errors.DetonationError` catches
    all these errors.

    Each error also has a fitting built-in base class: `Mismatch` is a `ValueError`, `Desync` a
    `RuntimeError`. A wrong argument raises a plain `ValueError` or `TypeError`, as usual in Python.

    Example:
        >>> import detonation as dt
        >>> issubclass(dt.errors.Mismatch, dt.errors.DetonationError)
        True
        >>> issubclass(dt.errors.Mismatch, ValueError)
        True
    """
