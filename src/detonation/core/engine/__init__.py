"""Engines: encode, release and decode of one replica, in plain torch, in blocks, or compiled, under
the same laws.

`engine_for` chooses one. The channel and the self-test call an engine; it knows memory and codec,
but no link.
"""
