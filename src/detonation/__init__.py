"""DeToNATION: trains PyTorch models that are sharded inside nodes, and exchanges compressed updates
between nodes.

`__init__.pyi` lists the public names. Each name is imported at its first use, so that `detonation
--help` does not wait for torch. No module of the package imports this module.
"""

# Import no module of the package here, because Ctrl-C during these imports prints a traceback.
with open(f"{__file__.removesuffix('.py')}.pyi") as _stub:  # noqa: PTH123
    _WORDS = [line.split() for line in _stub if line.startswith("from ")]
_MODULE_OF = {words[3]: words[1] for words in _WORDS}
__all__ = sorted(_MODULE_OF)
_OF_0_5 = {
    "DCTCompress",
    "DCTTransform",
    "DeMo",
    "DeMoReplicator",
    "DeToAdamW",
    "DeToSGD",
    "FullReplicator",
    "NoReplicator",
    "Optimizers",
    "RandomReplicator",
    "Replicator",
    "SlicingReplicator",
    "StridingReplicator",
    "prepare_detonation",
}


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name in _OF_0_5:
        # not an AttributeError, because `from detonation import name` drops its text
        raise ImportError(
            f"{name} belongs to the package detonation 0.5, but this is DeToNATION, which has"
            " another interface: docs/tutorials/from-detonation-0.5.md says what to use instead"
        )
    if name not in _MODULE_OF:
        text = (
            f"module 'detonation' has no attribute {name!r}: import schemes from detonation.schemes"
        )
        raise AttributeError(text)
    if _MODULE_OF[name] == "detonation":
        return import_module(f"detonation.{name}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
