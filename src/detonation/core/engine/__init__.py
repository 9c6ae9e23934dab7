"""Engines: for one replica, an engine encodes signals, subtracts the sent values from the memory of
unsent values, and decodes messages. Engines in plain torch and compiled engines must compute the
same bits.

`engine_for` chooses an engine. The channel and the self-test call the engine. An engine knows the
memory of unsent values and the codec, but nothing of network links.
"""

from detonation.core.engine.inspector import SignalInspector
from detonation.core.engine.reference import ReferenceEngine, engine_for
from detonation.core.engine.rows_at_once import Room, replied_at_once
