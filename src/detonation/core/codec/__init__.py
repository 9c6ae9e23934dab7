"""Codec: basis x selection x precision, and aggregation. Encoding and decoding are pure functions
between a flat and a message.

Each part is a frozen dataclass behind a Protocol, so users can write their own.
"""
