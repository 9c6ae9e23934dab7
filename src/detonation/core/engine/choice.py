"""The choice of an engine: the first registered one that can run a codec, or else ordinary torch."""

from importlib import import_module

from detonation.core.codec.codec import Codec
from detonation.core.engine.reference import ReferenceEngine
from detonation.core.engine.rows_at_once import Room
from detonation.core.flat.layout import Layout
from detonation.core.memory import Memory
from detonation.core.runtime import Runtime

ENGINES = ["detonation.engines.triton:triton_engine", "detonation.engines.native_engine:native_engine"]
"""Functions that make an engine, or None, of the arguments of `engine_for`, by module; the fastest first."""


def engine_for(
    codec: Codec, layout: Layout, memory: Memory | None, runtime: Runtime, room: Room | None = None
) -> ReferenceEngine:
    """The fastest engine that can run `codec`; ordinary torch where kernels are disabled or cannot be built.

    Args:
        room: The memory that an accelerator may take; that of all rows when left out.
    """
    for module, _, function in (name.partition(":") for name in ENGINES):  # imported no earlier than here
        make = getattr(import_module(module), function)
        engine: ReferenceEngine | None = make(codec, layout, memory, runtime, room)
        if engine is not None:
            return engine
    return ReferenceEngine(codec, layout, memory, runtime, room)
