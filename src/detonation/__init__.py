"""DeToNATION: train PyTorch models sharded inside the node, and let nodes exchange only what
matters.

The public names stand in `__init__.pyi` and are loaded on first use, so that `detonation --help`
does not wait for torch. Users import this face; nothing inside the package does.
"""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

_STUB = Path(__file__).with_suffix(".pyi").read_text()
_MODULE_OF = {
    name: module for module, name in re.findall(r"^from (\S+) import (\w+) as", _STUB, re.MULTILINE)
}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'detonation' has no attribute {name!r}")
    if _MODULE_OF[name] == "detonation":
        return import_module(f"detonation.{name}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
