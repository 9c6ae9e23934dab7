"""Chooses an engine: the first registered engine that supports a codec, else plain torch."""

from detonation.core.codec.codec import Codec
from detonation.core.engine.reference import ReferenceEngine
from detonation.core.engine.rows_at_once import Room
from detonation.core.flat.layout import Layout
from detonation.core.memory import Memory
from detonation.core.runtime import Runtime
from detonation.plugins import plugins


def engine_for(
    codec: Codec, layout: Layout, memory: Memory | None, runtime: Runtime, room: Room | None = None
) -> ReferenceEngine:
    """The first engine that supports `codec` with at most `room` bytes of temporaries; plain torch
    if there are no kernels.

    Engines of installed packages are tried first, then the built-in ones from fastest to slowest.
    """
    for make in plugins("engines"):  # plugins are imported only now, because the import is slow
        engine: ReferenceEngine | None = make(codec, layout, memory, runtime, room)
        if engine:
            return engine
    return ReferenceEngine(codec, layout, memory, runtime, room)
