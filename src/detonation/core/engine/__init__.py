"""Engines: one replica's encode, release and decode, in ordinary torch, in blocks, or compiled,
under the same laws.

`engine_for` chooses. Called by the channel and by the self-test; an engine knows memory and codec,
and no link.
"""

from detonation.core.engine.inspector import SignalInspector
from detonation.core.engine.reference import ReferenceEngine, engine_for
from detonation.core.engine.rows_at_once import Room, replied_at_once
