"""Flat: the local shards of many parameters as one `[rows, chunk]` matrix, in chunks or tiles,
whole or in buckets.

The ground floor of core: it imports nothing of the package, and every other room may call it.
"""
