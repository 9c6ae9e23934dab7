"""DeToNATION: trains PyTorch models that are sharded inside nodes, and exchanges compressed updates
between nodes.

`__init__.pyi` lists the public names. Each name is imported at its first use, so that `detonation
--help` does not wait for torch. No module of the package imports this module.
"""

# Import no module of the package here: Ctrl-C prints a traceback until `interrupts.end_at_once`
# has run.
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
        # `from detonation import name` would drop the text of an AttributeError
        raise ImportError(
            f"{name} belongs to the package detonation 0.5, but this is DeToNATION, which has"
            " another interface: docs/tutorials/from-detonation-0.5.md names what to write here"
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
