"""Flat: the local shards of many parameters as one `[rows, chunk]` matrix, in chunks or tiles,
whole or in buckets.

This is the lowest layer of core: it imports no other package of core, and every other package of
core may import it.
"""
