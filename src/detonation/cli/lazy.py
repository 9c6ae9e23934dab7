"""Imports that load when something of them is used: `detonation plan` without a recipe is arithmetic."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


class _LazyModule(ModuleType):
    """Stands for a module: loads it when an attribute is used, and hands attributes on.

    `importlib.util.LazyLoader` loads at the second `import` of a name, which reads `__spec__`; this does not.
    """

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


@contextmanager
def lazy_import(name: str) -> Iterator[None]:
    """Inside the block `import name` is free; the module loads when code that was imported there uses it.

    The block may only import modules that import no submodule of `name`, because a package that loads in the middle of
    the import of its submodule would load that twice.

    >>> with lazy_import("wave"):
    ...     import wave
    >>> "wave" in sys.modules, wave.open.__module__, "wave" in sys.modules
    (False, 'wave', True)
    """
    spec = None if name in sys.modules else importlib.util.find_spec(name)
    if spec is None:
        yield
        return
    module = sys.modules[name] = _LazyModule(name)
    module.__spec__, module.__file__ = spec, spec.origin
    try:
        yield
    finally:
        if sys.modules.get(name) is module:
            del sys.modules[name]
