"""Engines: they encode, release and decode for one replica, in plain torch, in blocks, or compiled,
under the same laws.

`engine_for` chooses an engine. The channel and the self-test call it. An engine knows memory and
codec, but no link.
"""

from detonation.core.engine.inspector import SignalInspector
from detonation.core.engine.reference import ReferenceEngine, engine_for
from detonation.core.engine.rows_at_once import Room, replied_at_once
