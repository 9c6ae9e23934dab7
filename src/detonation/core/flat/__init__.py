"""Flat: the local shards of many parameters as one `[rows, chunk]` matrix. A row holds a chunk or a
tile, and buckets are parts of the matrix.

This is the lowest layer of core: it imports no other package of core, and every other package of
core may import it.
"""
