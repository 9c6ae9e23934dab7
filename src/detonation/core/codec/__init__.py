"""Codec: basis x selection x precision and aggregation, pure functions between a flat and a
message.

Each part is a frozen choice behind a Protocol, so that one's own fits in. Everything above may call
it.
"""
