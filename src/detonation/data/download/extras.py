"""Imports optional packages where they are used."""

from importlib import import_module
from types import ModuleType


def needs(module: str, extra: str) -> ModuleType:
    """Imports an optional module; raises `ValueError` with the `extra` that installs it where it is missing.

    >>> needs("json", "data").__name__
    'json'
    >>> needs("no_such_package", "data")
    Traceback (most recent call last):
    ValueError: this data needs no_such_package: pip install 'detonation-torch[data]'
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0].replace("PIL", "pillow")
        raise ValueError(f"this data needs {package}: pip install 'detonation-torch[{extra}]'") from error
