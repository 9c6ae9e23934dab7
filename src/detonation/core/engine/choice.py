"""The choice of an engine: the first registered one that can run a codec, else ordinary torch."""

from detonation.choices import imported
from detonation.core.codec.codec import Codec
from detonation.core.engine.reference import ReferenceEngine
from detonation.core.engine.rows_at_once import Room
from detonation.core.flat.layout import Layout
from detonation.core.memory import Memory
from detonation.core.runtime import Runtime

ENGINES = [
    "detonation.engines.triton:triton_engine",
    "detonation.engines.native_engine:native_engine",
]
"""Functions that make an engine, or return None, from the arguments of `engine_for`; the fastest
first."""


def engine_for(
    codec: Codec, layout: Layout, memory: Memory | None, runtime: Runtime, room: Room | None = None
) -> ReferenceEngine:
    """The fastest engine that can run `codec` with temporaries of at most `room`; ordinary torch
    without kernels."""
    for name in ENGINES:  # imported here, on first use
        engine: ReferenceEngine | None = imported(name)(codec, layout, memory, runtime, room)
        if engine:
            return engine
    return ReferenceEngine(codec, layout, memory, runtime, room)
