"""The choice of an engine: the first registered one that can run a codec, else ordinary torch."""

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
    """The first engine that can run `codec` with temporaries of at most `room`; ordinary torch
    without kernels.

    Engines of installed packages are asked first, then the built-in ones, the fastest first.
    """
    for make in plugins("engines"):  # imported no earlier than here
        engine: ReferenceEngine | None = make(codec, layout, memory, runtime, room)
        if engine:
            return engine
    return ReferenceEngine(codec, layout, memory, runtime, room)
