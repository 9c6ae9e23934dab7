"""Engines: one replica's encode, release and decode, in ordinary torch, in blocks, or compiled,
under the same laws.

`engine_for` chooses. Called by the channel and by the self-test; an engine knows memory and codec,
and no link.
"""
